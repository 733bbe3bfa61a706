"""A timeline, of the virtual clock or measured, for people: as a trace for Perfetto, and as a picture."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.schedule.clock import Lane, Span, Timeline, Wait

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VIRTUAL = "virtual time"
"""The name of a trace whose step was simulated."""
WAITS = "host waits"
"""The row of a trace that shows where the host stood still."""
ANY_WAITS = "waits"
"""Waits of more lanes than that of the host."""
STOPS = "computation waits"
"""The row of a trace that shows where computation stood still, in a step that was measured."""
CRITICAL = "critical path"
"""The row of a trace that shows the spans that the end had to wait for."""

_NS_PER_US = 1000
_UNITS = ((1_000_000_000, "s"), (1_000_000, "ms"), (_NS_PER_US, "us"), (1, "ns"))
_BAR = 0.8
_ON_PATH: Mapping[str, Any] = {"facecolor": "#08306b"}
_OFF_PATH: Mapping[str, Any] = {"facecolor": "#9ecae1"}
_WAIT: Mapping[str, Any] = {"facecolor": "white", "edgecolor": "black", "hatch": "////", "linewidth": 0.4}
_MOST_OUTLINED = 400
"""Of more spans than these no outlines are drawn: the picture would be made of them."""


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

    def complete(row: str, what: str, begin_ns: int, duration_ns: int, **others: Any) -> dict[str, Any]:
        begin, duration = (begin_ns - timeline.begin_ns) / _NS_PER_US, duration_ns / _NS_PER_US
        return {"ph": "X", "pid": 1, "tid": numbers[row], "name": what, "ts": begin, "dur": duration, "args": others}

    for number, span in enumerate(timeline.own_spans, start=timeline.first):
        others = {"span": number, "after": span.after}
        events.append(complete(span.lane, span.what, span.begin_ns, span.duration_ns, **others))
    for wait in timeline.waits:
        row = WAITS if wait.lane is Lane.HOST else STOPS
        events.append(complete(row, wait.place, wait.begin_ns, wait.duration_ns))
    for span in timeline.critical_path():
        events.append(complete(CRITICAL, span.what, span.begin_ns, span.duration_ns, lane=str(span.lane)))
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def check_plots() -> None:
    """Makes sure that pictures can be drawn, before the work whose outcome they show.

    Raises:
        ConfigError: If matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"matplotlib cannot be imported ({error}): pip install 'hf_patrickstar[plots]', or leave the picture out"
        ) from error


def new_figure(height: float) -> "Figure":
    """An empty figure.

    Args:
        height: Its height in inches; it is 12 inches wide.

    Raises:
        ConfigError: If matplotlib is not installed.
    """
    check_plots()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_lanes(axis: Any, timeline: Timeline, title: str) -> list[Any]:
    """Draws a timeline into a part of a figure: a row of bars for each lane that worked.

    Bars are dark where the end had to wait for them, and waits of the host are hatched: shades and hatching are all
    that tells things apart, so the picture needs no colours.

    Args:
        axis: The axes of matplotlib.
        timeline: What happened.
        title: What it is; the duration, and the share of it that each lane was busy, are added.

    Returns:
        Patches for a legend.
    """
    from matplotlib.patches import Patch

    busy = timeline.busy_ns()
    lanes = [lane for lane in Lane if busy[lane] or lane is Lane.HOST]
    factor, unit = _unit(timeline.duration_ns)
    outline = {"edgecolor": "white", "linewidth": 0.4 if len(timeline.own_spans) <= _MOST_OUTLINED else 0.0}
    looks = ({**_OFF_PATH, **outline}, {**_ON_PATH, **outline}, _WAIT)
    for row, lane in enumerate(lanes):
        for look, bars in zip(looks, bars_of(timeline, lane), strict=True):
            places = [((begin_ns - timeline.begin_ns) / factor, duration / factor) for begin_ns, duration in bars]
            if places:
                axis.broken_barh(places, (row - _BAR / 2, _BAR), **look)
    axis.set_yticks(range(len(lanes)), [str(lane) for lane in lanes])
    axis.set(xlabel=f"time in {unit}", ylabel="lane", xlim=(0, max(timeline.duration_ns, 1) / factor))
    axis.set_ylim(len(lanes) - 0.5, -0.5)
    shares = ", ".join(f"{lane} {busy[lane] / max(timeline.duration_ns, 1):.0%}" for lane in lanes)
    axis.set_title(f"{title}: {timeline.duration_ns / factor:.4g} {unit}; busy: {shares}")
    legend = {f"work on the {CRITICAL}": _ON_PATH, "other work": _OFF_PATH, WAITS: _WAIT}
    if not timeline.has_causes:
        legend = {"work": _OFF_PATH, ANY_WAITS: _WAIT}
    return [Patch(label=label, **look) for label, look in legend.items()]


def bars_of(timeline: Timeline, lane: Lane) -> tuple[list[tuple[int, int]], ...]:
    """Where there are bars in the row of a lane, as beginnings and durations.

    Args:
        timeline: What happened.
        lane: Which one.

    Returns:
        The bars of work beside the critical path, of work on it, and of waits.
    """
    on_path = {id(span) for span in timeline.critical_path()}
    spans = [span for span in timeline.own_spans if span.lane is lane and span.duration_ns]
    found: list[Iterable[Span | Wait]] = [
        [span for span in spans if id(span) not in on_path],
        [span for span in spans if id(span) in on_path],
        timeline.waits_of(lane),
    ]
    return tuple([(item.begin_ns, item.duration_ns) for item in items] for items in found)


def _unit(duration_ns: int) -> tuple[int, str]:
    """Nanoseconds of the unit that a duration is read in best, and its name."""
    return next(((factor, name) for factor, name in _UNITS if duration_ns >= factor), _UNITS[-1])
