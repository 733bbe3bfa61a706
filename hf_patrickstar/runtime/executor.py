"""The one way in which chunks come to the device: by the plan of the step, else on demand.

[Note: chunks in use]
A chunk cannot leave while a module computes with it or a tensor looks into it, and only the chunk itself can tell
(``Chunk.is_in_use``). While a step is recorded, each visit notes which chunks those are. To ask all of them at each
visit would take a time that grows as the square of their number. But modules get hold of a chunk by a visit alone, and
other processes by a gather. So at a visit only those chunks are asked that were in use at the last one, or were visited
or gathered since, and those that code of the user has looked into by ``ManagedParameter.look``, as an update of a
parameter inside of a forward does. All are asked at the first visit of a step.
"""

import torch

from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import Chunk, Device
from hf_patrickstar.runtime.evictor import Evictor
from hf_patrickstar.runtime.steps import Step, Steps
from hf_patrickstar.schedule.move_plan import Actions


class Executor:
    """Brings chunks to the device, by plan where the step has one, on demand where not.

    A step whose trace is known follows a plan. One that is recorded is cautious: it keeps to a part of the budget,
    and chunks leave in list order.

    Args:
        device: The device.
        steps: Has the step that runs: what a visit does depends on it.
        evictor: Makes room.

    Attributes:
        in_backward: Whether a backward has begun that has not ended.
    """

    def __init__(self, device: Device, steps: Steps, evictor: Evictor) -> None:
        self._device, self._chunks = device, device.chunks
        self._pool, self._ledger, self._meter = device.pool, device.ledger, device.meter
        self._steps, self._evictor = steps, evictor
        self.in_backward = False
        self._tick = 0
        self._asked: dict[int, Chunk] = {}  # whether they are in use, at the next recorded visit, by index
        self._asked_at = (-1, 0)  # the step and the visit for which these are all

    # A visit

    @property
    def is_resident(self) -> bool:
        """Whether every chunk is computed with where it is at home, and no visit has to be noted."""
        if self._device.moves:
            return False
        step = self._steps.step
        return step is None or step.cursor is not None

    def visit(self, chunk: Chunk, caller: str) -> torch.Tensor:
        """Brings a chunk to the device: what the plan says for this moment, or what is needed.

        Args:
            chunk: The chunk.
            caller: Who asks, for errors.

        Returns:
            The payload to compute with; it stays while a module computes with it or a tensor looks into it.

        Raises:
            DeviceMemoryError: If it cannot be brought to the device.
        """
        steps, ledger = self._steps, self._ledger
        step = steps.step
        if chunk.compute is not None and not self._device.moves and (step is None or step.cursor is not None):
            return chunk.compute  # every chunk is at home on the device: there is nothing to follow
        self._tick += 1
        chunk.last_access = self._tick
        moment = steps.visit(chunk.spec.index, self._in_use, chunk)
        step = steps.step
        actions = None
        if step is not None:
            if moment is None or step.is_measured:
                steps.expect(step, moment)
            else:
                ledger.is_cautious, ledger.reserved_nbytes = False, step.reserved_nbytes[moment]
            if moment is not None and step.plan is not None:
                actions = step.plan.moments[moment]
        if steps.policy.evict_all:
            self._evictor.evict_and_poison(exclude=chunk)
        was_there = chunk.compute is not None
        self._bring(chunk, step, moment, actions, caller)
        counts = self._device.counts
        waited_s = chunk.wait_for_copy() if chunk.arrival is not None else None
        counts.chunk_visits += 1
        if waited_s is not None:
            counts.late_prefetches += 1
            counts.waiting_seconds += waited_s
        elif was_there and not chunk.is_static:
            counts.chunk_hits += 1
        if counts.log is not None:
            counts.log.append(("visit", chunk.spec.index))
        if step is not None and (moment is None or step.is_measured) and step.has_moments:
            self._meter.restart()
        elif step is not None and step.plan is not None:  # it is not measured: what the trace says is noted
            ledger.note_total(ledger.reserved_nbytes)
        assert chunk.compute is not None
        return chunk.compute

    def _bring(self, chunk: Chunk, step: Step | None, moment: int | None, actions: Actions | None, caller: str) -> None:
        """Does what the plan says, and loads the chunk if that has not; this process has all of it."""
        ledger, moves = self._ledger, actions is None or actions.evict or actions.load
        if not (moves or chunk.compute is None or ledger.available(Tier.DEVICE, measures=False) < 0):
            return
        # At a visit after which no more is there than before, non-model data is not measured: at one that moves nothing
        # it would take longer than all else.
        measures = actions is None or step is None or step.is_measured or self._takes_more(chunk, actions)
        with ledger.one_reading(measures=measures):
            if actions is not None:
                self._evictor.evict_if_unused(actions.evict)
            for index in (*(() if actions is None else actions.load), chunk.spec.index):
                other = self._chunks[index]
                if other.compute is not None:
                    continue
                if other is chunk:
                    self._evictor.make_room_for(chunk, chunk.copy_nbytes, caller)
                    chunk.load(ahead=False)
                elif self._pool.room(Tier.DEVICE) >= other.copy_nbytes:
                    other.load(ahead=True)
            self.shrink_to_budget(chunk, caller)

    def _takes_more(self, chunk: Chunk, actions: Actions) -> bool:
        """Whether more is loaded at the visit of a chunk than is evicted."""
        chunks = self._chunks
        loaded = sum([chunks[index].copy_nbytes for index in actions.load])
        if chunk.compute is None and chunk.spec.index not in actions.load:
            loaded += chunk.copy_nbytes
        return loaded > sum([chunks[index].copy_nbytes for index in actions.evict])

    def shrink_to_budget(self, chunk: Chunk, caller: str) -> None:
        """Evicts what is there beyond the budget, because non-model data has grown; the visited chunk stays."""
        if self._ledger.available(Tier.DEVICE) < 0 and self._device.copies:
            self._evictor.make_room_for(chunk, 0, caller)

    # What is in use; see [Note: chunks in use]

    def note_gathered(self, chunk: Chunk) -> None:
        """Notes a chunk that may be in use from now on, although nobody visits it."""
        self._asked[chunk.spec.index] = chunk

    def _in_use(self, visited: Chunk) -> list[int]:
        """The indices of all other chunks that are in use at a visit that is recorded, in order."""
        number, moment = self._steps.place
        chunks = {*self._asked.values(), *self._device.looked_into}
        if self._asked_at != (number, moment):
            chunks = {*self._device.by_storage.values()}
        self._device.looked_into.clear()
        others = [chunk for chunk in chunks if chunk is not visited]
        found = [chunk for chunk in others if chunk.is_in_use]
        pending = [chunk for chunk in others if chunk.arrival is not None]  # whose gather may begin to look into it
        self._asked = {chunk.spec.index: chunk for chunk in (visited, *found, *pending)}
        self._asked_at = number, moment + 1
        return sorted(chunk.spec.index for chunk in found)
