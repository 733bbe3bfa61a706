"""What the pages of plans and of runs both show: memory, the time of a step, chunks, decisions."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hf_patrickstar.report.page import Block, Cell, Table, bars, of_bytes, of_number, of_share, stacked
from hf_patrickstar.report.survey import Survey, SurveyedChunk
from hf_patrickstar.report.timeline import CRITICAL
from hf_patrickstar.schedule.clock import Lane, Span, Timeline, Wait
from hf_patrickstar.units import format_nbytes, format_seconds

_COLUMNS = 1500
"""Bars of lanes begin and end at so many places: some ten thousand would make the page large."""


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
    name = tier.capitalize()
    caption = f"{name}, at its fullest moment{when}: {format_nbytes(total)} of {format_nbytes(budget_nbytes)}"
    shown = [*sorted(kinds.items(), key=lambda item: -item[1]), ("all together", total)]
    rows = [(name, of_bytes(nbytes), of_share(nbytes, budget_nbytes)) for name, nbytes in shown if nbytes]
    return Table(caption, ("kind", "bytes", "share of the budget"), rows)


def tides(survey: Survey) -> Iterator[Block]:
    """What is on the device at each moment of a step, a chart for each kind of micro-batch."""
    for tide in survey.tides:
        merged = f" Each place shows the fullest of {tide.stride} moments." if tide.stride > 1 else ""
        least, most = format_nbytes(min(tide.totals)), format_nbytes(max(tide.totals))
        said = f"From {least} to {most} of {format_nbytes(tide.limit_nbytes)}. A moment is a visit to a chunk.{merged}"
        title = f"Device memory over a step ({tide.key})"
        yield stacked(title, said, tide.kinds, tide.stride, tide.limit_nbytes, tide.forward_ends)
        if tide.offloaded:
            leave = f"Activations that leave the device between forward and backward ({tide.key})"
            rows = [(name, of_bytes(nbytes)) for name, nbytes in tide.offloaded]
            yield Table(leave, ("kept before forward comes to", "bytes"), rows, is_open=False)


def time_of_step(timeline: Timeline, *, is_measured: bool) -> Iterator[Block]:
    """What a step spends its time on, lane by lane.

    Args:
        timeline: The time of the step.
        is_measured: Whether a real step was measured; else it was simulated.
    """
    busy, critical, whole = timeline.busy_ns(), timeline.critical_ns(), timeline.duration_ns
    lanes = [lane for lane in Lane if busy[lane] or lane is Lane.HOST]
    share, path = "share of the step", [CRITICAL] if timeline.has_causes else []
    rows: list[list[Cell | str]] = [[lane, _seconds(busy[lane]), of_share(busy[lane], whole)] for lane in lanes]
    for row, lane in zip(rows, lanes, strict=True):
        row += [_seconds(critical[lane]) for _ in path]
    yield Table("Lanes, which work at the same time", ("lane", "busy", share, *path), rows)
    waits = [(lane, *wait) for lane in lanes for wait in timeline.waits_by_place(lane).items()]
    if waits:
        rows = [[f"{lane}: {place}", _seconds(waited), of_share(waited, whole)] for lane, place, waited in waits]
        yield Table("What lanes wait for", ("lane: for", "seconds", share), rows)
    on_path = {id(span) for span in timeline.critical_path()}
    drawn: dict[str, list[list[tuple[float, float]]]] = {}
    for lane in lanes:
        spans = [span for span in timeline.own_spans if span.lane is lane]
        work = [[span for span in spans if (id(span) in on_path) is dark] for dark in (False, True)]
        drawn[lane] = [*(_bars(timeline, items) for items in work), _bars(timeline, timeline.waits_of(lane))]
    waits_for = f" The end of the step waits for all bars of the {CRITICAL}." if path else ""
    summary = f"{'Measured once' if is_measured else 'Simulated'}: {format_seconds(whole / 1e9)}.{waits_for}"
    yield bars("Lanes over a step", summary, drawn, ("work", f"work on the {CRITICAL}", "waiting"), whole / 1e9)


def _bars(timeline: Timeline, items: Sequence[Span | Wait]) -> list[tuple[float, float]]:
    """Beginnings and lengths in seconds since the step began, in whole columns of the chart."""
    column, begin_ns = timeline.duration_ns / _COLUMNS, timeline.begin_ns
    times = [(item.begin_ns - begin_ns, item.duration_ns) for item in items if item.duration_ns]
    whole = {(math.floor(begin / column), math.ceil((begin + length) / column)) for begin, length in times}
    return [(first * column / 1e9, (last - first) * column / 1e9) for first, last in sorted(whole)]


def _seconds(nanoseconds: int) -> Cell:
    return of_number(nanoseconds / 1e9, "s")


def chunks(survey: Survey) -> Iterator[Block]:
    """Which parameter is where: the chunks of each tier as one box that opens."""
    groups: dict[str, list[SurveyedChunk]] = {}
    for chunk in survey.chunks:
        disk, frozen = ", states on the disk" * (chunk.disk_nbytes > 0), ", frozen" * (not chunk.trainable)
        groups.setdefault(f"on the {chunk.home}{disk}{frozen}", []).append(chunk)
    for where, group in sorted(groups.items()):
        sizes = [chunk.param_nbytes + chunk.state_nbytes for chunk in group]
        least, most = format_nbytes(min(sizes)), format_nbytes(max(sizes))
        sized = f"{least} each" if least == most else f"sizes from {least} to {most}"
        rows = []
        for chunk, nbytes in zip(group, sizes, strict=True):
            names = ", ".join(f"{name} ({numel:,})" for name, numel in chunk.parameters)
            used = of_share(sum(numel for _, numel in chunk.parameters), chunk.numel)
            rows.append((str(chunk.index), chunk.dtype, of_bytes(nbytes), used, names))
        caption = f"{len(group)} chunk{'s' if len(group) > 1 else ''} {where}: {format_nbytes(sum(sizes))}, {sized}"
        yield Table(caption, ("chunk", "type", "bytes", "used", "parameters (elements)"), rows, is_open=False)


def decisions(reasons: Sequence[str], given: Mapping[str, Any]) -> list[Block]:
    """What was decided and why, and what was asked for.

    Args:
        reasons: A sentence for each decision.
        given: What a user has chosen, by name; ``settings`` are those of the engine.
    """
    asked = [(name, str(value)) for name, value in {**given, **given["settings"]}.items() if name != "settings"]
    table = Table("What was asked for", ("name", "value"), asked, is_open=False)
    return [tuple(reasons), table] if reasons else [table]
