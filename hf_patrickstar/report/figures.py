"""What an engine counts from its events, and what a training log says of it under documented names."""

import logging
import time
from collections.abc import Mapping
from typing import Any

from hf_patrickstar import events
from hf_patrickstar.units import format_nbytes

logger = logging.getLogger(__name__)

PREFIX = "patrickstar/"
PER_STEP = (
    *("host_to_device_nbytes", "device_to_host_nbytes", "chunk_loads", "chunk_evictions", "chunk_hits", "prefetches"),
    *("late_prefetches", "waiting_seconds", "chunk_moves", "moved_home_to_device_nbytes", "moved_home_to_host_nbytes"),
    *("offloaded_nbytes", "all_gathers", "reduce_scatters", "sent_nbytes", "messages"),
)
"""Statistics that are logged as the mean over the optimizer steps since the last log."""
_COUNTED = ("skipped_steps", "diverged_steps", "recorded_steps", "retries")
STANDING = (
    *("device_step_peak_nbytes", "device_total_step_peak_nbytes", "host_step_peak_nbytes", "device_peak_nbytes"),
    *("device_total_peak_nbytes", "host_peak_nbytes", "device_budget_nbytes", "host_budget_nbytes", "chunks_in_margin"),
    *_COUNTED,
)
"""Statistics that are logged as they stand."""
_UNLOGGED = ("steps", "chunk_invalidations", "loading_seconds")
_ADDED: Mapping[type, tuple[tuple[str, str], ...]] = {
    events.ChunkLoaded: (
        *(("chunk_loads", ""), ("host_to_device_nbytes", "nbytes")),
        *(("prefetches", "ahead"), ("loading_seconds", "waited_s")),
    ),
    events.ValueRestored: (("host_to_device_nbytes", "nbytes"),),
    events.ActivationLeft: (("device_to_host_nbytes", "nbytes"), ("offloaded_nbytes", "nbytes")),
    events.ActivationReturned: (("host_to_device_nbytes", "nbytes"),),
    events.GradientStored: (("device_to_host_nbytes", "nbytes"),),
    events.ChunkEvicted: (("chunk_evictions", ""),),
    events.ChunkInvalidated: (("chunk_invalidations", ""),),
    events.ChunkRehomed: (("chunk_moves", ""),),
    events.StepDiverged: (("diverged_steps", ""),),
    events.StepRecorded: (("recorded_steps", ""),),
    events.MicroBatchRepeated: (("retries", ""),),
    events.SlicesGathered: (("all_gathers", ""), ("sent_nbytes", "nbytes")),
    events.SlicesReduced: (("reduce_scatters", ""), ("sent_nbytes", "nbytes")),
    events.MessageExchanged: (("messages", ""),),
}
"""The statistics that each event adds to, and which attribute it adds, or 1."""


class Statistics:
    """Counts bytes and events; ``record`` is a listener of the runtime."""

    def __init__(self) -> None:
        self._begun: float | None = time.perf_counter()
        self._logged: Mapping[str, Any] = {}  # what was known at the last log
        self._sums: dict[str, float] = dict.fromkeys((*PER_STEP, *_COUNTED, *_UNLOGGED), 0)

    def record(self, event: events.Event) -> None:
        """Takes one event. It calls no function of Python, since a step has hundreds of events."""
        sums = self._sums
        for name, attribute in _ADDED.get(type(event), ()):
            sums[name] += getattr(event, attribute) if attribute else 1
        if isinstance(event, events.ChunkVisited):
            sums["chunk_hits"] += event.is_hit
            if event.waited_s is not None:
                sums["late_prefetches"] += 1
                sums["waiting_seconds"] += event.waited_s
        elif isinstance(event, events.ChunkRehomed):
            sums[f"moved_home_to_{'device' if event.to_device else 'host'}_nbytes"] += event.nbytes
        elif isinstance(event, events.StepFinished):
            sums["skipped_steps" if event.skipped else "steps"] += 1
            if self._begun is not None:
                seconds, self._begun = time.perf_counter() - self._begun, None
                logger.info("patrickstar: %.1f s from the engine to the end of the first step", seconds)

    def summary(self) -> dict[str, float]:
        """Bytes moved by direction, and how often each thing happened."""
        return dict(self._sums)

    def since_last(self, stats: Mapping[str, Any]) -> dict[str, float]:
        """All figures, under their names: means over the steps since the last call, and what stands.

        Args:
            stats: The engine's statistics; sizes in bytes.
        """
        before, self._logged = self._logged, stats
        added = {key: stats[key] - before.get(key, 0) for key in (*PER_STEP, "steps", "skipped_steps")}
        steps = max(added["steps"] + added["skipped_steps"], 1)
        means = {PREFIX + key: added[key] / steps for key in PER_STEP}
        return means | {PREFIX + key: stats[key] for key in STANDING}


FEW = (
    *("device_total_step_peak_nbytes", "host_step_peak_nbytes", "host_to_device_nbytes", "device_to_host_nbytes"),
    "waiting_seconds",
)
"""Statistics that are logged where nobody asks for all."""


def few(figures: Mapping[str, float]) -> dict[str, float]:
    """The figures that are logged where nobody asks for all.

    Args:
        figures: All figures.
    """
    return {PREFIX + name: figures[PREFIX + name] for name in FEW}


def brief(figures: Mapping[str, float]) -> dict[str, str]:
    """Two figures for a reader: the device's peak in the last step, and bytes moved per step.

    Args:
        figures: All figures.
    """
    moved = sum(figures[f"{PREFIX}{way}_nbytes"] for way in ("host_to_device", "device_to_host"))
    return {
        f"{PREFIX}device": format_nbytes(int(figures[f"{PREFIX}device_total_step_peak_nbytes"])),
        f"{PREFIX}moved": format_nbytes(int(moved)),
    }
