"""The bits of frozen parameters that their chunks do not hold.

[Note: originals]
A frozen fp32 parameter whose chunk has 16 bits has no master, since nothing updates it (``frozen_master`` asks for
one). The file that the parameter was read from has all of its bits: this is its *origin*. A read in the type that the
parameter was loaded in (state dictionaries, saving, copies, unfreezing) takes the bits from the origin. An element of
the chunk that differs from the rounded origin was written to since, and is read from the chunk. A value that is written
in fp32, by merging an adapter for example, is kept on the host and is the origin from then on.
"""

import logging
from typing import Protocol

import torch

from hf_patrickstar.errors import BudgetError, PatrickStarError
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.bits import differs, same_bits
from hf_patrickstar.runtime.chunk import ManagedParameter
from hf_patrickstar.units import format_nbytes, format_need

logger = logging.getLogger(__name__)

_OWNER = "original"
"""Ledger owner of what is kept on the host."""
_PIECE_NUMEL = 2**18
"""Elements that are compared at once."""


class Origin(Protocol):
    """Where the value of a parameter is, in the type that it was loaded in."""

    def read_again(self, start: int, stop: int) -> torch.Tensor:
        """Elements of the flattened parameter, on the host; do not write to them.

        Raises:
            PatrickStarError: If they are not there any more; the message says why.
        """


class _OnHost:
    """An ``Origin`` in host memory, with this rank's part of a value."""

    def __init__(self, buffer: torch.Tensor, first: int) -> None:
        self.buffer = buffer
        self._first = first

    def read_again(self, start: int, stop: int) -> torch.Tensor:
        return self.buffer[start - self._first : stop - self._first]


class Originals:
    """Reads frozen parameters with all of their bits; see [Note: originals].

    Args:
        pool: Allocates the values that are kept on the host.
    """

    def __init__(self, pool: PayloadPool) -> None:
        self._pool = pool
        self._warned: set[str] = set()

    def has(self, tensor: ManagedParameter, dtype: torch.dtype) -> bool:
        """Whether a read of a parameter in a given type takes it from its origin."""
        return tensor.origin is not None and dtype != tensor.chunk.dtype

    def read(self, tensor: ManagedParameter, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Reads elements of this rank's part of a parameter that has an origin, or has just lost it.

        Args:
            tensor: The parameter.
            start: The first element of the flattened part.
            stop: One after the last; by default all.

        Returns:
            A flat tensor on the host, in the type that the parameter was loaded in, or in the type of the chunk if the
            origin is lost.
        """
        held, origin = tensor.view(tensor.chunk.param).reshape(-1)[start:stop].cpu(), tensor.origin
        if origin is None:
            return held
        value = torch.zeros(held.shape, dtype=tensor.original_dtype, device="cpu")
        begin = tensor.part[0] + start
        try:
            for place in range(0, held.numel(), _PIECE_NUMEL):
                own = held[place : place + _PIECE_NUMEL]
                found = origin.read_again(begin + place, begin + place + own.numel())
                is_written = differs(found.to(own.dtype), own)
                value[place : place + own.numel()] = torch.where(is_written, own.to(found.dtype), found)
        except PatrickStarError as error:
            self._lose(tensor, str(error), "; with frozen_master=true the host keeps all of their bits from the start")
            return held
        return value

    def note_write(self, tensor: ManagedParameter, own: torch.Tensor) -> None:
        """Keeps all bits of a value that is about to be written to a parameter whose chunk rounds it.

        Args:
            tensor: The parameter.
            own: This rank's part of the value.
        """
        dtype = tensor.chunk.dtype
        if not tensor.is_rounded or own.dtype.itemsize <= dtype.itemsize:
            return
        own = own.detach().reshape(-1).to("cpu", tensor.original_dtype)
        if tensor.origin is not None:
            before = self.read(tensor)
            if before.dtype == own.dtype and same_bits(before, own):
                return
        self.drop(tensor)
        if same_bits(own.to(dtype).to(own.dtype), own):
            return
        try:
            buffer = self._pool.allocate(Tier.HOST, own.numel(), own.dtype, _OWNER)
        except BudgetError:
            have = format_nbytes(self._pool.room(Tier.HOST))
            why = f"host_budget has {have} left, too little for all bits of frozen parameters that no file has"
            self._lose(tensor, why, f"; '{tensor.spec.name}' needs {format_need(own.nbytes)}")
            return
        tensor.origin = _OnHost(buffer.copy_(own), tensor.part[0])

    def drop(self, tensor: ManagedParameter) -> None:
        """Forgets the origin of a parameter."""
        if isinstance(tensor.origin, _OnHost):
            self._pool.release(Tier.HOST, tensor.origin.buffer, _OWNER, keep=False)
        tensor.origin = None

    def _lose(self, tensor: ManagedParameter, why: str, advice: str) -> None:
        tensor.origin = None
        if why not in self._warned:
            self._warned.add(why)
            logger.warning(
                "patrickstar: %s. So frozen parameters ('%s' is the first) are read and saved as they are computed "
                "with, rounded to %s%s",
                why,
                tensor.spec.name,
                tensor.spec.types.param,
                advice,
            )
