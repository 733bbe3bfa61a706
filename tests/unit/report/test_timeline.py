"""The timeline of a step that was measured, and the trace of one that Perfetto shows."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from hf_patrickstar.memory.lanes import LaneTimes, Timed
from hf_patrickstar.report.measured_step import MOST_SPANS, measured_timeline
from hf_patrickstar.report.timeline import CRITICAL, STOPS, WAITS, to_trace
from hf_patrickstar.schedule.clock import Clock, Lane
from hf_patrickstar.schedule.script import Part

TO_DEVICE, TO_HOST = Lane.TO_DEVICE, Lane.TO_HOST


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


def measured(parts, found, has_streams=False):
    times = LaneTimes()
    times.has_streams, times.parts = has_streams, parts
    times.found = lambda: found
    return times


def spans_of(timeline, fields):
    lanes = dict.fromkeys(span.lane for span in timeline.own_spans)
    return {lane: [span[1:fields] for span in timeline.own_spans if span.lane is lane] for lane in lanes}


PARTS = [
    (Part.FORWARD, (100, None), (200, None)),
    (Part.BACKWARD, (200, None), (400, None)),
    (Part.UPDATE, (410, None), (500, None)),
]
ALONE = [
    Timed(TO_DEVICE, None, 10, 60, 8),  # before the step
    *(Timed(TO_DEVICE, waiter, 100, 120, 8) for waiter in (None, Lane.HOST)),
    Timed(TO_DEVICE, Lane.HOST, 150, 160),
    Timed(TO_DEVICE, None, 130, 160, 8),
    *(Timed(TO_HOST, waiter, 350, 360, 8) for waiter in (None, Lane.HOST)),
]


def test_a_measured_step_of_the_cpu_tier():
    timeline = measured_timeline(measured(PARTS, ALONE))
    assert (timeline.begin_ns, timeline.end_ns) == (0, 400)
    assert spans_of(timeline, 3) == {
        Lane.COMPUTE: [(20, 50), (60, 100), (100, 250), (260, 300)],
        Lane.HOST: [(310, 400)],
        Lane.TO_DEVICE: [(0, 20), (30, 60)],
        Lane.TO_HOST: [(250, 260)],
    }
    assert [(wait.begin_ns, wait.duration_ns) for wait in timeline.waits] == [(0, 20), (50, 10), (250, 10)]
    assert len(timeline.waits_by_place()) == 3, "not started ahead, late, and to the host"
    assert not timeline.critical_path(), "nobody knows what these spans began after"


AHEAD = [
    (Part.FORWARD, (100, 110), (150, 210)),  # the host is far ahead
    (Part.BACKWARD, (150, 210), (200, 500)),
    (Part.UPDATE, (200, 500), (230, 510)),
]
BESIDE = [
    Timed(TO_DEVICE, None, 50, 90, 8),  # before the step
    Timed(TO_DEVICE, None, 120, 160, 8),
    Timed(TO_HOST, None, 400, 520, 16),
    Timed(Lane.HOST_WORK, None, 520, 700),
    Timed(TO_DEVICE, None, 800, 900, 8),  # of an evaluation
    Timed(TO_DEVICE, Lane.COMPUTE, 800, 850),
    Timed(Lane.HOST_WORK, Lane.HOST, 800, 850),
    Timed(TO_DEVICE, Lane.COMPUTE, 130, 160),
    Timed(TO_HOST, Lane.COMPUTE, 450, 480),
    Timed(TO_HOST, Lane.HOST, 205, 225),
]


def test_a_measured_step_of_an_accelerator():
    timeline = measured_timeline(measured(AHEAD, BESIDE, has_streams=True))
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
    much = [Timed(TO_DEVICE, None, 150, 151, 8)] * MOST_SPANS
    begun_before = [*AHEAD[:2], (Part.UPDATE, (200, None), (230, 510))]
    for parts, found, has_streams in (
        *(([], ALONE, False), (PARTS, much, False)),
        *(([], BESIDE, True), (AHEAD, much, True), (begun_before, BESIDE, True)),
    ):
        assert measured_timeline(measured(parts, found, has_streams)) is None
