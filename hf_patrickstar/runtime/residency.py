"""Which chunks have a copy on the compute device: loaded, prefetched and evicted by plan, or on demand without one."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

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
from hf_patrickstar.runtime.tracer import Step, Tracer
from hf_patrickstar.schedule.eviction import Chooser
from hf_patrickstar.schedule.plan import Actions, Plan, chunkable_nbytes, make_plan
from hf_patrickstar.schedule.trace import Shapes, Trace
from hf_patrickstar.units import format_need

logger = logging.getLogger(__name__)


class Residency:
    """Keeps the device copies of chunks that are at home on the host.

    A step whose trace is known follows a plan. One that is recorded is cautious: it keeps to a part of the budget,
    and chunks leave in list order. Copies are never dirty, so that evicting one copies nothing.

    Args:
        chunks: All chunks.
        pool: Where copies come from.
        transfers: How bytes cross.
        meter: Measures what else is on the device.
        chooser: Chooses which chunk leaves.
        emit: Told of every event.
        prefetch_depth: How many loads may be under way ahead of the chunk that is needed.
        evict_all: Evict all that can be evicted at every access and poison it (debugging).
    """

    def __init__(
        self,
        chunks: list[Chunk],
        pool: PayloadPool,
        transfers: Transfers,
        meter: Meter,
        chooser: Chooser,
        emit: Listener,
        prefetch_depth: int,
        evict_all: bool,
    ) -> None:
        self.chunks = chunks
        self.tracer = Tracer((chunk.param_nbytes for chunk in chunks), self._close_moment)
        self.num_hits = self.num_late = 0
        self.waiting_s = 0.0
        self.ledger = pool.ledger
        self._pool = pool
        self._transfers = transfers
        self._meter = meter
        self._chooser = chooser
        self._emit = emit
        self._prefetch_depth = 0 if evict_all else prefetch_depth
        self._evict_all = evict_all
        self._tick = 0
        self._copies: dict[int, Chunk] = {}
        self._by_storage: dict[int, Chunk] = {}
        self._plans: dict[str, tuple[Trace, object, Plan | None]] = {}
        self.give_up_margin: Callable[[], bool] = lambda: False
        self._moves = any(not chunk.is_static for chunk in chunks)
        for chunk in chunks:
            if chunk.is_static:
                self._by_storage[chunk.set_compute(chunk.param)] = chunk

    # Steps

    def begin_step(
        self, kind: str, shapes: Shapes, present: Iterable[torch.Tensor], dropped_after: frozenset[int]
    ) -> None:
        """Begins a training step.

        Args:
            kind: What the step is.
            shapes: Shapes of its inputs.
            present: Tensors on the device that are there already and are not chunks.
            dropped_after: Chunks whose copies are void when it has ended.
        """
        is_unknown = not shapes  # what its inputs are cannot be seen, so a trace may not be relied on
        self._enter(self.tracer.begin(kind, shapes, dropped_after, always_metered=is_unknown), present)

    def begin_interlude(self, kind: str, shapes: Shapes, present: Iterable[torch.Tensor]) -> None:
        """Begins an evaluation, between steps or inside of one."""
        self._enter(self.tracer.begin_interlude(kind, shapes, always_metered=True), present)

    def end_interlude(self) -> None:
        """Ends it; the step that it interrupted goes on."""
        self.tracer.end_interlude()
        step = self.tracer.step
        if step is None or not step.is_metered:
            self._meter.pause()
            self._meter.stop()
        self._expect(step)

    def end_forward(self) -> None:
        """Ends an outermost forward of training: a step that cannot be measured to its end is not recorded."""
        if self._meter.leave() and self.tracer.step is not None and self.tracer.step.is_recorded:
            self.forget_step()

    def finish_step(self) -> None:
        """Ends a step. It may be called inside of backward, where the meter cannot be stopped, only paused."""
        self.tracer.finish()
        self._meter.pause()
        self._expect(None)

    @property
    def policy(self) -> str:
        """The name of the policy by which chunks leave."""
        return self._chooser.name

    def begin_update(self) -> None:
        """Begins the optimizer's step, which has a trace of its own: what it needs on the device beside the chunks."""
        self.tracer.forget()
        step = self.tracer.begin("optimizer")
        if step.is_metered:
            self._meter.start(())
            self._meter.restart()

    def visit_for_update(self, chunk: Chunk) -> None:
        """Notes that the optimizer comes to a chunk, wherever that is at home."""
        self.tracer.visit(chunk.spec.index, lambda: ())
        if self.tracer.step is not None and self.tracer.step.is_recorded:
            self._meter.restart()

    def finish_update(self) -> None:
        """Ends the optimizer's step."""
        self.finish_step()
        self.settle()

    def forget_step(self) -> None:
        """Drops a step that came to nothing."""
        self.tracer.forget()
        self.settle()
        self._expect(None)

    def settle(self) -> None:
        """Takes the meter off this thread if no step is running; called outside of backward."""
        if self.tracer.step is None:
            self._meter.stop()

    def _enter(self, step: Step, present: Iterable[torch.Tensor]) -> None:
        if step.cursor is not None:
            step.plan = self._plan(step.cursor.trace, step.dropped_after)
        if step.is_metered:
            self._meter.start(present)
            self._meter.restart()
        self._expect(step)

    def _expect(self, step: Step | None, moment: int | None = None) -> None:
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

    def _plan(self, trace: Trace, dropped_after: frozenset[int]) -> Plan | None:
        """The plan of a step that begins now; the last one of its kind if everything is as it was then."""
        resident = sorted(self._copies.values(), key=lambda chunk: chunk.last_access)
        indices = tuple(chunk.spec.index for chunk in resident)
        fixed = self._pool.in_use(Tier.DEVICE) - sum(chunk.param_nbytes for chunk in resident)
        free = self.ledger.limit(Tier.DEVICE, cautious=False) - fixed
        chunk_budget = self.ledger.chunk_budget
        most = None if chunk_budget is None else chunk_budget - fixed
        static = frozenset(chunk.spec.index for chunk in self.chunks if chunk.is_static)
        floor = self._meter.floor(self.ledger.used(Tier.DEVICE))
        situation = (indices, free, most, static, dropped_after, floor)
        known = self._plans.get(trace.key)
        if known is None or known[0] is not trace or known[1] != situation:
            try:
                plan = make_plan(
                    trace,
                    chunkable_nbytes(trace, free, most, floor),
                    self._chooser,
                    {index: place - len(indices) for place, index in enumerate(indices)},
                    dropped_after=dropped_after,
                    static=static,
                    prefetch_depth=self._prefetch_depth,
                )
                logger.debug(
                    "patrickstar: plan of '%s': %d loads, %d evictions", trace.key, plan.num_loads, plan.num_evictions
                )
            except BudgetError as error:
                plan = None  # on demand, which fails only where it really does not fit, and says what to change
                logger.info("patrickstar: no plan for '%s', chunks move on demand: %s", trace.key, error)
            self._plans[trace.key] = (trace, situation, plan)
        return self._plans[trace.key][2]

    def _close_moment(self) -> int:
        nbytes = self._meter.peak(self.ledger.used(Tier.DEVICE))
        self.ledger.note_total(nbytes)
        return nbytes

    # Reaching a chunk

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
            self._expect(step, moment)
        if self._evict_all:
            self._evict_everything(exclude=chunk)
        was_there = chunk.compute is not None
        if moment is not None and step is not None and step.plan is not None:
            self._follow(step.plan.moments[moment], chunk, who)
        if chunk.compute is None:
            self._load(chunk, who)
        elif self._copies and self.ledger.available(Tier.DEVICE) < 0:
            self._make_room(0, chunk, who)
        is_late = chunk.arrival is not None and self._await(chunk)
        self.num_late += is_late
        self.num_hits += was_there and not chunk.is_static and not is_late
        if step is not None and step.is_recorded:
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
        self._pool_trim_if_short(cautious=False)
        while self.ledger.available(Tier.DEVICE, cautious=False) < 0:
            victim = self._choose(exclude=None)
            if victim is None and self.give_up_margin():
                continue
            if victim is None and not is_step:
                break
            if victim is None:
                raise DeviceMemoryError(
                    f"device_budget is too small: non-model data (activations, temporaries) of "
                    f"{format_need(self.ledger.non_model_nbytes())} and the chunks in use need "
                    f"{format_need(-self.ledger.available(Tier.DEVICE, cautious=False))} more than there is. Raise "
                    "device_budget, use smaller or shorter batches, or activation checkpointing "
                    f"(--gradient_checkpointing).\n{self.ledger.table()}"
                )
            self._evict(victim)
            self._pool_trim_if_short(cautious=False)
        self.ledger.note_total(self.ledger.non_model_nbytes())

    def make_room(self, nbytes: int, *, keep_margin: bool = False) -> None:
        """Evicts copies until so many bytes are free on the device, or none is left that can leave.

        Args:
            nbytes: How many.
            keep_margin: Chunks that live in the margin stay there.
        """
        while self._pool.room(Tier.DEVICE) < nbytes:
            victim = self._choose(exclude=None)
            if victim is not None:
                self._evict(victim)
            elif keep_margin or not self.give_up_margin():
                return

    def evict_unused(self) -> None:
        """Evicts every copy that can leave, and gives up the buffers that are kept for reuse."""
        for chunk in self._evictable(exclude=None):
            self._evict(chunk)
        self._pool.trim()

    def drop(self, chunk: Chunk) -> None:
        """Drops the copy of a chunk, if it has one, because its home has changed."""
        if chunk.compute is not None and not chunk.is_static:
            self._drop(chunk)
            self._emit(ChunkInvalidated(chunk.spec.index, chunk.param_nbytes))

    def rehome(self, chunk: Chunk, home: Tier) -> None:
        """Moves a chunk, with all its lists, to another tier. None of its tensors may be in use.

        Args:
            chunk: The chunk.
            home: Where it shall live.

        Raises:
            BudgetError: If there is no room; the chunk stays where it is.
        """
        chunk.wait()
        if chunk.compute is not None and not chunk.is_static:
            self._drop(chunk)
        old = {"param": chunk.param, **chunk.lists}
        with _as_it_is(chunk.param):
            new = self._allocate_lists(old, home)
            for name, payload in old.items():
                new[name].copy_(payload)
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

    def _allocate_lists(self, lists: Mapping[str, torch.Tensor], home: Tier) -> dict[str, torch.Tensor]:
        """Payloads like these on another tier; all or none."""
        new: dict[str, torch.Tensor] = {}
        try:
            for name, payload in lists.items():
                pinned = home is Tier.HOST and name == "param"
                new[name] = self._pool.allocate(home, payload.numel(), payload.dtype, name, pinned=pinned)
        except BudgetError:
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
        for index in actions.evict:
            victim = self.chunks[index]
            if victim is not chunk and victim in self._evictable(exclude=chunk):
                self._evict(victim)
        for index in actions.load:
            other = self.chunks[index]
            if other is chunk:
                if chunk.compute is None:
                    self._load(chunk, who)
            elif other.compute is None and self._pool.room(Tier.DEVICE) >= other.param_nbytes:
                self._start(other, ahead=True)

    def _load(self, chunk: Chunk, who: str) -> None:
        self._make_room(chunk.param_nbytes, chunk, who)
        self._start(chunk, ahead=False)

    def _start(self, chunk: Chunk, *, ahead: bool) -> None:
        with _as_it_is(chunk.param):
            try:
                payload = self._pool.allocate(Tier.DEVICE, chunk.param.numel(), chunk.param.dtype, "param")
            except BudgetError as error:
                raise DeviceMemoryError(str(error)) from error
            self._copies[chunk.spec.index] = chunk
            self._by_storage[chunk.set_compute(payload)] = chunk
            try:
                if ahead:
                    chunk.arrival = self._transfers.fetch(chunk.param, payload)
                    chunk.note(chunk.arrival)
                else:
                    chunk.note(self._transfers.to_device(chunk.param, payload))
            except BaseException:
                self._drop(chunk)  # it holds nothing
                raise
        self._emit(ChunkLoaded(chunk.spec.index, chunk.param_nbytes, ahead))

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

    def _make_room(self, nbytes: int, chunk: Chunk, who: str) -> None:
        self._pool_trim_if_short(nbytes)
        while self._pool.room(Tier.DEVICE) < nbytes:
            victim = self._choose(exclude=chunk)
            if victim is None:
                break
            self._evict(victim)
        self._pool_trim_if_short(nbytes)
        room = self._pool.room(Tier.DEVICE, cautious=False)
        if nbytes and room < nbytes and self.give_up_margin():
            room = self._pool.room(Tier.DEVICE, cautious=False)
        if nbytes and room < nbytes:
            raise DeviceMemoryError(self._too_small(nbytes, room, chunk, who))

    def _pool_trim_if_short(self, nbytes: int = 0, *, cautious: bool | None = None) -> None:
        """Kept buffers are the first to go when others need the room, or when none of them is of the right size."""
        if self.ledger.available(Tier.DEVICE, cautious=cautious) < 0:
            self._pool.trim()

    def _too_small(self, nbytes: int, room: int, chunk: Chunk, who: str) -> str:
        ledger = self.ledger
        pinned = [index for index, other in self._copies.items() if other is not chunk]
        names = ", ".join(
            sorted({tensor.spec.name for other in self.chunks for tensor in other.tensors if tensor.users})
        )
        setting, budget = "device_budget", ledger.budget(Tier.DEVICE)
        if ledger.chunk_budget is not None and ledger.chunk_budget - ledger.used(Tier.DEVICE) == room:
            setting, budget = "chunk_budget", ledger.chunk_budget
        return (
            f"{setting} is too small for {who}: chunk {chunk.spec.index} needs {format_need(nbytes)}, "
            f"{format_need(max(room, 0))} are free beside non-model data of {format_need(ledger.non_model_nbytes())}, "
            f"and none of the chunks there ({pinned}) can leave, because they are in use (computing with: "
            f"{names or 'none'}; a recomputed segment keeps all of its parameters). Raise {setting} to at least "
            f"{budget + nbytes - room} bytes, or lower chunk_numel.\n{ledger.table()}"
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
            chunk.compute.fill_(float("nan"))
            self._evict(chunk)

    def _evict(self, chunk: Chunk) -> None:
        self._drop(chunk)
        self._emit(ChunkEvicted(chunk.spec.index, chunk.param_nbytes))

    def _drop(self, chunk: Chunk) -> None:
        if chunk.arrival is not None:
            self._await(chunk)
        aliased = chunk.is_aliased
        del self._copies[chunk.spec.index]
        payload, key = chunk.clear_compute()
        del self._by_storage[key]
        self._pool.release(Tier.DEVICE, payload, "param", keep=not aliased)


@contextlib.contextmanager
def _as_it_is(payload: torch.Tensor) -> Iterator[None]:
    """Leaves whatever modes code is run under, so that new payloads are what the old one is.

    In inference mode they could never be trained with, inside a function transform they would be wrappers, and under
    fake tensors they would hold nothing.
    """
    is_real = type(payload) is torch.Tensor
    with (
        torch.inference_mode(False),
        temporarily_clear_interpreter_stack(),
        unset_fake_temporarily() if is_real else contextlib.nullcontext(),
    ):
        yield
