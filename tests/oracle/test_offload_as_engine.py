"""Activations leave an engine in virtual time as the simulator says: in bytes, order and number, and with as much room.

The engine knows of them from the traces that the simulator has left, as a run does after ``hf-patrickstar plan``.
"""

import dataclasses

import pytest
import torch
from support import inside, models
from support.oracle import make_training, record_step
from test_same_as_engine import NODE, check

from hf_patrickstar.errors import BudgetError

RECOMPUTED = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}


def llama():
    """Blocks are recomputed."""
    model = models.llama(num_hidden_layers=8, use_cache=False).train()
    model.gradient_checkpointing_enable(**RECOMPUTED)
    return model


def gpt2():
    return models.gpt2(n_layer=4).train()


def make_inputs():
    tokens = torch.zeros((16, 16), dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def training_of(make, world_size, num_micro_batches, **settings):
    made = make_training(world_size=world_size, num_micro_batches=num_micro_batches, **settings)
    return dataclasses.replace(made, make_model=make, make_inputs=make_inputs)


def check_both(training):
    """The step of a training by the simulator, which an engine does, too."""
    told = training.simulate(NODE)
    done = record_step(training, NODE, told.known)
    # The plan counts one as there all the time in the moment in which it leaves or comes back, and leaves out small
    # operators that the engine launches for it.
    check(told, done, most_more=0.12, seconds=0.18)
    assert [plan.offloaded for plan in told.plans] == [plan.offloaded for plan in done.plans]
    for mine, theirs in zip(told.traces, done.traces, strict=True):
        assert (mine.activations, mine.num_offloaded) == (theirs.activations, theirs.num_offloaded)
        for visit, other in zip(mine.visits, theirs.visits, strict=True):
            assert other.non_model_nbytes <= visit.non_model_nbytes
            assert dataclasses.replace(other, non_model_nbytes=visit.non_model_nbytes) == visit
    return told


@pytest.mark.parametrize(("make", "world_size", "num_micro_batches"), [(llama, 2, 1), (gpt2, 1, 2)])
def test_all_leave(make, world_size, num_micro_batches):
    told = check_both(training_of(make, world_size, num_micro_batches, activation_offload=True))
    assert all(trace.num_offloaded == len(trace.activations) > 0 for trace in told.traces)


@pytest.mark.parametrize(
    ("make", "device_budget", "world_size", "num_micro_batches"), [(llama, 700_000, 1, 2), (gpt2, 1_200_000, 2, 1)]
)
def test_as_many_leave_as_a_step_needs_to_fit(make, world_size, num_micro_batches, device_budget, monkeypatch):
    """Without what the engine measures in its first step: then it has more room for prefetches."""
    monkeypatch.setattr(*inside.CORRECT_TRACE, lambda *_: None)

    def training(asked):
        return training_of(make, world_size, num_micro_batches, activation_offload=asked, device_budget=device_budget)

    with pytest.raises(BudgetError):
        training(False).simulate(NODE)
    told = check_both(training("auto"))
    (num,) = {trace.num_offloaded for trace in told.traces}
    assert 0 < num < len(told.traces[0].activations)
    assert sum(told.device_owners.values()) <= device_budget


def test_where_all_fits_none_leaves():
    told = check_both(training_of(gpt2, 1, 1))
    assert {trace.num_offloaded for trace in told.traces} == {0}
    assert told.traces[0].activations
