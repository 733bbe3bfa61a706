"""What a training log says of the engine: figures under documented names, and the few that a console shows."""

from collections.abc import Mapping
from typing import Any

from hf_patrickstar.units import format_nbytes

PREFIX = "patrickstar/"
PER_STEP = (
    "host_to_device_nbytes",
    "device_to_host_nbytes",
    "chunk_loads",
    "chunk_evictions",
    "chunk_hits",
    "prefetches",
    "late_prefetches",
    "waiting_seconds",
    "chunk_moves",
    "moved_home_to_device_nbytes",
    "moved_home_to_host_nbytes",
    "all_gathers",
    "reduce_scatters",
    "sent_nbytes",
    "messages",
)
"""Statistics that are logged as the mean over the optimizer steps since the last log."""
STANDING = (
    "device_step_peak_nbytes",
    "device_total_step_peak_nbytes",
    "host_step_peak_nbytes",
    "device_peak_nbytes",
    "device_total_peak_nbytes",
    "host_peak_nbytes",
    "device_budget_nbytes",
    "host_budget_nbytes",
    "skipped_steps",
    "diverged_steps",
    "recorded_steps",
    "retries",
    "chunks_in_margin",
)
"""Statistics that are logged as they stand."""


class Figures:
    """Makes figures of an engine's statistics; one for each engine, since it knows what was logged last."""

    def __init__(self) -> None:
        self._before: Mapping[str, Any] = {}

    def since_last(self, stats: Mapping[str, Any]) -> dict[str, float]:
        """All figures, under their names: means over the steps since the last call, and what stands.

        Args:
            stats: The engine's statistics; sizes in bytes.
        """
        before, self._before = self._before, stats
        steps = max(sum(stats[key] - before.get(key, 0) for key in ("steps", "skipped_steps")), 1)
        means = {PREFIX + key: (stats[key] - before.get(key, 0)) / steps for key in PER_STEP}
        return means | {PREFIX + key: stats[key] for key in STANDING}


def brief(figures: Mapping[str, float]) -> dict[str, str]:
    """Three figures for a reader: the device's peak in the last step, bytes moved and seconds waited per step.

    Args:
        figures: All figures.
    """
    moved = sum(figures[f"{PREFIX}{way}_nbytes"] for way in ("host_to_device", "device_to_host"))
    return {
        f"{PREFIX}device": format_nbytes(int(figures[f"{PREFIX}device_total_step_peak_nbytes"])),
        f"{PREFIX}moved": format_nbytes(int(moved)),
        f"{PREFIX}waited": f"{figures[f'{PREFIX}waiting_seconds']:.3f} s",
    }
