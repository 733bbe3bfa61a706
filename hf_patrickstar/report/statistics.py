"""Sums events up."""

from collections import Counter

from hf_patrickstar.events import (
    ChunkEvicted,
    ChunkInvalidated,
    ChunkLoaded,
    ChunkRehomed,
    ChunkVisited,
    Event,
    GradientStored,
    MessageExchanged,
    MicroBatchRepeated,
    SlicesGathered,
    SlicesReduced,
    StepDiverged,
    StepFinished,
    StepRecorded,
    ValueRestored,
)


class Statistics:
    """Counts bytes and events; ``record`` is a listener of the runtime."""

    def __init__(self) -> None:
        self._counts: Counter[type] = Counter()
        self._nbytes: Counter[type] = Counter()
        self._skipped = 0
        self._ahead = 0
        self._hits = 0
        self._late = 0
        self._waiting_s = 0.0
        self._loading_s = 0.0
        self._rehomed_nbytes = {True: 0, False: 0}

    def record(self, event: Event) -> None:
        """Takes one event."""
        kind = type(event)
        self._counts[kind] += 1
        if isinstance(event, GradientStored):  # there are most of these
            self._nbytes[kind] += event.nbytes
            return
        self._nbytes[kind] += getattr(event, "nbytes", 0)
        if isinstance(event, ChunkLoaded):
            self._ahead += event.ahead
            self._loading_s += event.waited_s
        elif isinstance(event, ChunkVisited):
            self._hits += event.is_hit
            self._late += event.waited_s is not None
            self._waiting_s += event.waited_s or 0.0
        elif isinstance(event, ChunkRehomed):
            self._rehomed_nbytes[event.to_device] += event.nbytes
        elif isinstance(event, StepFinished):
            self._skipped += event.skipped

    def summary(self) -> dict[str, float]:
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
            "diverged_steps": self._counts[StepDiverged],
            "recorded_steps": self._counts[StepRecorded],
            "chunk_hits": self._hits,
            "late_prefetches": self._late,
            "waiting_seconds": self._waiting_s,
            "loading_seconds": self._loading_s,
            "retries": self._counts[MicroBatchRepeated],
            "all_gathers": self._counts[SlicesGathered],
            "reduce_scatters": self._counts[SlicesReduced],
            "sent_nbytes": self._nbytes[SlicesGathered] + self._nbytes[SlicesReduced],
            "messages": self._counts[MessageExchanged],
        }
