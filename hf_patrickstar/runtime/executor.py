"""Carries out what the plan of a step says: evict, load, bring in ahead, gather and reduce, visit by visit."""

import dataclasses
from collections.abc import Iterable

import torch

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.dist.order import Collective, Order, Subject
from hf_patrickstar.events import ChunkVisited, Listener
from hf_patrickstar.memory.meters import Meter
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.buckets import Average, Buckets
from hf_patrickstar.runtime.chunk import Chunk
from hf_patrickstar.runtime.copies import Copies
from hf_patrickstar.runtime.gradient_mirrors import GradientMirrors
from hf_patrickstar.runtime.gradients import Gradients
from hf_patrickstar.runtime.in_use import ChunksInUse
from hf_patrickstar.runtime.ranges import named
from hf_patrickstar.runtime.reclaim import Reclaim
from hf_patrickstar.runtime.tracer import Step, Tracer
from hf_patrickstar.schedule.eviction import Chooser
from hf_patrickstar.schedule.plan import Actions


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


@dataclasses.dataclass(frozen=True, slots=True)
class Services:
    """What the parts of the runtime work with.

    Attributes:
        chunks: All chunks; the list may grow.
        pool: Gives buffers, and has the ledger.
        meter: Measures what else is on the device.
        collectives: Talks to other processes.
        order: Says which collective comes next on all processes.
        copies: The copies on the device.
        reclaim: Makes room for them.
        tracer: Records steps, and follows them.
        in_use: Knows which chunks cannot leave at a visit that is recorded.
        policy: How copies come and go.
    """

    chunks: list[Chunk]
    pool: PayloadPool
    meter: Meter
    collectives: Collectives
    order: Order
    copies: Copies
    reclaim: Reclaim
    tracer: Tracer
    in_use: ChunksInUse
    policy: MovePolicy


class Executor:
    """Brings chunks to the device: by plan where the step has one, on demand where not.

    A step whose trace is known follows a plan. One that is recorded is cautious: it keeps to a part of the budget,
    and chunks leave in list order.

    Args:
        services: What it works with.
        gradients: Where gradients are at home.
        gradient_mirrors: What was handed out of them.
        buckets: Where they wait until their group is complete.
        emit: Told of every visit.

    Attributes:
        in_backward: Whether a backward has begun that has not ended.
    """

    def __init__(
        self,
        services: Services,
        gradients: Gradients,
        gradient_mirrors: GradientMirrors,
        buckets: Buckets,
        emit: Listener,
    ) -> None:
        self.in_backward = False
        self._chunks = services.chunks
        self._pool = services.pool
        self._ledger = services.pool.ledger
        self._meter = services.meter
        self._collectives = services.collectives
        self._order = services.order
        self._is_alone = services.order.is_alone
        self._copies = services.copies
        self._reclaim = services.reclaim
        self._tracer = services.tracer
        self._in_use = services.in_use
        self._gradients = gradients
        self._gradient_mirrors = gradient_mirrors
        self._buckets = buckets
        self._emit = emit
        self._evicts_all = services.policy.evict_all
        self._needed: Chunk | None = None
        self._tick = 0

    def expect(self, step: Step | None, moment: int | None = None) -> None:
        """Tells the ledger what others will need until the next moment, or to be cautious where no trace is known."""
        ledger = self._ledger
        if step is None:
            ledger.is_cautious, ledger.reserved_nbytes = False, 0
        elif step.cursor is None or (step.is_measured and step.plan is None):
            # A trace that was made beforehand may foresee too much: if no plan fits, what is measured decides.
            trace = self._tracer.traces.get(step.key) if step.is_diverged and not step.is_measured else None
            ledger.is_cautious = True
            ledger.reserved_nbytes = trace.non_model_peak_nbytes if trace is not None else 0
        else:
            visits = step.cursor.trace.visits
            ledger.is_cautious = False
            ledger.reserved_nbytes = visits[max(step.cursor.moment if moment is None else moment, 0)].non_model_nbytes

    @property
    def is_at_rest(self) -> bool:
        """Whether every chunk is computed with where it is at home, and nobody has to be told of visits."""
        if self._copies.moves:
            return False
        step = self._tracer.step
        return step is None or step.cursor is not None

    def ensure_on_device(self, chunk: Chunk, who: str) -> torch.Tensor:
        """The payload to compute with: a visit to the chunk.

        Args:
            chunk: The chunk.
            who: Who asks, for errors.

        Raises:
            DeviceMemoryError: If it cannot be brought to the device.
        """
        index, tracer = chunk.spec.index, self._tracer
        static = chunk.compute if not self._copies.moves else None
        if static is not None and (tracer.step is None or tracer.step.cursor is not None):
            return static  # everything is at home on the device: there is nothing to follow
        self._tick += 1
        chunk.last_access = self._tick
        moment = tracer.visit(index, self._in_use.at_visit, chunk)
        step = tracer.step
        if step is not None:
            self.expect(step, moment)
        if self._evicts_all:
            self._evict_everything(exclude=chunk)
        was_there = chunk.compute is not None
        actions = (
            step.plan.moments[moment] if moment is not None and step is not None and step.plan is not None else None
        )
        if not self._is_alone:
            self._bring_together(chunk, step, moment, who)
        elif actions is None or actions.moves or not was_there or self._is_short():
            with self._ledger.one_reading():
                self._bring(chunk, actions, who)
        waited_s = self._copies.wait(chunk) if chunk.arrival is not None else None
        self._emit(ChunkVisited(index, was_there and waited_s is None and not chunk.is_static, waited_s))
        if step is not None and step.has_moments:
            self._meter.restart()
        elif step is not None and step.plan is not None:  # it is not measured: what the trace says is noted
            self._ledger.note_total(self._ledger.reserved_nbytes)
        assert chunk.compute is not None
        return chunk.compute

    # Of this process alone

    def _bring(self, chunk: Chunk, actions: Actions | None, who: str) -> None:
        if actions is not None:
            self._execute(actions, chunk, who)
        if chunk.compute is None:
            self._load(chunk, who)
        else:
            self._meet_others(chunk, who)

    def _is_short(self) -> bool:
        """Whether there is more than the budget allows beside what others are known to need now.

        That is all that is asked at a visit of a plan that moves nothing, since to measure what others really take
        would take longer than all else of it. Where that has grown it is found at the next visit that moves something.
        """
        return self._ledger.available(Tier.DEVICE, measures=False) < 0

    def _meet_others(self, chunk: Chunk, who: str) -> None:
        """Evicts what is there beyond the budget, because others have grown."""
        if self._ledger.available(Tier.DEVICE) < 0 and len(self._copies):
            self._reclaim.make_room_for(chunk, 0, who)

    def _execute(self, actions: Actions, chunk: Chunk, who: str) -> None:
        self._evict_if_unused(actions.evict)
        for index in actions.load:
            other = self._chunks[index]
            if other is chunk:
                if chunk.compute is None:
                    self._load(chunk, who)
            elif other.compute is None and self._pool.room(Tier.DEVICE) >= other.copy_nbytes:
                self._copies.load(other, ahead=True)

    def _evict_if_unused(self, indices: Iterable[int]) -> None:
        for index in indices:
            chunk = self._chunks[index]
            if chunk in self._copies and not chunk.is_in_use:
                self._copies.evict(chunk)

    def _load(self, chunk: Chunk, who: str) -> None:
        self._reclaim.make_room_for(chunk, chunk.copy_nbytes, who)
        self._copies.load(chunk, ahead=False)

    # Together with other processes; see [Note: one order of collectives]

    def reduce_when_due(self, chunk: Chunk) -> None:
        """Reduces a group as soon as its gradients are complete and it is its turn.

        Args:
            chunk: The group.
        """
        if self._is_alone:
            return
        is_complete = self._buckets.is_complete
        if not is_complete(chunk):
            return
        step = self._tracer.step
        if step is None or step.plan is None:
            self.ask(Subject.REDUCE, chunk.spec.index, "its gradients, which are complete")
            return
        while step.due and is_complete(self._chunks[step.due[0]]):
            self._perform_planned(Subject.REDUCE, step.due.pop(0))

    def _bring_together(self, chunk: Chunk, step: Step | None, moment: int | None, who: str) -> None:
        self._needed = chunk
        is_followed = moment is not None and step is not None and step.plan is not None
        if self._ledger.available(Tier.DEVICE, measures=not is_followed) < 0:
            self._buckets.let_go()
        if step is not None and step.plan is not None:
            end = self.end_of_phase(step, not self.in_backward)
            if moment is not None:  # another branch may look like what comes after this forward
                self.execute_until(step, min(moment + 1, end))
            while chunk.compute is None and step.num_followed < end:
                self.execute_until(step, step.num_followed + 1)
        if chunk.compute is None or step is None:  # between steps others may lack it
            if step is not None and step.plan is not None:
                self.reduce_due(step)  # the others do these before they hear of what no plan has
            self.ask(Subject.GATHER, chunk.spec.index, who)
            while chunk.compute is None:  # it left for what another process asked for at the same time
                self.ask(Subject.GATHER, chunk.spec.index, who)
        self._needed = None
        if not is_followed or self._is_short():
            self._meet_others(chunk, who)

    def execute_until(self, step: Step, end: int) -> None:
        """Executes the plan up to a moment, whether or not this process has come to it."""
        assert step.plan is not None
        while step.num_followed < end:
            self.reduce_due(step)
            actions = step.plan.moments[step.num_followed]
            step.num_followed += 1
            if actions.moves:
                with self._ledger.one_reading():
                    self._evict_if_unused(actions.evict)
                    for index in actions.load:
                        self._perform_planned(Subject.GATHER, index)
            step.due = list(actions.reduce)

    def reduce_due(self, step: Step) -> None:
        """Executes what is left of the reductions of the moment that the plan has come to."""
        while step.due:
            self._perform_planned(Subject.REDUCE, step.due.pop(0))

    def end_of_phase(self, step: Step, is_forward: bool) -> int:
        """The moment of the plan up to which what is running now may go."""
        assert step.plan is not None
        ends = self._tracer.traces[step.key].forward_ends if step.key in self._tracer.traces else ()
        if is_forward and ends:
            return ends[len(step.forward_ends)] if len(step.forward_ends) < len(ends) else step.num_followed
        return len(step.plan.moments)

    def ask(self, subject: Subject, index: int, who: str) -> None:
        """Does a collective that no plan has, with all that other processes ask for at the same time.

        Args:
            subject: ``GATHER`` or ``REDUCE``.
            index: The group.
            who: What it is needed for, for errors.
        """
        is_in_step = self.in_backward or self._tracer.step is not None
        self.perform(self._order.ask(Collective(subject, index), who, is_in_step=is_in_step))

    def perform(self, collectives: Iterable[Collective]) -> None:
        """Does what all processes do now."""
        for subject, index in collectives:
            with named(subject.name.lower(), index):
                (self._gather if subject is Subject.GATHER else self._reduce)(index)

    def _perform_planned(self, subject: Subject, index: int) -> None:
        collective, chunk = Collective(subject, index), self._chunks[index]
        self._order.check(collective, chunk.dtype, chunk.spec.chunk_numel)
        self.perform([collective])

    def _gather(self, index: int) -> None:
        """Takes part in a gather, whether or not this process needs it."""
        chunk, what = self._chunks[index], f"gathers group {index}"
        self._gradients.bring_values_back(chunk)
        if chunk.compute is None:
            if self._pool.room(Tier.DEVICE) < chunk.copy_nbytes:
                self._buckets.let_go()
            self._reclaim.make_room_for(chunk, chunk.copy_nbytes, f"gathering group {index}")
            with self._copies.loaded_by_others(chunk, ahead=chunk is not self._needed) as payload:
                chunk.arrival = self._collectives.all_gather(payload, what)
            self._in_use.add(chunk)
            return
        if chunk.arrival is not None:
            self._copies.wait(chunk)
        chunk.arrival = self._collectives.all_gather(chunk.compute, what)
        self._in_use.add(chunk)

    def _reduce(self, index: int) -> None:
        """Takes part in a reduction."""
        self.take_home(self._buckets.reduce(self._chunks[index]))
        self._tracer.note_reduced(index)

    def take_home(self, averages: Iterable[Average]) -> None:
        """Takes averages over processes to their places at home."""
        for tensor, gradient in averages:
            if tensor.chunk.home is Tier.HOST:
                tensor.crossing_nbytes += gradient.nbytes
            self._gradient_mirrors.sync_one(tensor)
            self._gradients.add(tensor, gradient)
            self._gradient_mirrors.drop(tensor)

    # Inside

    def _evict_everything(self, exclude: Chunk) -> None:
        for chunk in self._copies.unused(exclude):
            self._copies.poison(chunk)
            self._copies.evict(chunk)
