"""Agreements between processes, with threads in their place."""

import itertools
import pickle
import zlib

import pytest
import torch
from unit.dist.ranks import Exchange, ThreadCollectives, in_threads

from hf_patrickstar.dist.messages import ROW_NBYTES
from hf_patrickstar.dist.order import Beginning, Collective, Ending, Order, Phase, Room, Subject
from hf_patrickstar.errors import CollectiveError
from hf_patrickstar.schedule.trace import Trace, Visit

ROOM = Room(1000, None, 10, (3, 1))
SHAPES = ((4, 128), (4,))


class Rank:
    """One process: its order, and the collectives that it did."""

    def __init__(self, collectives, checks_all=False):
        self.rank = collectives.rank
        self.collectives = collectives
        self.order = Order(collectives, checks_all=checks_all)
        self.is_in_step = True
        self.done = []

    def do(self, collectives):
        self.done += [(subject.name.lower(), index) for subject, index in collectives]

    def ask(self, subject, index, who):
        self.do(self.order.ask(Collective(subject, index), who, is_in_step=self.is_in_step))

    def gather(self, *indices):
        for index in indices:
            self.ask(Subject.GATHER, index, f"layer {index}")

    def reduce(self, *indices):
        for index in indices:
            self.ask(Subject.REDUCE, index, "its gradients")

    def follow(self, subject, index, dtype=torch.float32, numel=8):
        self.order.check(Collective(subject, index), dtype, numel)
        self.do([Collective(subject, index)])

    def end(self, phase=Phase.FORWARD, is_diverged=False, indices=(), is_recorded=False):
        ending = Ending(phase, is_diverged, list(indices), is_recorded)
        while (ended := self.order.end(ending)).collectives:
            self.do(ended.collectives)
        return ended.is_diverged, ended.indices

    def begin(self, kind="training", shapes=SHAPES, traces=7, room=ROOM, version=0):
        return self.order.begin(kind, shapes, traces, room, version)


def run(*functions, **settings):
    """Each function in a thread, with the rank that it is; returns the ranks and what came of them."""
    exchange = Exchange(len(functions))
    ranks = [Rank(ThreadCollectives(rank, exchange), **settings) for rank in range(len(functions))]

    def call(rank, function):
        try:
            return function(rank)
        except CollectiveError:
            raise
        except Exception:
            exchange.barrier.abort()
            raise

    calls = [lambda rank=rank, function=function: call(rank, function) for rank, function in zip(ranks, functions, strict=True)]
    return ranks, in_threads(*calls, expected=CollectiveError)


def agree(*functions, **settings):
    """The same, where nothing fails and all do the same collectives; returns what they did, and the results."""
    ranks, results = run(*functions, **settings)
    for result in results:
        if isinstance(result, Exception):
            raise result
    assert all(rank.done == ranks[0].done for rank in ranks)
    return ranks[0].done, results


def disagree(*functions, **settings):
    """The same, where all find out; returns what they say, which is the same."""
    _, results = run(*functions, **settings)
    texts = {str(result) for result in results if isinstance(result, CollectiveError)}
    assert all(isinstance(result, CollectiveError) for result in results), results
    (text,) = texts
    assert text.startswith("the processes do not do the same: ")
    assert text.endswith("must be called by all of them, in the same order and equally often")
    return text.removeprefix("the processes do not do the same: ").partition(". Forward, backward")[0]


# Asking


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_all_ask_for_is_done_once(world_size):
    done, _ = agree(*[lambda rank: rank.gather(4, 2)] * world_size)
    assert done == [("gather", 4), ("gather", 2)]


def test_different_wishes_are_all_granted_in_one_order():
    done, _ = agree(lambda rank: rank.gather(5), lambda rank: rank.gather(2), lambda rank: rank.reduce(1))
    assert done == [("gather", 2), ("gather", 5), ("reduce", 1)]


def test_the_same_wishes_in_another_order_are_granted_again():
    """A process that has got something before it asked still needs as many messages as those that asked."""
    done, _ = agree(lambda rank: rank.gather(1, 2), lambda rank: rank.gather(2, 1))
    assert done == [("gather", 1), ("gather", 2)] * 2


def test_a_group_can_be_gathered_and_reduced_at_once():
    done, _ = agree(lambda rank: rank.reduce(3), lambda rank: rank.gather(3))
    assert done == [("gather", 3), ("reduce", 3)]


def test_whoever_has_ended_serves_the_others():
    """One branch of the model needs three groups, the other one, and the last none."""

    def step(*indices):
        def work(rank):
            rank.gather(*indices)
            before = len(rank.done)
            return before, rank.end()

        return work

    done, results = agree(step(7, 8, 9), step(8), step())
    assert done == [("gather", index) for index in (7, 8, 8, 9)]
    assert [before for before, _ in results] == [4, 2, 0]
    assert {result for _, result in results} == {(False, frozenset())}


def test_who_asks_for_what_is_told_to_the_collectives():
    ranks, _ = run(lambda rank: (rank.gather(4), rank.end()), lambda rank: rank.end())
    assert ranks[0].collectives.whats[0] == "needs group 4 (gather) for layer 4"
    assert ranks[1].collectives.whats[0] == "has ended its forward"


def test_a_plan_needs_no_messages():
    def work(rank):
        rank.gather(1)
        rank.follow(Subject.GATHER, 2)
        rank.follow(Subject.REDUCE, 2)
        return len(rank.collectives.whats)

    done, results = agree(work, work)
    assert done == [("gather", 1), ("gather", 2), ("reduce", 2)]
    assert results == [1, 1], "only what was asked for does"


# Ending


def test_one_that_is_lost_is_known_to_all():
    _, results = agree(lambda rank: rank.end(), lambda rank: rank.end(is_diverged=True), lambda rank: rank.end())
    assert results == [(True, frozenset())] * 3


@pytest.mark.parametrize("num_tensors", [1, 7, 8, 9, 64, 10_000])
def test_what_got_gradients_anywhere(num_tensors):
    wanted = {0, 5, 6, 7, 8, 63, num_tensors - 1} & set(range(num_tensors))
    left, right = sorted(wanted)[::2], [*sorted(wanted)[1::2], max(wanted)]
    ranks, results = agree(
        lambda rank: rank.end(Phase.BACKWARD, indices=left), lambda rank: rank.end(Phase.BACKWARD, indices=right)
    )
    assert results == [(False, frozenset(wanted))] * 2


def test_a_message_about_many_tensors_fits_into_one_row():
    sent = []

    def end(rank):
        swap = rank.collectives.place.swap
        rank.collectives.place.swap = lambda place, value: sent.append(len(pickle.dumps(value))) or swap(place, value)
        return rank.end(Phase.BACKWARD, indices=range(10_000))

    run(end)
    assert max(sent) < ROW_NBYTES - 16


def test_all_of_many_got_one():
    _, results = agree(*[lambda rank: rank.end(indices=range(rank.rank, 200, 2))] * 2)
    assert results == [(False, frozenset(range(200)))] * 2


def test_a_model_without_parameters_ends_too():
    _, results = agree(lambda rank: rank.end(), lambda rank: rank.end())
    assert results == [(False, frozenset())] * 2


@pytest.mark.parametrize(("left", "right"), itertools.combinations(Phase, 2))
def test_phases_that_differ(left, right):
    text = disagree(lambda rank: rank.end(left), lambda rank: rank.end(right))
    names = [f"rank {rank} has ended its {phase.name.lower()}" for rank, phase in enumerate((left, right))]
    assert text == "; ".join(f"{name}, with collectives of checksum 00000000 so far" for name in names)


@pytest.mark.parametrize(
    "plans",
    [
        ([("GATHER", 1), ("GATHER", 2)], [("GATHER", 2), ("GATHER", 1)]),
        ([("GATHER", 1)], [("REDUCE", 1)]),
        ([("GATHER", 1)], [("GATHER", 1), ("GATHER", 1)]),
        ([("GATHER", 11)], [("GATHER", 1)]),
    ],
)
def test_collectives_that_differed_are_found_at_the_end(plans):
    def follow(rank):
        for name, index in plans[rank.rank]:
            rank.follow(Subject[name], index)
        return rank.end()

    text = disagree(follow, follow)
    sums = [zlib.crc32("".join(f"{Subject[name]} {index}" for name, index in plan).encode()) for plan in plans]
    assert text == "; ".join(
        f"rank {rank} has ended its forward, with collectives of checksum {checksum:08x} so far"
        for rank, checksum in enumerate(sums)
    )


# One does something else

DOINGS = {
    "asks": (lambda rank: rank.gather(4), "needs group 4 (gather) for layer 4"),
    "begins": (lambda rank: rank.begin(), "begins 'training'"),
    "reads": (lambda rank: rank.order.agree(Subject.READ, [3], "reads 'weight'"), "reads 'weight'"),
    "norm": (lambda rank: rank.order.agree(Subject.NORM, [3], "computes a norm"), "computes a norm"),
    "checks": (
        lambda rank: rank.follow(Subject.REDUCE, 3),
        "is about to reduce group 3, as planned (8 elements of torch.float32)",
    ),
    "ends": (lambda rank: rank.end(), "has ended its forward"),
}


@pytest.mark.parametrize(
    ("left", "right"), [pair for pair in itertools.permutations(DOINGS, 2) if set(pair) != {"asks", "ends"}]
)
def test_each_subject_against_each_other(left, right):
    (first, says_first), (second, says_second) = DOINGS[left], DOINGS[right]
    assert disagree(first, second, checks_all=True) == f"rank 0 {says_first}; rank 1 {says_second}"


def test_the_one_of_three_that_does_something_else():
    asks, reads = DOINGS["asks"][0], DOINGS["reads"][0]
    text = disagree(asks, lambda rank: rank.end(Phase.BACKWARD), reads)
    assert text == "rank 0 needs group 4 (gather) for layer 4; rank 1 has ended its backward; rank 2 reads 'weight'"


@pytest.mark.parametrize("subject", [Subject.READ, Subject.NORM])
def test_one_subject_but_not_the_same_thing(subject):
    def same(rank):
        rank.order.agree(subject, [3], "reads 'three'")

    agree(same, same)
    text = disagree(same, lambda rank: rank.order.agree(subject, [4], "reads 'four'"))
    assert text == "rank 0 reads 'three'; rank 1 reads 'four'"


def test_one_process_agrees_with_itself():
    order = Order(ThreadCollectives(), checks_all=True)
    assert order.is_alone
    assert order.begin("training", SHAPES, 7, ROOM, 0) == Beginning(SHAPES, True, ROOM)
    wanted = Collective(Subject.GATHER, 3)
    order.check(wanted, torch.float32, 8)
    assert order.ask(wanted, "layer 3", is_in_step=True) == (wanted,)
    ended = order.end(Ending(Phase.BACKWARD, is_diverged=True, indices=[2, 5]))
    assert (ended.collectives, ended.is_diverged, ended.indices) == ((), True, frozenset({2, 5}))
    assert order.agree(Subject.READ, [3], "reads") == [0]
    trace = Trace("training", (8, 8), (Visit(0, (), 3), Visit(1)))
    assert order.agree_on_trace(trace) == trace
    assert list(order.agree_on_estimated([trace])) == [trace]


def test_only_some_record_it():
    """Then no trace is kept: a trace must be of all."""
    _, results = agree(lambda rank: rank.end(is_recorded=True), lambda rank: rank.end())
    assert results == [(True, frozenset())] * 2
    _, results = agree(*[lambda rank: rank.end(is_recorded=True)] * 2)
    assert results == [(False, frozenset())] * 2


def test_plans_are_checked_only_for_debugging():
    def follow(rank):
        rank.follow(Subject.GATHER, rank.rank)

    ranks, results = run(follow, follow)
    assert results == [None, None]
    assert [rank.done for rank in ranks] == [[("gather", 0)], [("gather", 1)]]
    text = disagree(follow, follow, checks_all=True)
    data = "as planned (8 elements of torch.float32)"
    assert text == f"rank 0 is about to gather group 0, {data}; rank 1 is about to gather group 1, {data}"
    text = disagree(follow, lambda rank: rank.follow(Subject.REDUCE, 0), checks_all=True)  # the group is the same
    assert text == f"rank 0 is about to gather group 0, {data}; rank 1 is about to reduce group 0, {data}"
    same = f"rank 0 is about to gather group 0, {data}; rank 1 is about to gather group 0, as planned"
    text = disagree(follow, lambda rank: rank.follow(Subject.GATHER, 0, torch.bfloat16), checks_all=True)
    assert text == f"{same} (8 elements of torch.bfloat16)"
    text = disagree(follow, lambda rank: rank.follow(Subject.GATHER, 0, numel=16), checks_all=True)
    assert text == f"{same} (16 elements of torch.float32)"


def test_checked_plans_that_are_the_same():
    def follow(rank):
        rank.follow(Subject.GATHER, 2)
        rank.follow(Subject.REDUCE, 2)
        return rank.end()

    done, results = agree(follow, follow, checks_all=True)
    assert done == [("gather", 2), ("reduce", 2)]
    assert results == [(False, frozenset())] * 2


# Beginning


def begin_with(*settings):
    """What all get when each begins with settings of its own."""
    _, results = agree(*[lambda rank: rank.begin(**settings[rank.rank])] * len(settings))
    assert all(result == results[0] for result in results)
    return results[0]


def test_the_same_everywhere_is_what_comes_out():
    assert begin_with({}, {}) == Beginning(SHAPES, True, ROOM)


def test_the_largest_shapes_of_any():
    begun = begin_with(
        {"shapes": ((4, 100), (3, 1, 7))}, {"shapes": ((2, 120), (3, 2, 5))}, {"shapes": ((3, 90), (4, 1, 1))}
    )
    assert begun.shapes == ((4, 120), (4, 2, 7))


@pytest.mark.parametrize("other", [((4, 128),), ((4,), (4, 128)), ((4, 128), (4, 1)), ((4, 128, 4),), ()])
def test_shapes_that_cannot_be_compared_are_dropped(other):
    assert begin_with({}, {"shapes": other}) == Beginning((), True, ROOM)


def test_shapes_without_sizes_count():
    assert begin_with(*[{"shapes": ((), (2,))}] * 2).shapes == ((), (2,))


def test_the_least_room_and_the_most_of_others():
    begun = begin_with(
        {"room": Room(900, 300, 5, (3, 1))}, {"room": Room(800, 400, 7, (3, 1))}, {"room": Room(850, 350, 6, (3, 1))}
    )
    assert begun.room == Room(800, 300, 7, (3, 1))


@pytest.mark.parametrize(
    ("limits", "least"),
    [((None, None), None), ((None, 300), 300), ((300, None), 300), ((0, 300), 0), ((-5, 300), -5), ((-5, None), -5)],
)
def test_the_least_limit_of_chunks_where_any_has_one(limits, least):
    begun = begin_with(*[{"room": Room(900, limit, 5, ())} for limit in limits])
    assert begun.room.chunk_nbytes == least


def test_room_may_be_less_than_none():
    assert begin_with({"room": Room(-7, None, 0, ())}, {}).room.free_nbytes == -7


@pytest.mark.parametrize("other", [(1, 3), (3,), (), (3, 1, 2), (31,)])
def test_chunks_on_the_device_that_differ_are_not_relied_on(other):
    """The order counts too: plans depend on which was visited last."""
    begun = begin_with({}, {"room": Room(1000, None, 10, other)})
    assert begun == Beginning(SHAPES, True, Room(1000, None, 10, ()))


def test_traces_that_differ():
    assert not begin_with({}, {"traces": 8}).is_traced
    assert begin_with({"traces": 2**32 - 1}, {"traces": 2**32 - 1}).is_traced


def test_steps_of_different_kinds():
    text = disagree(lambda rank: rank.begin(), lambda rank: rank.begin("evaluation"))
    assert text == (
        "rank 0 begins 'training' after change 0 of the parameters; "
        "rank 1 begins 'evaluation' after change 0 of the parameters"
    )


def test_one_that_has_done_fewer_steps():
    text = disagree(*[lambda rank: rank.begin(version=3 - rank.rank)] * 2)
    assert text == (
        "rank 0 begins 'training' after change 3 of the parameters; "
        "rank 1 begins 'training' after change 2 of the parameters"
    )


def test_a_whole_step():
    """Recorded by all, one of which takes another branch, and followed after that."""

    def step(branch):
        def work(rank):
            rank.begin(version=1)
            rank.gather(0, branch, 5)
            rank.end()
            rank.gather(branch)
            rank.reduce(branch)
            return rank.end(Phase.BACKWARD, indices=[branch])

        return work

    done, results = agree(step(1), step(2))
    assert done == [
        *[("gather", index) for index in (0, 1, 2, 5, 1, 2)],
        *[("reduce", index) for index in (1, 2)],
    ]
    assert results == [(False, frozenset({1, 2}))] * 2


# How long to wait


def enter(subject, **settings):
    return lambda rank: rank.order.agree(subject, [], "does it", **settings)


def evaluate(rank):
    rank.begin("evaluation:inner")
    rank.gather(1)
    rank.end(Phase.EVALUATION)


def train(rank):
    rank.begin("training first")
    rank.gather(1)
    rank.end(Phase.FORWARD)
    rank.reduce(1)
    rank.end(Phase.BACKWARD)


@pytest.mark.parametrize(
    ("doing", "prompt"),
    [
        (train, [False] * 5),
        (evaluate, [True, False, False]),
        (enter(Subject.READ), [True]),
        (enter(Subject.NORM), [True]),
        (enter(Subject.ENTER), [True]),
        (enter(Subject.MEET), [False]),
        (enter(Subject.LEAVE), [False]),
        (enter(Subject.READ, is_prompt=False), [False]),
    ],
)
def test_who_may_be_alone_gives_up(doing, prompt):
    ranks, results = run(doing, doing)
    assert not any(isinstance(result, Exception) for result in results)
    assert [rank.collectives.prompt for rank in ranks] == [prompt] * 2


def test_who_follows_does_not_give_up():
    ranks, _ = run(lambda rank: rank.order.follow_readers(), enter(Subject.READ, is_prompt=False))
    assert [rank.collectives.prompt for rank in ranks] == [[False], [False]]


def test_between_steps_nobody_has_said_that_he_comes():
    def read(rank):
        rank.is_in_step = False
        rank.gather(1)

    ranks, _ = run(read, read)
    assert [rank.collectives.prompt for rank in ranks] == [[True], [True]]


def test_what_processes_estimate_is_one_trace_of_each_kind_or_nothing():
    first, larger, other = (Trace("training", (8, 8), (Visit(0, (), num), Visit(1))) for num in (3, 5, 4))
    _, results = agree(lambda rank: estimate(rank, first, other), lambda rank: estimate(rank, larger, first))
    assert results == [[larger, other]] * 2
    _, results = agree(lambda rank: estimate(rank, first), lambda rank: estimate(rank))
    assert results == [[], []], "one cannot tell"


def estimate(rank, *traces):
    return list(rank.order.agree_on_estimated(traces))


@pytest.mark.parametrize("subject", [Subject.NORM, Subject.ENTER, Subject.MEET])
def test_who_follows_follows_only_readers(subject):
    text = disagree(lambda rank: rank.order.follow_readers(), enter(subject))
    assert text == "rank 0 follows the processes that save the model; rank 1 does it"
