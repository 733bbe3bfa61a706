"""What is asked of an accelerator beside its streams. The only file that tells accelerators apart."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.units import MIB, parse_nbytes

_WITHOUT_STREAMS = {"mps": "its memory is that of the host, so there is nothing to move", "meta": "it has no memory"}
"""Kinds of devices that cannot be the compute device, and why."""
_CUDA = "cuda"
"""The kind of devices of which NVML knows what other processes hold, whose allocator can make segments that grow, and
whose driver can be asked through torch to lock pages of the host."""
_DEVICE_FULL = ("out of memory", "STATUS_ALLOC_FAILED")
"""Errors of drivers and libraries, beside ``torch.OutOfMemoryError``, that say that a device has no memory left."""
_HOST_FULL = ("can't allocate memory", "not enough memory")
"""Errors of torch that say that the host has none left."""
_NOT_PINNED = ("pin_memory", "pinned", "cannot pin", "page-lock", "not supported", "PinnedMemory")
"""Errors, beside those, that say that host memory cannot be page-locked, in this amount or at all."""

_LEAST_SEGMENT_NBYTES = 10 * MIB
"""Torch's allocator makes a larger segment than they need for smaller buffers, so that others share it."""
_GROWING = "expandable_segments"
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Where users configure torch's allocators; the first one is for all accelerators."""
_SIZE = r"([0-9.]+ (?:bytes|[KMGT]iB))"
_ASKED = re.compile(rf"Tried to allocate {_SIZE}")
_FRAGMENTS = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")


def find_device(device: torch.device | str | None) -> torch.device:
    """The compute device, with its index.

    Args:
        device: What the user wants; by default the accelerator of this machine, or else the CPU tier.

    Raises:
        ConfigError: If it cannot be one, or is not there.
    """
    current = torch.accelerator.current_accelerator(check_available=True)
    wanted = torch.device(device) if device is not None else current
    if wanted is None or (device is None and wanted.type in _WITHOUT_STREAMS):
        wanted = torch.device("cpu")
    if wanted.type == "cpu":
        return wanted
    if wanted.type in _WITHOUT_STREAMS:
        raise ConfigError(
            f"device '{wanted}' cannot be the compute device: {_WITHOUT_STREAMS[wanted.type]}; use the CPU (--use_cpu)"
        )
    if current is None or current.type != wanted.type:
        there = "no accelerator" if current is None else f"'{current.type}' as its accelerator"
        raise ConfigError(
            f"device '{wanted}' is not there: torch finds {there} on this machine; use a device that is "
            f"there, or a torch that is built for '{wanted.type}'"
        )
    index = torch.accelerator.current_device_index() if wanted.index is None else wanted.index
    return torch.device(wanted.type, index)


def is_accelerator(device: torch.device) -> bool:
    """Whether a compute device has memory and streams of its own."""
    return device.type != "cpu"


def num_accelerators() -> int:
    """How many accelerators this process sees."""
    return torch.accelerator.device_count() if is_accelerator(find_device(None)) else 0


def device_name(device: torch.device) -> str:
    """What an accelerator is called by its driver, or its kind if the driver does not say."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(name(device)) if name is not None else device.type


def can_pin_memory() -> bool:
    """Whether there is an accelerator for which host memory can be page-locked."""
    return torch.accelerator.is_available()


def memory_info(device: torch.device) -> tuple[int, int]:
    """Bytes of a device that nobody has taken, and all of its bytes."""
    free, total = torch.accelerator.get_memory_info(device)
    return int(free), int(total)


def reserved_nbytes(device: torch.device) -> int:
    """Bytes that torch's allocator has taken from a device, whether or not a tensor is in them."""
    return int(torch.accelerator.memory_reserved(device))


def allocated_nbytes(device: torch.device, what: str) -> int:
    """Bytes of tensors on a device.

    Args:
        device: The device.
        what: ``"current"``, or ``"peak"`` since ``torch.accelerator.reset_peak_memory_stats``.
    """
    # The flat dictionary of memory_stats is sorted at every call, which costs more than a copy of a chunk.
    nested = getattr(torch.get_device_module(device), "memory_stats_as_nested_dict", None)
    if nested is None:
        return int(torch.accelerator.memory_stats(device).get(f"allocated_bytes.all.{what}", 0))
    stats = nested(device)
    return int(stats["allocated_bytes"]["all"][what]) if stats else 0


def is_device_full(error: BaseException) -> bool:
    """Whether an error of torch says that a device has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or _says(error, _DEVICE_FULL)


def is_full(error: BaseException) -> bool:
    """Whether an error of torch says that a device, or the host, has no memory left."""
    return is_device_full(error) or _says(error, _HOST_FULL)


def is_not_pinned(error: BaseException) -> bool:
    """Whether an error of torch says that host memory cannot be page-locked."""
    return is_full(error) or _says(error, _NOT_PINNED)


def _says(error: BaseException, phrases: tuple[str, ...]) -> bool:
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in phrases)


def is_fragmented(error: BaseException, device: torch.device) -> bool:
    """Whether the memory that an allocation lacked was there in pieces: taken by torch's allocator, but in no tensor.

    What torch could give back in one piece it has given back before it raises. Where the message does not tell how much
    was left in pieces, the allocator is asked; tensors that were freed since count then, too.

    Args:
        error: The error that the allocation ended with, or one that quotes it.
        device: The device.
    """
    text = str(error)
    asked, pieces = _ASKED.search(text), _FRAGMENTS.search(text)
    if asked is None or not is_accelerator(device):
        return False
    there = _parse(pieces) if pieces else reserved_nbytes(device) - allocated_nbytes(device, "current")
    return there >= _parse(asked)


def _parse(found: "re.Match[str]") -> int:
    size = found[1].replace(" bytes", " B")
    return parse_nbytes(size) if float(size.split()[0]) else 0


def grow_segments(device: torch.device) -> str | None:
    """Has torch's allocator make segments that grow, so that freed pieces between tensors can be used together.

    The engine does this only before the allocator has taken any memory, and never against the user: a setting of
    ``expandable_segments`` or of another ``backend`` stays as it is.

    Args:
        device: The compute device.

    Returns:
        What was decided, in a sentence for the log; ``None`` for a device without such an allocator.
    """
    if device.type != _CUDA:
        return None
    advice = f"start with {_ALLOCATOR_VARIABLES[0]}={_GROWING}:True, so that memory is not lost in pieces"
    configured = allocator_settings()
    for key in (_GROWING, "backend"):
        if key in configured:
            return f"{_GROWING} is left alone: the user has set {key}:{configured[key]}"
    if reserved_nbytes(device) > 0:
        return f"{_GROWING} is off, because torch's allocator is in use already: {advice}"
    text = ",".join(f"{key}:{value}" for key, value in {**configured, _GROWING: "True"}.items())
    try:
        torch._C._accelerator_setAllocatorSettings(text)
    except (AttributeError, RuntimeError, ValueError):
        return f"{_GROWING} is off, because this torch cannot set it now: {advice}"
    return f"{_GROWING}:True is set, so that memory is not lost in pieces"


def choose_segments(device: torch.device) -> tuple[Callable[[int], contextlib.AbstractContextManager[Any]], str | None]:
    """Decides where chunks lie on a device, so that activations do not cut their memory to pieces.

    Where segments grow, see ``grow_segments``, chunks share them: the allocator gives free pages between tensors back,
    and uses them elsewhere. Else each buffer has a segment of its own, in a pool of torch that is dropped at once, so
    that nothing else comes in. When the buffer is free its memory is anybody's: torch's allocator gives it back before
    it says that there is none.

    Pools with growing segments are avoided: torch counts the allocations that map memory, and the pieces that go back,
    and fails where these are more.

    Args:
        device: The compute device.

    Returns:
        Where to allocate, and what was decided, in a sentence for the log; ``None`` for a device that has no segments.
    """
    grown = grow_segments(device)
    if grown is None:
        return contextlib.nullcontext, None
    if allocator_settings().get(_GROWING) == "True":
        return contextlib.nullcontext, f"{grown}; chunks share them with activations"

    @contextlib.contextmanager
    def own_segment(nbytes: int) -> Iterator[None]:
        if nbytes < _LEAST_SEGMENT_NBYTES:
            yield
            return
        with torch.cuda.device(device), torch.cuda.use_mem_pool(torch.cuda.MemPool(), device):
            yield

    try:
        torch.cuda.init()
        with own_segment(_LEAST_SEGMENT_NBYTES):
            return own_segment, f"{grown}; chunks have segments of their own"
    except (AttributeError, RuntimeError) as error:
        return contextlib.nullcontext, f"{grown}; chunks share them with activations, since torch has no pools: {error}"


def allocator_settings() -> dict[str, str]:
    """What torch's allocators were told, by the environment or by calls, where torch says so."""
    texts = [os.environ.get(name, "") for name in reversed(_ALLOCATOR_VARIABLES)]
    with contextlib.suppress(RuntimeError):  # no accelerator: nothing is set
        texts.append(getattr(torch._C, "_accelerator_getAllocatorSettings", str)())
    # Values may be lists in brackets, with commas and colons of their own.
    return dict(re.findall(r"(\w+):(\[[^]]*\]|[^,]*)", ",".join(texts)))


def empty_cache() -> None:
    """Gives memory back that torch's allocator has taken from the accelerator and no tensor is in."""
    torch.accelerator.empty_cache()


def empty_host_cache() -> None:
    """Gives page-locked host memory back that torch's allocator keeps and no tensor is in."""
    private = getattr(torch._C, "_host_emptyCache", None)
    give_back = getattr(torch.accelerator, "empty_host_cache", private)  # since torch 2.12
    if give_back is not None:
        give_back()


def lock_pages(device: torch.device, address: int, nbytes: int) -> None:
    """Has the driver lock whole pages of the host for copies to and from a device.

    Args:
        device: The device.
        address: Where the pages begin.
        nbytes: How many bytes they have.

    Raises:
        RuntimeError: If the driver does not.
    """
    if device.type != _CUDA:
        raise RuntimeError(f"cannot pin pages for {device}")
    with torch.get_device_module(device).device(device):
        failed = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
    if failed:
        # The refusal stays the last error of the CUDA runtime until a kernel raises it: run one here, to clear it.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)
        raise RuntimeError(f"cannot pin {nbytes} bytes: the driver answers {failed} (memory lock limit?)")


def unlock_pages(device: torch.device, address: int) -> None:
    """Undoes ``lock_pages``, after every copy that was started; while Python ends there may be no driver any more."""
    with contextlib.suppress(Exception):
        torch.accelerator.synchronize(device)
        torch.cuda.cudart().cudaHostUnregister(address)


def used_nbytes(device: torch.device) -> Callable[[], int]:
    """A function that tells how many bytes of a device are taken by anybody: contexts, libraries, other processes.

    NVML says it where it knows the device, by the device's UUID, since NVML's order of devices is its own; else the
    driver does. A meter keeps to one source, since the two differ by what they count.
    """

    def ask_driver() -> int:
        free, total = memory_info(device)
        return total - free

    if device.type != _CUDA:
        return ask_driver
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = torch.get_device_module(device).get_device_properties(device).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        pynvml.nvmlDeviceGetMemoryInfo(handle)
    except Exception:  # no library, no rights, a virtual GPU
        return ask_driver
    return lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def random_state(device: torch.device) -> Any:
    """The state of a device's random numbers; ``None`` for the CPU, whose state torch has."""
    return torch.get_device_module(device).get_rng_state(device) if is_accelerator(device) else None


def set_random_state(device: torch.device, state: Any) -> None:
    """Sets it back."""
    if state is not None:
        torch.get_device_module(device).set_rng_state(state, device)


@contextlib.contextmanager
def same_state() -> Iterator[None]:
    """Keeps the current device, and the random numbers of all devices, if this process has begun to use them."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    # To ask a device that nothing has used yet would make its context, which takes time and memory.
    if found is None or not getattr(torch.get_device_module(found), "is_initialized", lambda: True)():
        yield
        return
    current = torch.accelerator.current_device_index()
    devices = [torch.device(found.type, index) for index in range(torch.accelerator.device_count())]
    states = [(device, random_state(device)) for device in devices]
    try:
        yield
    finally:
        torch.accelerator.set_device_index(current)
        for device, state in states:
            set_random_state(device, state)
