import pytest

from hf_patrickstar.schedule.trace import StepKind, Trace, Visit, common_trace, input_shapes, trace_key


def make_trace(shapes=(), visits=()):
    return Trace("t", (8, 8, 8), visits, (shapes,))


@pytest.mark.parametrize(
    ("sizes", "bucket"),
    [
        ([1], 1),
        ([2], 2),
        ([3], 3),
        ([4], 4),
        ([5, 6], 6),
        ([7, 8], 8),
        ([9, 10, 11, 12], 12),
        ([13, 16], 16),
        ([17, 24], 24),
        ([25, 32], 32),
        ([385, 512], 512),
        ([513, 768], 768),
    ],
)
def test_sizes_are_rounded_up_to_buckets(sizes, bucket):
    assert {trace_key("training", ((size,),)) for size in sizes} == {f"training/{bucket}"}


def test_a_bucket_holds_no_more_than_half_as_much_again():
    for size in range(1, 2000):
        bucket = int(trace_key("t", ((size,),)).removeprefix("t/"))
        assert size <= bucket
        assert bucket == size or 2 * bucket < 3 * size + 2


@pytest.mark.parametrize(
    ("shapes", "key"),
    [
        ((), "evaluation"),
        (((5, 9),), "evaluation/6x12"),
        (((5, 9), (5, 9), (6, 12)), "evaluation/6x12"),
        (((5, 9), (5, 3)), "evaluation/6x12,6x3"),
        (((5, 3), (5, 9)), "evaluation/6x3,6x12"),
        (((0,),), "evaluation/1"),
    ],
)
def test_a_key_names_the_kind_and_every_bucket_once(shapes, key):
    assert trace_key("evaluation", shapes) == key


@pytest.mark.parametrize(
    ("shapes", "is_covered"),
    [
        (((4, 10), (4,)), True),
        (((3, 10), (2,)), True),
        (((1, 1), (1,)), True),
        (((5, 10), (4,)), False),
        (((4, 11), (4,)), False),
        (((3, 11), (4,)), False),
        (((4, 10), (5,)), False),
        (((4, 10),), False),
        (((4, 10), (4,), (4,)), False),
        (((4, 10), (4, 1)), False),
        (((4,), (4, 10)), False),
        ((), False),
    ],
)
def test_a_trace_covers_inputs_that_are_no_larger_in_any_size(shapes, is_covered):
    assert make_trace(((4, 10), (4,))).covers(shapes) == is_covered


def test_inputs_that_are_one_number_make_no_difference():
    """The Trainer gives a model the number of its labels where there is one, and a plan does not."""
    assert make_trace(((4, 10), (4,))).covers(((4, 10), (), (4,)))
    assert make_trace(((4, 10), (), (4,))).covers(((4, 10), (4,)))
    assert trace_key("training", ((4, 10), ())) == trace_key("training", ((4, 10),))


def test_a_trace_may_be_for_steps_without_one_of_its_inputs():
    trace = make_trace(((4, 10), (), (4, 10), (4,))).without_input(1)
    assert trace.covers(((4, 10), (4, 10), (4,)))
    assert trace.covers(((3, 10), (2,)))
    assert not trace.covers(((4, 10), (4, 10)))
    assert not trace.covers(((4,),))


def test_a_trace_without_shapes_covers_only_steps_without():
    assert make_trace().covers(())
    assert not make_trace().covers(((1,),))


def test_the_most_that_others_ever_took():
    assert make_trace(visits=(Visit(0, (), 5), Visit(1, (), 9), Visit(0, (), 7))).non_model_peak_nbytes == 9
    assert make_trace().non_model_peak_nbytes == 0


def test_shapes_of_tensors_become_plain_numbers():
    assert input_shapes([[4, 10], (True,)]) == ((4, 10), (1,))


# What several processes recorded


def make_common(*traces, **settings):
    return common_trace([Trace("t", (8, 8, 8), visits, **settings) for visits in traces])


def test_what_all_recorded_is_common():
    visits = (Visit(0, (1,), 5, 9, (2,)), Visit(1))
    assert make_common(visits, visits, forward_ends=(1,)) == Trace("t", (8, 8, 8), visits, forward_ends=(1,))
    assert make_common(visits) == Trace("t", (8, 8, 8), visits)


def test_each_moment_has_room_for_the_most_of_any():
    common = make_common(
        (Visit(0, (), 5, 1), Visit(1, (0,), 2, 8)),
        (Visit(0, (2,), 3, 4), Visit(1, (), 7, 6)),
        (Visit(0, (1,), 4, 2), Visit(1, (0, 2), 1, 7)),
    )
    assert common.visits == (Visit(0, (1, 2), 5, 4), Visit(1, (0, 2), 7, 8))


def test_one_that_did_something_else_is_given_room_everywhere():
    """Nobody knows when it will need it; the longest of what was done is the trace."""
    common = make_common(
        (Visit(2, (), 50, 3), Visit(0, (1,), 7, 40)),
        (Visit(0, (), 60, 1), Visit(1, (0,), 2, 41), Visit(0, (), 3, 1, (0,))),
    )
    assert common.visits == (Visit(0, (), 60, 40), Visit(1, (0,), 50, 41), Visit(0, (), 50, 40, (0,)))


def test_the_first_of_the_longest_is_the_trace():
    first, second, short = (Visit(0), Visit(1)), (Visit(0), Visit(2)), (Visit(2),)
    assert make_common(short, second, first, first).visits == second
    assert make_common(first, short, second).visits == first


def test_turns_and_reductions_are_those_of_the_trace_that_was_chosen():
    short = Trace("t", (8, 8, 8), (Visit(0, (), 0, 0, (1,)),), forward_ends=(1,))
    long = Trace("t", (8, 8, 8), (Visit(0), Visit(1, (), 0, 0, (0,))), forward_ends=(2,))
    common = common_trace([short, long, short])
    assert (common.forward_ends, [visit.reduced for visit in common.visits]) == ((2,), [(), (0,)])


def test_one_that_visited_nothing_changes_nothing():
    visits = (Visit(0, (), 5, 1), Visit(1))
    assert make_common((), visits, ()).visits == visits
    assert make_common((), ()).visits == ()


def test_the_same_is_common_to_those_that_agreed_before():
    traces = [(Visit(0, (), 5), Visit(1)), (Visit(0, (), 9),), (Visit(0), Visit(1, (), 4))]
    once = make_common(*traces)
    assert common_trace([once] * 3) == once


def test_what_is_recorded_again_keeps_the_most_gradients():
    new = Trace("t", (8, 8, 8), (Visit(0, (), 1, 5, (2,)), Visit(1, (), 0, 7)), forward_ends=(1,))
    old = Trace("t", (8, 8, 8), (Visit(0, (), 0, 6, (1,)), Visit(1, (), 2, 3)), forward_ends=(2,))
    visits = (Visit(0, (), 1, 6, (2,)), Visit(1, (), 2, 7))
    expected = Trace("t", (8, 8, 8), visits, forward_ends=(1,))
    assert new.merged(old) == expected, "what was reduced when, and the ends of forwards, are the new ones"


@pytest.mark.parametrize("kind", StepKind)
def test_a_key_says_of_which_kind_its_step_is(kind):
    for key in (trace_key(kind, ()), trace_key(kind, ((4, 12),)), trace_key(f"{kind}:encoder.block/1", ((4,),))):
        assert StepKind.of(key) is Trace(key, (), ()).kind is kind


def test_what_a_backward_belongs_to():
    kinds = [kind for kind in StepKind if kind.is_training]
    assert kinds == [StepKind.TRAINING, StepKind.FIRST, StepKind.MIDDLE, StepKind.LAST]
