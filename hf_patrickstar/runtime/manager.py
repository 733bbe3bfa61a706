"""The chunk manager: brings chunks to where they are computed with, and gradients to where they are needed.

[Note: where things live]
Every chunk has a home tier with all its lists. A chunk at home on the host is copied to the device to be computed
with, and keeps its host storage meanwhile. Gradients go straight to the home, tensor by tensor, as autograd finishes
them. So a device copy is never dirty: evicting one drops it and copies nothing, device -> host carries exactly the
gradients, and after the optimizer has changed a home its device copy is stale and is dropped.

[Note: gradient reuse]
With one micro-batch per step the gradient overwrites the parameter's place at home (PatrickStar section 6.2). The
value is not lost: it is ``master`` rounded to the parameter's type. Whenever somebody needs the value while the
gradient is there (a second forward before the optimizer's step, say) the gradient moves to an accumulation list and
the value is written again. So no way of calling forward and backward can lose a gradient or compute with one.
"""

import threading
from collections.abc import Callable, Iterable

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from hf_patrickstar.errors import EngineError
from hf_patrickstar.events import GradientStored, Listener, ValueRestored
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.memory.transfers import Transfers
from hf_patrickstar.runtime.attempts import Attempts
from hf_patrickstar.runtime.chunk import Chunk, GradientPlace, ManagedTensor
from hf_patrickstar.runtime.homes import Homes
from hf_patrickstar.runtime.residency import Residency
from hf_patrickstar.schedule.trace import Shapes
from hf_patrickstar.states import Stage, TensorState

MASTER = "master"
GRADIENT = "grad"


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
        residency: Brings chunks to the compute device.
        pool: Where accumulation lists come from.
        transfers: How bytes cross.
        emit: Told of every event.
        num_micro_batches: Micro-batches per step; with more than one, gradients go to the accumulation list at once.
    """

    def __init__(
        self,
        chunks: list[Chunk],
        residency: Residency,
        pool: PayloadPool,
        transfers: Transfers,
        emit: Listener,
        num_micro_batches: int,
    ) -> None:
        self.chunks = chunks
        self.residency = residency
        self.tensors: list[ManagedTensor] = sorted(
            (tensor for chunk in chunks for tensor in chunk.tensors), key=lambda tensor: tensor.spec.index
        )
        self.accumulate = num_micro_batches > 1
        self.records_norms = False
        self.borrowed: list[ManagedTensor] = []  # acquired by code outside of every forward
        self.in_backward = False
        self.step_peaks = (0, 0, 0)  # bytes in the last step: chunks on the device, all on the device, on the host
        self._num_micro_batches = num_micro_batches
        self._micro_batch = 0
        self._pool = pool
        self._transfers = transfers
        self._emit = emit
        self._generation = 0
        self.homes: Homes | None = None
        self.unwind: Callable[[], None] = lambda: None  # ends forwards that were interrupted
        self.attempts = Attempts()
        self._lock = threading.RLock()
        self._list_names = {name for chunk in chunks for name in chunk.lists}

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
            self.residency.settle()
            kind, is_last = self._kind_of_step()
            kind = f"{kind}:{name}" if name else kind
            if self.homes is not None:
                self.homes.prepare("training", shapes)
            updated = frozenset(chunk.spec.index for chunk in self.chunks if chunk.spec.trainable and is_last)
            self.residency.begin_step(kind, shapes, present, updated)

    def begin_evaluation(self, name: str, shapes: Shapes, present: Iterable[torch.Tensor]) -> None:
        """Begins a forward without gradients, between steps or inside of one; see ``begin_forward``."""
        self._forget_failed_backward()
        self.release_borrowed()
        self.residency.settle()
        if self.homes is not None:
            self.homes.prepare("", shapes)
        self.residency.begin_interlude(f"evaluation:{name}" if name else "evaluation", shapes, present)

    def _forget_failed_backward(self) -> None:
        """Drops the step whose backward raised: one that has begun and neither runs nor has ended."""
        if self.in_backward and torch._C._current_graph_task_id() == -1:
            self.in_backward = False
            self.residency.forget_step()

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
                tensor.parameter.data = tensor.view(payload)
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
            if not self.attempts.is_counted(tensor.spec.index):
                if not (is_at_home or tensor.chunk.is_static):
                    tensor.crossing_nbytes += gradient.numel() * gradient.dtype.itemsize
                self._place_gradient(tensor, gradient)
            if tensor.users == 0 and tensor.state is not TensorState.HOLD_AFTER_BWD:
                tensor.go(TensorState.HOLD_AFTER_BWD)

    def _place_gradient(self, tensor: ManagedTensor, gradient: torch.Tensor) -> None:
        is_needed = tensor.num_saved > 0 or tensor.users > 0
        if tensor.aside is not None:
            tensor.aside = tensor.aside + gradient.to(tensor.aside.device)
        elif tensor.is_looked_up:
            # What its uses on either device contribute is added up in the parameter's type, as autograd does.
            tensor.aside = gradient.to(tensor.chunk.param.device)
        elif is_needed and tensor.gradient is GradientPlace.NONE and not self.accumulate:
            tensor.aside = gradient
        else:
            self._add(tensor, gradient)

    def _add(self, tensor: ManagedTensor, gradient: torch.Tensor) -> None:
        """Adds a gradient to what is there; an attempt that fails before it is there has not counted it."""
        before = tensor.gradient
        if before is GradientPlace.PARAM:
            self._move_gradient_to_list(tensor)
        is_needed = tensor.num_saved > 0 or tensor.users > 0
        if self.accumulate or tensor.gradient is GradientPlace.LIST or is_needed:
            self._add_to_list(tensor, gradient)
        else:
            self._write_over_parameter(tensor, gradient)
        self.attempts.note_placed(tensor.spec.index, before)

    def end_backward(self) -> None:
        """Settles what backward left: gradients put aside, and tensors that got none."""
        with self._lock:
            self.in_backward = False
            self.release_borrowed()
            for tensor in self.tensors:
                if tensor.aside is not None:
                    self._settle(tensor)
                if tensor.state is TensorState.HOLD_AFTER_FWD or (
                    tensor.state is TensorState.HOLD_AFTER_BWD and tensor.gradient is GradientPlace.LIST
                ):
                    tensor.go(TensorState.HOLD)
            self._transfers.settle()
            self._micro_batch += 1
            self.residency.finish_step()

    def undo_attempt(self) -> None:
        """Takes back what a failed attempt at a micro-batch left, and begins the next; see ``Attempts``."""
        with self._lock:
            self.in_backward = False
            self._transfers.settle()
            dropped = self.attempts.undo()
            for tensor in self.tensors:
                tensor.parameter.grad = None
                tensor.aside, tensor.crossing_nbytes = None, 0
                if tensor.spec.index in dropped:
                    self.forget_gradient(tensor)

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
                self._move_gradient_to_list(tensor)
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

    def gradient(self, tensor: ManagedTensor) -> torch.Tensor | None:
        """The gradient of a parameter, at home, in the parameter's shape, or ``None``.

        fp32 in the accumulation list, the parameter's type otherwise. It aliases the list: writing changes it.
        """
        with self._lock:
            if tensor.aside is not None:
                self._settle(tensor)
            tensor.chunk.wait()
            if tensor.gradient is GradientPlace.PARAM:
                return tensor.view(tensor.chunk.param)
            if tensor.gradient is GradientPlace.LIST:
                return tensor.view(tensor.chunk.lists[GRADIENT])
            return None

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
        if gradient is not None and tensor.spec.trainable:
            tensor.parameter.grad = None
            self.store_gradient(tensor, gradient.to(tensor.chunk.param.dtype))

    def write_value(self, tensor: ManagedTensor, value: torch.Tensor) -> None:
        """Changes the value of a parameter, in every place where it is; a gradient that it holds is kept.

        Args:
            tensor: The parameter.
            value: The new value, in the parameter's shape; any floating type, any device.
        """
        with self._lock:
            self._keep_value(tensor, value)
            self._generation += 1

    def forget_gradient(self, tensor: ManagedTensor) -> None:
        """Drops the gradient of one parameter; its value is in its place again."""
        with self._lock:
            if tensor.gradient is GradientPlace.PARAM:
                self.restore_value(tensor)
            self._forget_gradient(tensor)

    def discard_gradients(self) -> None:
        """Drops all gradients; parameters that were overwritten get their value back from ``master``."""
        with self._lock:
            self._forget_failed_backward()
            self.release_borrowed()
            self.residency.settle()
            if self.residency.tracer.step is None:
                self._micro_batch = 0
            for tensor in self.tensors:
                self.forget_gradient(tensor)

    def move_gradient_to_list(self, tensor: ManagedTensor) -> None:
        """Brings the parameter's value back to its place, keeping its gradient in the accumulation list, in fp32."""
        with self._lock:
            if tensor.gradient is GradientPlace.PARAM:
                self._move_gradient_to_list(tensor)

    # What the optimizer and the checkpoints do at the chunk's home

    def restore_value(self, tensor: ManagedTensor) -> None:
        """Writes the parameter's place from ``master``, at home and in a device copy if there is one."""
        chunk = tensor.chunk
        chunk.wait()
        home = tensor.view(chunk.param)
        home.copy_(tensor.view(chunk.lists[MASTER]))
        self.refresh_copy(tensor)

    def refresh_copy(self, tensor: ManagedTensor) -> None:
        """Makes a device copy of the chunk, if there is one, follow a change of this tensor at home."""
        chunk = tensor.chunk
        if chunk.compute is not None and not chunk.is_static:
            home = tensor.view(chunk.param)
            chunk.note(self._transfers.to_device(home, tensor.view(chunk.compute)))
            self._emit(ValueRestored(chunk.spec.index, tensor.spec.index, home.numel() * home.dtype.itemsize))

    def begin_update(self) -> None:
        """Begins the optimizer's step: copies of what it will change are dropped, which makes room for its work."""
        self.unwind()
        with self._lock:
            for chunk in self.chunks:
                if chunk.spec.trainable:
                    self.residency.drop(chunk)
            self.residency.begin_update()

    def finish_update(self, chunk: Chunk) -> None:
        """Ends the optimizer's work on a chunk: no gradients, new values at home."""
        with self._lock:
            for tensor in chunk.tensors:
                self._forget_gradient(tensor)

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
        self.residency.forget_step()
        if self.homes is not None:
            self.homes.update(num_micro_batches)
        for tensor in self.tensors:
            tensor.lookup_nbytes = 0

    def close(self) -> None:
        """Gives every payload back. Parameters must have their own storage again by then."""
        with self._lock:
            self._transfers.settle()
            self.residency.close()
            for chunk in self.chunks:
                chunk.wait()
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
        if MASTER in chunk.lists:
            tensor.view(chunk.lists[MASTER]).copy_(value)
        if tensor.gradient is GradientPlace.PARAM:
            self._move_gradient_to_list(tensor)
        tensor.view(chunk.param).copy_(value)
        self.refresh_copy(tensor)

    def _reach(self, tensor: ManagedTensor, who: str) -> torch.Tensor:
        """The payload to compute with, holding this tensor's value."""
        if tensor.gradient is GradientPlace.PARAM:
            self._move_gradient_to_list(tensor)
        return self.residency.reach(tensor.chunk, who)

    def _settle(self, tensor: ManagedTensor) -> None:
        """Finds a place for a gradient that was put aside; if there is none it still is where it was."""
        assert tensor.aside is not None
        self._add(tensor, tensor.aside)
        tensor.aside = None

    def _write_over_parameter(self, tensor: ManagedTensor, gradient: torch.Tensor) -> None:
        chunk = tensor.chunk
        if self.records_norms:
            tensor.gradient_norm = gradient_norm(gradient)
        if chunk.is_static:
            tensor.view(chunk.param).copy_(gradient)
        else:
            if gradient.device.type == "cpu" or not chunk.param.is_pinned():
                chunk.wait()  # the host writes to the home, which a copy may be reading
            chunk.note(self._transfers.to_host(gradient, tensor.view(chunk.param)))
        tensor.gradient = GradientPlace.PARAM
        self._emit(GradientStored(chunk.spec.index, tensor.spec.index, tensor.take_crossing()))

    def _add_to_list(self, tensor: ManagedTensor, gradient: torch.Tensor) -> None:
        chunk = tensor.chunk
        chunk.wait()
        place = tensor.view(self._gradient_list(chunk))
        if gradient.device != place.device:
            gradient = gradient.to(place.device)
        if tensor.gradient is GradientPlace.NONE:
            place.copy_(gradient)
        else:
            place.add_(gradient)
        tensor.gradient = GradientPlace.LIST
        tensor.gradient_norm = None
        self._emit(GradientStored(chunk.spec.index, tensor.spec.index, tensor.take_crossing()))

    def _move_gradient_to_list(self, tensor: ManagedTensor) -> None:
        """See [Note: gradient reuse]."""
        chunk = tensor.chunk
        chunk.wait()
        tensor.view(self._gradient_list(chunk)).copy_(tensor.view(chunk.param))
        tensor.gradient = GradientPlace.LIST
        tensor.gradient_norm = None
        self.restore_value(tensor)

    def _gradient_list(self, chunk: Chunk) -> torch.Tensor:
        if GRADIENT not in chunk.lists:
            numel = chunk.param.numel()
            if chunk.is_static:  # nobody has planned for it: copies make room, or chunks leave the margin
                self.residency.make_room(numel * torch.float32.itemsize)
            chunk.lists[GRADIENT] = self._pool.allocate(chunk.home, numel, torch.float32, GRADIENT)
        return chunk.lists[GRADIENT]

    @staticmethod
    def _forget_gradient(tensor: ManagedTensor) -> None:
        tensor.gradient = GradientPlace.NONE
        tensor.gradient_norm = None
        tensor.aside = None
        tensor.crossing_nbytes = 0
        if tensor.state in (TensorState.HOLD_AFTER_FWD, TensorState.HOLD_AFTER_BWD):
            tensor.go(TensorState.HOLD)


def gradient_norm(gradient: torch.Tensor, norm_type: float = 2.0) -> torch.Tensor:
    """The norm of one gradient in fp32, by the kernel that ``torch.nn.utils.get_total_norm`` uses on its device."""
    if gradient.device.type == "cuda":
        return torch._foreach_norm([gradient], norm_type, dtype=torch.float32)[0]
    return torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float32)


def _unfrozen(tensor: ManagedTensor) -> str:
    return (
        f"parameter '{tensor.spec.name}' was frozen when the engine was made and has no optimizer state; to train it, "
        "call model.patrickstar_engine.detach(), set requires_grad, and prepare the model again"
    )
