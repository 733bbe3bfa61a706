"""The timeline of a step that was measured, and the trace of one that Perfetto shows."""

import json
import types

from hypothesis import given, settings
from hypothesis import strategies as st

from hf_patrickstar.memory.lanes import Stop, TimedCopy, WorkLane
from hf_patrickstar.report.measured_step import MOST_SPANS, measured_lanes, measured_timeline
from hf_patrickstar.report.timeline import CRITICAL, STOPS, WAITS, to_trace
from hf_patrickstar.runtime.steps import Piece
from hf_patrickstar.schedule.clock import Clock, Lane
from hf_patrickstar.schedule.script import Part

TO_DEVICE, TO_HOST = WorkLane.TO_DEVICE, WorkLane.TO_HOST


def rows_of(timeline):
    """Complete events of the trace by the name of their thread, as whole nanoseconds."""
    events = json.loads(json.dumps(to_trace(timeline)))["traceEvents"]
    rows = {event["tid"]: (event["args"]["name"], []) for event in events if event["name"] == "thread_name"}
    for event in events:
        if event["ph"] == "X":
            times = (round(event["ts"] * 1000), round(event["dur"] * 1000))
            rows[event["tid"]][1].append((event["name"], *times, event["args"]))
    return dict(rows.values())


@settings(deadline=None, max_examples=50, database=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(Lane), st.integers(0, 10**13), st.booleans()), max_size=20))
def test_a_trace_has_every_span_and_wait_to_the_nanosecond(work):
    clock = Clock()
    clock.wait(clock.put(Lane.COMPUTE, 777, "old"), "old")
    first, begin = len(clock.spans), clock.end_of(Lane.HOST).time_ns
    for lane, duration, is_awaited in work:
        end = clock.put(lane, duration, "work")
        if is_awaited:
            clock.wait(end, "a place")
    timeline = clock.timeline(begin, first)
    expected = {str(lane): [] for lane in Lane}
    for number, span in enumerate(timeline.own_spans, first):
        args = {"span": number, "after": span.after}
        expected[span.lane].append((span.what, span.begin_ns - begin, span.duration_ns, args))
    expected[WAITS] = [(wait.place, wait.begin_ns - begin, wait.duration_ns, {}) for wait in timeline.waits]
    path = timeline.critical_path()
    expected[CRITICAL] = [(s.what, s.begin_ns - begin, s.duration_ns, {"lane": str(s.lane)}) for s in path]
    assert rows_of(timeline) == expected


def measured(works=(), stops=()):
    return types.SimpleNamespace(ns_of=lambda moment: moment, works=lambda: list(works), stops=lambda: list(stops))


def spans_of(timeline, fields):
    lanes = dict.fromkeys(span.lane for span in timeline.own_spans)
    return {lane: [span[1:fields] for span in timeline.own_spans if span.lane is lane] for lane in lanes}


PIECES = [Piece(Part.FORWARD, 100, 200), Piece(Part.BACKWARD, 200, 400), Piece(Part.UPDATE, 410, 500)]
ALONE = [
    TimedCopy(TO_DEVICE, 10, 60, 8, False),  # before the step
    TimedCopy(TO_DEVICE, 100, 120, 8, False),
    TimedCopy(TO_DEVICE, 130, 160, 8, True),
    TimedCopy(TO_HOST, 350, 360, 8, False),
]


def test_a_measured_step_of_the_cpu_tier():
    timeline = measured_timeline(PIECES, measured(ALONE, [Stop(TO_DEVICE, 150, 160, True)]))
    assert (timeline.begin_ns, timeline.end_ns) == (0, 400)
    assert spans_of(timeline, 3) == {
        Lane.TO_DEVICE: [(30, 60), (0, 20)],
        Lane.COMPUTE: [(20, 50), (60, 100), (100, 250), (260, 300)],
        Lane.TO_HOST: [(250, 260)],
        Lane.HOST: [(310, 400)],
    }
    assert [span.begin_ns for span in timeline.critical_path()] == [0, 20, 60, 100, 250, 260, 310]
    assert [(wait.begin_ns, wait.duration_ns) for wait in timeline.waits] == [(0, 20), (50, 10), (250, 10)]
    assert len(timeline.waits_by_place()) == 3, "not started ahead, late, and to the host"


AHEAD = [
    Piece(Part.FORWARD, 100, 150, (110, 210)),  # the host is far ahead
    Piece(Part.BACKWARD, 150, 200, (210, 500)),
    Piece(Part.UPDATE, 200, 230, (500, 510)),
]
BESIDE = [
    TimedCopy(TO_DEVICE, 50, 90, 8, True),  # before the step
    TimedCopy(TO_DEVICE, 120, 160, 8, True),
    TimedCopy(TO_HOST, 400, 520, 16, True),
    TimedCopy(WorkLane.HOST_WORK, 520, 700, 0, True),
    TimedCopy(TO_DEVICE, 800, 900, 8, True),  # of an evaluation
]
STOOD = [Stop(TO_DEVICE, 800, 850, False), Stop(TO_DEVICE, 130, 160, False), Stop(TO_HOST, 450, 480, False)]


def test_a_measured_step_of_an_accelerator():
    timeline = measured_lanes(AHEAD, measured(BESIDE, [*STOOD, Stop(TO_HOST, 205, 225, True)]))
    computed = [(10, 30, "forward"), (60, 110, "forward"), (110, 350, "backward"), (380, 400, "backward")]
    assert spans_of(timeline, 4) == {
        Lane.COMPUTE: [*computed, (400, 410, "update")],
        Lane.HOST: [(0, 50, "forward"), (50, 100, "backward"), (100, 105, "update"), (125, 130, "update")],
        Lane.TO_DEVICE: [(20, 60, "8 bytes")],
        Lane.TO_HOST: [(300, 420, "16 bytes")],
        Lane.HOST_WORK: [(420, 600, "work")],
    }
    assert (timeline.begin_ns, timeline.end_ns) == (0, 600), "the step ends when the last lane has ended its work"
    rows, gradients = rows_of(timeline), "a copy of gradients to the host"
    assert rows[STOPS] == [("a copy to the device", 30, 30, {}), (gradients, 350, 30, {})]
    assert rows[WAITS] == [(gradients, 105, 20, {})]
    assert CRITICAL not in rows, "nobody knows what these spans began after"


def test_nothing_and_too_much_is_no_timeline():
    much = measured([TimedCopy(TO_DEVICE, 150, 151, 8, True)] * MOST_SPANS)
    assert measured_timeline([], measured(ALONE)) is measured_timeline(PIECES, much) is None
    assert measured_lanes([], measured(BESIDE)) is measured_lanes(AHEAD, much) is None
    assert measured_lanes([*AHEAD[:2], Piece(Part.UPDATE, 200, 230, (500, None))], measured(BESIDE)) is None
