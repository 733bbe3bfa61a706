"""Sums events up."""

from collections import Counter

from hf_patrickstar.events import (
    ChunkEvicted,
    ChunkInvalidated,
    ChunkLoaded,
    ChunkRehomed,
    Event,
    GradientStored,
    StepFinished,
    ValueRestored,
)


class Statistics:
    """Counts bytes and events; ``record`` is a listener of the runtime."""

    def __init__(self) -> None:
        self._counts: Counter[type] = Counter()
        self._nbytes: Counter[type] = Counter()
        self._skipped = 0
        self._ahead = 0
        self._rehomed_nbytes = {True: 0, False: 0}

    def record(self, event: Event) -> None:
        """Takes one event."""
        kind = type(event)
        self._counts[kind] += 1
        if isinstance(event, StepFinished):
            self._skipped += event.skipped
            return
        self._nbytes[kind] += event.nbytes
        if isinstance(event, ChunkLoaded):
            self._ahead += event.ahead
        elif isinstance(event, ChunkRehomed):
            self._rehomed_nbytes[event.to_device] += event.nbytes

    def summary(self) -> dict[str, int]:
        """Bytes moved by direction, and how often each thing happened."""
        return {
            "host_to_device_nbytes": self._nbytes[ChunkLoaded] + self._nbytes[ValueRestored],
            "device_to_host_nbytes": self._nbytes[GradientStored],
            "chunk_loads": self._counts[ChunkLoaded],
            "prefetches": self._ahead,
            "chunk_evictions": self._counts[ChunkEvicted],
            "chunk_invalidations": self._counts[ChunkInvalidated],
            "chunk_moves": self._counts[ChunkRehomed],
            "moved_home_to_device_nbytes": self._rehomed_nbytes[True],
            "moved_home_to_host_nbytes": self._rehomed_nbytes[False],
            "steps": self._counts[StepFinished] - self._skipped,
            "skipped_steps": self._skipped,
        }
