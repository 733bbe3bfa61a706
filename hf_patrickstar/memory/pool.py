"""The payload pool: allocates and reuses the buffers that chunks live in, and books every one in the ledger."""

import bisect
import concurrent.futures
import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hf_patrickstar.errors import BudgetError, DeviceMemoryError
from hf_patrickstar.memory.compute_device import empty_cache, is_accelerator, is_device_full, is_full, is_not_pinned
from hf_patrickstar.memory.disk import Disk
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.pages import new_on_host
from hf_patrickstar.memory.pinning import Pinning
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.units import format_need

logger = logging.getLogger(__name__)

Segment = Callable[[int], contextlib.AbstractContextManager[Any]]
"""Where a buffer of so many bytes is allocated on a device."""
CACHE_OWNER = "pool"
"""Ledger owner of buffers that are kept for reuse."""


class PayloadPool:
    """Hands out one-dimensional buffers on all tiers.

    A buffer that comes back on the device is kept for the next chunk of the same size: allocating and touching fresh
    pages costs more than the copy into them. Kept buffers count against the budget, and are freed when it is tight. The
    lowest address is handed out first, and the highest given up first, so that free memory is in few pieces.

    Args:
        ledger: Where every buffer is booked.
        device: The compute device.
        pinning: Where buffers asked for as ``pinned`` come from; ``None`` if they are not page-locked.
        segment: Where buffers lie on an accelerator; see ``choose_segments``.

    Attributes:
        ledger: See above.
        disk: Has files for buffers on the disk, if there are any.
    """

    def __init__(
        self, ledger: Ledger, device: torch.device, pinning: Pinning | None, segment: Segment = contextlib.nullcontext
    ) -> None:
        self.ledger = ledger
        self.disk: Disk | None = None
        self._segment = segment
        self._device = device
        self._pinning = pinning
        self._can_pin = True
        self._unlocked: dict[int, Callable[[], None]] = {}  # address of a storage -> what locks its pages
        self._pinned: set[int] = set()  # addresses of storages
        self._may_be_cached = False  # whether pinned memory was freed that its allocator may keep
        self._kept: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}  # by kind, the highest address at the end
        self._kept_nbytes = 0
        self._taken: dict[int, int] = {}  # address of a buffer's storage -> bytes that it takes
        self._is_allocating = False

    @property
    def pins_memory(self) -> bool:
        """Whether buffers asked for as ``pinned`` are page-locked; false after the system has refused one."""
        return self._pinning is not None and self._can_pin

    def host_nbytes(self, nbytes: int, *, pinned: bool) -> int:
        """Bytes that a buffer takes on the host.

        Args:
            nbytes: How many bytes it has.
            pinned: Whether it is asked for as ``pinned``.
        """
        return self._pinning.nbytes(nbytes) if pinned and self._pinning is not None and self._can_pin else nbytes

    def owns(self, storage_key: int) -> bool:
        """Whether the storage object at this address belongs to a buffer of the pool, or to one that is being made."""
        return self._is_allocating or storage_key in self._taken

    def allocate(
        self,
        tier: Tier,
        numel: int,
        dtype: torch.dtype,
        owner: str,
        *,
        pinned: bool = False,
        zero: bool = False,
        locks_later: bool = False,
        ahead_nbytes: int = 0,
    ) -> torch.Tensor:
        """Allocates a buffer.

        Args:
            tier: Where it lives.
            numel: Number of elements.
            dtype: Type of the elements.
            owner: Whose bytes they are in the ledger.
            pinned: Ask for page-locked memory (host tier only).
            zero: Fill with zeros.
            locks_later: Leave it to ``locking_beside`` to lock the pages.
            ahead_nbytes: Bytes that the same owner will ask for next, for the error.

        Returns:
            A one-dimensional tensor of ``numel`` elements, not initialised unless ``zero``.

        Raises:
            BudgetError: If the tier has no room, even without kept buffers.
        """
        nbytes = numel * dtype.itemsize
        if tier is Tier.DEVICE:
            kept = self._kept.get((dtype, numel))
            if kept:
                buffer = kept.pop(0)
                self._kept_nbytes -= nbytes
                # Unbooking and booking could fail: bytes that are not booked may be measured as non-model data.
                self.ledger.hand_over(tier, CACHE_OWNER, owner, nbytes)
                return buffer.zero_() if zero else buffer
            self._give_up(nbytes - self.ledger.available(tier))
        elif tier is Tier.HOST and self._pinning is not None:
            if self._may_be_cached:
                self._pinning.empty_cache()  # what is not booked any more must not be there beside what is booked now
                self._may_be_cached = False
            if pinned and self._can_pin:
                locked = self._allocate_pinned(self._pinning, numel, dtype, owner, zero, locks_later)
                if locked is not None:
                    return locked
        self.ledger.book(tier, owner, nbytes, ahead_nbytes=ahead_nbytes)
        return self._new(tier, numel, dtype, owner, zero)

    def release(self, tier: Tier, buffer: torch.Tensor, owner: str, *, keep: bool = True) -> None:
        """Takes a buffer back.

        Args:
            tier: Where it lives.
            buffer: What ``allocate`` returned.
            owner: Whose bytes they were.
            keep: On the device, keep it for reuse.
        """
        nbytes = self._taken[buffer.untyped_storage()._cdata]
        if tier is Tier.DEVICE and keep and self.ledger.available(tier) >= 0:
            self.ledger.hand_over(tier, owner, CACHE_OWNER, nbytes)
            kind = (buffer.dtype, buffer.numel())
            kept = self._kept[kind] = self._kept.pop(kind, [])
            if type(buffer) is torch.Tensor:
                bisect.insort(kept, buffer, key=torch.Tensor.data_ptr)
            else:  # a fake tensor has no address
                kept.append(buffer)
            self._kept_nbytes += nbytes
        else:
            self.ledger.unbook(tier, owner, nbytes)
            self._forget(buffer)

    def tier_of(self, buffer: torch.Tensor, home: Tier) -> Tier:
        """Where a buffer of a chunk is that is at home on a tier: some are on the disk."""
        return Tier.DISK if self.disk is not None and self.disk.find(buffer) else home

    def room(self, tier: Tier, *, cautious: bool | None = None) -> int:
        """Bytes that ``allocate`` could still get on a tier, buffers kept for reuse counted in.

        Args:
            tier: The tier.
            cautious: As for ``Ledger.available``.
        """
        return self.ledger.available(tier, cautious=cautious) + (self._kept_nbytes if tier is Tier.DEVICE else 0)

    def in_use(self, tier: Tier) -> int:
        """Bytes booked on a tier, buffers kept for reuse left out."""
        return self.ledger.used(tier) - (self._kept_nbytes if tier is Tier.DEVICE else 0)

    def trim(self) -> None:
        """Gives up all buffers that are kept for reuse."""
        self._give_up(self._kept_nbytes)

    def _give_up(self, nbytes: int) -> None:
        """Gives up buffers that are kept for reuse, those of the size that came back longest ago first."""
        for key in list(self._kept) if nbytes > 0 else ():
            dtype, numel = key
            while nbytes > 0 and self._kept[key]:
                self._forget(self._kept[key].pop())
                self.ledger.unbook(Tier.DEVICE, CACHE_OWNER, numel * dtype.itemsize)
                self._kept_nbytes -= numel * dtype.itemsize
                nbytes -= numel * dtype.itemsize
            if not self._kept[key]:
                del self._kept[key]

    def _allocate_pinned(
        self, pinning: Pinning, numel: int, dtype: torch.dtype, owner: str, zero: bool, locks_later: bool
    ) -> torch.Tensor | None:
        """A page-locked buffer, or ``None``, with one warning, where pinning fails (limits, virtual machines)."""
        nbytes = pinning.nbytes(numel * dtype.itemsize)
        self.ledger.book(Tier.HOST, owner, nbytes)

        def make() -> torch.Tensor:
            buffer = pinning.begin(numel, dtype, zero=zero)
            if not locks_later:
                pinning.lock(buffer)
            return buffer

        try:
            buffer = self._make(nbytes, make)
        except RuntimeError as error:
            self.ledger.unbook(Tier.HOST, owner, nbytes)
            self._note_refusal(error)
            return None
        key = buffer.untyped_storage()._cdata
        self._pinned.add(key)
        if locks_later:
            self._unlocked[key] = functools.partial(pinning.lock, buffer)
        return buffer

    @contextlib.contextmanager
    def locking_beside(self) -> Iterator[None]:
        """A thread locks the pages that were left to it, while the caller writes to them in the block."""
        with concurrent.futures.ThreadPoolExecutor(1, "hf_patrickstar-lock") as thread:
            done = thread.submit(self._lock) if self._unlocked else None
            try:
                yield
            except BaseException:
                self._unlocked.clear()
                raise
            if done is not None:
                done.result()

    def _lock(self) -> None:
        while self._unlocked:
            key, lock = self._unlocked.popitem()
            try:
                lock()
            except RuntimeError as error:
                self._pinned -= {key, *self._unlocked}
                self._unlocked.clear()
                self._note_refusal(error)

    def _note_refusal(self, error: RuntimeError) -> None:
        if not is_not_pinned(error):
            raise error
        self._can_pin = False
        logger.warning("cannot pin host memory (%s); copies will be slower and synchronous", error)

    def _new(self, tier: Tier, numel: int, dtype: torch.dtype, owner: str, zero: bool) -> torch.Tensor:
        """A new buffer for bytes that are booked; if the system has none, they are taken out of the book again."""
        device = self._device if tier is Tier.DEVICE else torch.device("cpu")

        def new() -> torch.Tensor:
            if tier is Tier.DISK:
                assert self.disk is not None
                return self.disk.allocate(numel, dtype).tensor
            if device.type == "cpu":
                return new_on_host(numel, dtype=dtype, device=device, zero=zero)
            with self._segment(numel * dtype.itemsize):
                return (torch.zeros if zero else torch.empty)(numel, dtype=dtype, device=device)

        make = functools.partial(self._make, numel * dtype.itemsize, new)
        try:
            try:
                buffer = make()
            except RuntimeError as error:
                if not is_accelerator(device) or not is_device_full(error):
                    raise
                # The budget has room, so the memory is there, but in pieces: kept buffers may be what lies between.
                self.trim()
                empty_cache()
                buffer = make()
        except (RuntimeError, BudgetError, OSError) as error:
            self.ledger.unbook(tier, owner, numel * dtype.itemsize)
            if not is_full(error):
                raise
            kind = DeviceMemoryError if tier is Tier.DEVICE else BudgetError
            raise kind(
                f"{device} has no {format_need(numel * dtype.itemsize)} for '{owner}', although {tier.value}_budget "
                f"({format_need(self.ledger.budget(tier))}) allows it beside the {format_need(self.ledger.used(tier))} "
                "that are taken: the machine has less than the budget says. End other programs on it, or lower "
                f"{tier.value}_budget to at most {self.ledger.used(tier)} bytes, so that the engine makes do with what "
                f"is there: {error}"
            ) from error
        return buffer

    def _forget(self, buffer: torch.Tensor) -> None:
        key = buffer.untyped_storage()._cdata
        del self._taken[key]
        if self.disk is not None:
            self.disk.release(buffer)
        self._may_be_cached = self._may_be_cached or key in self._pinned
        self._pinned.discard(key)
        self._unlocked.pop(key, None)

    def _make(self, nbytes: int, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        self._is_allocating = True
        try:
            # A buffer made in inference mode could never be trained with.
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
                buffer = make()
            self._taken[buffer.untyped_storage()._cdata] = nbytes
        finally:
            self._is_allocating = False
        return buffer
