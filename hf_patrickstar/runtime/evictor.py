"""Room on the device: the one place that makes some, and what is told where there is none.

Kept buffers go first, then copies of chunks, then gradients on their way to the host, then chunks of the margin.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from hf_patrickstar.common.shortage import Shortage
from hf_patrickstar.errors import BudgetError, DeviceMemoryError, Later
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import Chunk, Device
from hf_patrickstar.runtime.steps import Steps
from hf_patrickstar.schedule.placement import ChunkBytes, Homes
from hf_patrickstar.units import format_nbytes

logger = logging.getLogger(__name__)


class Evictor:
    """Makes room on the device.

    Args:
        device: The device.
        steps: Has the step that runs: which copies it needs last depends on it.
        nbytes: The bytes of each chunk, over all lists.
        margin: Indices of the chunks that live in the margin from the start: the host has no room for them.
        moves_homes: See ``Estimate``.
        reserve: Makes the optimizer allocate its workspace on a tier where it will update chunks.
        advise: Says what helps when there is no room.

    Attributes:
        nbytes: The bytes of each chunk, over all lists.
        in_margin: Indices of the chunks that live in the margin: of those that the host has no room for, too.
        moves_homes: Whether chunks may move to the margin; see ``Estimate``.
        stays: Is held while an update is prepared and done, which writes to lists where they were: no home moves.
        reasons: What was decided last about homes, lookups and activations, a sentence each.
        has_left_margin: Whether chunks were to leave the margin since homes were decided last.
    """

    def __init__(
        self,
        device: Device,
        steps: Steps,
        nbytes: Sequence[ChunkBytes],
        margin: Iterable[int],
        *,
        moves_homes: bool,
        reserve: Callable[[Sequence[Chunk], Tier], None],
        advise: Callable[[], str],
    ) -> None:
        self.nbytes, self.in_margin, self.moves_homes = list(nbytes), set(margin), moves_homes
        self.stays = threading.Lock()
        self.reasons: dict[str, str] = {}
        self.has_left_margin = False
        self._device, self._pool, self._ledger = device, device.pool, device.ledger
        self._chunks, self._steps = device.chunks, steps
        self._reserve, self._advise = reserve, advise

    def make_room(self, nbytes: int, *, keep_margin: bool = False) -> None:
        """Frees so many bytes, or as many as can be freed; the allocation that follows fails if they are too few.

        Args:
            nbytes: How many.
            keep_margin: Chunks that live in the margin stay there.
        """
        while not self._evict_until(lambda: self._pool.room(Tier.DEVICE) >= nbytes):
            # Caution is a reason for copies to leave, which come back at once, and none for homes.
            if keep_margin or self._pool.room(Tier.DEVICE, cautious=False) >= nbytes or not self._leave_margin():
                break

    def make_room_for(self, chunk: Chunk, nbytes: int, caller: str) -> None:
        """Frees so many bytes for a chunk.

        Args:
            chunk: The chunk, which does not leave.
            nbytes: How many; 0 only brings what is there under the budget, as far as it can leave.
            caller: Who needs the chunk, for errors.

        Raises:
            DeviceMemoryError: If there are not as many.
        """
        self._trim_if_short()
        if self._pool.room(Tier.DEVICE) >= nbytes:
            return
        self._evict_until(lambda: self._pool.room(Tier.DEVICE) >= nbytes, exclude=chunk)
        self._trim_if_short()
        room = self._pool.room(Tier.DEVICE, cautious=False)
        if nbytes and room < nbytes and self._leave_margin():
            room = self._pool.room(Tier.DEVICE, cautious=False)
        if nbytes and room < nbytes:
            raise self._too_small(nbytes, chunk, caller)

    def make_room_for_gradients(self, chunk: Chunk) -> None:
        """Frees the bytes of a buffer for the gradients of a group.

        Args:
            chunk: The group; its copy may leave.

        Raises:
            DeviceMemoryError: If there are not as many.
        """
        self.make_room(chunk.copy_nbytes)
        if self._pool.room(Tier.DEVICE, cautious=False) < chunk.copy_nbytes:
            raise self._too_small(chunk.copy_nbytes, None, f"the gradients of group {chunk.spec.index}")

    def make_room_for_non_model(self, *, is_step: bool) -> None:
        """Makes room for what is not chunks, and was just allocated.

        Args:
            is_step: Whether that was inside of forward or backward, which may fail for it. Other code may have nothing
                to do with the model; what it holds counts when the step goes on.

        Raises:
            DeviceMemoryError: If it is more than all copies that can leave.
        """
        ledger = self._ledger

        def is_enough() -> bool:
            self._trim_if_short(cautious=False)
            return ledger.available(Tier.DEVICE, cautious=False) >= 0

        while not self._evict_until(is_enough):
            if self._leave_margin():
                continue
            if not is_step:
                break
            raise self._too_small(0, None, "what a module computes")
        ledger.note_total(ledger.non_model_nbytes())

    def evict_if_unused(self, indices: Iterable[int]) -> None:
        """Evicts those of these copies that nobody looks into."""
        for index in indices:
            chunk = self._device.chunks[index]
            if chunk.has_copy and not chunk.is_in_use:
                chunk.evict()

    def evict_and_poison(self, exclude: Chunk) -> None:
        """Evicts all that can leave but one; who goes on to use one computes with NaN, or bytes of 85 (debugging)."""
        for chunk in self._device.unused(exclude):
            assert chunk.compute is not None
            chunk.compute.fill_(float("nan") if chunk.dtype.is_floating_point else 85)
            chunk.evict()

    # Homes on the device

    @property
    def homes(self) -> Homes:
        """Where chunks live now."""
        device = frozenset(chunk.spec.index for chunk in self._chunks if chunk.home is Tier.DEVICE)
        streamed = frozenset(chunk.spec.index for chunk in self._chunks if chunk.is_streamed) - device
        disk = frozenset(chunk.spec.index for chunk in self._chunks if chunk.is_on_disk)
        return Homes(device, tuple(self.in_margin), {}, streamed, self._chunks[0].tile_part, disk)

    @property
    def may_leave_device(self) -> bool:
        """Whether chunks are at home on the device that may leave it."""
        return bool(self.in_margin) or (self.moves_homes and bool(self.homes.device))

    def leave_margin(self) -> bool:
        """Moves every chunk out of the margin that is not in use; whether any moved. It may be called in a step.

        If none is there, chunks leave that have been at home on the device from the start, because it seemed that
        everything fits, as far as the host has room.
        """
        self.has_left_margin = True  # homes are decided anew after this step, whether it is recorded or not
        if self.stays.locked() or (self._device.is_resting and self._steps.step is not None):
            return False  # a graph may keep values themselves; see [Note: rest]
        if self.move_out(self.in_margin):
            return True
        num_moved = self.move_out(self.homes.kept) if self.moves_homes else 0
        if num_moved:
            said = f"{num_moved} chunks left the device, where not everything fits after all: a step ran out of memory"
            logger.info("patrickstar: %s", said)
            self.reasons["homes"] = said
        return num_moved > 0

    def move_out(self, indices: Iterable[int]) -> int:
        """Moves chunks to the host, and their states to the disk if need be, as far as these have room; how many."""
        num_moved = 0
        for index in sorted(indices):
            chunk, nbytes = self._chunks[index], self.nbytes[index]
            room, states = self._ledger.available(Tier.HOST), Tier.HOST
            if room < nbytes.host_nbytes and 0 < nbytes.list_nbytes <= self._ledger.available(Tier.DISK):
                room, states = room + nbytes.list_nbytes, Tier.DISK
            if chunk.is_retired or not chunk.can_rehome or room < nbytes.host_nbytes:
                continue
            try:
                self._reserve(self._chunks, Tier.HOST)
                chunk.move_home(Tier.HOST, states)
            except BudgetError as error:
                logger.info("patrickstar: the host has no room for a chunk that is to leave the device: %s", error)
                break
            self.in_margin.discard(index)
            num_moved += 1
        return num_moved

    # How room is made

    def _evict_until(self, is_enough: Callable[[], bool], exclude: Chunk | None = None) -> bool:
        """Evicts copies one by one until there is enough room; whether there is."""
        while not is_enough():
            victim = self._choose(exclude)
            if victim is not None:
                victim.evict()
            elif not (self._await_gathers(exclude) or self._free_gradients_in_flight()):
                return False
        return True

    def _choose(self, exclude: Chunk | None) -> Chunk | None:
        step = self._steps.step
        cursor, is_diverged = (step.cursor, step.is_diverged) if step is not None else (None, True)
        chunks = {chunk.spec.index: chunk for chunk in self._device.copies if chunk is not exclude}
        candidates = [(index, chunk.last_access) for index, chunk in chunks.items()]
        order = self._steps.policy.chooser.in_order(candidates, cursor, is_diverged)
        # Whether a chunk is in use is asked in that order, since it takes longest.
        return next((chunks[index] for index in order if not chunks[index].is_in_use), None)

    def _await_gathers(self, exclude: Chunk | None) -> bool:
        """Waits for gathers that this process had no need of, which still look into copies; whether there were any."""
        groups = (chunk for chunk in self._device.copies if chunk.is_group and chunk is not exclude)
        pending = [chunk for chunk in groups if chunk.arrival is not None]
        for chunk in pending:
            chunk.wait_for_copy()
        return bool(pending)

    def _free_gradients_in_flight(self) -> bool:
        """Waits for gradients on their way; what was measured of this step with them is more than later steps need."""
        has_freed = self._device.streams.hold_at_most(0)
        self._ledger.read_again()
        if has_freed and self._steps.step is not None:
            self._steps.step.is_void = True
        return has_freed

    def _leave_margin(self) -> bool:
        has_left = self.leave_margin()
        self._ledger.read_again()  # what was on its way to the lists that moved has arrived
        return has_left

    def _trim_if_short(self, *, cautious: bool | None = None) -> None:
        """Kept buffers are the first to go when non-model data needs the room."""
        if self._ledger.available(Tier.DEVICE, cautious=cautious) < 0:
            self._pool.trim()

    def _too_small(self, nbytes: int, chunk: Chunk | None, caller: str) -> DeviceMemoryError:
        """The error where so many bytes more have no room: what is needed and what there is, and what helps."""
        ledger, others = self._ledger, [other for other in self._device.copies if other is not chunk]
        in_use = sum(other.copy_nbytes for other in others)
        kinds = {"activations and temporaries": ledger.non_model_nbytes(), "chunks in use": in_use + nbytes}
        kinds["others"] = ledger.used(Tier.DEVICE) - sum(copy.copy_nbytes for copy in self._device.copies)
        booked = kinds["chunks in use"] + kinds["others"]
        short = Shortage(zip(ledger.limits(Tier.DEVICE), (sum(kinds.values()), booked), strict=False))
        need = " and ".join(f"{format_nbytes(need)} of {format_nbytes(limit.nbytes)}" for limit, need in short.needs)
        parts = ", ".join(f"{kind} {format_nbytes(size)}" for kind, size in kinds.items() if size)
        names = sorted({tensor.spec.name for copy in self._device.copies for tensor in copy.tensors if tensor.users})
        computing = ""
        if others and nbytes:
            computing = (
                f". Chunks {[other.spec.index for other in others]} are in use: it computes with "
                f"{', '.join(names) or 'none'}, a recomputed segment keeps all of its parameters, and saved-tensors "
                "hooks that a module puts on itself keep those that they return as they are"
            )
        error = DeviceMemoryError(f"{short.subject} for {caller}: {need} are needed there ({parts}){computing}.")
        error.more = self.what_helps()
        return error

    def what_helps(self) -> Later:
        """What is on both tiers, and what helps where the device has no room for the step that runs."""
        table, least, advise = self._ledger.table(), self._steps.least, self._advise
        return Later(lambda: "\n".join(filter(None, (table, str(least or ""), advise()))))
