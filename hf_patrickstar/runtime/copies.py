"""The device copies of chunks that are at home on the host; it knows no plan, and talks to no other process."""

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hf_patrickstar.counts import Counts
from hf_patrickstar.errors import BudgetError, DeviceMemoryError
from hf_patrickstar.interrupts import held_back
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.streams import Streams
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import Chunk
from hf_patrickstar.runtime.ranges import named

_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
_FAKE = torch._C._TorchDispatchModeKey.FAKE


class Copies:
    """Makes and drops device copies of chunks, and moves chunks between their homes.

    A copy is never dirty, so dropping one copies nothing. A chunk that is computed with where it is at home (a static
    one) has no copy; it is only known by its storage.

    Args:
        chunks: All chunks.
        pool: Where copies come from.
        streams: How bytes cross.
        counts: Counts what moves.

    Attributes:
        find: Finds the chunk whose compute payload has a storage, by the key of that, or ``None``.
        moves: Whether any chunk is not computed with where it is at home.
    """

    def __init__(self, chunks: list[Chunk], pool: PayloadPool, streams: Streams, counts: Counts) -> None:
        self._chunks = chunks
        self._pool = pool
        self._streams = streams
        self._counts = counts
        self._by_storage: dict[int, Chunk] = {}  # chunks that can be computed with, in the order in which they came
        self.find = self._by_storage.get
        self.moves = False
        self.note_chunks()

    # Which there are

    def __contains__(self, chunk: Chunk) -> bool:
        """Whether a chunk has a copy."""
        return chunk.compute is not None and not chunk.is_static

    def __iter__(self) -> Iterator[Chunk]:
        """The chunks with a copy."""
        return (chunk for chunk in self._by_storage.values() if not chunk.is_static)

    @property
    def computable(self) -> Iterable[Chunk]:
        """The chunks that can be computed with: those with a copy, and those that are at home on the device."""
        return self._by_storage.values()

    def __len__(self) -> int:
        """How many there are."""
        return sum(1 for _ in self)

    @property
    def by_age(self) -> list[Chunk]:
        """The chunks with a copy, the one visited longest ago first."""
        return sorted(self, key=lambda chunk: chunk.last_access)

    def unused(self, exclude: Chunk | None = None) -> list[Chunk]:
        """Chunks whose copies nobody computes with or looks into: these can leave."""
        return [chunk for chunk in self if chunk is not exclude and not chunk.is_in_use]

    # Making them

    def load(self, chunk: Chunk, *, ahead: bool) -> None:
        """Copies a chunk of this process alone from its home.

        Args:
            chunk: A chunk without a copy.
            ahead: Whether nobody needs it yet: the copy is started, and the compute device does not wait for it; see
                ``wait``.

        Raises:
            DeviceMemoryError: If the device has no room.
        """
        home, begin = chunk.home_param, time.perf_counter()  # the copy comes after an update that is under way
        name = "bring in ahead" if ahead else "load"
        with named(name, chunk.spec.index) if _profiler_enabled() else _NOTHING, _as_it_is(home):
            payload = self._begin(chunk)
            try:
                if ahead:
                    chunk.arrival = copy = self._streams.fetch(home, payload, chunk.under_way)
                else:
                    copy = self._streams.to_device(home, payload, chunk.under_way)
            except BaseException:
                self._drop(chunk)
                raise
        if copy is not None:
            chunk.note(copy)
        self._note_load(chunk, home.nbytes, ahead)
        if not ahead:
            self._counts.loading_seconds += time.perf_counter() - begin

    @contextlib.contextmanager
    def loaded_by_others(self, chunk: Chunk, *, ahead: bool) -> Iterator[torch.Tensor]:
        """Copies this process's chunk of a group from its home; inside of the block those of others are brought.

        Args:
            chunk: A group without a copy.
            ahead: Whether nobody needs it yet.

        Yields:
            The buffer of the group.

        Raises:
            DeviceMemoryError: If the device has no room.
        """
        home = chunk.home_param
        with _as_it_is(home):
            payload = self._begin(chunk)
            try:
                chunk.note(self._streams.to_slice(home, chunk.own_slice(payload), chunk.under_way))
                with self._streams.beside():
                    yield payload
            except BaseException:
                self._drop(chunk)
                raise
        self._note_load(chunk, home.nbytes, ahead)

    def _note_load(self, chunk: Chunk, nbytes: int, ahead: bool) -> None:
        counts = self._counts
        counts.chunk_loads += 1
        counts.prefetches += ahead
        if chunk.home is Tier.HOST:
            counts.host_to_device_nbytes += nbytes
        if counts.log is not None:
            counts.log.append(("load ahead" if ahead else "load", chunk.spec.index))

    def _begin(self, chunk: Chunk) -> torch.Tensor:
        try:
            payload = self._pool.allocate(Tier.DEVICE, chunk.spec.capacity_numel, chunk.dtype, "param")
        except BudgetError as error:
            raise DeviceMemoryError(str(error)) from error
        self._by_storage[chunk.set_compute(payload)] = chunk
        return payload

    def wait(self, chunk: Chunk) -> float | None:
        """Lets the compute device wait for a copy that was started ahead.

        Returns:
            Seconds that the host waited, or ``None`` if the copy had arrived.
        """
        arrival = chunk.arrival
        assert arrival is not None
        is_late = not arrival.is_done
        begin = time.perf_counter()
        with named("wait for", chunk.spec.index):
            arrival.join()
        chunk.arrival = None
        return time.perf_counter() - begin if is_late else None

    # Dropping them

    def evict(self, chunk: Chunk) -> None:
        """Drops a copy for want of room."""
        with named("evict", chunk.spec.index) if _profiler_enabled() else _NOTHING:
            self._drop(chunk)
        self._counts.chunk_evictions += 1
        if self._counts.log is not None:
            self._counts.log.append(("evict", chunk.spec.index))

    def poison(self, chunk: Chunk) -> None:
        """Fills a copy that is about to be evicted with NaN: who goes on to use it computes with that (debugging).

        Bytes are all 85: other weights than any that are likely.
        """
        assert chunk.compute is not None
        chunk.compute.fill_(float("nan") if chunk.dtype.is_floating_point else 85)

    def invalidate(self, chunk: Chunk) -> None:
        """Drops the copy of a chunk, if it has one, because its home has changed."""
        if chunk in self:
            self._drop(chunk)
            self._counts.chunk_invalidations += 1
            if self._counts.log is not None:
                self._counts.log.append(("drop", chunk.spec.index))

    def forget(self, chunk: Chunk) -> None:
        """Drops what a chunk is computed with, because the chunk is about to go."""
        if chunk in self:
            self._drop(chunk)
        elif chunk.compute is not None:
            del self._by_storage[chunk.clear_compute()[1]]

    def close(self) -> None:
        """Drops every copy; static chunks are forgotten."""
        for chunk in list(self):
            self._drop(chunk)
        self._by_storage.clear()

    # Homes

    def rehome(self, chunk: Chunk, home: Tier) -> None:
        """Moves a chunk, with all its lists, to another tier. None of its tensors may be in use.

        Lists of zeros are not copied; see [Note: lists of zeros].

        Args:
            chunk: The chunk.
            home: Where it shall live.

        Raises:
            BudgetError: If there is no room; the chunk stays where it is.
        """
        chunk.wait()
        chunk.wait_for_reader()
        if chunk.compute is not None and not (chunk.is_static or chunk.is_group):
            self._drop(chunk)  # a copy with the chunks of others stays true
        lists, name = chunk.home_lists, f"move home to the {home.value} of"
        # Ctrl-C waits: the old ``param`` list may have been overwritten before the new one takes its place.
        with held_back(), lists.lock, named(name, chunk.spec.index), _as_it_is(chunk.home_param):
            new = self._copy_lists(chunk, home)
            if chunk.is_static:
                del self._by_storage[chunk.clear_compute()[1]]
            chunk.give_back(self._pool)
            chunk.param = new["param"]
            lists.update({name: new[name] for name in lists})
            lists.fresh.update({name: new[name] for name in lists.fresh})
            chunk.live_on(home)
        self.note_chunks()
        counts, nbytes = self._counts, sum(payload.nbytes for payload in new.values())
        counts.chunk_moves += 1
        if home is Tier.DEVICE:
            counts.moved_home_to_device_nbytes += nbytes
        else:
            counts.moved_home_to_host_nbytes += nbytes
        if counts.log is not None:
            counts.log.append(("move home", chunk.spec.index))

    def pin(self, chunk: Chunk) -> None:
        """Moves a chunk that is at home on the host into pinned memory, if that is wanted and there is room for it."""
        if self._pool.pins_memory and not chunk.home_param.is_pinned():
            with contextlib.suppress(BudgetError):  # copies are slower then, and right
                self.rehome(chunk, Tier.HOST)

    def note_chunks(self) -> None:
        """Takes note of chunks that came, went or have another home."""
        for chunk in self._chunks:
            if chunk.is_static and chunk.compute is None:
                self._by_storage[chunk.set_compute(chunk.param)] = chunk
        self.moves = any(not (chunk.is_static or chunk.is_retired) for chunk in self._chunks)

    # Inside

    def _copy_lists(self, chunk: Chunk, home: Tier) -> dict[str, torch.Tensor]:
        """The lists on another tier, without the values of those that have none; all or none.

        The host's ``param`` list may be page-locked: the others go through it, before its own values come there or
        after they have left it.
        """
        old, new, fresh = chunk.held, dict[str, torch.Tensor](), chunk.home_lists.fresh
        to_host, is_lent, is_overwritten = home is Tier.HOST, chunk.is_lent(("param",)), False
        try:
            for name, payload in old.items():
                pinned = to_host and name == "param"
                kind, is_zero = payload.dtype, name in fresh
                new[name] = self._pool.allocate(home, payload.numel(), kind, name, pinned=pinned, zero=is_zero)
            names = [name for name in old if name not in fresh]
            for name in sorted(names, key=lambda name: (name == "param") is to_host):
                if name == "param" or (is_lent and not to_host):
                    new[name].copy_(old[name])
                else:
                    is_overwritten = not to_host
                    self._streams.copy_through(old[name], new[name], (new if to_host else old)["param"])
        except BaseException:
            if is_overwritten:
                old["param"].copy_(new["param"])
            for name, payload in new.items():
                self._pool.release(home, payload, name, keep=False)
            raise
        return new

    def _drop(self, chunk: Chunk) -> None:
        if chunk.arrival is not None:
            self.wait(chunk)
        aliased = chunk.is_aliased
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
    return _NOTHING


@contextlib.contextmanager
def _without_modes(*, is_real: bool) -> Iterator[None]:
    with (
        torch.inference_mode(False),
        temporarily_clear_interpreter_stack(),
        unset_fake_temporarily() if is_real else _NOTHING,
    ):
        yield
