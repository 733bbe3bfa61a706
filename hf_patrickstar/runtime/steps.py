"""Steps of a run: what begins and ends, what is recorded of it, and the plan that it follows."""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hf_patrickstar.common.states import Stage
from hf_patrickstar.counts import Counts
from hf_patrickstar.dist.order import Beginning, Order, Room
from hf_patrickstar.errors import BudgetError, Later
from hf_patrickstar.memory.lanes import LaneTimes
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.activations import Activations
from hf_patrickstar.runtime.chunk import Chunk, Device
from hf_patrickstar.runtime.evictor import Evictor, MovePolicy
from hf_patrickstar.runtime.executor import Executor
from hf_patrickstar.runtime.frames import Call
from hf_patrickstar.runtime.groups import Groups
from hf_patrickstar.runtime.ranges import named
from hf_patrickstar.runtime.tracer import Step, Tracer
from hf_patrickstar.schedule.plan import MovePlan, chunkable_nbytes, make_plan
from hf_patrickstar.schedule.script import Part
from hf_patrickstar.schedule.trace import Shapes, StepKind, Trace

logger = logging.getLogger(__name__)

MakeReady = Callable[[str, Shapes], bool]
"""Gets ready for a step, by its title and the shapes of its inputs, that may need more memory than any before it.

Returns whether traces or homes of chunks have changed.
"""
_Situation = tuple[Room, frozenset[int], frozenset[int]]
"""What a plan depends on beside its trace: room, chunks that do not move, chunks whose copies are void after it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Estimated:
    """What steps will do.

    Attributes:
        traces: Their traces: of one that begins, and of those that make a step of the optimizer with it.
        lookup_nbytes: Bytes of the rows that embeddings read at home in a micro-batch, by the index of the weight.
        is_exact: Whether they take what their traces say; an accelerator's allocator takes more or less.
        least: Says with how much memory they have room, if that is known.
    """

    traces: Sequence[Trace]
    lookup_nbytes: Mapping[int, int]
    is_exact: bool = False
    least: Later | None = None


_Now = tuple[int, Any]
"""The host's time, and a moment of the compute stream; see ``LaneTimes.now``."""


class Durations:
    """Adds up seconds by the host's clock, from the begin of a part to its end; a part that was given up is left out.

    An accelerator works beside the host, so a part of a step there may go on when the host has left it.

    Args:
        counts: Gets the sums.

    Attributes:
        times: Gets the parts of a step whose lanes are measured.
    """

    def __init__(self, counts: Counts) -> None:
        self.times: LaneTimes | None = None
        self._counts = counts
        self._begin: _Now | None = None
        self._forward_end: _Now | None = None
        self._end: _Now | None = None

    def begin_computing(self) -> None:
        """A micro-batch begins."""
        self._begin, self._forward_end, self._end = self._now(), None, None

    def end_forward(self) -> None:
        """An outermost forward has ended; of several the last one counts."""
        self._forward_end = self._now()

    def end_computing(self) -> None:
        """The backward of a micro-batch has ended."""
        if self._begin is None:
            return
        self._end = self._now()
        middle = self._begin if self._forward_end is None else self._forward_end
        self._add(Part.FORWARD, self._begin, middle)
        self._add(Part.BACKWARD, middle, self._end)
        self._counts.computing_seconds += (self._end[0] - self._begin[0]) / 1e9
        self._begin = None

    def begin_update(self) -> None:
        """The optimizer's step begins."""
        now = self._now()
        if self._end is not None:
            self._counts.settling_seconds += (now[0] - self._end[0]) / 1e9
        self._begin, self._end = now, None

    def end_update(self) -> None:
        """The optimizer's step has ended."""
        if self._begin is not None:
            now = self._now()
            self._add(Part.UPDATE, self._begin, now)
            self._counts.updating_seconds += (now[0] - self._begin[0]) / 1e9
        self._begin = None

    def _now(self) -> _Now:
        times = self.times  # another thread may end the measuring meanwhile
        return (time.perf_counter_ns(), None) if times is None else times.now()

    def _add(self, part: Part, begin: _Now, end: _Now) -> None:
        times = self.times
        if times is not None:
            times.parts.append((part, begin, end))


EstimateStep = Callable[[Call, Shapes], Estimated | None]
"""Says what a step will do that a call begins, with the largest input shapes of all processes; ``None`` if unknown."""


class Steps:
    """Begins and ends steps.

    A step whose trace is known follows a plan. One that is recorded is cautious: it keeps to a part of the budget, and
    chunks leave in list order.

    Args:
        device: The device.
        tracer: Records steps, and follows them.
        order: Says what comes next on all processes.
        executor: Executes plans; that of several processes ends phases together with the others.
        evictor: Makes room on the device.
        activations: Leave the device between forward and backward.
        policy: How copies come and go.
        num_micro_batches: How many make a step of the optimizer.
    """

    def __init__(
        self,
        device: Device,
        tracer: Tracer,
        order: Order,
        executor: Executor,
        evictor: Evictor,
        activations: Activations,
        policy: MovePolicy,
        num_micro_batches: int,
    ) -> None:
        self.tracer = tracer
        self.order = order
        self.num_micro_batches = num_micro_batches
        self.micro_batch = 0  # those since the optimizer's step
        self.durations = Durations(device.counts)
        self.peaks = (0, 0, 0)  # bytes in the last step: chunks on the device, all on the device, on the host
        self.policy = policy
        self._device, self._chunks, self._pool = device, device.chunks, device.pool
        self._meter = device.meter
        self._executor, self._evictor = executor, evictor
        self._groups = executor if isinstance(executor, Groups) else None
        self._activations = activations
        self._prefetch_depth = 0 if policy.evict_all else policy.prefetch_depth
        self._plans: dict[str, tuple[Trace, _Situation, MovePlan | None]] = {}
        self.estimator: EstimateStep | None = None
        self.has_plan = False  # whether the step that began last follows one

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
        dropped_after = frozenset(
            [c.spec.index for c in self._chunks if c.is_updated] if self.is_last_micro_batch else ()
        )
        title = _title(kind, name)
        shapes, room = self._begin(title, shapes, version, make_ready)
        self.durations.begin_computing()  # what was estimated before is no time of the step
        is_unknown = not shapes  # what its inputs are cannot be seen, so a trace may not be relied on
        step = self.tracer.begin(title, shapes, dropped_after, always_metered=is_unknown)
        self._enter(step, present, room)
        trace = None if step.cursor is None else step.cursor.trace
        lacks_room = trace is not None and self.policy.has_plans and step.plan is None
        self._activations.begin(None if step.plan is None else trace, lacks_room=lacks_room)

    def estimate(self, call: Call, title: str, shapes: Shapes) -> Estimated | None:
        """What the step will do that begins, or ``None`` if that cannot be told; see ``begin_step``."""
        if self.estimator is None or not self.tracer.may_learn(title, shapes):
            return None
        return self.estimator(call, shapes)

    def agree_on_estimated(self, traces: Sequence[Trace], shapes: Shapes) -> Sequence[Trace]:
        """What all processes estimate of a step with such inputs; nothing if one of them cannot tell."""
        return self.order.agree_on_estimated(traces) if self.estimator is not None and shapes else traces

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
                has_changed = self.estimator is not None and bool(agreed.shapes)
            if has_changed:
                agreed = self._agree(title, agreed.shapes, version)
        return agreed.shapes, agreed.room

    def _agree(self, title: str, shapes: Shapes, version: int) -> Beginning:
        room = self._room()
        agreed = self.order.begin(title, shapes, self.tracer.fingerprint, room, version)
        if not agreed.is_traced:
            self.tracer.discard()
        if agreed.room.resident != room.resident:
            self._evictor.evict_unused()
        return agreed

    def end_nested_evaluation(self, *, is_whole: bool) -> None:
        """Ends it; the step that it interrupted goes on.

        Args:
            is_whole: Whether it came to its end; else what was recorded of it is dropped.
        """
        if is_whole and self._groups is not None:
            self._groups.end_phase(Stage.EVALUATION)
        self.tracer.end_nested_evaluation(is_whole=is_whole)
        step = self.tracer.step
        if step is None or not step.is_metered:
            self._meter.pause()
            self._meter.stop()
        self._executor.expect(step)

    def end_forward(self) -> None:
        """Ends an outermost forward of training."""
        if self._groups is not None:
            self._groups.end_phase(Stage.FORWARD)
        self.durations.end_forward()
        if self._activations.has_begun:
            self._activations.end_forward()
        self.tracer.note_forward_end()

    def end_micro_batch(self) -> None:
        """Ends the step of a micro-batch, inside of its backward."""
        self.micro_batch += 1
        if self._activations.has_begun:
            self._activations.end_backward()
        self._finish()
        self.durations.end_computing()

    def _finish(self) -> None:
        """Ends a step. It may be called inside of backward, where the meter cannot be stopped, only paused."""
        self.tracer.finish()
        self._evictor.least = None
        self._meter.pause()
        self._executor.expect(None)

    def begin_update(self, chunk_indices: Sequence[int], optimizer_index: int = 0) -> None:
        """Begins an optimizer's step, which has a trace of its own: what it needs on the device beside the chunks.

        Args:
            chunk_indices: The chunks that it will come to, in order.
            optimizer_index: Which optimizer.
        """
        self.durations.begin_update()
        self.tracer.abandon()
        title = _title(StepKind.UPDATE, str(optimizer_index or ""))
        if self.estimator is not None:
            self.tracer.learn_update(title, chunk_indices)
        step = self.tracer.begin(title, chunk_indices=chunk_indices)
        if step.is_metered:
            self._meter.start(())
            self._meter.restart()

    def visit_for_update(self, chunks: Iterable[Chunk]) -> None:
        """Notes that the optimizer comes to chunks, wherever those are at home."""
        for chunk in chunks:
            step, index = self.tracer.step, chunk.spec.index
            if step is not None and step.cursor is not None and not (step.is_measured or step.is_diverged):
                visits, moment = step.cursor.trace.visits, step.cursor.moment + 1
                if moment < len(visits) and visits[moment].chunk_index == index:  # nothing is recorded
                    step.cursor.moment = moment
                    continue
            self.tracer.visit(index, tuple)
            if self.tracer.step is not None and self.tracer.step.has_moments:
                self._meter.restart()

    def end_update(self) -> int:
        """Ends the optimizer's step; returns how many micro-batches it was made of."""
        self._finish()
        self.stop_idle_meter()
        ledger = self._pool.ledger
        self.peaks = (ledger.step_peak(Tier.DEVICE), ledger.total_step_peak, ledger.step_peak(Tier.HOST))
        ledger.begin_step()
        num_micro_batches, self.micro_batch = self.micro_batch, 0
        self.abandon_step()
        self.durations.end_update()
        return num_micro_batches

    def abandon_step(self) -> None:
        """Drops a step that came to nothing."""
        if self._activations.has_begun:
            self._activations.end_backward()
        self.tracer.abandon()
        self.stop_idle_meter()
        self._executor.expect(None)

    def stop_idle_meter(self) -> None:
        """Takes the meter off this thread if no step is running; called outside of backward."""
        if self.tracer.step is None:
            self._meter.stop()

    def _enter(self, step: Step, present: Iterable[torch.Tensor], room: Room) -> None:
        self.has_plan = False
        if step.cursor is not None and self.policy.has_plans:
            step.plan = self._plan(step.cursor.trace, step.dropped_after, room)
            self.has_plan = step.plan is not None
            if step.plan is not None and not self._device.moves:
                self._pool.ledger.note_total(step.cursor.trace.non_model_peak_nbytes)
        if step.is_metered:
            self._meter.start(present)
            self._meter.restart()
        self._executor.expect(step)

    @property
    def followed(self) -> list[tuple[Trace, MovePlan, Room]]:
        """The latest plan of each kind of micro-batch, with its trace and the memory that it was made for."""
        latest = {}
        for trace, (room, *_), plan in list(self._plans.values()):  # another thread may add plans
            if plan is not None and trace.kind.is_training:
                latest[trace.kind] = (trace, plan, room)
        order = list(StepKind)
        return [latest[kind] for kind in sorted(latest, key=order.index)]

    def _room(self) -> Room:
        resident = sorted(self._device.copies, key=lambda chunk: chunk.last_access)
        fixed = self._pool.in_use(Tier.DEVICE) - sum(chunk.copy_nbytes for chunk in resident)
        chunk_budget = self._pool.ledger.chunk_budget
        return Room(
            self._pool.ledger.limit(Tier.DEVICE, cautious=False) - fixed,
            None if chunk_budget is None else chunk_budget - fixed,
            self._meter.floor(self._pool.ledger.used(Tier.DEVICE)),
            tuple(chunk.spec.index for chunk in resident),
        )

    def _plan(self, trace: Trace, dropped_after: frozenset[int], room: Room) -> MovePlan | None:
        """The plan of a step that begins now; the last one of its kind if everything is as it was then."""
        static = frozenset([chunk.spec.index for chunk in self._chunks if chunk.is_static])
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
