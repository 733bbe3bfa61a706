"""Allocates chunks and makes managed parameters according to the decisions, and computes the bytes of chunks."""

from collections.abc import Iterable, Sequence

import torch

from hf_patrickstar.decisions import Decisions, chunk_bytes, lists_of, widened_by
from hf_patrickstar.errors import PatrickStarError
from hf_patrickstar.layout.packing import ChunkSpec
from hf_patrickstar.layout.specs import TensorSpec
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.optim.kernel import Kernel
from hf_patrickstar.resources import Resources
from hf_patrickstar.runtime.chunk import Chunk, ManagedTensor, torch_dtype
from hf_patrickstar.schedule.placement import ChunkBytes


class Payloads:
    """Allocates the payloads of chunks, and the workspace of kernels.

    Args:
        resources: What the engine runs on.
        decisions: The decisions for the model.
        kernels: The kernels that update chunks, one for each optimizer; the list may grow.
    """

    def __init__(self, resources: Resources, decisions: Decisions, kernels: Sequence[Kernel]) -> None:
        self._device = resources.device
        self._pool = resources.pool
        self._rank = resources.collectives.rank
        self._decisions = decisions
        self._kernels = kernels

    def allocate(self) -> list[Chunk]:
        """Allocates every payload at its home, and gives every parameter its place in a chunk; no value is moved yet.

        Raises:
            BudgetError: If a payload does not fit; all payloads are freed.
        """
        decisions = self._decisions
        chunks: list[Chunk] = []
        try:
            for spec in decisions.choice.layout.chunks:
                home = Tier.DEVICE if spec.index in decisions.homes.device_homed else Tier.HOST
                chunks.append(self.make_chunk(spec, home))
            self.reserve(chunks)
        except PatrickStarError:
            chunks.clear()
            raise
        placements = decisions.choice.layout.placements
        lookup = "home" if decisions.embeddings.is_final else "auto"
        for chunk in chunks:
            for index in chunk.spec.tensor_indices:
                offset = placements[index].offset_numel
                tensor = self.make_tensor(decisions.tensors[index], decisions.parameters[index], offset)
                if index in decisions.embeddings.tensor_indices:
                    tensor.lookup = lookup
                chunk.add(tensor)
        return chunks

    def make_chunk(self, spec: ChunkSpec, home: Tier) -> Chunk:
        """Allocates the payloads of one chunk.

        Args:
            spec: The chunk's spec.
            home: The tier of its home.

        Raises:
            BudgetError: If there is no room.
        """
        chunk = Chunk(spec, home, self._rank)
        moves = home is Tier.HOST and not spec.on_host
        dtype = torch_dtype(spec.types.param)
        chunk.param = self._pool.allocate(home, spec.chunk_numel, dtype, "param", pinned=moves, zero=True)
        try:
            for name in lists_of(spec, self._decisions.lists):
                chunk.lists[name] = self._pool.allocate(home, spec.chunk_numel, chunk.state_dtype, name, zero=True)
        except PatrickStarError:
            chunk.give_back(self._pool)
            raise
        return chunk

    def make_tensor(self, spec: TensorSpec, parameter: torch.nn.Parameter, offset_numel: int) -> ManagedTensor:
        """Makes a managed parameter; it is in no chunk yet.

        Args:
            spec: The parameter's spec.
            parameter: The parameter.
            offset_numel: Its offset in its chunk.
        """
        # Each parameter has its own placeholder, since libraries take parameters with one storage for tied ones.
        nan = torch.full((), float("nan"), dtype=torch_dtype(spec.types.param), device=self._device)
        return ManagedTensor(spec, parameter, offset_numel, nan.expand(spec.shape))

    def nbytes_of(self, specs: Iterable[ChunkSpec]) -> list[ChunkBytes]:
        """The bytes of chunks over all lists."""
        decisions = self._decisions
        return chunk_bytes(specs, decisions.lists, self._pool, decisions.embeddings)

    def reserve(self, chunks: Sequence[Chunk], *also: Tier) -> None:
        """Lets the kernels allocate their workspace, if they have to widen gradients.

        Args:
            chunks: All chunks.
            *also: More tiers that chunks may move to.

        Raises:
            BudgetError: If there is no room.
        """
        for number, kernel in enumerate(self._kernels if self._decisions.widens_gradients else ()):
            kernel.reserve([chunk for chunk in chunks if widened_by(chunk.spec, number)], *also)

    def reserve_anew(self, chunks: Sequence[Chunk]) -> None:
        """Frees the workspace of the kernels, and allocates it again for these chunks; see ``reserve``."""
        for chunk in chunks:
            chunk.wait_for_update()  # which uses the workspace
        for kernel in self._kernels:
            kernel.release()
        self.reserve(chunks)

    @property
    def splits_tensors(self) -> bool:
        """Whether a parameter may be spread over processes."""
        return all(kernel.splits_tensors for kernel in self._kernels)
