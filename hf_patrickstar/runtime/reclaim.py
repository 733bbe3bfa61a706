"""The one way to make room on the compute device.

Kept buffers go first, then copies, then gradients that are on their way home, then chunks that live on the device.
"""

from collections.abc import Callable

from hf_patrickstar.errors import DeviceMemoryError
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.streams import Streams
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import Chunk
from hf_patrickstar.runtime.copies import Copies
from hf_patrickstar.runtime.forecast import Forecast
from hf_patrickstar.runtime.placement import Placement
from hf_patrickstar.runtime.tracer import Tracer
from hf_patrickstar.schedule.eviction import Chooser
from hf_patrickstar.units import format_need

_NEED_LESS = "use smaller or shorter batches, or activation checkpointing (--gradient_checkpointing)"


class Reclaim:
    """Makes room on the device.

    Args:
        copies: The copies of chunks, of which some leave.
        placement: Knows which chunks live in the device margin, and moves them out.
        pool: Keeps buffers for reuse, and has the ledger.
        streams: Hold gradients that are on their way home.
        tracer: Has the step that runs: which copy leaves depends on when it is needed next.
        chooser: Chooses which copy leaves.
        forecast: Tells what binds when there is no room.
    """

    def __init__(
        self,
        copies: Copies,
        placement: Placement,
        pool: PayloadPool,
        streams: Streams,
        tracer: Tracer,
        chooser: Chooser,
        forecast: Forecast,
    ) -> None:
        self._copies = copies
        self._placement = placement
        self._pool = pool
        self._ledger = pool.ledger
        self._streams = streams
        self._tracer = tracer
        self._chooser = chooser
        self._forecast = forecast

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

    def make_room_for(self, chunk: Chunk, nbytes: int, who: str) -> None:
        """Frees so many bytes for a chunk.

        Args:
            chunk: The chunk, which does not leave.
            nbytes: How many; 0 only brings what is there under the budget, as far as it can leave.
            who: Who needs the chunk, for errors.

        Raises:
            DeviceMemoryError: If there are not as many.
        """
        self._trim_if_short()
        self._evict_until(lambda: self._pool.room(Tier.DEVICE) >= nbytes, exclude=chunk)
        self._trim_if_short()
        room = self._pool.room(Tier.DEVICE, cautious=False)
        if nbytes and room < nbytes and self._leave_margin():
            room = self._pool.room(Tier.DEVICE, cautious=False)
        if nbytes and room < nbytes:
            raise DeviceMemoryError(self._too_small(nbytes, room, chunk, who))

    def make_room_for_gradients(self, chunk: Chunk) -> None:
        """Frees the bytes of a buffer for the gradients of a group.

        Args:
            chunk: The group; its copy may leave.

        Raises:
            DeviceMemoryError: If there are not as many.
        """
        self.make_room(chunk.copy_nbytes)
        room = self._pool.room(Tier.DEVICE, cautious=False)
        if room < chunk.copy_nbytes:
            who = f"the gradients of group {chunk.spec.index}"
            raise DeviceMemoryError(self._too_small(chunk.copy_nbytes, room, None, who))

    def make_room_for_others(self, *, is_step: bool) -> None:
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
            missing = -ledger.available(Tier.DEVICE, cautious=False)
            short = self._forecast.shortage(sum(chunk.copy_nbytes for chunk in self._copies))
            raise DeviceMemoryError(
                f"{short.subject}: non-model data (activations, temporaries) of "
                f"{format_need(ledger.non_model_nbytes())} and the chunks in use need {format_need(missing)} more "
                f"than there is. {short.advise(_NEED_LESS)}\n{ledger.table()}"
            )
        ledger.note_total(ledger.non_model_nbytes())

    def evict_unused(self) -> None:
        """Evicts every copy that can leave, and gives up the buffers that are kept for reuse."""
        for chunk in self._copies.unused():
            self._copies.evict(chunk)
        self._pool.trim()

    # Inside

    def _evict_until(self, is_enough: Callable[[], bool], exclude: Chunk | None = None) -> bool:
        """Evicts copies one by one until there is enough room; whether there is."""
        while not is_enough():
            victim = self._choose(exclude)
            if victim is not None:
                self._copies.evict(victim)
            elif not (self._await_gathers(exclude) or self._hold_none()):
                return False
        return True

    def _hold_none(self) -> bool:
        """Lets go of gradients in flight; what was measured of this step with them is more than others will need."""
        has_freed = self._streams.hold_at_most(0)
        self._ledger.read_again()
        if has_freed and self._tracer.step is not None:
            self._tracer.step.is_void = True
        return has_freed

    def _leave_margin(self) -> bool:
        has_left = self._placement.leave_margin()
        self._ledger.read_again()  # what was on its way to the lists that moved has arrived
        return has_left

    def _choose(self, exclude: Chunk | None) -> Chunk | None:
        step = self._tracer.step
        cursor, is_diverged = (step.cursor, step.is_diverged) if step is not None else (None, True)
        chunks = {chunk.spec.index: chunk for chunk in self._copies if chunk is not exclude}
        candidates = [(index, chunk.last_access) for index, chunk in chunks.items()]
        order = self._chooser.in_order(candidates, cursor, is_diverged)
        # Whether a chunk is in use is asked in that order, since it takes longest.
        return next((chunks[index] for index in order if not chunks[index].is_in_use), None)

    def _await_gathers(self, exclude: Chunk | None) -> bool:
        """Waits for gathers that this process had no need of, which still look into copies; whether there were any."""
        groups = (chunk for chunk in self._copies if chunk.is_group and chunk is not exclude)
        pending = [chunk for chunk in groups if chunk.arrival is not None]
        for chunk in pending:
            self._copies.wait(chunk)
        return bool(pending)

    def _trim_if_short(self, *, cautious: bool | None = None) -> None:
        """Kept buffers are the first to go when others need the room."""
        if self._ledger.available(Tier.DEVICE, cautious=cautious) < 0:
            self._pool.trim()

    def _too_small(self, nbytes: int, room: int, chunk: Chunk | None, who: str) -> str:
        ledger = self._ledger
        pinned = [other for other in self._copies if other is not chunk]
        names = ", ".join(sorted(self._forecast.names_in_use()))
        short = self._forecast.shortage(nbytes + sum(other.copy_nbytes for other in pinned))
        return (
            f"{short.subject} for {who}: {'it' if chunk is None else f'chunk {chunk.spec.index}'} needs "
            f"{format_need(nbytes)}, "
            f"{format_need(max(room, 0))} are free beside non-model data of {format_need(ledger.non_model_nbytes())}, "
            f"and none of the chunks there ({[other.spec.index for other in pinned]}) can leave, because they are in "
            f"use (computing with: {names or 'none'}; a recomputed segment keeps all of its parameters, and "
            "saved-tensors hooks that a module puts on itself keep those that they return as they are). "
            f"{short.advise(_NEED_LESS + ', or lower chunk_numel')}\n{ledger.table()}"
        )
