"""Full parameters of a live model: read from and written to chunks, in the type that the model was loaded in."""

import contextlib
from collections.abc import Iterable, Iterator

import torch

from hf_patrickstar.runtime.chunk import GradientPlace, ManagedTensor
from hf_patrickstar.runtime.manager import MASTER, ChunkManager


class ChunkWeights:
    """Reads and writes full parameters and gradients.

    Args:
        manager: The manager of the chunks.
    """

    def __init__(self, manager: ChunkManager) -> None:
        self._manager = manager

    def read(self, tensor: ManagedTensor) -> torch.Tensor:
        """The value of a parameter.

        Args:
            tensor: The parameter.

        Returns:
            A copy on the host, in the parameter's shape and original type: the fp32 master if there is one, so that
            nothing is lost that training in 16-bit keeps.
        """
        chunk = tensor.chunk
        chunk.wait()
        source = chunk.lists.get(MASTER, chunk.param)
        return tensor.view(source).to(device="cpu", dtype=tensor.original_dtype, copy=True)

    def write(self, tensor: ManagedTensor, value: torch.Tensor) -> None:
        """Changes the value of a parameter. A gradient that it holds is kept.

        Args:
            tensor: The parameter.
            value: The new value, in the parameter's shape; any floating type, any device.
        """
        chunk = tensor.chunk
        chunk.wait()
        if MASTER in chunk.lists:
            tensor.view(chunk.lists[MASTER]).copy_(value)
        if tensor.gradient is GradientPlace.PARAM:
            self._manager.move_gradients_to_list()
        tensor.view(chunk.param).copy_(value)
        self._manager.refresh_copy(tensor)
        self._manager.finish_step()

    @contextlib.contextmanager
    def opened(self, tensors: Iterable[ManagedTensor], writeback: bool, with_grads: bool) -> Iterator[None]:
        """Gives parameters their full value, as ordinary tensors on the host, for the length of a block.

        Args:
            tensors: The parameters to open.
            writeback: Take over what the block changed.
            with_grads: Also give them ``.grad``: the gradient of this step so far, or ``None``. fp32, not unscaled
                and not clipped. Changed gradients are written back too.
        """
        opened = list(tensors)
        for tensor in opened:
            tensor.parameter.data = self.read(tensor)
            gradient = self._manager.gradient(tensor) if with_grads else None
            if gradient is not None:
                tensor.parameter.grad = gradient.to(device="cpu", dtype=tensor.original_dtype, copy=True)
        try:
            yield
        finally:
            for tensor in opened:
                value, gradient = tensor.parameter.data, tensor.parameter.grad
                tensor.parameter.grad = None
                tensor.parameter.data = tensor.placeholder
                if writeback and not torch.equal(value, self.read(tensor)):
                    self.write(tensor, value)
                home = self._manager.gradient(tensor) if with_grads else None
                if writeback and home is not None and gradient is not None:
                    home.copy_(gradient)
                    tensor.gradient_norm = None
