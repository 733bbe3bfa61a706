"""Draws the pictures of ``docs/concepts.md``, and of the flow chart in ``docs/architecture.md`` for the site.

python scripts/site/pictures.py
"""

import dataclasses
import io
import pathlib
import re
import textwrap
from collections.abc import Callable

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
_TENSORS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#76b7b2", "#e15759", "#edc948", "#9c755f")
_INK, _PALE, _LINE = "#222222", "#eeeeee", "#888888"
_DEVICE, _CHUNKS, _MARGIN = "#f4a582", "#92c5de", "#4393c3"


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasSVG(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    return figure, axes


def _to_svg(figure: Figure) -> str:
    """The picture as text; the same picture is the same text."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "hf_patrickstar"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def draw_chunks() -> str:
    """Tensors have the same chunk and the same place in every list."""
    figure, axes = _figure(9, 3.6)
    axes.set(xlim=(-2.3, 12.9), ylim=(-0.3, 5.5))
    chunks = (((0, 1.6), (1, 1.2), (2, 0.9)), ((3, 2.2), (4, 1.3)), ((5, 1.1), (6, 1.4), (7, 1.0)))
    lists = (
        ("param", "2 bytes", 0.5),
        ("master", "4 bytes", 1.0),
        ("exp_avg", "4 bytes", 1.0),
        ("exp_avg_sq", "4 bytes", 1.0),
    )
    bottom = 4.4
    for name, nbytes, height in lists:
        axes.text(-0.25, bottom + height / 2, f"{name}\n{nbytes}", ha="right", va="center", fontsize=9, color=_INK)
        for place, tensors in enumerate(chunks):
            left = place * 4.3
            axes.add_patch(Rectangle((left, bottom), 4, height, facecolor=_PALE, edgecolor=_INK, hatch="///", lw=1.2))
            for tensor, width in tensors:
                axes.add_patch(Rectangle((left, bottom), width, height, facecolor=_TENSORS[tensor], edgecolor="white"))
                if name == "param":
                    axes.text(
                        left + width / 2, bottom + height / 2, f"w{tensor}", ha="center", va="center", color="white"
                    )
                left += width
            axes.add_patch(Rectangle((place * 4.3, bottom), 4, height, fill=False, edgecolor=_INK, lw=1.2))
        bottom -= 1.3
    for place in range(len(chunks)):
        axes.text(place * 4.3 + 2, 5.05, f"chunk {place}", ha="center", va="bottom", fontsize=10, color=_INK)
    axes.text(0, -0.1, "Hatched: the end of a chunk that the next tensor does not fit into.", fontsize=9, color=_INK)
    return _to_svg(figure)


def draw_step() -> str:
    """The tide of non-model data in a step, the room for chunks above it, and the margin."""
    figure, axes = _figure(9, 3.9)
    axes.set(xlim=(-1, 19.6), ylim=(-1.6, 11.8))
    moments = list(range(20))
    tide = [1 + 6 * (moment / 10 if moment <= 10 else max(0.0, (19 - moment) / 9)) for moment in moments]
    axes.fill_between(moments, tide, 10, step="post", color=_CHUNKS, lw=0, label="room for chunks")
    axes.fill_between(moments, tide, 0, step="post", color=_DEVICE, lw=0, label="non-model data")
    axes.fill_between((0, 19), 7, 10, color=_MARGIN, alpha=0.35, lw=0, label="margin")
    axes.plot((0, 19), (10, 10), color=_INK, lw=1.6)
    axes.text(0, 10.25, "device budget", fontsize=9, color=_INK)
    axes.text(
        5.2, 8.5, "margin: chunks that live here with their optimizer states", fontsize=9, ha="center", va="center"
    )
    axes.text(9.6, 2.2, "non-model data:\nactivations, temporaries", fontsize=9, ha="center", va="center")
    axes.text(2.6, 5.2, "chunks that were\nloaded stay here", fontsize=9, ha="center", va="center")
    axes.text(16.7, 5.2, "loaded again\nfor backward", fontsize=9, ha="center", va="center")
    axes.annotate(
        "high tide: what is needed\nlatest has left",
        (10.4, 7),
        (13.4, 10.4),
        fontsize=9,
        arrowprops={"arrowstyle": "->", "color": _INK},
    )
    for begin, end, name in ((0, 10, "forward"), (10, 19, "backward: finished gradients go home")):
        axes.annotate("", (end, -0.5), (begin, -0.5), arrowprops={"arrowstyle": "->", "color": _INK})
        axes.text((begin + end) / 2, -1.3, name, fontsize=9, ha="center", color=_INK)
    axes.plot((0, 0), (0, 10), color=_INK, lw=0.8)
    axes.text(-0.35, 5, "bytes on the device", rotation=90, va="center", ha="center", fontsize=9, color=_INK)
    return _to_svg(figure)


def draw_groups() -> str:
    """A communication group of three processes: each owns one chunk, and gathers the others."""
    figure, axes = _figure(9, 2.7)
    axes.set(xlim=(-2, 13), ylim=(-0.2, 4.6))
    for rank in range(3):
        bottom = 2.9 - 1.3 * rank
        axes.text(-0.25, bottom + 0.45, f"process {rank}", ha="right", va="center", fontsize=9, color=_INK)
        for group in range(2):
            for place in range(3):
                own = place == rank
                left = group * 6.6 + place * 2
                patch = Rectangle((left, bottom), 1.85, 0.9, edgecolor=_INK, lw=1.2, ls="-" if own else "--")
                patch.set_facecolor(_TENSORS[place] if own else "none")
                axes.add_patch(patch)
                kind = "at home" if own else "gathered"
                text, ink = f"chunk {3 * group + place}\n{kind}", "white" if own else _INK
                axes.text(left + 0.92, bottom + 0.45, text, fontsize=8, ha="center", va="center", color=ink)
    for group in range(2):
        axes.text(group * 6.6 + 2.9, 4.05, f"communication group {group}", ha="center", fontsize=10, color=_INK)
    return _to_svg(figure)


@dataclasses.dataclass(frozen=True)
class Flow:
    """A flow chart of mermaid: labels of nodes, and edges with their labels."""

    labels: dict[str, str]
    edges: tuple[tuple[str, str, str], ...]


_NODE = re.compile(r'(\w+)\["([^"]*)"\]')
_EDGE = re.compile(r'^\s*(\w+)(?:\["[^"]*"\])?\s*--(?:\s*"([^"]*)"\s*--)?>\s*(\w+)')


def read_flow(text: str) -> Flow:
    """Reads the nodes and the edges of a flow chart."""
    labels = {name: label.replace("<br/>", "\n") for name, label in _NODE.findall(text)}
    found = [match for line in text.splitlines() if (match := _EDGE.match(line))]
    return Flow(labels, tuple((match[1], match[3], (match[2] or "").replace("<br/>", "\n")) for match in found))


def draw_flow(text: str) -> str:
    """Draws a flow chart, each node below all that lead to it.

    Args:
        text: The chart, in the language of mermaid.
    """
    flow = read_flow(text)
    rows: dict[str, int] = {}
    for _ in flow.labels:  # a path has at most as many nodes
        for name in flow.labels:
            above = [rows[start] for start, end, _ in flow.edges if end == name and start in rows]
            rows[name] = max(above, default=-1) + 1
    found = _place(flow, rows)
    left = min(x for x, _ in found.values()) - 0.45
    places = {name: (x - left, y) for name, (x, y) in found.items()}
    right = max(x for x, _ in places.values()) + 0.45
    height = max(rows.values()) + 1
    figure, axes = _figure(9, 1.25 * height)
    axes.set(xlim=(0, right), ylim=(-height + 0.6, 0.4))
    for start, end, label in flow.edges:
        (x, y), (to_x, to_y) = places[start], places[end]
        arrow = {"arrowstyle": "->", "color": _LINE, "shrinkA": 0, "shrinkB": 2}
        axes.annotate("", (to_x, to_y + 0.24), (x, y - 0.24), arrowprops=arrow)
        share = 0.5 if to_y == y - 1 else 0.75
        place = (x + share * (to_x - x), y - 0.24 + share * (to_y - y + 0.48))
        paper = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.text(*place, textwrap.fill(label, 22), fontsize=8, ha="center", va="center", color=_INK, bbox=paper)
    for name, (x, y) in places.items():
        box = FancyBboxPatch(
            (x - 0.36, y - 0.2), 0.72, 0.4, boxstyle="round,pad=0.02", facecolor=_PALE, edgecolor=_LINE
        )
        axes.add_patch(box)
        axes.text(x, y, flow.labels[name], ha="center", va="center", fontsize=8.5, color=_INK)
    return _to_svg(figure)


def _place(flow: Flow, rows: dict[str, int]) -> dict[str, tuple[float, float]]:
    """Where each node is: below the highest that lead to it, beside the others of its row."""
    places: dict[str, tuple[float, float]] = {}
    for row in range(max(rows.values()) + 1):
        names = [name for name in flow.labels if rows[name] == row]
        parents = {name: [start for start, end, _ in flow.edges if end == name] for name in names}
        for index, name in enumerate(names):
            siblings = [other for other in names if parents[other] == parents[name]]
            highest = min((rows[parent] for parent in parents[name]), default=0)
            above = [places[parent][0] for parent in parents[name] if rows[parent] == highest]
            middle = sum(above) / len(above) if above else 1.5
            wanted = middle + siblings.index(name) - (len(siblings) - 1) / 2
            before = places[names[index - 1]][0] + 0.9 if index else 0.45
            places[name] = (max(wanted, before), -row)
    return places


PICTURES: dict[str, Callable[[], str]] = {
    "concepts_chunks.svg": draw_chunks,
    "concepts_step.svg": draw_step,
    "concepts_groups.svg": draw_groups,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (DOCS / name).write_text(draw())
        print(f"wrote {DOCS / name}")
