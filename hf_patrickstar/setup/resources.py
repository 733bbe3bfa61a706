"""What an engine runs on: a device, budgets, memory, and other processes."""

import dataclasses
import logging
import zlib
from collections.abc import Callable
from typing import Any

import torch

from hf_patrickstar.common.cores import own_cores
from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.counts import Counts
from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.machine import ACCELERATOR, CPU_TIER, Machine, machine_of
from hf_patrickstar.memory.compute_device import (
    can_pin_memory,
    choose_segments,
    device_name,
    find_device,
    is_accelerator,
)
from hf_patrickstar.memory.disk import Disk, resolve_disk_budget
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.meters import AllocatorMeter, Meter, StorageMeter
from hf_patrickstar.memory.pinning import make_pinning
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.streams import DeviceStreams, Streams, make_streams
from hf_patrickstar.memory.tiers import Tier, resolve_budgets

logger = logging.getLogger(__name__)

WARMUP_FRACTION = 0.8
"""Part of the device budget that copies of chunks keep to while a step is recorded.

The rest is for activations that grow between two visits (PatrickStar section 8.1). Nothing is refused for its sake.
"""
SHARE_IN_FLIGHT = 64
"""Gradients in flight hold at most this part of the device budget."""


@dataclasses.dataclass(frozen=True, slots=True)
class Resources:
    """What an engine runs on.

    Attributes:
        device: The compute device.
        collectives: The processes that share the model data.
        meter: Measures the non-model bytes on the device.
        ledger: The budgets.
        pool: Allocates payloads.
        streams: Copies between host and device.
        machine: Its rates decide what takes the least time.
    """

    device: torch.device
    collectives: Collectives
    meter: Meter
    ledger: Ledger
    pool: PayloadPool
    streams: Streams
    machine: Machine

    @property
    def has_lanes(self) -> bool:
        """Whether copies and updates run beside computation, also on a device that is only imagined."""
        return isinstance(self.streams, DeviceStreams) and self.machine.has_accelerator

    @property
    def is_metered(self) -> bool:
        """Whether non-model data counts against the device budget."""
        return self.meter.measures

    @classmethod
    def find(
        cls,
        config: PatrickStarConfig,
        device: torch.device | str | Streams | None,
        process_group: Any,
        make_room: Callable[[], None],
        counts: Counts,
    ) -> "Resources":
        """Finds the device, the other processes and the budgets; no payload is allocated yet.

        Args:
            config: Settings.
            device: The compute device; by default the accelerator of this machine if there is one, else the CPU tier.
                Or streams that stand in for those of a device.
            process_group: The processes; by default the default group of ``torch.distributed``, if there is one. Or
                a function of the device, the counts of collectives, and ``reduce_dtype``, which
                makes the collectives of simulated processes.
            make_room: Makes room on the CPU tier when the measured bytes reach its budget.
            counts: Counts collectives.

        Raises:
            ConfigError: If a setting cannot work here.
        """
        if device is None or isinstance(device, str | torch.device):
            streams = make_streams(find_device(device))
        else:
            streams = device
        found = streams.device
        segment, said = choose_segments(found)
        if said is not None:
            logger.info("patrickstar: %s", said)
        if callable(process_group):
            collectives = process_group(found, counts, config.reduce_dtype)
        else:
            collectives = Collectives.connect(process_group, found, config.process_wait_s, counts, config.reduce_dtype)
        budgets = resolve_budgets(found, config.device_budget, config.host_budget, collectives.local_world_size)
        if (paths := config.disk_path) is not None:
            budgets[Tier.DISK] = resolve_disk_budget(paths, config.disk_budget, collectives.local_world_size)
        streams.hold_at_most(budgets[Tier.DEVICE] // SHARE_IN_FLIGHT)
        meter: Meter
        if is_accelerator(found):
            meter = AllocatorMeter(found)
        elif config.device_budget == "auto":
            meter = Meter()  # both tiers are the machine's memory, which is not measured
        else:
            meter = StorageMeter(lambda key: pool.owns(key), make_room)
        fraction = WARMUP_FRACTION if meter.measures else 1.0
        chunk_budget = None if config.chunk_budget == "auto" else int(config.chunk_budget)
        asked = {Tier.DEVICE: config.device_budget, Tier.HOST: config.host_budget, Tier.DISK: config.disk_budget}
        of_machine = [tier for tier, setting in asked.items() if setting == "auto"]
        ledger = Ledger(budgets, meter.live, fraction, chunk_budget, of_machine)
        ledger.is_cautious = False  # no step runs, and nothing is refused for caution
        pinned = config.pin_memory if config.pin_memory != "auto" else is_accelerator(found)
        pinning = None
        if pinned and can_pin_memory():
            pinning, how = make_pinning(found)
            logger.info("patrickstar: pin_memory=%s: page-locked memory is %s", config.pin_memory, how)
        pool = PayloadPool(ledger, found, pinning, segment)
        pool.disk = None if paths is None else Disk(paths, counts)
        return cls(found, collectives, meter, ledger, pool, streams, _choose_machine(config, found, collectives))


def _choose_machine(config: PatrickStarConfig, device: torch.device, collectives: Collectives) -> Machine:
    """The machine of the settings, or the one that seems to be here; the same on all processes."""
    if isinstance(config.machine, Machine):
        return _part(config.machine, collectives)
    return _find_machine(device, collectives) if is_accelerator(device) else _part(CPU_TIER, collectives)


def _part(machine: Machine, collectives: Collectives) -> Machine:
    return machine if machine.num_devices >= collectives.world_size else machine.shared_by(collectives.world_size)


def _find_machine(device: torch.device, collectives: Collectives) -> Machine:
    """The known machine with this device, limited to the cores of the process that has the fewest."""
    name = device_name(device)
    machine = machine_of(name)
    own = [zlib.crc32(machine.name.encode()), own_cores(collectives.num_core_sharers)]
    checksums, cores = zip(*collectives.exchange(own, "compares devices and cores"), strict=True)
    if len(set(checksums)) > 1:
        machine, name = ACCELERATOR, f"{name}; other processes have other devices"
    machine = _part(machine, collectives)
    bounded = machine.with_cores(min(cores))
    bound = "" if bounded is machine else f", bounded by {bounded.num_cores} cores of {machine.num_cores}"
    logger.info("patrickstar: machine=auto: decisions follow the rates of '%s' (%s)%s", machine.name, name, bound)
    return bounded
