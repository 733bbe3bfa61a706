"""Micro-batches that are traced: how often their model runs, and which cannot be replayed."""

import dataclasses

import pytest
import torch
from support.oracle import compute_loss, make_training
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hf_patrickstar.machine import MACHINES
from hf_patrickstar.schedule.op_trace import EnterForward

H100 = MACHINES["h100"]


@pytest.fixture(autouse=True)
def _no_mode_of_operators_stays():
    yield
    assert not _get_current_dispatch_mode_stack()


def trace_with(compute):
    """The notes of a loss, and how often it was computed."""
    calls = []

    def counted(model, inputs):
        calls.append(None)
        return compute(model, inputs, len(calls))

    return dataclasses.replace(make_training(), compute_loss=counted).trace(H100), len(calls)


@pytest.mark.parametrize(("has_cache", "num_runs"), [(False, 2), (True, 3)])
def test_the_model_runs_few_times_and_what_it_does_the_first_time_alone_is_left_out(has_cache, num_runs):
    def compute(model, inputs, number):
        if has_cache and number == 1:
            torch.ones(8, 8, device="cpu") @ torch.ones(8, 8, device="cpu")
        return compute_loss(model, inputs)

    assert trace_with(compute) == (make_training().trace(H100), num_runs)


def test_an_evaluation_inside_of_a_loss_is_kept_apart():
    def compute(model, inputs, number):
        with torch.no_grad():
            model(**inputs)
        return compute_loss(model, inputs)

    found, _ = trace_with(compute)
    assert [note.is_inner for note in found.notes if isinstance(note, EnterForward)] == [True, False]


def test_an_embedding_that_writes_to_its_rows_cannot_be_replayed():
    def limit(model):
        model.transformer.wpe.max_norm = 1.0

    training = make_training(change=limit, placement="host")
    assert training.trace(H100, frozenset({"transformer.wpe.weight"})) is None
