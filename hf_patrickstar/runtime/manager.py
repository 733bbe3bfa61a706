"""The chunk manager: brings chunks to where they are computed with, and gradients to where they are needed.

[Note: where things live]
Every chunk has a home tier with all its lists. A chunk at home on the host is copied to the device to be computed
with, and keeps its host storage meanwhile. Gradients go straight to the home, tensor by tensor, as autograd finishes
them. So a device copy is never dirty: evicting one drops it and copies nothing, device -> host carries exactly the
gradients, and after the optimizer has changed a home its device copy is stale and is dropped.
"""

from collections.abc import Callable, Iterable

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from hf_patrickstar.errors import EngineError
from hf_patrickstar.events import Listener
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.memory.transfers import Transfers
from hf_patrickstar.runtime.chunk import MASTER, Chunk, GradientPlace, ManagedTensor
from hf_patrickstar.runtime.collectives import Collectives
from hf_patrickstar.runtime.gradients import Gradients
from hf_patrickstar.runtime.homes import Homes
from hf_patrickstar.runtime.lockstep import Lockstep, Phase
from hf_patrickstar.runtime.reducer import Reducer
from hf_patrickstar.runtime.sharing import Held, Sharing
from hf_patrickstar.runtime.steps import Steps
from hf_patrickstar.schedule.trace import Shapes
from hf_patrickstar.states import Stage, TensorState


class SavedView:
    """What autograd keeps of an operand that lives in a chunk: where it was, not what it was."""

    __slots__ = ("generation", "offset", "size", "stride", "tensor")

    def __init__(self, tensor: ManagedTensor, view: torch.Tensor, generation: int) -> None:
        self.tensor = tensor
        self.size = view.size()
        self.stride = view.stride()
        self.offset = view.storage_offset()
        self.generation = generation
        tensor.num_saved += 1

    def __del__(self) -> None:
        self.tensor.num_saved -= 1


class ChunkManager:
    """Gives parameters their values and takes their gradients.

    Args:
        chunks: All chunks, with their payloads allocated.
        steps: Begins and ends steps, over what brings chunks to the compute device.
        pool: Where accumulation lists come from.
        transfers: How bytes cross.
        emit: Told of every event.
        num_micro_batches: Micro-batches per step; with more than one, gradients go to the accumulation list at once.
        collectives: Averages gradients over processes.
        lockstep: Keeps processes in the same order of collectives.
    """

    def __init__(
        self,
        chunks: list[Chunk],
        steps: Steps,
        pool: PayloadPool,
        transfers: Transfers,
        emit: Listener,
        num_micro_batches: int,
        collectives: Collectives,
        lockstep: Lockstep,
    ) -> None:
        self.chunks = chunks
        self.steps = steps
        self.residency = residency = steps.residency
        self.tensors: list[ManagedTensor] = sorted(
            (tensor for chunk in chunks for tensor in chunk.tensors), key=lambda tensor: tensor.spec.index
        )
        self.manages_gradients = True  # an engine for evaluation leaves them to torch
        self.borrowed: list[ManagedTensor] = []  # acquired by code outside of every forward
        self.step_peaks = (0, 0, 0)  # bytes in the last step: chunks on the device, all on the device, on the host
        self._num_micro_batches = num_micro_batches
        self._micro_batch = 0
        self._pool = pool
        self._transfers = transfers
        self._emit = emit
        self._generation = 0
        self.homes: Homes | None = None
        self.unwind: Callable[[], None] = lambda: None  # ends forwards that were interrupted
        self.gradients = Gradients(pool, transfers, emit, residency.make_room, num_micro_batches > 1, lockstep.is_alone)
        self._lock = self.gradients.lock
        self._list_names = {name for chunk in chunks for name in chunk.lists}
        self.sharing = Sharing(collectives, lockstep)
        self._is_alone = lockstep.is_alone
        self._reducer = Reducer(chunks, pool, transfers, collectives, residency.make_room, self._deliver)
        residency.before_gather = self.gradients.bring_values_back
        residency.gradient_peak = self._reducer.take_peak
        lockstep.reduce = self._reduce

    # Steps

    def begin_forward(self, name: str, shapes: Shapes, present: Iterable[torch.Tensor]) -> None:
        """Begins a training step, or goes on with the one that runs.

        Args:
            name: The outermost module whose forward begins; empty for the model itself.
            shapes: Shapes of its inputs.
            present: Tensors on the device that are there already and are not chunks.
        """
        self._forget_failed_backward()
        if self.residency.tracer.step is None:
            self.steps.settle()
            kind, is_last = self._kind_of_step()
            kind = f"{kind}:{name}" if name else kind
            if self.homes is not None:
                self.homes.prepare("training", shapes)
            updated = frozenset(chunk.spec.index for chunk in self.chunks if chunk.spec.trainable and is_last)
            self.steps.begin_step(kind, shapes, present, updated, self._generation)

    def begin_evaluation(self, name: str, shapes: Shapes, present: Iterable[torch.Tensor]) -> None:
        """Begins a forward without gradients, between steps or inside of one; see ``begin_forward``."""
        self._forget_failed_backward()
        self.release_borrowed()
        self.steps.settle()
        if self.homes is not None:
            self.homes.prepare("", shapes)
        kind = f"evaluation:{name}" if name else "evaluation"
        self.steps.begin_interlude(kind, shapes, present, self._generation)

    def _forget_failed_backward(self) -> None:
        """Drops the step whose backward raised: one that has begun and neither runs nor has ended."""
        if self.in_backward and torch._C._current_graph_task_id() == -1:
            self.in_backward = False
            self._reducer.forget()
            self.steps.forget_step()

    def _kind_of_step(self) -> tuple[str, bool]:
        """What the micro-batch that begins is, and whether the optimizer follows it."""
        if self._num_micro_batches == 1:
            return "training", True
        if self._micro_batch == 0:
            return "training first", False
        is_last = self._micro_batch == self._num_micro_batches - 1
        return ("training last" if is_last else "training middle"), is_last

    # Access and release of parameters

    def acquire(self, tensor: ManagedTensor, module_name: str) -> None:
        """Gives a parameter its value, on the compute device, until it is released as often as it was acquired.

        Args:
            tensor: The parameter.
            module_name: Who asks, for errors.

        Raises:
            BudgetError: If its chunk cannot be brought to the device.
            EngineError: If the parameter is open (``full_parameters``), was unfrozen since the engine was made, or was
                replaced by a tensor of another shape.
        """
        if torch.is_inference_mode_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
            # A payload made there could never be trained with, or would be a wrapper without storage.
            with torch.inference_mode(False), temporarily_clear_interpreter_stack():
                return self.acquire(tensor, module_name)
        with self._lock:
            if tensor.users == 0:
                self._check_usable(tensor)
            payload = self._reach(tensor, module_name)
            if tensor.users == 0:
                tensor.parameter.data = tensor.view_copy(payload)
                tensor.go(TensorState.COMPUTE)
                tensor.chunk.num_computing += 1
                tensor.version = tensor.parameter._version
            tensor.users += 1
        return None

    def release(self, tensor: ManagedTensor, stage: Stage) -> None:
        """Ends one acquisition; after the last, the parameter is a placeholder again."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            with temporarily_clear_interpreter_stack():
                return self.release(tensor, stage)
        with self._lock:
            tensor.users -= 1
            if tensor.users == 0:
                value, storage = tensor.parameter.data, tensor.chunk.storage
                assert storage is not None
                assigned = value.untyped_storage()._cdata != storage._cdata
                if tuple(value.shape) == tensor.spec.shape:  # another shape stays, and is refused at the next use
                    tensor.parameter.data = tensor.placeholder
                    if assigned or tensor.parameter._version != tensor.version:
                        self._keep_value(tensor, value)
                tensor.chunk.num_computing -= 1
                tensor.go(stage.to_released())
        return None

    def release_borrowed(self) -> None:
        """Takes back parameters that were read outside of every forward."""
        with self._lock:
            while self.borrowed:
                self.release(self.borrowed.pop(), Stage.FORWARD)

    def pack(self, view: torch.Tensor) -> "torch.Tensor | SavedView":
        """Replaces an operand that autograd wants to keep by its address, if it lives in a chunk."""
        chunk = self.residency.find(view.untyped_storage()._cdata)
        if chunk is None or view.dtype is not chunk.param.dtype:
            # Of an output that is saved by its own operator the tensor itself would be a cycle that nobody collects.
            return view.detach()
        return SavedView(chunk.tensor_at(int(view.storage_offset())), view, self._generation)

    def unpack(self, saved: "torch.Tensor | SavedView") -> torch.Tensor:
        """Brings back an operand of backward.

        The result aliases the chunk, and while it is alive the chunk cannot be evicted.

        Raises:
            EngineError: If the optimizer changed the parameter since forward.
        """
        if isinstance(saved, torch.Tensor):
            return saved
        with self._lock:
            tensor = saved.tensor
            if saved.generation != self._generation:
                raise EngineError(
                    f"parameter '{tensor.spec.name}' was changed by the optimizer between this forward and its "
                    "backward; call backward before the optimizer's step"
                )
            payload = self._reach(tensor, f"the backward of a use of '{tensor.spec.name}'")
            return payload.as_strided(saved.size, saved.stride, saved.offset)

    # Gradients

    def store_gradient(self, tensor: ManagedTensor, gradient: torch.Tensor, *, is_at_home: bool = False) -> None:
        """Takes a finished gradient to its place.

        Args:
            tensor: Whose gradient it is.
            gradient: The gradient of one backward, in the parameter's shape and type.
            is_at_home: Whether it was computed where the chunk is at home: then nothing crosses.
        """
        with self._lock:
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            if not tensor.spec.trainable:
                raise EngineError(_unfrozen(tensor))
            if not self._is_alone:
                self._reducer.store(tensor, gradient)
            elif not self.gradients.attempts.is_counted(tensor.spec.index):
                if not (is_at_home or tensor.chunk.is_static):
                    tensor.crossing_nbytes += gradient.numel() * gradient.dtype.itemsize
                self.gradients.place(tensor, gradient)
            if tensor.users == 0 and tensor.state is not TensorState.HOLD_AFTER_BWD:
                tensor.go(TensorState.HOLD_AFTER_BWD)
            if not self._is_alone and self._reducer.is_complete(tensor.chunk):
                self.residency.offer(tensor.chunk, self._reducer.is_complete)

    def end_backward(self) -> None:
        """Settles what backward left: gradients put aside, and tensors that got none."""
        with self._lock:
            self.release_borrowed()
            if not self._is_alone:
                found = self.steps.end_phase(Phase.BACKWARD, self._reducer.unreduced, self._reducer.found)
                self._reducer.settle(found)
                for index in found:
                    if not self.tensors[index].is_owned:
                        self.tensors[index].gradient = GradientPlace.REMOTE
            self.in_backward = False
            for tensor in self.tensors:
                if tensor.aside is not None:
                    self.gradients.settle(tensor)
                if tensor.state is TensorState.HOLD_AFTER_FWD or (
                    tensor.state is TensorState.HOLD_AFTER_BWD and tensor.gradient is not GradientPlace.PARAM
                ):
                    tensor.go(TensorState.HOLD)
            self._transfers.settle()
            self._micro_batch += 1
            self.steps.finish_step()

    def undo_attempt(self) -> None:
        """Takes back what a failed attempt at a micro-batch left, and begins the next; see ``Attempts``."""
        with self._lock:
            self.in_backward = False
            self._transfers.settle()
            dropped = self.gradients.attempts.undo()
            for tensor in self.tensors:
                tensor.parameter.grad = None
                tensor.aside, tensor.crossing_nbytes = None, 0
                if tensor.spec.index in dropped:
                    self.gradients.drop(tensor)

    def look_up(self, tensor: ManagedTensor) -> torch.Tensor:
        """The value of an embedding at its home, to look rows up there (PatrickStar section 8.2).

        Args:
            tensor: The parameter; its chunk is at home on the host.

        Returns:
            A leaf that aliases the home, in the parameter's shape; its gradient belongs to the parameter.
        """
        with self._lock:
            if tensor.users == 0:
                self._check_usable(tensor)
            if tensor.gradient is GradientPlace.PARAM:
                self.gradients.move_to_list(tensor)
            tensor.chunk.wait()
            tensor.is_looked_up = True
            leaf = tensor.view(tensor.chunk.param).detach()
            return leaf.requires_grad_(tensor.spec.trainable and torch.is_grad_enabled())

    def end_look_up(self, tensor: ManagedTensor, leaf: torch.Tensor, version: int, nbytes: int) -> None:
        """Ends a lookup of so many bytes; an embedding with ``max_norm`` writes to the rows that it reads."""
        tensor.lookup_nbytes += nbytes
        if leaf._version != version:
            with self._lock:
                self._keep_value(tensor, leaf.detach())

    def take_over(self, tensor: ManagedTensor) -> None:
        """Takes over what somebody assigned to ``parameter.data`` or ``parameter.grad`` behind the engine's back.

        Raises:
            EngineError: If the shape is another one.
        """
        if tensor.users or tensor.is_open or tensor.state is TensorState.FREE:
            return
        if not tensor.is_placeholder:
            self._check_usable(tensor)
        gradient = tensor.parameter.grad
        if gradient is not None and tensor.spec.trainable and self.manages_gradients:
            tensor.parameter.grad = None
            self.set_gradient(tensor, gradient.to(tensor.chunk.param.dtype))

    def set_gradient(self, tensor: ManagedTensor, gradient: torch.Tensor) -> None:
        """Takes a gradient that somebody computed outside of backward; with several processes its owner's counts."""
        if self._is_alone:
            self.store_gradient(tensor, gradient)
        elif tensor.is_owned:
            with self._lock:
                self.gradients.add(tensor, tensor.own(gradient))
        else:
            tensor.gradient = GradientPlace.REMOTE

    def read_value(self, tensor: ManagedTensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy of a parameter's value on the host: from the fp32 master if there is one.

        With several processes all must call it, for the same parameter.

        Args:
            tensor: The parameter.
            dtype: Type of the copy.
        """
        return self.sharing.tensor(Held(tensor, self.value_at_home(tensor), dtype), "the value")

    def value_at_home(self, tensor: ManagedTensor) -> torch.Tensor | None:
        """What this rank has of a parameter's value, in place: its fp32 master if there is one."""
        if not tensor.is_owned:
            return None
        tensor.chunk.wait()
        return tensor.view(tensor.chunk.lists.get(MASTER, tensor.chunk.param))

    def read_gradient(self, tensor: ManagedTensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy of a parameter's gradient on the host; see ``read_value``."""
        return self.sharing.tensor(Held(tensor, self.gradients.of(tensor), dtype), "the gradient")

    def write_value(self, tensor: ManagedTensor, value: torch.Tensor) -> None:
        """Changes the value of a parameter, in every place where it is; a gradient that it holds is kept.

        Args:
            tensor: The parameter.
            value: The new value, in the parameter's shape; any floating type, any device.
        """
        with self._lock:
            self._keep_value(tensor, value)
            self._generation += 1

    def begin_loading(self) -> None:
        """Begins to change values at home: gradients, and copies elsewhere, are dropped.

        Raises:
            EngineError: If a parameter is open.
        """
        self.unwind()
        for tensor in self.tensors:
            if tensor.is_open:
                self._check_usable(tensor)
        self.discard_gradients()
        with self._lock:
            for tensor in self.tensors:
                if not tensor.is_placeholder:
                    tensor.parameter.data = tensor.placeholder
            for chunk in self.chunks:
                self.residency.drop(chunk)

    def load_value(self, tensor: ManagedTensor, fill: Callable[[torch.Tensor], None]) -> None:
        """Changes what this rank has at home of a parameter, between ``begin_loading`` and ``end_loading``.

        Args:
            tensor: The parameter.
            fill: Writes the new value into what it is given: flat, fp32 if there is a master.
        """
        with self._lock:
            chunk = tensor.chunk
            chunk.wait()
            chunk.wait_for_reader()
            home = tensor.view(chunk.param)
            if MASTER not in chunk.lists:
                fill(home.view(-1))
                return
            master = tensor.view(chunk.lists[MASTER])
            fill(master.view(-1))
            home.copy_(master)

    def end_loading(self) -> None:
        """Ends ``begin_loading``: graphs of before are void."""
        self._generation += 1

    def discard_gradients(self) -> None:
        """Drops all gradients; parameters that were overwritten get their value back from ``master``."""
        with self._lock:
            self._forget_failed_backward()
            self.release_borrowed()
            self.steps.settle()
            if self.residency.tracer.step is None:
                self._micro_batch = 0
            for tensor in self.tensors:
                self.gradients.drop(tensor)

    # What the optimizer and the checkpoints do at the chunk's home

    def begin_update(self) -> None:
        """Begins the optimizer's step: copies of what it will change are dropped, which makes room for its work."""
        self.unwind()
        with self._lock:
            for chunk in self.chunks:
                if chunk.spec.trainable:
                    self.residency.drop(chunk)
            self.steps.begin_update()

    def finish_update(self, chunk: Chunk) -> None:
        """Ends the optimizer's work on a chunk: no gradients, new values at home."""
        with self._lock:
            for tensor in chunk.tensors:
                self.gradients.forget(tensor)

    @property
    def in_backward(self) -> bool:
        """Whether a backward has begun that has not ended."""
        return self.residency.in_backward

    @in_backward.setter
    def in_backward(self, value: bool) -> None:
        """Sets it."""
        self.residency.in_backward = value

    @property
    def dtype(self) -> torch.dtype:
        """Type of the ``param`` list."""
        return self.chunks[0].param.dtype if self.chunks else torch.float32

    @property
    def version(self) -> int:
        """Counts the changes of values; a graph built at an earlier version is void."""
        return self._generation

    def finish_step(self) -> None:
        """Tells that the optimizer has changed the values, and lets chunks move to better homes."""
        self._generation += 1
        num_micro_batches, self._micro_batch = self._micro_batch, 0
        ledger = self.residency.ledger
        self.step_peaks = (ledger.step_peak(Tier.DEVICE), ledger.total_step_peak, ledger.step_peak(Tier.HOST))
        ledger.begin_step()
        self.steps.forget_step()
        if self.homes is not None:
            self.homes.update(num_micro_batches)
        for tensor in self.tensors:
            tensor.lookup_nbytes = 0

    def close(self) -> None:
        """Gives every payload back. Parameters must have their own storage again by then."""
        with self._lock:
            self._transfers.settle()
            self._reducer.close()
            self.residency.close()
            for chunk in self.chunks:
                chunk.wait()
                chunk.wait_for_reader()
                for name, payload in {"param": chunk.param, **chunk.lists}.items():
                    self._pool.release(chunk.home, payload, name, keep=False)
                chunk.lists.clear()
                chunk.compute = None
            self._pool.trim()
            self._transfers.close()

    # Inside

    def _check_usable(self, tensor: ManagedTensor) -> None:
        if tensor.is_open:
            raise EngineError(
                f"parameter '{tensor.spec.name}' is open in full_parameters(); run the model after the block has ended"
            )
        if tensor.parameter.requires_grad and not tensor.spec.trainable and MASTER in self._list_names:
            raise EngineError(_unfrozen(tensor))
        if not tensor.is_placeholder:
            value = tensor.parameter.data
            if tuple(value.shape) != tensor.spec.shape:
                raise EngineError(
                    f"parameter '{tensor.spec.name}' was replaced by a tensor of shape {tuple(value.shape)}, it had "
                    f"{tensor.spec.shape}; call model.patrickstar_engine.detach() before changing the model"
                )
            tensor.parameter.data = tensor.placeholder
            self.write_value(tensor, value)

    def _keep_value(self, tensor: ManagedTensor, value: torch.Tensor) -> None:
        """Writes a value to ``master``, to the parameter's place and to a device copy."""
        chunk = tensor.chunk
        chunk.wait()
        chunk.wait_for_reader()
        if tensor.is_owned:
            if MASTER in chunk.lists:
                tensor.view(chunk.lists[MASTER]).copy_(tensor.own(value))
            if tensor.gradient is GradientPlace.PARAM:
                self.gradients.move_to_list(tensor)
            tensor.view(chunk.param).copy_(tensor.own(value))
        if self._is_alone:
            self.gradients.refresh_copy(tensor)
        elif chunk.compute is not None:
            tensor.view_copy(chunk.compute).copy_(value)

    def _reach(self, tensor: ManagedTensor, who: str) -> torch.Tensor:
        """The payload to compute with, holding this tensor's value."""
        if tensor.gradient is GradientPlace.PARAM and self._is_alone:
            self.gradients.move_to_list(tensor)
        return self.residency.reach(tensor.chunk, who)

    def _reduce(self, index: int) -> None:
        self._reducer.reduce(self.chunks[index])
        self.residency.tracer.note_reduced(index)

    def _deliver(self, tensor: ManagedTensor, average: torch.Tensor) -> None:
        """Takes an average over processes to its place at home."""
        if tensor.chunk.home is Tier.HOST:
            tensor.crossing_nbytes += average.numel() * average.dtype.itemsize
        self.gradients.add(tensor, average)


def _unfrozen(tensor: ManagedTensor) -> str:
    return (
        f"parameter '{tensor.spec.name}' was frozen when the engine was made and has no optimizer state; to train it, "
        "call model.patrickstar_engine.detach(), set requires_grad, and prepare the model again"
    )
