"""Virtual time: examples by hand, and what holds for every program of a host."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from hf_patrickstar.schedule.clock import Clock, Lane, Mark

fast = settings(deadline=None, max_examples=200, database=None, derandomize=True)
BESIDE = [lane for lane in Lane if lane is not Lane.HOST]


# By hand


def test_places_begin_with_the_longest_and_a_later_timeline_has_what_came_since():
    clock = Clock()
    for place, duration in (("short", 2), ("long", 3), ("long", 4)):
        clock.wait(clock.put(Lane.COMPUTE, duration, "kernel"), place)
    assert list(clock.timeline().waits_by_place().items()) == [("long", 7), ("short", 2)]
    begin_ns, first = clock.end_of(Lane.HOST).time_ns, len(clock.spans)
    clock.host(1, "launch")
    clock.put(Lane.COMPUTE, 3, "new")
    clock.put(Lane.TO_HOST, 3, "of two that end together the later one is critical")
    for lane in Lane:
        clock.wait(clock.end_of(lane), "new")
    timeline = clock.timeline(begin_ns, first)
    assert (timeline.begin_ns, timeline.end_ns, timeline.duration_ns) == (9, 13, 4)
    assert len(list(timeline.own_spans)) == 3
    assert [span.lane for span in timeline.critical_path()] == [Lane.HOST, Lane.TO_HOST]
    assert (timeline.busy_ns()[Lane.COMPUTE], timeline.waits_by_place()) == (3, {"new": 3})


# Every program

DURATIONS = st.integers(0, 50)
CALLS = st.one_of(
    st.tuples(st.just("host"), DURATIONS),
    st.tuples(st.just("put"), st.sampled_from(BESIDE), DURATIONS),
    st.tuples(st.just("follow"), st.sampled_from(BESIDE), st.integers(0, 20)),
    st.tuples(st.just("wait"), st.integers(0, 20)),
)
PROGRAMS = st.lists(CALLS, max_size=40)


def run(program, clock=None):
    """Runs a program on a clock; numbers of marks count the marks that there are from the last one on."""
    clock = clock or Clock()
    marks = [Mark()]
    for name, *arguments in program:
        if name == "host":
            clock.host(*arguments, "host")
        elif name == "put":
            marks.append(clock.put(*arguments, "work"))
        elif name == "follow":
            clock.follow(arguments[0], marks[-1 - arguments[1] % len(marks)])
        else:
            clock.wait(marks[-1 - arguments[0] % len(marks)], "place")
    return clock


@fast
@given(PROGRAMS)
def test_a_lane_does_one_thing_at_a_time_and_begins_when_what_it_waited_for_ends(program):
    clock = run(program)
    for lane in Lane:
        spans = [span for span in clock.spans if span.lane is lane]
        assert all(before.end_ns <= after.begin_ns for before, after in itertools.pairwise(spans))
    for number, span in enumerate(clock.spans):
        assert span.duration_ns >= 0
        assert span.after < number
        assert span.begin_ns == (clock.spans[span.after].end_ns if span.after >= 0 else 0)
    timeline = clock.timeline()
    assert max(timeline.busy_ns().values()) <= timeline.duration_ns
    assert timeline.duration_ns <= sum(timeline.busy_ns().values()), "at every moment something runs"


@fast
@given(PROGRAMS)
def test_the_critical_path_goes_from_the_beginning_to_the_end_without_a_gap(program):
    timeline = run(program).timeline()
    path = timeline.critical_path()
    assert all(before.end_ns == after.begin_ns for before, after in itertools.pairwise(path))
    assert sum(timeline.critical_ns().values()) == sum(span.duration_ns for span in path) == timeline.duration_ns
    if path:
        assert (path[0].begin_ns, path[0].after, path[-1].end_ns) == (0, -1, timeline.end_ns)


@fast
@given(PROGRAMS)
def test_the_host_works_or_waits(program):
    clock = run(program)
    timeline = clock.timeline()
    assert timeline.busy_ns()[Lane.HOST] + sum(timeline.waits_by_place().values()) == clock.end_of(Lane.HOST).time_ns
    pieces = [(span.begin_ns, span.end_ns) for span in clock.spans if span.lane is Lane.HOST and span.duration_ns]
    pieces += [(wait.begin_ns, wait.begin_ns + wait.duration_ns) for wait in clock.waits]
    assert all(wait.duration_ns > 0 for wait in clock.waits)
    assert [end for _, end in sorted(pieces)][:-1] == [begin for begin, _ in sorted(pieces)][1:]


@fast
@given(PROGRAMS, st.data())
def test_less_to_wait_for_is_never_later_and_waiting_after_each_call_takes_the_sum(program, data):
    keep = [call for call in program if call[0] in ("host", "put") or data.draw(st.booleans())]
    assert run(keep).timeline().end_ns <= run(program).timeline().end_ns
    clock = Clock()
    for call in program:
        run([call], clock)
        for lane in Lane:
            clock.wait(clock.end_of(lane), "each")
    assert clock.timeline().duration_ns == sum(clock.timeline().busy_ns().values()) == clock.end_of(Lane.HOST).time_ns
