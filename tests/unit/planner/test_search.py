"""The largest that fits: each answer has a plan, and the next larger one is refused."""

import json
from unittest import mock

import pytest

from hf_patrickstar.cli.main import main
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.machine import BY_PRICE, MACHINES
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.planner import search as module
from hf_patrickstar.planner.plan import Plan, TierUse
from hf_patrickstar.planner.planning import arrange, plan_if_fits
from hf_patrickstar.planner.search import Found, Goal, search, what_fits
from hf_patrickstar.planner.subject import find_subject, with_batch, with_layers
from hf_patrickstar.units import GIB, MIB

MODEL = "gpt2:n_layer=2,n_embd=64,n_head=2,vocab_size=256,n_positions=320"
ARGUMENTS = {
    **{"task": None, "batch_size": 2, "length": 64, "num_micro_batches": 1, "world_size": 1, "checkpointing": False},
    **{"dtype": "bf16", "optimizer": "adamw", "max_norm": 1.0, "settings": None, "device_memory": 4 * MIB},
    "host_memory": 16 * MIB,
}


def small(**changes):
    return arrange(MODEL, "rtx4090", **{**ARGUMENTS, **changes})


@pytest.mark.parametrize(
    ("goal", "changed", "step"),
    [
        (Goal.MAX_BATCH, lambda subject, value: with_batch(subject, value, 64), 1),
        (Goal.MAX_LENGTH, lambda subject, value: with_batch(subject, 2, value), 64),
        (Goal.MAX_MODEL, with_layers, 1),
    ],
)
def test_the_answer_fits_and_the_next_one_does_not(goal, changed, step):
    subject, given = small()
    found = search(goal, subject, given)
    assert found.plan.fits
    assert found.refused == found.answer + step
    assert plan_if_fits(changed(subject, found.answer), given) == found.plan
    assert plan_if_fits(changed(subject, found.refused), given) is None
    assert plan_if_fits(found.subject, found.circumstances) == found.plan
    assert found.num_plans < 12


def test_the_longest_sequence_that_the_model_takes():
    subject, given = small(device_memory=GIB)
    found = search("max-seq-len", subject, given)
    assert (found.answer, found.refused) == (320, None)
    assert found.plan.length == 320


def test_nothing_fits():
    subject, given = small(device_memory=MIB // 4)
    found = search("max-batch", subject, given)
    assert (found.answer, found.plan, found.subject) == (None, None, None)
    assert found.refused == 1


def test_the_cheapest_machine():
    subject, given = small()
    found = search("cheapest-machine", subject, given)
    assert (found.answer, found.refused, found.num_plans) == (BY_PRICE[0], None, 1)
    fits = {name: name == "8xh100" for name in MACHINES}
    tried = []

    def plan(subject, given):
        tried.append((given.machine.name, given.world_size))
        return "plan" if fits[given.machine.name] else None

    with mock.patch.object(module, "plan_if_fits", plan):
        found = search("cheapest-machine", subject, given)
    assert (found.answer, found.refused) == ("8xh100", "h100")
    assert tried == [(name, MACHINES[name].num_devices) for name in BY_PRICE]
    with mock.patch.object(module, "plan_if_fits", return_value=None):
        assert search("cheapest-machine", subject, given).answer is None
    assert sorted(BY_PRICE) == sorted(MACHINES)


def make_plan(budget, activations):
    use = TierUse(budget, budget, {"non-model data": activations})
    return mock.Mock(spec=Plan, tier=lambda tier: use)


@pytest.mark.parametrize("largest", [0, 1, 2, 7, 16, 100, 1000])
@pytest.mark.parametrize("first", [1, 8, 1000])
@pytest.mark.parametrize("slope", [0.7, 1.0, 3.0])
def test_few_plans_find_the_largest(largest, first, slope):
    """What activations take tells about how many fit, rightly or not."""
    tried = []

    def try_out(value):
        tried.append(value)
        return make_plan(1000, max(int(1000 * slope * value / max(largest, 1)), 1)) if value <= largest else None

    value, plan, num = module._largest(try_out, first, 1000, limiting=Tier.DEVICE)
    assert value == largest
    assert (plan is None) == (largest == 0)
    assert num == len(tried) == len(set(tried)) <= 14


def test_layers_of_models_whose_configurations_list_them():
    subject = find_subject(
        "qwen2:num_hidden_layers=3,hidden_size=32,num_attention_heads=2",
        task=None,
        batch_size=1,
        length=8,
        checkpointing=False,
    )
    more = with_layers(subject, 5)
    assert (more.config.num_hidden_layers, subject.config.num_hidden_layers) == (5, 3)
    assert len(more.config.layer_types) == 5
    assert more.name == f"{subject.name} with 5 layers"
    both = with_layers(
        find_subject("t5:num_layers=2,d_model=32", task=None, batch_size=1, length=8, checkpointing=False), 3
    )
    assert (both.config.num_layers, both.config.num_decoder_layers) == (3, 3)


def test_what_fits_of_what_does_not():
    subject, given = small(batch_size=64)
    found = {item.goal: item for item in what_fits(subject, given)}
    assert found[Goal.MAX_BATCH].answer < 64
    assert found[Goal.MAX_BATCH].plan.fits
    assert Goal.MAX_LENGTH not in found, "not even the shortest fits with so many sequences"
    assert list(what_fits(with_batch(subject, 1, 64), given)) == [], "nothing is smaller"


def test_an_unknown_goal_and_a_model_without_layers():
    subject, given = small()
    with pytest.raises(ConfigError, match="search 'max': it is not known; known are max-batch, max-seq-len"):
        search("max", subject, given)
    del subject.config.__dict__["n_layer"]
    subject.config.__class__ = type("Other", (type(subject.config),), {"attribute_map": {}})
    with pytest.raises(ConfigError, match="has no num_hidden_layers"):
        search("max-model", subject, given)


def test_as_json():
    found = Found(Goal.MAX_BATCH, None, None, 1, 3)
    assert json.loads(found.to_json()) == {
        "goal": "max-batch",
        "answer": None,
        "refused": 1,
        "num_plans": 3,
        "plan": None,
    }


COMMAND = ["plan", MODEL, "--seq-len", "64", "--device-memory", "4MiB", "--host-memory", "16MiB"]


def test_the_command(capsys, tmp_path):
    file = tmp_path / "found.json"
    assert main([*COMMAND, "--search", "max-batch", "--json", str(file)]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    found = json.loads(file.read_text())
    assert first == f"at most {found['answer']} sequences of a micro-batch ({found['refused']} do not fit)"
    assert any(f", {found['answer']} x 64 tokens, " in line for line in others)
    assert found["plan"]["batch_size"] == found["answer"]
    assert main([*COMMAND[:4], "--device-memory", "256KiB", "--search", "max-batch"]) == 1
    assert capsys.readouterr().out.strip() == "not even one sequence of this length fits"
    assert main([*COMMAND, "--search", "most"]) == 2
    assert "known are max-batch" in capsys.readouterr().err


def test_what_would_fit_is_told_where_the_plan_does_not(capsys):
    assert main([*COMMAND, "--batch-size", "64"]) == 1
    assert "fits      at most " in capsys.readouterr().out
