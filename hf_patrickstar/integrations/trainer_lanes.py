"""Measures the lanes of one step of a Trainer's run, for the page of the run."""

import logging

from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.memory.lanes import LaneTimes
from hf_patrickstar.memory.streams import DeviceStreams
from hf_patrickstar.report.measured_step import measured_lanes, measured_timeline
from hf_patrickstar.schedule.clock import Timeline

logger = logging.getLogger(__name__)

_MOST_TRIES = 8
"""If so many steps were recorded one after the other, no step is measured: inputs differ from step to step."""


class LaneWatch:
    """Watches the first step that is not recorded.

    Args:
        engine: The engine.

    Attributes:
        is_over: Whether nothing is measured any more.
    """

    def __init__(self, engine: PatrickStarEngine) -> None:
        self.is_over = False
        self._engine = engine
        self._streams = engine.resources.streams
        self._durations = engine.manager.steps.durations
        self._times: LaneTimes | None = None
        self._num_tries = 0
        self._recorded: int | None = None  # steps that were recorded before the one that is watched

    def begin_step(self) -> Timeline | None:
        """Notes that a step of the optimizer begins, and so that the one before has ended.

        Returns:
            Once, the timeline of the step that has ended.
        """
        if self.is_over:
            return None
        recorded = int(self._engine.stats()["recorded_steps"])
        if self._recorded is not None:
            is_usual = recorded == self._recorded
            found = self._end()
            if is_usual or self._num_tries == _MOST_TRIES:
                self.is_over = True
                return found if is_usual else None
        self._recorded = recorded
        self._num_tries += 1
        self._begin()
        return None

    def stop(self) -> None:
        """Measures no more."""
        self.is_over = True
        self._streams.end_timing()
        self._durations.mark = None

    def _begin(self) -> None:
        try:
            self._times = self._streams.begin_timing()
        except RuntimeError as error:  # not every accelerator has moments with times
            logger.info("patrickstar: the lanes of a step cannot be measured on %s: %s", self._streams.device, error)
            self.stop()
            return
        if isinstance(self._streams, DeviceStreams):
            self._durations.mark = self._times.mark

    def _end(self) -> Timeline | None:
        times, self._times, self._durations.mark = self._times, None, None
        self._streams.end_timing()
        if times is None:
            return None
        measure = measured_lanes if isinstance(self._streams, DeviceStreams) else measured_timeline
        return measure(self._durations.last, times)
