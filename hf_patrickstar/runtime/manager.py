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

import math
import threading
from collections.abc import Iterable

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from hf_patrickstar.errors import BudgetError, EngineError
from hf_patrickstar.events import ChunkEvicted, ChunkInvalidated, ChunkLoaded, GradientStored, Listener, ValueRestored
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.memory.transfers import Transfers
from hf_patrickstar.runtime.chunk import Chunk, GradientPlace, ManagedTensor
from hf_patrickstar.runtime.tracer import Tracer
from hf_patrickstar.schedule.eviction import Chooser
from hf_patrickstar.states import Stage, TensorState
from hf_patrickstar.units import format_need

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
    """Moves chunks and gradients.

    Args:
        chunks: All chunks, with their payloads allocated.
        pool: Where device copies come from.
        transfers: How bytes cross.
        chooser: Chooses which chunk leaves a full device.
        emit: Told of every event.
        accumulate: Whether gradients go to the accumulation list from the start (more than one micro-batch per step).
        evict_all: Evict all that can be evicted at every access and poison it (debugging).
    """

    def __init__(
        self,
        chunks: list[Chunk],
        pool: PayloadPool,
        transfers: Transfers,
        chooser: Chooser,
        emit: Listener,
        accumulate: bool,
        evict_all: bool,
    ) -> None:
        self.chunks = chunks
        self.tensors: list[ManagedTensor] = sorted(
            (tensor for chunk in chunks for tensor in chunk.tensors), key=lambda tensor: tensor.spec.index
        )
        self.accumulate = accumulate
        self.records_norms = False
        self.borrowed: list[ManagedTensor] = []  # acquired by code outside of every forward
        self._pool = pool
        self._transfers = transfers
        self._chooser = chooser
        self._emit = emit
        self._evict_all = evict_all
        self._num_copies = 0
        self._tick = 0
        self._generation = 0
        self.tracer = Tracer(
            0 if chunk.is_static else chunk.param.numel() * chunk.param.dtype.itemsize for chunk in chunks
        )
        self._by_storage: dict[int, Chunk] = {}
        self._lock = threading.RLock()
        self._list_names = {name for chunk in chunks for name in chunk.lists}
        for chunk in chunks:
            if chunk.is_static:
                self._by_storage[chunk.set_compute(chunk.param)] = chunk

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
                tensor.go(TensorState.COMPUTE)
                tensor.chunk.num_computing += 1
                tensor.parameter.data = tensor.view(payload)
                tensor.version = tensor.parameter._version
            tensor.users += 1
        return None

    def release(self, tensor: ManagedTensor, stage: Stage) -> None:
        """Ends one acquisition; after the last, the parameter is a placeholder again."""
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

    def release_borrowed(self) -> None:
        """Takes back parameters that were read outside of every forward."""
        with self._lock:
            while self.borrowed:
                self.release(self.borrowed.pop(), Stage.FORWARD)

    def pack(self, view: torch.Tensor) -> "torch.Tensor | SavedView":
        """Replaces an operand that autograd wants to keep by its address, if it lives in a chunk."""
        chunk = self._by_storage.get(view.untyped_storage()._cdata)
        if chunk is None or view.dtype is not chunk.param.dtype:
            return view
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

    def store_gradient(self, tensor: ManagedTensor, gradient: torch.Tensor) -> None:
        """Takes a finished gradient to its place.

        Args:
            tensor: Whose gradient it is.
            gradient: The gradient of one backward, in the parameter's shape and type.
        """
        with self._lock:
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            if not tensor.spec.trainable:
                raise EngineError(_unfrozen(tensor))
            busy = tensor.num_saved > 0 or tensor.users > 0
            if tensor.gradient is GradientPlace.ASIDE:
                assert tensor.aside is not None
                tensor.aside = tensor.aside + gradient
            elif tensor.gradient is GradientPlace.LIST or self.accumulate:
                self._add_to_list(tensor, gradient)
            elif tensor.gradient is GradientPlace.PARAM:
                self._move_gradient_to_list(tensor)
                self._add_to_list(tensor, gradient)
            elif busy:
                tensor.aside, tensor.gradient = gradient, GradientPlace.ASIDE
            else:
                self._write_over_parameter(tensor, gradient)
            if tensor.users == 0 and tensor.state is not TensorState.HOLD_AFTER_BWD:
                tensor.go(TensorState.HOLD_AFTER_BWD)

    def end_backward(self) -> None:
        """Settles what backward left: gradients put aside, and tensors that got none."""
        with self._lock:
            self.release_borrowed()
            for tensor in self.tensors:
                if tensor.gradient is GradientPlace.ASIDE:
                    self._settle(tensor)
                if tensor.state is TensorState.HOLD_AFTER_FWD or (
                    tensor.state is TensorState.HOLD_AFTER_BWD and tensor.gradient is GradientPlace.LIST
                ):
                    tensor.go(TensorState.HOLD)
            self._transfers.settle()
            self.tracer.finish()

    def gradient(self, tensor: ManagedTensor) -> torch.Tensor | None:
        """The gradient of a parameter, at home, in the parameter's shape, or ``None``.

        fp32 in the accumulation list, the parameter's type otherwise. It aliases the list: writing changes it.
        """
        with self._lock:
            if tensor.gradient is GradientPlace.ASIDE:
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
            self.release_borrowed()
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

    def finish_update(self, chunk: Chunk) -> None:
        """Ends the optimizer's work on a chunk: no gradients, new values at home, no stale device copy."""
        with self._lock:
            for tensor in chunk.tensors:
                self._forget_gradient(tensor)
            if chunk.compute is not None and not chunk.is_static:
                self._drop(chunk)
                nbytes = chunk.param.numel() * chunk.param.dtype.itemsize
                self._emit(ChunkInvalidated(chunk.spec.index, nbytes))

    @property
    def dtype(self) -> torch.dtype:
        """Type of the ``param`` list."""
        return self.chunks[0].param.dtype if self.chunks else torch.float32

    @property
    def version(self) -> int:
        """Counts the changes of values; a graph built at an earlier version is void."""
        return self._generation

    def finish_step(self) -> None:
        """Tells that the values changed."""
        self._generation += 1
        self.tracer.forget()

    def close(self) -> None:
        """Gives every payload back. Parameters must have their own storage again by then."""
        with self._lock:
            self._transfers.settle()
            for chunk in self.chunks:
                chunk.wait()
                if chunk.compute is not None and not chunk.is_static:
                    self._drop(chunk)
                for name, payload in {"param": chunk.param, **chunk.lists}.items():
                    self._pool.release(chunk.home, payload, name, keep=False)
                chunk.lists.clear()
                chunk.compute = None
            self._by_storage.clear()
            self._pool.trim()

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
        chunk = tensor.chunk
        self._tick += 1
        chunk.last_access = self._tick
        if tensor.gradient is GradientPlace.PARAM:
            self._move_gradient_to_list(tensor)
        if self._chooser.needs_trace and not chunk.is_static:
            self.tracer.visit(chunk.spec.index, lambda: self._in_use(exclude=chunk))
        if self._evict_all:
            for other in list(self._evictable(exclude=chunk)):
                assert other.compute is not None
                other.compute.fill_(float("nan"))
                self._evict(other)
        if chunk.compute is None:
            self._load(chunk, who)
        elif self._num_copies and self._pool.room(Tier.DEVICE) < 0:
            self._make_room(0, chunk, who)
        assert chunk.compute is not None
        return chunk.compute

    def _load(self, chunk: Chunk, who: str) -> None:
        numel, dtype = chunk.param.numel(), chunk.param.dtype
        nbytes = numel * dtype.itemsize
        self._make_room(nbytes, chunk, who)
        payload = self._pool.allocate(Tier.DEVICE, numel, dtype, "param")
        self._num_copies += 1
        chunk.note(self._transfers.to_device(chunk.param, payload))
        self._by_storage[chunk.set_compute(payload)] = chunk
        self._emit(ChunkLoaded(chunk.spec.index, nbytes))

    def _make_room(self, nbytes: int, chunk: Chunk, who: str) -> None:
        while self._pool.room(Tier.DEVICE) < nbytes:
            evictable = {other.spec.index: other for other in self._evictable(exclude=chunk)}
            if evictable:
                candidates = [(index, other.last_access) for index, other in evictable.items()]
                victim = self._chooser.choose(candidates, self.tracer.cursor, self.tracer.is_lost)
                self._evict(evictable[victim])
                continue
            if nbytes == 0:
                return
            ledger = self._pool.ledger
            missing = nbytes - self._pool.room(Tier.DEVICE)
            pinned = [other.spec.index for other in self.chunks if other.compute is not None and not other.is_static]
            names = ", ".join(
                sorted({tensor.spec.name for other in self.chunks for tensor in other.tensors if tensor.users})
            )
            raise BudgetError(
                f"device_budget is too small for {who}: chunk {chunk.spec.index} needs {format_need(nbytes)}, "
                f"{format_need(max(self._pool.room(Tier.DEVICE), 0))} are free, and none of the chunks there "
                f"({pinned}) can leave, because they are in use (computing with: {names or 'none'}; a recomputed "
                "segment keeps all of its parameters). Raise device_budget to at least "
                f"{ledger.budget(Tier.DEVICE) + math.ceil(missing / ledger.usable(Tier.DEVICE))} bytes, or lower "
                f"chunk_numel.\n{ledger.table()}"
            )

    def _evictable(self, exclude: Chunk) -> Iterable[Chunk]:
        for chunk in self.chunks:
            if chunk.compute is None or chunk.is_static or chunk is exclude or chunk.num_computing:
                continue
            if not chunk.is_aliased:
                yield chunk

    def _in_use(self, exclude: Chunk) -> Iterable[int]:
        """Indices of the chunks on the device that cannot leave now."""
        for chunk in self.chunks:
            if chunk.compute is None or chunk.is_static or chunk is exclude:
                continue
            if chunk.num_computing or chunk.is_aliased:
                yield chunk.spec.index

    def _evict(self, chunk: Chunk) -> None:
        self._drop(chunk)
        self._emit(ChunkEvicted(chunk.spec.index, chunk.param.numel() * chunk.param.dtype.itemsize))

    def _drop(self, chunk: Chunk) -> None:
        aliased = chunk.is_aliased
        self._num_copies -= 1
        payload, key = chunk.clear_compute()
        del self._by_storage[key]
        self._pool.release(Tier.DEVICE, payload, "param", keep=not aliased)

    def _settle(self, tensor: ManagedTensor) -> None:
        """Finds a place for a gradient that was put aside."""
        gradient = tensor.aside
        assert gradient is not None
        if self.accumulate or tensor.num_saved or tensor.users:
            self._gradient_list(tensor.chunk)  # may not fit: then the gradient is still where it was
            tensor.gradient = GradientPlace.NONE
            self._add_to_list(tensor, gradient)
        else:
            self._write_over_parameter(tensor, gradient)
        tensor.aside = None

    def _write_over_parameter(self, tensor: ManagedTensor, gradient: torch.Tensor) -> None:
        chunk = tensor.chunk
        if self.records_norms:
            tensor.gradient_norm = gradient_norm(gradient)
        if chunk.is_static:
            tensor.view(chunk.param).copy_(gradient)
        else:
            chunk.note(self._transfers.to_host(gradient, tensor.view(chunk.param)))
        tensor.gradient = GradientPlace.PARAM
        self._emit(GradientStored(chunk.spec.index, tensor.spec.index, self._crossing_nbytes(chunk, gradient)))

    def _add_to_list(self, tensor: ManagedTensor, gradient: torch.Tensor) -> None:
        chunk = tensor.chunk
        chunk.wait()
        crossing = self._crossing_nbytes(chunk, gradient)
        place = tensor.view(self._gradient_list(chunk))
        if gradient.device != place.device:
            gradient = gradient.to(place.device)
        if tensor.gradient is GradientPlace.NONE:
            place.copy_(gradient)
        else:
            place.add_(gradient)
        tensor.gradient = GradientPlace.LIST
        tensor.gradient_norm = None
        self._emit(GradientStored(chunk.spec.index, tensor.spec.index, crossing))

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
            chunk.lists[GRADIENT] = self._pool.allocate(chunk.home, chunk.param.numel(), torch.float32, GRADIENT)
        return chunk.lists[GRADIENT]

    @staticmethod
    def _crossing_nbytes(chunk: Chunk, gradient: torch.Tensor) -> int:
        return 0 if chunk.is_static else gradient.numel() * gradient.dtype.itemsize

    @staticmethod
    def _forget_gradient(tensor: ManagedTensor) -> None:
        tensor.gradient = GradientPlace.NONE
        tensor.gradient_norm = None
        tensor.aside = None
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
