"""Activations that can leave, as a micro-batch is translated: literal notes, and small models against brute force."""

import collections
import dataclasses

import pytest
from support import models
from support.models import VOCAB
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
    "backward needs one at once": ({"last": KEPT, "begin": WANTED}, BOTH, [1, 0]),
    "backward begins with one": ({"forward": KEPT, "begin": WANTED}, BOTH, [1, 0]),
    "it comes back with the next visit": ({"last": KEPT[:2], "begin": [Free(2)], "middle": WANTED}, BOTH, [1, 0]),
    "backward never needs one": ({"forward": KEPT, "middle": [Free(102)]}, BOTH, [1, 0]),
    "one is made for backward": ({"begin": KEPT, "middle": WANTED}, BOTH, [1, 0]),
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


def loss_with_all_hidden_states(model, inputs):
    """The user keeps what blocks return, and lets it go after backward."""
    output = model(**inputs, output_hidden_states=True)
    model.__dict__["kept"] = output.hidden_states
    return output.loss


def make_small(make, checkpointing=None, loss=compute_loss, **settings):
    def make_model():
        model = make().train()
        if checkpointing is not None:
            model.gradient_checkpointing_enable(**checkpointing)
        return model

    return Training(make_model, make_training().make_inputs, {**SMALL, **settings}, compute_loss=loss)


def notes_and_places(training):
    with FakeTensors():
        specs, _ = training.micro_batch.prepared(training.make_model())
    ops = training.trace(H100)
    assert ops is not None
    return ops, each_alone(specs)


RECOMPUTED = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}


def away(notes, activations):
    """Bytes of activations that are not on the device at any time of a moment, for each moment, by brute force.

    One begins to leave as it is kept, and is gone when nobody else holds it and the next one of ``activations`` is kept
    or forward has ended. It is back when backward needs it or the next one. The last of ``activations`` stays, if it is
    no number of one that leaves.
    """
    places, number_of, kept_as = {known.place: number for number, known in enumerate(activations)}, {}, {}
    held, copying, gone, back = set(), set(), set(), set()
    users, moments, num_kept = collections.Counter(), [], 0

    def look(number):
        if number not in held | copying | back:
            gone.add(number)

    for note in notes:
        match note:
            case Kept(storage, kept):
                number = places.get(num_kept)
                num_kept += 1
                if number is not None:
                    number_of[storage] = number
                    held.add(number)
                    copying.add(number)
                    if number:
                        copying.discard(number - 1)
                        look(number - 1)
                kept_as[kept] = number_of.get(storage)
            case Free(storage) if number_of.get(storage) in held:
                held.discard(number_of[storage])
                look(number_of[storage])
            case LeaveForward():
                for number in [*copying]:
                    copying.discard(number)
                    look(number)
            case Wanted(kept) if kept_as[kept] is not None:
                for number in (kept_as[kept], kept_as[kept] - 1):
                    back.add(number)
                    gone.discard(number)
                    moments[-1].discard(number)
        is_visit = isinstance(note, Need) or (isinstance(note, Acquire) and not users[note.index])
        if is_visit:
            moments.append(set(gone))
        if isinstance(note, (Acquire, Release)):
            users[note.index] += 1 if isinstance(note, Acquire) else -1
    return moments


SMALL_MODELS = {
    "llama, recomputed": lambda: make_small(llama, RECOMPUTED),
    "gpt2, recomputed": lambda: make_small(gpt2, RECOMPUTED),
    "gpt2": lambda: make_small(gpt2),
    "llama, hidden states are held": lambda: make_small(llama, None, loss_with_all_hidden_states),
}


@pytest.mark.parametrize("make", SMALL_MODELS.values(), ids=SMALL_MODELS)
def test_bytes_of_small_models_are_those_of_brute_force(make):
    ops, places = notes_and_places(make())
    trace, _ = micro_batch(ops, places, StepRules(), StepKind.TRAINING)
    most = len(trace.activations)
    for num in {1, 2, most // 2, most - 1, most}:
        left = trace.offloading(num)
        pairs = zip(trace.visits, left.visits, strict=True)
        found = [before.non_model_nbytes - after.non_model_nbytes for before, after in pairs]
        followed = trace.activations[: num + 1]
        expected = [
            sum(followed[number].nbytes for number in numbers if number < num) for numbers in away(ops.notes, followed)
        ]
        assert found == expected
        assert max(found) > 0
    assert trace.offloading(most).non_model_peak_nbytes < trace.non_model_peak_nbytes


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


def test_what_the_user_holds_until_backward_stays():
    nbytes = NUM_ROWS * 32 * 4
    found = {}
    for loss in (compute_loss, loss_with_all_hidden_states):
        ops, places = notes_and_places(make_small(llama, RECOMPUTED, loss))
        trace, _ = micro_batch(ops, places, StepRules(), StepKind.TRAINING)
        found[loss] = [known.place for known in trace.activations if known.nbytes == nbytes]
    inputs_and_last = found[compute_loss]
    assert found[loss_with_all_hidden_states] == inputs_and_last[DEPTH:]


def test_logits_and_what_the_loss_makes_of_them_stay():
    ops, places = notes_and_places(make_small(llama))
    trace, _ = micro_batch(ops, places, StepRules(), StepKind.TRAINING)
    assert trace.activations
    sizes = {NUM_ROWS * VOCAB * itemsize for itemsize in (2, 4)}
    made = [nbytes for note in ops.notes if isinstance(note, Allocate) for _, nbytes in note.storages]
    assert sizes & set(made)
    assert not sizes & {known.nbytes for known in trace.activations}
