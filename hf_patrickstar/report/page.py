"""A page: what it is made of, as plain data, and how it is written as one HTML file without network, script or font."""

import dataclasses
import importlib.resources
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jinja2

from hf_patrickstar.units import format_nbytes
from hf_patrickstar.version import __version__


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
