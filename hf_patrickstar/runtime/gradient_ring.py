"""The way of gradients from the device to accumulation lists, without waiting.

[Note: accumulation beside the device]
A gradient of one of several micro-batches is added to a list on the host. It leaves piece by piece through a ring of
pinned memory, in the lane of copies to the host, and the host's thread adds each piece to the list when it has arrived.
Both go on beside forward and backward. The host waits where the ring is full, and readers of a list wait for the
tickets of its chunk, as for any other gradient on its way.

The additions are those that the host would do itself, in the same order, so the sums have the same bits.
"""

import collections
from collections.abc import Callable, Iterator

import torch

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.streams import Copy, Streams
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.units import KIB, MIB

OWNER = "gradients on their way"
MOST_NBYTES = 512 * MIB
"""Bytes of the ring: some milliseconds of the bus, so that neither the copies nor the additions stand still."""
LEAST_NBYTES = 64 * KIB
_SHARE = 4
"""The ring takes at most this part of what is free on the host."""
_MOST_PIECES, _LEAST_PIECES = 16, 4
"""A gradient is cut into pieces of at most so small a part of the ring: the more, the earlier additions begin."""
_PIECE_NBYTES = MIB
"""Pieces are not smaller than that for the sake of more pieces: each of them costs the host two calls."""
_ALIGNMENT_NBYTES = 64


def most_nbytes(lists_nbytes: int) -> int:
    """Bytes that a ring is worth: no more than the gradients of a micro-batch can fill.

    Args:
        lists_nbytes: Bytes of all lists that it leads to.
    """
    return min(MOST_NBYTES, max(lists_nbytes, LEAST_NBYTES))


def planned_nbytes(lists_nbytes: int, free_nbytes: int) -> int:
    """Bytes that a ring will take; 0 if there is too little for one.

    Args:
        lists_nbytes: Bytes of all lists that it leads to.
        free_nbytes: Bytes that are free on the host.
    """
    most = most_nbytes(lists_nbytes)
    nbytes = min(most, max(free_nbytes, 0) // _SHARE) // _ALIGNMENT_NBYTES * _ALIGNMENT_NBYTES
    return nbytes if nbytes >= min(LEAST_NBYTES, most) else 0


class GradientRing:
    """A ring of pinned memory; see [Note: accumulation beside the device].

    Args:
        pool: Where its memory comes from.
        streams: How gradients cross, and who adds them.
        most_nbytes: Bytes that it takes at most.
    """

    def __init__(self, pool: PayloadPool, streams: Streams, most_nbytes: int = MOST_NBYTES) -> None:
        self._pool = pool
        self._streams = streams
        self._most_nbytes = most_nbytes
        self._buffer: torch.Tensor | None = None
        self._by_dtype: dict[torch.dtype, torch.Tensor] = {}
        self._next = 0
        self._lent: collections.deque[tuple[int, int, Copy]] = collections.deque()

    def open(self) -> bool:
        """Takes memory, if it has none; returns whether there is any."""
        if self._buffer is None:
            nbytes = min(self._most_nbytes, self._pool.room(Tier.HOST) // _SHARE) // _ALIGNMENT_NBYTES
            nbytes *= _ALIGNMENT_NBYTES
            if nbytes < min(LEAST_NBYTES, self._most_nbytes):
                return False
            try:
                self._buffer = self._pool.allocate(Tier.HOST, nbytes, torch.uint8, OWNER, pinned=True)
            except BudgetError:  # memory of this kind is taken in larger pieces than was asked for
                return False
        return True

    def add(self, gradient: torch.Tensor, place: torch.Tensor, *, is_first: bool) -> Iterator[Copy]:
        """Adds a gradient to its place, beside whatever comes next.

        Args:
            gradient: On the device, in the shape of ``place`` and in the same order in memory.
            place: In a list on the host; dense. Only the host and its thread use lists, so no copy need be waited for.
            is_first: Whether the gradient replaces what is there.

        Yields:
            The ticket of each piece.
        """
        source, target = _flat(gradient), _flat(place)
        assert self._buffer is not None
        whole = self._buffer.numel()
        most = max(whole // _MOST_PIECES, min(whole // _LEAST_PIECES, _PIECE_NBYTES))
        most = max(most // _ALIGNMENT_NBYTES, 1) * _ALIGNMENT_NBYTES // gradient.element_size()
        if source.numel() <= most:
            yield self._send(source, target, is_first)
            return
        for start in range(0, source.numel(), most):
            stop = min(start + most, source.numel())
            yield self._send(source[start:stop], target[start:stop], is_first)

    def close(self) -> None:
        """Gives the memory back when nobody uses it any more."""
        while self._lent:
            self._lent.popleft()[-1].wait()
        if self._buffer is not None:
            buffer, self._buffer = self._buffer, None
            self._by_dtype.clear()
            self._pool.release(Tier.HOST, buffer, OWNER, keep=False)

    def _send(self, source: torch.Tensor, target: torch.Tensor, is_first: bool) -> Copy:
        begin, end, piece = self._piece(source.numel(), source.dtype)
        arrival = self._streams.to_host(source, piece, is_beside=True)  # if it cannot be, the call waits
        ticket = self._streams.on_host(_adder(piece, target, is_first), () if arrival is None else (arrival,))
        assert ticket is not None  # gradients leave through it where there are streams alone
        self._lent.append((begin, end, ticket))
        return ticket

    def _piece(self, numel: int, dtype: torch.dtype) -> tuple[int, int, torch.Tensor]:
        """The next bytes of the ring; the host waits for what still uses them."""
        assert self._buffer is not None
        nbytes = -(-numel * dtype.itemsize // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
        begin = self._next if self._next + nbytes <= self._buffer.numel() else 0
        end = self._next = begin + nbytes
        while any(first < end and begin < last for first, last, _ in self._lent):
            self._lent.popleft()[-1].wait()
        if dtype not in self._by_dtype:
            self._by_dtype[dtype] = self._buffer.view(dtype)
        first = begin // dtype.itemsize
        return begin, end, self._by_dtype[dtype][first : first + numel]


def _adder(piece: torch.Tensor, target: torch.Tensor, is_first: bool) -> Callable[[], None]:
    def add() -> None:
        with torch.no_grad():
            if is_first:
                target.copy_(piece)
            else:
                target.add_(piece)

    return add


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a dense tensor in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
