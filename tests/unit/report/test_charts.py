"""Charts draw the numbers that they are given, where the axes say."""

import re

import pytest

from hf_patrickstar.report import scales
from hf_patrickstar.report.blocks import Cell, Table
from hf_patrickstar.report.charts import HEIGHT, WIDTH, Line, Row, Words, bars, fits, lines, stacked
from hf_patrickstar.units import GIB, KIB, MIB

WORDS, TABLE = Words("title", "summary", "x", "y"), Table("caption", ("a",), ((Cell("1", 1),),))


def points(path):
    return [float(number) for number in re.findall(r"-?[\d.]+", path)]


@pytest.mark.parametrize(
    ("scale", "labels"),
    [
        (scales.of_bytes(10 * MIB), ["0 MiB", "2 MiB", "4 MiB", "6 MiB", "8 MiB", "10 MiB"]),
        (scales.of_bytes(1.2 * GIB), ["0 GiB", "0.25 GiB", "0.5 GiB", "0.75 GiB", "1 GiB"]),
        (scales.of_bytes(700 * KIB), ["0 KiB", "200 KiB", "400 KiB", "600 KiB"]),
        (scales.of_bytes(0), ["0 MiB", "0.2 MiB", "0.4 MiB", "0.6 MiB", "0.8 MiB", "1 MiB"]),
        (scales.of_seconds(0.0123), ["0 ms", "2.5 ms", "5 ms", "7.5 ms", "10 ms"]),
        (scales.of_steps(3, 3), ["3", "4"]),
        (scales.of_numbers(-1.0, 1.0), ["-1", "-0.5", "0", "0.5", "1"]),
    ],
)
def test_marks_are_round_and_lie_where_they_say(scale, labels):
    ticks = scale.ticks()
    assert [tick.label for tick in ticks] == labels
    for tick in ticks:
        value = float(tick.label.split()[0]) * scale.factor
        assert tick.percent == pytest.approx(100 * (value - scale.low) / (scale.high - scale.low))


def test_numbers_that_are_all_the_same_have_an_axis():
    for number in (0.0, 5.0, -2.0):
        scale = scales.of_numbers(number, number)
        assert scale.low < number < scale.high
        assert 0 < scale.at(number, 100) < 100


def test_kinds_are_stacked_up_to_their_sum():
    columns = {"below": [10 * MIB, 20 * MIB], "none": [0, 0], "above": [30 * MIB, 20 * MIB]}
    chart = stacked(WORDS, columns, [0, 5, 10], 80 * MIB, [5], TABLE)
    assert [entry.label for entry in chart.legend] == ["below", "above", "limit of the budget", "a forward ends"]
    below, above, mark, limit = chart.shapes
    assert (below.look, above.look, mark.look, limit.look) == (0, 2, "mark", "budget")
    high = 80 * MIB * 1.05
    y = {nbytes: HEIGHT * (1 - nbytes * MIB / high) for nbytes in (10, 20, 40, 80)}
    expected = [0, y[10], 500, 500, y[20], 1000, 1000, 300, 500, 500, 300, 0]
    assert points(below.path) == pytest.approx(expected, abs=0.06)
    expected = [0, y[40], 500, 500, y[40], 1000, 1000, y[20], 500, 500, y[10], 0]
    assert points(above.path) == pytest.approx(expected, abs=0.06)
    assert points(limit.path) == pytest.approx([0, y[80], WIDTH], abs=0.06)
    assert points(mark.path) == [500, 0, 300]


def test_a_limit_far_above_is_not_drawn():
    chart = stacked(WORDS, {"kind": [MIB]}, [0, 1], GIB, [], TABLE)
    assert not fits(GIB, MIB)
    assert [shape.look for shape in chart.shapes] == [0]
    assert chart.y_ticks[-1].label == "1 MiB"


def test_a_line_has_a_gap_where_a_value_is_not_known():
    found = [Line("loss", ((0, 1.0), (10, None), (20, 2.0), (30, 3.0)))]
    chart = lines(WORDS, found, scales.of_numbers(0, 4), TABLE, limit=4)
    assert chart.shapes[0].path == "M0 225h0M666.7 150h0L1000 75"
    assert [entry.label for entry in chart.legend] == ["loss", "budget"]


def test_nothing_at_all_is_drawn_without_an_error():
    assert lines(WORDS, [Line("loss", ())], scales.of_numbers(0, 0), TABLE).shapes[0].path == ""
    assert stacked(WORDS, {"kind": []}, [0], 1, [], TABLE).shapes == ()
    assert bars(WORDS, [], {0: "kind"}, scales.of_bytes(0), TABLE).shapes == ()


def test_bars_stand_in_their_rows():
    rows = [Row("one", {0: [(0, MIB)]}), Row("two", {1: [(MIB, MIB), (3 * MIB, 0)], 0: []})]
    chart = bars(WORDS, rows, {0: "a", 1: "b", 2: "c"}, scales.of_bytes(4 * MIB), TABLE, limit=3 * MIB)
    assert chart.num_rows == 2
    assert [(tick.percent, tick.label) for tick in chart.y_ticks] == [(25, "one"), (75, "two")]
    first, second, limit = chart.shapes
    assert points(first.path) == [0, 21, 250, 129, 0]
    assert points(second.path) == [250, 171, 500, 279, 250]
    assert points(limit.path) == [750, 0, 300]
    assert [entry.label for entry in chart.legend] == ["a", "b", "budget"]
