"""What an engine would run on: a machine, and processes, that are not here. Nothing is allocated, moved or sent."""

import functools
import types
from typing import Any

import torch

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.counts import Counts
from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.machine import CPU_TIER, Machine
from hf_patrickstar.memory.streams import DeviceStreams
from hf_patrickstar.setup.resources import Resources
from hf_patrickstar.units import format_budget


def settings_for(machine: Machine) -> dict[str, Any]:
    """Settings of an engine on a machine.

    Args:
        machine: The machine.
    """
    return {
        "device_budget": format_budget(machine.device_nbytes),
        "host_budget": format_budget(machine.host_nbytes),
        **({"disk_path": "a drive", "disk_budget": format_budget(machine.disk_nbytes)} if machine.disk_nbytes else {}),
        "pin_memory": False,  # what page-locking rounds up is not known of another machine
        # Without an accelerator it is as on the CPU tier, whose updates end before ``step()`` returns.
        "machine": machine if machine.has_accelerator else CPU_TIER,
        "overlap_optimizer": machine.has_accelerator,
    }


def resources_of(machine: Machine, config: PatrickStarConfig, world_size: int) -> Resources:
    """What decisions ask of a machine and of processes.

    Args:
        machine: The machine.
        config: The settings.
        world_size: How many processes train together.
    """
    connect = functools.partial(_SimulatedCollectives, world_size, machine)
    no_driver: Any = types.SimpleNamespace(new_stream=lambda: None)
    streams = DeviceStreams(torch.device("cpu"), no_driver)
    if not machine.has_accelerator:
        streams.hold_at_most(0)  # there a gradient is at home when its copy is started
    return Resources.find(config, streams, connect, lambda: None, Counts())


class _SimulatedCollectives(Collectives):
    """Those of the processes of a machine that is not here: each says what this one says."""

    def __init__(
        self, world_size: int, machine: Machine, device: torch.device, counts: Counts, reduce_dtype: str
    ) -> None:
        super().__init__(0, world_size, device, reduce_dtype=reduce_dtype)
        self._is_gloo = not machine.has_accelerator

    def exchange(self, value: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """See ``Collectives``."""
        return [value] * self.world_size
