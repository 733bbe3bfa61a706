"""The plug-in for axolotl, against a small copy of what axolotl calls; ``fake_axolotl`` names version and files."""

import inspect
import types

import fake_axolotl
import pytest
import torch
from fake_axolotl import (
    AxolotlDPOTrainer,
    AxolotlGRPOTrainer,
    AxolotlRewardTrainer,
    AxolotlTrainer,
    BasePlugin,
    DictDefault,
    HFCausalTrainerBuilder,
    HFRLTrainerBuilder,
    PluginManager,
)
from models import make_model, make_rows
from pydantic import ValidationError
from trainers import arguments, assert_same_weights, logged, tight
from transformers import Trainer, TrainingArguments

from hf_patrickstar import PatrickStarTrainerMixin
from hf_patrickstar.errors import ConfigError

PATH = "hf_patrickstar.integrations.axolotl.PatrickStarPlugin"


@pytest.fixture
def plugin(monkeypatch):
    """The plug-in as axolotl's ``prepare_plugins`` makes and registers it."""
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


def test_its_keys_are_read_from_the_yaml(plugin):
    config = fake_axolotl.merge_input_args()(
        base_model="tiny", patrickstar=True, patrickstar_config={"device_budget": "1GiB"}, patrickstar_logging=False
    )
    assert config.patrickstar_config == {"device_budget": "1GiB"}
    assert fake_axolotl.merge_input_args()(base_model="tiny").patrickstar is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"patrickstar_config": {}}, "add 'patrickstar: true'"),
        ({"patrickstar": True, "deepspeed": "zero3.json"}, "together with 'deepspeed'"),
        ({"patrickstar": True, "patrickstar_config": {"device_buget": "1GiB"}}, "device_buget"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_is_read(plugin, keys, message):
    with pytest.raises(ValidationError, match=message):
        fake_axolotl.merge_input_args()(base_model="tiny", **keys)


def test_it_trains_the_same_with_chunks(plugin, tmp_path):
    runs = []
    for chunked in (False, True):
        model, rows = make_model("gpt2"), make_rows("gpt2", 64)
        cls, args_cls, kwargs = Trainer, TrainingArguments, {}
        if chunked:
            cfg = make_cfg(patrickstar_config=tight(), patrickstar_report=False)
            plugin.pre_model_load(cfg)
            assert cfg.device_map == "cpu"
            assert cfg.experimental_skip_move_to_device is True
            cls, args_cls = HFCausalTrainerBuilder(cfg)._get_trainer_cls(), fake_axolotl.merge_training_args()
            kwargs = plugin.get_training_args(cfg)
            assert type(kwargs["patrickstar_config"]) is dict
        trainer = cls(model=model, args=arguments(args_cls, tmp_path, **kwargs), train_dataset=rows)
        torch.manual_seed(1)
        trainer.train()
        runs.append(trainer)
    stock, ours = runs
    plugin.post_trainer_create(make_cfg(), ours)
    plugin.post_train(make_cfg(), ours.model)
    assert ours.model.patrickstar_engine is not None, "one process saves from chunks"
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


def test_the_trainer_that_axolotl_or_another_plugin_chooses_is_kept(plugin):
    class Own(Trainer):
        pass

    class Other(BasePlugin):
        def get_trainer_cls(self, cfg):
            return Own

    chosen = HFCausalTrainerBuilder(make_cfg(reward_model=True))._get_trainer_cls()
    assert issubclass(chosen, AxolotlRewardTrainer)
    PluginManager.get_instance().plugins["other"] = Other()
    chosen = HFCausalTrainerBuilder(make_cfg())._get_trainer_cls()
    assert issubclass(chosen, Own)
    assert issubclass(chosen, PatrickStarTrainerMixin)


@pytest.mark.parametrize(("rl", "base"), [("dpo", AxolotlDPOTrainer), ("grpo", AxolotlGRPOTrainer)])
def test_the_trainers_of_rl_get_their_model(plugin, rl, base):
    cfg = make_cfg(rl=rl)
    for _ in range(2):  # once for the model and once for the reference
        plugin.pre_model_load(cfg)
    chosen, positional = HFRLTrainerBuilder(cfg, model="the model")._get_trainer_cls({})
    assert issubclass(chosen, base)
    assert issubclass(chosen, PatrickStarTrainerMixin)
    assert positional == ["the model"]


class Foreign(AxolotlDPOTrainer):
    pass


class Derived(PatrickStarTrainerMixin, AxolotlDPOTrainer):
    pass


def test_a_trainer_class_of_the_users(plugin):
    cfg = make_cfg(rl="dpo", trainer_cls=f"{__name__}.Derived")
    plugin.pre_model_load(cfg)
    assert HFRLTrainerBuilder(cfg)._get_trainer_cls({})[0] is Derived
    with pytest.raises(ConfigError, match="Foreign' does not train in chunks; derive it"):
        plugin.pre_model_load(make_cfg(rl="dpo", trainer_cls=f"{__name__}.Foreign"))


def test_a_trainer_without_chunks_is_refused(plugin):
    with pytest.raises(ConfigError, match="trains with AxolotlTrainer, which another plug-in has chosen"):
        plugin.post_trainer_create(make_cfg(), AxolotlTrainer.__new__(AxolotlTrainer))


def test_with_several_processes_the_model_is_given_back_before_one_of_them_saves_it(plugin):
    calls = []
    sharing = types.SimpleNamespace(is_alone=False)
    engine = types.SimpleNamespace(
        manager=types.SimpleNamespace(sharing=sharing), detach=lambda: calls.append("detached")
    )
    plugin.post_train(make_cfg(), types.SimpleNamespace(patrickstar_engine=engine))
    assert calls == ["detached"]
    plugin.post_train(make_cfg(), types.SimpleNamespace())
