"""Page-locked host memory: where it comes from, and how many bytes a buffer of it really takes.

Where the driver can be asked, it locks pages of the engine's own, which threads have had the system make: that is eight
times as fast as torch's allocator, and can go on beside whoever writes to them. Torch's allocator rounds page-locked
allocations up to a power of two, which wastes a third where chunks have a bad size, and keeps what was freed, which is
memory that nobody has booked; newer versions can be told not to.
"""

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
from hf_patrickstar.memory.pages import fresh_pages, populate
from hf_patrickstar.units import MIB

_ROUND_UP_TO = "pinned_max_round_threshold_mb"
_KEEP_UP_TO = "pinned_max_cached_size_mb"
_LARGEST_PROBE_MB = 64
_PAGE_NBYTES = mmap.PAGESIZE
_WIPE_ON_FORK = 18
"""``MADV_WIPEONFORK`` of Linux, for which Python has no name."""
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

    def begin(self, numel: int, dtype: torch.dtype, *, zero: bool) -> tuple[torch.Tensor, Callable[[], None]]:
        """A buffer, and a function that locks its pages, which any thread may call while others write to the buffer.

        Args:
            numel: Number of elements.
            dtype: Type of the elements.
            zero: Fill it with zeros.

        Raises:
            RuntimeError: If the system does not lock as much; so does the function.
        """
        buffer = torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)
        return buffer.zero_() if zero else buffer, lambda: None

    def empty_cache(self) -> None:
        """Gives back to the system what was freed and is kept for reuse."""
        empty_host_cache()


class _LockedPages(mmap.mmap):
    """Pages that the process that has locked them unlocks when no tensor looks into them any more.

    A forked process reads zeros there. Otherwise Linux would copy all locked pages at the fork, or, if it left them
    out, freeing the buffer in the forked process would free what that process has put there since.
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

    def begin(self, numel: int, dtype: torch.dtype, *, zero: bool) -> tuple[torch.Tensor, Callable[[], None]]:
        """See ``TorchPinning``. The pages are zeros anyway."""
        if not numel:
            return torch.empty(numel, dtype=dtype, device="cpu"), lambda: None
        buffer, pages = fresh_pages(numel, dtype, _LockedPages)
        with contextlib.suppress(OSError):  # a system that does not know the advice copies the pages
            pages.madvise(_WIPE_ON_FORK)
        address, nbytes = buffer.data_ptr(), len(pages)

        def lock() -> None:
            # The driver would ask for one page after the other.
            populate(buffer, min(_MOST_THREADS, own_cores(1)))
            lock_pages(self._device, address, nbytes)
            pages.locked = (os.getpid(), self._device, address)

        return buffer, lock

    def empty_cache(self) -> None:
        """Nothing is kept."""


Pinning = TorchPinning | PagePinning


def make_pinning(device: torch.device) -> tuple[Pinning, str]:
    """Finds out how page-locked memory can be had here without waste.

    Args:
        device: The accelerator.

    Returns:
        Where it comes from, and a clause that says so.
    """
    told = allocator_settings()
    if _ROUND_UP_TO not in told:  # else the user wants torch's allocator
        pages = PagePinning(device)
        try:
            pages.begin(1, torch.uint8, zero=False)[1]()
        except RuntimeError:
            pass
        else:
            return pages, "whole pages, locked by the driver"
    wanted = {key: "1" for key in (_ROUND_UP_TO, _KEEP_UP_TO) if key not in told}
    can_be_told = not wanted or configure_allocator(wanted)
    value = told.get(_ROUND_UP_TO, "1")
    exact_above_mb = int(value) if value.isdigit() else _LARGEST_PROBE_MB + 1
    if can_be_told and exact_above_mb <= _LARGEST_PROBE_MB and _is_exact_above(exact_above_mb * MIB):
        return TorchPinning(exact_above_mb * MIB), "exactly as large as chunks"
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
