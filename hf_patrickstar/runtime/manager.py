"""What the engine, its optimizers and its checkpoints do with chunks outside of the phases of a step."""

from collections.abc import Callable, Iterable, Sequence

import torch

from hf_patrickstar.memory.operators import unseen
from hf_patrickstar.memory.streams import Streams
from hf_patrickstar.runtime.chunk import Chunk, ManagedTensor
from hf_patrickstar.runtime.data import Data
from hf_patrickstar.runtime.executor import Services
from hf_patrickstar.runtime.live_parameter import set_raw_grad
from hf_patrickstar.runtime.parameters import Parameters
from hf_patrickstar.runtime.phases import Phases
from hf_patrickstar.runtime.placement import Placement
from hf_patrickstar.runtime.sharing import Held
from hf_patrickstar.runtime.steps import Steps
from hf_patrickstar.schedule.placement import ChunkBytes


class ChunkManager:
    """Has the parts of the runtime, and changes what they have in common.

    Args:
        services: What loads and evicts.
        steps: Begins and ends steps.
        placement: Moves chunks to better homes.
        data: The places where values and gradients are.
        parameters: Finds parameters, and gives them their values.
        phases: What happens in a step.
        streams: How bytes cross.

    Attributes:
        has_new_groups: Whether param groups were changed, so that parameters may need other lists.
    """

    def __init__(
        self,
        services: Services,
        steps: Steps,
        placement: Placement,
        data: Data,
        parameters: Parameters,
        phases: Phases,
        streams: Streams,
    ) -> None:
        self.chunks = services.chunks
        self.copies, self.reclaim, self.tracer = services.copies, services.reclaim, services.tracer
        self.ledger = services.pool.ledger
        self.steps, self.executor, self.placement = steps, steps.executor, placement
        self.parameters, self.phases = parameters, phases
        self.tensors, self.by_index = parameters.tensors, parameters.by_index
        self.originals, self.values, self.sharing = data.originals, data.values, data.values.sharing
        self.mirrors, self.gradient_mirrors = data.mirrors, data.gradient_mirrors
        self.gradients, self.writes, self.watch = data.gradients, data.writes, data.watch
        self.has_new_groups = False
        self._buckets = data.buckets
        self._order = services.order
        self._pool = services.pool
        self._meter = services.meter
        self._streams = streams
        self._lock = data.gradients.lock

    def find(self, parameter: torch.Tensor) -> ManagedTensor | None:
        """See ``Parameters.find``."""
        return self.parameters.find(parameter)

    @property
    def in_order_of_use(self) -> list[Chunk]:
        """The chunks in the order in which the next forward comes to them; those that no step has visited come last."""
        order = self.tracer.chunk_order
        return sorted(self.chunks, key=lambda chunk: order.get(chunk.spec.index, len(order)))

    # Changes of the model

    def begin_change(self) -> None:
        """Begins to add and remove parameters: no step runs, and nothing that was written is missed."""
        self.phases.unwind()
        self.writes.sync()
        self.steps.abandon_step()

    def add_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Adds chunks at the end of the chunk list."""
        self.chunks.extend(chunks)
        self.copies.note_chunks()

    def remove(self, tensor: ManagedTensor) -> None:
        """Removes a parameter, which is an ordinary one again; its chunk is freed if no other is in it."""
        with self._lock:
            self.writes.forget(tensor)
            self.originals.drop(tensor)
            tensor.num_writes += 1  # a graph of before cannot find its operands any more
            chunk = tensor.chunk
            chunk.remove(tensor)
            self.parameters.forget(tensor)
            if not chunk.tensors:
                self.retire(chunk)

    def retire(self, chunk: Chunk) -> None:
        """Frees a chunk that has become empty; its number is not used again."""
        chunk.wait()
        chunk.wait_for_reader()
        self.copies.forget(chunk)
        chunk.give_back(self._pool)
        chunk.retire()

    def end_change(self, nbytes: Sequence[ChunkBytes]) -> None:
        """Ends it: whatever was recorded is of no use any more.

        Args:
            nbytes: The bytes of every chunk over all lists.
        """
        self.tracer.note_chunks([chunk.copy_nbytes for chunk in self.chunks])
        self.copies.note_chunks()
        self._buckets.note_chunks()
        self._order.note_tensors(max(self.by_index, default=-1) + 1)
        self.placement.note_chunks(nbytes)
        self.values.version += 1

    # Gradients between steps

    def read_gradient(self, tensor: ManagedTensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy of a parameter's gradient on the host; with several processes all call it together."""
        self.gradient_mirrors.sync_one(tensor)
        return self.sharing.tensor(Held(tensor, self.gradients.of(tensor), dtype), "the gradient")

    def zero_gradients(self, parameters: Iterable[torch.Tensor], *, set_to_none: bool) -> None:
        """What ``zero_grad`` means for parameters, in chunks or not; see [Note: gradients after the step]."""
        found = [(parameter, self.find(parameter)) for parameter in parameters]
        tensors = {tensor.spec.index: tensor for _, tensor in found if tensor is not None}
        self.discard_gradients(tensors.values(), to_zero=not set_to_none)
        self.gradients.note_zeroed(self.chunks)
        for parameter in (parameter for parameter, tensor in found if tensor is None):
            if parameter.grad is not None and set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    @unseen()
    def discard_gradients(self, tensors: Iterable[ManagedTensor] | None = None, *, to_zero: bool = False) -> None:
        """Drops gradients; parameters that were overwritten get their value back from ``master``.

        Args:
            tensors: Whose; all by default.
            to_zero: Whether those that were there are zero from now on.
        """
        with self._lock:
            self.phases.abandon_failed_backward()
            self.parameters.release_held_outside_forward()
            self.steps.stop_idle_meter()
            chosen = None if tensors is None else list(tensors)
            if chosen is not None and self.gradients.has_factor:
                dropped = {tensor.spec.index for tensor in chosen}
                if any(self.gradients.has(tensor) for tensor in self.tensors if tensor.spec.index not in dropped):
                    self.phases.apply_factor()  # those of another optimizer, say, are clipped all the same
            self.gradients.coefficient = self.gradients.inverse_scale = None
            if self.tracer.step is None:
                self.steps.micro_batch = 0
            for tensor in self.tensors if chosen is None else chosen:
                self.gradients.take_unstored(tensor)
                if self.gradients.is_absent(tensor):
                    continue
                self.gradient_mirrors.sync_one(tensor)
                if not (to_zero and self.gradient_mirrors.zero(tensor)):
                    self.gradient_mirrors.drop(tensor)
                self.gradients.drop(tensor, to_zero=to_zero)

    def undo_attempt(self) -> None:
        """Takes back what a failed attempt at a micro-batch left, and begins the next; see ``Attempts``."""
        with self._lock:
            self.executor.in_backward = False
            self._streams.release_in_flight()
            dropped = self.gradients.attempts.undo()
            for tensor in self.tensors:
                set_raw_grad(tensor.parameter, None)
                tensor.deferred_gradient, tensor.crossing_nbytes = None, 0
                if tensor.spec.index in dropped:
                    self.gradients.drop(tensor)

    # Loading, and the end

    def begin_loading(self) -> None:
        """Begins to change values at home: gradients, and copies elsewhere, are dropped.

        Raises:
            EngineError: If a parameter is open.
        """
        self.phases.unwind()
        for tensor in self.tensors:
            if tensor.is_open:
                self.parameters.check_usable(tensor)
        self.writes.sync()
        self.discard_gradients()
        with self._lock:
            for chunk in self.chunks:
                self.copies.invalidate(chunk)
                chunk.wait_for_reader()

    def load(self, tensor: ManagedTensor, fill: Callable[[torch.Tensor], None]) -> None:
        """Does what ``Values.load`` does; what another thread has been handed out meanwhile follows at once."""
        with self._lock:
            self.values.load(tensor, fill)
            self.mirrors.refresh(tensor)

    def end_loading(self) -> None:
        """Ends ``begin_loading``: graphs of before are void."""
        self.values.version += 1
        for tensor in self.tensors:
            tensor.num_writes += 1
            self.mirrors.refresh(tensor)

    def close(self) -> None:
        """Gives every payload back. Parameters must have their own storage again by then."""
        with self._lock:
            self.mirrors.close()
            self.gradient_mirrors.close()
            for tensor in self.tensors:
                self.originals.drop(tensor)
            self._streams.release_in_flight()
            self._buckets.close()
            self.gradients.close()
            self.copies.close()
            self._meter.stop()
            for chunk in (chunk for chunk in self.chunks if not chunk.is_retired):
                chunk.wait()
                chunk.wait_for_reader()
                chunk.give_back(self._pool)
                chunk.lists.clear()
                chunk.compute = None
            self._pool.trim()
            self._streams.close()
