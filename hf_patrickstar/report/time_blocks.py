"""What a page says of the time of a step: lanes, and where the host waits."""

from collections.abc import Iterator

from hf_patrickstar.report.blocks import Block, Cell, Chart, Table, of_number, of_share
from hf_patrickstar.report.charts import Row, Words, bars
from hf_patrickstar.report.scales import of_seconds
from hf_patrickstar.report.timeline import ANY_WAITS, CRITICAL, WAITS, bars_of
from hf_patrickstar.schedule.clock import Lane, Timeline

_OTHER, _CRITICAL, _WAIT = 0, 1, 2
_STOPS = "where computation or the host stands still, it waits for another lane."
_LOOKS = {_OTHER: "other work", _CRITICAL: f"work on the {CRITICAL}", _WAIT: WAITS}
_WHO = {Lane.HOST: "the host", Lane.COMPUTE: "computation"}
_GRAIN = 1500
"""Bars with less than this part of the step between them are drawn as one."""


def time_blocks(timeline: Timeline, *, is_measured: bool = False) -> Iterator[Block]:
    """The lanes of a step, and the waits of the host.

    Args:
        timeline: The time of the step.
        is_measured: Whether a real step was measured; else it was simulated.
    """
    yield lanes_chart(timeline, is_measured=is_measured)
    whole = max(timeline.duration_ns, 1)
    for lane, who in _WHO.items():
        waits = timeline.waits_by_place(lane)
        if waits:
            rows = ((Cell(place), _seconds(waited), of_share(waited / whole)) for place, waited in waits.items())
            head = ("place", "seconds", "share of the step")
            yield Table(f"Where {who} stands still", head, tuple(rows), is_open=True)


def lanes_chart(timeline: Timeline, *, is_measured: bool = False) -> Chart:
    """What works beside what; the path of spans that the end had to wait for is dark."""
    busy, critical = timeline.busy_ns(), timeline.critical_ns()
    lanes = [lane for lane in Lane if busy[lane] or lane is Lane.HOST]
    has_path = timeline.has_causes
    rows = []
    for lane in lanes:
        found = zip((_OTHER, _CRITICAL, _WAIT), bars_of(timeline, lane), strict=True)
        rows.append(Row(str(lane), {look: _joined(timeline, items) for look, items in found}))
    whole = max(timeline.duration_ns, 1)
    table = Table(
        "How busy each lane is",
        ("lane", "busy", "share of the step", *([f"on the {CRITICAL}"] if has_path else [])),
        tuple(
            (
                *(Cell(str(lane)), _seconds(busy[lane]), of_share(busy[lane] / whole)),
                *([_seconds(critical[lane])] if has_path else []),
            )
            for lane in lanes
        ),
    )
    took = f"took {whole / 1e9:.4g} s, measured once" if is_measured else f"takes {whole / 1e9:.4g} s, simulated"
    words = Words(
        "Lanes of a step",
        f"A step {took}. Lanes work beside each other; "
        + ("solid bars are the work that the end of the step has to wait for." if has_path else _STOPS),
        "time",
    )
    looks = _LOOKS if has_path else {_OTHER: "work", _WAIT: ANY_WAITS}
    return bars(words, rows, looks, of_seconds(whole / 1e9), table)


def _joined(timeline: Timeline, items: list[tuple[int, int]]) -> list[tuple[float, float]]:
    """Beginnings and lengths in seconds since the step began; what is too near to be told apart is one bar."""
    gap = timeline.duration_ns // _GRAIN
    joined: list[tuple[int, int]] = []
    for begin, end in sorted((begin, begin + duration) for begin, duration in items):
        if joined and begin - joined[-1][1] <= gap:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return [((begin - timeline.begin_ns) / 1e9, (end - begin) / 1e9) for begin, end in joined]


def _seconds(nanoseconds: int) -> Cell:
    return of_number(nanoseconds / 1e9, "s")
