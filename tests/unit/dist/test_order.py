"""Agreements between processes, with threads in their place."""

import itertools
import re

import pytest
import torch
from support.threads import Exchange, ThreadCollectives, in_threads

from hf_patrickstar.dist.order import Beginning, Collective, Order, Room, CollectiveKind
from hf_patrickstar.dist.sharing import Sharing
from hf_patrickstar.errors import CollectiveError
from hf_patrickstar.schedule.trace import Trace, Visit
from hf_patrickstar.common.stage import Stage

ROOM = Room(1000, None, 10, (3, 1))
SHAPES = ((4, 128), (4,))


class Rank:
    """One process: its order, and the collectives that it did."""

    def __init__(self, collectives, checks_all=False):
        self.rank = collectives.rank
        self.collectives = collectives
        self.order = Order(collectives, checks_all=checks_all)
        self.sharing = Sharing(collectives)
        self.is_in_step = True
        self.done = []

    def do(self, collectives):
        self.done += [(subject.name.lower(), index) for subject, index in collectives]

    def ask(self, subject, index, who):
        self.do(self.order.ask(Collective(subject, index), who, is_in_step=self.is_in_step))

    def gather(self, *indices):
        for index in indices:
            self.ask(CollectiveKind.GATHER, index, f"layer {index}")

    def reduce(self, *indices):
        for index in indices:
            self.ask(CollectiveKind.REDUCE, index, "its gradients")

    def follow(self, subject, index, dtype=torch.float32, numel=8):
        self.order.check(Collective(subject, index), dtype, numel)
        self.do([Collective(subject, index)])

    def end(self, phase=Stage.FORWARD, is_diverged=False, indices=(), is_recorded=False):
        flags = {"is_diverged": is_diverged, "is_recorded": is_recorded}
        while (ended := self.order.end(phase, list(indices), **flags)).collectives:
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

    calls = [lambda pair=pair: call(*pair) for pair in zip(ranks, functions, strict=True)]
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
    assert all(isinstance(result, CollectiveError) for result in results), results
    (text,) = {str(result) for result in results}
    assert text.endswith("must be called by all of them, in the same order and equally often")
    return text.removeprefix("the processes do not do the same: ").partition(". Forward, backward")[0]


def gathers(*indices):
    return lambda rank: rank.gather(*indices)


def reduces(*indices):
    return lambda rank: rank.reduce(*indices)


# Asking and ending


@pytest.mark.parametrize(
    ("functions", "done"),
    [
        ([gathers(4, 2)] * 3, [("gather", 4), ("gather", 2)]),
        ([gathers(5), gathers(2), reduces(1)], [("gather", 2), ("gather", 5), ("reduce", 1)]),
        # A process that has got something before it asked still needs as many messages as those that asked.
        ([gathers(1, 2), gathers(2, 1)], [("gather", 1), ("gather", 2)] * 2),
        ([reduces(3), gathers(3)], [("gather", 3), ("reduce", 3)]),
    ],
    ids=["the same", "different wishes in one order", "in another order", "a group twice"],
)
def test_what_anybody_asks_for_all_do(functions, done):
    assert agree(*functions)[0] == done


def test_whoever_has_ended_serves_the_others_and_a_plan_needs_no_messages():
    """One branch of the model needs three groups, the other one, and the last none."""

    def step(*indices):
        def work(rank):
            rank.gather(*indices)
            before = len(rank.done)
            return before, rank.end(), rank.collectives.whats[0]

        return work

    done, results = agree(step(7, 8, 9), step(8), step())
    assert done == [("gather", index) for index in (7, 8, 8, 9)]
    assert [before for before, *_ in results] == [4, 2, 0]
    assert {result for _, result, _ in results} == {(False, frozenset())}
    assert results[0][2] == "needs group 7 (gather) for layer 7"
    assert results[2][2] == "has ended its forward"

    def follow(rank):
        rank.gather(1)
        rank.follow(CollectiveKind.GATHER, 2)
        rank.follow(CollectiveKind.REDUCE, 2)
        return len(rank.collectives.whats)

    assert agree(follow, follow) == ([("gather", 1), ("gather", 2), ("reduce", 2)], [1, 1])


# One does something else


def leave(rank, is_reader):
    with rank.sharing.led(None, is_reader=is_reader):
        pass


DOINGS = {
    "asks": (gathers(4), "needs group 4 (gather) for layer 4"),
    "begins": (lambda rank: rank.begin(), "begins 'training'"),
    "enters": (lambda rank: rank.sharing.enter("saves the model"), "saves the model"),
    "follows": (lambda rank: leave(rank, is_reader=False), "follows the processes that save the model"),
    "norm": (lambda rank: rank.sharing.scalars({}, 3), "computes the norm of 3 gradients"),
    "checks": (
        lambda rank: rank.follow(CollectiveKind.REDUCE, 3),
        "is about to reduce group 3, as planned (8 elements of torch.float32)",
    ),
    "ends": (lambda rank: rank.end(), "has ended its forward"),
    "ends backward": (lambda rank: rank.end(Stage.BACKWARD), "has ended its backward"),
}


@pytest.mark.parametrize(("left", "right"), itertools.pairwise(DOINGS))
def test_each_subject_against_each_other(left, right):
    (first, says_first), (second, says_second) = DOINGS[left], DOINGS[right]
    text = disagree(first, second, checks_all=True)
    checksums = ", with collectives of checksum 00000000 so far" * (left == "ends")
    assert text == f"rank 0 {says_first}{checksums}; rank 1 {says_second}{checksums}"


@pytest.mark.parametrize(
    ("functions", "text"),
    [
        (
            [lambda rank: leave(rank, is_reader=False)] * 2,
            "rank 0 follows the processes that save the model; rank 1 follows the processes that save the model",
        ),
        (
            [lambda rank: rank.sharing.scalars({}, 3 + rank.rank)] * 2,
            "rank 0 computes the norm of 3 gradients; rank 1 computes the norm of 4 gradients",
        ),
    ],
    ids=["nobody reads", "other norms"],
)
def test_those_that_do_not_do_the_same_are_named(functions, text):
    assert disagree(*functions) == text


def test_plans_are_checked_at_once_only_for_debugging_and_by_their_checksums_at_the_end():
    def follow(rank):
        rank.follow(CollectiveKind.GATHER, 0, torch.float32, 8 + 8 * rank.rank)

    def follow_in_another_order(rank):
        for index in (1, 2)[:: 1 - 2 * rank.rank]:
            rank.follow(CollectiveKind.GATHER, index)
        rank.end()

    assert run(follow, follow)[1] == [None, None]
    does = "rank {} is about to gather group 0, as planned ({} elements of torch.float32)"
    assert disagree(follow, follow, checks_all=True) == f"{does.format(0, 8)}; {does.format(1, 16)}"
    text = disagree(follow_in_another_order, follow_in_another_order)
    first, second = re.findall(r"rank \d has ended its forward, with collectives of checksum (\w{8})", text)
    assert first != second


def test_one_process_agrees_with_itself():
    order = Order(ThreadCollectives(), checks_all=True)
    wanted, trace = Collective(CollectiveKind.GATHER, 3), Trace("training", (8, 8), (Visit(0, (), 3), Visit(1)))
    assert order.is_alone
    assert order.begin("training", SHAPES, 7, ROOM, 0) == Beginning(SHAPES, True, ROOM)
    order.check(wanted, torch.float32, 8)
    assert order.ask(wanted, "layer 3", is_in_step=True) == (wanted,)
    ended = order.end(Stage.BACKWARD, [2, 5], is_diverged=True, is_recorded=False)
    assert (ended.collectives, ended.is_diverged, ended.indices) == ((), True, frozenset({2, 5}))
    assert (order.agree_on_trace(trace), list(order.agree_on_estimated([trace]))) == (trace, [trace])


# Beginning


def room(free, chunks=None, floor=0, resident=(3, 1)):
    return {"room": Room(free, chunks, floor, resident)}


@pytest.mark.parametrize(
    ("settings", "begun"),
    [
        ([{}, {}], Beginning(SHAPES, True, ROOM)),
        (
            [{"shapes": ((4, 100), (3, 1, 7))}, {"shapes": ((2, 120), (3, 2, 5))}, {"shapes": ((3, 90), (4, 1, 1))}],
            Beginning(((4, 120), (4, 2, 7)), True, ROOM),
        ),
        *(([{}, {"shapes": other}], Beginning((), True, ROOM)) for other in (((4, 128),), ((4, 128), (4, 1)))),
        (
            [room(900, 300, 5), room(800, 400, 7), room(850, 350, 6)],
            Beginning(SHAPES, True, Room(800, 300, 7, (3, 1))),
        ),
        *(
            ([room(900, limit) for limit in limits], Beginning(SHAPES, True, Room(900, least, 0, (3, 1))))
            for limits, least in (((None, 300), 300), ((0, 300), 0), ((-5, None), -5))
        ),
        *(
            ([{}, room(1000, None, 10, other)], Beginning(SHAPES, True, Room(1000, None, 10, ())))
            for other in ((1, 3), (3,))
        ),
        ([{}, {"traces": 8}], Beginning(SHAPES, False, ROOM)),
    ],
)
def test_a_step_begins_with_the_largest_shapes_and_the_least_room(settings, begun):
    """Shapes that cannot be compared, and chunks on the device that differ, in their order too, are not relied on."""
    _, results = agree(*[lambda rank, own=own: rank.begin(**own) for own in settings])
    assert results == [begun] * len(settings)


# How long to wait


def evaluate(rank):
    rank.begin("evaluation:inner")
    rank.gather(1)
    rank.end(Stage.EVALUATION)


def train(rank):
    rank.begin("training first")
    rank.gather(1)
    rank.end(Stage.FORWARD)
    rank.reduce(1)
    rank.end(Stage.BACKWARD)


def read_between_steps(rank):
    rank.is_in_step = False
    rank.gather(1)


@pytest.mark.parametrize(
    ("doing", "prompt"),
    [
        (train, [False] * 5),
        (evaluate, [True, False, False]),
        (read_between_steps, [True]),
        (lambda rank: leave(rank, is_reader=rank.rank == 1), [False]),
        (lambda rank: rank.sharing.enter("saves the model"), [True]),
        (lambda rank: rank.sharing.meet("has saved the model"), [False]),
    ],
)
def test_who_may_be_alone_gives_up(doing, prompt):
    ranks, results = run(doing, doing)
    assert not any(isinstance(result, Exception) for result in results)
    assert [rank.collectives.prompt for rank in ranks] == [prompt] * 2
