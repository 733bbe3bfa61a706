"""Huge pages, which make the first touch of a large buffer on the host cheap.

The system gives memory to a process when it is touched for the first time, a page at a time, and fills each page with
zeros. With pages of 4 KiB that takes several times as long as to write the memory again. Many systems use huge pages
(2 MiB) only where a program asks for them, and go back to small ones where no huge page is free.
"""

import ctypes
import mmap

import torch

from hf_patrickstar.units import MIB

_HUGE_NBYTES = 2 * MIB
"""The size of a huge page on x86-64 and on most other machines; advice for parts of larger ones changes nothing."""


def advise_huge_pages(buffer: torch.Tensor) -> int:
    """Asks the system for huge pages where a buffer fills them alone, so that the process takes no more memory by it.

    Args:
        buffer: A buffer on the host that has not been touched yet.

    Returns:
        Bytes that the advice covers: 0 for a small buffer, and on a system that takes no such advice.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or buffer.nbytes < _HUGE_NBYTES:
        return 0
    address = buffer.data_ptr()
    begin = -(-address // _HUGE_NBYTES) * _HUGE_NBYTES
    nbytes = (address + buffer.nbytes) // _HUGE_NBYTES * _HUGE_NBYTES - begin
    if nbytes <= 0:
        return 0
    system = ctypes.CDLL(None)
    failed = system.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), ctypes.c_int(advice))
    return 0 if failed else nbytes


def new_on_host(numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A buffer on the host that is not initialised, in huge pages where the system has them.

    Args:
        numel: Number of elements.
        dtype: Type of the elements.
        device: The host.
    """
    buffer = torch.empty(numel, dtype=dtype, device=device)
    if type(buffer) is torch.Tensor:  # a fake tensor has no memory
        advise_huge_pages(buffer)
    return buffer


def zeros_on_host(numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A buffer on the host that is filled with zeros; see ``new_on_host``."""
    if torch._C._len_torch_dispatch_stack():  # whoever looks at operators sees one, as on other devices
        return torch.zeros(numel, dtype=dtype, device=device)
    return new_on_host(numel, dtype=dtype, device=device).zero_()
