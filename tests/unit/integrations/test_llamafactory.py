"""The plug-in for LLaMA-Factory's v1, against a small copy of what calls it; ``fake_llamafactory`` names the files."""

import copy
import sys
import types

import fake_llamafactory
import pytest
import torch
from fake_llamafactory import BasePlugin, BaseTrainer, InitPlugin, PluginConfig
from models import make_batch, make_model
from trainers import assert_same_weights, smallest_budget

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


def test_the_model_is_read_to_the_host():
    assert InitPlugin("patrickstar_host")() == torch.device("cpu")
    assert set(BasePlugin.registry) == {"patrickstar", "patrickstar_adamw", "patrickstar_host"}


@pytest.mark.parametrize(
    ("dist", "optimizer", "message"),
    [
        (None, OPTIMIZER, r"add dist_config: \{name: patrickstar\}"),
        ({}, {"name": "patrickstar_adamw"}, "no 'lr'"),
        ({"cp_size": 2}, OPTIMIZER, "cp_size"),
        ({"device_buget": "1GiB"}, OPTIMIZER, "device_buget"),
    ],
)
def test_what_cannot_work_is_refused(dist, optimizer, message):
    with pytest.raises(ConfigError, match=message):
        BaseTrainer(make_model("llama"), None if dist is None else make_dist(**dist), PluginConfig(optimizer))


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="start one process"):
        BaseTrainer(make_model("llama"), make_dist(), PluginConfig(OPTIMIZER))


GOOD = {"dist_config": "patrickstar", "optim_config": "patrickstar_adamw", "init_config": "patrickstar_host"}


def give(monkeypatch, **names):
    """Lets LLaMA-Factory read a YAML with these names."""
    read = types.SimpleNamespace(**{key: name and PluginConfig(name=name) for key, name in {**GOOD, **names}.items()})
    config = types.SimpleNamespace(get_args=lambda: (read, None, read, None))
    monkeypatch.setitem(sys.modules, "llamafactory.v1.config", config)


def test_the_command_runs_a_trainer_with_its_yaml(loaded, monkeypatch):
    plugin, ran = loaded
    give(monkeypatch)
    for command in ("sft", "rm"):
        monkeypatch.setattr("sys.argv", ["llamafactory", command, "train.yaml"])
        plugin.main()
    assert ran == [("sft", ["train.yaml"]), ("rm", ["train.yaml"])]


def fail():
    raise BudgetError("too small")


@pytest.mark.parametrize(
    ("command", "names", "status", "message"),
    [
        ("ppo", {}, 2, "the command is 'ppo'; it must be sft or rm, followed by a YAML file"),
        ("sft", {}, 1, "too small"),
        (
            *("sft", {"optim_config": None}, 2),
            "optim_config does not have the name 'patrickstar_adamw', which training in chunks needs; "
            "set optim_config: {name: patrickstar_adamw, lr: 1.0e-5}",
        ),
        (
            *("sft", {"init_config": "init_on_default"}, 2),
            "init_config does not have the name 'patrickstar_host', which training in chunks needs; "
            "set init_config: {name: patrickstar_host}",
        ),
    ],
)
def test_the_command_ends_with_one_sentence(loaded, monkeypatch, capsys, command, names, status, message):
    plugin, _ = loaded
    give(monkeypatch, **names)
    monkeypatch.setattr(sys.modules["llamafactory.v1.trainers.sft_trainer"], "run_sft", fail)
    monkeypatch.setattr("sys.argv", ["llamafactory", command, "train.yaml"])
    with pytest.raises(SystemExit) as end:
        plugin.main()
    assert end.value.code == status
    assert capsys.readouterr().err == f"error: {message}\n"
