"""Charts from numbers: areas over moments, lines over steps, bars in rows."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from hf_patrickstar.report.blocks import Chart, Entry, Shape, Table, Tick
from hf_patrickstar.report.scales import Scale, of_bytes, of_steps

WIDTH = 1000
"""Units of the width of all charts."""
HEIGHT = 300
"""Units of the height of charts whose vertical axis is a scale, and of a chart of rows."""

_BAR = 0.72
_FAR = 3
"""A limit that is so many times as high as all values is named, and not drawn: the values would be flat."""


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Values over steps.

    Attributes:
        label: What they are.
        points: Steps and values; a value of ``None`` is a gap.
    """

    label: str
    points: tuple[tuple[float, float | None], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """Bars in a row.

    Attributes:
        label: What stands at its left.
        bars: For each look, the bars that have it, as beginnings and lengths.
    """

    label: str
    bars: Mapping[int, Sequence[tuple[float, float]]]


class Words(NamedTuple):
    """What is written around a chart; see ``Chart``."""

    title: str
    summary: str
    x_label: str
    y_label: str = ""


def fits(limit: float, highest: float) -> bool:
    """Whether a limit is drawn, and not only named."""
    return limit <= _FAR * highest


def stacked(
    words: Words,
    columns: Mapping[str, Sequence[float]],
    places: Sequence[float],
    limit: float,
    marks: Sequence[float],
    table: Table,
) -> Chart:
    """Bytes of several kinds over moments, one kind on top of the other, each flat until the next moment.

    Args:
        words: What is written around it.
        columns: The bytes of each kind, from the bottom to the top.
        places: Where each moment begins, and where the last one ends.
        limit: What there is.
        marks: Places with an upright line.
        table: The figures.
    """
    totals = [sum(row) for row in zip(*columns.values(), strict=True)]
    highest = max(totals, default=0.0)
    has_limit = fits(limit, highest)
    y_scale = of_bytes(max(highest, limit if has_limit else 0) * 1.05)
    x_scale = Scale(places[0], max(places[-1], places[0] + 1), is_whole=True)
    shapes, below = [], [0.0] * len(totals)
    for look, values in enumerate(columns.values()):
        above = [low + value for low, value in zip(below, values, strict=True)]
        if any(values):
            shapes.append(Shape(look, _area(x_scale, y_scale, places, below, above)))
        below = above
    shapes += [Shape("mark", f"M{_n(x_scale.at(place, WIDTH))} 0V{HEIGHT}", True) for place in marks]
    if has_limit:
        shapes.append(Shape("budget", f"M0 {_n(HEIGHT - y_scale.at(limit, HEIGHT))}H{WIDTH}", True))
    legend = [Entry(label, look) for look, (label, values) in enumerate(columns.items()) if any(values)]
    legend += [Entry("limit of the budget", "budget", True)] if has_limit else []
    legend += [Entry("a forward ends", "mark", True)] if marks else []
    ticks = x_scale.ticks(), y_scale.ticks()
    return Chart(*words, *ticks, tuple(shapes), tuple(legend), table)


def lines(words: Words, found: Sequence[Line], y_scale: Scale, table: Table, limit: float | None = None) -> Chart:
    """Values over steps.

    Args:
        words: What is written around it.
        found: The lines.
        y_scale: The vertical axis.
        table: The figures.
        limit: What there is, or ``None``.
    """
    steps = [step for line in found for step, _ in line.points]
    x_scale = of_steps(int(min(steps, default=0)), int(max(steps, default=1)))
    shapes = [Shape(look, _polyline(x_scale, y_scale, line.points), True) for look, line in enumerate(found)]
    legend = [Entry(line.label, look, True) for look, line in enumerate(found)]
    if limit is not None:
        shapes.append(Shape("budget", f"M0 {_n(HEIGHT - y_scale.at(limit, HEIGHT))}H{WIDTH}", True))
        legend.append(Entry("budget", "budget", True))
    ticks = x_scale.ticks(), y_scale.ticks()
    return Chart(*words, *ticks, tuple(shapes), tuple(legend), table)


def bars(
    words: Words,
    rows: Sequence[Row],
    looks: Mapping[int, str],
    x_scale: Scale,
    table: Table,
    limit: float | None = None,
) -> Chart:
    """Bars in rows.

    Args:
        words: What is written around it.
        rows: The rows, from the top to the bottom.
        looks: What each look means.
        x_scale: The horizontal axis.
        table: The figures.
        limit: Where an upright line is drawn, or ``None``.
    """
    height = HEIGHT / max(len(rows), 1)
    shapes = []
    for place, row in enumerate(rows):
        top = (place + (1 - _BAR) / 2) * height
        for look, items in row.bars.items():
            path = "".join(_box(x_scale, begin, length, top, height * _BAR) for begin, length in items)
            if path:
                shapes.append(Shape(look, path))
    legend = [Entry(label, look) for look, label in looks.items() if any(shape.look == look for shape in shapes)]
    if limit is not None:
        shapes.append(Shape("budget", f"M{_n(x_scale.at(limit, WIDTH))} 0V{HEIGHT}", True))
        legend.append(Entry("budget", "budget", True))
    y_ticks = tuple(Tick((place + 0.5) * 100 / max(len(rows), 1), row.label) for place, row in enumerate(rows))
    ticks = x_scale.ticks(4), y_ticks
    return Chart(*words, *ticks, tuple(shapes), tuple(legend), table, len(rows))


def _area(
    x_scale: Scale, y_scale: Scale, places: Sequence[float], below: Sequence[float], above: Sequence[float]
) -> str:
    """Steps along the upper edge, and back along the lower one."""
    there, back = [], []
    for place, (low, high) in enumerate(zip(below, above, strict=True)):
        begin, end = (_n(x_scale.at(places[number], WIDTH)) for number in (place, place + 1))
        top, bottom = (_n(HEIGHT - y_scale.at(value, HEIGHT)) for value in (high, low))
        there.append(f"{begin} {top}H{end}")
        back.append(f"{end} {bottom}H{begin}")
    return "M" + "L".join([*there, *reversed(back)]) + "Z"


def _polyline(x_scale: Scale, y_scale: Scale, points: Iterable[tuple[float, float | None]]) -> str:
    """A line with a gap where a value is not known; ``h0`` makes a single point visible."""
    path, is_down = [], False
    for step, value in points:
        if value is None:
            is_down = False
            continue
        place = f"{_n(x_scale.at(step, WIDTH))} {_n(HEIGHT - y_scale.at(value, HEIGHT))}"
        path.append(f"L{place}" if is_down else f"M{place}h0")
        is_down = True
    return "".join(path)


def _box(x_scale: Scale, begin: float, length: float, top: float, height: float) -> str:
    left, right = x_scale.at(begin, WIDTH), x_scale.at(begin + length, WIDTH)
    return f"M{_n(left)} {_n(top)}H{_n(right)}V{_n(top + height)}H{_n(left)}Z" if right > left else ""


def _n(number: float) -> str:
    """A number as short as a picture needs it."""
    return f"{number:.1f}".removesuffix(".0")
