import pytest

from hf_patrickstar.errors import BudgetError, ConfigError
from hf_patrickstar.runtime.tracer import Tracer
from hf_patrickstar.schedule.simulator import simulate
from hf_patrickstar.schedule.trace import Trace, Visit


def visit_all(tracer, chunks, pinned=()):
    for chunk in chunks:
        tracer.visit(chunk, lambda: pinned)


def test_the_first_step_is_recorded_and_later_ones_are_followed():
    tracer = Tracer([8, 8, 8])
    tracer.begin("training")
    assert tracer.cursor is None
    visit_all(tracer, [0, 2, 0], pinned=(1,))
    tracer.finish()
    assert tracer.traces["training"] == Trace("training", (8, 8, 8), (Visit(0, (1,)), Visit(2, (1,)), Visit(0, (1,))))
    tracer.begin("training")
    visit_all(tracer, [0, 2])
    assert tracer.cursor is not None
    assert tracer.cursor.next_visit(0) == 2
    visit_all(tracer, [1])
    assert tracer.cursor is None
    assert tracer.is_lost
    visit_all(tracer, [1, 2])
    tracer.finish()
    assert tracer.num_lost == 1
    assert len(tracer.traces["training"].visits) == 3


def test_an_interlude_does_not_disturb_the_step_around_it():
    tracer = Tracer([8, 8])
    tracer.begin("training")
    visit_all(tracer, [0])
    tracer.begin_interlude("evaluation")
    visit_all(tracer, [1, 1])
    tracer.end_interlude()
    assert tracer.is_running
    visit_all(tracer, [1])
    tracer.finish()
    assert [visit.chunk_index for visit in tracer.traces["training"].visits] == [0, 1]
    assert [visit.chunk_index for visit in tracer.traces["evaluation"].visits] == [1, 1]
    tracer.begin_interlude("evaluation")
    visit_all(tracer, [1, 1])
    tracer.end_interlude()
    assert not tracer.is_running
    assert tracer.num_lost == 0


def test_a_step_that_came_to_nothing_leaves_no_trace():
    tracer = Tracer([8])
    tracer.begin("training")
    visit_all(tracer, [0])
    tracer.forget()
    assert not tracer.traces
    assert not tracer.is_running
    visit_all(tracer, [0])
    tracer.finish()
    assert not tracer.traces


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "this is not a trace"),
        ("[]", "this is not a trace"),
        ('{"key": "t", "chunk_nbytes": [1], "visits": [[]]}', "this is not a trace"),
        ('{"key": "t", "chunk_nbytes": [1], "visits": [[0], [1]]}', "moment 1: chunk 1 of 1"),
    ],
)
def test_bad_traces(text, message):
    with pytest.raises(ConfigError, match=message):
        Trace.from_json(text)


def test_a_simulation_that_cannot_work():
    trace = Trace("t", (10, 10), (Visit(0), Visit(1, (0,))))
    with pytest.raises(BudgetError, match=r"moment 1 of trace 't': chunk 1 and the chunks in use \(\[0\]\)"):
        simulate(trace, 15, "belady")
    assert simulate(trace, 20, "lru", dropped_after=frozenset({0, 1})).loads == 2


def test_a_trace_that_was_left_twice_in_a_row_is_recorded_anew():
    """A first step that failed half way leaves a wrong trace; steps must not be lost for ever because of it."""
    tracer = Tracer([8, 8, 8])

    def step(chunks):
        tracer.begin("training")
        visit_all(tracer, chunks)
        lost = tracer.is_lost
        tracer.finish()
        return lost

    assert [step(chunks) for chunks in ([0, 0, 1], [0, 1, 2], [0, 0, 1], [0, 1, 2])] == [False, True, False, True]
    assert [step([0, 1, 2]) for _ in range(4)] == [True, False, False, False]
    assert [visit.chunk_index for visit in tracer.traces["training"].visits] == [0, 1, 2]
    assert tracer.num_lost == 3


def test_forgetting_ends_an_evaluation_that_was_interrupted():
    tracer = Tracer([8])
    tracer.begin("training")
    tracer.begin_interlude("evaluation")
    tracer.forget()
    tracer.begin_interlude("evaluation")
    visit_all(tracer, [0])
    tracer.end_interlude()
    assert not tracer.is_running
    tracer.end_interlude()
    assert not tracer.is_running
