"""Embeddings that are looked up where their weight is at home: only rows cross the bus (PatrickStar section 8.2)."""

import torch

from hf_patrickstar.runtime.chunk import GradientPlace, ManagedTensor
from hf_patrickstar.runtime.frames import Lookup
from hf_patrickstar.runtime.manager import ChunkManager


class CpuEmbeddings:
    """Begins and ends lookups.

    Args:
        manager: The manager of the chunks.
    """

    def __init__(self, manager: ChunkManager) -> None:
        self._manager = manager

    def begin(self, tensor: ManagedTensor) -> Lookup:
        """Begins to look rows of a parameter up, whose chunk is at home on the host."""
        manager = self._manager
        with manager.gradients.lock:
            if tensor.users == 0:
                manager.parameters.check_usable(tensor)
                manager.writes.take_over(tensor)
            tensor.read_at = tensor.num_writes
            if tensor.gradient is GradientPlace.PARAM:
                manager.gradients.move_to_list(tensor)
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
            self._manager.writes.apply(tensor, leaf.detach(), voids_graphs=False)
