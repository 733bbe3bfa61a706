"""The one way in which chunks move: by the plan of the step, else on demand; and the one place that makes room.

[Note: chunks in use]
A chunk cannot leave while a module computes with it or a tensor looks into it, and only the chunk itself can tell
(``Chunk.is_in_use``). While a step is recorded, each visit notes which chunks those are. To ask all of them at each
visit would take a time that grows as the square of their number. But modules get hold of a chunk by a visit alone, and
other processes by a gather. So at a visit only those chunks are asked that were in use at the last one, or were visited
or gathered since, and those that code of the user has looked into by ``Values.look``, as an update of a parameter
inside of a forward does. All are asked at the first visit of a step.
"""

import dataclasses
from collections.abc import Callable, Iterable

import torch

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.errors import DeviceMemoryError, Later
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import Chunk, Device
from hf_patrickstar.runtime.placement import Placement
from hf_patrickstar.runtime.tracer import Step, Tracer
from hf_patrickstar.schedule.eviction import Chooser
from hf_patrickstar.schedule.plan import Actions
from hf_patrickstar.shortage import Shortage
from hf_patrickstar.units import format_nbytes

Together = Callable[[Chunk, Step | None, int | None, str], None]
"""Brings a chunk to the device together with other processes: the chunk, the step, the moment, and the caller."""


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


class Executor:
    """Brings chunks to the device, by plan where the step has one, on demand where not, and makes room for them.

    A step whose trace is known follows a plan. One that is recorded is cautious: it keeps to a part of the budget,
    and chunks leave in list order.

    Args:
        device: The device.
        tracer: Has the step that runs: what a visit does depends on it.
        placement: Knows which chunks live in the device margin, and moves them out.
        advise: Says what helps when there is no room.
        policy: How copies come and go.

    Attributes:
        in_backward: Whether a backward has begun that has not ended.
        least: Says with how much memory the step that runs has room, if that is known.
    """

    def __init__(
        self,
        device: Device,
        tracer: Tracer,
        placement: Placement,
        advise: Callable[[], str],
        policy: MovePolicy,
    ) -> None:
        self._device, self._chunks = device, device.chunks
        self._pool, self._ledger = device.pool, device.pool.ledger
        self._meter = device.meter
        self._tracer = tracer
        self._placement = placement
        self._advise = advise
        self._policy = policy
        self.in_backward = False
        self.least: Later | None = None
        self._tick = 0
        self._asked: dict[int, Chunk] = {}  # whether they are in use, at the next recorded visit, by index
        self._asked_at = (-1, 0)  # the step and the visit for which these are all

    # A visit

    @property
    def is_at_rest(self) -> bool:
        """Whether every chunk is computed with where it is at home, and no visit has to be noted."""
        if self._device.moves:
            return False
        step = self._tracer.step
        return step is None or step.cursor is not None

    def visit(self, chunk: Chunk, caller: str, together: Together | None = None) -> torch.Tensor:
        """Brings a chunk to the device: what the plan says for this moment, or what is needed.

        Args:
            chunk: The chunk.
            caller: Who asks, for errors.
            together: Brings the chunk, where there are several processes.

        Returns:
            The payload to compute with; it stays while a module computes with it or a tensor looks into it.

        Raises:
            DeviceMemoryError: If it cannot be brought to the device.
        """
        tracer, ledger = self._tracer, self._ledger
        step = tracer.step
        if chunk.compute is not None and not self._device.moves and (step is None or step.cursor is not None):
            return chunk.compute  # every chunk is at home on the device: there is nothing to follow
        self._tick += 1
        chunk.last_access = self._tick
        moment = tracer.visit(chunk.spec.index, self._in_use, chunk)
        step = tracer.step
        actions = None
        if step is not None:
            if moment is None or step.is_measured:
                self.expect(step, moment)
            else:
                assert step.cursor is not None
                ledger.is_cautious = False
                ledger.reserved_nbytes = step.cursor.trace.visits[moment].non_model_nbytes
            if moment is not None and step.plan is not None:
                actions = step.plan.moments[moment]
        if self._policy.evict_all:
            self._evict_everything(exclude=chunk)
        was_there = chunk.compute is not None
        if together is not None:
            together(chunk, step, moment, caller)
        elif (not was_there or actions is None or actions.evict or actions.load) or ledger.available(
            Tier.DEVICE, measures=False
        ) < 0:
            # At a visit after which no more is there than before, non-model data is not measured: at one that moves
            # nothing it would take longer than all else.
            measures = actions is None or step is None or step.is_measured or self._takes_more(chunk, actions)
            with ledger.one_reading(measures=measures):
                self._bring(chunk, actions, caller)
        counts = self._device.counts
        waited_s = chunk.wait_for_copy() if chunk.arrival is not None else None
        counts.chunk_visits += 1
        if waited_s is not None:
            counts.late_prefetches += 1
            counts.waiting_seconds += waited_s
        elif was_there and not chunk.is_static:
            counts.chunk_hits += 1
        if counts.log is not None:
            counts.log.append(("visit", chunk.spec.index))
        if step is not None and (moment is None or step.is_measured) and step.has_moments:
            self._meter.restart()
        elif step is not None and step.plan is not None:  # it is not measured: what the trace says is noted
            ledger.note_total(ledger.reserved_nbytes)
        assert chunk.compute is not None
        return chunk.compute

    def expect(self, step: Step | None, moment: int | None = None) -> None:
        """Tells the ledger what non-model data will need until the next moment, or to be cautious without a trace."""
        ledger = self._ledger
        if step is None or (step.cursor is not None and not step.cursor.trace.visits):  # no parameter is used
            ledger.is_cautious, ledger.reserved_nbytes = False, 0
        elif step.cursor is None or (step.is_measured and step.plan is None):
            # A trace that was made beforehand may estimate too much: if no plan fits, what is measured decides.
            trace = self._tracer.traces.get(step.key) if step.is_diverged and not step.is_measured else None
            ledger.is_cautious = True
            ledger.reserved_nbytes = trace.non_model_peak_nbytes if trace is not None else 0
        else:
            visits = step.cursor.trace.visits
            ledger.is_cautious = False
            ledger.reserved_nbytes = visits[max(step.cursor.moment if moment is None else moment, 0)].non_model_nbytes

    def _bring(self, chunk: Chunk, actions: Actions | None, caller: str) -> None:
        """Does what the plan says, and loads the chunk if that has not; this process has all of it."""
        if actions is not None:
            self.evict_if_unused(actions.evict)
            for index in actions.load:
                other = self._chunks[index]
                if other is not chunk and other.compute is None and self._pool.room(Tier.DEVICE) >= other.copy_nbytes:
                    other.load(ahead=True)
                elif other is chunk and chunk.compute is None:
                    self._load(chunk, caller)
        if chunk.compute is None:
            self._load(chunk, caller)
        else:
            self.shrink_to_budget(chunk, caller)

    def _takes_more(self, chunk: Chunk, actions: Actions) -> bool:
        """Whether more is loaded at the visit of a chunk than is evicted."""
        chunks = self._chunks
        loaded = sum([chunks[index].copy_nbytes for index in actions.load])
        if chunk.compute is None and chunk.spec.index not in actions.load:
            loaded += chunk.copy_nbytes
        return loaded > sum([chunks[index].copy_nbytes for index in actions.evict])

    def _load(self, chunk: Chunk, caller: str) -> None:
        self.make_room_for(chunk, chunk.copy_nbytes, caller)
        chunk.load(ahead=False)

    def shrink_to_budget(self, chunk: Chunk, caller: str) -> None:
        """Evicts what is there beyond the budget, because non-model data has grown; the visited chunk stays."""
        if self._ledger.available(Tier.DEVICE) < 0 and self._device.copies:
            self.make_room_for(chunk, 0, caller)

    # What is in use; see [Note: chunks in use]

    def note_gathered(self, chunk: Chunk) -> None:
        """Notes a chunk that may be in use from now on, although nobody visits it."""
        self._asked[chunk.spec.index] = chunk

    def _in_use(self, visited: Chunk) -> list[int]:
        """The indices of all other chunks that are in use at a visit that is recorded, in order."""
        number, moment = self._tracer.place
        chunks = {*self._asked.values(), *self._device.looked_into}
        if self._asked_at != (number, moment):
            chunks = {*self._device.by_storage.values()}
        self._device.looked_into.clear()
        others = [chunk for chunk in chunks if chunk is not visited]
        found = [chunk for chunk in others if chunk.is_in_use]
        pending = [chunk for chunk in others if chunk.arrival is not None]  # whose gather may begin to look into it
        self._asked = {chunk.spec.index: chunk for chunk in (visited, *found, *pending)}
        self._asked_at = number, moment + 1
        return sorted(chunk.spec.index for chunk in found)

    # Room: kept buffers go first, then copies, then gradients on their way to the host, then chunks of the margin

    def make_room(self, nbytes: int, *, keep_margin: bool = False) -> None:
        """Frees so many bytes, or as many as can be freed; the allocation that follows fails if they are too few.

        Args:
            nbytes: How many.
            keep_margin: Chunks that live in the margin stay there.
        """
        while not self._evict_until(lambda: self._pool.room(Tier.DEVICE) >= nbytes):
            # Caution is a reason for copies to leave, which come back at once, and none for homes.
            if keep_margin or self._pool.room(Tier.DEVICE, cautious=False) >= nbytes or not self._leave_margin():
                break

    def make_room_for(self, chunk: Chunk, nbytes: int, caller: str) -> None:
        """Frees so many bytes for a chunk.

        Args:
            chunk: The chunk, which does not leave.
            nbytes: How many; 0 only brings what is there under the budget, as far as it can leave.
            caller: Who needs the chunk, for errors.

        Raises:
            DeviceMemoryError: If there are not as many.
        """
        self._trim_if_short()
        if self._pool.room(Tier.DEVICE) >= nbytes:
            return
        self._evict_until(lambda: self._pool.room(Tier.DEVICE) >= nbytes, exclude=chunk)
        self._trim_if_short()
        room = self._pool.room(Tier.DEVICE, cautious=False)
        if nbytes and room < nbytes and self._leave_margin():
            room = self._pool.room(Tier.DEVICE, cautious=False)
        if nbytes and room < nbytes:
            raise self._too_small(nbytes, chunk, caller)

    def make_room_for_gradients(self, chunk: Chunk) -> None:
        """Frees the bytes of a buffer for the gradients of a group.

        Args:
            chunk: The group; its copy may leave.

        Raises:
            DeviceMemoryError: If there are not as many.
        """
        self.make_room(chunk.copy_nbytes)
        if self._pool.room(Tier.DEVICE, cautious=False) < chunk.copy_nbytes:
            raise self._too_small(chunk.copy_nbytes, None, f"the gradients of group {chunk.spec.index}")

    def make_room_for_non_model(self, *, is_step: bool) -> None:
        """Makes room for what is not chunks, and was just allocated.

        Args:
            is_step: Whether that was inside of forward or backward, which may fail for it. Other code may have nothing
                to do with the model; what it holds counts when the step goes on.

        Raises:
            DeviceMemoryError: If it is more than all copies that can leave.
        """
        ledger = self._ledger

        def is_enough() -> bool:
            self._trim_if_short(cautious=False)
            return ledger.available(Tier.DEVICE, cautious=False) >= 0

        while not self._evict_until(is_enough):
            if self._leave_margin():
                continue
            if not is_step:
                break
            raise self._too_small(0, None, "what a module computes")
        ledger.note_total(ledger.non_model_nbytes())

    def evict_unused(self) -> None:
        """Evicts every copy that can leave, and gives up the buffers that are kept for reuse."""
        for chunk in self._device.unused():
            chunk.evict()
        self._pool.trim()

    def evict_if_unused(self, indices: Iterable[int]) -> None:
        """Evicts those of these copies that nobody looks into."""
        for index in indices:
            chunk = self._chunks[index]
            if chunk.has_copy and not chunk.is_in_use:
                chunk.evict()

    def _evict_everything(self, exclude: Chunk) -> None:
        for chunk in self._device.unused(exclude):  # who goes on to use one computes with NaN, or with bytes of 85
            assert chunk.compute is not None
            chunk.compute.fill_(float("nan") if chunk.dtype.is_floating_point else 85)
            chunk.evict()

    def _evict_until(self, is_enough: Callable[[], bool], exclude: Chunk | None = None) -> bool:
        """Evicts copies one by one until there is enough room; whether there is."""
        while not is_enough():
            victim = self._choose(exclude)
            if victim is not None:
                victim.evict()
            elif not (self._await_gathers(exclude) or self._free_gradients_in_flight()):
                return False
        return True

    def _choose(self, exclude: Chunk | None) -> Chunk | None:
        step = self._tracer.step
        cursor, is_diverged = (step.cursor, step.is_diverged) if step is not None else (None, True)
        chunks = {chunk.spec.index: chunk for chunk in self._device.copies if chunk is not exclude}
        candidates = [(index, chunk.last_access) for index, chunk in chunks.items()]
        order = self._policy.chooser.in_order(candidates, cursor, is_diverged)
        # Whether a chunk is in use is asked in that order, since it takes longest.
        return next((chunks[index] for index in order if not chunks[index].is_in_use), None)

    def _await_gathers(self, exclude: Chunk | None) -> bool:
        """Waits for gathers that this process had no need of, which still look into copies; whether there were any."""
        groups = (chunk for chunk in self._device.copies if chunk.is_group and chunk is not exclude)
        pending = [chunk for chunk in groups if chunk.arrival is not None]
        for chunk in pending:
            chunk.wait_for_copy()
        return bool(pending)

    def _free_gradients_in_flight(self) -> bool:
        """Waits for gradients on their way; what was measured of this step with them is more than later steps need."""
        has_freed = self._device.streams.hold_at_most(0)
        self._ledger.read_again()
        if has_freed and self._tracer.step is not None:
            self._tracer.step.is_void = True
        return has_freed

    def _leave_margin(self) -> bool:
        has_left = self._placement.leave_margin()
        self._ledger.read_again()  # what was on its way to the lists that moved has arrived
        return has_left

    def _trim_if_short(self, *, cautious: bool | None = None) -> None:
        """Kept buffers are the first to go when non-model data needs the room."""
        if self._ledger.available(Tier.DEVICE, cautious=cautious) < 0:
            self._pool.trim()

    def _too_small(self, nbytes: int, chunk: Chunk | None, caller: str) -> DeviceMemoryError:
        """The error where so many bytes more have no room: what is needed and what there is, and what helps."""
        ledger, others = self._ledger, [other for other in self._device.copies if other is not chunk]
        in_use = sum(other.copy_nbytes for other in others)
        kinds = {"activations and temporaries": ledger.non_model_nbytes(), "chunks in use": in_use + nbytes}
        kinds["others"] = ledger.used(Tier.DEVICE) - sum(copy.copy_nbytes for copy in self._device.copies)
        booked = kinds["chunks in use"] + kinds["others"]
        short = Shortage(zip(ledger.limits(Tier.DEVICE), (sum(kinds.values()), booked), strict=False))
        need = " and ".join(f"{format_nbytes(need)} of {format_nbytes(limit.nbytes)}" for limit, need in short.needs)
        parts = ", ".join(f"{kind} {format_nbytes(size)}" for kind, size in kinds.items() if size)
        names = sorted({tensor.spec.name for copy in self._device.copies for tensor in copy.tensors if tensor.users})
        computing = ""
        if others and nbytes:
            computing = (
                f". Chunks {[other.spec.index for other in others]} are in use: it computes with "
                f"{', '.join(names) or 'none'}, a recomputed segment keeps all of its parameters, and saved-tensors "
                "hooks that a module puts on itself keep those that they return as they are"
            )
        error = DeviceMemoryError(f"{short.subject} for {caller}: {need} are needed there ({parts}){computing}.")
        error.more = self.what_helps()
        return error

    def what_helps(self) -> Later:
        """What is on both tiers, and what helps where the device has no room for the step that runs."""
        table, least, advise = self._ledger.table(), self.least, self._advise
        return Later(lambda: "\n".join(filter(None, (table, str(least or ""), advise()))))
