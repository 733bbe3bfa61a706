"""The lanes of a measured step: what one thread did is the critical path, and copies beside it are not."""

import pytest

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.memory.lanes import Stop, TimedCopy, WorkLane
from hf_patrickstar.report.measured_step import (
    MOST_SPANS,
    measured_lanes,
    measured_timeline,
    timeline_from_dict,
    timeline_to_dict,
)
from hf_patrickstar.runtime.steps import Piece
from hf_patrickstar.schedule.clock import Lane
from hf_patrickstar.schedule.script import Part

PIECES = [Piece(Part.FORWARD, 100, 200), Piece(Part.BACKWARD, 200, 400), Piece(Part.UPDATE, 410, 500)]
COPIES = [
    TimedCopy(WorkLane.TO_DEVICE, 10, 60, 8, False),  # before the step
    TimedCopy(WorkLane.TO_DEVICE, 100, 120, 8, False),
    TimedCopy(WorkLane.TO_DEVICE, 130, 160, 8, True),
    TimedCopy(WorkLane.TO_HOST, 350, 360, 8, False),
]
WAITS = [Stop(WorkLane.TO_DEVICE, 150, 160, True)]


def test_a_measured_step():
    timeline = measured_timeline(PIECES, Times(COPIES, WAITS))
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
    assert measured_timeline([], Times(COPIES, WAITS)) is None
    many = [TimedCopy(WorkLane.TO_DEVICE, 150, 151, 8, True)] * MOST_SPANS
    assert measured_timeline(PIECES, Times(many)) is None


class Times:
    """What was measured; moments are their times."""

    def __init__(self, works=(), stops=()):
        self._works, self._stops = list(works), list(stops)

    def ns_of(self, moment):
        return moment

    def works(self):
        return self._works

    def stops(self):
        return self._stops


BESIDE = [
    Piece(Part.FORWARD, 100, 150, (110, 210)),  # the host is far ahead
    Piece(Part.BACKWARD, 150, 200, (210, 500)),
    Piece(Part.UPDATE, 200, 230, (500, 510)),
]
TIMES = Times(
    [
        TimedCopy(WorkLane.TO_DEVICE, 50, 90, 8, True),  # before the step
        TimedCopy(WorkLane.TO_DEVICE, 120, 160, 8, True),
        TimedCopy(WorkLane.TO_HOST, 400, 520, 16, True),
        TimedCopy(WorkLane.HOST_WORK, 520, 700, 0, True),
        TimedCopy(WorkLane.TO_DEVICE, 800, 900, 8, True),  # of an evaluation
    ],
    [
        Stop(WorkLane.TO_DEVICE, 800, 850, False),
        Stop(WorkLane.TO_DEVICE, 130, 160, False),
        Stop(WorkLane.TO_HOST, 450, 480, False),
        Stop(WorkLane.TO_HOST, 205, 225, True),
    ],
)


def test_a_measured_step_of_an_accelerator():
    timeline = measured_lanes(BESIDE, TIMES)
    found = {(span.lane, span.begin_ns, span.end_ns, span.what) for span in timeline.own_spans}
    assert found == {
        (Lane.COMPUTE, 10, 30, "forward"),
        (Lane.COMPUTE, 60, 110, "forward"),
        (Lane.COMPUTE, 110, 350, "backward"),
        (Lane.COMPUTE, 380, 400, "backward"),
        (Lane.COMPUTE, 400, 410, "update"),
        (Lane.HOST, 0, 50, "forward"),
        (Lane.HOST, 50, 100, "backward"),
        (Lane.HOST, 100, 105, "update"),
        (Lane.HOST, 125, 130, "update"),
        (Lane.TO_DEVICE, 20, 60, "8 bytes"),
        (Lane.TO_HOST, 300, 420, "16 bytes"),
        (Lane.HOST_WORK, 420, 600, "work"),
    }
    assert (timeline.begin_ns, timeline.end_ns) == (0, 600), "the step ends when the last lane has ended its work"
    assert timeline.waits_by_place(Lane.COMPUTE) == {
        "a copy to the device": 30,
        "a copy of gradients to the host": 30,
    }
    assert timeline.waits_by_place() == {"a copy of gradients to the host": 20}
    assert timeline.critical_path() == [], "nobody knows what these spans began after"
    assert timeline_from_dict(timeline_to_dict(timeline)) == timeline


def test_an_accelerator_that_was_not_measured():
    assert measured_lanes([], TIMES) is None
    assert measured_lanes([*BESIDE[:2], Piece(Part.UPDATE, 200, 230, (500, None))], TIMES) is None
    assert measured_lanes(BESIDE, Times([TimedCopy(WorkLane.TO_HOST, 400, 520, 16, True)] * MOST_SPANS)) is None


def test_records_of_before_say_nothing_of_causes_and_lanes_of_waits():
    timeline = measured_timeline(PIECES, Times(COPIES, WAITS))
    values = timeline_to_dict(timeline)
    del values["has_causes"]
    values["waits"] = [wait[:3] for wait in values["waits"]]
    assert timeline_from_dict(values) == timeline


def test_a_timeline_is_read_as_it_was_written():
    timeline = measured_timeline(PIECES, Times(COPIES, WAITS))
    values = timeline_to_dict(timeline)
    assert timeline_from_dict(values) == timeline
    for broken in (
        {},
        {**values, "spans": [["somewhere", 0, 1, "", -1]]},
        {**values, "spans": [["host", 0, 1, "", 0]]},
    ):
        with pytest.raises(ConfigError, match="not the timeline of a step"):
            timeline_from_dict(broken)
