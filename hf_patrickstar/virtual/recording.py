"""Records a step of training in virtual time, and tells how long it takes on other machines."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.errors import BudgetError, EngineError
from hf_patrickstar.machine import Machine
from hf_patrickstar.memory.operators import without_modes
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.report.survey import Survey
from hf_patrickstar.runtime.chunk import Chunk
from hf_patrickstar.runtime.tracer import Step
from hf_patrickstar.schedule.clock import Timeline
from hf_patrickstar.schedule.known import KnownTraces
from hf_patrickstar.schedule.op_trace import OpTrace
from hf_patrickstar.schedule.plan import Ahead, Plan, chunkable_nbytes
from hf_patrickstar.schedule.replay import replay
from hf_patrickstar.schedule.script import Entry, Kernel, Load, Part
from hf_patrickstar.schedule.simulator import repeated_plans
from hf_patrickstar.schedule.trace import Trace
from hf_patrickstar.tracing.fake import FakeTensors
from hf_patrickstar.units import format_need
from hf_patrickstar.virtual.driver import VirtualDriver
from hf_patrickstar.virtual.garbage import rare_collections
from hf_patrickstar.virtual.playing import Playback
from hf_patrickstar.virtual.timing import OperatorTimes
from hf_patrickstar.virtual.training import ComputeLoss, Training, make_adamw, tensors_in

Notes = Callable[[frozenset[str]], OpTrace | None]
"""Finds what was noted of a micro-batch in which these embeddings are looked up at home, by the name of the weight."""
_MOST_STEPS = 8
_TO_DEVICE, _TO_HOST, _SENT = "host_to_device_nbytes", "device_to_host_nbytes", "sent_nbytes"


@dataclasses.dataclass(frozen=True, slots=True)
class Recording:
    """A step of training by plans, one for each micro-batch: the update of the last one, then forward and backward.

    Attributes:
        script: What the step does beside what its plans move.
        traces: What each micro-batch visits.
        plans: The plan that each followed.
        loads: What it takes to load each chunk.
        timeline: How it went on the machine on which it was recorded.
        world_size: The number of processes.
        num_parameters: Trainable parameters, of all processes.
        num_on_host: Parameters that this process updates on the host.
        host_nbytes: The most bytes on the host so far, workspace included.
        policy: Which chunk leaves.
        prefetch_depth: How many loads may be under way ahead.
        reshard_after_forward: Whether chunks leave when forward has done with them.
        updated: Chunks that the optimizer changes.
        ahead: What its last micro-batch does in backward for the next step.
        static: Chunks that are computed with where they are at home, on the device.
        fixed_nbytes: Bytes of the device that are no copies of chunks: chunks at home there, and scratch space.
        device_nbytes: The most bytes on the device in this step, activations included.
        owners: The most bytes of each kind so far, by tier.
        moved_nbytes: Bytes that crossed in this step, to the device and to the host.
        sent_nbytes: Bytes of parameters and gradients that this process sent to others in this step.
        num_all_parameters: Trainable and frozen ones, of all processes.
        reasons: What was decided when the engine was made, a sentence each.
        layout: ``num_chunks``, ``chunk_numel``, ``chunk_utilisation`` of ``PatrickStarEngine.stats``.
        survey: Which parameter lives where, and what was on the device at each moment of the step.
        known: All traces, of updates too, for a run of the same training.
        measured_on: The machine on which operators of the script were timed, if they were.
        precision: The type of most parameters on the device, without ``torch.``.
    """

    script: tuple[Entry, ...]
    traces: tuple[Trace, ...]
    plans: tuple[Plan, ...]
    loads: tuple[Load, ...]
    timeline: Timeline
    world_size: int
    num_parameters: int
    num_on_host: int
    host_nbytes: int
    policy: str
    prefetch_depth: int
    reshard_after_forward: bool
    updated: frozenset[int]
    ahead: Ahead
    static: frozenset[int]
    fixed_nbytes: int
    device_nbytes: int
    owners: Mapping[Tier, Mapping[str, int]]
    moved_nbytes: tuple[int, int]
    sent_nbytes: int
    num_all_parameters: int
    reasons: tuple[str, ...]
    layout: Mapping[str, Any]
    survey: Survey
    known: KnownTraces
    measured_on: Machine | None
    precision: str

    def plans_for(self, device_nbytes: int, chunk_nbytes: int | None = None) -> list[Plan]:
        """The plans of the micro-batches under another budget of the device; chunks keep their homes.

        Args:
            device_nbytes: Bytes for chunks and non-model data.
            chunk_nbytes: Bytes for chunks at most, or ``None``.

        Raises:
            BudgetError: If the chunks in use at one moment do not fit.
        """
        free = device_nbytes - self.fixed_nbytes
        most = None if chunk_nbytes is None else chunk_nbytes - self.fixed_nbytes
        return repeated_plans(
            self.traces,
            [chunkable_nbytes(trace, free, most) for trace in self.traces],
            self.policy,
            dropped_after=self.updated,
            static=self.static,
            prefetch_depth=self.prefetch_depth,
            reshard_after_forward=self.reshard_after_forward,
            ahead=self.ahead,
        )

    def on(self, machine: Machine, device_nbytes: int | None = None, chunk_nbytes: int | None = None) -> Timeline:
        """The step on a machine.

        Args:
            machine: The machine.
            device_nbytes: Bytes for chunks and non-model data; by default all that the device has.
            chunk_nbytes: Bytes for chunks at most, or ``None``.

        Raises:
            BudgetError: If the chunks in use at one moment do not fit.
            ConfigError: If the machine has fewer devices than there are processes.
        """
        machine.check_processes(self.world_size)
        plans = self.plans_for(machine.device_nbytes if device_nbytes is None else device_nbytes, chunk_nbytes)
        return replay(self._script_for(machine), plans, self.loads, machine)

    def _script_for(self, machine: Machine) -> Sequence[Entry]:
        """The script, without the times of another machine."""
        if self.measured_on is None or dataclasses.replace(self.measured_on, **_sizes_of(machine)) == machine:
            return self.script
        return [
            dataclasses.replace(entry, measured_ns=None) if isinstance(entry, Kernel) else entry
            for entry in self.script
        ]


def _sizes_of(machine: Machine) -> dict[str, Any]:
    return {"device_nbytes": machine.device_nbytes, "host_nbytes": machine.host_nbytes}


def record_step(
    make_model: Callable[[], torch.nn.Module],
    make_inputs: Callable[[], Mapping[str, torch.Tensor]],
    machine: Machine,
    *,
    config: Mapping[str, Any],
    make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    compute_loss: ComputeLoss = lambda model, inputs: model(**inputs).loss,
    max_norm: float | None = 1.0,
    num_micro_batches: int = 1,
    world_size: int = 1,
    times: OperatorTimes | None = None,
    notes: Notes | None = None,
) -> Recording:
    """Trains with tensors that have no bytes until a step follows plans and chunks have their homes; records that one.

    Args:
        make_model: Makes the model; called under fake tensors. By default it must return an object with a ``loss``.
        make_inputs: Makes a micro-batch, likewise.
        machine: The machine; its device memory is the budget unless ``config`` says otherwise.
        config: Settings of the engine.
        make_optimizer: Makes an optimizer over parameters; by default torch's fused AdamW.
        compute_loss: Computes the loss of a micro-batch.
        max_norm: For clipping; ``None`` for none.
        num_micro_batches: How many make a step.
        world_size: How many processes train together, each on a device of the machine; see [Note: virtual processes].
        times: What operators take, if the machine is the one at hand; else its rates say it.
        notes: Finds what was noted of a micro-batch of the same training, which then need not run; the recording is
            the same. An error for want of memory differs in what it advises: only a model that runs foresees all that
            it needs.

    Raises:
        ConfigError: If the machine has fewer devices than there are processes.
        BudgetError: If a budget is too small, or so small that there is no plan for a step.
        EngineError: If no step follows plans: data decides what this model does.
    """
    machine.check_processes(world_size)
    training = Training(make_model, make_inputs, make_optimizer or make_adamw, compute_loss, config, num_micro_batches)
    driver = VirtualDriver(machine, times)
    with FakeTensors(), driver.watching():
        with rare_collections():
            engine = training.make_engine(PatrickStarEngine, driver, world_size)
        try:
            return _record(engine, training, driver, notes, max_norm)
        finally:
            engine.manager.phases.unwind()  # takes the meter's mode off before the modes around it


def _record(
    engine: PatrickStarEngine,
    training: Training,
    driver: VirtualDriver,
    notes: Notes | None,
    max_norm: float | None,
) -> Recording:
    num_to_pass = _num_to_pass(engine)
    for number in range(_MOST_STEPS + 1):
        before = engine.stats()
        driver.begin(engine.manager.chunks)
        if number:
            with rare_collections():
                _update(engine, max_norm, driver)
        steps = _train(engine, training, driver, notes)
        timeline = driver.end()
        after = engine.stats()
        is_recorded = after["recorded_steps"] > before["recorded_steps"]
        num_to_pass -= not is_recorded and all(step and step.cursor and step.plan for step in steps)
        if num_to_pass < 0:
            return _note(engine, driver, steps, timeline, before)
    raise _refusal(engine, steps, is_repeated=after["retries"] > before["retries"])


def _num_to_pass(engine: PatrickStarEngine) -> int:
    """Steps by plans before the one that counts.

    If chunks are updated in backward, its update is the rest of those, and it begins with chunks that the one before
    has carried over. The first update of an optimizer that makes its own states runs beside nothing.
    """
    makes_states = any(optimizer.kernel.makes_states for optimizer in engine.optimizers)
    return 2 if engine.config.overlap_optimizer == "backward" else int(makes_states)


def _refusal(engine: PatrickStarEngine, steps: Sequence[Step | None], *, is_repeated: bool) -> Exception:
    """Why no step followed plans, after so many; ``is_repeated``: whether the last one ran out of memory at first."""
    if is_repeated:  # and was recorded anew, which is no more careful than its operators are small
        return BudgetError(
            f"every step runs out of memory within {format_need(engine.ledger.limit(Tier.DEVICE))} of the device, and "
            "would be done twice; give a little more device memory, or smaller batches"
        )
    if all(step and step.cursor for step in steps):  # they would follow their traces, for which there are no plans
        return BudgetError(
            f"there is no plan for a step within {format_need(engine.ledger.limit(Tier.DEVICE))} of the device, and "
            "chunks would move on demand; give a little more device memory, or smaller batches"
        )
    return EngineError(
        f"none of {_MOST_STEPS} steps followed plans: what this model does depends on its data; train a few steps "
        "instead and read engine.survey()"
    )


def _note(
    engine: PatrickStarEngine,
    driver: VirtualDriver,
    steps: Sequence[Step | None],
    timeline: Timeline,
    before: Mapping[str, Any],
) -> Recording:
    stats, pool, tracer = engine.stats(), engine.resources.pool, engine.manager.tracer
    chunks, copies = engine.manager.chunks, engine.manager.copies
    on_host = [chunk for chunk in chunks if chunk.home is Tier.HOST]
    followed = [(step.cursor.trace, step.plan) for step in steps if step and step.cursor and step.plan]
    return Recording(
        tuple(driver.script),
        tuple(trace for trace, _ in followed),
        tuple(plan for _, plan in followed),
        tuple(_load_of(chunk) for chunk in chunks),
        timeline,
        engine.collectives.world_size,
        sum(parameter.numel() for parameter in engine.model.parameters() if parameter.requires_grad),
        sum(tensor.own_numel for chunk in on_host if chunk.spec.is_updated for tensor in chunk.owned),
        stats["host_peak_nbytes"],
        engine.config.eviction,
        engine.prefetch_depth,
        engine.config.reshard_after_forward and engine.collectives.world_size > 1,
        frozenset(chunk.spec.index for chunk in chunks if chunk.spec.is_updated),
        followed[-1][1].ahead,
        frozenset(chunk.spec.index for chunk in chunks if chunk.is_static),
        pool.in_use(Tier.DEVICE) - sum(chunk.copy_nbytes for chunk in copies),
        stats["device_total_step_peak_nbytes"],
        {tier: engine.ledger.owner_peaks(tier) for tier in Tier},
        (stats[_TO_DEVICE] - before[_TO_DEVICE], stats[_TO_HOST] - before[_TO_HOST]),
        stats[_SENT] - before[_SENT],
        sum(parameter.numel() for parameter in engine.model.parameters()),
        engine.reasons,
        {name: stats[name] for name in ("num_chunks", "chunk_numel", "chunk_utilisation")},
        engine.survey(),
        KnownTraces(tracer.known.key, dict(tracer.traces), engine.manager.placement.lookups),
        driver.measured_on,
        str(engine.dtype).removeprefix("torch."),
    )


def _load_of(chunk: Chunk) -> Load:
    nbytes, is_here = chunk.param_nbytes, chunk.home is Tier.DEVICE
    return Load(nbytes, (chunk.spec.world_size - 1) * nbytes, is_here)


def _update(engine: PatrickStarEngine, max_norm: float | None, driver: VirtualDriver) -> None:
    """The optimizer's step."""
    assert engine.optimizer is not None
    driver.begin_part(Part.UPDATE)
    if max_norm is not None:
        engine.optimizer.clip_grad_norm_(None, max_norm)
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def _train(
    engine: PatrickStarEngine, training: Training, driver: VirtualDriver, notes: Notes | None
) -> list[Step | None]:
    """Forward and backward of all micro-batches; returns what the engine knows of each."""
    batches = [training.make_inputs() for _ in range(training.num_micro_batches)]  # as the Trainer reads them
    steps: list[Step | None] = []
    for inputs in batches:  # as the Trainer does, which repeats what has no room
        steps.append(engine.attempt(functools.partial(_run, engine, training, driver, notes, inputs)))
    return steps


def _run(
    engine: PatrickStarEngine,
    training: Training,
    driver: VirtualDriver,
    notes: Notes | None,
    inputs: Mapping[str, Any],
) -> Step | None:
    """Runs a micro-batch, or tells the engine what one does."""
    looked_up = frozenset(tensor.spec.name for tensor in engine.manager.tensors if tensor.is_cpu_embedding)
    micro_batch = None
    if notes is not None:
        with without_modes():  # a model that runs for them costs this engine nothing
            micro_batch = notes(looked_up)
    if micro_batch is None:
        return training.run_micro_batch(engine, driver, inputs)
    with rare_collections():
        return Playback(micro_batch, engine, driver, tensors_in(inputs)).run()
