"""Embeddings that are looked up where their weight is at home: only rows cross the bus (PatrickStar section 8.2)."""

import torch

from hf_patrickstar.runtime.chunk import ManagedTensor
from hf_patrickstar.runtime.frames import Lookup
from hf_patrickstar.runtime.gradient_place import GradientPlace
from hf_patrickstar.runtime.gradients import Gradients
from hf_patrickstar.runtime.parameters import Parameters
from hf_patrickstar.runtime.writes import Writes


class CpuEmbeddings:
    """Begins and ends lookups.

    Args:
        parameters: Tells whether a parameter may be used.
        gradients: Makes way for a value that is needed while a gradient is in its place.
        writes: Takes over what users wrote to a parameter, and what an embedding writes.
    """

    def __init__(self, parameters: Parameters, gradients: Gradients, writes: Writes) -> None:
        self._parameters = parameters
        self._gradients = gradients
        self._writes = writes

    def begin(self, tensor: ManagedTensor) -> Lookup:
        """Begins to look rows of a parameter up, whose chunk is at home on the host."""
        with self._gradients.lock:
            if tensor.users == 0:
                self._parameters.check_usable(tensor)
                self._writes.take_over(tensor)
            tensor.read_at = tensor.num_writes
            if tensor.gradient is GradientPlace.PARAM:
                self._gradients.move_to_list(tensor)
            tensor.chunk.wait()
            tensor.is_looked_up = True
            leaf = tensor.view(tensor.chunk.param).detach()
            leaf.requires_grad_(tensor.spec.trainable and torch.is_grad_enabled())
            return Lookup(tensor, leaf, leaf._version)

    def end(self, lookup: Lookup, nbytes: int) -> None:
        """Ends a lookup of so many bytes; an embedding with ``max_norm`` writes to the rows that it reads."""
        tensor, leaf, version = lookup
        tensor.lookup_nbytes += nbytes
        if leaf._version != version:
            self._writes.apply(tensor, leaf.detach(), voids_graphs=False)
