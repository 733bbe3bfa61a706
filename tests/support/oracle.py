"""What is trained: by an engine in virtual time, and by the simulator."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from support import inside
from support.models import make_batch, make_model
from support.virtual_machine import VirtualDriver, VirtualPeers

from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.machine import CPU_TIER, Machine
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.pool import CACHE_OWNER
from hf_patrickstar.memory.streams import DeviceStreams
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.optim.torch_kernel import OWN_STATE
from hf_patrickstar.planner.planning import make_adamw
from hf_patrickstar.planner.simulation import Ran, Simulation, Trained, simulate
from hf_patrickstar.runtime.steps import Step
from hf_patrickstar.schedule.clock import Timeline
from hf_patrickstar.schedule.move_plan import MovePlan
from hf_patrickstar.schedule.op_trace import OpTrace
from hf_patrickstar.schedule.trace import KnownTraces, Trace
from hf_patrickstar.tracing.fake import FakeTensors
from hf_patrickstar.tracing.micro_batch import MicroBatch, trace
from hf_patrickstar.tracing.recorder import Setting

SMALL = {"dtype": "bf16", "chunk_numel": 700, "device_budget": "1GiB"}
_MOST_STEPS = 8


def compute_loss(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The loss of a model of transformers."""
    return model(**inputs).loss


@dataclasses.dataclass(frozen=True)
class Training:
    """What is trained; see ``Trained``."""

    make_model: Callable[[], torch.nn.Module]
    make_inputs: Callable[[], Mapping[str, torch.Tensor]]
    config: Mapping[str, Any]
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = make_adamw
    compute_loss: Callable[[Any, Mapping[str, Any]], torch.Tensor] = compute_loss
    num_micro_batches: int = 1
    max_norm: float | None = 1.0
    world_size: int = 1

    @property
    def micro_batch(self) -> MicroBatch:
        """What of it no engine changes."""
        made = self.make_model, self.make_inputs, self.compute_loss, self.config
        return MicroBatch(*made, num_micro_batches=self.num_micro_batches)

    def trace(self, machine: Machine, looked_up: frozenset[str] = frozenset()) -> OpTrace | None:
        """What a micro-batch does, or ``None`` if that cannot be told."""
        with FakeTensors():
            return trace(self.micro_batch, Setting(looked_up, machine.has_accelerator))

    def simulate(self, machine: Machine, ran: Ran | None = None) -> Simulation:
        """The step as plans have it, or as a run has chosen."""

        def ops_of(looked_up: frozenset[str]) -> OpTrace:
            found = self.trace(machine, looked_up)
            assert found is not None
            return found

        made = self.make_model, self.make_optimizer, self.config
        return simulate(Trained(*made, self.num_micro_batches, self.max_norm, self.world_size), machine, ops_of, ran)


def make_training(
    name: str = "gpt2",
    checkpointing: bool = False,
    change: Callable[[torch.nn.Module], object] = lambda model: None,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = make_adamw,
    num_micro_batches: int = 1,
    max_norm: float | None = 1.0,
    world_size: int = 1,
    **settings: Any,
) -> Training:
    """The training of a small model of ``models.py``."""

    def make() -> torch.nn.Module:
        model = make_model(name).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        change(model)
        return model

    def make_inputs() -> Mapping[str, torch.Tensor]:
        return {key: torch.zeros_like(value) for key, value in make_batch(name, seed=0).items()}

    def of_trained(parameters: Any) -> torch.optim.Optimizer:
        return make_optimizer([parameter for parameter in parameters if parameter.requires_grad])

    of_step = num_micro_batches, max_norm, world_size
    return Training(make, make_inputs, {**SMALL, **settings}, of_trained, compute_loss, *of_step)


@dataclasses.dataclass(frozen=True)
class Recording:
    """A step of an engine in virtual time; names are as in ``Simulation``."""

    traces: Sequence[Trace]
    plans: Sequence[MovePlan]
    timeline: Timeline
    at_home: frozenset[int]
    streamed: frozenset[int]
    static: frozenset[int]
    num_on_host: int
    device_nbytes: int
    on_host: Mapping[str, int]
    moved_nbytes: tuple[int, int]
    sent_nbytes: int
    layout: tuple[float, ...]
    lookups: Mapping[int, str]


def record_step(training: Training, machine: Machine, known: KnownTraces | None = None) -> Recording:
    """Trains without bytes until a step follows plans and chunks have their homes; records that one.

    With ``known`` the first step follows plans, and the engine knows which activations can leave, as in a run after
    ``hf-patrickstar plan``.
    """
    driver = VirtualDriver(machine)
    with FakeTensors(), driver.watching():
        engine = make_engine(training, driver, known)
        try:
            num_to_pass = _num_to_pass(engine) + (known is not None)
            return _record(engine, training, driver, _totals_of(engine.ledger), num_to_pass)
        finally:
            inside.unwind(engine)  # takes the meter's mode off before the modes around it


def make_engine(training: Training, driver: VirtualDriver, known: KnownTraces | None = None) -> PatrickStarEngine:
    """Makes an engine on a machine that is not here, with the traces of a plan; called under fake tensors."""
    model, machine = training.make_model(), driver.machine
    settings = {
        "device_budget": machine.device_nbytes,
        "host_budget": machine.host_nbytes,
        "pin_memory": False,  # the driver takes all memory of the pool for pinned
        # Without an accelerator it is as on the CPU tier, whose updates end before ``step()`` returns.
        "machine": machine if machine.has_accelerator else CPU_TIER,
        "overlap_optimizer": machine.has_accelerator,
    }
    streams = DeviceStreams(torch.device("cpu"), driver)
    if not machine.has_accelerator:
        streams.hold_at_most(0)  # there a gradient is at home when its copy is started
    with pytest.MonkeyPatch.context() as patch:
        if known is not None:
            found = dataclasses.replace(known, has_padding=True)  # tensors without bytes cannot say that they have none
            patch.setattr("hf_patrickstar.engine.find_traces", lambda *_: found)
        engine = PatrickStarEngine(
            model,
            {**settings, **training.config, "reuse_plan": False},
            training.make_optimizer(model.parameters()),
            device=streams,
            gradient_accumulation_steps=training.num_micro_batches,
            process_group=VirtualPeers(driver, training.world_size),
        )
    driver.follow(engine.counts)
    engine.optimizer.zero_grad()  # tells the engine that nobody wants gradients after a step
    return engine


def _totals_of(ledger: Ledger) -> list[int]:
    """Bytes in use on the device, as often as they are noted; without buffers that the pool keeps, and nobody needs."""
    note_total, totals = ledger.note_total, []

    def note(non_model_nbytes: int) -> None:
        note_total(non_model_nbytes)
        kept_nbytes = ledger.owners(Tier.DEVICE).get(CACHE_OWNER, 0)
        totals.append(ledger.used(Tier.DEVICE) - kept_nbytes + non_model_nbytes)

    ledger.note_total = note
    return totals


def _record(
    engine: PatrickStarEngine, training: Training, driver: VirtualDriver, totals: list[int], num_to_pass: int
) -> Recording:
    for number in range(_MOST_STEPS):
        totals.clear()
        before, homes = engine.stats(), _homes_of(engine)
        driver.begin(inside.chunks(engine))
        for tensor in inside.tensors(engine):  # some optimizers make states when they are made
            for value in engine.optimizer.inner.state.get(tensor.parameter, {}).values():
                driver.take(value, tensor.chunk.home, OWN_STATE)
        if number:
            _update(engine, training.max_norm)
        steps = _train(engine, training)
        timeline, after = driver.end(), engine.stats()
        is_settled = after["recorded_steps"] == before["recorded_steps"] and _homes_of(engine) == homes
        num_to_pass -= is_settled and all(step and step.cursor and step.plan for step in steps)
        if num_to_pass < 0:
            return _note(engine, steps, timeline, before, max(totals))
    raise AssertionError(f"none of {_MOST_STEPS} steps followed plans")


def _homes_of(engine: PatrickStarEngine) -> list[Tier]:
    return [chunk.home for chunk in inside.chunks(engine)]


def _num_to_pass(engine: PatrickStarEngine) -> int:
    """Steps by plans before the one that counts.

    The first update of other optimizers than Adam makes their states, too.
    """
    return int(any(not optimizer.kernel.runs_beside for optimizer in engine.optimizers))


def _update(engine: PatrickStarEngine, max_norm: float | None) -> None:
    if max_norm is not None:
        engine.optimizer.clip_grad_norm_(None, max_norm)
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def _train(engine: PatrickStarEngine, training: Training) -> list[Step | None]:
    """Forward and backward of all micro-batches; returns what the engine knows of each, as its forward ends."""
    steps: list[Step | None] = []

    def run(inputs: Mapping[str, Any]) -> Step | None:
        loss = training.compute_loss(engine.model, inputs)
        step = inside.step(engine)
        training.micro_batch.run_backward(loss)
        return step

    batches = [training.make_inputs() for _ in range(training.num_micro_batches)]  # as the Trainer reads them
    for inputs in batches:  # as the Trainer does, which repeats what has no room
        steps.append(engine.attempt(lambda inputs=inputs: run(inputs)))
    return steps


def _note(
    engine: PatrickStarEngine,
    steps: Sequence[Step | None],
    timeline: Timeline,
    before: Mapping[str, Any],
    device_nbytes: int,
) -> Recording:
    stats, chunks = engine.stats(), inside.chunks(engine)
    on_host = [chunk for chunk in chunks if chunk.home is Tier.HOST]
    gained = {name: stats[name] - before[name] for name in before if name.endswith("_nbytes")}
    return Recording(
        traces=[inside.at_rest(engine, step.cursor.trace) for step in steps],
        plans=[step.plan for step in steps],
        timeline=timeline,
        at_home=frozenset(chunk.spec.index for chunk in chunks if chunk.home is Tier.DEVICE),
        streamed=frozenset(chunk.spec.index for chunk in chunks if chunk.is_streamed),
        static=frozenset(chunk.spec.index for chunk in chunks if chunk.is_static),
        num_on_host=sum(
            tensor.own_numel
            for chunk in on_host
            if chunk.spec.is_updated and not chunk.is_streamed
            for tensor in chunk.owned
        ),
        device_nbytes=device_nbytes,
        on_host={name: nbytes for name, nbytes in engine.ledger.owners(Tier.HOST).items() if nbytes},
        moved_nbytes=(gained["host_to_device_nbytes"], gained["device_to_host_nbytes"]),
        sent_nbytes=gained["sent_nbytes"],
        layout=tuple(stats[name] for name in ("num_chunks", "chunk_numel", "chunk_utilisation")),
        lookups=dict(inside.lookups(engine)),
    )
