"""The lanes of a step that was measured, as a timeline like that of a simulated one.

[Note: a measured step]
On the CPU tier one thread computes, updates and makes the copies that were not started ahead; another thread makes
those that were. So the end of a step has to wait for all that the first thread does: it is the critical path. Copies
that it makes itself, and its waits for late ones, are where computation stands still.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.memory.lanes import TimedCopy, WorkLane
from hf_patrickstar.runtime.durations import Piece
from hf_patrickstar.schedule.clock import Lane, Span, Timeline, Wait
from hf_patrickstar.schedule.script import Part

MOST_SPANS = 5000
"""A step of more spans is not recorded: the page would draw most of them as one."""
_LANES = {WorkLane.TO_DEVICE: Lane.TO_DEVICE, WorkLane.TO_HOST: Lane.TO_HOST, WorkLane.HOST_WORK: Lane.HOST_WORK}
_LATE = "a copy that was started ahead and had not arrived"
_NOT_AHEAD = "a copy that was not started ahead"
_GRADIENTS = "a copy of gradients to the host"


def measured_timeline(
    pieces: Sequence[Piece], copies: Iterable[TimedCopy], waits: Iterable[tuple[int, int]]
) -> Timeline | None:
    """The timeline of a step of the CPU tier; see [Note: a measured step].

    Args:
        pieces: What the thread of the caller did, in order.
        copies: The copies that were measured.
        waits: Begin and end of each wait for a late copy, in nanoseconds.

    Returns:
        The timeline, which begins at 0; ``None`` if nothing was measured, or far too much.
    """
    if not pieces:
        return None
    begin, end = pieces[0].begin_ns, pieces[-1].end_ns
    inside = [copy for copy in copies if begin <= copy.begin_ns and copy.end_ns <= end]
    blocked = [(copy.begin_ns, copy.end_ns, _why(copy)) for copy in inside if not copy.is_ahead]
    blocked += [(since, until, _LATE) for since, until in waits if begin <= since and until <= end]
    blocked.sort()
    own = [*_own_spans(pieces, blocked), *(_span(copy) for copy in inside if not copy.is_ahead)]
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


def _why(copy: TimedCopy) -> str:
    return _GRADIENTS if copy.lane is WorkLane.TO_HOST else _NOT_AHEAD


def _span(copy: TimedCopy) -> tuple[Lane, int, int, str]:
    return _LANES[copy.lane], copy.begin_ns, copy.end_ns, f"{copy.nbytes} bytes"


def _own_spans(
    pieces: Iterable[Piece], blocked: Sequence[tuple[int, int, str]]
) -> Iterable[tuple[Lane, int, int, str]]:
    """What the caller's thread computed, between the moments where it stood still."""
    for part, begin, end in pieces:
        lane = Lane.HOST if part is Part.UPDATE else Lane.COMPUTE
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
        "waits": [[wait.begin_ns, wait.duration_ns, wait.place] for wait in timeline.waits],
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
        waits = tuple(Wait(int(begin), int(duration), str(place)) for begin, duration, place in values["waits"])
        if not all(span.after < number for number, span in enumerate(spans)):
            raise ValueError("a span comes after one that follows it")
        return Timeline(0, int(values["end_ns"]), spans, 0, waits)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"this is not the timeline of a step: {type(error).__name__}: {error}") from error
