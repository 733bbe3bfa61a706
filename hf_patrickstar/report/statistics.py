"""Sums events up."""

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
        self._counts: dict[type, int] = {}
        self._nbytes: dict[type, int] = {}
        self._skipped = 0
        self._ahead = 0
        self._rehomed_nbytes = {True: 0, False: 0}

    def record(self, event: Event) -> None:
        """Takes one event."""
        kind = type(event)
        self._counts[kind] = self._counts.get(kind, 0) + 1
        if isinstance(event, StepFinished):
            self._skipped += event.skipped
            return
        self._nbytes[kind] = self._nbytes.get(kind, 0) + event.nbytes
        if isinstance(event, ChunkLoaded):
            self._ahead += event.ahead
        elif isinstance(event, ChunkRehomed):
            self._rehomed_nbytes[event.to_device] += event.nbytes

    def summary(self) -> dict[str, int]:
        """Bytes moved by direction, and how often each thing happened."""
        return {
            "host_to_device_nbytes": self._nbytes.get(ChunkLoaded, 0) + self._nbytes.get(ValueRestored, 0),
            "device_to_host_nbytes": self._nbytes.get(GradientStored, 0),
            "chunk_loads": self._counts.get(ChunkLoaded, 0),
            "prefetches": self._ahead,
            "chunk_evictions": self._counts.get(ChunkEvicted, 0),
            "chunk_invalidations": self._counts.get(ChunkInvalidated, 0),
            "chunk_moves": self._counts.get(ChunkRehomed, 0),
            "moved_home_to_device_nbytes": self._rehomed_nbytes[True],
            "moved_home_to_host_nbytes": self._rehomed_nbytes[False],
            "steps": self._counts.get(StepFinished, 0) - self._skipped,
            "skipped_steps": self._skipped,
        }
