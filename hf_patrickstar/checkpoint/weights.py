"""Full parameters of a live model: read from and written to chunks, in the type that the model was loaded in."""

import contextlib
from collections.abc import Iterable, Iterator

import torch

from hf_patrickstar.errors import EngineError
from hf_patrickstar.runtime.chunk import GradientPlace, ManagedTensor
from hf_patrickstar.runtime.manager import ChunkManager


class ChunkWeights:
    """Reads and writes full parameters and gradients.

    Args:
        manager: The manager of the chunks.
    """

    def __init__(self, manager: ChunkManager) -> None:
        self._manager = manager
        self._collected: dict[int, torch.Tensor] | None = None

    @property
    def needs_all(self) -> bool:
        """Whether all processes must read together now, since each has only its part."""
        return not self._manager.sharing.is_alone and self._collected is None

    @contextlib.contextmanager
    def collected(self, *, keep: bool) -> Iterator[None]:
        """Collects all parameters, so that one process may read them alone inside the block.

        All processes must enter it together; with one process nothing happens.

        Args:
            keep: Whether this process will read; the others keep nothing.
        """
        if not self.needs_all:
            yield
            return
        values = ((tensor.spec.index, self.read(tensor)) for tensor in self._manager.tensors)
        self._collected = {index: value for index, value in values if keep}
        try:
            yield
        finally:
            self._collected = None

    def read(self, tensor: ManagedTensor) -> torch.Tensor:
        """The value of a parameter.

        With several processes all must call it, for the same parameter, unless ``collected`` has all of them here.

        Args:
            tensor: The parameter.

        Returns:
            A copy on the host, in the parameter's shape and original type: the fp32 master if there is one, so that
            nothing is lost that training in 16-bit keeps.

        Raises:
            EngineError: If the parameters were collected for another process.
            CollectiveError: If another process does something else.
        """
        if self._collected is not None:
            if tensor.spec.index not in self._collected:
                raise EngineError(f"parameter '{tensor.spec.name}' was collected for another process, not for this one")
            return self._collected[tensor.spec.index]
        self._manager.take_over(tensor)
        if tensor.is_open:
            return tensor.parameter.data.to(device="cpu", dtype=tensor.original_dtype, copy=True)
        return self._manager.read_value(tensor, tensor.original_dtype)

    def write(self, tensor: ManagedTensor, value: torch.Tensor) -> None:
        """Changes the value of a parameter. A gradient that it holds is kept.

        Args:
            tensor: The parameter.
            value: The new value, in the parameter's shape; any floating type, any device.
        """
        self._manager.write_value(tensor, value)
        if tensor.is_open and tensor.parameter.data is not value:
            tensor.parameter.data.copy_(value)

    @contextlib.contextmanager
    def opened(self, tensors: Iterable[ManagedTensor], writeback: bool, with_grads: bool) -> Iterator[None]:
        """Gives parameters their full value, as ordinary tensors on the host, for the length of a block.

        Args:
            tensors: The parameters to open; those that are open already stay as they are.
            writeback: Take over what the block changed.
            with_grads: Also give them ``.grad``: the gradient of this step so far, or ``None``; in the parameter's
                original type, not unscaled and not clipped. Gradients that the block changed, set or removed are taken
                over too.

        Raises:
            EngineError: At the end, if the block gave a parameter another shape; everything else is written.
        """
        opened = [tensor for tensor in tensors if not tensor.is_open]
        gradients: dict[int, tuple[torch.Tensor, int]] = {}
        for tensor in opened:
            tensor.parameter.data = self.read(tensor)
            tensor.is_open = True
            if with_grads and self._manager.gradients.has(tensor):
                handed = self._manager.read_gradient(tensor, tensor.original_dtype)
                tensor.parameter.grad = handed
                gradients[tensor.spec.index] = (handed, handed._version)
        try:
            yield
        finally:
            reshaped = [tensor.spec.name for tensor in opened if tensor.parameter.shape != tensor.spec.shape]
            for tensor in opened:
                self._close(tensor, writeback, with_grads, gradients.get(tensor.spec.index))
            if reshaped and writeback:
                raise EngineError(
                    f"parameter '{reshaped[0]}' was given another shape inside full_parameters(), which chunks cannot "
                    "follow; call detach() before changing the model"
                )

    @torch.no_grad()
    def _close(
        self, tensor: ManagedTensor, writeback: bool, with_grads: bool, handed: tuple[torch.Tensor, int] | None
    ) -> None:
        value, gradient = tensor.parameter.data, tensor.parameter.grad
        tensor.is_open = False
        tensor.parameter.grad = None
        tensor.parameter.data = tensor.placeholder
        if not writeback or tuple(value.shape) != tensor.spec.shape:
            return
        before = self.read(tensor)
        if value.dtype != before.dtype or not torch.equal(value.cpu(), before):
            self.write(tensor, value)
        if not with_grads or (handed is not None and gradient is handed[0] and gradient._version == handed[1]):
            return
        home = self._manager.gradients.of(tensor)
        if gradient is None:
            self._manager.gradients.drop(tensor)
        elif not tensor.is_owned:
            tensor.gradient = GradientPlace.REMOTE
        elif home is None:
            self._manager.set_gradient(tensor, gradient.to(tensor.chunk.param))
        else:
            home.copy_(tensor.own(gradient))
            tensor.gradient_norm = None
