"""What is trained in virtual time, and how an engine of it is made."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.machine import CPU_TIER, Machine
from hf_patrickstar.memory.streams import DeviceStreams
from hf_patrickstar.runtime.tracer import Step
from hf_patrickstar.schedule.script import Part
from hf_patrickstar.tracing.micro_batch import MicroBatch
from hf_patrickstar.virtual.collectives import VirtualPeers
from hf_patrickstar.virtual.driver import VirtualDriver

ComputeLoss = Callable[[Any, Mapping[str, Any]], torch.Tensor]
"""Computes the loss of a micro-batch with the model."""


@dataclasses.dataclass(frozen=True, slots=True)
class Training:
    """What is trained.

    Attributes:
        make_model: Makes the model; called under fake tensors.
        make_inputs: Makes a micro-batch, likewise.
        make_optimizer: Makes an optimizer over parameters.
        compute_loss: Computes the loss of a micro-batch.
        config: Settings of the engine.
        num_micro_batches: Micro-batches of a step.
    """

    make_model: Callable[[], torch.nn.Module]
    make_inputs: Callable[[], Mapping[str, torch.Tensor]]
    make_optimizer: Callable[[Any], torch.optim.Optimizer]
    compute_loss: ComputeLoss
    config: Mapping[str, Any]
    num_micro_batches: int

    @property
    def micro_batch(self) -> MicroBatch:
        """What of it no engine changes."""
        made = self.make_model, self.make_inputs, self.compute_loss, self.config
        return MicroBatch(*made, num_micro_batches=self.num_micro_batches)

    def make_engine(
        self,
        make: Callable[..., PatrickStarEngine],
        driver: VirtualDriver,
        world_size: int = 1,
        settings: Mapping[str, Any] | None = None,
    ) -> PatrickStarEngine:
        """Makes an engine on a machine that is not here; called under fake tensors.

        Args:
            make: Makes it, as ``PatrickStarEngine`` does.
            driver: Below its streams; has the machine.
            world_size: How many processes train together.
            settings: What takes the place of settings.
        """
        model = self.make_model()
        engine = make(
            model,
            {**_settings_for(driver.machine), **self.config, **(settings or {}), "reuse_plan": False},
            self.make_optimizer(model.parameters()),
            device=_streams_of(driver),
            gradient_accumulation_steps=self.num_micro_batches,
            listener=driver.note_event,
            process_group=VirtualPeers(driver, world_size),
        )
        drop_gradients(engine)  # tells the engine that nobody wants gradients after a step
        return engine

    def run_micro_batch(
        self, engine: PatrickStarEngine, driver: VirtualDriver, inputs: Mapping[str, Any]
    ) -> Step | None:
        """Forward and backward of a micro-batch.

        Args:
            engine: The engine.
            driver: Below its streams.
            inputs: The micro-batch.

        Returns:
            What the engine knows of the step, as its forward ends.
        """
        driver.begin_part(Part.FORWARD)
        loss = self.compute_loss(engine.model, inputs)
        step = engine.manager.tracer.step
        driver.begin_part(Part.BACKWARD)
        self.micro_batch.run_backward(loss)
        return step


def tensors_in(inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors of a batch, in order."""
    return [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]


def drop_gradients(engine: PatrickStarEngine) -> None:
    """Drops all gradients."""
    assert engine.optimizer is not None
    engine.optimizer.zero_grad()


def make_adamw(parameters: Any) -> torch.optim.Optimizer:
    """Makes the optimizer that is trained with if nothing else is said."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def _streams_of(driver: VirtualDriver) -> DeviceStreams:
    streams = DeviceStreams(torch.device("cpu"), driver)
    if not driver.machine.has_accelerator:
        streams.hold_at_most(0)  # there a gradient is at home when its copy is started
    return streams


def _settings_for(machine: Machine) -> dict[str, Any]:
    return {
        "device_budget": machine.device_nbytes,
        "host_budget": machine.host_nbytes,
        "pin_memory": False,  # the driver takes all memory of the pool for pinned
        # Without an accelerator it is as on the CPU tier, whose updates end before ``step()`` returns.
        "machine": machine if machine.has_accelerator else CPU_TIER,
        "overlap_optimizer": machine.has_accelerator,
    }
