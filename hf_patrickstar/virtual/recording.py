"""Records a step of training in virtual time, and tells how long it takes on other machines."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.errors import EngineError
from hf_patrickstar.memory.streams import DeviceStreams
from hf_patrickstar.runtime.tracer import Step
from hf_patrickstar.schedule.clock import Timeline
from hf_patrickstar.schedule.machine import Machine
from hf_patrickstar.schedule.plan import Plan, chunkable_nbytes
from hf_patrickstar.schedule.replay import replay
from hf_patrickstar.schedule.script import Entry, Part
from hf_patrickstar.schedule.simulator import repeated_plan
from hf_patrickstar.schedule.trace import Trace
from hf_patrickstar.virtual.driver import VirtualDriver

_MOST_STEPS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Recording:
    """A step of training that follows a plan.

    Attributes:
        script: What the step does beside what its plan moves.
        trace: What it visits.
        plan: The plan that it followed.
        timeline: How it went on the machine on which it was recorded.
        num_parameters: Trainable parameters.
        host_nbytes: The most bytes on the host so far, workspace included.
        policy: Which chunk leaves.
        prefetch_depth: How many loads may be under way ahead.
        updated: Chunks that the optimizer changes.
        static: Chunks that are at home on the device.
        static_nbytes: Bytes of these, over all lists.
    """

    script: tuple[Entry, ...]
    trace: Trace
    plan: Plan
    timeline: Timeline
    num_parameters: int
    host_nbytes: int
    policy: str
    prefetch_depth: int
    updated: frozenset[int]
    static: frozenset[int]
    static_nbytes: int

    def plan_for(self, device_nbytes: int, chunk_nbytes: int | None = None) -> Plan:
        """The plan under another budget of the device; chunks keep their homes.

        Args:
            device_nbytes: Bytes for chunks and non-model data.
            chunk_nbytes: Bytes for moving chunks at most, or ``None``.

        Raises:
            BudgetError: If the chunks in use at one moment do not fit.
        """
        return repeated_plan(
            self.trace,
            chunkable_nbytes(self.trace, device_nbytes - self.static_nbytes, chunk_nbytes),
            self.policy,
            dropped_after=self.updated,
            static=self.static,
            prefetch_depth=self.prefetch_depth,
        )

    def on(self, machine: Machine, device_nbytes: int | None = None, chunk_nbytes: int | None = None) -> Timeline:
        """The step on a machine.

        Args:
            machine: The machine.
            device_nbytes: Bytes for chunks and non-model data; by default all that the device has.
            chunk_nbytes: Bytes for moving chunks at most, or ``None``.

        Raises:
            BudgetError: If the chunks in use at one moment do not fit.
        """
        plan = self.plan_for(machine.device_nbytes if device_nbytes is None else device_nbytes, chunk_nbytes)
        return replay(self.script, plan, self.trace.chunk_nbytes, machine)


def record_step(
    make_model: Callable[[], torch.nn.Module],
    make_inputs: Callable[[], Mapping[str, torch.Tensor]],
    machine: Machine,
    *,
    config: Mapping[str, Any],
    make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    max_norm: float | None = 1.0,
) -> Recording:
    """Trains with tensors that have no bytes until a step follows a plan and chunks have their homes; records that one.

    Args:
        make_model: Makes the model; called under fake tensors. The model must return an object with a ``loss``.
        make_inputs: Makes a batch, likewise.
        machine: The machine; its device memory is the budget unless ``config`` says otherwise.
        config: Settings of the engine.
        make_optimizer: Makes an optimizer over parameters; by default torch's fused AdamW.
        max_norm: For clipping; ``None`` for none.

    Raises:
        EngineError: If no step follows a plan: data decides what this model does.
    """
    driver = VirtualDriver(machine)
    settings = {
        "device_budget": machine.device_nbytes,
        "host_budget": machine.host_nbytes,
        "pin_memory": False,  # the driver takes all memory of the pool for pinned
        **config,
    }
    with FakeTensorMode(), driver.watching():
        model = make_model()
        optimizer = (make_optimizer or _make_adamw)(model.parameters())
        streams = DeviceStreams(torch.device("cpu"), driver)
        engine = PatrickStarEngine(model, settings, optimizer, device=streams, listener=driver.note_event)
        for _ in range(_MOST_STEPS):
            num_recorded = engine.stats()["recorded_steps"]
            inputs = make_inputs()
            driver.begin(engine.manager.chunks)
            step = _train(engine, model, inputs, max_norm, driver)
            timeline = driver.end()
            is_known = engine.stats()["recorded_steps"] == num_recorded
            if is_known and step is not None and step.plan is not None and step.cursor is not None:
                break
        else:
            raise EngineError(f"none of {_MOST_STEPS} steps followed a plan: what this model does depends on its data")
    settled = engine.config
    static = [chunk for chunk in engine.manager.chunks if chunk.is_static]
    return Recording(
        tuple(driver.script),
        step.cursor.trace,
        step.plan,
        timeline,
        sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        engine.stats()["host_peak_nbytes"],
        settled.eviction,
        settled.prefetch_depth,
        step.dropped_after,
        frozenset(chunk.spec.index for chunk in static),
        sum(payload.nbytes for chunk in static for payload in chunk.lists.values()),
    )


def _make_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def _train(
    engine: PatrickStarEngine,
    model: torch.nn.Module,
    inputs: Mapping[str, torch.Tensor],
    max_norm: float | None,
    driver: VirtualDriver,
) -> Step | None:
    """A step of training; returns what the engine knows of its forward and backward."""
    assert engine.optimizer is not None
    engine.optimizer.zero_grad()  # tells the engine that nobody wants gradients after a step
    driver.begin_part(Part.FORWARD)
    loss = model(**inputs).loss
    step = engine.manager.tracer.step
    driver.begin_part(Part.BACKWARD)
    loss.backward()
    driver.begin_part(Part.UPDATE)
    if max_norm is not None:
        engine.optimizer.clip_grad_norm_(None, max_norm)
    engine.optimizer.step()
    return step
