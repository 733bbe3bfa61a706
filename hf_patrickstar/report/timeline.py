"""A timeline, of the virtual clock or measured, as a trace that Perfetto shows."""

from typing import Any

from hf_patrickstar.schedule.clock import Lane, Span, Timeline, Wait

VIRTUAL = "virtual time"
"""The name of a trace whose step was simulated."""
WAITS = "host waits"
"""The row of a trace that shows where the host stood still."""
STOPS = "computation waits"
"""The row of a trace that shows where computation stood still, in a step that was measured."""
CRITICAL = "critical path"
"""The row of a trace that shows the spans that the end had to wait for."""

_NS_PER_US = 1000


def to_trace(timeline: Timeline, process: str = VIRTUAL) -> dict[str, Any]:
    """A timeline in the format of Chrome's traces, which Perfetto reads too.

    Every lane is a thread. Two more threads have the waits of the host and the critical path, or, where no causes are
    known, the waits of computation. Times are microseconds since the beginning of the timeline, exact to the
    nanosecond. ``args`` of a span has its number, and that of the span that it began after.

    Args:
        timeline: What happened.
        process: The name of the process: what the times are of.
    """
    rows = [*Lane, WAITS, CRITICAL if timeline.has_causes else STOPS]
    numbers = {row: number for number, row in enumerate(rows, start=1)}
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": process}}]
    for row, number in numbers.items():
        thread = {"ph": "M", "pid": 1, "tid": number}
        events.append({**thread, "name": "thread_name", "args": {"name": str(row)}})
        events.append({**thread, "name": "thread_sort_index", "args": {"sort_index": number}})

    numbered = enumerate(timeline.own_spans, start=timeline.first)
    items: list[tuple[str, str, Span | Wait, dict[str, Any]]] = [
        *((span.lane, span.what, span, {"span": number, "after": span.after}) for number, span in numbered),
        *((WAITS if wait.lane is Lane.HOST else STOPS, wait.place, wait, {}) for wait in timeline.waits),
        *((CRITICAL, span.what, span, {"lane": str(span.lane)}) for span in timeline.critical_path()),
    ]
    for row, what, item, args in items:
        times = {"ts": (item.begin_ns - timeline.begin_ns) / _NS_PER_US, "dur": item.duration_ns / _NS_PER_US}
        events.append({"ph": "X", "pid": 1, "tid": numbers[row], "name": what, **times, "args": args})
    return {"traceEvents": events, "displayTimeUnit": "ns"}
