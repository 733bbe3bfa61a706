"""A page: what it is made of, as plain data, and how it is written as one HTML file without network, script or font.

Charts are made from numbers: areas over moments, lines over steps, bars in rows.
"""

import dataclasses
import importlib.resources
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jinja2

from hf_patrickstar.units import GIB, KIB, MIB, format_nbytes
from hf_patrickstar.version import __version__

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


class Cell(NamedTuple):
    """A figure.

    Attributes:
        text: The figure with its unit.
        value: The figure itself, without rounding; ``None`` if it is not known.
        is_share: Whether it is a part of a whole, which is drawn as a bar too.
    """

    text: str
    value: float | None = None
    is_share: bool = False


def of_bytes(nbytes: float) -> Cell:
    """A number of bytes."""
    return Cell(format_nbytes(round(nbytes)), round(nbytes))


def of_number(number: float | None, unit: str = "", digits: int = 4) -> Cell:
    """A number with a unit; whole numbers have all their digits. ``None``: it is not known."""
    if number is None:
        return Cell("not known")
    if unit == "B":
        return of_bytes(number)
    if unit == "s" and 0 < number < 0.1:
        return Cell(f"{1000 * number:.{digits}g} ms", number)
    return Cell(f"{number:,}" if isinstance(number, int) else f"{number:.{digits}g} {unit}".rstrip(), number)


def of_share(part: float, whole: float) -> Cell:
    """A part of a whole."""
    share = part / whole if whole else 0.0
    return Cell(f"{share:.1%}", share, True)


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        caption: What it shows.
        header: The names of its columns.
        rows: Its rows; the first cell of each names the row.
        is_open: Whether it is shown at once, and not only after a click.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    is_open: bool = True


Tick = tuple[float, str]
"""A mark on an axis: how far it is from the beginning, in percent, and its text."""
Fact = tuple[str, Cell, str]
"""One of the first figures of a page: what it is, the figure, and a few words about it."""


class Shape(NamedTuple):
    """Something drawn in a chart.

    Attributes:
        look: The number of its pattern or of its dashes, or ``limit`` or ``mark``.
        path: What an SVG path draws.
        label: Its text in the legend.
        is_line: Whether it is a line, and not an area.
    """

    look: int | str
    path: str
    label: str
    is_line: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Chart:
    """A chart.

    Attributes:
        title: What it shows.
        summary: The same in a sentence.
        x_label: The name of the horizontal axis.
        x_ticks: Marks of the horizontal axis.
        y_ticks: Marks of the vertical axis, or the names of its rows.
        shapes: What is drawn, from back to front.
        num_rows: How many rows it has; 0 if the vertical axis is a scale.
        is_wide: Whether it takes the whole width of the page.
    """

    title: str
    summary: str
    x_label: str
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    shapes: Sequence[Shape]
    num_rows: int = 0
    is_wide: bool = True


Block = str | Sequence[str] | Table | Chart
"""A paragraph, a list of sentences, a table or a chart."""


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """A page.

    Attributes:
        title: What it is about.
        subtitle: The same in more words.
        verdict: What comes out, in a sentence.
        is_good: Whether that is good; ``None`` if it is neither.
        facts: The first figures.
        sections: Its parts by their titles; parts without blocks are left out.
        trace_name: The name of a file beside the page that Perfetto shows, or ``None``.
    """

    title: str
    subtitle: str
    verdict: str
    is_good: bool | None
    facts: Sequence[Fact]
    sections: Mapping[str, Sequence[Block]]
    trace_name: str | None = None


def render(page: Page) -> str:
    """The page as HTML; every text in it is escaped.

    Args:
        page: What it says.
    """
    text = importlib.resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    made = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return made.from_string(text).render(page=page, version=__version__)


# Charts


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
