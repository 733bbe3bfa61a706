"""What an engine runs on: a device, budgets, memory, and other processes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.meters import CudaMeter, Meter, StorageMeter, UnmeteredTier
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.tiers import Tier, resolve_budgets
from hf_patrickstar.runtime.collectives import Collectives
from hf_patrickstar.runtime.vigil import Patience


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What an engine runs on.

    Attributes:
        device: The compute device.
        collectives: The processes that share the model data.
        meter: Measures what else than chunks is on the device.
        ledger: The budgets.
        pool: Where payloads come from.
    """

    device: torch.device
    collectives: Collectives
    meter: Meter
    ledger: Ledger
    pool: PayloadPool

    @property
    def is_metered(self) -> bool:
        """Whether non-model data counts against the device budget."""
        return not isinstance(self.meter, UnmeteredTier)

    @classmethod
    def find(
        cls,
        config: PatrickStarConfig,
        device: torch.device | str | None,
        process_group: Any,
        relieve: Callable[[], None],
    ) -> "Machine":
        """Finds out what there is; nothing is allocated yet.

        Args:
            config: Settings.
            device: The compute device; by default the current CUDA device if there is one, else the CPU tier.
            process_group: The processes; by default the default group of ``torch.distributed``, if there is one.
            relieve: Makes room on the CPU tier when what is measured there comes to its budget.

        Raises:
            ConfigError: If a setting cannot work here.
        """
        device = _resolve_device(device)
        collectives = Collectives.connect(process_group, device, Patience.of(config.process_wait_s))
        budgets = resolve_budgets(device, config.device_budget, config.host_budget, collectives.local_world_size)
        meter: Meter
        if device.type == "cuda":
            meter = CudaMeter(device)
        elif config.device_budget == "auto":
            meter = UnmeteredTier()  # both tiers are the machine's memory, and the system watches over that
        else:
            meter = StorageMeter(lambda key: pool.owns(key), relieve)
        fraction = 1.0 if isinstance(meter, UnmeteredTier) else config.warmup_fraction
        chunk_budget = None if config.chunk_budget == "auto" else int(config.chunk_budget)
        asked = {Tier.DEVICE: config.device_budget, Tier.HOST: config.host_budget}
        of_machine = [tier for tier, setting in asked.items() if setting == "auto"]
        ledger = Ledger(budgets, meter.live, fraction, chunk_budget, of_machine)
        ledger.is_cautious = device.type != "cpu"
        pinned = config.pin_memory if config.pin_memory != "auto" else device.type == "cuda"
        pool = PayloadPool(ledger, device, bool(pinned) and torch.cuda.is_available())
        return cls(device, collectives, meter, ledger, pool)


def _resolve_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device '{device}': the compute device must be a CUDA device or the CPU")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device
