"""Reads a page as a browser would: its tables, charts and references."""

import dataclasses
import html.parser

VOID = {"meta", "link", "br", "hr", "img", "input", "path", "rect", "circle"}


@dataclasses.dataclass
class Table:
    caption: str = ""
    header: list = dataclasses.field(default_factory=list)
    rows: list = dataclasses.field(default_factory=list)
    values: list = dataclasses.field(default_factory=list)

    def column(self, name):
        """The exact figures of a column."""
        place = self.header.index(name)
        return [row[place] for row in self.values]


class PageReader(html.parser.HTMLParser):
    """Takes a page apart, and checks that every element is closed."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.charts, self.tags, self.references, self.ids = [], [], [], [], []
        self.text, self._open, self._cell = [], [], None
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append(tag)
        self.ids += [given["id"]] if "id" in given else []
        self.references += [given[name] for name in ("href", "src", "xlink:href", "action", "srcset") if name in given]
        if tag not in VOID:
            self._open.append(tag)
        if tag == "figure":
            self.charts.append({"paths": 0, "label": ""})
        elif tag == "svg" and given.get("role") == "img":
            self.charts[-1]["label"] = given["aria-label"]
        elif tag == "path" and "figure" in self._open:
            self.charts[-1]["paths"] += 1
        elif tag == "table":
            self.tables.append(Table())
        elif tag == "tr":
            self.tables[-1].rows.append([])
            self.tables[-1].values.append([])
        elif tag in ("th", "td"):
            self._cell = ["", None]
        elif tag == "data" and self._cell is not None:
            self._cell[1] = float(given["value"])

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert tag in VOID or self._open.pop() == tag, tag
        table = self.tables[-1] if self.tables else None
        if tag in ("th", "td"):
            table.rows[-1].append(self._cell[0])
            table.values[-1].append(self._cell[1])
            self._cell = None
        elif tag == "thead":
            table.header = table.rows.pop()
            table.values.pop()

    def handle_data(self, data):
        self.text.append(data)
        if self._cell is not None:
            self._cell[0] += data
        elif self._open and self._open[-1] == "caption":
            self.tables[-1].caption += data

    def table(self, caption):
        """The table whose caption begins with a text."""
        (found,) = [table for table in self.tables if table.caption.startswith(caption)]
        return found


def check_alone(reader, allowed=()):
    """A page refers to its own parts, and to files beside it that are named."""
    assert "script" not in reader.tags
    assert "link" not in reader.tags
    for reference in reader.references:
        assert reference in allowed or (reference.startswith("#") and reference[1:] in reader.ids), reference
    assert len(reader.ids) == len(set(reader.ids))


def check_charts(reader, least):
    """Every chart is drawn and says what it shows, and every row of a table has all of its columns."""
    assert len(reader.charts) >= least
    for chart in reader.charts:
        assert chart["label"]
        assert chart["paths"] > 0, chart
    for table in reader.tables:
        assert table.caption
        assert {len(row) for row in table.rows} <= {len(table.header)}
