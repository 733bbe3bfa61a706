"""Charts from numbers: areas over moments, lines over steps, bars in rows."""

import math
from collections.abc import Mapping, Sequence

from hf_patrickstar.report.page import Chart, Shape, Tick
from hf_patrickstar.units import GIB, KIB, MIB

WIDTH, HEIGHT = 1000, 300
"""Units of the drawing of a chart, which is stretched over its place on the page."""
_BAR = 0.72
_FAR = 3
"""A limit that is so many times as high as all values is not drawn: the values would be flat."""
_UNITS = {
    "B": ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B")),
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")),
}

Points = Sequence[tuple[float, float | None]]
Bars = Sequence[tuple[float, float]]


class Axis:
    """An axis.

    Args:
        low: The value at its beginning.
        high: The value at its end; where it is not more than ``low``, the axis gets some length.
        unit: ``B``, ``s`` or nothing; ``whole`` for marks at whole numbers.
    """

    def __init__(self, low: float, high: float, unit: str = "") -> None:
        self.low, self.unit = low, unit
        self.high = high if high > low else low + (MIB if unit == "B" else 1)

    def at(self, value: float, length: float) -> float:
        """Where a value is on an axis of a length, from its beginning."""
        return (min(max(value, self.low), self.high) - self.low) / (self.high - self.low) * length

    def ticks(self, most: int = 5) -> list[Tick]:
        """About so many marks at round values."""
        units = _UNITS.get(self.unit, ((1, ""),))
        factor, name = next((item for item in units if self.high >= item[0]), units[-1])
        low, high = self.low / factor, self.high / factor
        power = 10.0 ** math.floor(math.log10((high - low) / most))
        step = next(times * power for times in (1, 2, 2.5, 5, 10) if times * power >= (high - low) / most * (1 - 1e-9))
        step = max(math.ceil(step), 1) if self.unit == "whole" else step
        numbers = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
        return [(self.at(n * step * factor, 100), f"{n * step:.6g} {name}".rstrip()) for n in numbers]

    def x(self, value: float) -> str:
        """Where a value is from the left."""
        return f"{self.at(value, WIDTH):.1f}".removesuffix(".0")

    def y(self, value: float) -> str:
        """Where a value is from the top."""
        return f"{HEIGHT - self.at(value, HEIGHT):.1f}".removesuffix(".0")


def stacked(
    title: str, summary: str, kinds: Mapping[str, Sequence[float]], stride: int, limit: float, marks: Sequence[float]
) -> Chart:
    """Bytes of several kinds over moments, one kind on top of the other, each flat until the next moment.

    Args:
        title: What it shows.
        summary: The same in a sentence.
        kinds: The bytes of each kind, from the bottom to the top.
        stride: Moments from one value to the next.
        limit: The device budget.
        marks: Moments at which a forward ends.
    """
    totals = [sum(row) for row in zip(*kinds.values(), strict=True)]
    limits = [limit] if limit <= _FAR * max(totals, default=0) else []
    x, y = Axis(0, stride * len(totals), "whole"), Axis(0, 1.05 * max([*totals, *limits], default=0), "B")
    shapes, heights = list[Shape](), [0.0] * len(totals)
    for look, (label, values) in enumerate(kinds.items()):
        heights = [low + value for low, value in zip(heights, values, strict=True)]
        if any(values):
            steps = "".join(f"V{y.y(high)}H{x.x(stride * (place + 1))}" for place, high in enumerate(heights))
            shapes.insert(0, Shape(look, f"M0 {HEIGHT}{steps}V{HEIGHT}Z", label))  # behind those below it
    if marks:
        shapes.append(Shape("mark", "".join(f"M{x.x(place)} 0V{HEIGHT}" for place in marks), "end of a forward", True))
    shapes += [Shape("limit", f"M0 {y.y(limit)}H{WIDTH}", "device budget", True) for limit in limits]
    return Chart(title, summary, "moment of the step", x.ticks(), y.ticks(), shapes)


def lines(title: str, found: Mapping[str, Points], unit: str = "") -> Chart:
    """Values over steps; a value of ``None`` is a gap in its line.

    Args:
        title: What it shows.
        found: Steps and values of each line.
        unit: Their unit; see ``Axis``. Values that have one begin at 0.
    """
    steps = [step for points in found.values() for step, _ in points] or [0]
    values = [value for points in found.values() for _, value in points if value is not None] or [0.0]
    low, high = 0.0 if unit else min(values), max(values)
    x, y = Axis(min(steps), max(steps), "whole"), Axis(low, high + 0.05 * (high - low), unit)
    shapes = []
    for look, (label, points) in enumerate(found.items()):
        path, command = "", "M"
        for step, value in points:
            if value is not None:  # "h0" makes a single point visible
                path += f"{command}{x.x(step)} {y.y(value)}" + ("h0" if command == "M" else "")
            command = "M" if value is None else "L"
        shapes.append(Shape(look, path, label, True))
    return Chart(title, "", "optimizer step", x.ticks(), y.ticks(), shapes, is_wide=False)


def bars(title: str, summary: str, rows: Mapping[str, Sequence[Bars]], looks: Sequence[str], seconds: float) -> Chart:
    """Bars in rows over time.

    Args:
        title: What it shows.
        summary: The same in a sentence.
        rows: For each row, from the top, its bars of each look: beginnings and lengths in seconds.
        looks: What each look means.
        seconds: The length of the axis.
    """
    x, height = Axis(0, seconds, "s"), HEIGHT / max(len(rows), 1)
    paths = [""] * len(looks)
    for place, row in enumerate(rows.values()):
        top, bottom = (f"{(place + 0.5 + side * _BAR / 2) * height:.1f}" for side in (-1, 1))
        for look, items in enumerate(row):
            for begin, length in items:
                left, right = x.x(begin), x.x(begin + length)
                paths[look] += f"M{left} {top}H{right}V{bottom}H{left}Z"
    shapes = [Shape(look, path, looks[look]) for look, path in enumerate(paths) if path]
    names = [((place + 0.5) * 100 / len(rows), label) for place, label in enumerate(rows)]
    return Chart(title, summary, "time", x.ticks(4), names, shapes, len(rows))
