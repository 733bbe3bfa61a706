"""Gradients that wait for the rest of their group, as one rank of two sees it; the other one always has tens."""

import pytest
import torch
from unit.runtime.data_parts import Process, Ticket
from unit.runtime.parts import NoForecast, Parts
from unit.spec_builders import BF16, FP32

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.events import GradientStored
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.buckets import GRADIENTS, STAGING, GroupBuckets


class Collectives:
    """One rank of two; the slices of the other have 10 everywhere, and nothing arrives before it is waited for."""

    def __init__(self, rank=0, is_asynchronous=False, staging=lambda numel, dtype: (0, 0)):
        self.rank, self.world_size = rank, 2
        self.is_asynchronous = is_asynchronous
        self.staging_numel = staging
        self.log = []
        self.sent = []

    def reduce_scatter(self, buffer, staging, what):
        self.log.append(what)
        self.sent.append((buffer.tolist(), staging))
        own = buffer.view(2, -1)[self.rank]

        def arrive():
            self.log.append(f"end of: {what}")
            own.copy_((own + 10) / 2)

        return Ticket(arrive)


def make(*chunks, **settings):
    """Buckets of one rank over chunks of tensors with so many elements."""
    collectives = Collectives(**settings)
    process = Process(collectives)
    for numels in chunks:
        process.add_chunk(*numels, types=FP32, chunk_numel=4)
    buckets = GroupBuckets(process.chunks, process.pool, process.streams, collectives, process.room)
    return process, buckets


def store(process, buckets, **gradients):
    for name, values in gradients.items():
        buckets.store(process.tensors[int(name[1:])], torch.tensor(values, dtype=torch.float32), is_at_home=False)


def told(averages):
    return [(average.tensor.spec.name, average.gradient.tolist()) for average in averages]


def on_device(process):
    return process.ledger.owners(Tier.DEVICE)


def test_gradients_collect_in_the_place_that_they_have_in_the_copy():
    process, buckets = make((4, 3))
    store(process, buckets, t0=[1, 2, 3, 4])
    assert buckets.unreduced() == [0]
    assert buckets.found == {0}
    assert not buckets.is_complete(process.chunks[0])
    store(process, buckets, t1=[5, 6, 7])
    assert buckets.is_complete(process.chunks[0])
    assert buckets.found == {0, 1}
    assert process.room.asked == [32], "once for the whole group, 8 elements of fp32"
    assert on_device(process) == {GRADIENTS: 32}
    list(buckets.reduce(process.chunks[0]))
    assert process.collectives.sent[0][0][:7] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def test_a_second_gradient_of_a_parameter_is_added():
    process, buckets = make((4, 3))
    store(process, buckets, t0=[1, 2, 3, 4])
    store(process, buckets, t0=[1, 1, 1, 1])
    assert not buckets.is_complete(process.chunks[0])
    list(buckets.reduce(process.chunks[0]))
    assert process.collectives.sent[0][0][:7] == [2.0, 3.0, 4.0, 5.0, 0.0, 0.0, 0.0], "zero where there is none"


def test_what_is_left_in_a_buffer_that_is_used_again_does_not_count():
    process, buckets = make((4, 3))
    for _ in range(2):
        store(process, buckets, t0=[1, 2, 3, 4])
        list(buckets.reduce(process.chunks[0]))
    assert [sent[:7] for sent, _ in process.collectives.sent] == [[1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0]] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_gets_the_average_of_what_it_has_at_home(rank):
    process, buckets = make((4, 3), rank=rank)
    store(process, buckets, t0=[2, 4, 6, 8], t1=[20, 40, 60])
    averages = told(buckets.reduce(process.chunks[0]))
    assert averages == [[("t0", [6.0, 7.0, 8.0, 9.0])], [("t1", [15.0, 25.0, 35.0])]][rank]
    assert process.collectives.log == ["reduces group 0", "end of: reduces group 0"]
    assert buckets.unreduced() == []
    assert process.pool.in_use(Tier.DEVICE) == 0


@pytest.mark.parametrize(("rank", "average"), [(0, [5.5, 6.0, 6.5, 7.0]), (1, [7.5, 8.0])])
def test_of_a_tensor_that_is_spread_each_gets_its_part(rank, average):
    process, buckets = make((6,), rank=rank)
    store(process, buckets, t0=[1, 2, 3, 4, 5, 6])
    assert told(buckets.reduce(process.chunks[0])) == [("t0", average)]


def test_what_this_rank_has_not_found_counts_if_another_has():
    process, buckets = make((2, 2, 4))
    store(process, buckets, t2=[1, 2, 3, 4])
    assert told(buckets.reduce(process.chunks[0])) == []
    assert told(buckets.finish({1, 2})) == [("t1", [5.0, 5.0])]
    assert buckets.found == set()
    assert told(buckets.finish({0, 1, 2})) == [], "once"


def test_an_average_that_is_held_needs_no_buffer():
    process, buckets = make((4, 3))
    store(process, buckets, t1=[1, 2, 3])
    list(buckets.reduce(process.chunks[0]))
    store(process, buckets, t0=[0, 0, 0, 0], t1=[0, 0, 0])  # in the same memory
    assert told(buckets.finish({0, 1})) == [("t0", [5.0, 5.0, 5.0, 5.0])]


def test_a_group_is_reduced_again_for_what_comes_late():
    process, buckets = make((4, 3))
    store(process, buckets, t0=[2, 2, 2, 2])
    assert told(buckets.reduce(process.chunks[0])) == [("t0", [6.0, 6.0, 6.0, 6.0])]
    store(process, buckets, t1=[4, 4, 4])
    assert buckets.unreduced() == [0]
    assert told(buckets.reduce(process.chunks[0])) == []
    assert process.collectives.sent[1][0][:7] == [0.0, 0.0, 0.0, 0.0, 4.0, 4.0, 4.0]
    assert told(buckets.finish({0, 1})) == [("t0", [5.0, 5.0, 5.0, 5.0])]


def test_a_group_without_any_gradient_takes_part():
    """Another rank has some."""
    process, buckets = make((4, 3))
    assert told(buckets.reduce(process.chunks[0])) == []
    assert process.collectives.sent[0][0][:7] == [0.0] * 7
    assert told(buckets.finish({0})) == [("t0", [5.0, 5.0, 5.0, 5.0])]


def test_groups_that_wait_are_told_in_order():
    process, buckets = make((4,), (4,), (4,))
    store(process, buckets, t2=[1, 1, 1, 1], t0=[1, 1, 1, 1])
    assert buckets.unreduced() == [0, 2]
    assert [buckets.is_complete(chunk) for chunk in process.chunks] == [True, False, True]


def test_where_reductions_go_on_beside_the_device_the_one_before_ends_with_the_next():
    process, buckets = make((4,), (4,), (4,), is_asynchronous=True)
    store(process, buckets, t0=[0, 0, 0, 0], t1=[2, 2, 2, 2], t2=[4, 4, 4, 4])
    assert told(buckets.reduce(process.chunks[2])) == []
    assert process.pool.in_use(Tier.DEVICE) == 96
    assert told(buckets.reduce(process.chunks[1])) == [("t2", [7.0, 7.0, 7.0, 7.0])]
    assert process.pool.in_use(Tier.DEVICE) == 96, "the averages of group 2 are on their way home"
    assert told(buckets.reduce(process.chunks[0])) == [("t1", [6.0, 6.0, 6.0, 6.0])]
    assert process.pool.in_use(Tier.DEVICE) == 64
    assert told(buckets.finish({0, 1, 2})) == [("t0", [5.0, 5.0, 5.0, 5.0])]
    assert process.collectives.log == [
        *("reduces group 2", "reduces group 1", "end of: reduces group 2"),
        *("reduces group 0", "end of: reduces group 1", "end of: reduces group 0"),
    ]
    assert process.pool.in_use(Tier.DEVICE) == 0


def test_averages_are_on_their_way_home_before_their_buffer_is_used_again():
    process, buckets = make((4,))
    log = []
    process.streams.release_in_flight = lambda: log.append(("release_in_flight", process.pool.in_use(Tier.DEVICE)))
    store(process, buckets, t0=[1, 1, 1, 1])
    for average in buckets.reduce(process.chunks[0]):
        log.append(average.tensor.spec.name)
    assert log == ["t0", ("release_in_flight", 32)]


def test_the_device_does_not_wait_for_the_way_home_before_the_next_group_has_arrived():
    process, buckets = make((4,), (4,), (4,), is_asynchronous=True)
    log = process.collectives.log
    process.streams.release_in_flight = lambda: log.append("waits for copies")
    store(process, buckets, t0=[0, 0, 0, 0], t1=[2, 2, 2, 2], t2=[4, 4, 4, 4])
    for index in (2, 1, 0):
        log += [f"home: {name}" for name, _ in told(buckets.reduce(process.chunks[index]))]
    log += [f"home: {name}" for name, _ in told(buckets.finish({0, 1, 2}))]
    assert log == [
        *("reduces group 2", "reduces group 1", "end of: reduces group 2", "home: t2"),
        *("reduces group 0", "waits for copies", "end of: reduces group 1", "home: t1"),
        *("waits for copies", "end of: reduces group 0", "waits for copies", "home: t0"),
    ]


def test_a_buffer_on_its_way_home_gives_way_to_one_that_is_needed():
    process, buckets = make((4,), (4,), (4,), is_asynchronous=True)
    store(process, buckets, t0=[0, 0, 0, 0], t1=[2, 2, 2, 2])
    list(buckets.reduce(process.chunks[1]))
    list(buckets.reduce(process.chunks[0]))
    assert on_device(process) == {GRADIENTS: 64}
    process.pool.allocate(Tier.DEVICE, process.pool.room(Tier.DEVICE) - 31, torch.uint8, "param")
    store(process, buckets, t2=[4, 4, 4, 4])
    assert on_device(process)[GRADIENTS] == 64, "that of group 2 is where that of group 1 was"
    buckets.let_go()
    assert told(buckets.finish({0, 1, 2})) == [("t0", [5.0, 5.0, 5.0, 5.0])]


def test_a_backward_that_failed_leaves_nothing():
    process, buckets = make((2, 2), (4,), (4,))
    store(process, buckets, t1=[1, 1])
    list(buckets.reduce(process.chunks[0]))  # of t0 an average is held
    store(process, buckets, t2=[1, 1, 1, 1])
    assert told(buckets.abandon()) == []
    assert (buckets.unreduced(), buckets.found) == ([], set())
    assert not buckets.is_complete(process.chunks[1])
    assert process.pool.in_use(Tier.DEVICE) == 0
    assert told(buckets.finish({0, 1, 2, 3})) == []
    store(process, buckets, t2=[8, 8, 8, 8])
    assert told(buckets.reduce(process.chunks[1])) == [("t2", [9.0, 9.0, 9.0, 9.0])]


def test_what_is_under_way_when_a_backward_fails_arrives():
    process, buckets = make((4,), is_asynchronous=True)
    store(process, buckets, t0=[2, 2, 2, 2])
    assert told(buckets.reduce(process.chunks[0])) == []
    assert told(buckets.abandon()) == [("t0", [6.0, 6.0, 6.0, 6.0])]
    assert process.pool.in_use(Tier.DEVICE) == 0


def test_a_buffer_that_finds_no_room():
    process, buckets = make((4, 3))
    process.pool.allocate(Tier.DEVICE, 4096 - 31, torch.uint8, "param")
    with pytest.raises(BudgetError, match="'gradients'"):
        store(process, buckets, t0=[1, 1, 1, 1])
    assert (buckets.unreduced(), buckets.found) == ([], set())


def test_frozen_parameters_are_not_waited_for():
    process = Process(Collectives())
    process.add_chunk(2, trainable=False)
    buckets = GroupBuckets(process.chunks, process.pool, process.streams, process.collectives, process.room)
    assert buckets.is_complete(process.chunks[0])


def test_parameters_that_came_are_waited_for():
    process, buckets = make((4,))
    process.add_chunk(2, 2, types=FP32)
    buckets.note_chunks()
    store(process, buckets, t1=[1, 1])
    assert not buckets.is_complete(process.chunks[1])
    store(process, buckets, t2=[1, 1])
    assert buckets.is_complete(process.chunks[1])


# Scratch space


def doubled(numel, dtype):
    """So much, in its own type and in fp32."""
    return 2 * numel, 3 if dtype is torch.bfloat16 else 0


def test_scratch_space_is_for_the_largest_slice_of_each_type():
    process = Process(Collectives(staging=doubled))
    for numel, types, trainable in ((4, BF16, True), (6, BF16, True), (8, FP32, True), (20, FP32, False)):
        process.add_chunk(numel, types=types, chunk_numel=numel, trainable=trainable)
    buckets = GroupBuckets(process.chunks, process.pool, process.streams, process.collectives, process.room)
    assert on_device(process) == {STAGING: 12 * 2 + 3 * 4 + 16 * 4}
    list(buckets.reduce(process.chunks[0]))
    list(buckets.reduce(process.chunks[2]))
    shapes = [
        [None if space is None else (space.numel(), space.dtype) for space in staging]
        for _, staging in process.collectives.sent
    ]
    assert shapes == [[(12, torch.bfloat16), (3, torch.float32)], [(16, torch.float32), None]]


def test_scratch_space_follows_the_chunks():
    process, buckets = make((4,), staging=doubled)
    assert on_device(process) == {STAGING: 32}
    process.add_chunk(6, types=FP32, chunk_numel=6)
    buckets.note_chunks()
    assert on_device(process) == {STAGING: 48}
    store(process, buckets, t0=[1, 1, 1, 1])
    buckets.close()
    process.pool.trim()
    assert on_device(process) == {}
    buckets.close()


def test_the_buffer_of_a_group_is_measured_for_once():
    """What others take is read when the first gradient comes, and when the buffer is free again."""
    parts = Parts(Collectives(), forecast=NoForecast(), tracer=None)
    parts.add_chunk(4, 3, types=FP32, chunk_numel=4)
    buckets = parts.buckets
    parts.readings()
    for tensor, num_readings in zip(parts.tensors, (1, 0), strict=True):
        buckets.store(tensor, torch.ones(tensor.spec.shape), is_at_home=False)
        assert parts.readings() == num_readings
    list(buckets.reduce(parts.chunks[0]))
    assert parts.readings() == 1


# One process


def make_alone(**chunk):
    """The buckets of one process, and the first of two tensors, whose gradients are in bf16."""
    parts = Parts()
    tensor, _ = parts.add_chunk(2, 2, **chunk)
    return parts, parts.buckets, tensor


@pytest.mark.parametrize(
    ("home", "is_at_home", "crossing"), [(Tier.HOST, False, 4), (Tier.HOST, True, 0), (Tier.DEVICE, False, 0)]
)
def test_a_gradient_goes_home_at_once(home, is_at_home, crossing):
    parts, buckets, tensor = make_alone(home=home)
    if home is Tier.DEVICE:
        parts.load(tensor.chunk)
    buckets.store(tensor, torch.tensor([5.0, 6.0], dtype=torch.bfloat16), is_at_home=is_at_home)
    assert parts.gradients.of(tensor).tolist() == [5.0, 6.0]
    (event,) = parts.events
    assert event == GradientStored(0, 0, crossing)
    assert not buckets.is_complete(tensor.chunk)
    assert (buckets.unreduced(), list(buckets.found)) == ([], [])
    assert [list(buckets.reduce(tensor.chunk)), list(buckets.finish({0})), list(buckets.abandon())] == [[], [], []]
    assert on_device(parts).keys() <= {"param", "master"}
    buckets.close()


def test_what_was_handed_out_follows_a_gradient_that_comes():
    parts, buckets, tensor = make_alone()
    parts.gradients.accumulate = True
    buckets.store(tensor, torch.tensor([5.0, 6.0], dtype=torch.bfloat16), is_at_home=False)
    mirror = parts.gradient_mirrors.hand_out(tensor)
    buckets.store(tensor, torch.tensor([1.0, 1.0], dtype=torch.bfloat16), is_at_home=False)
    assert mirror.tolist() == [6.0, 7.0]


def test_a_gradient_that_a_failed_attempt_has_counted_is_not_counted_again():
    parts, buckets, tensor = make_alone()
    parts.gradients.accumulate = True
    gradient = torch.tensor([5.0, 6.0], dtype=torch.bfloat16)
    buckets.store(tensor, gradient, is_at_home=False)
    attempts = parts.gradients.attempts
    attempts.begin()
    buckets.store(tensor, gradient, is_at_home=False)
    attempts.undo()
    buckets.store(tensor, gradient, is_at_home=False)
    assert parts.gradients.of(tensor).tolist() == [10.0, 12.0]
    assert tensor.crossing_nbytes == 0
