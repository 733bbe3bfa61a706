import pytest

from hf_patrickstar.schedule.trace import Trace, Visit, common_trace, trace_key


def make_trace(shapes=(), visits=()):
    return Trace("t", (8, 8, 8), visits, (shapes,))


BUCKETS = {1: 1, 5: 6, 9: 12, 13: 16, 25: 32, 385: 512, 513: 768}


def test_sizes_are_rounded_up_to_buckets_by_less_than_half_as_much_again():
    assert {size: int(trace_key("t", ((size,),)).removeprefix("t/")) for size in BUCKETS} == BUCKETS
    for size in range(1, 2000):
        bucket = int(trace_key("t", ((size,),)).removeprefix("t/"))
        assert size <= bucket
        assert bucket == size or 2 * bucket < 3 * size + 2


@pytest.mark.parametrize(("shapes", "key"), [((), "evaluation"), (((5, 9), (5, 9), (6, 12)), "evaluation/6x12")])
def test_a_key_names_the_kind_and_every_bucket_once(shapes, key):
    assert trace_key("evaluation", shapes) == key


COVERED = [((4, 10), (4,)), ((3, 10), (2,)), ((1, 1), (1,)), ((4, 10), (), (4,))]
NOT_COVERED = [
    *(((5, 10), (4,)), ((4, 11), (4,)), ((3, 11), (4,)), ((4, 10), (5,)), ((4, 10),), ((4, 10), (4,), (4,))),
    *(((4, 10), (4, 1)), ((4,), (4, 10)), ()),
]


@pytest.mark.parametrize("shapes", [*COVERED, *NOT_COVERED])
@pytest.mark.parametrize("own", [((4, 10), (4,)), ((4, 10), (), (4,))])
def test_a_trace_covers_inputs_that_are_no_larger_in_any_size(own, shapes):
    """Inputs of one number make no difference: the Trainer gives a model the number of its labels, a plan does not."""
    assert make_trace(own).covers(shapes) == (shapes in COVERED)


def test_a_trace_may_be_for_steps_without_one_of_its_inputs():
    trace = make_trace(((4, 10), (), (4, 10), (4,))).without_input(1)
    assert [trace.covers(shapes) for shapes in (((4, 10), (4, 10), (4,)), ((3, 10), (2,)))] == [True, True]
    assert [trace.covers(shapes) for shapes in (((4, 10), (4, 10)), ((4,),))] == [False, False]
    assert make_trace().covers(())
    assert not make_trace().covers(((1,),))


# What several processes recorded


def make_common(*traces, **settings):
    return common_trace([Trace("t", (8, 8, 8), visits, **settings) for visits in traces])


SAME = (Visit(0, (1,), 5, 9, (2,)), Visit(1))
FIRST, SECOND, SHORT = (Visit(0), Visit(1)), (Visit(0), Visit(2)), (Visit(2),)


@pytest.mark.parametrize(
    ("traces", "common"),
    [
        ((SAME, SAME), SAME),
        (
            (
                (Visit(0, (), 5, 1), Visit(1, (0,), 2, 8)),
                (Visit(0, (2,), 3, 4), Visit(1, (), 7, 6)),
                (Visit(0, (1,), 4, 2), Visit(1, (0, 2), 1, 7)),
            ),
            (Visit(0, (1, 2), 5, 4), Visit(1, (0, 2), 7, 8)),
        ),
        (
            (
                (Visit(2, (), 50, 3), Visit(0, (1,), 7, 40)),
                (Visit(0, (), 60, 1), Visit(1, (0,), 2, 41), Visit(0, (), 3, 1, (0,))),
            ),
            (Visit(0, (), 60, 40), Visit(1, (0,), 50, 41), Visit(0, (), 50, 40, (0,))),
        ),
        ((SHORT, SECOND, FIRST, FIRST), SECOND),
        (((), SAME, ()), SAME),
    ],
    ids=[
        *("all the same", "each moment has room for the most of any", "one that differs has room everywhere"),
        *("the first of the longest", "one visited nothing"),
    ],
)
def test_what_processes_recorded_becomes_one_trace(traces, common):
    found = make_common(*traces)
    assert found.visits == common
    assert common_trace([found] * 3) == found, "those that agreed agree again"


def test_what_is_recorded_again_keeps_the_most_gradients():
    new = Trace("t", (8, 8, 8), (Visit(0, (), 1, 5, (2,)), Visit(1, (), 0, 7)), forward_ends=(1,))
    old = Trace("t", (8, 8, 8), (Visit(0, (), 0, 6, (1,)), Visit(1, (), 2, 3)), forward_ends=(2,))
    visits = (Visit(0, (), 1, 6, (2,)), Visit(1, (), 2, 7))
    expected = Trace("t", (8, 8, 8), visits, forward_ends=(1,))
    assert new.merged(old) == expected, "what was reduced when, and the ends of forwards, are the new ones"
