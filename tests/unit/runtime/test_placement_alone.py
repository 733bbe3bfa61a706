"""Which chunks live in the device margin, and which embeddings stay at home; a chunk has 16 and 32 bytes."""

import dataclasses
import logging

import pytest
import torch
from unit.runtime.parts import Fake, OneOfTwo, Parts

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.machine import ACCELERATOR, CPU_TIER
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.placement import Placement
from hf_patrickstar.schedule.prospect import PlacementRules
from hf_patrickstar.schedule.trace import Trace, Visit

HOST, DEVICE = Tier.HOST, Tier.DEVICE
ONE, TWO, ALL = 48 + 16, 96 + 16, 144
"""Bytes of the device where one chunk, two, or all three fit the margin beside the one that is visited."""


def make(device_nbytes=ONE, *, homes=(HOST,) * 3, frozen=(), **settings):
    """Parts with chunks, and with room for as much as is there: ``asked`` says for what it was asked."""
    parts = Parts(settings.pop("collectives", None), device_nbytes, watch=Fake([], "collect"), **settings)
    for index, home in enumerate(homes):
        parts.add_chunk(4, 4, home=home, trainable=index not in frozen)
    parts.asked = []
    parts.room = Fake(parts.asked, "make_room")
    return parts


def record(parts, *visits, key="training/2x4", shapes=((2, 4),), nbytes=0):
    """A step was recorded: visits, or their chunks with the bytes that others took."""
    visits = tuple(visit if isinstance(visit, Visit) else Visit(visit, (), nbytes) for visit in visits or (0, 1, 2))
    sizes = tuple(chunk.copy_nbytes for chunk in parts.chunks)
    parts.tracer.traces[key] = Trace(key, sizes, visits, (shapes,))
    parts.tracer.version += 1


def update(parts, num_micro_batches=1):
    """Decides anew; returns what moved, and the margin."""
    parts.placement.update(parts.room, num_micro_batches)
    return parts.moved(), parts.placement.in_margin


def with_margin(**settings):
    """Parts with the first chunk in the margin."""
    parts = make(**settings)
    record(parts)
    assert update(parts) == ([("to device", 0)], {0})
    return parts


def homes(parts):
    return [chunk.home for chunk in parts.chunks]


# The margin


@pytest.mark.parametrize(
    ("device_nbytes", "margin"), [(ONE - 1, []), (ONE, [0]), (TWO - 1, [0]), (TWO, [0, 1]), (ALL, [0, 1, 2])]
)
def test_after_a_step_was_recorded_as_many_chunks_as_fit_live_in_the_margin(device_nbytes, margin):
    parts = make(device_nbytes)
    record(parts)
    assert update(parts) == ([("to device", index) for index in margin], set(margin))
    assert homes(parts) == [DEVICE if index in margin else HOST for index in range(3)]
    assert parts.asked == [("make_room", 48, True)] * len(margin)
    assert parts.reserved == [DEVICE] * bool(margin)


def test_the_first_chunks_of_a_step_come_first():
    parts = make(TWO)
    record(parts, 2, 1, 0)
    assert update(parts)[0] == [("to device", 2), ("to device", 1)]


def test_nothing_is_decided_before_a_step_was_recorded_nor_twice():
    parts = make()
    assert update(parts) == ([], set())
    record(parts)
    update(parts)
    parts.ledger.lower_limit(DEVICE, 0)
    assert update(parts) == ([], {0})


@pytest.mark.parametrize(("fills", "key"), [(False, "training/2x4"), (True, "evaluation/2x4"), (True, "optimizer")])
def test_without_permission_or_a_step_of_training_there_is_no_margin(fills, key):
    parts = make(fills_margin=fills)
    record(parts, key=key)
    assert update(parts) == ([], set())


def test_an_optimizer_that_comes_later_has_a_margin():
    parts = make(fills_margin=False)
    record(parts)
    update(parts)
    parts.placement.allow_margin(True)
    record(parts)
    assert update(parts)[1] == {0}


@pytest.mark.parametrize(
    ("settings", "device_nbytes", "num"),
    [
        ({"prefetch_depth": 1}, ONE + 15, 0),
        ({"prefetch_depth": 1}, ONE + 16, 1),
        ({"chunk_budget": ONE}, 500, 1),
        ({"chunk_budget": ONE - 1}, 500, 0),
        ({"device_fraction": 0.5}, ONE, 1),
    ],
)
def test_the_margin_leaves_room_for_what_is_brought_in_ahead_and_keeps_to_what_chunks_may_take(
    settings, device_nbytes, num
):
    parts = make(device_nbytes, **settings)
    record(parts)
    assert len(update(parts)[1]) == num


@pytest.mark.parametrize(("workspace", "num"), [(0, 1), (1, 0)])
def test_the_margin_leaves_room_for_the_workspace(workspace, num):
    parts = make()
    parts.placement = Placement(
        *(parts.chunks, parts.chunk_nbytes, parts.copies, parts.ledger, parts.tracer, lambda chunks, tier: None),
        *(PlacementRules(workspace, 0, 0, "belady", ACCELERATOR, True, True), True),
    )
    record(parts)
    assert len(update(parts)[1]) == num


@pytest.mark.parametrize(("device_nbytes", "num"), [(47 + ONE, 0), (48 + ONE, 1)])
def test_the_margin_is_beside_what_is_at_home_on_the_device_anyway(device_nbytes, num):
    parts = make(device_nbytes, homes=(HOST, HOST, HOST, DEVICE), chunk_budget=device_nbytes)
    record(parts, 0, 1, 2, 3)
    assert len(update(parts)[1]) == num


@pytest.mark.parametrize(("nbytes", "num"), [(0, 1), (1, 0)])
def test_the_margin_leaves_room_for_others(nbytes, num):
    parts = make()
    record(parts, Visit(0), Visit(1, (), nbytes), Visit(2))
    assert len(update(parts)[1]) == num


def test_a_list_of_gradients_that_came_since_counts():
    parts = make()
    parts.chunks[0].lists["grad"] = parts.pool.allocate(HOST, 8, torch.float32, "grad")
    record(parts)
    assert update(parts) == ([], set())
    assert [nbytes.device_nbytes for nbytes in parts.placement.nbytes] == [80, 48, 48]
    parts = make(ONE + 32)
    parts.chunks[0].lists["grad"] = parts.pool.allocate(HOST, 8, torch.float32, "grad")
    record(parts)
    update(parts)
    assert parts.asked == [("make_room", 80, True)]


def test_frozen_chunks_and_those_that_are_at_home_on_the_device_anyway_are_not_in_the_margin():
    parts = make(1000, homes=(HOST, DEVICE, HOST), frozen=(0,))
    record(parts)
    assert update(parts) == ([("to device", 2)], {2})


def test_the_margin_of_one_of_several_processes_is_beside_the_copies():
    """A chunk at home takes nothing off the copy of its group, which has 32 bytes."""
    parts = make(3 * 48 + 32, collectives=OneOfTwo(), machine=ACCELERATOR.shared_by(2))
    record(parts)
    assert update(parts)[1] == {0, 1, 2}
    parts = make(3 * 48 + 31, collectives=OneOfTwo(), machine=ACCELERATOR.shared_by(2))
    record(parts)
    assert update(parts)[1] == {0, 1}


def test_chunks_leave_a_margin_that_has_become_smaller_before_others_come():
    parts = make(TWO)
    record(parts)
    update(parts)
    record(parts, 2, 0, 1, nbytes=48)
    assert update(parts) == ([("to host", 0), ("to host", 1), ("to device", 2)], {2})


def test_a_chunk_in_use_neither_comes_nor_goes():
    parts = make(TWO)
    parts.chunks[0].num_computing = 1
    record(parts)
    assert update(parts) == ([("to device", 1)], {1})
    parts.chunks[1].num_computing = 1
    record(parts, nbytes=100)
    assert update(parts) == ([], {1})


def test_without_room_for_the_workspace_nothing_moves(caplog):
    caplog.set_level(logging.INFO, logger="hf_patrickstar")

    def reserve(chunks, tier):
        raise BudgetError("no workspace")

    parts = make(TWO, reserve=reserve)
    record(parts)
    assert update(parts) == ([], set())
    assert caplog.messages[-1] == (
        "patrickstar: no room for the optimizer's workspace in the device margin: no workspace"
    )


def test_a_margin_that_is_smaller_than_recorded_takes_what_fits(caplog):
    caplog.set_level(logging.INFO, logger="hf_patrickstar")
    parts = make(TWO)
    parts.ledger.book(DEVICE, "something", 20)
    record(parts)
    assert update(parts) == ([("to device", 0)], {0})
    assert caplog.messages[-1].startswith("patrickstar: the device margin is smaller than recorded: device_budget is")


def test_the_margin_is_explained_when_it_changes(caplog):
    caplog.set_level(logging.INFO, logger="hf_patrickstar")
    parts = make()
    for nbytes in (0, 0, 0, 1):
        record(parts, nbytes=nbytes)
        update(parts)
    explained = [text for text in caplog.messages if "live in the device margin" in text]
    assert [text.split(" chunks")[0] for text in explained] == ["patrickstar: 1 of 3", "patrickstar: 0 of 3"]


# Chunks that the host has no room for


def spilled(*, host_nbytes, homes, device_nbytes=1000, **settings):
    """Parts with chunks on the device because the host has no room for them."""
    parts = make(device_nbytes, homes=homes, host_nbytes=host_nbytes, **settings)
    parts.copies.note_chunks()
    parts.placement.in_margin |= {index for index, home in enumerate(homes) if home is DEVICE}
    return parts


def test_what_the_host_has_no_room_for_stays_on_the_device_whatever_steps_need():
    parts = spilled(host_nbytes=2 * 48, homes=(HOST, HOST, DEVICE), device_nbytes=48 + ONE)
    record(parts, nbytes=48)
    assert update(parts) == ([], {2}), "whichever lives there, the device gives the room of one chunk"
    parts = spilled(host_nbytes=2 * 48, homes=(DEVICE, HOST, HOST), device_nbytes=ONE)
    record(parts)
    assert update(parts) == ([], {0})


def test_it_is_no_reason_to_take_more_to_the_device_nor_to_take_less():
    parts = spilled(host_nbytes=3 * 48, homes=(HOST, HOST, DEVICE), device_nbytes=ONE - 1)
    record(parts)
    assert update(parts) == ([("to host", 2)], set()), "the host has room now"
    parts = spilled(host_nbytes=2 * 48, homes=(DEVICE, HOST, HOST), device_nbytes=ALL)
    record(parts)
    assert update(parts) == ([("to device", 1), ("to device", 2)], {0, 1, 2})


def test_where_a_chunk_in_use_at_the_highest_moment_has_to_live_on_the_device_it_does():
    parts = spilled(host_nbytes=2 * 48, homes=(DEVICE, HOST, HOST), device_nbytes=48 + 68)
    record(parts, Visit(0, (), 48), Visit(1, (), 48), Visit(2, (), 68))
    assert update(parts) == ([("to device", 2), ("to host", 0)], {2})


def test_where_no_chunk_can_go_first_all_stay():
    parts = spilled(host_nbytes=2 * 48, homes=(HOST, HOST, DEVICE), device_nbytes=ONE)
    record(parts)
    assert update(parts) == ([], {2})


def test_a_step_that_has_no_room_however_chunks_are_placed():
    """One that has run is no error, since traces of several steps are merged; one that is to run is, with both sums."""
    parts = spilled(host_nbytes=2 * 48, homes=(HOST, HOST, DEVICE), device_nbytes=48 + 20)
    record(parts, nbytes=21)
    with pytest.raises(
        BudgetError, match=r"181 B \(181 bytes\) needed on both tiers together, 164 B \(164 bytes\)"
    ) as found:
        parts.placement.update(parts.room, 1, is_certain=True)
    assert parts.moved() == []
    assert "Raise host_budget to at least 144 bytes, or" in str(found.value)
    assert "device_budget=85 is enough, too" in str(found.value)
    record(parts, nbytes=21)
    assert update(parts) == ([], {2})


def test_a_frozen_chunk_that_the_host_has_no_room_for_stays_too():
    parts = spilled(host_nbytes=2 * 48, homes=(HOST, DEVICE, HOST), frozen=(1,), device_nbytes=16 + 16)
    record(parts, 0, 2, 1)
    assert update(parts) == ([], {1})


def test_leaving_the_margin_leaves_what_the_host_has_no_room_for():
    parts = spilled(host_nbytes=2 * 48, homes=(HOST, DEVICE, DEVICE))
    assert parts.placement.leave_margin()
    assert (parts.moved(), parts.placement.in_margin) == ([("to host", 1)], {2})
    assert not parts.placement.leave_margin()


# Leaving it


def test_chunks_leave_the_margin_when_somebody_needs_the_room():
    parts = with_margin()
    assert parts.placement.leave_margin()
    assert (parts.moved(), parts.placement.in_margin, homes(parts)) == ([("to host", 0)], set(), [HOST] * 3)
    assert not parts.placement.leave_margin()
    assert update(parts) == ([("to device", 0)], {0}), "it is decided anew, although nothing was recorded"


def test_a_chunk_in_use_stays_in_the_margin():
    parts = with_margin()
    parts.chunks[0].num_computing = 1
    assert not parts.placement.leave_margin()
    assert (parts.moved(), parts.placement.in_margin) == ([], {0})


def test_where_all_was_at_home_on_the_device_it_leaves_if_it_does_not_fit_after_all():
    parts = make(144, homes=(DEVICE,) * 3)
    parts.copies.note_chunks()
    parts.chunks[1].num_computing = 1
    assert parts.placement.leave_margin()
    assert (parts.moved(), parts.reserved) == ([("to host", 0), ("to host", 2)], [HOST])


@pytest.mark.parametrize(("host_nbytes", "num_moved"), [(47, 0), (48, 1), (143, 2), (144, 3)])
def test_what_is_at_home_on_the_device_leaves_as_far_as_the_host_has_room(host_nbytes, num_moved):
    parts = make(144, homes=(DEVICE,) * 3, host_nbytes=host_nbytes)
    assert parts.placement.leave_margin() == (num_moved > 0)
    assert parts.moved() == [("to host", index) for index in range(num_moved)]


def test_what_is_at_home_on_the_device_stays_where_the_first_placement_stays_for_ever():
    parts = make(144, homes=(DEVICE,) * 3, fills_margin=False)
    assert not parts.placement.leave_margin()
    assert parts.moved() == []


@pytest.mark.parametrize(
    ("key", "shapes", "is_training", "stays"),
    [
        ("training/2x4", ((2, 4),), True, True),
        ("training/2x4", ((2, 3),), True, True),
        ("training/2x4", ((2, 5),), True, False),
        ("training/2x4", ((2, 5),), False, False),
        ("training/2x4", ((2, 4),), False, True),
        ("evaluation/2x4", ((2, 5),), True, False),
        ("evaluation/2x5", ((2, 5),), True, False),
        ("evaluation/2x5", ((2, 5),), False, True),
    ],
)
def test_the_margin_is_given_up_before_a_step_that_may_need_more_than_any_before(key, shapes, is_training, stays):
    parts = with_margin()
    record(parts, key=key, shapes=((2, 5),) if key.endswith("5") else ((2, 4),))
    parts.placement.prepare(shapes, is_training=is_training)
    assert parts.moved() == ([] if stays else [("to host", 0)])


def test_without_a_margin_nothing_is_given_up():
    parts = make(144, homes=(DEVICE,) * 3)
    parts.placement.prepare(((9, 9),), is_training=True)
    assert parts.moved() == []


# Other chunks


def test_chunks_that_came_and_went_are_noticed():
    parts = with_margin()
    chunk = parts.chunks[0]
    parts.copies.forget(chunk)
    chunk.give_back(parts.pool)
    chunk.retire()
    parts.add_chunk(4, 4)
    del parts.chunk_nbytes
    parts.placement.note_chunks(parts.chunk_nbytes)
    assert parts.placement.in_margin == set()
    assert [nbytes.device_nbytes for nbytes in parts.placement.nbytes] == [0, 48, 48, 48]
    parts.tracer.discard()
    record(parts, 1, 2, 3)
    parts.tracer.version = 1  # as many as before
    assert update(parts) == ([("to device", 1)], {1})


# CpuEmbeddings at home


BYTES_COUNT = dataclasses.replace(
    CPU_TIER,
    device_bandwidth=1.0,
    to_device_bandwidth=1.0,
    to_host_bandwidth=1.0,
    host_bandwidth=1.0,
    copy_latency_s=1e-9,
)
"""A byte takes a second wherever it goes, and a gradient costs the same on both tiers."""


def look_up(parts, *nbytes):
    """The first tensor of each chunk is an embedding of which so many bytes were looked up."""
    for chunk, count in zip(parts.chunks, nbytes, strict=False):
        chunk.tensors[0].lookup = "auto"
        chunk.tensors[0].lookup_nbytes = count
    return [chunk.tensors[0] for chunk in parts.chunks[: len(nbytes)]]


@pytest.mark.parametrize(
    ("nbytes", "num_micro_batches", "lookup"),
    [(15, 1, "home"), (16, 1, "device"), (31, 2, "home"), (32, 2, "device"), (16, 0, "device")],
)
def test_an_embedding_is_looked_up_where_it_takes_less_time(nbytes, num_micro_batches, lookup):
    parts = make(1000, machine=BYTES_COUNT)
    (tensor,) = look_up(parts, nbytes)
    record(parts)
    moved, margin = update(parts, num_micro_batches)
    assert tensor.lookup == lookup
    if lookup == "home":
        assert (moved, margin) == ([("to device", 1), ("to device", 2)], {1, 2}), "what is looked up on the CPU stays"
    else:
        assert (moved, margin, parts.tracer.traces) == ([], set(), {}), "the next step visits other chunks"


def test_an_embedding_that_was_never_looked_up_is_not_decided_on():
    parts = make()
    (tensor,) = look_up(parts, 0)
    record(parts)
    update(parts)
    assert tensor.lookup == "auto"


@pytest.mark.parametrize(("nbytes", "lookup"), [(0, "device"), (1, "home")])
def test_an_embedding_for_which_the_device_has_no_room_stays_at_home(nbytes, lookup):
    """The others are visited in turn, each in 16 bytes, beside as many that are not chunks; the last is at home."""
    parts = make(16 + 16 + 48, homes=(HOST, HOST, DEVICE), machine=BYTES_COUNT)
    (tensor,) = look_up(parts, 100)
    record(parts, 1, 2, nbytes=nbytes)
    update(parts)
    assert tensor.lookup == lookup


def test_an_embedding_that_moves_from_now_on_is_pinned():
    pinned = []
    parts = make(copies=Fake(pinned, "pin"), machine=BYTES_COUNT)
    first, second = look_up(parts, 100, 1)
    record(parts)
    update(parts)
    assert (first.lookup, second.lookup) == ("device", "home")
    assert pinned == [("pin", parts.chunks[0])]


def test_what_is_decided_once_stays():
    parts = make(1000, machine=BYTES_COUNT)
    (tensor,) = look_up(parts, 100)
    record(parts)
    update(parts)
    tensor.lookup_nbytes = 1
    record(parts)
    update(parts)
    assert tensor.lookup == "device"
