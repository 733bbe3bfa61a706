"""Page-locked host memory: where it comes from, and how many bytes a buffer of it really takes.

Where the driver can be asked, it locks pages of the engine's own, which threads have had the system make: that is eight
times as fast as torch's allocator, and can go on beside whoever writes to them. Torch's allocator rounds page-locked
allocations up to a power of two, which wastes a third where chunks have a bad size, and keeps what was freed.
"""

import contextlib
import mmap
import os
import sys
from collections.abc import Callable

import torch

from hf_patrickstar.memory.compute_device import empty_host_cache, lock_pages, unlock_pages
from hf_patrickstar.memory.pages import fresh_pages, populate

_PAGE_NBYTES = mmap.PAGESIZE
_WIPE_ON_FORK = 18
"""``MADV_WIPEONFORK`` of Linux, for which Python has no name."""


class TorchPinning:
    """Page-locked memory of torch's allocator."""

    def nbytes(self, nbytes: int) -> int:
        """Bytes that a buffer of so many bytes takes."""
        return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0

    def begin(self, numel: int, dtype: torch.dtype, *, zero: bool) -> torch.Tensor:
        """A buffer that ``lock`` makes page-locked.

        Args:
            numel: Number of elements.
            dtype: Type of the elements.
            zero: Fill it with zeros.

        Raises:
            RuntimeError: If the system does not lock as much; so does ``lock``.
        """
        buffer = torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)
        return buffer.zero_() if zero else buffer

    def lock(self, buffer: torch.Tensor) -> None:
        """Locks the pages of a buffer; any thread may do so, while others write to it."""

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

    def begin(self, numel: int, dtype: torch.dtype, *, zero: bool) -> torch.Tensor:
        """See ``TorchPinning``. The pages are zeros anyway."""
        if not numel:
            return torch.empty(numel, dtype=dtype, device="cpu")
        buffer, pages = fresh_pages(numel, dtype, _LockedPages)
        with contextlib.suppress(OSError):  # a system that does not know the advice copies the pages
            pages.madvise(_WIPE_ON_FORK)
        vars(buffer)["pages"] = pages
        return buffer

    def lock(self, buffer: torch.Tensor) -> None:
        """See ``TorchPinning``. The driver would ask for one page after the other."""
        pages, address = vars(buffer).pop("pages", None), buffer.data_ptr()
        if pages is not None:
            populate(buffer)
            lock_pages(self._device, address, self.nbytes(buffer.nbytes))
            pages.locked = (os.getpid(), self._device, address)

    def empty_cache(self) -> None:
        """Nothing is kept."""


Pinning = TorchPinning | PagePinning


def make_pinning(device: torch.device) -> tuple[Pinning, str]:
    """Finds out how page-locked memory can be had here.

    Args:
        device: The accelerator.

    Returns:
        Where it comes from, and a clause that says so.
    """
    pages = PagePinning(device)
    try:
        pages.lock(pages.begin(1, torch.uint8, zero=False))
    except RuntimeError:
        return TorchPinning(), "rounded up to powers of two by torch"
    return pages, "whole pages, locked by the driver"
