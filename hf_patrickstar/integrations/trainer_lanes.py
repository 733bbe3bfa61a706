"""Measures the lanes of one step of a Trainer's run on the CPU tier, for the page of the run."""

import time

from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.events import ChunkVisited, Event
from hf_patrickstar.memory.threads import ThreadStreams
from hf_patrickstar.report.measured_step import measured_timeline
from hf_patrickstar.schedule.clock import Timeline

_MOST_TRIES = 8
"""If so many steps were recorded one after the other, no step is measured: inputs differ from step to step."""


class LaneWatch:
    """Watches the first step that is not recorded; on an accelerator, whose copies the host does not see, none.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: PatrickStarEngine) -> None:
        streams = engine.resources.streams
        self._engine = engine
        self._streams = streams if isinstance(streams, ThreadStreams) else None
        self._waits: list[tuple[int, int]] = []
        self._num_tries = 0
        self._recorded: int | None = None  # steps that were recorded before the one that is watched

    @property
    def is_over(self) -> bool:
        """Whether nothing is measured any more."""
        return self._streams is None

    def note(self, event: Event) -> None:
        """Takes an event of the engine."""
        if self._recorded is not None and isinstance(event, ChunkVisited) and event.waited_s:
            now = time.perf_counter_ns()
            self._waits.append((now - round(event.waited_s * 1e9), now))

    def begin_step(self) -> Timeline | None:
        """Notes that a step of the optimizer begins, and so that the one before has ended.

        Returns:
            Once, the timeline of the step that has ended.
        """
        if self._streams is None:
            return None
        recorded = int(self._engine.stats()["recorded_steps"])
        if self._recorded is not None:
            copies, is_usual = self._streams.end_timing(), recorded == self._recorded
            found = measured_timeline(self._engine.manager.steps.durations.last, copies, self._waits)
            if is_usual or self._num_tries == _MOST_TRIES:
                self._streams = None
                return found if is_usual else None
        self._recorded, self._waits = recorded, []
        self._num_tries += 1
        self._streams.begin_timing()
        return None

    def stop(self) -> None:
        """Measures no more."""
        if self._streams is not None:
            self._streams.end_timing()
            self._streams = None
