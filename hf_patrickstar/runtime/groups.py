"""Communication groups: chunks that several processes gather to compute with, and whose gradients they reduce.

Parameters come from the processes that have them by an all-gather, gradients go to them by a reduce-scatter, a group at
a time (PatrickStar section 7). The gradients of a group collect in a buffer on the device as autograd finishes them.
When all are there, one reduce-scatter gives each rank the average of its own chunk, which is stored, and the buffer is
free again. So the accumulation of micro-batches happens after the reduction, in 1/p of the memory; keeping gradients
whole on every rank until the last micro-batch, as ``no_sync`` of ``DistributedDataParallel`` does, would need a whole
model's. Which collective comes next on all processes is what ``dist/order.py`` agrees on.
"""

from collections.abc import Iterable

import torch

from hf_patrickstar.common.stage import Stage
from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.dist.order import Collective, CollectiveKind
from hf_patrickstar.memory.lanes import Ticket
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import GRADIENTS, STAGING, Chunk, Device
from hf_patrickstar.runtime.evictor import Evictor
from hf_patrickstar.runtime.executor import Executor
from hf_patrickstar.runtime.gradients import Gradients
from hf_patrickstar.runtime.mirrors import GradientMirrors
from hf_patrickstar.runtime.parameter import ManagedParameter
from hf_patrickstar.runtime.ranges import named
from hf_patrickstar.runtime.steps import Step, Steps
from hf_patrickstar.schedule.move_plan import Actions


class Groups(Executor):
    """Gathers and reduces groups, by the plan of the step, which all processes execute, or as one of them asks.

    Args:
        device: The device.
        collectives: Talks to other processes.
        steps: Has the step that runs, and says which collective comes next on all processes.
        evictor: Makes room.
        gradients: Stores averages.
        gradient_mirrors: What was handed out of them.

    Attributes:
        found: Indices of the tensors that got a gradient in this backward; their owners learn it when it ends.
    """

    def __init__(
        self,
        device: Device,
        collectives: Collectives,
        steps: Steps,
        evictor: Evictor,
        gradients: Gradients,
        gradient_mirrors: GradientMirrors,
    ) -> None:
        self.found: set[int] = set()
        super().__init__(device, steps, evictor)
        self._streams = device.streams
        self._collectives = collectives
        self._order = steps.order
        self._gradients = gradients
        self._gradient_mirrors = gradient_mirrors
        self._needed: Chunk | None = None
        self._num_expected: list[int] = []
        self._buffers: dict[int, torch.Tensor] = {}
        self._stored: dict[int, set[int]] = {}
        self._held: list[tuple[ManagedParameter, torch.Tensor]] = []
        self._leaving: torch.Tensor | None = None  # the buffer of averages that are on their way to the host
        self._under_way: tuple[Chunk, torch.Tensor, set[int], Ticket] | None = None
        self._staging: dict[torch.dtype, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        self.note_chunks()

    def note_chunks(self) -> None:
        """Takes note of which parameters are in which chunks; scratch space is allocated anew."""
        self._num_expected = [sum(tensor.spec.trainable for tensor in chunk.tensors) for chunk in self._chunks]
        self._release_staging()
        largest: dict[torch.dtype, int] = {}
        for chunk in self._chunks:
            if chunk.spec.trainable:
                largest[chunk.dtype] = max(chunk.spec.chunk_numel, largest.get(chunk.dtype, 0))
        for dtype, numel in largest.items():  # in which slices of other ranks arrive
            numels = self._collectives.staging_numel(numel, dtype)
            first, second = (
                self._pool.allocate(Tier.DEVICE, size, kind, STAGING) if size else None
                for size, kind in zip(numels, (dtype, torch.float32), strict=True)
            )
            self._staging[dtype] = first, second

    def _release_staging(self) -> None:
        for buffer in (buffer for buffers in self._staging.values() for buffer in buffers):
            if buffer is not None:
                self._pool.release(Tier.DEVICE, buffer, STAGING, keep=False)
        self._staging = {}

    # Values

    def _bring(self, chunk: Chunk, step: Step | None, moment: int | None, actions: Actions | None, caller: str) -> None:
        """Executes the plan up to the visit, with all processes, and gathers the chunk if that has not."""
        self._needed = chunk
        ledger = self._pool.ledger
        is_followed = moment is not None and step is not None and step.plan is not None
        if ledger.available(Tier.DEVICE, measures=not is_followed) < 0:
            self._release_leaving()
        if step is not None and step.plan is not None:
            end = self._end_of_phase(step, not self.in_backward)
            if moment is not None:  # another branch may look like what comes after this forward
                self._execute_until(step, min(moment + 1, end))
            while chunk.compute is None and step.num_followed < end:
                self._execute_until(step, step.num_followed + 1)
        if chunk.compute is None or step is None:  # between steps others may lack it
            if step is not None and step.plan is not None:
                self._reduce_due(step)  # the others do these before they hear of what no plan has
            self._ask(CollectiveKind.GATHER, chunk.spec.index, caller)
            while chunk.compute is None:  # it left for what another process asked for at the same time
                self._ask(CollectiveKind.GATHER, chunk.spec.index, caller)
        self._needed = None
        if not is_followed or ledger.available(Tier.DEVICE, measures=False) < 0:
            self.shrink_to_budget(chunk, caller)

    def _gather(self, index: int) -> None:
        """Takes part in a gather, whether or not this process needs it."""
        chunk, what = self._chunks[index], f"gathers group {index}"
        self._gradients.bring_values_back(chunk)
        if chunk.compute is None:
            if self._pool.room(Tier.DEVICE) < chunk.copy_nbytes:
                self._release_leaving()
            self._evictor.make_room_for(chunk, chunk.copy_nbytes, f"gathering group {index}")
            with chunk.gathered(ahead=chunk is not self._needed) as payload:
                chunk.arrival = self._collectives.all_gather(payload, what)
        else:
            if chunk.arrival is not None:
                chunk.wait_for_copy()
            chunk.arrival = self._collectives.all_gather(chunk.compute, what)
        self.note_gathered(chunk)

    # Gradients

    def store(self, tensor: ManagedParameter, gradient: torch.Tensor) -> None:
        """Keeps a gradient until its group is complete, and reduces the group as soon as it is its turn.

        Args:
            tensor: Whose gradient it is.
            gradient: The gradient of one backward, on the compute device, in the parameter's shape and type.

        Raises:
            BudgetError: If there is no room for it.
        """
        chunk = tensor.chunk
        place = tensor.view_copy(self._buffer(chunk))
        stored = self._stored[chunk.spec.index]
        if tensor.spec.index in stored:
            place.add_(gradient)
        else:
            place.copy_(gradient)
            stored.add(tensor.spec.index)
            self.found.add(tensor.spec.index)
        if not self._is_complete(chunk):
            return
        step = self._steps.step
        if step is None or step.plan is None:
            self._ask(CollectiveKind.REDUCE, chunk.spec.index, "its gradients, which are complete")
            return
        while step.due and self._is_complete(self._chunks[step.due[0]]):
            self._perform_planned(CollectiveKind.REDUCE, step.due.pop(0))

    def _is_complete(self, chunk: Chunk) -> bool:
        return len(self._stored.get(chunk.spec.index, ())) == self._num_expected[chunk.spec.index]

    def _buffer(self, chunk: Chunk) -> torch.Tensor:
        index = chunk.spec.index
        if index not in self._buffers:
            with self._pool.ledger.one_reading():
                if self._pool.room(Tier.DEVICE) < chunk.copy_nbytes:
                    self._release_leaving()
                self._evictor.make_room_for_gradients(chunk)
                numel = chunk.spec.capacity_numel
                self._buffers[index] = self._pool.allocate(Tier.DEVICE, numel, chunk.dtype, GRADIENTS)
            self._stored[index] = set()
        return self._buffers[index]

    def _reduce(self, index: int) -> None:
        """Takes part in a reduction: averages what all ranks have of a group's gradients, zero where one has none."""
        chunk = self._chunks[index]
        buffer = self._buffer(chunk)
        stored = self._stored.pop(index)
        del self._buffers[index]
        for tensor in chunk.tensors:
            if tensor.spec.index not in stored:
                tensor.view_copy(buffer).zero_()
        ticket = self._collectives.reduce_scatter(buffer, self._staging[buffer.dtype], f"reduces group {index}")
        self._store_averages()
        self._under_way = (chunk, buffer, stored, ticket)
        if not self._collectives.is_asynchronous:
            self._store_averages()
        self._steps.note_reduced(index)

    def _store_averages(self) -> None:
        """Stores the averages of the reduction that is under way; afterwards its buffer is free."""
        if self._under_way is None:
            return
        (chunk, buffer, stored, ticket), self._under_way = self._under_way, None
        self._release_leaving()
        ticket.join()
        for tensor in chunk.owned:
            average = tensor.own(tensor.view_copy(buffer))
            if tensor.spec.index in stored:
                self._store_average(tensor, average)
            else:  # another rank may have one, and this is it; that is known when backward ends
                self._held.append((tensor, average.to(chunk.home_device, copy=True)))
        self._leaving = buffer
        # Where reductions go on beside the device, it would wait for the bus here. By the time that the next group has
        # arrived the averages are on the host.
        if not self._collectives.is_asynchronous:
            self._release_leaving()

    def _store_average(self, tensor: ManagedParameter, average: torch.Tensor) -> None:
        if tensor.chunk.home is Tier.HOST:
            tensor.crossing_nbytes += average.nbytes
        self._gradient_mirrors.sync_one(tensor)
        self._gradients.add(tensor, average)
        self._gradient_mirrors.forget(tensor)

    def _release_leaving(self) -> None:
        """Gives back the buffer of averages that are on their way to the host, when they have arrived."""
        if self._leaving is not None:
            buffer, self._leaving = self._leaving, None
            self._streams.release_in_flight()
            self._pool.ledger.read_again()
            self._pool.release(Tier.DEVICE, buffer, GRADIENTS)

    # The end of a phase

    def end_phase(self, phase: Stage) -> frozenset[int]:
        """Ends a forward, a backward or an evaluation together with the other processes.

        Args:
            phase: What has ended.

        Returns:
            The tensors that got a gradient anywhere.
        """
        step, is_backward = self._steps.step, phase is Stage.BACKWARD
        if step is not None and step.plan is not None:
            self._execute_until(step, self._end_of_phase(step, phase is Stage.FORWARD))
            if phase is not Stage.FORWARD:  # what the last visit of a forward is followed by is not complete yet
                self._reduce_due(step)
        while is_backward and self._buffers:  # what others ask for at the same time is done too
            self._ask(CollectiveKind.REDUCE, min(self._buffers), "gradients that no plan expects")
        is_diverged, is_recorded = step is not None and step.is_diverged, step is not None and step.is_recorded
        indices = sorted(self.found) if is_backward else []
        while (ended := self._order.end(phase, indices, is_diverged=is_diverged, is_recorded=is_recorded)).collectives:
            self.perform(ended.collectives)
        if step is not None and phase is not Stage.FORWARD:
            step.is_diverged = ended.is_diverged  # anywhere: traces are recorded anew by all or by none
        return ended.indices

    def end_backward(self) -> frozenset[int]:
        """Ends a backward: all gradients are reduced and stored; returns the tensors that got one anywhere."""
        anywhere = self.end_phase(Stage.BACKWARD)
        self._store_averages()
        self._release_leaving()
        for tensor, average in self._held:
            if tensor.spec.index in anywhere:
                self._store_average(tensor, average)
        self._held.clear()
        self.found.clear()
        return anywhere

    def abandon_backward(self) -> None:
        """Drops the gradients of a backward that failed, as far as they are not reduced."""
        self._store_averages()
        self._release_leaving()
        for buffer in self._buffers.values():
            self._pool.release(Tier.DEVICE, buffer, GRADIENTS)
        self._buffers.clear()
        self._stored.clear()
        self._held.clear()
        self.found.clear()

    def close(self) -> None:
        """Gives every buffer back."""
        self.abandon_backward()
        self._release_staging()

    # The plan, and what no plan has; see [Note: one order of collectives]

    def _execute_until(self, step: Step, end: int) -> None:
        """Executes the plan up to a moment, whether or not this process has come to it."""
        assert step.plan is not None
        while step.num_followed < end:
            self._reduce_due(step)
            actions = step.plan.moments[step.num_followed]
            step.num_followed += 1
            if actions.moves:
                with self._pool.ledger.one_reading():
                    self._evictor.evict_if_unused(actions.evict)
                    for index in actions.load:
                        self._perform_planned(CollectiveKind.GATHER, index)
            step.due = list(actions.reduce)

    def _reduce_due(self, step: Step) -> None:
        """Executes what is left of the reductions of the moment that the plan has come to."""
        while step.due:
            self._perform_planned(CollectiveKind.REDUCE, step.due.pop(0))

    def _end_of_phase(self, step: Step, is_forward: bool) -> int:
        """The moment of the plan up to which what is running now may go."""
        assert step.plan is not None
        ends = self._steps.traces[step.key].forward_ends if step.key in self._steps.traces else ()
        if is_forward and ends:
            return ends[len(step.forward_ends)] if len(step.forward_ends) < len(ends) else step.num_followed
        return len(step.plan.moments)

    def _ask(self, subject: CollectiveKind, index: int, caller: str) -> None:
        """Does a collective that no plan has, with all that other processes ask for at the same time."""
        is_in_step = self.in_backward or self._steps.step is not None
        self.perform(self._order.ask(Collective(subject, index), caller, is_in_step=is_in_step))

    def _perform_planned(self, subject: CollectiveKind, index: int) -> None:
        collective, chunk = Collective(subject, index), self._chunks[index]
        self._order.check(collective, chunk.dtype, chunk.spec.chunk_numel)
        self.perform([collective])

    def perform(self, collectives: Iterable[Collective]) -> None:
        """Does what all processes do now."""
        for subject, index in collectives:
            with named(subject.name.lower(), index):
                (self._gather if subject is CollectiveKind.GATHER else self._reduce)(index)
