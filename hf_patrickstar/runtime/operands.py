"""Operands of backward that live in chunks: autograd keeps their address, not their value."""

from collections.abc import Sequence

import torch

from hf_patrickstar.errors import EngineError
from hf_patrickstar.runtime.autograd import KeptOperand
from hf_patrickstar.runtime.chunk import Epoch, ManagedTensor
from hf_patrickstar.runtime.copies import Copies
from hf_patrickstar.runtime.live_parameter import RAW, LiveMixin, storage_key
from hf_patrickstar.runtime.parameters import Parameters
from hf_patrickstar.runtime.steps import Steps


class SavedView(KeptOperand):
    """The address of a view of a parameter.

    After ``parameter.data = x`` an earlier graph that kept a view uses the old value, and one that kept the parameter
    itself uses ``x``, as in torch.
    """

    __slots__ = ("epoch", "num_updates", "num_writes", "offset", "size", "stride", "tensor")

    def __init__(
        self, tensor: ManagedTensor, size: Sequence[int], stride: Sequence[int], offset: int, num_updates: int
    ) -> None:
        self.tensor = tensor
        self.size = size
        self.stride = stride
        self.offset = offset
        self.epoch: Epoch | None = tensor.epoch
        self.num_writes = tensor.num_writes
        self.num_updates = num_updates
        tensor.num_saved += 1

    def __del__(self) -> None:
        self.tensor.num_saved -= 1


class Operands:
    """Replaces operands that autograd keeps, and brings them back in backward.

    Args:
        parameters: Finds parameters, and brings their chunks to the device.
        copies: Finds the chunk that a storage belongs to.
        steps: Counts updates.
    """

    def __init__(self, parameters: Parameters, copies: Copies, steps: Steps) -> None:
        self._parameters = parameters
        self._copies = copies
        self._steps = steps

    def pack(self, view: torch.Tensor) -> torch.Tensor | SavedView:
        """Replaces an operand by its address, if it lives in a chunk."""
        if isinstance(view, LiveMixin):
            return self._pack_parameter(view)
        chunk = self._copies.find(storage_key(view))
        if chunk is None or view.dtype is not chunk.dtype:
            # An operator that saves its own output would make a reference cycle that nothing collects.
            return view.detach() if view.requires_grad else view
        offset = int(view.storage_offset())
        return SavedView(chunk.tensor_at(offset), view.size(), view.stride(), offset, self._steps.num_updates)

    def _pack_parameter(self, parameter: torch.Tensor) -> torch.Tensor | SavedView:
        tensor = self._parameters.find(parameter)
        if tensor is not None:
            storage = tensor.chunk.storage
            is_there = storage is not None and storage_key(parameter) == storage._cdata
            if is_there or not tensor.is_materialized:  # ``ctx.save_for_backward(parameter)`` of a released one
                saved = SavedView(
                    tensor, tensor.spec.shape, tensor.strides, tensor.offset_numel, self._steps.num_updates
                )
                saved.epoch = None
                return saved
        with RAW():
            return self.pack(parameter.detach())

    def unpack(self, saved: torch.Tensor | SavedView) -> torch.Tensor:
        """Brings back an operand of backward.

        The result aliases the chunk, and while it is alive the chunk cannot be evicted.

        Raises:
            EngineError: If the parameter was changed since forward.
        """
        if not isinstance(saved, SavedView):
            return saved
        tensor = saved.tensor
        if saved.epoch is not None and saved.epoch.value is not None:  # parameter.data was assigned since
            return saved.epoch.value.as_strided(saved.size, saved.stride, saved.offset - tensor.offset_numel)
        if saved.num_writes != tensor.num_writes:
            by_whom = "in place" if saved.num_updates == self._steps.num_updates else "by the optimizer"
            raise EngineError(
                f"parameter '{tensor.spec.name}' was changed {by_whom} between this forward and its backward; call "
                "backward before the change"
            )
        payload = self._parameters.find_at_rest(tensor)
        if payload is None:
            payload = self._parameters.ensure_on_device(tensor, f"the backward of a use of '{tensor.spec.name}'")
        view = payload.as_strided(saved.size, saved.stride, saved.offset)
        # With create_graph autograd keeps the operands of this backward, without saved-tensors hooks: give it a copy.
        return view.clone() if torch.is_grad_enabled() else view
