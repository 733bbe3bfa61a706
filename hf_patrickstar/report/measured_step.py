"""The lanes of a step that was measured, as a timeline like that of a simulated one.

[Note: a measured step]
On an accelerator each lane has its own times (``memory/lanes.py``). The compute lane worked from the begin of a part to
its end, but for what it waited for; so the time in which it has nothing to do because the host is late is a part of its
work. Collectives have no lanes: their library has streams of its own.

On the CPU tier one thread computes, updates and makes the copies that were not started ahead; another thread makes
those that were. Copies that the first thread makes itself, and its waits for late ones, are where computation stands
still.

What a span began after is not known, so there is no critical path.
"""

from collections.abc import Iterator, Sequence

from hf_patrickstar.memory.lanes import LaneTimes
from hf_patrickstar.schedule.clock import Lane, Span, Timeline, Wait
from hf_patrickstar.schedule.script import Part

MOST_SPANS = 5000
"""A step of more spans is not recorded: the page would draw most of them as one."""
_AWAITED = {
    Lane.TO_DEVICE: "a copy to the device",
    Lane.TO_HOST: "a copy of gradients to the host",
    Lane.HOST_WORK: "work of the host's thread",
    Lane.COMPUTE: "an update over the bus",
}


def measured_timeline(times: LaneTimes) -> Timeline | None:
    """The timeline of a step; see [Note: a measured step]. Waits until the step is done.

    Args:
        times: What was measured.

    Returns:
        The timeline, which begins at 0 and ends with the last piece of work; ``None`` if nothing was measured, or far
        too much.
    """
    if not times.parts:
        return None
    zero, rows = times.parts[0][1][0], list[Span]()
    for part, (begin_ns, begin), (end_ns, end) in times.parts:
        if not times.has_streams:
            rows.append(Span(Lane.HOST if part == Part.UPDATE else Lane.COMPUTE, begin_ns - zero, end_ns - zero, part))
        elif begin is None:
            return None  # the part had begun before anything was measured
        else:
            rows.append(Span(Lane.COMPUTE, times.ns_of(begin) - zero, times.ns_of(end) - zero, part))
            rows.append(Span(Lane.HOST, begin_ns - zero, end_ns - zero, part))
    last, works, waits = max(row.end_ns for row in rows), list[Span](), list[Wait]()
    for lane, waiter, begin, end, nbytes in times.found():
        # An evaluation or a save may follow before the next step does. What the host's thread was given may come late.
        is_late = begin - zero > last and not (lane is Lane.HOST_WORK and waiter is None)
        if begin < zero or is_late:
            continue
        if waiter is None:
            what = "work" if lane is Lane.HOST_WORK else f"{nbytes} bytes"
            works.append(Span(lane, begin - zero, end - zero, what))
        else:
            not_ahead = " that was not started ahead" if nbytes and lane is Lane.TO_DEVICE else ""
            waits.append(Wait(begin - zero, end - begin, f"{_AWAITED[lane]}{not_ahead}", waiter))
    waits.sort(key=lambda wait: wait.begin_ns)
    spans = [span for row in rows for span in _between(waits, row, row.lane if times.has_streams else Lane.HOST)]
    spans += works
    if len(spans) + len(waits) > MOST_SPANS:
        return None
    return Timeline(0, max(span.end_ns for span in spans), tuple(spans), 0, tuple(waits), has_causes=False)


def _between(waits: Sequence[Wait], row: Span, waiter: Lane) -> Iterator[Span]:
    """What was done in a part of the step between the waits of somebody."""
    since = row.begin_ns
    for wait in waits:
        go_on = wait.begin_ns + wait.duration_ns
        if wait.lane is waiter and since <= wait.begin_ns and go_on <= row.end_ns:
            if wait.begin_ns > since:
                yield row._replace(begin_ns=since, end_ns=wait.begin_ns)
            since = go_on
    if row.end_ns > since:
        yield row._replace(begin_ns=since)
