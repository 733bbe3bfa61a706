"""Cores of the host that this process may use."""

import os
import pathlib

CPU_QUOTA_FILE = "/sys/fs/cgroup/cpu.max"


def usable_cores() -> frozenset[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cpu_quota() -> float:
    """How many cores' time the cgroup of this process gets; infinite if it has no limit."""
    try:
        quota, period = pathlib.Path(CPU_QUOTA_FILE).read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return float("inf")


def own_cores(num_sharers: int) -> int:
    """How many cores' time this process gets, at least one.

    Args:
        num_sharers: Processes that share the cores of this one, itself counted.
    """
    return max(1, int(min(len(usable_cores()), cpu_quota())) // num_sharers)
