"""Traces and pictures of a timeline say what is in it."""

import itertools
import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from PIL import Image

from hf_patrickstar.cli.files import write_html
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.report.blocks import Page
from hf_patrickstar.report.timeline import CRITICAL, VIRTUAL, WAITS, draw_lanes, new_figure, to_trace
from hf_patrickstar.schedule.clock import Clock, Lane

fast = settings(deadline=None, max_examples=100, database=None, derandomize=True)


def make_timeline():
    """A step after another one: copies ahead, and a host that waits twice."""
    clock = Clock()
    clock.wait(clock.put(Lane.COMPUTE, 777, "old"), "old")
    begin_ns, first = clock.now_ns, len(clock.spans)
    ticket = clock.put(Lane.TO_DEVICE, 4_500, "load 0")
    for layer in range(3):
        clock.host(700, "launch")
        clock.follow(Lane.COMPUTE, ticket)
        done = clock.put(Lane.COMPUTE, 6_001, f"layer {layer}")
        ticket = clock.put(Lane.TO_DEVICE, 4_500, f"load {layer + 1}")
    clock.wait(done, "loss.item()")
    clock.follow(Lane.TO_HOST, done)
    clock.put(Lane.TO_HOST, 2_000, "gradient")
    clock.wait_for_all("end of step")
    return clock.timeline(begin_ns, first)


# Traces


def rows_of(trace):
    """Complete events by the name of their thread, as whole nanoseconds."""
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    rows = {name: [] for name in names.values()}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            entry = (event["name"], round(event["ts"] * 1000), round(event["dur"] * 1000), event["args"])
            rows[names[event["tid"]]].append(entry)
    return rows


def expected_rows(timeline):
    rows = {str(lane): [] for lane in Lane}
    for number, span in enumerate(timeline.spans):
        if number >= timeline.first:
            args = {"span": number, "after": span.after}
            rows[span.lane].append((span.what, span.begin_ns - timeline.begin_ns, span.duration_ns, args))
    rows[WAITS] = [(wait.place, wait.begin_ns - timeline.begin_ns, wait.duration_ns, {}) for wait in timeline.waits]
    rows[CRITICAL] = [
        (span.what, span.begin_ns - timeline.begin_ns, span.duration_ns, {"lane": str(span.lane)})
        for span in timeline.critical_path()
    ]
    return rows


def draw(timeline, title="timeline"):
    """The lanes of a timeline as a figure of their own."""
    figure = new_figure(5)
    figure.legend(handles=draw_lanes(figure.add_subplot(), timeline, title))
    return figure


def test_a_trace_has_every_span_and_wait():
    timeline = make_timeline()
    trace = json.loads(json.dumps(to_trace(timeline)))
    assert rows_of(trace) == expected_rows(timeline)
    assert rows_of(trace)["compute"][0] == ("layer 0", 4_500, 6_001, {"span": 3, "after": 1})
    assert [place for place, *_ in rows_of(trace)[WAITS]] == ["loss.item()", "end of step"]


def test_rows_have_names_and_an_order():
    events = [event for event in to_trace(make_timeline())["traceEvents"] if event["ph"] == "M"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["virtual time"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == [*(lane.value for lane in Lane), WAITS, CRITICAL]
    order = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    assert sorted(order, key=order.get) == [event["tid"] for event in events if event["name"] == "thread_name"]


def test_every_event_has_what_the_format_asks_for():
    for event in to_trace(make_timeline())["traceEvents"]:
        assert event["pid"] == 1
        assert event["ph"] in "MX"
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0


def test_an_older_trace_is_replaced(tmp_path):
    path = tmp_path / "trace.trace.json"
    path.write_text("x" * 10**6)
    page = Page("t", "s", "v", None, (), ())
    write_html(page, Clock().timeline(), tmp_path / "trace.html", VIRTUAL)
    assert rows_of(json.loads(path.read_text())) == expected_rows(Clock().timeline())


@fast
@given(st.lists(st.tuples(st.sampled_from(Lane), st.integers(0, 10**13)), max_size=20))
def test_times_are_exact_to_the_nanosecond(work):
    clock = Clock()
    for lane, duration in work:
        clock.put(lane, duration, "work")
    timeline = clock.timeline()
    assert rows_of(json.loads(json.dumps(to_trace(timeline)))) == expected_rows(timeline)


# Pictures


def bars_of(axis):
    """Of every collection of bars its look, its row, and where its bars begin and end."""
    found = []
    for collection in axis.collections:
        boxes = [path.get_extents() for path in collection.get_paths()]
        row = round((boxes[0].y0 + boxes[0].y1) / 2)
        shade = tuple(collection.get_facecolor()[0][:3])
        found.append((shade, collection.get_hatch(), row, [(round(box.x0, 9), round(box.x1, 9)) for box in boxes]))
    return found


def test_a_picture_has_a_row_for_each_lane_that_worked():
    (axis,) = draw(make_timeline(), "one step").axes
    assert [label.get_text() for label in axis.get_yticklabels()] == [
        *("host", "compute", "host -> device", "device -> host"),
    ]
    assert axis.get_ylabel() == "lane"
    assert axis.get_xlabel() == "time in us"
    bottom, top = axis.get_ylim()
    assert bottom > top, "the host is the first row"


def test_the_title_has_the_duration_and_the_shares():
    timeline = make_timeline()
    assert timeline.duration_ns == 24_503
    (axis,) = draw(timeline, "one step").axes
    assert axis.get_title() == ("one step: 24.5 us; busy: host 9%, compute 73%, host -> device 73%, device -> host 8%")


def test_bars_are_the_spans():
    timeline = make_timeline()
    (axis,) = draw(timeline).axes
    lanes = [label.get_text() for label in axis.get_yticklabels()]
    drawn = sorted((lanes[row], *bar) for _, hatch, row, bars in bars_of(axis) if not hatch for bar in bars)
    assert drawn == sorted(
        (span.lane, (span.begin_ns - timeline.begin_ns) / 1000, (span.end_ns - timeline.begin_ns) / 1000)
        for span in timeline.own_spans
    )


def test_the_critical_path_is_darker_and_waits_are_hatched():
    timeline = make_timeline()
    (axis,) = draw(timeline).axes
    hatched = [(row, bars) for _, hatch, row, bars in bars_of(axis) if hatch]
    begin_ns = timeline.begin_ns
    assert hatched == [
        (
            0,
            [
                ((wait.begin_ns - begin_ns) / 1000, (wait.begin_ns + wait.duration_ns - begin_ns) / 1000)
                for wait in timeline.waits
            ],
        )
    ]
    plain = [(sum(shade), bars) for shade, hatch, _, bars in bars_of(axis) if not hatch]
    dark = min(shade for shade, _ in plain)
    on_path = sorted(bar for shade, bars in plain if shade == dark for bar in bars)
    assert on_path == [
        ((span.begin_ns - begin_ns) / 1000, (span.end_ns - begin_ns) / 1000) for span in timeline.critical_path()
    ]


def luminance(shade):
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), shade, strict=True))


def test_the_legend_is_readable_in_grey():
    (legend,) = draw(make_timeline()).legends
    assert [text.get_text() for text in legend.get_texts()] == [f"work on the {CRITICAL}", "other work", WAITS]
    greys = sorted(luminance(to_rgb(patch.get_facecolor())) for patch in legend.get_patches())
    assert all(after - before > 0.2 for before, after in itertools.pairwise(greys))
    assert legend.get_patches()[-1].get_hatch()


@pytest.mark.parametrize(
    ("duration_ns", "unit", "number"),
    [(2_500_000_000, "s", "2.5 s"), (12_345_678, "ms", "12.35 ms"), (1_000, "us", "1 us"), (12, "ns", "12 ns")],
)
def test_the_unit_suits_the_duration(duration_ns, unit, number):
    clock = Clock()
    clock.host(duration_ns, "work")
    (axis,) = draw(clock.timeline(), "work").axes
    assert axis.get_xlabel() == f"time in {unit}"
    assert axis.get_title() == f"work: {number}; busy: host 100%"


def test_nothing_and_much_can_be_drawn(tmp_path):
    clock = Clock()
    draw(clock.timeline()).savefig(tmp_path / "nothing.png")
    for _ in range(3_000):
        clock.host(3, "launch")
        clock.put(Lane.COMPUTE, 5, "kernel")
    draw(clock.timeline()).savefig(tmp_path / "much.png")
    with Image.open(tmp_path / "much.png") as picture:
        assert len(picture.convert("L").getcolors()) > 10, "something is drawn"


def test_without_matplotlib_there_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"matplotlib cannot be imported .*: pip install 'hf_patrickstar\[plots\]'"):
        draw(make_timeline())
    to_trace(make_timeline())
