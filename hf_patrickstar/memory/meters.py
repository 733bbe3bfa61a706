"""Measures the bytes on the compute device that are not chunks: activations, temporaries, and other programs' memory.

On an accelerator the allocator knows; NVML, or the driver, adds what the allocator does not see. On the budgeted CPU
compute tier a dispatch mode follows every live storage that an operator makes while the mode is on.
"""

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from hf_patrickstar.memory.compute_device import allocated_nbytes, reserved_nbytes, used_nbytes
from hf_patrickstar.memory.operators import EngineMode, take_off_dispatch_modes, tensors_among, unpacked
from hf_patrickstar.units import MIB, align

_INTERVAL_S = 1.0


class Meter:
    """Measures non-model data on the compute device; this base class, for a tier without a budget, measures nothing.

    Attributes:
        measures: Whether it does.
    """

    measures = False

    def live(self, booked: int) -> int:
        """Bytes there now, beyond the ``booked`` bytes of the ledger."""
        return 0

    def peak(self, booked: int) -> int:
        """The most bytes since ``restart``, beyond the ``booked`` bytes of the ledger."""
        return 0

    def floor(self, booked: int) -> int:
        """Bytes beyond the ``booked`` ones that are there when a step begins and will stay, as far as that is known."""
        return 0

    def restart(self) -> None:
        """Forgets the peak."""

    def start(self, tensors: Iterable[torch.Tensor]) -> None:
        """Begins to follow what operators allocate; ``tensors`` are there already and count."""

    def note_autocast(self) -> None:
        """Notes whether autocast is on in this thread, which a dispatch mode is not told."""

    def pause(self) -> None:
        """Stops following new allocations; known ones count until they are freed."""

    def stop(self) -> None:
        """Stops following, and takes its dispatch mode off this thread."""


class AllocatorMeter(Meter):
    """Reads torch's caching allocator, and what else knows how much of an accelerator is taken.

    While a step is recorded the allocator's peak statistics are reset at every moment, so
    ``torch.accelerator.max_memory_allocated`` tells less than the whole run then.

    Args:
        device: The accelerator.
    """

    measures = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._used = used_nbytes(device)
        self._foreign = self._foreign_nbytes()
        self._growth = 0
        self._asked_s = time.monotonic()

    def live(self, booked: int) -> int:
        """Bytes allocated now beyond those booked, and bytes that other programs took since the engine was made."""
        return max(allocated_nbytes(self._device, "current") - booked, 0) + self._growth

    def peak(self, booked: int) -> int:
        """The allocator's peak since ``restart`` beyond the booked bytes, and bytes that other programs took."""
        return max(allocated_nbytes(self._device, "peak") - booked, 0) + self._growth

    def floor(self, booked: int) -> int:
        """Bytes that are there before a step and stay, such as libraries' workspaces made after the recording.

        They are rounded up, by less than an eighth of them and less than 1 MiB: with another number the next step is
        planned anew.
        """
        live = self.live(booked)
        return align(live, min(MIB, 1 << max(live.bit_length() - 4, 0)))

    def restart(self) -> None:
        """Resets the allocator's peak."""
        torch.accelerator.reset_peak_memory_stats(self._device)

    def start(self, tensors: Iterable[torch.Tensor]) -> None:
        """Measures the memory of other programs, at most once a second; torch's allocator counts by itself."""
        now = time.monotonic()
        if now - self._asked_s >= _INTERVAL_S:
            self._asked_s = now
            self._growth = max(self._foreign_nbytes() - self._foreign, 0)

    def _foreign_nbytes(self) -> int:
        return max(self._used() - reserved_nbytes(self._device), 0)


class StorageMeter(Meter):
    """Follows live storages on the budgeted CPU compute tier.

    A storage counts from the operator that returns it until it is freed, with the size that it has then; views of it
    count once, and buffers of the pool never do. Operators of the CPU keep nothing for themselves, so there is no
    ``floor``. Backward runs with the modes of the thread that calls it, and they cannot be changed inside of it: so the
    mode stays on the stack after ``pause``, doing nothing, until ``stop`` is called outside of backward.

    Args:
        owns: Tells from the address of a storage whether it belongs to the pool.
        on_growth: Called after an operator whose results made the total larger.

    Attributes:
        is_on: Whether new storages are counted.
    """

    measures = True

    def __init__(self, owns: Callable[[int], bool], on_growth: Callable[[], None]) -> None:
        self._owns = owns
        self._on_growth = on_growth
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._total = 0
        self._peak = 0
        self._mode = _StorageMode(self)
        self.is_on = False
        self._entered_in_inference = False

    def live(self, booked: int) -> int:
        """Bytes of the storages that are known and alive."""
        return self._total

    def peak(self, booked: int) -> int:
        """The most bytes since ``restart``."""
        return self._peak

    def restart(self) -> None:
        """Forgets the peak."""
        self._peak = self._total

    def start(self, tensors: Iterable[torch.Tensor]) -> None:
        """Begins to follow; see ``Meter.start``."""
        for tensor in tensors:
            self._note(tensor)
        self.is_on = True
        if any(map(_is_dead, _get_current_dispatch_mode_stack())):
            take_off_dispatch_modes(_is_dead)
        if self._mode not in _get_current_dispatch_mode_stack():
            self._entered_in_inference = torch.is_inference_mode_enabled()
            _push_mode(self._mode)  # not as a block: it may end in another order

    def note_autocast(self) -> None:
        """See ``Meter.note_autocast``."""
        self._mode.is_autocast = torch.is_autocast_enabled("cpu")

    def pause(self) -> None:
        """Stops following."""
        self.is_on = False

    def stop(self) -> None:
        """Stops following and takes the mode off the stack, if it is the innermost one.

        When inference mode ends it restores the modes of its beginning: a mode that was put on outside of it must not
        be taken off inside.
        """
        self.is_on = False
        stack = _get_current_dispatch_mode_stack()
        is_inside = torch.is_inference_mode_enabled() != self._entered_in_inference
        if stack and stack[-1] is self._mode and not is_inside:
            _pop_mode()

    def record(self, results: Any) -> None:
        """Takes the results of an operator.

        Args:
            results: A tensor, or a sequence of tensors or of such sequences; anything else is passed over.
        """
        if not self.is_on or results is None:
            return
        before = self._total
        for tensor in (results,) if isinstance(results, torch.Tensor) else tensors_among(results):
            self._note(tensor)
        if self._total > before:
            self._peak = max(self._peak, self._total)
            self.is_on = False  # ``on_growth`` is not measured, and after an error not called again
            self._on_growth()
            self.is_on = True

    def _note(self, tensor: torch.Tensor) -> None:
        for owner, key, nbytes in storages_of(tensor):
            if nbytes and key not in self._live and not self._owns(key):
                self._live[key] = (weakref.ref(owner, self._when_freed(key, nbytes)), nbytes)
                self._total += nbytes

    def _when_freed(self, key: int, nbytes: int) -> Callable[[Any], None]:
        live, this = self._live, weakref.ref(self)

        def forget(_: Any) -> None:
            meter = this()
            if meter is not None and live.pop(key, None) is not None:
                meter._total -= nbytes

        return forget


def storages_of(tensor: torch.Tensor) -> list[tuple[Any, int, int]]:
    """The storages of a tensor, each as an object that lives as long as the bytes, a key, and the number of bytes."""
    if tensor.layout is torch.sparse_coo:
        return [found for part in (tensor._indices(), tensor._values()) for found in storages_of(part)]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
        return [found for part in parts for found in storages_of(part)]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
        return [found for part in parts for found in storages_of(part)]
    if tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return [(tensor, id(tensor), tensor.numel() * tensor.element_size())]  # opaque: it has no storage to look at
    storage = tensor.untyped_storage()
    return [(storage, storage._cdata, storage.nbytes())]


class _StorageMode(EngineMode):
    """Hands the results of every operator to a meter.

    Autocast is off where torch calls a mode. Kernels in Python, as bitsandbytes has some, call operators that autocast
    changes: they must run as they do without the mode.
    """

    is_autocast = False

    def __init__(self, meter: StorageMeter) -> None:
        super().__init__()
        self._meter = weakref.ref(meter)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_autocast and not torch.is_autocast_enabled("cpu") and func.namespace != "aten":
            torch.set_autocast_enabled("cpu", True)
            try:
                results = func(*args, **(kwargs or {}))
            finally:
                torch.set_autocast_enabled("cpu", False)
        else:
            results = func(*args, **(kwargs or {}))
        meter = self._meter()
        if meter is not None:
            meter.record(results)
            meter.record(unpacked(func, args, results))
        return results


def _is_dead(mode: Any) -> bool:
    """Whether a mode is that of a meter that is gone: of an engine that was dropped between backward and step."""
    return isinstance(mode, _StorageMode) and mode._meter() is None
