"""The lanes of a measured step: what one thread did is the critical path, and copies beside it are not."""

import pytest

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.memory.lanes import TimedCopy, WorkLane
from hf_patrickstar.report.measured_step import (
    MOST_SPANS,
    measured_timeline,
    timeline_from_dict,
    timeline_to_dict,
)
from hf_patrickstar.runtime.durations import Piece
from hf_patrickstar.schedule.clock import Lane
from hf_patrickstar.schedule.script import Part

PIECES = [Piece(Part.FORWARD, 100, 200), Piece(Part.BACKWARD, 200, 400), Piece(Part.UPDATE, 410, 500)]
COPIES = [
    TimedCopy(WorkLane.TO_DEVICE, 10, 60, 8, False),  # before the step
    TimedCopy(WorkLane.TO_DEVICE, 100, 120, 8, False),
    TimedCopy(WorkLane.TO_DEVICE, 130, 160, 8, True),
    TimedCopy(WorkLane.TO_HOST, 350, 360, 8, False),
]
WAITS = [(150, 160)]


def test_a_measured_step():
    timeline = measured_timeline(PIECES, COPIES, WAITS)
    assert (timeline.begin_ns, timeline.end_ns) == (0, 400)
    found = {(span.lane, span.begin_ns, span.end_ns) for span in timeline.own_spans}
    assert found == {
        (Lane.TO_DEVICE, 30, 60),
        (Lane.TO_DEVICE, 0, 20),
        (Lane.COMPUTE, 20, 50),
        (Lane.COMPUTE, 60, 100),
        (Lane.COMPUTE, 100, 250),
        (Lane.TO_HOST, 250, 260),
        (Lane.COMPUTE, 260, 300),
        (Lane.HOST, 310, 400),
    }
    path = timeline.critical_path()
    assert [span.begin_ns for span in path] == [0, 20, 60, 100, 250, 260, 310], "the copy beside is not on it"
    assert [(wait.begin_ns, wait.duration_ns) for wait in timeline.waits] == [(0, 20), (50, 10), (250, 10)]
    assert len(timeline.waits_by_place()) == 3


def test_nothing_and_too_much():
    assert measured_timeline([], COPIES, WAITS) is None
    many = [TimedCopy(WorkLane.TO_DEVICE, 150, 151, 8, True)] * MOST_SPANS
    assert measured_timeline(PIECES, many, []) is None


def test_a_timeline_is_read_as_it_was_written():
    timeline = measured_timeline(PIECES, COPIES, WAITS)
    values = timeline_to_dict(timeline)
    assert timeline_from_dict(values) == timeline
    for broken in (
        {},
        {**values, "spans": [["somewhere", 0, 1, "", -1]]},
        {**values, "spans": [["host", 0, 1, "", 0]]},
    ):
        with pytest.raises(ConfigError, match="not the timeline of a step"):
            timeline_from_dict(broken)
