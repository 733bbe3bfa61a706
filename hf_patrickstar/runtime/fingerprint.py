"""Whether a tensor was written to that users may write to without a trace.

One process compares the bits of the tensor with those at home. Several processes compare checksums of the tensor, so
that every process finds out, wherever the value is at home. One process does so, too, where the value is read from a
file, which is not read again to compare. Fake tensors have no bytes: nobody has written to them.
"""

import zlib

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hf_patrickstar.runtime.bits import same_bits
from hf_patrickstar.runtime.chunk import MASTER, ManagedTensor
from hf_patrickstar.runtime.values import Values


class Fingerprint:
    """Knows how a tensor looked that has a parameter's value.

    Args:
        values: Reads values.
        tensor: The parameter.
        value: The tensor, as it is now.
    """

    def __init__(self, values: Values, tensor: ManagedTensor, value: torch.Tensor) -> None:
        self._values = values
        self._tensor = tensor
        self._has_bytes = not isinstance(value, FakeTensor)
        is_apart = not values.sharing.is_alone or values.originals.has(tensor, value.dtype)
        self._has_checksum = self._has_bytes and is_apart
        self._checksum = 0
        self.renew(value)

    def renew(self, value: torch.Tensor) -> None:
        """Takes the tensor as it is now for the parameter's value."""
        if self._has_checksum:
            self._checksum = checksum_of(value)

    def has_changed(self, value: torch.Tensor) -> bool:
        """Whether the tensor was written to since; a second call answers for the time after the first."""
        if not self._has_bytes:
            return False
        if not self._has_checksum:
            home = self._at_home(value.dtype)
            return not same_bits(self._values.streams.on_tier_of(value, home), home)
        before = self._checksum
        self.renew(value)
        return self._checksum != before

    def _at_home(self, dtype: torch.dtype) -> torch.Tensor:
        chunk = self._tensor.chunk
        if chunk.is_static and chunk.has_list(MASTER):  # what is computed with is at home, and may be this very tensor
            return self._tensor.view(chunk.lists[MASTER]).to(dtype)
        return self._values.own_part(self._tensor, dtype)


def checksum_of(value: torch.Tensor) -> int:
    """A checksum of a tensor's bits."""
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data)
