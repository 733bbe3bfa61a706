"""The plug-in for LLaMA-Factory's v1, against a small copy of what calls it; ``fake_llamafactory`` names the files."""

import copy
import sys
import types

import pytest
import torch
from support import fake_llamafactory
from support.fake_llamafactory import BasePlugin, BaseTrainer, InitPlugin, PluginConfig
from support.models import make_batch, make_model
from support.trainers import assert_same_weights, smallest_budget

from hf_patrickstar import ConfigError
from hf_patrickstar.errors import BudgetError

OPTIMIZER = {"name": "patrickstar_adamw", "lr": 5e-3}


@pytest.fixture(autouse=True)
def loaded(monkeypatch):
    """The module of the plug-in, which registers itself, and what was run."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return fake_llamafactory.install(monkeypatch)


def make_dist(**settings):
    return PluginConfig(name="patrickstar", **settings)


def make_batches(steps, start=0):
    return [[make_batch("llama", seed=10 * step + micro) for micro in range(2)] for step in range(start, steps)]


def make_trainer(ours):
    if not ours:
        return BaseTrainer(make_model("llama"))
    budget = 2 * smallest_budget(make_model("llama"), checkpointing=True)
    return BaseTrainer(make_model("llama"), make_dist(chunk_budget=budget, cp_size=1), PluginConfig(OPTIMIZER))


def assert_same(stock, ours):
    assert ours.losses == stock.losses
    assert ours.norms == stock.norms
    assert_same_weights(stock.model, ours.model)
    left, right = stock.optimizer.state_dict()["state"], ours.optimizer.state_dict()["state"]
    assert left.keys() == right.keys()
    for number, state in left.items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(right[number][name]))


def test_it_trains_the_same_with_chunks_and_so_does_a_resumed_run():
    stock, ours = make_trainer(False), make_trainer(True)
    for trainer in (stock, ours):
        trainer.fit(make_batches(2))
    saved = copy.deepcopy((ours.model.state_dict(), ours.optimizer.state_dict()))
    for trainer in (stock, ours):
        trainer.fit(make_batches(4, start=2))
    assert_same(stock, ours)
    assert ours.model.patrickstar_engine.stats()["chunk_evictions"] > 0
    resumed = make_trainer(True)
    resumed.model.load_state_dict(saved[0])
    resumed.optimizer.load_state_dict(saved[1])
    resumed.fit(make_batches(4, start=2))
    resumed.losses, resumed.norms = ours.losses[:4] + resumed.losses, ours.norms[:2] + resumed.norms
    assert_same(stock, resumed)


def test_bf16_of_the_yaml_is_the_engines(loaded):
    plugin, _ = loaded
    for bf16, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        model = plugin.ask_for_chunks(make_model("llama"), make_dist(), bf16=bf16)
        plugin.make_adamw(model, OPTIMIZER)
        assert model.patrickstar_engine.dtype == dtype


def test_the_model_is_read_to_the_host():
    assert InitPlugin("patrickstar_host")() == torch.device("cpu")
    assert set(BasePlugin.registry) == {"patrickstar", "patrickstar_adamw", "patrickstar_host"}


@pytest.mark.parametrize(("size", "settings", "message"), [("2", {}, "one"), ("1", {"buget": 1}, "buget")])
def test_what_cannot_work_is_refused(monkeypatch, size, settings, message):
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ConfigError, match=message):
        BaseTrainer(make_model("llama"), make_dist(**settings), PluginConfig(OPTIMIZER))


GOOD = {"dist_config": make_dist(), "optim_config": OPTIMIZER, "init_config": {"name": "patrickstar_host"}}


def start(plugin, monkeypatch, command="sft", **changes):
    """Runs the command with a YAML file that has these keys."""
    read = types.SimpleNamespace(**{**GOOD, **changes})
    config = types.SimpleNamespace(get_args=lambda: (read, None, read, None))
    monkeypatch.setitem(sys.modules, "llamafactory.v1.config", config)
    monkeypatch.setattr("sys.argv", ["llamafactory", command, "train.yaml"])
    plugin.main()


def test_the_command_runs_a_trainer_with_its_yaml(loaded, monkeypatch):
    plugin, ran = loaded
    start(plugin, monkeypatch)
    assert ran == [["train.yaml"]]


def fail():
    raise BudgetError("too small")


@pytest.mark.parametrize(
    ("command", "changes", "status", "message"),
    [
        ("ppo", {}, 2, "must be sft"),
        ("sft", {}, 1, "too small"),
        ("sft", {"dist_config": None}, 2, "dist_config: {name: patrickstar}"),
        ("sft", {"optim_config": {"name": "patrickstar_adamw"}}, 2, "add lr"),
        ("sft", {"init_config": {"name": "init_on_default"}}, 2, "init_config: {name: patrickstar_host}"),
    ],
)
def test_the_command_ends_with_one_sentence(loaded, monkeypatch, capsys, command, changes, status, message):
    plugin, ran = loaded
    monkeypatch.setattr(sys.modules["llamafactory.v1.trainers.sft_trainer"], "run_sft", fail)
    with pytest.raises(SystemExit) as end:
        start(plugin, monkeypatch, command, **changes)
    assert end.value.code == status
    err = capsys.readouterr().err
    assert message in err
    assert (err.count("\n"), ran) == (1, [])
