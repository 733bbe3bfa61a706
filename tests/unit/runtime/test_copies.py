"""Copies of chunks on the device, and chunks that move their homes, of 16 bytes each; the watch only looks."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from unit.runtime.data_parts import CPU, Ticket
from unit.runtime.parts import Fake, Parts

from hf_patrickstar.errors import BudgetError, DeviceMemoryError
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.tiers import Tier

FIRST = [0, 1, 2, 3, 16, 17, 18, 19]
"""What the chunk of tensors 0 and 1 has."""


class OneOfTwo:
    """The second of two processes; the other never says anything."""

    rank, world_size = 1, 2


class Slow:
    """Streams that take until a ticket is joined, or fail if there is none."""

    device = CPU

    def __init__(self, ticket=None):
        self.ticket = ticket

    def fetch(self, source, target, after=()):
        if self.ticket is None:
            raise RuntimeError("the bus is gone")
        return self.ticket

    to_device = to_slice = fetch


def make(*homes, collectives=None, **settings):
    """Parts with a chunk of two tensors of four elements at each home, and what the watch was told."""
    watched = []
    parts = Parts(collectives, watch=Fake(watched, "collect"), **settings)
    for home in homes or (Tier.HOST,):
        parts.add_chunk(4, 4, home=home)
    parts.watched = watched
    return parts


def owners(parts, tier=Tier.DEVICE):
    return parts.ledger.owners(tier)


# Making them


@pytest.mark.parametrize("ahead", [False, True])
def test_a_copy_has_the_values_of_its_home(ahead):
    parts = make(Tier.HOST, Tier.HOST)
    chunk = parts.chunks[0]
    assert (parts.chunks[0] in parts.copies, len(parts.copies), list(parts.copies)) == (False, 0, [])
    parts.copies.load(chunk, ahead=ahead)
    assert chunk.compute.tolist() == FIRST
    assert chunk.compute.data_ptr() != chunk.param.data_ptr()
    assert (parts.chunks[0] in parts.copies, parts.chunks[1] in parts.copies, len(parts.copies)) == (True, False, 1)
    assert list(parts.copies) == [chunk]
    assert owners(parts) == {"param": 16}
    (event,) = parts.events
    assert (event.chunk_index, event.nbytes, event.ahead) == (0, 16, ahead)


def test_a_copy_is_found_by_its_storage_until_it_goes():
    parts = make(Tier.HOST, Tier.DEVICE)
    moving, static = parts.chunks
    copies = parts.copies
    copies.load(moving, ahead=False)
    key = moving.compute.untyped_storage()._cdata
    assert copies.find(key) is moving
    assert copies.find(static.param.untyped_storage()._cdata) is static
    assert copies.find(moving.param.untyped_storage()._cdata) is None
    copies.evict(moving)
    assert copies.find(key) is None


def test_without_room_there_is_no_copy_and_nothing_is_lost():
    parts = make(Tier.HOST, device_nbytes=15)
    with pytest.raises(DeviceMemoryError, match="device_budget is too small") as caught:
        parts.copies.load(parts.chunks[0], ahead=False)
    assert isinstance(caught.value.__cause__, BudgetError)
    assert (parts.chunks[0].compute, len(parts.copies), parts.events, owners(parts)) == (None, 0, [], {})


@pytest.mark.parametrize("ahead", [False, True])
def test_a_copy_that_fails_leaves_nothing_behind(ahead):
    parts = make(streams=Slow())
    with pytest.raises(RuntimeError, match="the bus is gone"):
        parts.copies.load(parts.chunks[0], ahead=ahead)
    assert (parts.chunks[0].compute, len(parts.copies), parts.events) == (None, 0, [])
    assert owners(parts) == {"pool": 16}, "the buffer is kept for the next"
    assert parts.watched == [], "nobody can have written to what was never filled"


def test_a_copy_is_made_anew_of_what_the_home_has_by_then():
    parts = make()
    (chunk,) = parts.chunks
    parts.copies.load(chunk, ahead=False)
    parts.copies.evict(chunk)
    chunk.param.fill_(5)
    parts.copies.load(chunk, ahead=False)
    assert chunk.compute.tolist() == [5] * 8
    assert parts.moved() == [("load", 0), ("evict", 0), ("load", 0)]


@pytest.mark.parametrize("mode", [torch.inference_mode, FakeTensorMode])
def test_a_copy_that_is_made_in_a_mode_is_an_ordinary_tensor(mode):
    parts = make()
    with mode():
        parts.copies.load(parts.chunks[0], ahead=False)
    compute = parts.chunks[0].compute
    assert type(compute) is torch.Tensor
    assert not compute.is_inference()
    assert compute.tolist() == FIRST


def test_a_copy_that_is_made_inside_of_a_function_transform_is_an_ordinary_tensor():
    parts = make()

    def function(x):
        parts.copies.load(parts.chunks[0], ahead=False)
        return (x * 2).sum()

    torch.func.grad(function)(torch.ones(2))
    compute = parts.chunks[0].compute
    assert not torch._C._functorch.is_functorch_wrapped_tensor(compute)
    assert compute.tolist() == FIRST


# Waiting for them


@pytest.mark.parametrize("is_done", [False, True])
def test_a_copy_that_was_started_ahead_is_waited_for_once(is_done):
    ticket = Ticket()
    ticket.is_done = is_done
    parts = make(streams=Slow(ticket))
    (chunk,) = parts.chunks
    parts.copies.load(chunk, ahead=True)
    assert (chunk.arrival, chunk.under_way, ticket.num_waits) == (ticket, (ticket,), 0)
    waited_s = parts.copies.wait(chunk)
    assert waited_s is None if is_done else waited_s > 0
    assert (chunk.arrival, ticket.num_waits) == (None, 1)


def test_a_copy_on_demand_is_there_at_once_but_the_home_may_still_be_read():
    ticket = Ticket()
    parts = make(streams=Slow(ticket))
    (chunk,) = parts.chunks
    parts.copies.load(chunk, ahead=False)
    assert (chunk.arrival, chunk.under_way) == (None, (ticket,))
    chunk.wait()
    assert ticket.num_waits == 1


def test_a_copy_that_goes_before_it_has_arrived_is_waited_for():
    ticket = Ticket()
    parts = make(streams=Slow(ticket))
    (chunk,) = parts.chunks
    parts.copies.load(chunk, ahead=True)
    parts.copies.evict(chunk)
    assert (chunk.arrival, ticket.num_waits, chunk.compute) == (None, 1, None)


# Those of groups


def test_the_own_slice_is_there_when_others_bring_theirs():
    parts = make(collectives=OneOfTwo())
    (chunk,) = parts.chunks
    with parts.copies.loaded_by_others(chunk, ahead=True) as payload:
        assert payload[8:].tolist() == chunk.param.tolist()
        assert (payload is chunk.compute, payload.numel()) == (True, 16)
        assert parts.events == []
    assert (parts.moved(), owners(parts)) == ([("ahead", 0)], {"param": 32})


def test_a_gather_that_fails_leaves_nothing_behind():
    parts = make(collectives=OneOfTwo())
    (chunk,) = parts.chunks
    with pytest.raises(KeyboardInterrupt), parts.copies.loaded_by_others(chunk, ahead=False):
        raise KeyboardInterrupt
    assert (chunk.compute, len(parts.copies), parts.events, parts.watched) == (None, 0, [], [])


@pytest.mark.parametrize(("home", "nbytes"), [(Tier.HOST, 16), (Tier.DEVICE, 0)])
def test_only_the_own_slice_crosses_and_only_from_the_host(home, nbytes):
    parts = make(home, collectives=OneOfTwo())
    with parts.copies.loaded_by_others(parts.chunks[0], ahead=False):
        pass
    assert [event.nbytes for event in parts.events] == [nbytes]


# Dropping them


def test_an_evicted_copy_gives_its_buffer_to_the_next():
    parts = make(Tier.HOST, Tier.HOST, device_nbytes=16)
    first, second = parts.chunks
    parts.copies.load(first, ahead=False)
    address = first.compute.data_ptr()
    parts.copies.evict(first)
    assert owners(parts) == {"pool": 16}
    parts.copies.load(second, ahead=False)
    assert second.compute.data_ptr() == address
    assert parts.moved() == [("load", 0), ("evict", 0), ("load", 1)]


def test_a_buffer_that_somebody_looks_into_is_not_given_to_the_next():
    parts = make()
    (chunk,) = parts.chunks
    parts.copies.load(chunk, ahead=False)
    view = chunk.compute[:2]
    parts.copies.evict(chunk)
    assert owners(parts) == {}
    assert view.tolist() == [0, 1]


def test_what_was_written_to_a_copy_is_collected_while_it_is_there():
    seen = []
    parts = Parts(watch=Fake([], collect=lambda chunk: seen.append(chunk.compute is not None)))
    parts.add_chunk(4)
    (chunk,) = parts.chunks
    parts.copies.load(chunk, ahead=False)
    parts.copies.evict(chunk)
    assert seen == [True]


def test_a_poisoned_copy_is_nan_after_what_was_written_to_it_was_collected():
    seen = []
    parts = Parts(watch=Fake([], collect=lambda chunk: seen.append(chunk.compute.tolist())))
    parts.add_chunk(4, 4)
    (chunk,) = parts.chunks
    parts.copies.load(chunk, ahead=False)
    parts.copies.poison(chunk)
    assert seen == [FIRST]
    assert chunk.compute.isnan().all()
    assert chunk.param.tolist() == FIRST


@pytest.mark.parametrize(
    ("home", "is_there", "events"),
    [(Tier.HOST, True, [("invalidate", 0)]), (Tier.HOST, False, []), (Tier.DEVICE, True, [])],
)
def test_only_a_copy_that_is_there_becomes_invalid(home, is_there, events):
    parts = make(home)
    (chunk,) = parts.chunks
    if home is Tier.HOST and is_there:
        parts.copies.load(chunk, ahead=False)
        parts.moved()
    parts.copies.invalidate(chunk)
    assert parts.moved() == events
    assert (chunk.compute is chunk.param) == (home is Tier.DEVICE)


def test_a_chunk_that_is_about_to_go_is_forgotten_wherever_it_is():
    parts = make(Tier.HOST, Tier.DEVICE, Tier.HOST)
    moving, static, absent = parts.chunks
    parts.copies.load(moving, ahead=False)
    keys = [chunk.compute.untyped_storage()._cdata for chunk in (moving, static)]
    parts.moved()
    for chunk in (moving, static, absent):
        parts.copies.forget(chunk)
    assert [chunk.compute for chunk in (moving, static, absent)] == [None] * 3
    assert [parts.copies.find(key) for key in keys] == [None, None]
    assert (parts.moved(), len(parts.copies)) == ([], 0)


def test_at_the_end_every_copy_is_dropped():
    parts = make(Tier.HOST, Tier.HOST, Tier.DEVICE)
    for chunk in parts.chunks[:2]:
        parts.copies.load(chunk, ahead=False)
    parts.copies.close()
    assert len(parts.copies) == 0
    assert parts.copies.find(parts.chunks[2].param.untyped_storage()._cdata) is None
    assert owners(parts) == {"param": 16, "master": 32, "pool": 32}


# Which may leave


def test_a_chunk_in_use_stays():
    parts = make(Tier.HOST, Tier.HOST, Tier.HOST)
    for chunk in parts.chunks:
        parts.copies.load(chunk, ahead=False)
    view = parts.use(1)
    parts.chunks[2].num_computing = 1
    assert parts.copies.unused() == [parts.chunks[0]]
    assert parts.copies.unused(exclude=parts.chunks[0]) == []
    del view
    parts.chunks[2].num_computing = 0
    assert parts.copies.unused(exclude=parts.chunks[0]) == parts.chunks[1:]


def test_the_chunk_that_was_visited_longest_ago_comes_first():
    parts = make(Tier.HOST, Tier.HOST, Tier.HOST)
    for chunk, tick in zip(parts.chunks, (3, 1, 2), strict=True):
        parts.copies.load(chunk, ahead=False)
        chunk.last_access = tick
    assert [chunk.spec.index for chunk in parts.copies.by_age] == [1, 2, 0]


# Homes


@pytest.mark.parametrize(("home", "moves"), [(Tier.HOST, True), (Tier.DEVICE, False)])
def test_whether_any_chunk_moves(home, moves):
    parts = make(Tier.DEVICE, home)
    assert parts.copies.moves is moves


def test_a_chunk_that_is_at_home_on_the_device_is_its_own_copy():
    parts = make(Tier.DEVICE)
    (chunk,) = parts.chunks
    copies = parts.copies
    assert chunk.compute is chunk.param
    assert (len(copies), copies.unused()) == (0, [])


def test_a_retired_chunk_does_not_move_and_a_new_one_is_noticed():
    parts = make(Tier.HOST)
    copies = parts.copies
    copies.forget(parts.chunks[0])
    parts.chunks[0].give_back(parts.pool)
    parts.chunks[0].retire()
    parts.add_chunk(4, home=Tier.DEVICE)
    assert (copies.moves, parts.chunks[1].compute) == (True, None)
    copies.note_chunks()
    assert (copies.moves, parts.chunks[1].compute is parts.chunks[1].param) == (False, True)


@pytest.mark.parametrize(("source", "target"), [(Tier.HOST, Tier.DEVICE), (Tier.DEVICE, Tier.HOST)])
def test_a_home_moves_with_all_its_lists(source, target):
    parts = make(source)
    (chunk,) = parts.chunks
    parts.copies.rehome(chunk, target)
    assert (chunk.home, chunk.param.tolist(), chunk.lists["master"].tolist()) == (target, FIRST, FIRST)
    assert chunk.param.dtype is torch.bfloat16
    assert owners(parts, target) == {"param": 16, "master": 32}
    assert owners(parts, source) == {}
    (event,) = parts.events
    assert (event.chunk_index, event.to_device, event.nbytes) == (0, target is Tier.DEVICE, 48)
    is_static = target is Tier.DEVICE
    assert (chunk.compute is chunk.param, chunk.compute is None) == (is_static, not is_static)
    assert parts.copies.moves is not is_static


def test_a_copy_is_dropped_before_its_home_becomes_one():
    parts = make()
    (chunk,) = parts.chunks
    parts.copies.load(chunk, ahead=False)
    parts.copies.rehome(chunk, Tier.DEVICE)
    assert (len(parts.copies), chunk.compute is chunk.param) == (0, True)
    assert owners(parts)["param"] == 16


def test_a_copy_with_the_chunks_of_others_stays_when_the_own_home_moves():
    parts = make(collectives=OneOfTwo())
    (chunk,) = parts.chunks
    with parts.copies.loaded_by_others(chunk, ahead=False) as payload:
        pass
    parts.copies.rehome(chunk, Tier.DEVICE)
    assert (chunk.compute is payload, parts.chunks[0] in parts.copies, parts.copies.moves) == (True, True, True)


def test_a_home_waits_for_what_reads_it():
    parts = make()
    (chunk,) = parts.chunks
    told = []
    chunk.note(Ticket(lambda: told.append(("copy", chunk.home))))
    chunk.reader = Fake([], wait=lambda: told.append(("checkpoint", chunk.home)))
    parts.copies.rehome(chunk, Tier.DEVICE)
    assert told == [("copy", Tier.HOST), ("checkpoint", Tier.HOST)]


@pytest.mark.parametrize("device_nbytes", [15, 47])
def test_a_home_moves_as_a_whole_or_not_at_all(device_nbytes):
    """There is no room at all, or not for the masters."""
    parts = make(device_nbytes=device_nbytes)
    (chunk,) = parts.chunks
    with pytest.raises(BudgetError):
        parts.copies.rehome(chunk, Tier.DEVICE)
    assert (chunk.home, chunk.param.tolist(), chunk.lists["master"].tolist()) == (Tier.HOST, FIRST, FIRST)
    assert (owners(parts), owners(parts, Tier.HOST)) == ({}, {"param": 16, "master": 32})
    assert parts.events == []


def test_a_static_chunk_that_finds_no_room_on_the_host_is_still_found():
    parts = make(Tier.DEVICE, host_nbytes=40)
    (chunk,) = parts.chunks
    copies = parts.copies
    with pytest.raises(BudgetError):
        copies.rehome(chunk, Tier.HOST)
    assert chunk.compute is chunk.param
    assert copies.find(chunk.param.untyped_storage()._cdata) is chunk


def test_without_pinned_memory_nothing_is_pinned():
    parts = make()
    parts.copies.pin(parts.chunks[0])
    assert parts.moved() == []


@pytest.mark.parametrize(("host_nbytes", "events"), [(4096, [("to host", 0)]), (60, [])])
def test_a_chunk_is_pinned_where_there_is_room(host_nbytes, events):
    parts = make(host_nbytes=host_nbytes)
    asked = []

    class Pinning(PayloadPool):
        """Has no page-locked memory; notes who asks for it."""

        pins_memory = True

        def allocate(self, tier, numel, dtype, owner, *, pinned=False):
            asked.append((owner, pinned))
            return super().allocate(tier, numel, dtype, owner)

    parts.pool.__class__ = Pinning
    parts.copies.pin(parts.chunks[0])
    assert parts.moved() == events
    assert asked[0] == ("param", True)
    assert parts.chunks[0].param.tolist() == FIRST
    assert parts.chunks[0].home is Tier.HOST
