"""Where the gradients of parameters are at home, and how they and the values make place for each other.

[Note: gradient reuse]
With one micro-batch per step the gradient overwrites the parameter's place at home (PatrickStar section 6.2). The
value is not lost: it is ``master`` rounded to the parameter's type. Whenever somebody needs the value while the
gradient is there (a second forward before the optimizer's step, say) the gradient moves to an accumulation list and
the value is written again. So no way of calling forward and backward can lose a gradient or compute with one.

With several processes what comes here is the average that the owner of a parameter gets. A copy on the device never
holds a gradient, so only a gather, which sends values from home, has to bring them back.
"""

import threading
from collections.abc import Callable

import torch

from hf_patrickstar.events import GradientStored, Listener, ValueRestored
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.memory.transfers import Transfers
from hf_patrickstar.runtime.attempts import Attempts
from hf_patrickstar.runtime.chunk import GRADIENT, MASTER, Chunk, GradientPlace, ManagedTensor
from hf_patrickstar.states import TensorState


class Gradients:
    """Finds places for gradients.

    Args:
        pool: Where accumulation lists come from.
        transfers: How bytes cross.
        emit: Told of every event.
        make_room: Evicts copies until so many bytes are free on the device.
        accumulate: Whether gradients go to the accumulation list at once: several micro-batches make a step.
        is_alone: Whether there is only one process.

    Attributes:
        accumulate: See above.
        records_norms: Compute the norm of a gradient when it is stored.
        attempts: Knows which gradients a repeated micro-batch must not count again.
        lock: Held while places change.
    """

    def __init__(
        self,
        pool: PayloadPool,
        transfers: Transfers,
        emit: Listener,
        make_room: Callable[[int], None],
        accumulate: bool,
        is_alone: bool,
    ) -> None:
        self.accumulate = accumulate
        self.records_norms = False
        self.attempts = Attempts()
        self.lock = threading.RLock()
        self._pool = pool
        self._transfers = transfers
        self._emit = emit
        self._make_room = make_room
        self._is_alone = is_alone

    def of(self, tensor: ManagedTensor) -> torch.Tensor | None:
        """The gradient of a parameter that is at home on this rank, in the parameter's shape, or ``None``.

        fp32 in the accumulation list, the parameter's type otherwise. It aliases the list: writing changes it.
        """
        with self.lock:
            if tensor.aside is not None:
                self.settle(tensor)
            tensor.chunk.wait()
            if tensor.gradient is GradientPlace.PARAM:
                return tensor.view(tensor.chunk.param)
            if tensor.gradient is GradientPlace.LIST:
                return tensor.view(tensor.chunk.lists[GRADIENT])
            return None

    @staticmethod
    def has(tensor: ManagedTensor) -> bool:
        """Whether a parameter has a gradient, here or on the rank where it is at home."""
        return tensor.aside is not None or tensor.gradient is not GradientPlace.NONE

    def place(self, tensor: ManagedTensor, gradient: torch.Tensor) -> None:
        """Takes a finished gradient to its place, or puts it aside while the value that is there is still needed.

        Args:
            tensor: Whose gradient it is.
            gradient: The gradient of one backward, in the parameter's shape and type.
        """
        is_needed = tensor.num_saved > 0 or tensor.users > 0
        if tensor.aside is not None:
            tensor.aside = tensor.aside + gradient.to(tensor.aside.device)
        elif tensor.is_looked_up:
            # What its uses on either device contribute is added up in the parameter's type, as autograd does.
            tensor.aside = gradient.to(tensor.chunk.param.device)
        elif is_needed and tensor.gradient is GradientPlace.NONE and not self.accumulate:
            tensor.aside = gradient
        else:
            self.add(tensor, gradient)

    def add(self, tensor: ManagedTensor, gradient: torch.Tensor) -> None:
        """Adds a gradient to what is there; an attempt that fails before it is there has not counted it."""
        before = tensor.gradient
        if before is GradientPlace.PARAM:
            self.move_to_list(tensor)
        is_needed = self._is_alone and (tensor.num_saved > 0 or tensor.users > 0)
        if self.accumulate or tensor.gradient is GradientPlace.LIST or is_needed:
            self._add_to_list(tensor, gradient)
        else:
            self._write_over_parameter(tensor, gradient)
        self.attempts.note_placed(tensor.spec.index, before)

    def settle(self, tensor: ManagedTensor) -> None:
        """Finds a place for a gradient that was put aside; if there is none it still is where it was."""
        assert tensor.aside is not None
        self.add(tensor, tensor.aside)
        tensor.aside = None

    def move_to_list(self, tensor: ManagedTensor) -> None:
        """Brings the value back to its place, keeping the gradient in the accumulation list; [Note: gradient reuse]."""
        with self.lock:
            if tensor.gradient is not GradientPlace.PARAM:
                return
            chunk = tensor.chunk
            chunk.wait()
            tensor.view(self._list(chunk)).copy_(tensor.view(chunk.param))
            tensor.gradient = GradientPlace.LIST
            tensor.gradient_norm = None
            self.restore_value(tensor)

    def bring_values_back(self, chunk: Chunk) -> None:
        """Makes a chunk at home hold values: others are about to get it."""
        for tensor in chunk.owned:
            self.move_to_list(tensor)

    def drop(self, tensor: ManagedTensor) -> None:
        """Drops the gradient of one parameter; its value is in its place again."""
        with self.lock:
            if tensor.gradient is GradientPlace.PARAM:
                self.restore_value(tensor)
            self.forget(tensor)

    def forget(self, tensor: ManagedTensor) -> None:
        """Forgets a gradient whose place holds the value again, or is about to."""
        tensor.gradient = GradientPlace.NONE
        tensor.gradient_norm = None
        tensor.aside = None
        tensor.crossing_nbytes = 0
        if tensor.state in (TensorState.HOLD_AFTER_FWD, TensorState.HOLD_AFTER_BWD):
            tensor.go(TensorState.HOLD)

    def restore_value(self, tensor: ManagedTensor) -> None:
        """Writes the parameter's place from ``master``, at home and in a device copy if there is one."""
        chunk = tensor.chunk
        chunk.wait()
        home = tensor.view(chunk.param)
        home.copy_(tensor.view(chunk.lists[MASTER]))
        if self._is_alone:
            self.refresh_copy(tensor)

    def refresh_copy(self, tensor: ManagedTensor) -> None:
        """Makes a device copy of the chunk, if there is one, follow a change of this tensor at home."""
        chunk = tensor.chunk
        if chunk.compute is not None and not chunk.is_static:
            home = tensor.view(chunk.param)
            chunk.note(self._transfers.to_device(home, tensor.view_copy(chunk.compute)))
            self._emit(ValueRestored(chunk.spec.index, tensor.spec.index, home.numel() * home.dtype.itemsize))

    def _write_over_parameter(self, tensor: ManagedTensor, gradient: torch.Tensor) -> None:
        chunk = tensor.chunk
        if self.records_norms:
            tensor.gradient_norm = gradient_norm(gradient)
        if chunk.home is Tier.DEVICE:
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
        place = tensor.view(self._list(chunk))
        if gradient.device != place.device:
            gradient = gradient.to(place.device)
        if tensor.gradient is GradientPlace.NONE:
            place.copy_(gradient)
        else:
            place.add_(gradient)
        tensor.gradient = GradientPlace.LIST
        tensor.gradient_norm = None
        self._emit(GradientStored(chunk.spec.index, tensor.spec.index, tensor.take_crossing()))

    def _list(self, chunk: Chunk) -> torch.Tensor:
        if GRADIENT not in chunk.lists:
            numel = chunk.param.numel()
            if chunk.home is Tier.DEVICE:  # nobody has planned for it: copies make room, or chunks leave the margin
                self._make_room(numel * torch.float32.itemsize)
            chunk.lists[GRADIENT] = self._pool.allocate(chunk.home, numel, torch.float32, GRADIENT)
        return chunk.lists[GRADIENT]


def gradient_norm(gradient: torch.Tensor, norm_type: float = 2.0) -> torch.Tensor:
    """The norm of one gradient in fp32, by the kernel that ``torch.nn.utils.get_total_norm`` uses on its device."""
    if gradient.device.type == "cuda":
        return torch._foreach_norm([gradient], norm_type, dtype=torch.float32)[0]
    return torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float32)
