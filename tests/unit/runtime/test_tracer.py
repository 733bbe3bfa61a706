import pytest

from hf_patrickstar.events import StepDiverged, StepRecorded
from hf_patrickstar.runtime import tracer as tracer_module
from hf_patrickstar.runtime.tracer import Tracer
from hf_patrickstar.schedule.known import KnownTraces
from hf_patrickstar.schedule.plan import Plan
from hf_patrickstar.schedule.trace import Trace, Visit


class Gauge:
    """Tells what it is asked for: the next of some numbers, say."""

    def __init__(self, non_model=lambda: 0, gradients=lambda: 0):
        self.take_non_model_peak, self.take_gradient_peak = non_model, gradients


class Agreement:
    is_alone = True

    """What processes make of their traces."""

    def __init__(self, agree=lambda trace: trace):
        self.agree_on_trace = agree


def make_tracer(chunk_nbytes, non_model=lambda: 0, gradients=lambda: 0, agree=lambda trace: trace, **known):
    events = []
    tracer = Tracer(chunk_nbytes, Gauge(non_model, gradients), Agreement(agree), events.append, **known)
    tracer.events = events
    return tracer


def count(tracer, kind):
    """How many steps were recorded, or have diverged."""
    return sum(isinstance(event, kind) for event in tracer.events)


def visit_all(tracer, chunks, pinned=()):
    return [tracer.visit(chunk, lambda: pinned) for chunk in chunks]


def run_step(tracer, chunks, kind="training", shapes=(), **settings):
    """A whole step; returns it as it was at its end."""
    step = tracer.begin(kind, shapes, **settings)
    visit_all(tracer, chunks)
    tracer.finish()
    return step


def chunks_of(tracer, key="training"):
    return [visit.chunk_index for visit in tracer.traces[key].visits]


def test_the_first_step_is_recorded_and_later_ones_are_followed():
    tracer = make_tracer([8, 8, 8])
    step = tracer.begin("training")
    assert tracer.step is step
    assert (step.cursor, step.is_recorded, step.is_diverged, step.is_metered) == (None, True, False, True)
    assert visit_all(tracer, [0, 2, 0], pinned=(1,)) == [None, None, None]
    tracer.finish()
    assert tracer.step is None
    assert tracer.traces == {"training": Trace("training", (8, 8, 8), (Visit(0, (1,)), Visit(2, (1,)), Visit(0, (1,))))}
    step = tracer.begin("training")
    assert (step.is_recorded, step.is_diverged, step.is_metered) == (False, False, False)
    assert visit_all(tracer, [0, 2]) == [0, 1]
    assert step.cursor.next_visit(0) == 2
    assert visit_all(tracer, [0]) == [2]
    tracer.finish()
    assert (count(tracer, StepRecorded), count(tracer, StepDiverged)) == (1, 0)


def test_of_a_step_that_is_void_no_trace_is_made():
    """What it measured last is not asked for; all processes agree on its trace, because others may keep theirs."""
    measured, agreed = iter([5]), []
    tracer = make_tracer([8, 8], lambda: next(measured), agree=lambda trace: agreed.append(trace) or trace)
    step = tracer.begin("training")
    visit_all(tracer, [0, 1])
    step.is_void = True
    tracer.finish()
    assert (tracer.traces, count(tracer, StepRecorded), count(tracer, StepDiverged), len(agreed)) == ({}, 1, 0, 1)
    assert tracer.begin("training").is_recorded


def test_pinned_chunks_are_asked_for_only_while_recording():
    tracer = make_tracer([8])
    run_step(tracer, [0])

    def refuse():
        raise AssertionError("asked")

    tracer.begin("training")
    assert tracer.visit(0, refuse) == 0
    tracer.visit(0, refuse)
    assert tracer.step.is_diverged


def test_a_step_that_leaves_its_trace_goes_on_without_foresight():
    tracer = make_tracer([8, 8, 8])
    run_step(tracer, [0, 2, 0])
    step = tracer.begin("training")
    step.plan = plan = Plan((), {}, ())  # other processes go on with it
    assert visit_all(tracer, [0, 1, 0, 2]) == [0, None, None, None]
    assert (step.cursor, step.plan, step.is_diverged, step.is_recorded) == (None, plan, True, False)
    tracer.finish()
    assert (count(tracer, StepDiverged), count(tracer, StepRecorded)) == (1, 1)
    assert chunks_of(tracer) == [0, 2, 0]


def test_a_key_that_was_lost_is_metered_from_then_on():
    tracer = make_tracer([8, 8])
    run_step(tracer, [0], shapes=((4,),))
    run_step(tracer, [0], shapes=((3,),))
    run_step(tracer, [1], shapes=((4,),))
    assert tracer.begin("training", ((4,),)).is_metered
    assert not tracer.begin("training", ((3,),)).is_metered, "another bucket"


def test_a_kind_can_ask_to_be_metered_always():
    tracer = make_tracer([8])
    run_step(tracer, [0])
    step = tracer.begin("training", always_metered=True)
    assert step.is_metered
    assert not step.is_recorded


def test_what_is_dropped_after_the_step_is_never_visited_again():
    tracer = make_tracer([8, 8])
    run_step(tracer, [0, 1])
    step = tracer.begin("training", dropped_after=frozenset({0}))
    visit_all(tracer, [0, 1])
    assert (step.cursor.next_visit(0), step.cursor.next_visit(1)) == (None, 3)


# Shapes


def test_steps_of_one_bucket_follow_one_trace():
    tracer = make_tracer([8])
    assert run_step(tracer, [0], shapes=((4, 12),)).is_recorded
    for shape in ((4, 12), (4, 11), (4, 9)):
        assert not run_step(tracer, [0], shapes=(shape,)).is_recorded, shape
    assert list(tracer.traces) == ["training/4x12"]
    assert tracer.traces["training/4x12"].shapes == (((4, 12),),)


def test_larger_inputs_of_the_same_bucket_are_recorded_anew():
    """Their activations may need more than the trace says."""
    nbytes = []
    tracer = make_tracer([8], lambda: nbytes[-1])
    for shape, peak, is_recorded in (((4, 10), 100, True), ((4, 12), 120, True), ((4, 11), 110, False)):
        nbytes.append(peak)
        assert run_step(tracer, [0], shapes=(shape,)).is_recorded == is_recorded
    trace = tracer.traces["training/4x12"]
    assert (trace.shapes, trace.non_model_peak_nbytes) == ((((4, 12),),), 120)
    assert count(tracer, StepRecorded) == 2


def test_other_buckets_and_kinds_have_traces_of_their_own():
    tracer = make_tracer([8, 8])
    run_step(tracer, [0], shapes=((4, 12),))
    run_step(tracer, [1], shapes=((4, 13),))
    run_step(tracer, [1, 1], "evaluation", ((4, 12),))
    assert {key: chunks_of(tracer, key) for key in tracer.traces} == {
        "training/4x12": [0],
        "training/4x16": [1],
        "evaluation/4x12": [1, 1],
    }
    assert count(tracer, StepRecorded) == 3


# Non-model data


def test_peaks_of_others_belong_to_the_visit_before_them():
    """The peak is asked for when the next visit begins, and once more when the step ends."""
    asked = []

    def peak():
        asked.append(len(tracer.step.visits) if tracer.step else None)
        return 100 * len(asked)

    tracer = make_tracer([8, 8], peak)
    tracer.begin("training")
    tracer.visit(0, tuple)
    assert asked == []
    tracer.visit(1, tuple)
    tracer.visit(0, tuple)
    assert asked == [1, 2]
    tracer.finish()
    assert len(asked) == 3
    assert tracer.traces["training"].visits == (Visit(0, (), 100), Visit(1, (), 200), Visit(0, (), 300))
    run_step(tracer, [0, 1, 0])
    assert len(asked) == 3, "a step that follows its trace asks nothing"


def test_peaks_are_asked_for_before_the_chunks_in_use_are():
    """Finding out what is in use may allocate; that belongs to nobody."""
    order = []
    tracer = make_tracer([8], lambda: order.append("peak") or 0)
    tracer.begin("training")
    for _ in range(2):
        tracer.visit(0, lambda: order.append("pinned") or ())
    assert order == ["pinned", "peak", "pinned"]


# Interludes, failures


def test_an_interlude_does_not_disturb_the_step_around_it():
    tracer = make_tracer([8, 8])
    around = tracer.begin("training")
    visit_all(tracer, [0])
    inside = tracer.begin_nested_evaluation("evaluation", always_metered=True)
    visit_all(tracer, [1, 1])
    assert tracer.step is inside
    tracer.end_nested_evaluation()
    assert tracer.step is around
    visit_all(tracer, [1])
    tracer.finish()
    assert chunks_of(tracer) == [0, 1]
    assert chunks_of(tracer, "evaluation") == [1, 1]
    tracer.begin_nested_evaluation("evaluation")
    assert visit_all(tracer, [1, 1]) == [0, 1]
    tracer.end_nested_evaluation()
    assert tracer.step is None
    assert count(tracer, StepDiverged) == 0


def test_an_interlude_that_is_not_whole_makes_no_trace():
    tracer = make_tracer([8, 8])
    around = tracer.begin("training")
    visit_all(tracer, [0])
    tracer.begin_nested_evaluation("evaluation")
    visit_all(tracer, [1])
    tracer.end_nested_evaluation(is_whole=False)
    assert tracer.step is around
    assert not tracer.traces
    for visits in ([1, 0], [1, 0], [1], [1, 0]):
        tracer.begin_nested_evaluation("evaluation")
        visit_all(tracer, visits)
        tracer.end_nested_evaluation(is_whole=len(visits) == 2)
        assert chunks_of(tracer, "evaluation") == [1, 0]
    visit_all(tracer, [1])
    tracer.finish()
    assert chunks_of(tracer) == [0, 1]
    assert (count(tracer, StepRecorded), count(tracer, StepDiverged)) == (2, 0)


@pytest.mark.parametrize("most", [3, 4])
def test_a_step_with_more_visits_than_any_real_one_is_forgotten(monkeypatch, most):
    monkeypatch.setattr(tracer_module, "MOST_VISITS", most)
    tracer = make_tracer([8, 8])
    step = tracer.begin("training")
    visit_all(tracer, [0, 1] * 10)
    assert tracer.step is None
    assert len(step.visits) == most
    tracer.finish()
    assert not tracer.traces
    assert run_step(tracer, [0, 1] * (most // 2)).is_recorded
    assert chunks_of(tracer) == [0, 1] * (most // 2), "one that has just as many is recorded"
    step = tracer.begin("training")
    visit_all(tracer, [0, 1] * 10)
    assert tracer.step is step, "one that follows a trace keeps no list"
    assert not step.visits


def test_a_step_that_came_to_nothing_leaves_no_trace():
    tracer = make_tracer([8])
    tracer.begin("training")
    visit_all(tracer, [0])
    tracer.abandon()
    assert not tracer.traces
    assert tracer.step is None
    assert visit_all(tracer, [0]) == [None]
    tracer.finish()
    run_step(tracer, [])
    assert not tracer.traces
    assert count(tracer, StepRecorded) == 0


def test_a_step_that_was_not_finished_is_forgotten_when_another_begins():
    tracer = make_tracer([8, 8])
    tracer.begin("training")
    visit_all(tracer, [0])
    run_step(tracer, [1])
    assert chunks_of(tracer) == [1]


def test_forgetting_ends_an_evaluation_that_was_interrupted():
    tracer = make_tracer([8])
    tracer.begin("training")
    tracer.begin_nested_evaluation("evaluation")
    tracer.abandon()
    tracer.begin_nested_evaluation("evaluation")
    visit_all(tracer, [0])
    tracer.end_nested_evaluation()
    assert tracer.step is None
    tracer.end_nested_evaluation()
    assert tracer.step is None


@pytest.mark.parametrize("shapes", [(), ((4, 12),)])
def test_a_trace_that_was_left_twice_in_a_row_is_recorded_anew(shapes):
    """A first step that failed half way leaves a wrong trace; steps must not be lost for ever because of it."""
    tracer = make_tracer([8, 8, 8])

    def is_diverged(chunks):
        return run_step(tracer, chunks, shapes=shapes).is_diverged

    assert [is_diverged(chunks) for chunks in ([0, 0, 1], [0, 1, 2], [0, 0, 1], [0, 1, 2])] == [
        False,
        True,
        False,
        True,
    ]
    assert [is_diverged([0, 1, 2]) for _ in range(4)] == [True, False, False, False]
    (key,) = tracer.traces
    assert chunks_of(tracer, key) == [0, 1, 2]
    assert (count(tracer, StepDiverged), count(tracer, StepRecorded)) == (3, 2)


def test_discarding_makes_every_kind_be_recorded_anew():
    tracer = make_tracer([8, 8])
    run_step(tracer, [0])
    run_step(tracer, [0], "evaluation")
    assert run_step(tracer, [1]).is_diverged
    tracer.discard()
    assert not tracer.traces
    for kind in ("training", "evaluation"):
        assert run_step(tracer, [0], kind).is_recorded
    assert run_step(tracer, [1]).is_diverged
    assert "training" in tracer.traces, "what was lost before counts no more"


def test_sizes_that_vary_independently_are_recorded_once_each():
    """Sequence to sequence: inputs and labels are padded on their own, and neither shape covers the other."""
    tracer = make_tracer([8])
    recorded = [
        run_step(tracer, [0], shapes=shapes).is_recorded for shapes in [((4, 100), (4, 60)), ((4, 110), (4, 58))] * 3
    ]
    assert recorded == [True, True, False, False, False, False]


def test_what_is_recorded_again_keeps_the_larger_peaks():
    peaks = iter([5, 9, 7, 3])
    tracer = make_tracer([8, 8], lambda: next(peaks))
    run_step(tracer, [0, 1], shapes=((4, 100), (4, 60)))
    run_step(tracer, [0, 1], shapes=((4, 110), (4, 58)))
    (trace,) = tracer.traces.values()
    assert [visit.non_model_nbytes for visit in trace.visits] == [7, 9]


def test_a_peak_before_an_interlude_is_kept():
    peaks = iter([40, 2, 3, 4])
    tracer = make_tracer([8, 8], lambda: next(peaks))
    tracer.begin("training")
    tracer.visit(0, tuple)
    tracer.begin_nested_evaluation("evaluation")
    tracer.visit(1, tuple)
    tracer.end_nested_evaluation()
    tracer.visit(1, tuple)
    tracer.finish()
    assert [visit.non_model_nbytes for visit in tracer.traces["training"].visits] == [40, 4]


def test_losing_twice_in_a_row_is_not_counted_over_a_recorded_step():
    tracer = make_tracer([8, 8])
    kinds = []
    for chunks, shape in (([0], (10,)), ([1], (10,)), ([0], (11,)), ([1], (11,)), ([0], (11,))):
        step = run_step(tracer, chunks, shapes=(shape,))
        kinds.append((step.is_recorded, step.is_diverged))
    assert kinds == [(True, False), (False, True), (True, False), (False, True), (False, False)]


# Several processes


def test_turns_are_the_visits_before_each_end_of_a_forward():
    tracer = make_tracer([8, 8])
    tracer.begin("training")
    visit_all(tracer, [0, 1])
    tracer.note_forward_end()
    visit_all(tracer, [1])
    tracer.note_forward_end()
    visit_all(tracer, [0])
    tracer.finish()
    assert tracer.traces["training"].forward_ends == (2, 3)


def test_turns_of_a_step_that_is_followed_or_lost_are_counted():
    tracer = make_tracer([8, 8])
    run_step(tracer, [0, 1])
    step = tracer.begin("training")
    tracer.note_forward_end()
    visit_all(tracer, [1])
    assert step.is_diverged
    tracer.note_forward_end()
    assert len(step.forward_ends) == 2
    tracer.finish()
    assert tracer.traces["training"].forward_ends == ()
    tracer.note_forward_end()  # outside of any step


def test_reductions_belong_to_the_visit_before_them():
    tracer = make_tracer([8, 8, 8])
    tracer.note_reduced(0)
    tracer.begin("training")
    tracer.note_reduced(0)
    visit_all(tracer, [0, 1])
    for chunk in (2, 1):
        tracer.note_reduced(chunk)
    visit_all(tracer, [0])
    tracer.note_reduced(0)
    tracer.finish()
    assert tracer.traces["training"].visits == (Visit(0), Visit(1, reduced=(2, 1)), Visit(0, reduced=(0,)))


def test_reductions_of_a_step_that_is_followed_are_not_noted():
    tracer = make_tracer([8, 8])
    run_step(tracer, [0, 1])
    step = tracer.begin("training")
    visit_all(tracer, [0])
    tracer.note_reduced(0)
    visit_all(tracer, [0])
    tracer.note_reduced(1)
    assert (step.is_diverged, step.reduced) == (True, [])
    tracer.finish()
    assert tracer.traces["training"].visits == (Visit(0), Visit(1))


def test_reductions_around_an_interlude():
    tracer = make_tracer([8, 8])
    tracer.begin("training")
    visit_all(tracer, [0])
    tracer.begin_nested_evaluation("evaluation")
    visit_all(tracer, [1])
    tracer.end_nested_evaluation()
    tracer.note_reduced(1)
    tracer.finish()
    assert tracer.traces["training"].visits == (Visit(0, reduced=(1,)),)
    assert tracer.traces["evaluation"].visits == (Visit(1),)


def test_peaks_of_gradients_belong_to_the_visit_before_them():
    peaks = iter([3, 9, 4])
    tracer = make_tracer([8, 8], lambda: 1, lambda: next(peaks))
    run_step(tracer, [0, 1, 0])
    assert [visit.gradient_nbytes for visit in tracer.traces["training"].visits] == [3, 9, 4]
    run_step(tracer, [0, 1, 0])
    assert next(peaks, None) is None, "a step that follows its trace asks nothing"


@pytest.mark.parametrize(("before", "after", "most"), [(40, 4, 40), (4, 40, 40)])
def test_a_peak_of_gradients_around_an_interlude(before, after, most):
    peaks = iter([before, 3, after, 0])
    tracer = make_tracer([8, 8], gradients=lambda: next(peaks))
    tracer.begin("training")
    visit_all(tracer, [0])
    tracer.begin_nested_evaluation("evaluation")
    visit_all(tracer, [1])
    tracer.end_nested_evaluation()
    visit_all(tracer, [1])
    tracer.finish()
    assert [visit.gradient_nbytes for visit in tracer.traces["training"].visits] == [most, 0]
    assert [visit.gradient_nbytes for visit in tracer.traces["evaluation"].visits] == [3]


def test_a_fingerprint_tells_which_steps_are_known():
    def fingerprint(*steps):
        tracer = make_tracer([8, 8])
        for kind, shapes, chunks in steps:
            run_step(tracer, chunks, kind, shapes)
        return tracer.fingerprint

    training, evaluation = ("training", ((4, 12),), [0]), ("evaluation", ((4, 12),), [1])
    assert fingerprint(training, evaluation) == fingerprint(evaluation, training), "in whatever order"
    assert fingerprint(training) == fingerprint(("training", ((4, 12),), [0, 1])), "what is done is agreed on"
    others = [(), (training,), (evaluation,), (training, evaluation), (("training", ((4, 11),), [0]),)]
    numbers = {fingerprint(*steps) for steps in others}
    assert len(numbers) == len(others)
    assert all(0 <= number < 2**32 for number in numbers)


def test_what_is_recorded_is_agreed_on_before_it_is_kept():
    """The others took other chunks, and more; what was known before is joined to what they agree on."""
    seen = []

    def agree(trace):
        seen.append(trace)
        visits = tuple(Visit(visit.chunk_index, (), visit.non_model_nbytes + 100) for visit in trace.visits)
        return Trace(trace.key, trace.chunk_nbytes, (*visits, Visit(1)), trace.shapes, trace.forward_ends)

    peaks = iter([5, 3])
    tracer = make_tracer([8, 8], lambda: next(peaks), agree=agree)
    run_step(tracer, [0], shapes=((4, 100),))
    assert [visit.non_model_nbytes for visit in seen[0].visits] == [5]
    (trace,) = tracer.traces.values()
    assert [(visit.chunk_index, visit.non_model_nbytes) for visit in trace.visits] == [(0, 105), (1, 0)]
    run_step(tracer, [0], shapes=((4, 110),))
    (trace,) = tracer.traces.values()
    assert [visit.non_model_nbytes for visit in trace.visits] == [105, 0]
    assert len(seen) == 2
    step = tracer.begin("training", ((4, 110),))
    assert visit_all(tracer, [0, 1]) == [0, 1]
    tracer.finish()
    assert (step.is_diverged, len(seen)) == (False, 2), "nothing is agreed on when nothing was recorded"


def test_a_step_that_came_to_nothing_is_not_agreed_on():
    def refuse(trace):
        raise AssertionError("asked")

    tracer = make_tracer([8], agree=refuse)
    run_step(tracer, [])
    tracer.begin("training")
    visit_all(tracer, [0])
    tracer.abandon()
    tracer.finish()
    tracer.begin_nested_evaluation("evaluation")
    visit_all(tracer, [0])
    tracer.end_nested_evaluation(is_whole=False)
    assert not tracer.traces


def test_chunks_have_the_order_of_the_first_training_that_was_recorded():
    tracer = make_tracer((1,) * 4)
    assert tracer.chunk_order == {}
    run_step(tracer, [0, 1], kind="evaluation")
    assert tracer.chunk_order == {}
    run_step(tracer, [2, 0, 3, 0, 2])
    assert tracer.chunk_order == {2: 0, 0: 1, 3: 2}
    run_step(tracer, [0, 3], shapes=((64,),))
    assert tracer.chunk_order == {2: 0, 0: 1, 3: 2}, "updates go on in one order"
    tracer.discard()
    assert tracer.chunk_order == {2: 0, 0: 1, 3: 2}, "until steps are recorded again"
    run_step(tracer, [3, 0])
    assert tracer.chunk_order == {3: 0, 0: 1}


# Traces that are made before the first step


def foreseen(*visits, key="training", shapes=((),)):
    return Trace(key, (8, 8, 8), tuple(Visit(*visit) for visit in visits), shapes)


def test_a_step_follows_what_was_foreseen_and_corrects_its_bytes():
    measured = iter([5, 6, 7])
    tracer = make_tracer([8, 8, 8], lambda: next(measured))
    tracer.learn([foreseen((0, (2,), 90), (1, (), 90))])
    version = tracer.version
    step = tracer.begin("training")
    assert (step.is_recorded, step.is_measured, step.is_metered, step.has_moments) == (False, True, True, True)
    assert visit_all(tracer, [0, 1]) == [0, 1]
    tracer.finish()
    assert tracer.traces == {"training": foreseen((0, (2,), 5), (1, (), 6))}
    assert tracer.version > version, "homes are decided anew"
    step = tracer.begin("training")
    assert (step.is_recorded, step.is_measured, step.is_metered) == (False, False, False)
    assert tracer.events == []


def test_what_was_not_foreseen_rightly_is_recorded_and_never_foreseen_again(caplog):
    tracer = make_tracer([8, 8, 8], lambda: 5)
    tracer.learn([foreseen((0,), (1,), shapes=(((4,),),), key="training/4")])
    assert tracer.may_learn("training", ((4,),))
    step = tracer.begin("training", ((4,),))
    step.plan = object()
    with caplog.at_level("INFO"):
        assert visit_all(tracer, [0, 2], pinned=(1,)) == [0, None]
    assert "step 'training/4' does something else than was foreseen, and is recorded" in caplog.text
    tracer.note_forward_end()
    visit_all(tracer, [0], pinned=(2,))
    assert (step.is_recorded, step.has_moments, step.plan) == (True, True, None)
    tracer.finish()
    visits = Visit(0, (1,), 5), Visit(2, (1,), 5), Visit(0, (2,), 5)
    assert tracer.traces == {"training/4": Trace("training/4", (8, 8, 8), visits, (((4,),),), (2,))}
    assert not tracer.may_learn("training", ((4,),))
    assert (count(tracer, StepRecorded), count(tracer, StepDiverged)) == (1, 1)
    assert run_step(tracer, [0, 2, 0], shapes=((4,),)).cursor is not None


def test_of_evaluations_of_one_bucket_the_first_one_is_foreseen():
    """A sequence grows by a token with each forward while text is generated."""
    tracer = make_tracer([8, 8])
    assert tracer.may_learn("evaluation", ((5,),))
    tracer.learn([foreseen((0,), shapes=(((5,),),), key="evaluation/6")])
    assert not tracer.may_learn("evaluation", ((6,),))
    assert tracer.may_learn("evaluation", ((7,),)), "another bucket"
    tracer.learn([foreseen((0,), shapes=(((5,),),), key="training/6")])
    assert tracer.may_learn("training", ((6,),))


def test_what_one_of_several_processes_has_not_foreseen_rightly_is_recorded_next():
    tracer = make_tracer([8, 8, 8])
    tracer._order.is_alone = False
    tracer.learn([foreseen((0,), (1,), shapes=(((4,),),), key="training/4")])
    step = run_step(tracer, [0, 2], shapes=((4,),))
    assert step.is_diverged
    assert not tracer.covers("training", ((4,),))
    assert not tracer.may_learn("training", ((4,),))
    assert tracer.may_learn("training", ((9,),)), "another bucket"
    assert run_step(tracer, [0, 2], shapes=((4,),)).is_recorded
    assert chunks_of(tracer, "training/4") == [0, 2]
    assert count(tracer, StepDiverged) == 1


def test_a_step_without_shapes_is_not_foreseen():
    assert not make_tracer([8]).may_learn("training", ())


def test_a_step_that_is_void_or_shorter_corrects_nothing():
    for is_void, chunks in ((True, [0, 1]), (False, [0])):
        tracer = make_tracer([8, 8, 8], lambda: 5)
        tracer.learn([foreseen((0, (), 90), (1, (), 90))])
        step = tracer.begin("training")
        visit_all(tracer, chunks)
        step.is_void = is_void
        tracer.finish()
        assert tracer.traces == {"training": foreseen((0, (), 90), (1, (), 90))}


def test_all_processes_agree_on_the_corrected_trace():
    larger = foreseen((0, (), 50), (1, (), 50))
    tracer = make_tracer([8, 8, 8], lambda: 5, agree=lambda trace: trace.merged(larger))
    tracer.learn([foreseen((0, (), 90), (1, (), 90))])
    run_step(tracer, [0, 1])
    assert tracer.traces == {"training": larger}


def test_what_is_foreseen_of_larger_inputs_covers_what_is_known():
    tracer = make_tracer([8, 8, 8], lambda: 7)
    run_step(tracer, [0, 1], shapes=((3,),))
    tracer.learn([foreseen((0, (), 9), (1, (), 4), shapes=(((4,),),), key="training/3")])
    assert [visit.non_model_nbytes for visit in tracer.traces["training/3"].visits] == [9, 7]


def test_known_traces_of_batches_of_another_size_go_when_a_step_is_foreseen():
    def of(num_rows, length):
        return foreseen((0,), (1,), shapes=(((num_rows, length),),), key=f"training/{num_rows}x{length}")

    of_larger, of_longer, followed = of(4, 8), of(2, 16), of(8, 8)
    known = KnownTraces("key", {trace.key: trace for trace in (of_larger, of_longer, followed)})
    tracer = make_tracer([8, 8, 8], known=known)
    run_step(tracer, [0, 1], shapes=((8, 8),))
    tracer.learn([of(2, 8)])
    assert tracer.traces.keys() == {"training/8x8", "training/2x16", "training/2x8"}


def test_after_a_step_that_ran_out_of_memory_nothing_is_foreseen():
    tracer = make_tracer([8, 8, 8])
    tracer.learn([foreseen((0,), shapes=(((4,),),), key="training/4")])
    tracer.distrust()
    assert tracer.traces == {}
    assert not tracer.may_learn("training", ((4,),))
    assert tracer.begin("training", ((4,),)).is_recorded


def test_of_an_update_the_order_of_chunks_is_known_beforehand():
    tracer = make_tracer([8, 8, 8], lambda: 6)
    tracer.learn_update("optimizer", [2, 0])
    version = tracer.version
    tracer.learn_update("optimizer", [2, 0])
    assert tracer.version == version, "it is known"
    step = run_step(tracer, [2, 0], "optimizer", chunk_indices=[2, 0])
    assert not step.is_diverged
    assert tracer.traces["optimizer"].non_model_peak_nbytes == 6
    tracer.learn_update("optimizer", [0, 1, 2])
    assert chunks_of(tracer, "optimizer") == [0, 1, 2]
    assert count(tracer, StepRecorded) == 0
