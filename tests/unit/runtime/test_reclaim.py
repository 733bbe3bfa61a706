"""Making room on the device: who leaves, in which order, and what is said when nobody can; a copy has 16 bytes."""

import re
import types

import pytest
from unit.runtime.data_parts import CPU, Ticket
from unit.runtime.parts import Fake, NoForecast, OneOfTwo, Parts

from hf_patrickstar.errors import DeviceMemoryError
from hf_patrickstar.memory.streams import Streams
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.tracer import Step
from hf_patrickstar.schedule.trace import Cursor, Trace, Visit

EVICT_ALL = [("evict", 0), ("evict", 1), ("evict", 2)]


class Margin:
    """In place of ``Placement``: each time it is asked it does the next of some things, if any are left."""

    def __init__(self, *actions):
        self.actions, self.num_asked = list(actions), 0

    def leave_margin(self):
        self.num_asked += 1
        if not self.actions:
            return False
        self.actions.pop(0)()
        return True


def make(num_loaded=3, *, margin=(), step=None, collectives=None, num_chunks=3, device_nbytes=48, **settings):
    """Parts with chunks that have copies, visited in their order, and no room beside."""
    parts = Parts(
        collectives,
        device_nbytes,
        placement=Margin(*margin),
        tracer=types.SimpleNamespace(step=step),
        forecast=NoForecast({"t5", "t3"}),
        watch=Fake([], "collect"),
        **settings,
    )
    for _ in range(num_chunks):
        parts.add_chunk(4, 4)
    for tick, chunk in enumerate(parts.chunks[:num_loaded]):
        parts.copies.load(chunk, ahead=False)
        chunk.last_access = tick
    parts.moved()
    return parts


def said(caught):
    """The text of an error, with numbers of bytes as they are."""
    return re.sub(r"\d+ B \((\d+ bytes)\)", r"\1", str(caught.value))


# Room for anything


class InFlight(Streams):
    """Streams that hold gradients of so many bytes until they are told to hold none."""

    def __init__(self, others, nbytes):
        super().__init__(CPU)
        self.others, self.nbytes = others, nbytes

    def hold_at_most(self, nbytes):
        assert nbytes == 0
        released, self.nbytes = self.nbytes, 0
        self.others.nbytes -= released
        return released > 0


@pytest.mark.parametrize(("nbytes", "num_evicted", "held"), [(32, 2, 16), (48, 3, 16), (49, 3, 0), (64, 3, 0)])
def test_gradients_on_their_way_home_are_let_go_of_when_no_copy_can_leave(nbytes, num_evicted, held):
    parts = make(device_nbytes=64)
    parts.others.nbytes = 16
    parts.streams = InFlight(parts.others, 16)
    parts.reclaim.make_room(nbytes)
    assert parts.moved() == EVICT_ALL[:num_evicted]
    assert parts.others.nbytes == held


@pytest.mark.parametrize(("held", "is_void"), [(16, True), (0, False)])
def test_a_step_that_lets_go_of_gradients_leaves_no_trace(held, is_void):
    step = Step("training", (), frozenset())
    parts = make(step=step, device_nbytes=64)
    parts.others.nbytes = 16
    parts.streams = InFlight(parts.others, held)
    parts.reclaim.make_room(64)
    assert step.is_void == is_void


@pytest.mark.parametrize(("nbytes", "num_evicted"), [(0, 0), (1, 1), (16, 1), (17, 2), (48, 3), (49, 3), (1000, 3)])
def test_as_many_copies_leave_as_are_needed(nbytes, num_evicted):
    parts = make()
    parts.reclaim.make_room(nbytes)
    assert parts.moved() == EVICT_ALL[:num_evicted]
    assert parts.pool.room(Tier.DEVICE) == 16 * num_evicted


def test_what_was_let_go_of_is_measured_where_others_are_measured_once():
    """Gradients on their way, and then what the move of chunks out of the margin waits for."""
    parts = make(margin=[lambda: setattr(parts.others, "nbytes", 0)], device_nbytes=64)
    parts.others.nbytes = 16
    parts.streams = InFlight(parts.others, 8)
    with parts.ledger.one_reading():
        parts.reclaim.make_room(56)
        assert (parts.pool.room(Tier.DEVICE), parts.placement.num_asked) == (56, 0)
        parts.reclaim.make_room(64)
        assert (parts.pool.room(Tier.DEVICE), parts.placement.num_asked) == (64, 1)


def test_buffers_that_are_kept_for_reuse_are_room():
    parts = make()
    parts.copies.evict(parts.chunks[1])
    parts.moved()
    parts.reclaim.make_room(16)
    assert parts.moved() == []
    assert parts.ledger.owners(Tier.DEVICE) == {"param": 32, "pool": 16}


def test_a_chunk_in_use_stays():
    parts = make()
    view = parts.use(1)
    parts.chunks[2].num_computing = 1
    parts.reclaim.make_room(48)
    assert parts.moved() == EVICT_ALL[:1]
    assert parts.on_device() == [1, 2]
    del view


def test_chunks_in_the_margin_leave_last_and_one_by_one_if_need_be():
    parts = make(margin=[lambda: None, lambda: setattr(parts.chunks[2], "num_computing", 0)])
    parts.chunks[2].num_computing = 1
    parts.reclaim.make_room(48)
    assert (parts.moved(), parts.placement.num_asked) == (EVICT_ALL, 2)


def test_chunks_in_the_margin_stay_where_that_is_asked_for():
    parts = make(margin=[lambda: None])
    parts.reclaim.make_room(100, keep_margin=True)
    assert (parts.moved(), parts.placement.num_asked) == (EVICT_ALL, 0)


# Which leaves


def step_of(*visits, at=None, diverged=False):
    """A step that follows a trace of visits and is at a moment of it; one that is recorded if there is no moment."""
    step = Step("training", (), frozenset(), is_diverged=diverged)
    if at is not None:
        step.cursor = Cursor(Trace("training", (16, 16, 16), tuple(map(Visit, visits))))
        for index in visits[: at + 1]:
            assert step.cursor.advance(index)
    return step


@pytest.mark.parametrize(
    ("step", "victim"),
    [
        (None, 1),  # visited longest ago
        (step_of(), 0),  # in list order
        (step_of(diverged=True), 1),
        (step_of(0, 2, 1, at=0), 0),  # in the next repetition
        (step_of(0, 0, 1, 2, at=0), 2),
    ],
    ids=["between steps", "recorded", "diverged", "followed", "followed to the last"],
)
def test_which_copy_leaves_depends_on_what_is_known_of_the_step(step, victim):
    parts = make(step=step)
    for chunk, tick in zip(parts.chunks, (5, 3, 4), strict=True):
        chunk.last_access = tick
    parts.reclaim.make_room(1)
    assert parts.moved() == [("evict", victim)]


@pytest.mark.parametrize(("chooser", "victim"), [("lru", 2), ("list_order", 0)])
def test_a_policy_without_foresight_goes_its_own_way(chooser, victim):
    parts = make(step=step_of(0, 0, 2, 1, at=0), chooser=chooser)
    for chunk, tick in zip(parts.chunks, (5, 4, 3), strict=True):
        chunk.last_access = tick
    parts.reclaim.make_room(1)
    assert parts.moved() == [("evict", victim)]


# Room for a chunk


def test_the_chunk_that_needs_the_room_does_not_leave():
    parts = make()
    parts.reclaim.make_room_for(parts.chunks[0], 32, "m")
    assert parts.moved() == EVICT_ALL[1:]


@pytest.mark.parametrize(("nbytes", "num_evicted"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_nothing_beyond_the_room_for_a_chunk_leaves(nbytes, num_evicted):
    parts = make(num_chunks=4)
    parts.reclaim.make_room_for(parts.chunks[3], nbytes, "m")
    assert (parts.moved(), parts.placement.num_asked) == (EVICT_ALL[:num_evicted], 0)


@pytest.mark.parametrize(("others", "num_evicted"), [(0, 0), (1, 1), (17, 2), (500, 2)])
def test_without_bytes_only_what_is_over_the_budget_leaves(others, num_evicted):
    """Neither do chunks leave the margin for it, nor does it fail."""
    parts = make(margin=[lambda: None])
    parts.others.nbytes = others
    parts.reclaim.make_room_for(parts.chunks[2], 0, "m")
    assert parts.moved() == EVICT_ALL[:num_evicted]
    assert parts.placement.num_asked == 0


def test_kept_buffers_go_before_copies_when_the_budget_is_overdrawn():
    parts = make()
    parts.copies.evict(parts.chunks[2])
    parts.moved()
    parts.others.nbytes = 16
    parts.reclaim.make_room_for(parts.chunks[0], 0, "m")
    assert parts.moved() == []
    assert parts.ledger.owners(Tier.DEVICE) == {"param": 32}


def test_a_cautious_step_keeps_to_its_part_of_the_budget_as_far_as_chunks_can_leave():
    """Half of 64 bytes: one copy has to go; while two are in use the other half is there for the third."""
    parts = make(2, device_nbytes=64, device_fraction=0.5)
    parts.reclaim.make_room_for(parts.chunks[2], 16, "m")
    assert parts.moved() == EVICT_ALL[:1]
    parts = make(2, device_nbytes=64, device_fraction=0.5)
    for chunk in parts.chunks:
        chunk.num_computing = 1
    parts.reclaim.make_room_for(parts.chunks[2], 16, "m")
    assert (parts.moved(), parts.placement.num_asked) == ([], 0)


def test_no_chunk_leaves_the_margin_for_the_sake_of_caution():
    parts = make(2, device_nbytes=64, device_fraction=0.5)
    for chunk in parts.chunks:
        chunk.num_computing = 1
    parts.reclaim.make_room(16)
    assert (parts.moved(), parts.placement.num_asked) == ([], 0)
    parts.reclaim.make_room(48)
    assert parts.placement.num_asked == 1


@pytest.mark.parametrize("device_fraction", [1.0, 0.5])
def test_chunks_leave_the_margin_for_a_chunk_that_finds_no_room(device_fraction):
    parts = make(2, margin=[lambda: setattr(parts.others, "nbytes", 0)], device_fraction=device_fraction)
    parts.others.nbytes = 16
    for chunk in parts.chunks[:2]:
        chunk.num_computing = 1
    parts.reclaim.make_room_for(parts.chunks[2], 16, "m")
    assert (parts.moved(), parts.placement.num_asked) == ([], 1)


def test_without_room_for_a_chunk_the_error_says_who_needs_what_and_what_is_in_the_way():
    parts = make(num_chunks=4)
    parts.others.nbytes = 10
    parts.chunks[0].num_computing = parts.chunks[2].num_computing = 1
    with pytest.raises(DeviceMemoryError) as caught:
        parts.reclaim.make_room_for(parts.chunks[3], 16, "layer 'm'")
    assert said(caught).startswith(
        "device_budget is too small for layer 'm': chunk 3 needs 16 bytes, 6 bytes are free beside non-model data of "
        "10 bytes, and none of the chunks there ([0, 2]) can leave, because they are in use (computing with: t3, t5; a "
        "recomputed segment keeps all of its parameters, and saved-tensors hooks that a module puts on itself keep "
        "those that they return as they are). Raise device_budget to at least 48 bytes, or use smaller or shorter "
        "batches, or activation checkpointing (--gradient_checkpointing), or lower chunk_numel.\ntier "
    )
    assert parts.forecast.asked == [48]
    assert (parts.moved(), parts.placement.num_asked) == ([("evict", 1)], 1)


def test_what_is_over_the_budget_is_no_negative_room_in_words():
    parts = make(0)
    parts.others.nbytes = 100
    parts.forecast.names.clear()
    with pytest.raises(DeviceMemoryError) as caught:
        parts.reclaim.make_room_for(parts.chunks[0], 16, "m")
    assert "chunk 0 needs 16 bytes, 0 bytes are free beside non-model data of 100 bytes" in said(caught)
    assert "chunks there ([]) can leave, because they are in use (computing with: none;" in said(caught)


# Room for others


def test_others_that_fit_move_nothing():
    parts = make(2)
    parts.others.nbytes = 16
    parts.reclaim.make_room_for_others(is_step=True)
    assert (parts.moved(), parts.ledger.total_peak) == ([], 48)


def test_others_take_kept_buffers_then_copies_then_the_margin():
    parts = make(margin=[lambda: setattr(parts.others, "nbytes", 40)])
    parts.copies.evict(parts.chunks[2])
    parts.chunks[1].num_computing = 1
    parts.moved()
    parts.others.nbytes = 16
    parts.reclaim.make_room_for_others(is_step=True)
    assert (parts.moved(), parts.ledger.owners(Tier.DEVICE)) == ([], {"param": 32})
    parts.others.nbytes = 17
    parts.reclaim.make_room_for_others(is_step=True)
    assert (parts.moved(), parts.placement.num_asked) == ([("evict", 0)], 0)
    parts.others.nbytes = 48
    parts.chunks[1].num_computing = 0
    parts.reclaim.make_room_for_others(is_step=True)
    assert (parts.moved(), parts.placement.num_asked) == ([("evict", 1)], 0)
    assert parts.ledger.owners(Tier.DEVICE) == {}


def test_others_may_use_the_whole_budget_of_a_cautious_step():
    parts = make(device_nbytes=64, device_fraction=0.75)
    parts.others.nbytes = 16
    parts.reclaim.make_room_for_others(is_step=True)
    assert parts.moved() == []


def test_others_outside_of_a_step_are_only_noted():
    parts = make()
    parts.others.nbytes = 60
    parts.reclaim.make_room_for_others(is_step=False)
    assert (parts.moved(), parts.placement.num_asked) == (EVICT_ALL, 1)
    assert parts.ledger.total_step_peak == 60


@pytest.mark.parametrize("device_fraction", [1.0, 0.5])
def test_others_inside_of_a_step_may_be_too_many(device_fraction):
    """More than all there is, however cautious the step."""
    parts = make(device_fraction=device_fraction)
    parts.others.nbytes = 40
    parts.chunks[1].num_computing = 1
    with pytest.raises(DeviceMemoryError) as caught:
        parts.reclaim.make_room_for_others(is_step=True)
    assert said(caught).startswith(
        "device_budget is too small: non-model data (activations, temporaries) of 40 bytes and the chunks in use need "
        "8 bytes more than there is. Raise device_budget to at least 16 bytes, or use smaller or shorter batches, or "
        "activation checkpointing (--gradient_checkpointing).\ntier "
    )
    assert (parts.moved(), parts.forecast.asked) == ([("evict", 0), ("evict", 2)], [16])


# All of it


def test_everything_that_can_leave_leaves_and_no_buffer_is_kept():
    parts = make()
    parts.chunks[1].num_computing = 1
    parts.reclaim.evict_unused()
    assert parts.moved() == [("evict", 0), ("evict", 2)]
    assert parts.ledger.owners(Tier.DEVICE) == {"param": 16}


# Gathers that nobody here needs


def make_gathered(num_chunks):
    """Groups with copies of 32 bytes, into which gathers look until they are waited for."""
    parts = make(0, collectives=OneOfTwo(), num_chunks=num_chunks, device_nbytes=32 * num_chunks)
    for chunk in parts.chunks:
        with parts.copies.loaded_by_others(chunk, ahead=True) as payload:
            looking = [payload[:1]]
            chunk.arrival = Ticket(looking.clear)
        del payload
    parts.moved()
    return parts


def test_a_gather_that_is_in_the_way_is_waited_for():
    parts = make_gathered(2)
    tickets = [chunk.arrival for chunk in parts.chunks]
    parts.reclaim.make_room(32)
    assert parts.moved() == [("evict", 0)]
    assert [ticket.num_waits for ticket in tickets] == [1, 1]
    assert [chunk.arrival for chunk in parts.chunks] == [None, None]


def test_the_gather_of_the_chunk_that_needs_the_room_is_not_waited_for():
    parts = make_gathered(2)
    ticket = parts.chunks[0].arrival
    parts.reclaim.make_room_for(parts.chunks[0], 32, "m")
    assert (parts.moved(), ticket.num_waits) == ([("evict", 1)], 0)


def test_no_gather_is_waited_for_where_others_can_leave():
    parts = make_gathered(2)
    parts.copies.wait(parts.chunks[1])
    ticket = parts.chunks[0].arrival
    parts.reclaim.make_room(32)
    assert (parts.moved(), ticket.num_waits) == ([("evict", 1)], 0)
