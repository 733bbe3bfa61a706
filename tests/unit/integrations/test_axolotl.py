"""The plug-in for axolotl, against a small copy of what axolotl calls; ``fake_axolotl`` names version and files."""

import inspect

import pytest
import torch
from pydantic import ValidationError
from support import fake_axolotl
from support.fake_axolotl import (
    AxolotlDPOTrainer,
    AxolotlGRPOTrainer,
    AxolotlTrainer,
    BasePlugin,
    DictDefault,
    HFCausalTrainerBuilder,
    HFRLTrainerBuilder,
    PluginManager,
)
from support.models import make_model, make_rows
from support.trainers import arguments, assert_same_weights, logged, tight
from transformers import Trainer, TrainingArguments

from hf_patrickstar import PatrickStarTrainerMixin
from hf_patrickstar.errors import ConfigError

PATH = "hf_patrickstar.integrations.axolotl.PatrickStarPlugin"


@pytest.fixture
def plugin(monkeypatch):
    """The plug-in as axolotl's ``prepare_plugins`` makes and registers it."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    fake_axolotl.install(monkeypatch)
    manager = PluginManager.get_instance()
    manager.register(PATH)
    return manager.plugins[PATH]


def make_cfg(**kwargs):
    """The configuration that axolotl hands to everything, once it has validated the YAML."""
    return DictDefault(base_model="tiny", plugins=[PATH], patrickstar=True, **kwargs)


def test_it_has_the_signatures_that_axolotl_calls(plugin):
    names = [name for name in vars(type(plugin)) if not name.startswith("_")]
    assert len(names) > 5
    for name in names:
        ours, theirs = getattr(type(plugin), name), getattr(BasePlugin, name)
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"patrickstar": True, "deepspeed": "zero3.json"}, "together with 'deepspeed'"),
        ({"patrickstar": True, "patrickstar_config": {"device_buget": "1GiB"}}, "device_buget"),
        ({"patrickstar": True}, "one process"),
        ({"patrickstar_config": {"device_budget": "1GiB"}}, "add 'patrickstar: true'"),
    ],
)
def test_what_cannot_work_is_refused_when_the_yaml_is_read(plugin, keys, message, monkeypatch):
    make = fake_axolotl.merge_input_args()
    assert make(base_model="tiny", patrickstar=True, patrickstar_config={"device_budget": "1GiB"}).patrickstar is True
    monkeypatch.setenv("WORLD_SIZE", "1" if len(keys) > 1 else "2")
    with pytest.raises(ValidationError, match=message):
        make(base_model="tiny", **keys)


def test_it_trains_the_same_with_chunks(plugin, tmp_path):
    runs = []
    for chunked in (False, True):
        cls, args_cls, kwargs = Trainer, TrainingArguments, {}
        if chunked:
            cfg = make_cfg(patrickstar_config=tight(), patrickstar_report=False)
            plugin.pre_model_load(cfg)
            assert (cfg.device_map, cfg.experimental_skip_move_to_device) == ("cpu", True)
            cls, args_cls = HFCausalTrainerBuilder(cfg)._get_trainer_cls(), fake_axolotl.merge_training_args()
            kwargs = plugin.get_training_args(cfg)
        args = arguments(args_cls, tmp_path, **kwargs)
        runs.append(cls(model=make_model("gpt2"), args=args, train_dataset=make_rows("gpt2", 64)))
        torch.manual_seed(1)
        runs[-1].train()
    stock, ours = runs
    plugin.post_trainer_create(make_cfg(), ours)
    assert ours.patrickstar_stats()["chunk_evictions"] > 0
    assert isinstance(ours, AxolotlTrainer)
    assert logged(ours, "loss") == logged(stock, "loss") != []
    assert_same_weights(stock.model, ours.model)


def test_without_its_key_it_changes_nothing(plugin):
    cfg = DictDefault(base_model="tiny", plugins=[PATH], rl="dpo", device_map="auto")
    plugin.pre_model_load(cfg)
    assert cfg == {"base_model": "tiny", "plugins": [PATH], "rl": "dpo", "device_map": "auto"}
    assert plugin.get_trainer_cls(cfg) is None
    assert plugin.get_training_args(cfg) == {}
    plugin.post_trainer_create(cfg, object())


@pytest.mark.parametrize(("rl", "base"), [("dpo", AxolotlDPOTrainer), ("grpo", AxolotlGRPOTrainer)])
def test_the_trainers_of_rl_get_their_model(plugin, rl, base):
    cfg = make_cfg(rl=rl)
    for _ in range(2):  # once for the model and once for the reference
        plugin.pre_model_load(cfg)
    chosen, positional = HFRLTrainerBuilder(cfg, model="the model")._get_trainer_cls({})
    assert issubclass(chosen, base)
    assert issubclass(chosen, PatrickStarTrainerMixin)
    assert positional == ["the model"]


@pytest.mark.parametrize("rl", [None, "dpo"])
def test_a_trainer_of_another_plugin_is_refused_before_a_model_is_read(plugin, rl):
    class Distilling(BasePlugin):
        def get_trainer_cls(self, cfg):
            return AxolotlDPOTrainer

    PluginManager.get_instance().plugins["distilling"] = Distilling()
    plugin.pre_model_load(DictDefault(base_model="tiny", plugins=[PATH], rl=rl))
    with pytest.raises(ConfigError, match=r"Distilling chooses AxolotlDPOTrainer.* remove it from 'plugins'"):
        plugin.pre_model_load(make_cfg(rl=rl))


def test_a_trainer_without_chunks_is_refused(plugin):
    with pytest.raises(ConfigError, match=r"AxolotlTrainer.*derive 'trainer_cls' from PatrickStarTrainerMixin"):
        plugin.post_trainer_create(make_cfg(), AxolotlTrainer.__new__(AxolotlTrainer))
