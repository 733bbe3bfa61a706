"""Page-locked host memory: where it comes from, and how many bytes a buffer of it really takes.

torch's allocator rounds page-locked allocations up to a power of two, which wastes a third where chunks have a bad
size, and keeps what was freed, which is memory that nobody has booked. Newer versions can be told not to. Where a
version cannot, the engine has the driver lock pages of its own.
"""

import concurrent.futures
import contextlib
import mmap
import os
import sys
from collections.abc import Callable

import torch

from hf_patrickstar.cores import own_cores
from hf_patrickstar.memory.accelerator import (
    allocator_settings,
    configure_allocator,
    empty_host_cache,
    host_cache_nbytes,
    lock_pages,
    unlock_pages,
)
from hf_patrickstar.memory.pages import advise_huge_pages
from hf_patrickstar.units import MIB

_ROUND_UP_TO = "pinned_max_round_threshold_mb"
_KEEP_UP_TO = "pinned_max_cached_size_mb"
_LARGEST_PROBE_MB = 64
_PAGE_NBYTES = mmap.PAGESIZE
_WIPE_ON_FORK = 18
"""``MADV_WIPEONFORK`` of Linux, for which Python has no name."""
_PART_NBYTES = 32 * MIB
"""Bytes of which a thread touches the pages before it takes the next part: some milliseconds of work."""
_MOST_THREADS = 8
"""More of them would wait for memory, and processes that share a machine touch pages at the same time."""


class TorchPinning:
    """Page-locked memory of torch's allocator.

    Args:
        exact_above_nbytes: Larger buffers take what they need; smaller ones, and all with ``None``, a power of two.
    """

    def __init__(self, exact_above_nbytes: int | None = None) -> None:
        self._exact_above_nbytes = exact_above_nbytes

    def nbytes(self, nbytes: int) -> int:
        """Bytes that a buffer of so many bytes takes."""
        if self._exact_above_nbytes is not None and nbytes > self._exact_above_nbytes:
            return nbytes
        return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0

    def empty(self, numel: int, *, dtype: torch.dtype) -> torch.Tensor:
        """A page-locked buffer, not initialised.

        Raises:
            RuntimeError: If the system does not lock as much.
        """
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)

    def empty_cache(self) -> None:
        """Gives back to the system what was freed and is kept for reuse."""
        empty_host_cache()


class _LockedPages(mmap.mmap):
    """Pages that the process that has locked them unlocks when no tensor looks into them any more.

    The pages are private, since few systems make shared pages huge. A forked process reads zeros there. Otherwise Linux
    would copy all locked pages at the fork, or, if it left them out, freeing the buffer in the forked process would
    free what that process has put there since.
    """

    locked: tuple[int, torch.device, int] | None = None

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:  # a program that ends has no ``sys``
        if self.locked is not None and not is_ending() and self.locked[0] == os.getpid():
            unlock_pages(*self.locked[1:])


class PagePinning:
    """Pages that the engine takes from the system and the driver of the accelerator locks.

    Args:
        device: The accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def nbytes(self, nbytes: int) -> int:
        """See ``TorchPinning``."""
        return -(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES

    def empty(self, numel: int, *, dtype: torch.dtype) -> torch.Tensor:
        """See ``TorchPinning``."""
        nbytes = self.nbytes(numel * dtype.itemsize)
        if not nbytes:
            return torch.empty(numel, dtype=dtype, device="cpu")
        try:
            pages = _LockedPages(-1, nbytes, flags=mmap.MAP_PRIVATE)
        except OSError as error:
            raise RuntimeError(f"cannot pin {nbytes} bytes: {error}") from error
        with contextlib.suppress(OSError):  # a system that does not know the advice copies the pages
            pages.madvise(_WIPE_ON_FORK)
        buffer = torch.frombuffer(pages, dtype=dtype, count=numel)
        advise_huge_pages(buffer)
        _touch(buffer)
        lock_pages(self._device, buffer.data_ptr(), nbytes)
        pages.locked = (os.getpid(), self._device, buffer.data_ptr())
        return buffer

    def empty_cache(self) -> None:
        """Nothing is kept."""


def _touch(buffer: torch.Tensor) -> None:
    """Has the system give all pages of a buffer, to several threads; the driver would ask for one after the other."""
    parts = buffer.view(torch.uint8).split(_PART_NBYTES)
    num = min(len(parts), _MOST_THREADS, own_cores(1))
    with concurrent.futures.ThreadPoolExecutor(num, "hf_patrickstar-touch") as threads:
        list(threads.map(lambda part: part[::_PAGE_NBYTES].zero_(), parts))


Pinning = TorchPinning | PagePinning


def make_pinning(device: torch.device) -> tuple[Pinning, str]:
    """Finds out how page-locked memory can be had here without waste.

    Args:
        device: The accelerator.

    Returns:
        Where it comes from, and a clause that says so.
    """
    told = allocator_settings()
    wanted = {key: "1" for key in (_ROUND_UP_TO, _KEEP_UP_TO) if key not in told}
    can_be_told = not wanted or configure_allocator(wanted)
    value = told.get(_ROUND_UP_TO, "1")
    exact_above_mb = int(value) if value.isdigit() else _LARGEST_PROBE_MB + 1
    if can_be_told and exact_above_mb <= _LARGEST_PROBE_MB and _is_exact_above(exact_above_mb * MIB):
        return TorchPinning(exact_above_mb * MIB), "exactly as large as chunks"
    if _ROUND_UP_TO not in told:
        pages = PagePinning(device)
        try:
            pages.empty(_PAGE_NBYTES, dtype=torch.uint8)
        except RuntimeError:
            pass
        else:
            return pages, "whole pages, locked by the driver"
    return TorchPinning(), "rounded up to powers of two by torch"


def _is_exact_above(threshold_nbytes: int) -> bool:
    """Whether torch's allocator takes for more than so many bytes what it needs, which no version tells beforehand."""
    nbytes = (1 << threshold_nbytes.bit_length()) + MIB
    if host_cache_nbytes() is None:  # torch may have no such allocator for this device, and crash if it is asked more
        return False
    empty_host_cache()
    before = host_cache_nbytes() or 0
    try:
        probe = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:
        return False
    after = host_cache_nbytes()
    del probe
    return after is not None and 0 < after - before < nbytes + MIB
