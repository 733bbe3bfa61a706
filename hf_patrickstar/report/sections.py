"""What the pages of plans and of runs both show: memory, the time of a step, chunks, decisions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hf_patrickstar.report.charts import bars, stacked
from hf_patrickstar.report.page import Block, Cell, Table, of_bytes, of_number, of_share
from hf_patrickstar.report.survey import Survey, SurveyedChunk
from hf_patrickstar.report.timeline import CRITICAL
from hf_patrickstar.schedule.clock import Lane, Span, Timeline, Wait
from hf_patrickstar.units import format_nbytes, format_seconds

_LANES = {
    Lane.HOST: "host",
    Lane.HOST_WORK: "optimizer on the host",
    Lane.COMPUTE: "compute",
    Lane.TO_DEVICE: "copies to the device",
    Lane.TO_HOST: "copies to the host",
    Lane.GATHERS: "all-gathers",
    Lane.REDUCTIONS: "reduce-scatters",
}
_GRAIN = 1500
"""Bars of a lane with less than this part of the step between them are drawn as one."""


def peak(tier: str, kinds: Mapping[str, int], budget_nbytes: int, moment: str = "") -> Table:
    """What fills a tier at its fullest moment.

    Args:
        tier: The name of the tier.
        kinds: The bytes of each kind at that moment.
        budget_nbytes: The budget of the tier.
        moment: That moment, in words.
    """
    total = sum(kinds.values())
    when = f" ({moment})" if moment else ""
    caption = f"{tier}, at its fullest moment{when}: {format_nbytes(total)} of {format_nbytes(budget_nbytes)}"
    shown = [*sorted(kinds.items(), key=lambda item: -item[1]), ("all together", total)]
    rows = [(name, of_bytes(nbytes), of_share(nbytes, budget_nbytes)) for name, nbytes in shown if nbytes]
    return Table(caption.capitalize(), ("kind", "bytes", "share of the budget"), rows)


def tides(survey: Survey) -> Iterator[Block]:
    """What is on the device at each moment of a step, a chart for each kind of micro-batch."""
    for tide in survey.tides:
        merged = f" Each place shows the fullest of {tide.stride} moments." if tide.stride > 1 else ""
        least, most = format_nbytes(min(tide.totals)), format_nbytes(max(tide.totals))
        said = f"From {least} to {most} of {format_nbytes(tide.limit_nbytes)}. A moment is a visit to a chunk.{merged}"
        title = f"Device memory over a step ({tide.key})"
        yield stacked(title, said, tide.kinds, tide.stride, tide.limit_nbytes, tide.forward_ends)


def time_of_step(timeline: Timeline, *, is_measured: bool) -> Iterator[Block]:
    """What a step spends its time on, lane by lane.

    Args:
        timeline: The time of the step.
        is_measured: Whether a real step was measured; else it was simulated.
    """
    busy, critical, whole = timeline.busy_ns(), timeline.critical_ns(), timeline.duration_ns
    lanes = [lane for lane in Lane if busy[lane] or lane is Lane.HOST]
    extra = [CRITICAL] if timeline.has_causes else []
    yield Table(
        "Lanes, which work at the same time",
        ("lane", "busy", "share of the step", *extra),
        [
            (
                _LANES[lane],
                _seconds(busy[lane]),
                of_share(busy[lane], whole),
                *(_seconds(critical[lane]) for _ in extra),
            )
            for lane in lanes
        ],
    )
    for lane in (Lane.HOST, Lane.COMPUTE):
        waits = timeline.waits_by_place(lane).items()
        rows = [(place, _seconds(waited), of_share(waited, whole)) for place, waited in waits]
        if rows:
            yield Table(f"Waits of the lane '{_LANES[lane]}'", ("for, or where", "seconds", "share of the step"), rows)
    on_path = {id(span) for span in timeline.critical_path()}
    drawn = {}
    for lane in lanes:
        spans = [span for span in timeline.own_spans if span.lane is lane and span.duration_ns]
        work: tuple[list[Span], list[Span]] = ([], [])
        for span in spans:
            work[id(span) in on_path].append(span)
        drawn[_LANES[lane]] = [_joined(timeline, items) for items in (*work, timeline.waits_of(lane))]
    how = "Measured once" if is_measured else "Simulated"
    path = f" The end of the step waits for all bars of the {CRITICAL}." if timeline.has_causes else ""
    summary = f"{how}: {format_seconds(whole / 1e9)}.{path}"
    yield bars("Lanes over a step", summary, drawn, ("work", f"work on the {CRITICAL}", "waiting"), whole / 1e9)


def _joined(timeline: Timeline, items: Sequence[Span | Wait]) -> list[tuple[float, float]]:
    """Beginnings and lengths in seconds since the step began; bars that nearly touch are one."""
    gap, joined = timeline.duration_ns // _GRAIN, list[list[int]]()
    for begin, end in sorted((item.begin_ns, item.begin_ns + item.duration_ns) for item in items):
        if joined and begin - joined[-1][1] <= gap:
            joined[-1][1] = max(end, joined[-1][1])
        else:
            joined.append([begin, end])
    return [((begin - timeline.begin_ns) / 1e9, (end - begin) / 1e9) for begin, end in joined]


def _seconds(nanoseconds: int) -> Cell:
    return of_number(nanoseconds / 1e9, "s")


def chunks(survey: Survey) -> Iterator[Block]:
    """Which parameter is where: the chunks of each tier as one box that opens."""
    groups: dict[str, list[SurveyedChunk]] = {}
    for chunk in survey.chunks:
        groups.setdefault(f"on the {chunk.home}{'' if chunk.trainable else ', frozen'}", []).append(chunk)
    for where, group in sorted(groups.items()):
        sizes = [chunk.param_nbytes + chunk.state_nbytes for chunk in group]
        least, most = format_nbytes(min(sizes)), format_nbytes(max(sizes))
        each = f"{least} each" if least == most else f"sizes from {least} to {most}"
        rows = [
            (
                str(chunk.index),
                chunk.dtype,
                of_bytes(nbytes),
                of_share(chunk.used_numel, chunk.numel),
                ", ".join(f"{name} ({numel:,})" for name, numel in chunk.parameters),
            )
            for chunk, nbytes in zip(group, sizes, strict=True)
        ]
        caption = f"{len(group)} chunks {where}: {format_nbytes(sum(sizes))}, {each}"
        yield Table(caption, ("chunk", "type", "bytes", "used", "parameters (elements)"), rows, is_open=False)


def decisions(reasons: Sequence[str], given: Mapping[str, Any]) -> list[Block]:
    """What was decided and why, and what was asked for.

    Args:
        reasons: A sentence for each decision.
        given: What a user has chosen, by name; ``settings`` are those of the engine.
    """
    named = {**given, **given["settings"]}
    asked = [(name, str(value)) for name, value in named.items() if name != "settings"]
    table = Table("What was asked for", ("name", "value"), asked, is_open=False)
    return [tuple(reasons), table] if reasons else [table]
