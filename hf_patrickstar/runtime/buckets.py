"""Averages gradients over processes, a communication group at a time (PatrickStar section 7).

The gradients of a group collect in a buffer on the device as autograd finishes them. When all are there, one
reduce-scatter gives each rank the average of its own chunk, which goes home, and the buffer is free again. So the
accumulation of micro-batches happens after the reduction, in 1/p of the memory; keeping gradients whole on every rank
until the last micro-batch, as ``no_sync`` of ``DistributedDataParallel`` does, would need a whole model's.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple, Protocol

import torch

from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.memory.lanes import Ticket
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.streams import Streams
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import GRADIENTS, STAGING, Chunk, ManagedTensor
from hf_patrickstar.runtime.gradient_mirrors import GradientMirrors
from hf_patrickstar.runtime.gradients import Gradients
from hf_patrickstar.runtime.reclaim import Reclaim


class Average(NamedTuple):
    """The average over processes of a parameter's gradient: what this rank has of it at home, on the device."""

    tensor: ManagedTensor
    gradient: torch.Tensor


class Buckets(Protocol):
    """Where gradients go that autograd has finished."""

    @property
    def found(self) -> Collection[int]:
        """Indices of the tensors that got a gradient in this backward, and whose owners hear of it when it ends."""
        ...

    def note_chunks(self) -> None:
        """Takes note of which parameters are in which chunks."""
        ...

    def store(self, tensor: ManagedTensor, gradient: torch.Tensor, *, is_at_home: bool) -> None:
        """Takes a gradient.

        Args:
            tensor: Whose gradient it is.
            gradient: The gradient of one backward, in the parameter's shape and type.
            is_at_home: Whether it was computed where the chunk is at home.

        Raises:
            BudgetError: If there is no room for it.
        """
        ...

    def is_complete(self, chunk: Chunk) -> bool:
        """Whether all gradients of a group are there and can be reduced."""
        ...

    def unreduced(self) -> list[int]:
        """Groups with gradients that are not reduced."""
        ...

    def reduce(self, chunk: Chunk) -> Iterable[Average]:
        """Averages what all ranks have of a group's gradients; zero where one has none.

        Args:
            chunk: The group.

        Returns:
            Averages that have arrived: of this group, or, where reductions go on beside the compute device, of the one
            before. Each is used before the next is asked for, and all are asked for.
        """
        ...

    def finish(self, found: Iterable[int]) -> Iterable[Average]:
        """Ends a backward.

        Args:
            found: Tensors that got a gradient on any rank.

        Returns:
            The averages that are left; see ``reduce``.
        """
        ...

    def abandon(self) -> Iterable[Average]:
        """Drops what is not reduced: the gradients of a backward that failed.

        Returns:
            The averages that are left; see ``reduce``.
        """
        ...

    def let_go(self) -> None:
        """Gives back the buffer of averages that are on their way home, because its room is needed."""
        ...

    def close(self) -> None:
        """Gives every buffer back."""
        ...


class OwnBuckets:
    """The buckets of one process: a gradient goes home at once.

    Args:
        gradients: Where gradients are at home.
        gradient_mirrors: What was handed out of gradients, which follows.
    """

    found: Collection[int] = ()

    def __init__(self, gradients: Gradients, gradient_mirrors: GradientMirrors) -> None:
        self._gradients = gradients
        self._gradient_mirrors = gradient_mirrors

    def note_chunks(self) -> None:
        """Nothing to do."""

    def store(self, tensor: ManagedTensor, gradient: torch.Tensor, *, is_at_home: bool) -> None:
        """Takes a gradient home, unless a failed attempt at this micro-batch has done so."""
        if self._gradients.attempts.is_counted(tensor.spec.index):
            return
        if not (is_at_home or tensor.chunk.is_static):
            tensor.crossing_nbytes += gradient.nbytes
        self._gradients.place(tensor, gradient)
        self._gradient_mirrors.refresh(tensor)

    def is_complete(self, chunk: Chunk) -> bool:
        """Nothing is reduced."""
        return False

    def unreduced(self) -> list[int]:
        """There are none."""
        return []

    def reduce(self, chunk: Chunk) -> Iterable[Average]:
        """Nothing is reduced."""
        return ()

    def finish(self, found: Iterable[int]) -> Iterable[Average]:
        """Nothing is left."""
        return ()

    def abandon(self) -> Iterable[Average]:
        """Nothing is dropped: what autograd finished before the failure is at home, as in plain torch."""
        return ()

    def let_go(self) -> None:
        """There is no buffer."""

    def close(self) -> None:
        """Nothing to do."""


class GroupBuckets:
    """The buckets of several processes: gradients of a communication group collect in a buffer; see ``Buckets``.

    Args:
        chunks: All chunks.
        pool: Where buffers come from.
        streams: How averages go home.
        collectives: Reduces.
        reclaim: Makes room for buffers.
    """

    def __init__(
        self,
        chunks: list[Chunk],
        pool: PayloadPool,
        streams: Streams,
        collectives: Collectives,
        reclaim: Reclaim,
    ) -> None:
        self.found: set[int] = set()
        self._pool = pool
        self._streams = streams
        self._collectives = collectives
        self._reclaim = reclaim
        self._chunks = chunks
        self._num_expected: list[int] = []
        self._buffers: dict[int, torch.Tensor] = {}
        self._stored: dict[int, set[int]] = {}
        self._held: list[tuple[ManagedTensor, torch.Tensor]] = []
        self._leaving: torch.Tensor | None = None  # the buffer of averages that are on their way home
        self._under_way: tuple[Chunk, torch.Tensor, set[int], Ticket] | None = None
        self._staging: dict[torch.dtype, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        self.note_chunks()

    def note_chunks(self) -> None:
        """See ``Buckets``; scratch space is allocated anew."""
        self._num_expected = [sum(tensor.spec.trainable for tensor in chunk.tensors) for chunk in self._chunks]
        self._release_staging()
        self._staging = self._reserve()

    def _release_staging(self) -> None:
        for buffers in self._staging.values():
            for buffer in buffers:
                if buffer is not None:
                    self._pool.release(Tier.DEVICE, buffer, STAGING, keep=False)
        self._staging = {}

    def _reserve(self) -> dict[torch.dtype, tuple[torch.Tensor | None, torch.Tensor | None]]:
        """Scratch space in which slices of other ranks arrive, for each type of gradients."""
        largest: dict[torch.dtype, int] = {}
        for chunk in self._chunks:
            if chunk.spec.trainable:
                largest[chunk.dtype] = max(chunk.spec.chunk_numel, largest.get(chunk.dtype, 0))
        return {dtype: self._reserve_one(numel, dtype) for dtype, numel in largest.items()}

    def _reserve_one(self, largest: int, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        numels = self._collectives.staging_numel(largest, dtype)
        first, second = (
            self._pool.allocate(Tier.DEVICE, numel, kind, STAGING) if numel else None
            for numel, kind in zip(numels, (dtype, torch.float32), strict=True)
        )
        return first, second

    def store(self, tensor: ManagedTensor, gradient: torch.Tensor, *, is_at_home: bool) -> None:
        """Takes a gradient, which is on the compute device, until its group is reduced."""
        chunk = tensor.chunk
        place = tensor.view_copy(self._buffer(chunk))
        stored = self._stored[chunk.spec.index]
        if tensor.spec.index in stored:
            place.add_(gradient)
        else:
            place.copy_(gradient)
            stored.add(tensor.spec.index)
            self.found.add(tensor.spec.index)

    def is_complete(self, chunk: Chunk) -> bool:
        """See ``Buckets``."""
        return len(self._stored.get(chunk.spec.index, ())) == self._num_expected[chunk.spec.index]

    def unreduced(self) -> list[int]:
        """See ``Buckets``."""
        return sorted(self._buffers)

    def reduce(self, chunk: Chunk) -> Iterator[Average]:
        """See ``Buckets``."""
        index = chunk.spec.index
        buffer = self._buffer(chunk)
        stored = self._stored.pop(index)
        del self._buffers[index]
        for tensor in chunk.tensors:
            if tensor.spec.index not in stored:
                tensor.view_copy(buffer).zero_()
        ticket = self._collectives.reduce_scatter(buffer, self._staging[buffer.dtype], f"reduces group {index}")
        yield from self._receive()
        self._under_way = (chunk, buffer, stored, ticket)
        if not self._collectives.is_asynchronous:
            yield from self._receive()

    def _receive(self) -> Iterator[Average]:
        """The averages of the reduction that is under way; afterwards its buffer is free."""
        if self._under_way is None:
            return
        (chunk, buffer, stored, ticket), self._under_way = self._under_way, None
        self.let_go()
        ticket.join()
        for tensor in chunk.owned:
            average = tensor.own(tensor.view_copy(buffer))
            if tensor.spec.index in stored:
                yield Average(tensor, average)
            else:  # another rank may have one, and this is it; that is known when backward ends
                self._held.append((tensor, average.to(chunk.home_device, copy=True)))
        self._leaving = buffer
        # Where reductions go on beside the device, it would wait for the bus here. By the time that the next group has
        # arrived the averages are at home.
        if not self._collectives.is_asynchronous:
            self.let_go()

    def let_go(self) -> None:
        """See ``Buckets``."""
        if self._leaving is not None:
            buffer, self._leaving = self._leaving, None
            self._streams.release_in_flight()  # the averages are on their way home from this buffer
            self._pool.ledger.read_again()
            self._pool.release(Tier.DEVICE, buffer, GRADIENTS)

    def finish(self, found: Iterable[int]) -> Iterator[Average]:
        """See ``Buckets``."""
        yield from self._receive()
        self.let_go()
        anywhere = set(found)
        for tensor, average in self._held:
            if tensor.spec.index in anywhere:
                yield Average(tensor, average)
        self._held.clear()
        self.found.clear()

    def abandon(self) -> Iterator[Average]:
        """See ``Buckets``."""
        yield from self._receive()
        self.let_go()
        for buffer in self._buffers.values():
            self._pool.release(Tier.DEVICE, buffer, GRADIENTS)
        self._buffers.clear()
        self._stored.clear()
        self._held.clear()
        self.found.clear()

    def close(self) -> None:
        """Gives every buffer back."""
        for _ in self.abandon():
            pass
        self._release_staging()

    def _buffer(self, chunk: Chunk) -> torch.Tensor:
        index = chunk.spec.index
        if index not in self._buffers:
            with self._pool.ledger.one_reading():
                if self._pool.room(Tier.DEVICE) < chunk.copy_nbytes:
                    self.let_go()
                self._reclaim.make_room_for_gradients(chunk)
                numel = chunk.spec.capacity_numel
                self._buffers[index] = self._pool.allocate(Tier.DEVICE, numel, chunk.dtype, GRADIENTS)
            self._stored[index] = set()
        return self._buffers[index]
