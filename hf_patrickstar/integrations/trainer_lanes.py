"""Measures the lanes of one step of a Trainer's run, for the page of the run."""

import logging
import time
from typing import Protocol

from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.events import ChunkVisited, Event
from hf_patrickstar.memory.lane_times import LaneTimes
from hf_patrickstar.memory.streams import DeviceStreams
from hf_patrickstar.memory.threads import ThreadStreams
from hf_patrickstar.report.measured_step import measured_lanes, measured_timeline
from hf_patrickstar.runtime.durations import Durations
from hf_patrickstar.schedule.clock import Timeline

logger = logging.getLogger(__name__)

_MOST_TRIES = 8
"""If so many steps were recorded one after the other, no step is measured: inputs differ from step to step."""


class LaneWatch:
    """Watches the first step that is not recorded.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: PatrickStarEngine) -> None:
        self._engine = engine
        self._lanes = _lanes_of(engine)
        self._num_tries = 0
        self._recorded: int | None = None  # steps that were recorded before the one that is watched

    @property
    def is_over(self) -> bool:
        """Whether nothing is measured any more."""
        return self._lanes is None

    def note(self, event: Event) -> None:
        """Takes an event of the engine."""
        lanes = self._lanes  # a thread that computes between steps may note, too
        if lanes is not None and self._recorded is not None:
            lanes.note(event)

    def begin_step(self) -> Timeline | None:
        """Notes that a step of the optimizer begins, and so that the one before has ended.

        Returns:
            Once, the timeline of the step that has ended.
        """
        if self._lanes is None:
            return None
        recorded = int(self._engine.stats()["recorded_steps"])
        if self._recorded is not None:
            is_usual = recorded == self._recorded
            found = self._lanes.end()
            if is_usual or self._num_tries == _MOST_TRIES:
                self._lanes = None
                return found if is_usual else None
        self._recorded = recorded
        self._num_tries += 1
        if not self._lanes.begin():
            self.stop()
        return None

    def stop(self) -> None:
        """Measures no more."""
        if self._lanes is not None:
            self._lanes.stop()
            self._lanes = None


class _Lanes(Protocol):
    """Measures one step after the other."""

    def begin(self) -> bool:
        """A step begins; returns whether it can be measured."""
        ...

    def note(self, event: Event) -> None:
        """Takes an event of the engine."""
        ...

    def end(self) -> Timeline | None:
        """The step has ended; returns its timeline, if there is one."""
        ...

    def stop(self) -> None:
        """Measures no more."""
        ...


def _lanes_of(engine: PatrickStarEngine) -> _Lanes | None:
    streams, durations = engine.resources.streams, engine.manager.steps.durations
    if isinstance(streams, ThreadStreams):
        return _ThreadLanes(streams, durations)
    return _DeviceLanes(streams, durations) if isinstance(streams, DeviceStreams) else None


class _ThreadLanes:
    """Those of the CPU tier; the engine says where its caller waited."""

    def __init__(self, streams: ThreadStreams, durations: Durations) -> None:
        self._streams = streams
        self._durations = durations
        self._waits: list[tuple[int, int]] = []

    def begin(self) -> bool:
        self._waits = []
        self._streams.begin_timing()
        return True

    def note(self, event: Event) -> None:
        if isinstance(event, ChunkVisited) and event.waited_s:
            now = time.perf_counter_ns()
            self._waits.append((now - round(event.waited_s * 1e9), now))

    def end(self) -> Timeline | None:
        return measured_timeline(self._durations.last, self._streams.end_timing(), self._waits)

    def stop(self) -> None:
        self._streams.end_timing()


class _DeviceLanes:
    """Those of an accelerator; see [Note: measured lanes] in ``memory/lane_times.py``."""

    def __init__(self, streams: DeviceStreams, durations: Durations) -> None:
        self._streams = streams
        self._durations = durations
        self._times: LaneTimes | None = None

    def begin(self) -> bool:
        try:
            self._times = self._streams.begin_timing()
        except RuntimeError as error:  # not every accelerator has moments with times
            logger.info("patrickstar: the lanes of a step cannot be measured on %s: %s", self._streams.device, error)
            return False
        self._durations.mark = self._times.mark
        return True

    def note(self, event: Event) -> None:
        """Tickets are measured themselves."""

    def end(self) -> Timeline | None:
        times, self._times = self._times, None
        self.stop()
        return None if times is None else measured_lanes(self._durations.last, times)

    def stop(self) -> None:
        self._streams.end_timing()
        self._durations.mark = None
