"""What a training log says of an engine, under documented names."""

from collections.abc import Mapping
from typing import Any

from hf_patrickstar.units import format_nbytes

PREFIX = "patrickstar/"
PER_STEP = (
    *("host_to_device_nbytes", "device_to_host_nbytes", "chunk_loads", "chunk_evictions", "chunk_hits", "prefetches"),
    *("late_prefetches", "waiting_seconds", "chunk_moves", "moved_home_to_device_nbytes", "moved_home_to_host_nbytes"),
    *("offloaded_nbytes", "all_gathers", "reduce_scatters", "sent_nbytes", "messages"),
)
"""Statistics that are logged as the mean over the optimizer steps since the last log."""
STANDING = (
    *("device_step_peak_nbytes", "device_total_step_peak_nbytes", "host_step_peak_nbytes", "device_peak_nbytes"),
    *("device_total_peak_nbytes", "host_peak_nbytes", "device_budget_nbytes", "host_budget_nbytes", "chunks_in_margin"),
    *("skipped_steps", "diverged_steps", "recorded_steps", "retries"),
)
"""Statistics that are logged as they stand."""


def figures_between(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, float]:
    """All figures, under their names: means over the steps between two moments, and what stands.

    Args:
        before: The engine's statistics at the first moment; empty for when it was made.
        now: Those at the second moment; sizes in bytes.
    """
    added = {key: now[key] - before.get(key, 0) for key in (*PER_STEP, "steps", "skipped_steps")}
    steps = max(added["steps"] + added["skipped_steps"], 1)
    means = {PREFIX + key: added[key] / steps for key in PER_STEP}
    return means | {PREFIX + key: now[key] for key in STANDING}


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
