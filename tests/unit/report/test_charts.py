"""Charts draw the numbers that they are given where the axes say."""

import re

import pytest

from hf_patrickstar.report.page import HEIGHT, WIDTH, Axis, lines, stacked
from hf_patrickstar.units import GIB, MIB


def points(path):
    return [float(number) for number in re.findall(r"-?[\d.]+", path)]


@pytest.mark.parametrize(
    ("axis", "factor", "labels"),
    [
        (Axis(0, 1.2 * GIB, "B"), GIB, ["0 GiB", "0.25 GiB", "0.5 GiB", "0.75 GiB", "1 GiB"]),
        (Axis(0, 0.0123, "s"), 1e-3, ["0 ms", "2.5 ms", "5 ms", "7.5 ms", "10 ms"]),
        (Axis(3, 3, "whole"), 1, ["3", "4"]),
    ],
)
def test_marks_are_round_and_lie_where_they_say(axis, factor, labels):
    ticks = axis.ticks()
    assert [label for _, label in ticks] == labels
    for percent, label in ticks:
        value = float(label.split()[0]) * factor
        assert percent == pytest.approx(100 * (value - axis.low) / (axis.high - axis.low))


def test_kinds_are_stacked_up_to_their_sum():
    kinds = {"below": [10 * MIB, 20 * MIB], "none": [0, 0], "above": [30 * MIB, 20 * MIB]}
    chart = stacked("t", "s", kinds, 5, 80 * MIB, [5])
    assert [shape.label for shape in chart.shapes] == ["above", "below", "end of a forward", "device budget"]
    above, below, mark, limit = chart.shapes
    y = {nbytes: HEIGHT * (1 - nbytes / (80 * 1.05)) for nbytes in (10, 20, 40, 80)}
    assert points(above.path) == pytest.approx([0, 300, y[40], 500, y[40], 1000, 300], abs=0.06), "behind what is below"
    assert points(below.path) == pytest.approx([0, 300, y[10], 500, y[20], 1000, 300], abs=0.06)
    assert points(limit.path) == pytest.approx([0, y[80], WIDTH], abs=0.06)
    assert points(mark.path) == [500, 0, 300]
    assert len(stacked("t", "s", {"kind": [MIB]}, 1, GIB, []).shapes) == 1, "a limit far above is not drawn"
    assert stacked("t", "s", {"kind": []}, 1, 1, []).shapes == []


def test_a_line_has_a_gap_where_a_value_is_not_known():
    chart = lines("t", {"loss": [(0, 1.0), (10, None), (20, 2.0), (30, 3.0)]})
    low, middle, high = (HEIGHT * (1 - share / 2.1) for share in (0, 1, 2))
    (shape,) = chart.shapes
    assert re.sub(r"[\d. ]", "", shape.path) == "MhMhL"
    assert points(shape.path) == pytest.approx([0, low, 0, 666.7, middle, 0, 1000, high], abs=0.06)
