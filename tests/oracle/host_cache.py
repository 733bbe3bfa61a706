"""A model of the cache of a core, for operators on the host."""

import collections
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from hf_patrickstar.tracing.costs import ADAMS, READS_ROWS, writes_over
from hf_patrickstar.tracing.operands import read_operands, storage_key, written_operands
from hf_patrickstar.units import MIB

HOST_CACHE_NBYTES = 16 * MIB
"""Bytes that the caches of a core keep: a tile of Adam's lists, which is made to stay there (``adam_script.py``)."""


class Touch(NamedTuple):
    """A range of memory that an operator on the host works with."""

    storage: int
    begin: int
    end: int
    is_write: bool
    is_read: bool


def touches_of(operator: Any, args: Any, kwargs: dict[str, Any]) -> list[Touch]:
    """What an operator works with that may be in a cache, in order."""
    packet = operator._overloadpacket
    if packet in READS_ROWS:
        return []
    written = written_operands(operator, args, kwargs)
    only_read = {id(tensor) for tensor in (args[1] if packet in ADAMS else ())}
    touches = [_touch(tensor, is_write=False, is_read=True) for tensor in read_operands(written, args, kwargs)]
    is_read = not writes_over(operator)
    for tensor in written:
        is_write = id(tensor) not in only_read
        touches.append(_touch(tensor, is_write=is_write, is_read=is_read or not is_write))
    return touches


def _touch(tensor: torch.Tensor, *, is_write: bool, is_read: bool) -> Touch:
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return Touch(storage_key(tensor), begin, begin + tensor.nbytes, is_write, is_read)


class HostCache:
    """What operators on the host have touched last, and need not fetch from memory again.

    What was written there comes to memory once, whatever is written over it meanwhile.
    """

    def __init__(self, nbytes: int = HOST_CACHE_NBYTES) -> None:
        self._nbytes = nbytes
        self._used = 0
        self._lines: collections.OrderedDict[tuple[int, int, int], bool] = collections.OrderedDict()  # is it written?

    def saved_nbytes(self, touches: Iterable[Touch]) -> int:
        """Bytes of an operator's cost that stay in the cache; what it touches is there from now on."""
        saved = 0
        for storage, begin, end, is_write, is_read in touches:
            key = (storage, begin, end)
            was_written = self._lines.pop(key, None)
            if was_written is None:
                self._used += end - begin
            else:
                saved += (end - begin) * (is_read + (is_write and was_written))
            self._lines[key] = bool(was_written) or is_write
            while self._used > self._nbytes:
                (_, first, last), _ = self._lines.popitem(last=False)
                self._used -= last - first
        return saved
