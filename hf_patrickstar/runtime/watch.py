"""Finds what was written to device copies of chunks without a trace.

What is written to ``parameter.data`` while a module computes with the parameter, or to a view that outlives its use, is
written to the copy of its chunk on the device, and torch says so to nobody. Such a parameter is watched: its copy is
compared with its home before the copy is used again or dropped.
"""

import torch

from hf_patrickstar.runtime.chunk import Chunk, ManagedTensor
from hf_patrickstar.runtime.fingerprint import Fingerprint
from hf_patrickstar.runtime.gradient_place import GradientPlace
from hf_patrickstar.runtime.mirrors import ValueMirrors
from hf_patrickstar.runtime.values import Values


class Watch:
    """Watches parameters whose copy on the device may be written to.

    Args:
        values: Takes what was written to every place of the value.
        mirrors: What was handed out of values, which follows.
    """

    def __init__(self, values: Values, mirrors: ValueMirrors) -> None:
        self._values = values
        self._mirrors = mirrors
        self._lock = values.lock
        self._watched: dict[ManagedTensor, Fingerprint] = {}

    def add(self, tensor: ManagedTensor) -> None:
        """Looks for what is written to a device copy without a trace: by ``.data``, or a view that outlives its use."""
        compute = tensor.chunk.compute
        if compute is not None and tensor not in self._watched:
            self._watched[tensor] = Fingerprint(self._values, tensor, tensor.view_copy(compute))

    @property
    def is_watching(self) -> bool:
        """Whether it watches anything."""
        return bool(self._watched)

    def watches(self, chunk: Chunk) -> bool:
        """Whether something may write to the copy of a chunk without a trace."""
        return bool(self._watched) and any(tensor in self._watched for tensor in chunk.tensors)

    def compare(self, tensor: ManagedTensor) -> None:
        """Takes over what was written to the copy of one parameter, if that is watched."""
        if tensor in self._watched:
            self._compare(tensor)

    def forget(self, tensor: ManagedTensor) -> None:
        """Stops watching a parameter."""
        self._watched.pop(tensor, None)

    def collect(self, chunk: Chunk | None = None) -> None:
        """Takes over what was written to device copies of watched parameters.

        Args:
            chunk: The chunk whose copy is about to be dropped; all by default.
        """
        if self._watched:
            with self._lock:
                for tensor in [t for t in self._watched if chunk is None or t.chunk is chunk]:
                    self._compare(tensor)
                    if chunk is not None:
                        self._watched.pop(tensor, None)

    def _compare(self, tensor: ManagedTensor) -> None:
        compute = tensor.chunk.compute
        if compute is not None and (tensor.gradient is not GradientPlace.PARAM or tensor.chunk.is_group):
            self._take_over(tensor, compute)
        if not tensor.chunk.is_aliased:  # else it may still be written to
            self._watched.pop(tensor, None)

    def _take_over(self, tensor: ManagedTensor, compute: torch.Tensor) -> None:
        """Takes over what was written to the copy; the view that it looks through is gone when it returns."""
        value = tensor.view_copy(compute)
        if self._watched[tensor].has_changed(value):
            self._values.write(tensor, value, voids_graphs=False)
            self._mirrors.refresh(tensor)
