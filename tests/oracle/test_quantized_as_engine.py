"""Adapters over packed weights: the simulator visits, plans and moves what an engine in virtual time does."""

import functools

import pytest
from oracle.test_same_as_engine import NODE, check, without_activations
from support.oracle import Training, make_training, record_step
from support.quantized import load, saved, with_adapter
from support.trainers import smallest_budget
from torch._dynamo import convert_frame

from hf_patrickstar.tracing.fake import copy_without_bytes

pytest.importorskip("bitsandbytes")


@pytest.fixture(autouse=True)
def _nothing_was_compiled(monkeypatch):
    """Else engines expect graphs, and tensors without bytes are in none."""
    monkeypatch.setattr(convert_frame, "FRAME_COUNTER", 0)


def both(kind, checkpointing=False, num_micro_batches=1, **settings):
    model = with_adapter(load(kind, saved(3).name)).train()
    for module in model.modules():  # without bytes nothing is read from files
        vars(module).pop("name_or_path", None)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    budget = int(1.5 * smallest_budget(model, "bf16", checkpointing))
    like = make_training("llama", num_micro_batches=num_micro_batches, chunk_budget=budget, **settings)
    make = functools.partial(copy_without_bytes, model)
    training = Training(make, like.make_inputs, like.config, like.make_optimizer, num_micro_batches=num_micro_batches)
    return training.simulate(NODE), record_step(training, NODE)


@pytest.mark.parametrize("kind", ["nf4", "fp4, double", "int8"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_is_as_planned(kind, checkpointing):
    told, done = both(kind, checkpointing)
    check(told, done)
    assert [without_activations(made) for made in told.traces] == done.traces
    assert list(told.plans) == done.plans
    assert all(plan.num_loads for plan in told.plans)
