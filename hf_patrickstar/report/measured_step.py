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

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.memory.lanes import LaneTimes, Stop, TimedCopy, WorkLane
from hf_patrickstar.runtime.steps import Piece
from hf_patrickstar.schedule.clock import Lane, Span, Timeline, Wait
from hf_patrickstar.schedule.script import Part

MOST_SPANS = 5000
"""A step of more spans is not recorded: the page would draw most of them as one."""
_LANES = {WorkLane.TO_DEVICE: Lane.TO_DEVICE, WorkLane.TO_HOST: Lane.TO_HOST, WorkLane.HOST_WORK: Lane.HOST_WORK}
_LATE = "a copy that was started ahead and had not arrived"
_NOT_AHEAD = "a copy that was not started ahead"
_GRADIENTS = "a copy of gradients to the host"
_AWAITED = {
    WorkLane.TO_DEVICE: "a copy to the device",
    WorkLane.TO_HOST: _GRADIENTS,
    WorkLane.HOST_WORK: "work of the host's thread",
}


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
    inside = [copy for copy in times.works() if begin <= copy.begin_ns and copy.end_ns <= end]
    inside.sort(key=lambda copy: copy.end_ns)
    blocked = [(copy.begin_ns, copy.end_ns, _why(copy)) for copy in inside if not copy.is_ahead]
    waits = (stop for stop in times.stops() if begin <= stop.begin_ns and stop.end_ns <= end)
    blocked += [(stop.begin_ns, stop.end_ns, _LATE) for stop in waits]
    blocked.sort()
    own = [*_spans_of(pieces, blocked, Lane.HOST), *(_span(copy) for copy in inside if not copy.is_ahead)]
    own.sort(key=lambda item: item[1])
    beside = [_span(copy) for copy in inside if copy.is_ahead]
    if len(own) + len(beside) > MOST_SPANS:
        return None
    spans = [Span(lane, since - begin, until - begin, what, -1) for lane, since, until, what in beside]
    for lane, since, until, what in own:
        after = len(spans) - 1 if len(spans) > len(beside) else -1
        spans.append(Span(lane, since - begin, until - begin, what, after))
    stops = tuple(Wait(since - begin, until - since, why) for since, until, why in blocked)
    return Timeline(0, end - begin, tuple(spans), 0, stops)


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
    waits = [
        Wait(since - begin, until - since, _AWAITED[lane], Lane.HOST if is_host else Lane.COMPUTE)
        for lane, since, until, is_host in stops
    ]
    waits.sort(key=lambda wait: wait.begin_ns)
    spans = [
        *_spans_of(computed, _blocks(wait for wait in stops if not wait.is_host), Lane.COMPUTE),
        *_spans_of(pieces, _blocks(wait for wait in stops if wait.is_host), Lane.HOST, Lane.HOST),
        *(
            _span(work)
            for work in times.works()
            if begin <= work.begin_ns and (work.begin_ns <= last or work.lane is WorkLane.HOST_WORK)
        ),
    ]
    if len(spans) + len(waits) > MOST_SPANS:
        return None
    end = max(until for _, _, until, _ in spans)
    made = tuple(Span(lane, since - begin, until - begin, what) for lane, since, until, what in spans)
    return Timeline(0, end - begin, made, 0, tuple(waits), has_causes=False)


def _blocks(stops: Iterable[Stop]) -> list[tuple[int, int, str]]:
    return sorted((stop.begin_ns, stop.end_ns, _AWAITED[stop.lane]) for stop in stops)


def _why(copy: TimedCopy) -> str:
    return _GRADIENTS if copy.lane is WorkLane.TO_HOST else _NOT_AHEAD


def _span(copy: TimedCopy) -> tuple[Lane, int, int, str]:
    what = "work" if copy.lane is WorkLane.HOST_WORK else f"{copy.nbytes} bytes"
    return _LANES[copy.lane], copy.begin_ns, copy.end_ns, what


def _spans_of(
    pieces: Iterable[Piece], blocked: Sequence[tuple[int, int, str]], updating: Lane, computing: Lane = Lane.COMPUTE
) -> Iterable[tuple[Lane, int, int, str]]:
    """What was done between the moments where somebody stood still: the lane of an update, and of all other parts."""
    for part, begin, end, _ in pieces:
        lane = updating if part is Part.UPDATE else computing
        since = begin
        for stop, go_on, _ in blocked:
            if begin <= stop and go_on <= end and stop >= since:
                if stop > since:
                    yield lane, since, stop, str(part)
                since = go_on
        if end > since:
            yield lane, since, end, str(part)


def timeline_to_dict(timeline: Timeline) -> dict[str, Any]:
    """A timeline as plain data that ``timeline_from_dict`` takes back."""
    return {
        "end_ns": timeline.end_ns,
        "spans": [[str(span.lane), span.begin_ns, span.end_ns, span.what, span.after] for span in timeline.spans],
        "waits": [[wait.begin_ns, wait.duration_ns, wait.place, str(wait.lane)] for wait in timeline.waits],
        "has_causes": timeline.has_causes,
    }


def timeline_from_dict(values: Mapping[str, Any]) -> Timeline:
    """Reads a timeline.

    Raises:
        ConfigError: If the values are not one.
    """
    try:
        spans = tuple(
            Span(Lane(lane), int(begin), int(end), str(what), int(after))
            for lane, begin, end, what, after in values["spans"]
        )
        waits = tuple(
            Wait(int(begin), int(duration), str(place), *(Lane(lane) for lane in lanes))
            for begin, duration, place, *lanes in values["waits"]
        )
        if not all(span.after < number for number, span in enumerate(spans)):
            raise ValueError("a span comes after one that follows it")
        has_causes = bool(values.get("has_causes", True))  # missing in records of before lanes of accelerators
        return Timeline(0, int(values["end_ns"]), spans, 0, waits, has_causes)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"this is not the timeline of a step: {type(error).__name__}: {error}; remove the file, and a next run "
            "records another one"
        ) from error
