"""The lanes of a step that was measured, as a timeline like that of a simulated one.

[Note: a measured step]
On an accelerator each lane has its own times (``memory/lanes.py``). The compute lane worked from the begin of a
part to its end, but for what it waited for; so the time in which it has nothing to do because the host is late is a
part of its work. What a span began after is not known, so there is no critical path. Collectives have no lanes: their
library has streams of its own.

On the CPU tier one thread computes, updates and makes the copies that were not started ahead; another thread makes
those that were. So the end of a step has to wait for all that the first thread does: it is the critical path. Copies
that it makes itself, and its waits for late ones, are where computation stands still.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from hf_patrickstar.memory.lanes import LaneTimes, Stop, TimedCopy, WorkLane
from hf_patrickstar.runtime.steps import Piece
from hf_patrickstar.schedule.clock import Lane, Span, Timeline, Wait
from hf_patrickstar.schedule.script import Part

MOST_SPANS = 5000
"""A step of more spans is not recorded: the page would draw most of them as one."""
_AWAITED = {
    WorkLane.TO_DEVICE: "a copy to the device",
    WorkLane.TO_HOST: "a copy of gradients to the host",
    WorkLane.HOST_WORK: "work of the host's thread",
}
_NOT_AHEAD = {**_AWAITED, WorkLane.TO_DEVICE: "a copy to the device that was not started ahead"}
_LATE = "a copy to the device that was started ahead and came late"


def measured_timeline(pieces: Sequence[Piece], times: LaneTimes) -> Timeline | None:
    """The timeline of a step of the CPU tier; see [Note: a measured step].

    Args:
        pieces: What the thread of the caller did, in order.
        times: What was measured.

    Returns:
        The timeline, which begins at 0; ``None`` if nothing was measured, or far too much.
    """
    if not pieces:
        return None
    begin, end = pieces[0].begin_ns, pieces[-1].end_ns
    inside = sorted(times.works(), key=lambda work: work.end_ns)
    inside = [work for work in inside if begin <= work.begin_ns and work.end_ns <= end]
    own, beside = ([work for work in inside if work.is_ahead is ahead] for ahead in (False, True))
    late = (stop for stop in times.stops() if begin <= stop.begin_ns and stop.end_ns <= end)
    waits = [_wait(work, _NOT_AHEAD[work.lane]) for work in own]
    waits += [_wait(stop, _LATE) for stop in late]
    chain = [*_spans_of(pieces, waits, Lane.COMPUTE, Lane.HOST), *map(_span, own)]
    chain.sort(key=lambda span: span.begin_ns)
    chain = [span._replace(after=len(beside) + place - 1 if place else -1) for place, span in enumerate(chain)]
    return _timeline(begin, end, [*map(_span, beside), *chain], waits, True)


def measured_lanes(pieces: Sequence[Piece], times: LaneTimes) -> Timeline | None:
    """The timeline of a step of an accelerator; see [Note: a measured step]. Waits until the step is done.

    Args:
        pieces: What the thread of the caller did, in order, with moments of the compute stream.
        times: What was measured.

    Returns:
        The timeline, which begins at 0 and ends with the last piece of work; ``None`` if nothing was measured, or far
        too much.
    """
    if not pieces or any(moment is None for piece in pieces for moment in piece.moments):
        return None
    begin = pieces[0].begin_ns
    computed = [Piece(part, *map(times.ns_of, moments)) for part, _, _, moments in pieces]  # type: ignore[arg-type]
    # An evaluation or a save may follow before the next step does. What the host's thread was given may come late.
    last = max(pieces[-1].end_ns, computed[-1].end_ns)
    stops = [stop for stop in times.stops() if begin <= stop.begin_ns <= last]
    waits = [_wait(stop, _AWAITED[stop.lane], Lane.HOST if stop.is_host else Lane.COMPUTE) for stop in stops]
    since = (work for work in times.works() if begin <= work.begin_ns)
    works = [_span(work) for work in since if work.begin_ns <= last or work.lane is WorkLane.HOST_WORK]
    on_device = _spans_of(computed, [wait for wait in waits if wait.lane is Lane.COMPUTE], Lane.COMPUTE, Lane.COMPUTE)
    on_host = _spans_of(pieces, [wait for wait in waits if wait.lane is Lane.HOST], Lane.HOST, Lane.HOST)
    spans = [*on_device, *on_host, *works]
    return _timeline(begin, max(span.end_ns for span in spans), spans, waits, False)


def _timeline(begin: int, end: int, spans: list[Span], waits: list[Wait], has_causes: bool) -> Timeline | None:
    if len(spans) + len(waits) > MOST_SPANS:
        return None
    moved = tuple(span._replace(begin_ns=span.begin_ns - begin, end_ns=span.end_ns - begin) for span in spans)
    stops = [dataclasses.replace(wait, begin_ns=wait.begin_ns - begin) for wait in waits]
    return Timeline(0, end - begin, moved, 0, tuple(sorted(stops, key=lambda wait: wait.begin_ns)), has_causes)


def _wait(stop: Stop | TimedCopy, place: str, lane: Lane = Lane.HOST) -> Wait:
    return Wait(stop.begin_ns, stop.end_ns - stop.begin_ns, place, lane)


def _span(work: TimedCopy) -> Span:
    what = "work" if work.lane is WorkLane.HOST_WORK else f"{work.nbytes} bytes"
    return Span(Lane[work.lane.name], work.begin_ns, work.end_ns, what)


def _spans_of(pieces: Iterable[Piece], waits: Iterable[Wait], computing: Lane, updating: Lane) -> Iterator[Span]:
    """What was done between waits: in the lane of an update, and in that of all other parts."""
    stops = sorted((wait.begin_ns, wait.begin_ns + wait.duration_ns) for wait in waits)
    for part, begin, end, _ in pieces:
        lane = updating if part is Part.UPDATE else computing
        since = begin
        for stop, go_on in stops:
            if begin <= stop and go_on <= end and stop >= since:
                if stop > since:
                    yield Span(lane, since, stop, str(part))
                since = go_on
        if end > since:
            yield Span(lane, since, end, str(part))
