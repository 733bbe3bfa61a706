"""What a page is made of: texts, tables and charts, as plain data without any markup."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from hf_patrickstar.units import format_nbytes


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """A figure.

    Attributes:
        text: The figure for people.
        value: The figure itself, as exact as it is known; ``None`` if the text is no figure.
    """

    text: str
    value: float | int | None = None


def of_bytes(nbytes: float) -> Cell:
    """A number of bytes."""
    return Cell(format_nbytes(round(nbytes)), round(nbytes))


def of_count(number: int) -> Cell:
    """A number of things."""
    return Cell(f"{number:,}", number)


def of_number(number: float | None, unit: str = "", digits: int = 4) -> Cell:
    """A number with a unit; ``None`` is one that is not known."""
    if number is None:
        return Cell("not known")
    return Cell(f"{number:.{digits}g} {unit}".rstrip(), number)


def of_share(share: float) -> Cell:
    """A part of a whole, between 0 and 1."""
    return Cell(f"{share:.1%}", share)


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """A paragraph.

    Attributes:
        text: What it says.
    """

    kind: ClassVar[str] = "text"
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Bullets:
    """A list of sentences.

    Attributes:
        sentences: The sentences.
        is_ordered: Whether their order matters.
    """

    kind: ClassVar[str] = "bullets"
    sentences: tuple[str, ...]
    is_ordered: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        caption: What it shows.
        header: The names of its columns.
        rows: Its rows; the first cell of each names the row.
        is_open: Whether it is shown at once, and not only when it is asked for.
    """

    kind: ClassVar[str] = "table"
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    is_open: bool = False

    @property
    def are_figures(self) -> tuple[bool, ...]:
        """For each column but the first, whether it has figures."""
        return tuple(
            any(cell.value is not None for cell in column) for column in list(zip(*self.rows, strict=True))[1:]
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis.

    Attributes:
        percent: Where it is, from the left or from the bottom; of a row of bars from the top.
        label: What stands there.
    """

    percent: float
    label: str


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """A shape in a chart of ``WIDTH`` by ``HEIGHT``.

    Attributes:
        look: The number of its pattern or of its dashes, or a name: ``budget``, ``mark``.
        path: What an SVG path draws.
        is_line: Whether it is a line, and not an area.
    """

    look: int | str
    path: str
    is_line: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A line of a legend: the name of a look."""

    label: str
    look: int | str
    is_line: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Chart:
    """A chart, with the table that has its figures.

    Attributes:
        title: What it shows.
        summary: The same in a sentence, for who does not see it.
        x_label: What the horizontal axis counts.
        y_label: What the vertical axis counts; empty if it has rows.
        x_ticks: Marks of the horizontal axis.
        y_ticks: Marks of the vertical axis, or the names of its rows.
        shapes: What is drawn, from back to front.
        legend: What looks mean.
        table: The figures.
        num_rows: How many rows it has; 0 if the vertical axis is a scale.
    """

    kind: ClassVar[str] = "chart"
    title: str
    summary: str
    x_label: str
    y_label: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    shapes: tuple[Shape, ...]
    legend: tuple[Entry, ...]
    table: Table
    num_rows: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class MappedChunk:
    """A chunk in a chunk map.

    Attributes:
        name: What it is called.
        home: The name of the tier where it lives.
        fill: Part of its elements that parameters fill.
        facts: What else is known of it.
        parameters: Name and elements of each parameter.
    """

    name: str
    home: str
    fill: float
    facts: str
    parameters: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkMap:
    """Which parameter lives where."""

    kind: ClassVar[str] = "chunks"
    chunks: tuple[MappedChunk, ...]
    table: Table


Block = Text | Bullets | Table | Chart | ChunkMap


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A part of a page.

    Attributes:
        name: How links call it.
        title: What stands above it.
        blocks: What it has.
    """

    name: str
    title: str
    blocks: Sequence[Block]


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """One of the first figures of a page.

    Attributes:
        label: What it is.
        cell: The figure.
        note: A few words about it.
    """

    label: str
    cell: Cell
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """A page.

    Attributes:
        title: What it is about.
        subtitle: The same in more words.
        verdict: What comes out, in a sentence.
        is_good: Whether that is good; ``None`` if it is neither.
        facts: The first figures.
        sections: Its parts; one without blocks is left out.
        trace_name: The name of a file beside the page that Perfetto shows, or ``None``.
    """

    title: str
    subtitle: str
    verdict: str
    is_good: bool | None
    facts: tuple[Fact, ...]
    sections: tuple[Section, ...]
    trace_name: str | None = None
