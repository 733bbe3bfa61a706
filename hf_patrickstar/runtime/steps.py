"""Steps of a run: what begins and ends, what is recorded of it, and the plan that it follows."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from hf_patrickstar.dist.order import Beginning, Ending, Phase, Room, Subject
from hf_patrickstar.errors import BudgetError
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.meters import Meter
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import GRADIENTS, Chunk
from hf_patrickstar.runtime.durations import Durations
from hf_patrickstar.runtime.executor import Executor, Services
from hf_patrickstar.runtime.ranges import named
from hf_patrickstar.runtime.tracer import Step
from hf_patrickstar.schedule.plan import Plan, chunkable_nbytes, make_plan
from hf_patrickstar.schedule.trace import Shapes, StepKind, Trace

logger = logging.getLogger(__name__)

MakeReady = Callable[[str, Shapes], bool]
"""Gets ready for a step, by its title and the shapes of its inputs, that may need more memory than any before it.

Returns whether traces or homes of chunks have changed.
"""
_Situation = tuple[Room, frozenset[int], frozenset[int]]
"""What a plan depends on beside its trace: room, chunks that do not move, chunks whose copies are void after it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A call of an outermost module.

    Attributes:
        module: The module.
        name: Its name in the model.
        args: Positional arguments.
        kwargs: Named arguments.
        is_training: Whether a backward follows.
    """

    module: torch.nn.Module
    name: str
    args: Any
    kwargs: Any
    is_training: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Foreseen:
    """What steps will do.

    Attributes:
        traces: Their traces: of one that begins, and of those that make a step of the optimizer with it.
        lookup_nbytes: Bytes of the rows that embeddings read at home in a micro-batch, by the index of the weight.
        is_exact: Whether they take what their traces say; an accelerator's allocator takes more or less.
    """

    traces: Sequence[Trace]
    lookup_nbytes: Mapping[int, int]
    is_exact: bool = False


class DeviceGauges:
    """Measures on the compute device; see ``Gauges``.

    Args:
        meter: Measures what is not chunks.
        ledger: Has the bytes of chunks, and of gradients.
    """

    def __init__(self, meter: Meter, ledger: Ledger) -> None:
        self._meter = meter
        self._ledger = ledger

    def take_non_model_peak(self) -> int:
        """See ``Gauges``; it is noted in the ledger, too."""
        nbytes = self._meter.peak(self._ledger.used(Tier.DEVICE))
        self._ledger.note_total(nbytes)
        return nbytes

    def take_gradient_peak(self) -> int:
        """See ``Gauges``."""
        return self._ledger.take_owner_peak(Tier.DEVICE, GRADIENTS)


class Foresight(Protocol):
    """Tells what a step will do before its first forward."""

    def foresee(self, call: Call, shapes: Shapes) -> Foreseen | None:
        """What a step will do that a call begins, or ``None`` if that cannot be told.

        Args:
            call: The call.
            shapes: Shapes of its inputs, the largest of all processes.
        """
        ...


class Steps:
    """Begins and ends steps.

    A step whose trace is known follows a plan. One that is recorded is cautious: it keeps to a part of the budget, and
    chunks leave in list order.

    Args:
        services: What it works with.
        executor: Executes plans.
        num_micro_batches: How many make a step of the optimizer.
    """

    def __init__(
        self,
        services: Services,
        executor: Executor,
        num_micro_batches: int,
    ) -> None:
        self.executor = executor
        self.tracer = services.tracer
        self.order = services.order
        self.num_micro_batches = num_micro_batches
        self.micro_batch = 0  # those since the optimizer's step
        self.num_updates = 0  # of all optimizers
        self.durations = Durations()
        self.peaks = (0, 0, 0)  # bytes in the last step: chunks on the device, all on the device, on the host
        self._chunks = services.chunks
        self._copies = services.copies
        self._reclaim = services.reclaim
        self._pool = services.pool
        self._meter = services.meter
        self.policy = services.policy
        self._prefetch_depth = 0 if self.policy.evict_all else self.policy.prefetch_depth
        self._plans: dict[str, tuple[Trace, _Situation, Plan | None]] = {}
        self.foresight: Foresight | None = None
        self._call: Call | None = None

    def begin_step(
        self, name: str, shapes: Shapes, present: Iterable[torch.Tensor], version: int, make_ready: MakeReady
    ) -> None:
        """Begins a training step.

        Args:
            name: The outermost module whose forward begins; empty for the model itself.
            shapes: Shapes of its inputs.
            present: Tensors on the device that are there already and are not chunks.
            version: Counts changes of parameters.
            make_ready: Called first if no trace is known for such a step.
        """
        kind = self._kind_of_micro_batch()
        is_last = self.is_last_micro_batch
        dropped_after = frozenset(chunk.spec.index for chunk in self._chunks if chunk.spec.is_updated and is_last)
        title = _title(kind, name)
        shapes, room = self._begin(title, shapes, version, make_ready)
        self.durations.begin_computing()  # what was foreseen before is no time of the step
        is_unknown = not shapes  # what its inputs are cannot be seen, so a trace may not be relied on
        self._enter(self.tracer.begin(title, shapes, dropped_after, always_metered=is_unknown), present, room)

    @contextlib.contextmanager
    def announced(self, call: Call) -> Iterator[None]:
        """Inside, the step begins that a call begins."""
        self._call = call
        try:
            yield
        finally:
            self._call = None

    def foresee(self, title: str, shapes: Shapes) -> Foreseen | None:
        """What the step will do that begins, or ``None`` if that cannot be told; see ``begin_step``."""
        if self.foresight is None or self._call is None or not self.tracer.may_learn(title, shapes):
            return None
        return self.foresight.foresee(self._call, shapes)

    def agree_on_foreseen(self, traces: Sequence[Trace], shapes: Shapes) -> Sequence[Trace]:
        """What all processes foresee of a step with such inputs; nothing if one of them cannot tell."""
        return self.order.agree_on_foreseen(traces) if self.foresight is not None and shapes else traces

    @property
    def is_last_micro_batch(self) -> bool:
        """Whether the micro-batch that runs, or begins, is the last one of its step."""
        return self._kind_of_micro_batch().is_last

    def _kind_of_micro_batch(self) -> StepKind:
        """What the micro-batch that begins is."""
        if self.num_micro_batches == 1:
            return StepKind.TRAINING
        if self.micro_batch == self.num_micro_batches - 1:
            return StepKind.LAST
        return StepKind.MIDDLE if self.micro_batch else StepKind.FIRST

    def begin_nested_evaluation(
        self, name: str, shapes: Shapes, present: Iterable[torch.Tensor], version: int, make_ready: MakeReady
    ) -> None:
        """Begins an evaluation, between steps or inside of one; see ``begin_step``."""
        title = _title(StepKind.EVALUATION, name)
        shapes, room = self._begin(title, shapes, version, make_ready)
        self._enter(self.tracer.begin_nested_evaluation(title, shapes, always_metered=True), present, room)

    def _begin(self, title: str, shapes: Shapes, version: int, make_ready: MakeReady) -> tuple[Shapes, Room]:
        """What a step has to work with, agreed with the other processes: shapes and room."""
        agreed = self._agree(title, shapes, version)
        if not self.tracer.covers(title, agreed.shapes):
            has_changed = make_ready(title, agreed.shapes)
            if not self.order.is_alone:  # all ask again, or none; for a step that is recorded there is nothing to ask
                has_changed = self.foresight is not None and bool(agreed.shapes)
            if has_changed:
                agreed = self._agree(title, agreed.shapes, version)
        return agreed.shapes, agreed.room

    def _agree(self, title: str, shapes: Shapes, version: int) -> Beginning:
        room = self._room()
        agreed = self.order.begin(title, shapes, self.tracer.fingerprint, room, version)
        if not agreed.is_traced:
            self.tracer.discard()
        if agreed.room.resident != room.resident:
            self._reclaim.evict_unused()
        return agreed

    def end_nested_evaluation(self, *, is_whole: bool) -> None:
        """Ends it; the step that it interrupted goes on.

        Args:
            is_whole: Whether it came to its end; else what was recorded of it is dropped.
        """
        if is_whole:
            self.end_phase(Phase.EVALUATION)
        self.tracer.end_nested_evaluation(is_whole=is_whole)
        step = self.tracer.step
        if step is None or not step.is_metered:
            self._meter.pause()
            self._meter.stop()
        self.executor.expect(step)

    def end_forward(self) -> None:
        """Ends an outermost forward of training."""
        self.end_phase(Phase.FORWARD)
        self.durations.end_forward()
        self.tracer.note_forward_end()

    def end_micro_batch(self) -> None:
        """Ends the step of a micro-batch, inside of its backward."""
        self.micro_batch += 1
        self._finish()
        self.durations.end_computing()

    def _finish(self) -> None:
        """Ends a step. It may be called inside of backward, where the meter cannot be stopped, only paused."""
        self.tracer.finish()
        self._meter.pause()
        self.executor.expect(None)

    def begin_update(self, chunk_indices: Sequence[int], optimizer_index: int = 0) -> None:
        """Begins an optimizer's step, which has a trace of its own: what it needs on the device beside the chunks.

        Args:
            chunk_indices: The chunks that it will come to, in order.
            optimizer_index: Which optimizer.
        """
        self.durations.begin_update()
        self.tracer.abandon()
        title = _title(StepKind.UPDATE, str(optimizer_index or ""))
        if self.foresight is not None:
            self.tracer.learn_update(title, chunk_indices)
        step = self.tracer.begin(title, chunk_indices=chunk_indices)
        if step.is_metered:
            self._meter.start(())
            self._meter.restart()

    def visit_for_update(self, chunk: Chunk) -> None:
        """Notes that the optimizer comes to a chunk, wherever that is at home."""
        self.tracer.visit(chunk.spec.index, tuple)
        if self.tracer.step is not None and self.tracer.step.has_moments:
            self._meter.restart()

    def end_update(self) -> int:
        """Ends the optimizer's step; returns how many micro-batches it was made of."""
        self._finish()
        self.stop_idle_meter()
        ledger = self._pool.ledger
        self.num_updates += 1
        self.peaks = (ledger.step_peak(Tier.DEVICE), ledger.total_step_peak, ledger.step_peak(Tier.HOST))
        ledger.begin_step()
        num_micro_batches, self.micro_batch = self.micro_batch, 0
        self.abandon_step()
        self.durations.end_update()
        return num_micro_batches

    def abandon_step(self) -> None:
        """Drops a step that came to nothing."""
        self.tracer.abandon()
        self.stop_idle_meter()
        self.executor.expect(None)

    def give_up(self) -> None:
        """Stops measuring: the step has failed, and torch does not tell the end of a backward that raises."""
        self._meter.pause()

    def stop_idle_meter(self) -> None:
        """Takes the meter off this thread if no step is running; called outside of backward."""
        if self.tracer.step is None:
            self._meter.stop()

    def _enter(self, step: Step, present: Iterable[torch.Tensor], room: Room) -> None:
        if step.cursor is not None and self.policy.has_plans:
            step.plan = self._plan(step.cursor.trace, step.dropped_after, room)
            if step.plan is not None and not self._copies.moves:
                self._pool.ledger.note_total(step.cursor.trace.non_model_peak_nbytes)
        if step.is_metered:
            self._meter.start(present)
            self._meter.restart()
        self.executor.expect(step)

    def end_phase(
        self, phase: Phase, unreduced: Callable[[], Sequence[int]] = tuple, indices: Iterable[int] = ()
    ) -> frozenset[int]:
        """Ends a forward, a backward or an evaluation together with the other processes.

        Args:
            phase: What has ended.
            unreduced: Tells which groups have gradients that are not reduced, when the plan is at its end.
            indices: Tensors that got a gradient here.

        Returns:
            The tensors that got a gradient anywhere.
        """
        if self.order.is_alone:
            return frozenset(indices)
        step = self.tracer.step
        if step is not None and step.plan is not None:
            self.executor.execute_until(step, self.executor.end_of_phase(step, phase is Phase.FORWARD))
            if phase is not Phase.FORWARD:  # what the last visit of a forward is followed by is not complete yet
                self.executor.reduce_due(step)
        while waiting := unreduced():  # what others ask for at the same time is done too
            self.executor.ask(Subject.REDUCE, waiting[0], "gradients that no plan expects")
        is_recorded = step is not None and step.is_recorded
        ending = Ending(phase, step is not None and step.is_diverged, sorted(indices), is_recorded)
        while (ended := self.order.end(ending)).collectives:
            self.executor.perform(ended.collectives)
        if step is not None:
            step.diverged_anywhere |= ended.is_diverged
        if step is not None and phase is not Phase.FORWARD:
            step.is_diverged = ended.is_diverged  # anywhere: traces are recorded anew by all or by none
        return ended.indices

    @property
    def followed(self) -> list[tuple[Trace, Plan, Room]]:
        """The latest plan of each kind of micro-batch, with its trace and the memory that it was made for."""
        latest = {}
        for trace, (room, *_), plan in list(self._plans.values()):  # another thread may add plans
            if plan is not None and trace.kind.is_training:
                latest[trace.kind] = (trace, plan, room)
        order = list(StepKind)
        return [latest[kind] for kind in sorted(latest, key=order.index)]

    def _room(self) -> Room:
        resident = self._copies.by_age
        fixed = self._pool.in_use(Tier.DEVICE) - sum(chunk.copy_nbytes for chunk in resident)
        chunk_budget = self._pool.ledger.chunk_budget
        return Room(
            self._pool.ledger.limit(Tier.DEVICE, cautious=False) - fixed,
            None if chunk_budget is None else chunk_budget - fixed,
            self._meter.floor(self._pool.ledger.used(Tier.DEVICE)),
            tuple(chunk.spec.index for chunk in resident),
        )

    def _plan(self, trace: Trace, dropped_after: frozenset[int], room: Room) -> Plan | None:
        """The plan of a step that begins now; the last one of its kind if everything is as it was then."""
        static = frozenset(chunk.spec.index for chunk in self._chunks if chunk.is_static)
        indices = room.resident
        situation = (room, static, dropped_after)
        known = self._plans.get(trace.key)
        if known is None or known[0] is not trace or known[1] != situation:
            try:
                with named("plan"):
                    capacities = chunkable_nbytes(trace, room.free_nbytes, room.chunk_nbytes, room.floor_nbytes)
                    plan = make_plan(
                        trace,
                        capacities,
                        self.policy.chooser,
                        {index: place - len(indices) for place, index in enumerate(indices)},
                        dropped_after=dropped_after,
                        static=static,
                        prefetch_depth=self._prefetch_depth,
                        reshard_after_forward=self.policy.reshard_after_forward,
                    )
                logger.debug(
                    "patrickstar: plan of '%s': %d loads, %d evictions", trace.key, plan.num_loads, plan.num_evictions
                )
            except BudgetError as error:
                plan = None  # on demand, which fails only where it really does not fit, and says what to change
                logger.info("patrickstar: no plan for '%s', chunks move on demand: %s", trace.key, error)
            self._plans.pop(trace.key, None)  # the latest plan of a kind comes last
            self._plans[trace.key] = (trace, situation, plan)
        return self._plans[trace.key][2]


def _title(kind: StepKind, module_name: str) -> str:
    """What a step is called: its kind, and the outermost module, or the optimizer, if that is not the only one."""
    return f"{kind}:{module_name}" if module_name else kind
