"""Steps of a run: what begins and ends, what is recorded, and the plan that is followed (PatrickStar section 8.1)."""

import dataclasses
import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.dist.order import Beginning, Order, Room
from hf_patrickstar.errors import BudgetError, Later
from hf_patrickstar.memory.lanes import Durations
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import GRADIENTS, Chunk, Device
from hf_patrickstar.runtime.frames import Call
from hf_patrickstar.runtime.ranges import named
from hf_patrickstar.schedule.eviction import Chooser
from hf_patrickstar.schedule.move_plan import MovePlan, chunkable_nbytes, make_plan
from hf_patrickstar.schedule.trace import Cursor, KnownTraces, Shapes, StepKind, Trace, Visit, trace_key

_MOST_DIVERGED_IN_A_ROW = 2
MOST_VISITS = 200_000

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Step:
    """A step that is being recorded or followed.

    Attributes:
        key: The name of its trace.
        shapes: Shapes of its inputs.
        dropped_after: Chunks whose device copies are void when it has ended.
        cursor: Its place in the trace that it follows; ``None`` if it is recorded, or has diverged.
        is_diverged: Whether it has left its trace.
        plan: What to move at each moment, if there is a plan. A diverged step keeps it: other processes execute it too.
        is_metered: Whether non-model data is measured while it runs.
        is_measured: Whether it is the first that follows a trace made beforehand: what it takes corrects the trace.
        is_void: Whether what was measured of it is more than a later step will need; then no trace is made of it.
        reserved_nbytes: Non-model bytes that are needed from each moment of its trace to the next visit.
        num_followed: How many moments of the plan have been executed; processes execute all of them together.
        due: Reductions of the last executed moment that are still to be done.
    """

    key: str
    shapes: Shapes
    dropped_after: frozenset[int]
    cursor: Cursor | None = None
    is_diverged: bool = False
    plan: MovePlan | None = None
    is_metered: bool = True
    is_measured: bool = False
    is_void: bool = False
    reserved_nbytes: Sequence[int] = ()
    num_followed: int = 0
    due: list[int] = dataclasses.field(default_factory=list)
    visits: list[tuple[int, tuple[int, ...]]] = dataclasses.field(default_factory=list)
    non_model_nbytes: list[int] = dataclasses.field(default_factory=list)
    gradient_nbytes: list[int] = dataclasses.field(default_factory=list)
    reduced: list[list[int]] = dataclasses.field(default_factory=list)
    forward_ends: list[int] = dataclasses.field(default_factory=list)

    @property
    def is_recorded(self) -> bool:
        """Whether this step makes a trace."""
        return self.cursor is None and not self.is_diverged

    @property
    def has_moments(self) -> bool:
        """Whether non-model data is measured from each moment to the next."""
        return self.is_measured if self.cursor is not None else not self.is_diverged

    def note_visit(self, chunk_index: int, pinned: Iterable[int]) -> None:
        """Notes a visit to a chunk.

        Args:
            chunk_index: The chunk.
            pinned: Chunks that cannot leave meanwhile.
        """
        self.visits.append((chunk_index, tuple(pinned)))
        self.reduced.append([])


@dataclasses.dataclass(frozen=True, slots=True)
class MovePolicy:
    """How copies come and go.

    Attributes:
        chooser: Chooses which chunk leaves.
        prefetch_depth: How many loads may be under way ahead of the chunk that is needed.
        reshard_after_forward: Chunks leave when forward has done with them, whether or not their room is needed.
        evict_all: Evict all that can be evicted at every access and poison it (debugging).
        has_plans: Whether steps follow plans.
        overlaps_updates: Whether the optimizer updates chunks of the host beside the next forward.
    """

    chooser: Chooser
    prefetch_depth: int
    reshard_after_forward: bool
    evict_all: bool
    has_plans: bool
    overlaps_updates: bool

    @classmethod
    def of(cls, config: PatrickStarConfig, world_size: int, prefetch_depth: int) -> "MovePolicy":
        """The policy of so many processes; several have no plan while all is evicted, since a plan loads nothing twice.

        Args:
            config: What the user wants.
            world_size: How many processes there are.
            prefetch_depth: See ``MovePolicy``.
        """
        is_alone = world_size == 1
        return cls(
            Chooser(config.eviction),
            prefetch_depth,
            reshard_after_forward=config.reshard_after_forward and not is_alone,
            evict_all=config.debug_evict_all,
            has_plans=is_alone or not config.debug_evict_all,
            overlaps_updates=config.overlap_optimizer,
        )


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


EstimateStep = Callable[[Call, Shapes], Estimated | None]
"""Says what a step will do that a call begins, with the largest input shapes of all processes; ``None`` if unknown."""


class Steps:
    """Begins and ends steps, records what they do, and makes the plans that they follow.

    The first step of a kind and bucket of input shapes is recorded: its trace. Later steps follow the trace, by a plan.
    A step with larger inputs than any recorded one is recorded too, since its activations may need more memory; its
    trace is merged with the known one. A step whose visits differ from its trace has diverged: it is counted, and goes
    on without knowing later visits. After two diverged steps in a row the trace is recorded anew: the first step may
    have failed half way, or the model may have changed.

    A trace may also be made before its first step (``learn``). Then that step is measured, and the bytes that it takes
    correct the trace. If it diverges, it is recorded itself; with several processes the next one is.

    Args:
        device: The device.
        order: Says what comes next on all processes, and makes one trace of theirs.
        policy: How copies come and go.
        num_micro_batches: How many make a step of the optimizer.
        known: Traces of a plan: steps follow them that would be recorded first otherwise.

    Attributes:
        known: As it was given; so are ``order``, ``policy`` and ``num_micro_batches``.
        traces: The traces, by key.
        version: Another number when a step has been recorded: what follows from the traces is decided anew.
        step: The step that runs, or ``None``.
        asks_padding: Whether traces of a plan without padding are there that no step has followed yet.
        diverging: Keys of steps whose non-model data is measured although they follow a trace: one has diverged.
        has_plan: Whether the step that began last follows a plan.
        least: Says with how much memory the step that runs has room, if that is known.
        micro_batch: Micro-batches since the optimizer's step.
        durations: Adds up seconds of the parts of steps.
        peaks: Bytes in the last step: of chunks on the device, of all on the device, and on the host.
        estimator: Makes traces before their first step, if that is possible.
    """

    def __init__(
        self, device: Device, order: Order, policy: MovePolicy, num_micro_batches: int, known: KnownTraces
    ) -> None:
        self.known = known
        self.traces: dict[str, Trace] = dict(known.traces)
        self.version = 1 if known.traces else 0
        self.step: Step | None = None
        self.asks_padding = bool(known.traces) and not known.has_padding
        self.diverging: set[str] = set()
        self.order, self.policy, self.num_micro_batches = order, policy, num_micro_batches
        self.micro_batch = 0
        self.durations = Durations(device.counts)
        self.peaks = (0, 0, 0)
        self.has_plan = False
        self.least: Later | None = None
        self.estimator: EstimateStep | None = None
        self._device, self._chunks = device, device.chunks
        self._chunk_nbytes = tuple(chunk.copy_nbytes for chunk in device.chunks)
        self._meter, self._ledger, self._counts = device.meter, device.ledger, device.counts
        self._plans: dict[str, tuple[Trace, _Situation, MovePlan | None]] = {}
        self._diverged_in_a_row: dict[str, int] = {}
        self._learnt = set(known.traces)  # traces made beforehand that no step has followed yet
        self._wrong: set[str] = set()  # steps whose traces, made beforehand, were not what they did
        self._interrupted: list[Step | None] = []
        self._num_begun = 0
        self._chunk_order: Mapping[int, int] = {}
        self._order_version = -1  # the version that it was made for

    # Micro-batches and evaluations

    def title_of(self, name: str, *, is_training: bool) -> str:
        """What the step is called that begins.

        Args:
            name: The outermost module whose forward begins; empty for the model itself.
            is_training: Whether it is a micro-batch of training, and no evaluation.
        """
        return _title(self._kind_of_micro_batch() if is_training else StepKind.EVALUATION, name)

    @property
    def is_last_micro_batch(self) -> bool:
        """Whether the micro-batch that runs, or begins, is the last one of its step."""
        return self._kind_of_micro_batch().is_last

    def _kind_of_micro_batch(self) -> StepKind:
        if self.num_micro_batches == 1:
            return StepKind.TRAINING
        if self.micro_batch == self.num_micro_batches - 1:
            return StepKind.LAST
        return StepKind.MIDDLE if self.micro_batch else StepKind.FIRST

    def agree(self, title: str, shapes: Shapes, version: int) -> Beginning:
        """What a step that begins has to work with, agreed with the other processes: shapes and room.

        Args:
            title: See ``title_of``.
            shapes: Shapes of its inputs.
            version: Counts changes of parameters.
        """
        room = self._room()
        agreed = self.order.begin(title, shapes, 0 if self.order.is_alone else self.fingerprint, room, version)
        if not agreed.is_traced:
            self.discard()
        if agreed.room.resident != room.resident:
            self._device.evict_unused()
        return agreed

    def begin_micro_batch(self, title: str, agreed: Beginning, present: Iterable[torch.Tensor]) -> Step:
        """Begins a step of training.

        Args:
            title: See ``title_of``.
            agreed: What it has to work with.
            present: Tensors on the device that are there already and are not chunks.
        """
        is_last = self.is_last_micro_batch
        dropped_after = frozenset([c.spec.index for c in self._chunks if c.is_updated] if is_last else ())
        self.durations.begin_computing()  # what was estimated before is no time of the step
        # Without shapes it cannot be seen what its inputs are, so a trace may not be relied on.
        step = self._begin(title, agreed.shapes, dropped_after, always_metered=not agreed.shapes)
        return self._enter(step, present, agreed.room)

    def begin_nested_evaluation(self, title: str, agreed: Beginning, present: Iterable[torch.Tensor]) -> None:
        """Begins an evaluation, between steps or inside of one; see ``begin_micro_batch``."""
        if self.step is not None and self.step.has_moments:
            self._close_moment(self.step)  # the inner step has peaks of its own
        self._interrupted.append(self.step)
        self._enter(self._begin(title, agreed.shapes, always_metered=True), present, agreed.room)

    def end_nested_evaluation(self, *, is_whole: bool) -> None:
        """Ends it; the step that it interrupted goes on.

        Args:
            is_whole: Whether it came to its end; else what was recorded of it is dropped.
        """
        if not is_whole:
            self.step = None
        self._finish()
        if self._interrupted:
            self.step = self._interrupted.pop()
        if self.step is None or not self.step.is_metered:
            self._meter.pause()
            self._meter.stop()
        self.expect(self.step)

    def end_forward(self) -> None:
        """Ends an outermost forward of training."""
        self.durations.end_forward()
        if self.step is not None:
            self.step.forward_ends.append(len(self.step.visits))

    def end_micro_batch(self) -> None:
        """Ends the step of a micro-batch, inside of its backward."""
        self.micro_batch += 1
        self._end()
        self.durations.end_computing()

    def _end(self) -> None:
        """Ends a step. It may be called inside of backward, where the meter cannot be stopped, only paused."""
        self._finish()
        self.least = None
        self._meter.pause()
        self.expect(None)

    def abandon(self) -> None:
        """Drops a step that came to nothing: a forward without backward, or one that failed."""
        self._forget()
        self.stop_idle_meter()
        self.expect(None)

    def _forget(self) -> None:
        self.step = None
        self._interrupted.clear()

    def stop_idle_meter(self) -> None:
        """Takes the meter off this thread if no step is running; called outside of backward."""
        if self.step is None:
            self._meter.stop()

    def _begin(
        self, title: str, shapes: Shapes = (), dropped_after: frozenset[int] = frozenset(), always_metered: bool = False
    ) -> Step:
        """Begins to record a step, or to follow its trace; a step that was not finished is forgotten.

        Args:
            title: See ``title_of``.
            shapes: Shapes of its inputs.
            dropped_after: Chunks whose device copies are void when it has ended.
            always_metered: Measure non-model data even if the step only follows its trace.
        """
        self._num_begun += 1
        key = trace_key(title, shapes)
        self.step = step = Step(key, shapes, dropped_after)
        trace = self.traces.get(key)
        if trace is not None and trace.covers(shapes):
            step.cursor = Cursor(trace, dropped_after)
            step.is_measured = key in self._learnt
            step.is_metered = always_metered or step.is_measured or key in self.diverging
        return step

    def _enter(self, step: Step, present: Iterable[torch.Tensor], room: Room) -> Step:
        self.has_plan = False
        if step.cursor is not None:
            step.reserved_nbytes = [visit.non_model_nbytes for visit in step.cursor.trace.visits]
        if step.cursor is not None and self.policy.has_plans:
            step.plan = self._plan(step.cursor.trace, step.dropped_after, room)
            self.has_plan = step.plan is not None
            if step.plan is not None:
                step.reserved_nbytes = step.plan.reserved_nbytes
            if step.plan is not None and not self._device.moves:
                self._ledger.note_total(step.cursor.trace.non_model_peak_nbytes)
        if step.is_metered:
            self._meter.start(present)
            self._meter.restart()
        self.expect(step)
        return step

    # The optimizer's step

    def begin_update(self, chunk_indices: Sequence[int], optimizer_index: int = 0) -> None:
        """Begins an optimizer's step, which has a trace of its own: what it needs on the device beside the chunks.

        Args:
            chunk_indices: The chunks that it will come to, in order.
            optimizer_index: Which optimizer.
        """
        self.durations.begin_update()
        self._forget()
        title = _title(StepKind.UPDATE, str(optimizer_index or ""))
        key, known = trace_key(title, ()), self.traces.get(trace_key(title, ()))
        if known is not None and known.visited != list(chunk_indices):
            known = None
            del self.traces[key]  # the step is recorded anew, and does not diverge
        if known is None and self.estimator is not None:
            # What it takes beside the chunks is measured when it runs first.
            self.learn([Trace(key, self._chunk_nbytes, tuple(Visit(index) for index in chunk_indices))])
        if self._begin(title).is_metered:
            self._meter.start(())
            self._meter.restart()

    def visit_for_update(self, chunks: Iterable[Chunk]) -> None:
        """Notes that the optimizer comes to chunks, wherever those are at home."""
        for chunk in chunks:
            step, index = self.step, chunk.spec.index
            if step is not None and step.cursor is not None and not (step.is_measured or step.is_diverged):
                visits, moment = step.cursor.trace.visits, step.cursor.moment + 1
                if moment < len(visits) and visits[moment].chunk_index == index:  # nothing is recorded
                    step.cursor.moment = moment
                    continue
            self.visit(index, tuple)
            if self.step is not None and self.step.has_moments:
                self._meter.restart()

    def end_update(self) -> int:
        """Ends the optimizer's step; returns how many micro-batches it was made of."""
        self._end()
        self.stop_idle_meter()
        ledger = self._ledger
        self.peaks = (ledger.step_peak(Tier.DEVICE), ledger.total_step_peak, ledger.step_peak(Tier.HOST))
        ledger.begin_step()
        num_micro_batches, self.micro_batch = self.micro_batch, 0
        self.abandon()
        self.durations.end_update()
        return num_micro_batches

    # A visit

    def visit(self, chunk_index: int, pinned: Callable[..., Iterable[int]], *of: Any) -> int | None:
        """Notes a visit to a chunk.

        Args:
            chunk_index: The chunk.
            pinned: Tells which other chunks cannot leave now; asked only while recording.
            *of: What it is asked with.

        Returns:
            The moment, if the step follows its trace.
        """
        step = self.step
        if step is None or step.is_diverged:
            return None
        cursor = step.cursor
        if cursor is None:
            if len(step.visits) == MOST_VISITS:  # of forwards without a backward
                self._forget()
                return None
            self._close_moment(step)
            step.note_visit(chunk_index, pinned(*of))
            return None
        visits = cursor.trace.visits
        moment = cursor.moment + 1
        quiet = () if step.plan is None else step.plan.quiet
        while moment < len(visits) and (found := visits[moment].chunk_index) != chunk_index and found in quiet:
            moment += 1  # of modules that rest
        cursor.moment = moment
        if moment < len(visits) and visits[moment].chunk_index == chunk_index:
            if step.is_measured:
                self._close_moment(step)
                step.note_visit(chunk_index, pinned(*of))
            return moment
        step.cursor = None
        self._counts.diverged_steps += 1
        if step.is_measured and self.order.is_alone:  # all of its visits are known, and it goes on as one recorded
            self._wrong.add(step.key)
            self._learnt.discard(step.key)
            self.traces.pop(step.key, None)
            step.is_measured, step.plan = False, None
            logger.info("patrickstar: step '%s' does something else than was estimated, and is recorded", step.key)
            return self.visit(chunk_index, pinned, *of)
        step.is_diverged = True
        self.diverging.add(step.key)
        return None

    def note_reduced(self, chunk_index: int) -> None:
        """Notes that the gradients of a group were reduced."""
        if self.step is not None and self.step.is_recorded and self.step.visits:
            self.step.reduced[-1].append(chunk_index)

    def expect(self, step: Step | None, moment: int | None = None) -> None:
        """Tells the ledger what non-model data will need until the next moment, or to be cautious without a trace."""
        ledger = self._ledger
        if step is None or (step.cursor is not None and not step.cursor.trace.visits):  # no parameter is used
            ledger.is_cautious, ledger.reserved_nbytes = False, 0
        elif step.cursor is None or (step.is_measured and step.plan is None):
            # A trace that was made beforehand may estimate too much: if no plan fits, what is measured decides.
            trace = self.traces.get(step.key) if step.is_diverged and not step.is_measured else None
            ledger.is_cautious = True
            ledger.reserved_nbytes = trace.non_model_peak_nbytes if trace is not None else 0
        else:
            moment = max(step.cursor.moment if moment is None else moment, 0)
            ledger.is_cautious, ledger.reserved_nbytes = False, step.reserved_nbytes[moment]

    # Plans

    @property
    def followed(self) -> list[tuple[Trace, MovePlan, Room]]:
        """The latest plan of each kind of micro-batch, with its trace and the memory that it was made for."""
        latest = {}
        for trace, (room, *_), plan in list(self._plans.values()):  # another thread may add plans
            if plan is not None and trace.kind.is_training:
                latest[trace.kind] = (trace, plan, room)
        return [latest[kind] for kind in sorted(latest, key=list(StepKind).index)]

    def _room(self) -> Room:
        resident = sorted(self._device.copies, key=lambda chunk: chunk.last_access)
        fixed = self._device.pool.in_use(Tier.DEVICE) - sum(chunk.copy_nbytes for chunk in resident)
        chunk_budget = self._ledger.chunk_budget
        return Room(
            self._ledger.limit(Tier.DEVICE, cautious=False) - fixed,
            None if chunk_budget is None else chunk_budget - fixed,
            self._meter.floor(self._ledger.used(Tier.DEVICE)),
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
                    plan = make_plan(
                        trace,
                        chunkable_nbytes(trace, room.free_nbytes, room.chunk_nbytes, room.floor_nbytes),
                        self.policy.chooser,
                        {index: place - len(indices) for place, index in enumerate(indices)},
                        dropped_after=dropped_after,
                        static=static,
                        prefetch_depth=0 if self.policy.evict_all else self.policy.prefetch_depth,
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

    # Traces

    @property
    def fingerprint(self) -> int:
        """A number that is the same on processes with traces of the same steps."""
        text = repr(sorted((key, trace.shapes, trace.num_offloaded) for key, trace in self.traces.items()))
        return zlib.crc32(text.encode())

    @property
    def place(self) -> tuple[int, int]:
        """Where recording is: how many steps have begun so far, nested ones too, and how many visits this one has."""
        return self._num_begun, 0 if self.step is None else len(self.step.visits)

    @property
    def chunk_order(self) -> Mapping[int, int]:
        """The places of chunks in the order in which training visits them, as it was recorded first; empty before."""
        if self._order_version != self.version:
            trace = next((trace for trace in self.traces.values() if trace.kind.is_training), None)
            visited = dict.fromkeys(visit.chunk_index for visit in trace.visits) if trace is not None else ()
            self._chunk_order = {index: place for place, index in enumerate(visited)}
            self._order_version = self.version
        return self._chunk_order

    def covers(self, kind: str, shapes: Shapes) -> bool:
        """Whether a step would follow a trace."""
        trace = self.traces.get(trace_key(kind, shapes))
        return trace is not None and trace.covers(shapes)

    def may_learn(self, kind: str, shapes: Shapes) -> bool:
        """Whether a trace that is made beforehand is worth it: none has been wrong for such a step.

        Of evaluations of one bucket, which grow with each token that is generated, the first one alone is worth it.
        """
        key = trace_key(kind, shapes)
        is_known = key in self.traces and not StepKind.of(kind).is_training
        return bool(shapes) and key not in self._wrong and not is_known

    def estimate(self, call: Call, title: str, shapes: Shapes) -> Estimated | None:
        """What the step will do that begins, or ``None`` if that cannot be told; see ``begin_micro_batch``."""
        if self.estimator is None or not self.may_learn(title, shapes):
            return None
        return self.estimator(call, shapes)

    def agree_on_estimated(self, traces: Sequence[Trace], shapes: Shapes) -> Sequence[Trace]:
        """What all processes estimate of a step with such inputs; nothing if one of them cannot tell."""
        return self.order.agree_on_estimated(traces) if self.estimator is not None and shapes else traces

    def learn(self, traces: Iterable[Trace]) -> None:
        """Takes traces that were made before the steps that follow them."""
        traces = list(traces)
        for key in self.outdated_by(traces):
            self._learnt.discard(key)
            del self.traces[key]
        for trace in traces:
            known = self.traces.get(trace.key)
            self.traces[trace.key] = trace if known is None else trace.merged(known)
            self._learnt.add(trace.key)
        self.version += 1

    def offload(self, num: int) -> None:
        """Lets so many activations leave the device, the first ones of each micro-batch of training."""
        self.traces = {key: trace.offloading(num) for key, trace in self.traces.items()}

    def outdated_by(self, traces: Iterable[Trace]) -> set[str]:
        """Keys of known traces that no step has followed, and of batches of another size: those of an earlier run."""
        sizes = {_batch_sizes(trace) for trace in traces if trace.kind.is_training}
        unfollowed = {key: self.traces[key] for key in self._learnt & self.known.traces.keys() & self.traces.keys()}
        return {
            key
            for key, trace in unfollowed.items()
            if sizes and trace.kind.is_training and _batch_sizes(trace) not in sizes
        }

    def _finish(self) -> None:
        """Ends the step; what was recorded becomes its trace."""
        step, self.step = self.step, None
        if step is None:
            return
        if step.is_recorded and step.visits:
            self._close_moment(step)
            rows = zip(step.visits, step.non_model_nbytes, step.gradient_nbytes, step.reduced, strict=True)
            visits = tuple(Visit(*visit, nbytes, gradients, tuple(done)) for visit, nbytes, gradients, done in rows)
            trace = Trace(step.key, self._chunk_nbytes, visits, (step.shapes,), tuple(step.forward_ends))
            trace = self.order.agree_on_trace(trace)
            if not step.is_void:  # of other processes, which keep it, the next step finds that they have another trace
                known = self.traces.get(step.key)
                self.traces[step.key] = trace if known is None else trace.merged(known)
            self.version += 1
            self._counts.recorded_steps += 1
            self._diverged_in_a_row[step.key] = 0
            return
        if step.is_measured:
            self._correct(step)
        in_a_row = self._diverged_in_a_row.get(step.key, 0) + 1 if step.is_diverged else 0
        if in_a_row == _MOST_DIVERGED_IN_A_ROW:
            self.traces.pop(step.key, None)
            in_a_row = 0
        self._diverged_in_a_row[step.key] = in_a_row

    def _correct(self, step: Step) -> None:
        """Corrects a trace that was made beforehand by what the first step took that followed it."""
        self._learnt.discard(step.key)
        trace = self.traces.get(step.key)
        if step.is_diverged:
            self._wrong.add(step.key)
            self.traces.pop(step.key, None)
        elif trace is not None:
            corrected = trace
            if len(step.visits) == len(trace.visits) and not step.is_void:
                self._close_moment(step)
                corrected = trace.with_non_model_nbytes(step.non_model_nbytes)
            corrected = self.order.agree_on_trace(corrected)
            if corrected != trace:
                self.traces[step.key] = corrected
                self.version += 1

    def note_padding(self, has_padding: bool) -> None:
        """Drops the traces of a plan without padding, if the first batch has some: it may need more memory.

        Args:
            has_padding: Whether it has.
        """
        self.asks_padding = False
        if has_padding:
            logger.info(
                "patrickstar: reuse_plan: the batches of the plan have no padding, and the first one here has; the "
                "first step is planned anew"
            )
            self.discard()

    def discard(self) -> None:
        """Drops every trace: what was recorded is no longer true, and the next steps are recorded anew."""
        self.traces.clear()
        self._learnt.clear()
        self._diverged_in_a_row.clear()

    def distrust(self) -> None:
        """Drops every trace, since a step has run out of memory that followed one; no trace is made beforehand."""
        self._wrong.update(self.traces)
        self.discard()

    def note_chunks(self, chunk_nbytes: Iterable[int]) -> None:
        """Drops every trace, because there are other chunks now.

        Args:
            chunk_nbytes: Bytes of every chunk's ``param`` payload, by chunk index.
        """
        self._chunk_nbytes = tuple(chunk_nbytes)
        self.discard()

    def _close_moment(self, step: Step) -> None:
        """Notes the most non-model bytes, and bytes of gradients that waited for their group, since the last moment."""
        if not step.visits:
            return
        is_open = len(step.non_model_nbytes) < len(step.visits)  # else an inner step has closed it before
        nbytes = 0 if is_open and step.is_void else self._meter.peak(self._ledger.used(Tier.DEVICE))
        self._ledger.note_total(nbytes)
        gradients = self._ledger.take_owner_peak(Tier.DEVICE, GRADIENTS)
        if is_open:
            step.non_model_nbytes.append(nbytes)
            step.gradient_nbytes.append(gradients)
        else:
            step.non_model_nbytes[-1] = max(step.non_model_nbytes[-1], nbytes)
            step.gradient_nbytes[-1] = max(step.gradient_nbytes[-1], gradients)


def _title(kind: StepKind, module_name: str) -> str:
    """What a step is called: its kind, and the outermost module, or the optimizer, if that is not the only one."""
    return f"{kind}:{module_name}" if module_name else kind


def _batch_sizes(trace: Trace) -> tuple[tuple[int, ...], ...]:
    return tuple(shape[:1] for shape in trace.shapes[0])
