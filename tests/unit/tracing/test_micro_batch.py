"""Micro-batches that are traced: how often their model runs, and which cannot be replayed."""

import dataclasses

import pytest
import torch
from oracle.training import compute_loss, make_training
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hf_patrickstar.machine import MACHINES
from hf_patrickstar.schedule.op_trace import Acquire, EnterForward, LeaveForward

H100 = MACHINES["h100"]


def test_an_embedding_that_writes_to_its_rows_is_not_told_again():
    def limit(model):
        model.transformer.wpe.max_norm = 1.0

    training = make_training(change=limit, placement="host")
    assert training.trace(H100, frozenset({"transformer.wpe.weight"})) is None


def visits_of_training(ops):
    """What a step acquires, without the evaluations inside of it."""
    found, is_inner = [], False
    for note in ops.notes:
        if isinstance(note, (EnterForward, LeaveForward)):
            is_inner = note.is_inner and isinstance(note, EnterForward)
        elif isinstance(note, Acquire) and not is_inner:
            found.append(note.index)
    return found


def test_an_evaluation_inside_of_a_loss_is_told_apart():
    def compute(model, inputs):
        with torch.no_grad():
            model(**inputs)
        return compute_loss(model, inputs)

    found = dataclasses.replace(make_training(), compute_loss=compute).trace(H100)
    assert [note.is_inner for note in found.notes if isinstance(note, EnterForward)] == [True, False]
    assert visits_of_training(found) == visits_of_training(make_training().trace(H100))


@pytest.mark.parametrize("loss", [compute_loss, None], ids=["told", "run"])
def test_no_mode_of_operators_stays(loss):
    def compute(model, inputs):
        with torch.no_grad():
            model(**inputs)
        return compute_loss(model, inputs)

    dataclasses.replace(make_training(), compute_loss=loss or compute).trace(H100)
    assert not _get_current_dispatch_mode_stack()


def test_what_a_model_does_the_first_time_alone_is_left_out():
    made = []

    def compute(model, inputs):
        if not made:
            made.append(torch.ones(8, 8, device="cpu") @ torch.ones(8, 8, device="cpu"))
        return compute_loss(model, inputs)

    found = dataclasses.replace(make_training(), compute_loss=compute).trace(H100)
    assert found == make_training().trace(H100)


def test_a_model_that_runs_other_layers_each_time_is_not_told_again():
    calls = []

    def compute(model, inputs):
        calls.append(None)
        hidden = model.transformer.wte(inputs["input_ids"])
        block = model.transformer.h[len(calls) % len(model.transformer.h)]
        found = block(hidden)
        return (found[0] if isinstance(found, tuple) else found).square().mean()

    assert dataclasses.replace(make_training(), compute_loss=compute).trace(H100) is None


def test_the_model_runs_twice_and_no_more():
    calls = []

    def compute(model, inputs):
        calls.append(None)
        return compute_loss(model, inputs)

    assert dataclasses.replace(make_training(), compute_loss=compute).trace(H100) is not None
    assert len(calls) == 2, "the third time nothing of the model runs"
