"""Which chunks have a copy on the compute device: loaded, prefetched and evicted by plan, or on demand without one."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hf_patrickstar.errors import BudgetError, DeviceMemoryError
from hf_patrickstar.events import ChunkEvicted, ChunkInvalidated, ChunkLoaded, ChunkRehomed, Listener
from hf_patrickstar.memory.meters import Meter
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.memory.transfers import Transfers
from hf_patrickstar.runtime.chunk import Chunk
from hf_patrickstar.runtime.collectives import Collectives
from hf_patrickstar.runtime.forecast import Forecast
from hf_patrickstar.runtime.lockstep import Lockstep, Subject
from hf_patrickstar.runtime.tracer import Step, Tracer
from hf_patrickstar.schedule.eviction import Chooser
from hf_patrickstar.schedule.plan import Actions
from hf_patrickstar.schedule.trace import Trace, common_trace
from hf_patrickstar.units import format_need

logger = logging.getLogger(__name__)

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_NEED_LESS = "use smaller or shorter batches, or activation checkpointing (--gradient_checkpointing)"


@dataclasses.dataclass(frozen=True, slots=True)
class MovePolicy:
    """How copies come and go.

    Attributes:
        chooser: Chooses which chunk leaves.
        prefetch_depth: How many loads may be under way ahead of the chunk that is needed.
        reshard_after_forward: With several processes, groups leave when forward has done with them.
        evict_all: Evict all that can be evicted at every access and poison it (debugging).
    """

    chooser: Chooser
    prefetch_depth: int
    reshard_after_forward: bool
    evict_all: bool


class Residency:
    """Keeps the device copies of chunks that are at home on the host.

    A step whose trace is known follows a plan. One that is recorded is cautious: it keeps to a part of the budget,
    and chunks leave in list order. Copies are never dirty, so that evicting one copies nothing.

    Args:
        chunks: All chunks.
        pool: Where copies come from.
        transfers: How bytes cross.
        meter: Measures what else is on the device.
        policy: How copies come and go.
        emit: Told of every event.
        collectives: Brings the chunks of other ranks.
        lockstep: Keeps to the same order of collectives on all ranks.

    Attributes:
        give_up_margin: Makes room by moving chunks out of the device margin; whether any moved.
        before_drop: Called with a chunk before its copy is dropped: something may have been written to it.
        before_gather: Called with a group before this rank's chunk is sent to others: it must hold values.
        gradient_peak: Tells the most bytes of gradients on the device since it was asked last.
        forecast: Tells what binds when there is no room.
    """

    def __init__(
        self,
        chunks: list[Chunk],
        pool: PayloadPool,
        transfers: Transfers,
        meter: Meter,
        policy: MovePolicy,
        emit: Listener,
        collectives: Collectives,
        lockstep: Lockstep,
    ) -> None:
        def agree(trace: Trace) -> Trace:
            found = collectives.exchange_objects(trace.to_json(), f"agrees on the trace '{trace.key}'")
            return trace if len(found) == 1 else common_trace([Trace.from_json(text) for text in found])

        self.chunks = chunks
        self.give_up_margin: Callable[[], bool] = lambda: False
        self.before_gather: Callable[[Chunk], None] = lambda chunk: None
        self.before_drop: Callable[[Chunk], None] = lambda chunk: None
        self.gradient_peak: Callable[[], int] = lambda: 0
        self.tracer = Tracer(
            (chunk.copy_nbytes for chunk in chunks), self._close_moment, lambda: self.gradient_peak(), agree
        )
        self.num_hits = self.num_late = 0
        self.waiting_s = 0.0
        self.ledger = pool.ledger
        self.forecast = Forecast(chunks, pool, meter, self.tracer, transfers.device)
        self._pool = pool
        self.device = transfers.device
        self._transfers = transfers
        self._meter = meter
        self._policy = policy
        self._chooser = policy.chooser
        self._emit = emit
        self._collectives = collectives
        self._lockstep = lockstep
        self._is_alone = lockstep.is_alone
        lockstep.gather = self._gather
        lockstep.in_step = lambda: self.in_backward or self.tracer.step is not None
        self._reached: Chunk | None = None
        self.in_backward = False
        self._tick = 0
        self._copies: dict[int, Chunk] = {}
        self._by_storage: dict[int, Chunk] = {}
        self._moves = any(not chunk.is_static for chunk in chunks)
        for chunk in chunks:
            if chunk.is_static:
                self._by_storage[chunk.set_compute(chunk.param)] = chunk

    def expect(self, step: Step | None, moment: int | None = None) -> None:
        """Tells the ledger what others will need until the next moment, or to be cautious where nobody knows."""
        ledger = self.ledger
        if step is None:
            ledger.is_cautious, ledger.reserved_nbytes = False, 0
        elif step.cursor is None:
            trace = self.tracer.traces.get(step.key) if step.is_lost else None
            ledger.is_cautious = True
            ledger.reserved_nbytes = trace.non_model_peak_nbytes if trace is not None else 0
        else:
            visits = step.cursor.trace.visits
            ledger.is_cautious = False
            ledger.reserved_nbytes = visits[max(step.cursor.moment if moment is None else moment, 0)].non_model_nbytes

    def _close_moment(self) -> int:
        nbytes = self._meter.peak(self.ledger.used(Tier.DEVICE))
        self.ledger.note_total(nbytes)
        return nbytes

    # Reaching a chunk

    @property
    def resident(self) -> list[Chunk]:
        """The chunks with a copy, the one visited longest ago first."""
        return sorted(self._copies.values(), key=lambda chunk: chunk.last_access)

    @property
    def moves(self) -> bool:
        """Whether any chunk is not computed with where it is at home."""
        return self._moves

    @property
    def policy(self) -> str:
        """The name of the policy by which chunks leave."""
        return self._chooser.name

    def find(self, storage_key: int) -> Chunk | None:
        """The chunk whose compute payload has this storage."""
        return self._by_storage.get(storage_key)

    def reach(self, chunk: Chunk, who: str) -> torch.Tensor:
        """The payload to compute with.

        Args:
            chunk: The chunk.
            who: Who asks, for errors.

        Raises:
            DeviceMemoryError: If it cannot be brought to the device.
        """
        index, tracer = chunk.spec.index, self.tracer
        if not self._moves and chunk.compute is not None and (tracer.step is None or tracer.step.cursor is not None):
            return chunk.compute  # everything is at home on the device: there is nothing to follow
        self._tick += 1
        chunk.last_access = self._tick
        moment = tracer.visit(index, lambda: self._in_use(exclude=chunk))
        step = tracer.step
        if step is not None:
            self.expect(step, moment)
        if self._policy.evict_all:
            self._evict_everything(exclude=chunk)
        was_there = chunk.compute is not None
        if not self._is_alone:
            self._reach_together(chunk, step, moment, who)
        elif moment is not None and step is not None and step.plan is not None:
            actions = step.plan.moments[moment]
            if actions.evict or actions.load:
                self._follow(actions, chunk, who)
        if chunk.compute is None:
            self._load(chunk, who)
        elif self._copies and self.ledger.available(Tier.DEVICE) < 0:
            self._make_room(0, chunk, who)
        is_late = chunk.arrival is not None and self._await(chunk)
        self.num_late += is_late
        self.num_hits += was_there and not chunk.is_static and not is_late
        if step is not None and step.plan is not None:  # nobody measures it: what is known is noted
            self.ledger.note_total(self.ledger.reserved_nbytes)
        elif step is not None and step.is_recorded:
            self._meter.restart()
        assert chunk.compute is not None
        return chunk.compute

    def relieve(self, *, is_step: bool) -> None:
        """Makes room for what others just took.

        Args:
            is_step: Whether it was taken inside of forward or backward, which may fail for it. Other code may have
                nothing to do with the model; what it holds counts when the step goes on.

        Raises:
            DeviceMemoryError: If it is more than all copies that can leave.
        """

        def is_enough() -> bool:
            self._trim_if_short(cautious=False)
            return self.ledger.available(Tier.DEVICE, cautious=False) >= 0

        while not self._evict_until(is_enough):
            if self.give_up_margin():
                continue
            if not is_step:
                break
            missing = -self.ledger.available(Tier.DEVICE, cautious=False)
            short = self.forecast.shortage(sum(chunk.copy_nbytes for chunk in self._copies.values()))
            raise DeviceMemoryError(
                f"{short.subject}: non-model data (activations, temporaries) of "
                f"{format_need(self.ledger.non_model_nbytes())} and the chunks in use need {format_need(missing)} more "
                f"than there is. {short.advise(_NEED_LESS)}\n{self.ledger.table()}"
            )
        self.ledger.note_total(self.ledger.non_model_nbytes())

    def make_room(self, nbytes: int, *, keep_margin: bool = False) -> None:
        """Evicts copies until so many bytes are free on the device, or none is left that can leave.

        Args:
            nbytes: How many.
            keep_margin: Chunks that live in the margin stay there.
        """
        while not self._evict_until(lambda: self._pool.room(Tier.DEVICE) >= nbytes):
            if keep_margin or not self.give_up_margin():
                break

    def evict_unused(self) -> None:
        """Evicts every copy that can leave, and gives up the buffers that are kept for reuse."""
        for chunk in self._evictable(exclude=None):
            self._evict(chunk)
        self._pool.trim()

    def drop(self, chunk: Chunk) -> None:
        """Drops the copy of a chunk, if it has one, because its home has changed."""
        if chunk.compute is not None and not chunk.is_static:
            self._drop(chunk)
            self._emit(ChunkInvalidated(chunk.spec.index, chunk.copy_nbytes))

    def rehome(self, chunk: Chunk, home: Tier) -> None:
        """Moves a chunk, with all its lists, to another tier. None of its tensors may be in use.

        Args:
            chunk: The chunk.
            home: Where it shall live.

        Raises:
            BudgetError: If there is no room; the chunk stays where it is.
        """
        chunk.wait()
        chunk.wait_for_reader()
        if chunk.compute is not None and not chunk.is_static and chunk.spec.world_size == 1:
            self._drop(chunk)  # a copy with the chunks of others stays true
        old = {"param": chunk.param, **chunk.lists}
        with _as_it_is(chunk.param):
            new = self._copy_lists(old, home)
        if chunk.is_static:
            del self._by_storage[chunk.clear_compute()[1]]
        for name, payload in old.items():
            self._pool.release(chunk.home, payload, name, keep=False)
        chunk.param = new["param"]
        chunk.lists = {name: payload for name, payload in new.items() if name != "param"}
        chunk.home = home
        self._moves = any(not chunk.is_static for chunk in self.chunks)
        if chunk.is_static:
            self._by_storage[chunk.set_compute(chunk.param)] = chunk
        nbytes = sum(payload.nbytes for payload in new.values())
        self._emit(ChunkRehomed(chunk.spec.index, to_device=home is Tier.DEVICE, nbytes=nbytes))

    def note_chunks(self) -> None:
        """Takes note of chunks that came or went."""
        for chunk in self.chunks:
            if chunk.is_static and chunk.compute is None:
                self._by_storage[chunk.set_compute(chunk.param)] = chunk
        self._moves = any(not (chunk.is_static or chunk.is_retired) for chunk in self.chunks)

    def forget(self, chunk: Chunk) -> None:
        """Drops what a chunk is computed with, because the chunk is about to go."""
        if chunk.spec.index in self._copies:
            self._drop(chunk)
        elif chunk.compute is not None:
            del self._by_storage[chunk.clear_compute()[1]]

    def pin(self, chunk: Chunk) -> None:
        """Moves a chunk that is at home on the host into pinned memory, if that is wanted and there is room for it."""
        if self._pool.pins_memory and not chunk.param.is_pinned():
            with contextlib.suppress(BudgetError):  # copies are slower then, and right
                self.rehome(chunk, Tier.HOST)

    def _copy_lists(self, lists: Mapping[str, torch.Tensor], home: Tier) -> dict[str, torch.Tensor]:
        """The same on another tier; all or none."""
        new: dict[str, torch.Tensor] = {}
        try:
            for name, payload in lists.items():
                pinned = home is Tier.HOST and name == "param"
                new[name] = self._pool.allocate(home, payload.numel(), payload.dtype, name, pinned=pinned)
                new[name].copy_(payload)
        except BaseException:
            for name, payload in new.items():
                self._pool.release(home, payload, name, keep=False)
            raise
        return new

    def close(self) -> None:
        """Drops every copy; static chunks are forgotten."""
        for chunk in list(self._copies.values()):
            self._drop(chunk)
        self._by_storage.clear()
        self._meter.stop()

    # Inside

    def _follow(self, actions: Actions, chunk: Chunk, who: str) -> None:
        self._let_go(actions.evict)
        for index in actions.load:
            other = self.chunks[index]
            if other is chunk:
                if chunk.compute is None:
                    self._load(chunk, who)
            elif other.compute is None and self._pool.room(Tier.DEVICE) >= other.copy_nbytes:
                self._start(other, ahead=True)

    def _let_go(self, indices: Iterable[int]) -> None:
        for index in indices:
            chunk = self._copies.get(index)
            if chunk is not None and not chunk.is_in_use:
                self._evict(chunk)

    def _load(self, chunk: Chunk, who: str) -> None:
        self._make_room(chunk.copy_nbytes, chunk, who)
        self._start(chunk, ahead=False)

    def _start(self, chunk: Chunk, *, ahead: bool) -> None:
        with _as_it_is(chunk.param):
            try:
                payload = self._pool.allocate(Tier.DEVICE, chunk.spec.capacity_numel, chunk.param.dtype, "param")
            except BudgetError as error:
                raise DeviceMemoryError(str(error)) from error
            self._copies[chunk.spec.index] = chunk
            self._by_storage[chunk.set_compute(payload)] = chunk
            try:
                if chunk.spec.world_size > 1:
                    chunk.note(self._transfers.to_slice(chunk.param, chunk.own_slice(payload)))
                    with self._transfers.beside():
                        chunk.arrival = self._collectives.all_gather(payload, f"gathers group {chunk.spec.index}")
                elif ahead:
                    chunk.arrival = self._transfers.fetch(chunk.param, payload)
                    chunk.note(chunk.arrival)
                else:
                    chunk.note(self._transfers.to_device(chunk.param, payload))
            except BaseException:
                self._drop(chunk, is_filled=False)
                raise
        self._emit(ChunkLoaded(chunk.spec.index, chunk.param_nbytes if chunk.home is Tier.HOST else 0, ahead))

    # Together with other processes; see [Note: one order of collectives]

    def offer(self, chunk: Chunk, is_complete: Callable[[Chunk], bool]) -> None:
        """Reduces a group whose gradients are complete, as soon as it is its turn.

        Args:
            chunk: The group.
            is_complete: Tells it of others whose turn may come thereby.
        """
        step = self.tracer.step
        if step is None or step.plan is None:
            self._lockstep.ask(Subject.REDUCE, chunk.spec.index, "its gradients, which are complete")
            return
        while step.due and is_complete(self.chunks[step.due[0]]):
            self._lockstep.follow(Subject.REDUCE, step.due.pop(0))

    def _reach_together(self, chunk: Chunk, step: Step | None, moment: int | None, who: str) -> None:
        self._reached = chunk
        if step is not None and step.plan is not None:
            end = self.end_of_phase(step, not self.in_backward)
            if moment is not None:  # another branch may look like what comes after this forward
                self.follow_to(step, min(moment + 1, end))
            while chunk.compute is None and step.num_followed < end:
                self.follow_to(step, step.num_followed + 1)
        if chunk.compute is None or step is None:  # between steps nobody knows what others have at hand
            if step is not None and step.plan is not None:
                self.reduce_due(step)  # the others do these before they hear of what no plan has
            self._lockstep.ask(Subject.GATHER, chunk.spec.index, who)
        self._reached = None

    def follow_to(self, step: Step, end: int) -> None:
        """Executes the plan up to a moment, whether or not this process has come to it."""
        assert step.plan is not None
        while step.num_followed < end:
            self.reduce_due(step)
            actions = step.plan.moments[step.num_followed]
            step.num_followed += 1
            self._let_go(actions.evict)
            for index in actions.load:
                self._lockstep.follow(Subject.GATHER, index)
            step.due = list(actions.reduce)

    def reduce_due(self, step: Step) -> None:
        """Executes what is left of the reductions of the moment that the plan has come to."""
        while step.due:
            self._lockstep.follow(Subject.REDUCE, step.due.pop(0))

    def end_of_phase(self, step: Step, is_forward: bool) -> int:
        """The moment of the plan up to which what is running now may go."""
        assert step.plan is not None
        turns = self.tracer.traces[step.key].turns if step.key in self.tracer.traces else ()
        if is_forward and turns:
            return turns[len(step.turns)] if len(step.turns) < len(turns) else step.num_followed
        return len(step.plan.moments)

    def _gather(self, index: int) -> None:
        """Takes part in a gather, whether or not this process needs it."""
        chunk = self.chunks[index]
        self.before_gather(chunk)
        if chunk.compute is None:
            self._make_room(chunk.copy_nbytes, chunk, f"gathering group {index}")
            self._start(chunk, ahead=chunk is not self._reached)
            return
        if chunk.arrival is not None:
            self._await(chunk)
        chunk.arrival = self._collectives.all_gather(chunk.compute, f"gathers group {index}")

    def _await(self, chunk: Chunk) -> bool:
        """Lets the compute device wait for a copy that was started ahead; returns whether it had to."""
        arrival = chunk.arrival
        assert arrival is not None
        is_late = not arrival.is_done
        begin = time.perf_counter()
        arrival.join()
        chunk.arrival = None
        if is_late:
            self.waiting_s += time.perf_counter() - begin
        return is_late

    def _await_gathers(self, exclude: Chunk | None) -> bool:
        """Waits for gathers that this process had no need of, which still look into copies; whether there were any."""
        if self._lockstep.is_alone:
            return False
        pending = [chunk for chunk in self._copies.values() if chunk is not exclude and chunk.arrival is not None]
        for chunk in pending:
            self._await(chunk)
        return bool(pending)

    def _make_room(self, nbytes: int, chunk: Chunk, who: str) -> None:
        self._trim_if_short()
        self._evict_until(lambda: self._pool.room(Tier.DEVICE) >= nbytes, exclude=chunk)
        self._trim_if_short()
        room = self._pool.room(Tier.DEVICE, cautious=False)
        if nbytes and room < nbytes and self.give_up_margin():
            room = self._pool.room(Tier.DEVICE, cautious=False)
        if nbytes and room < nbytes:
            raise DeviceMemoryError(self._too_small(nbytes, room, chunk, who))

    def _evict_until(self, is_enough: Callable[[], bool], exclude: Chunk | None = None) -> bool:
        """Evicts copies one by one until there is enough room; whether there is."""
        while not is_enough():
            victim = self._choose(exclude)
            if victim is not None:
                self._evict(victim)
            elif not self._await_gathers(exclude):
                return False
        return True

    def _trim_if_short(self, *, cautious: bool | None = None) -> None:
        """Kept buffers are the first to go when others need the room."""
        if self.ledger.available(Tier.DEVICE, cautious=cautious) < 0:
            self._pool.trim()

    def _too_small(self, nbytes: int, room: int, chunk: Chunk, who: str) -> str:
        ledger = self.ledger
        pinned = [index for index, other in self._copies.items() if other is not chunk]
        names = ", ".join(
            sorted({tensor.spec.name for other in self.chunks for tensor in other.tensors if tensor.users})
        )
        short = self.forecast.shortage(nbytes + sum(self.chunks[index].copy_nbytes for index in pinned))
        return (
            f"{short.subject} for {who}: chunk {chunk.spec.index} needs {format_need(nbytes)}, "
            f"{format_need(max(room, 0))} are free beside non-model data of {format_need(ledger.non_model_nbytes())}, "
            f"and none of the chunks there ({pinned}) can leave, because they are in use (computing with: "
            f"{names or 'none'}; a recomputed segment keeps all of its parameters). "
            f"{short.advise(_NEED_LESS + ', or lower chunk_numel')}\n{ledger.table()}"
        )

    def _choose(self, exclude: Chunk | None) -> Chunk | None:
        evictable = {other.spec.index: other for other in self._evictable(exclude)}
        if not evictable:
            return None
        step = self.tracer.step
        candidates = [(index, other.last_access) for index, other in evictable.items()]
        cursor, is_lost = (step.cursor, step.is_lost) if step is not None else (None, True)
        return evictable[self._chooser.choose(sorted(candidates), cursor, is_lost)]

    def _evictable(self, exclude: Chunk | None) -> list[Chunk]:
        """Copies that nobody computes with or looks into."""
        return [chunk for chunk in self._copies.values() if chunk is not exclude and not chunk.is_in_use]

    def _in_use(self, exclude: Chunk) -> Iterable[int]:
        """Indices of the chunks that could not leave the device now."""
        for chunk in self.chunks:
            if chunk is not exclude and chunk.is_in_use:
                yield chunk.spec.index

    def _evict_everything(self, exclude: Chunk) -> None:
        for chunk in self._evictable(exclude):
            assert chunk.compute is not None
            self.before_drop(chunk)
            chunk.compute.fill_(float("nan"))
            self._evict(chunk)

    def _evict(self, chunk: Chunk) -> None:
        self._drop(chunk)
        self._emit(ChunkEvicted(chunk.spec.index, chunk.copy_nbytes))

    def _drop(self, chunk: Chunk, *, is_filled: bool = True) -> None:
        if chunk.arrival is not None:
            self._await(chunk)
        if is_filled:
            self.before_drop(chunk)
        aliased = chunk.is_aliased
        del self._copies[chunk.spec.index]
        payload, key = chunk.clear_compute()
        del self._by_storage[key]
        self._pool.release(Tier.DEVICE, payload, "param", keep=not aliased)


def _as_it_is(payload: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Leaves whatever modes code is run under, so that new payloads are what the old one is.

    In inference mode they could never be trained with, inside a function transform they would be wrappers, and under
    fake tensors they would hold nothing.
    """
    is_disguised = type(payload) is torch.Tensor and torch._C._get_dispatch_mode(_FAKE) is not None
    if is_disguised or torch.is_inference_mode_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
        return _without_modes(is_real=type(payload) is torch.Tensor)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _without_modes(*, is_real: bool) -> Iterator[None]:
    with (
        torch.inference_mode(False),
        temporarily_clear_interpreter_stack(),
        unset_fake_temporarily() if is_real else contextlib.nullcontext(),
    ):
        yield
