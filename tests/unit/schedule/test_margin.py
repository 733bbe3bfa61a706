"""The device margin: chunks of 100 bytes, 700 with their optimizer states."""

import dataclasses

import pytest

from hf_patrickstar.schedule.margin import StepCost, fill_margin, needed_nbytes, plan_margin
from hf_patrickstar.schedule.placement import ChunkBytes
from hf_patrickstar.schedule.trace import StepKind, Trace, Visit


def make_chunks(count, state=600, on_host=()):
    return [ChunkBytes(index, 100, 128, state, index in on_host) for index in range(count)]


def make_trace(*rows, sizes=(100,) * 5):
    """A trace of (chunk, pinned chunks, bytes of others)."""
    return Trace("training", sizes, tuple(Visit(chunk, tuple(pinned), others) for chunk, pinned, others in rows))


SWEEP = make_trace((0, (), 50), (1, (), 50), (2, (), 50), (1, (), 50), (0, (), 50))
FLOOD = make_trace((0, (), 0), (1, (), 400), (2, (), 0))
TOGETHER = make_trace((0, (), 50), (1, (0,), 50), (2, (0, 1), 50))
OTHER_ORDER = make_trace((2, (), 0), (0, (), 0), (1, (), 0), (2, (), 0))
PARTLY = make_trace((1, (), 0), (2, (), 0))
UPDATE = dataclasses.replace(make_trace((0, (), 150), (1, (), 150), (2, (), 150)), key=StepKind.UPDATE)
FROZEN = make_trace((0, (), 0), (4, (), 0), sizes=(100, 100, 100, 100, 300))
UNLIKE = [ChunkBytes(0, 100, 128, 600), ChunkBytes(1, 100, 128, 2000), ChunkBytes(2, 100, 128, 0)]

# Traces, other arguments, and the least bytes of the device with which these chunks are in the margin.
MARGINS = {
    # Each takes 700; the others still need 100 for the chunk that is computed with, and 50 are not chunks.
    "as many first layers as leave room": ([SWEEP], {}, {850: [0], 1550: [0, 1], 2150: [0, 1, 2]}),
    "in the order of the first visit": ([OTHER_ORDER], {}, {800: [2], 1500: [2, 0], 2100: [2, 0, 1]}),
    "in the order of any trace": ([OTHER_ORDER, make_trace((1, (), 0), (2, (), 0), (0, (), 0))], {}, {800: [1]}),
    "what is never visited comes last": ([PARTLY], {}, {800: [1], 1400: [1, 2], 2100: [1, 2, 0]}),
    "the first that does not fit ends it": ([SWEEP], {"chunks": UNLIKE}, {850: [0], 2950: [0, 1, 2]}),
    "chunks in use together": ([TOGETHER], {}, {950: [0], 1550: [0, 1]}),
    "every moment has room": ([FLOOD], {}, {1200: [0]}),
    "every trace has room": ([SWEEP, FLOOD], {}, {1200: [0]}),
    "room to load ahead": ([SWEEP], {"prefetch_nbytes": 100}, {950: [0], 2250: [0, 1, 2]}),
    # They are not added to what others take: others may take them.
    "bytes that chunks may not take": ([SWEEP], {"unusable_nbytes": 50}, {850: [0]}),
    "more bytes that chunks may not take": ([SWEEP], {"unusable_nbytes": 200}, {1000: [0]}),
    "chunks at home need no room": ([SWEEP], {"kept": frozenset({0})}, {850: [1]}),
    "chunks at home need no room in use": (
        *([make_trace((0, (1,), 50))], {"kept": frozenset({0}), "chunks": make_chunks(2)}, {750: [1]}),
    ),
    "chunks of the host stay there": ([SWEEP], {"chunks": make_chunks(3, on_host={0})}, {850: [1]}),
    # 150 bytes at every moment of either trace; in the update no chunk that moves home leaves room behind.
    "the update takes room itself": ([SWEEP, UPDATE], {}, {850: [0], 1550: [0, 1], 2250: [0, 1, 2]}),
    # Chunk 4 is frozen: it is no candidate, but takes room whenever it is visited.
    "what may not move home takes room": ([FROZEN], {"chunks": make_chunks(1)}, {1000: [0]}),
}


@pytest.mark.parametrize(("traces", "settings", "margins"), MARGINS.values(), ids=MARGINS)
def test_chunks_that_the_margin_has_room_for(traces, settings, margins):
    given = {"chunks": make_chunks(3), "prefetch_nbytes": 0, **settings}
    chunks, prefetch = given.pop("chunks"), given.pop("prefetch_nbytes")
    found = {}
    for device_nbytes in range(600, 3000):
        margin = list(fill_margin(chunks, traces, device_nbytes, prefetch, **given))
        if margin and margin not in found.values():
            found[device_nbytes] = margin
    assert {nbytes: found.get(nbytes) for nbytes in margins} == margins


def test_what_is_needed_at_each_moment():
    trace = make_trace((0, (), 50), (1, (0, 2), 30), (2, (), 10))
    all_move = [(150, frozenset({0})), (330, frozenset({0, 1, 2})), (110, frozenset({2}))]
    assert needed_nbytes([trace], frozenset(), 0) == all_move
    homed = [(150, frozenset({0})), (240, frozenset({0, 1})), (40, frozenset())]
    assert needed_nbytes([trace], frozenset({2}), 40) == homed
    for workspace, nbytes in ((0, 150), (200, 200)):
        found = needed_nbytes([trace, UPDATE], frozenset(), workspace)[3:]
        assert found == [(nbytes, frozenset())] * 3, "the update works on chunks where they are"


# How much of it is worth filling


def plan_of(count, candidates, cost_of):
    return plan_margin(make_chunks(count), candidates, cost_of, "h100")


def test_the_number_with_which_a_step_is_fastest_is_chosen():
    """Caching parameters on the same bytes may save more than homes do: two chunks here, no less and no more."""
    times = {0: 9_000_000, 1: 7_000_000, 2: 5_000_000, 3: 6_000_000, 4: 8_000_000}
    plan = plan_of(6, (3, 1, 0, 2), lambda inside: StepCost(times[len(inside)], 900 - 100 * len(inside)))
    assert plan.chunk_indices == (3, 1)
    for figure in ("2 of 6 chunks", "(1.37 KiB; 4 would fit)", "5.00 ms", "700 B", "9.00 ms and 900 B without"):
        assert figure in plan.reason


EQUAL = {0: StepCost(10_000, 800), 1: StepCost(10_050, 600), 2: StepCost(10_099, 700), 3: StepCost(10_101, 0)}


@pytest.mark.parametrize(
    ("costs", "chosen"),
    [
        (EQUAL, (0,)),
        (dict.fromkeys(range(4), StepCost(10_000, 500)), ()),
        ({0: StepCost(100, 0), 1: StepCost(90, 0), 2: None}, (0,)),
        ({0: None}, ()),
    ],
    ids=["of equally fast ones what moves least", "no more than is of use", "what can work", "nothing can work"],
)
def test_a_margin_of_no_use_is_not_filled(costs, chosen):
    plan = plan_of(4, tuple(range(max(costs))), lambda inside: costs[len(inside)])
    assert plan.chunk_indices == chosen
    assert ("margin is empty" in plan.reason) is (costs == {0: None})


@pytest.mark.parametrize("best", range(9))
def test_the_best_of_the_eighths_is_found_with_few_comparisons(best):
    seen = set()

    def cost_of(inside):
        seen.add(len(inside))
        return StepCost(1000 + 100 * abs(len(inside) - 2 * best), 0)

    assert len(plan_of(16, tuple(range(16)), cost_of).chunk_indices) == 2 * best
    assert {0, 16} <= seen
    assert len(seen) <= 7
