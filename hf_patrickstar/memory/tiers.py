"""The memory spaces, and how large they are on this machine."""

import contextlib
import enum
import pathlib
import re

import psutil
import torch

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.memory.compute_device import memory_info, reserved_nbytes

DEVICE_SHARE = 0.95
HOST_SHARE = 0.90
CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class Tier(enum.Enum):
    """A memory space with a byte budget.

    ``DEVICE`` is the compute tier: an accelerator's memory, or, on a machine without one, a budgeted part of CPU
    memory that chunks are really copied into and out of. ``DISK`` is for masters and optimizer states alone, of chunks
    that are at home on the host.
    """

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"

    __hash__ = object.__hash__  # members are compared by identity; Enum's own is a Python function


def available_host_nbytes() -> int:
    """Bytes of host memory that this process can still take, cgroup limits respected."""
    available = psutil.virtual_memory().available
    for limit_file, usage_file in CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            limit, usage = (int(pathlib.Path(file).read_text()) for file in (limit_file, usage_file))
            reclaimable = _inactive_file_nbytes(pathlib.Path(limit_file).with_name("memory.stat"))
            available = min(available, max(limit - usage + reclaimable, 0))
    return int(available)


def total_host_nbytes() -> int:
    """Bytes of host memory that this process could take at most, cgroup limits respected."""
    total = psutil.virtual_memory().total
    for limit_file, _ in CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int(pathlib.Path(limit_file).read_text()))
    return int(total)


def _inactive_file_nbytes(stat_file: pathlib.Path) -> int:
    """Bytes of page cache in a cgroup that the kernel gives up before it refuses memory (a checkpoint read, say)."""
    with contextlib.suppress(OSError, ValueError):
        found = re.search(r"^(?:total_)?inactive_file (\d+)$", stat_file.read_text(), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


def resolve_budgets(
    device: torch.device, device_budget: int | str, host_budget: int | str, local_world_size: int = 1
) -> dict[Tier, int]:
    """Turns ``"auto"`` into bytes.

    Args:
        device: The compute device.
        device_budget: Bytes or ``"auto"``.
        host_budget: Bytes or ``"auto"``.
        local_world_size: Processes on this machine, which share its memory; ``"auto"`` is the part of one.

    Returns:
        The budget of each tier, in bytes.

    Raises:
        ConfigError: If the device budget is larger than the device.
    """
    share = int(available_host_nbytes() * HOST_SHARE / local_world_size)
    compute = share if device_budget == "auto" else int(device_budget)
    if device.type != "cpu":
        free, total = memory_info(device)
        if device_budget == "auto":
            compute = int((free + reserved_nbytes(device)) * DEVICE_SHARE)
        elif compute > total:
            raise ConfigError(
                f"device_budget: {device_budget} bytes asked for, {device} has {total} bytes; set device_budget to at "
                f"most {total} bytes, or 'auto', which takes what is free"
            )
    return {Tier.DEVICE: compute, Tier.HOST: share if host_budget == "auto" else int(host_budget)}
