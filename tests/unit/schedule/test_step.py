"""Activations that can leave, as a micro-batch is translated: literal notes, and small models against brute force."""

import dataclasses

import pytest
from support import models
from support.oracle import SMALL, Training, compute_loss, make_training

from hf_patrickstar.layout.packing import ChunkSpec
from hf_patrickstar.layout.specs import TensorSpec
from hf_patrickstar.machine import MACHINES
from hf_patrickstar.schedule.op_trace import (
    Acquire,
    Allocate,
    EnterForward,
    Free,
    Kept,
    LeaveBackward,
    LeaveForward,
    Need,
    OpTrace,
    Release,
    Wanted,
)
from hf_patrickstar.schedule.script import Keep, Restore
from hf_patrickstar.schedule.step import Places, StepRules, micro_batch
from hf_patrickstar.schedule.trace import Activation, StepKind
from hf_patrickstar.tracing.fake import FakeTensors

H100 = MACHINES["h100"]
DEPTH = 5


def each_alone(specs):
    """A chunk for each parameter."""
    chunks = [ChunkSpec(spec.index, spec.numel, spec.numel, (spec.index,), True, types=spec.types) for spec in specs]
    numbers = {spec.index: spec.index for spec in specs}
    return Places(chunks, {spec.index: spec for spec in specs}, numbers, {spec.index: spec.numel for spec in specs})


# By hand: a model of four parameters. Storages are 0 and up, what autograd keeps is 100 and up.


def use(index):
    return [Acquire(index), Release(index, False)]


def make_notes(forward=(), last=(), begin=(), middle=()):
    """Storages 0 and 1 are made and kept at the first and second visit; backward needs 1, then 0.

    Other notes may come after the second visit, at the end of forward, after the first visit of backward, and after
    its second visit.
    """
    notes = [EnterForward((), ()), *use(0), Allocate(((0, 400),)), Kept(0, 100), Free(0)]
    notes += [*use(1), Allocate(((1, 500),)), Kept(1, 101), *forward, Free(1), *use(2), *use(3), *last, LeaveForward()]
    notes += [Need(3), *begin, Need(2), Wanted(101), *middle, Free(101), Need(1), Wanted(100), Free(100)]
    return [*notes, Need(0), LeaveBackward()]


def translate(notes, kind=StepKind.TRAINING):
    specs = [TensorSpec(index, f"p{index}", (2,), True) for index in range(4)]
    return micro_batch(OpTrace(tuple(notes)), each_alone(specs), StepRules(), kind)


FIRST, SECOND = BOTH = (Activation(0, 400, 0, 0, 6), Activation(1, 500, 1, 1, 5))
MADE = Allocate(((2, 700),))
KEPT = [MADE, Kept(2, 102), Free(2)]
WANTED = [Wanted(102), Free(102)]
NOTES = {
    "two that leave": ({}, BOTH, [1, 0]),
    "what is no memory of the micro-batch counts, and stays": (
        *({"forward": [Kept(-1, -1), *KEPT], "middle": WANTED}, (*BOTH, Activation(3, 700, 1, 1, 5)), [1, 2, 0]),
    ),
    "a storage that is kept as several views is one, and backward needs it when it needs the first": (
        {"forward": [Kept(1, 102), Kept(0, 103)], "middle": [Wanted(103), *WANTED, Free(103)]},
        *((dataclasses.replace(FIRST, needed_at=5), SECOND), [1, 0]),
    ),
    "the user holds one for some visits more": (
        {"forward": KEPT[:2], "last": [Free(2)], "middle": WANTED},
        *((*BOTH, Activation(2, 700, 1, 3, 5)), [1, 2, 0]),
    ),
    "the user holds one until backward": ({"forward": KEPT[:2], "middle": [*WANTED, Free(2)]}, BOTH, [1, 0]),
    "the user holds one for good": ({"forward": KEPT[:2], "middle": WANTED}, BOTH, [1, 0]),
    "backward begins with one": ({"forward": KEPT, "begin": WANTED}, BOTH, [1, 0]),
    "it comes back with the next visit": ({"last": KEPT[:2], "begin": [Free(2)], "middle": WANTED}, BOTH, [1, 0]),
    "one is less than a ten thousandth of all": (
        {"forward": [Allocate(((2, 4), (3, 5), (4, 40000))), Kept(2, 102), Kept(3, 103), Free(2), Free(3), Free(4)]}
        | {"middle": [Wanted(103), *WANTED, Free(103)]},
        *((*BOTH, Activation(3, 5, 1, 1, 5)), [1, 2, 0]),
    ),
}


@pytest.mark.parametrize(("more", "expected", "restored"), NOTES.values(), ids=NOTES)
def test_which_can_leave(more, expected, restored):
    trace, entries = translate(make_notes(**more))
    assert trace.activations == expected
    assert trace.num_offloaded == 0
    numbers = {kind: [entry.number for entry in entries if isinstance(entry, kind)] for kind in (Keep, Restore)}
    assert numbers == {Keep: [*range(len(expected))], Restore: restored}


def test_none_leaves_in_an_evaluation():
    trace, entries = translate(make_notes(), StepKind.EVALUATION)
    assert not trace.activations
    assert not any(isinstance(entry, (Keep, Restore)) for entry in entries)


@pytest.mark.parametrize(
    ("middle", "nbytes"),
    [
        ([], [400, 900, 900, 900, 900, 900, 400, 0]),
        # What backward is given, and keeps once more, is the same memory.
        ([Kept(101, 102)], [400, 900, 900, 900, 900, 900, 900, 500]),
    ],
)
def test_bytes_are_there_until_autograd_lets_go(middle, nbytes):
    assert [visit.non_model_nbytes for visit in translate(make_notes(middle=middle))[0].visits] == nbytes


# Small models


def llama():
    return models.llama(intermediate_size=48, num_hidden_layers=DEPTH, use_cache=False)


def gpt2():
    return models.gpt2(n_layer=DEPTH)


NUM_ROWS = 4 * 16


def make_small(make, checkpointing=None, loss=compute_loss, **settings):
    def make_model():
        model = make().train()
        if checkpointing is not None:
            model.gradient_checkpointing_enable(**checkpointing)
        return model

    return Training(make_model, make_training().make_inputs, {**SMALL, **settings}, compute_loss=loss)


def notes_and_places(training):
    with FakeTensors():
        specs, _ = training.micro_batch.specs_and_casting(training.make_model())
    ops = training.trace(H100)
    assert ops is not None
    return ops, each_alone(specs)


RECOMPUTED = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}


@pytest.mark.parametrize("make", [llama, gpt2])
def test_if_blocks_are_recomputed_their_inputs_leave(make):
    """Each is kept before its block is visited, and backward needs it before it visits the block again."""
    ops, places = notes_and_places(make_small(make, RECOMPUTED))
    trace, _ = micro_batch(ops, places, StepRules(), StepKind.TRAINING)
    visited = [places.tensors[visit.chunk_index].name for visit in trace.visits]
    end, inputs = trace.forward_ends[0], []
    for number in range(DEPTH):
        moments = [moment for moment, name in enumerate(visited) if f".{number}." in name]
        begin, again = moments[0] - 1, next(moment for moment in moments if moment >= end) - 1
        inputs += [found for found in trace.activations if (found.kept_at, found.needed_at) == (begin, again)]
    assert [found.nbytes for found in inputs] == [NUM_ROWS * 32 * 4] * DEPTH, "residuals are fp32 in mixed precision"
    assert [found.place for found in inputs] == sorted(found.place for found in inputs)
    last = max(moment for moment, name in enumerate(visited[:end]) if f".{DEPTH - 1}." in name)
    if make is llama:
        assert trace.activations[:DEPTH] == tuple(inputs)
        assert all(found.kept_at > last for found in trace.activations[DEPTH:]), "of the norm and the head"
