"""Memory of the host that comes fresh from the system: huge pages of zeros.

The system gives memory to a process when it is touched for the first time, a page at a time, and fills each page with
zeros. With pages of 4 KiB that takes several times as long as to write the memory again. Many systems use huge pages
(2 MiB) only where a program asks for them, and go back to small ones where no huge page is free.

So zeros cost nothing before they are used, and whoever writes to them first, in several threads say, has the system
make them.

Of 16 pages that follow each other, large buffers that are made one after the other begin at another one each
(``_next_shift``), wherever the system finds room for them. If the lists that an update reads together began at the same
one, they would use the same sets of the caches and the same banks of memory: Adam took 1.9 times as long then on two
cores of an EPYC.
"""

import concurrent.futures
import ctypes
import itertools
import mmap
from typing import TypeVar

import torch

from hf_patrickstar.common.cores import own_cores
from hf_patrickstar.units import MIB

_HUGE_NBYTES = 2 * MIB
"""The size of a huge page on x86-64 and on most other machines; advice for parts of larger ones changes nothing."""
_POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE`` of Linux, for which Python has no name."""
_PART_NBYTES = 32 * MIB
"""Bytes whose pages a thread asks for before it takes the next part: some milliseconds of work."""
_MOST_THREADS = 8
"""More of them would wait for memory, and processes that share a machine take memory at the same time."""

_SHIFTS = range(0, 16 * mmap.PAGESIZE, mmap.PAGESIZE)
_next_shift = itertools.cycle(_SHIFTS)

_Pages = TypeVar("_Pages", bound=mmap.mmap)


def advise_huge_pages(buffer: torch.Tensor) -> int:
    """Asks the system for huge pages where a buffer fills them alone, so that the process takes no more memory by it.

    Args:
        buffer: A buffer on the host that has not been touched yet.

    Returns:
        Bytes that the advice covers: 0 for a small buffer, and on a system that takes no such advice.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if type(buffer) is not torch.Tensor or advice is None or buffer.nbytes < _HUGE_NBYTES:  # fake ones have no memory
        return 0
    address = buffer.data_ptr()
    begin = -(-address // _HUGE_NBYTES) * _HUGE_NBYTES
    nbytes = (address + buffer.nbytes) // _HUGE_NBYTES * _HUGE_NBYTES - begin
    failed = ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), ctypes.c_int(advice))
    return 0 if failed else nbytes


def populate(buffer: torch.Tensor) -> None:
    """Has the system give all pages of a buffer of ``fresh_pages`` now, to several threads; what is in them stays.

    Where the system cannot be asked (Linux before 5.14), it gives pages when they are used.
    """
    begin, end, system = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes, ctypes.CDLL(None)

    def ask(address: int) -> None:
        nbytes = ctypes.c_size_t(min(_PART_NBYTES, end - address))
        system.madvise(ctypes.c_void_p(address), nbytes, ctypes.c_int(_POPULATE_WRITE))

    num = min(-(-buffer.nbytes // _PART_NBYTES), _MOST_THREADS, own_cores(1))
    with concurrent.futures.ThreadPoolExecutor(num, "hf_patrickstar-touch") as threads:
        list(threads.map(ask, range(begin, end, _PART_NBYTES)))


def new_on_host(numel: int, *, dtype: torch.dtype, device: torch.device, zero: bool = False) -> torch.Tensor:
    """A buffer on the host; a large one is zeros in huge pages that nobody has touched.

    Args:
        numel: Number of elements.
        dtype: Type of the elements.
        device: The host.
        zero: Whether a small one is zeros, too; else it is not initialised.

    Raises:
        RuntimeError: If the system has no memory for it.
    """
    # Whoever looks at operators sees one, as on other devices.
    if torch._C._len_torch_dispatch_stack() > 0 or numel * dtype.itemsize < _HUGE_NBYTES:
        buffer = (torch.zeros if zero else torch.empty)(numel, dtype=dtype, device=device)
        advise_huge_pages(buffer)
        return buffer
    return fresh_pages(numel, dtype, mmap.mmap)[0]


def fresh_pages(numel: int, dtype: torch.dtype, kind: type[_Pages]) -> tuple[torch.Tensor, _Pages]:
    """Pages of zeros that nobody has touched, private to the process, since few systems make shared pages huge.

    Args:
        numel: Number of elements of the buffer, at least one.
        dtype: Type of the elements.
        kind: The class of what has the pages until no tensor looks into them any more.

    Returns:
        The buffer, and what has its pages.

    Raises:
        RuntimeError: If the system has none.
    """
    nbytes, shift = -(-numel * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE, next(_next_shift)
    try:
        pages = kind(-1, _SHIFTS.stop + nbytes, flags=mmap.MAP_PRIVATE)
    except OSError as error:
        raise RuntimeError(f"can't allocate memory: {nbytes} bytes: {error}") from error
    begin = torch.frombuffer(pages, dtype=torch.uint8, count=1).data_ptr()  # wherever the system found room
    buffer = torch.frombuffer(pages, dtype=dtype, count=numel, offset=(shift - begin) % _SHIFTS.stop)
    advise_huge_pages(buffer)
    return buffer, pages
