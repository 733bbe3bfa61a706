import pytest

from hf_patrickstar.schedule.margin import StepCost, fill_margin, needed_nbytes, plan_margin
from hf_patrickstar.schedule.placement import ChunkBytes
from hf_patrickstar.schedule.trace import Trace, Visit


def make_chunks(count, param=100, host_param=128, state=600, on_host=()):
    return [ChunkBytes(index, param, host_param, state, index in on_host) for index in range(count)]


# The device margin: chunks of 100 bytes, 700 with their optimizer states


def make_trace(*rows, sizes=(100,) * 5):
    """A trace of (chunk, pinned chunks, bytes of others)."""
    return Trace("training", sizes, tuple(Visit(chunk, tuple(pinned), others) for chunk, pinned, others in rows))


SWEEP = make_trace((0, (), 50), (1, (), 50), (2, (), 50), (1, (), 50), (0, (), 50))


NONE = (0,) * 5
"""Nothing is brought in ahead."""


def margin_of(device_nbytes, trace=SWEEP, count=3, prefetched=NONE, **settings):
    return set(fill_margin(make_chunks(count), [trace], device_nbytes, prefetched, **settings))


def test_the_order_is_that_of_the_first_visit_in_any_trace():
    trace = make_trace((2, (), 0), (0, (), 0), (1, (), 0), (2, (), 0))
    assert margin_of(800, trace) == {2}
    assert margin_of(1500, trace) == {2, 0}
    other = make_trace((1, (), 0), (2, (), 0), (0, (), 0))
    chunks = make_chunks(3)
    assert set(fill_margin(chunks, [trace, other], 800, NONE)) == {1}, "as early as chunk 2, and before it"
    assert set(fill_margin(chunks[::-1], [trace, other], 1500, NONE)) == {1, 2}


def test_large_chunks_come_first_and_those_that_do_not_fit_are_passed_over():
    """One of 1,000 bytes has a stall of its own length wherever it is waited for."""
    chunks = [*make_chunks(2), ChunkBytes(2, 1000, 1000, 6000), ChunkBytes(3, 100, 100, 600)]
    trace = make_trace((0, (), 0), (1, (), 0), (2, (), 0), (3, (), 0), sizes=(100, 100, 1000, 100))
    assert fill_margin(chunks, [trace], 7100, NONE) == (2,)
    assert fill_margin(chunks, [trace], 7800, NONE) == (2, 0)
    assert fill_margin(chunks, [trace], 6999, NONE) == (0, 1, 3), "its copy still needs 1,000"


def test_bytes_that_chunks_may_not_take():
    """They are not added to what others take: others may take them."""
    assert margin_of(850, unusable_nbytes=50) == {0}
    assert margin_of(850, unusable_nbytes=51) == set()
    assert margin_of(1000, unusable_nbytes=200) == {0}


def test_what_is_needed_at_each_moment():
    trace = make_trace((0, (), 50), (1, (0, 2), 30), (2, (), 10))
    assert needed_nbytes([trace], frozenset(), 0) == [
        (150, frozenset({0})),
        (330, frozenset({0, 1, 2})),
        (110, frozenset({2})),
    ]
    assert needed_nbytes([trace], frozenset({2}), 40) == [
        (150, frozenset({0})),
        (240, frozenset({0, 1})),
        (40, frozenset()),
    ]


# How much of it is worth filling


def test_gradients_that_wait_for_their_group_take_room():
    trace = Trace("training", (100,), (Visit(0, (), 30, gradient_nbytes=7), Visit(0, (), 50, gradient_nbytes=7)))
    assert needed_nbytes([trace], frozenset(), 40) == [(147, frozenset({0})), (157, frozenset({0}))]


def plan_of(count, candidates, cost_of):
    return plan_margin(make_chunks(count), candidates, cost_of, "h100")


def test_the_number_with_which_a_step_is_fastest_is_chosen():
    """Caching parameters on the same bytes may save more than homes do: two chunks here, no less and no more."""
    times = {0: 9_000_000, 1: 7_000_000, 2: 5_000_000, 3: 6_000_000, 4: 8_000_000}
    chosen, reason = plan_of(6, (3, 1, 0, 2), lambda inside: StepCost(times[len(inside)], 900 - 100 * len(inside)))
    assert chosen == (3, 1)
    assert reason == (
        "2 of 6 chunks stay on the device with their optimizer states (1.37 KiB; 4 would fit). Of 5 simulated numbers "
        "it is the fastest, at the rates of 'h100'"
    )


def test_of_equally_fast_steps_the_one_that_moves_least_is_chosen():
    """A step that is bound by computation takes as long whatever moves beside it."""
    times = {0: 10_000, 1: 10_050, 2: 10_099, 3: 10_101, 4: 20_000}
    moved = {0: 800, 1: 600, 2: 700, 3: 0, 4: 0}
    chosen, _ = plan_of(4, (0, 1, 2, 3), lambda inside: StepCost(times[len(inside)], moved[len(inside)]))
    assert chosen == (0,)
    chosen, _ = plan_of(4, (0, 1, 2, 3), lambda inside: StepCost(10_000, 500))
    assert chosen == (), "no more than is of use"


@pytest.mark.parametrize("best", range(9))
def test_the_best_of_the_eighths_is_found(best):
    chosen, _ = plan_of(16, tuple(range(16)), lambda inside: StepCost(1000 + 100 * abs(len(inside) - 2 * best), 0))
    assert len(chosen) == 2 * best
