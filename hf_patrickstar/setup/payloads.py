"""Allocates chunks and makes managed parameters according to the decisions, and computes the bytes of chunks."""

from collections.abc import Iterable, Sequence

import torch

from hf_patrickstar.errors import PatrickStarError
from hf_patrickstar.layout.packing import ChunkSpec
from hf_patrickstar.layout.specs import GRADIENT, MASTER, TensorSpec
from hf_patrickstar.memory.operators import unseen
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import Chunk, torch_dtype
from hf_patrickstar.runtime.parameter import ManagedParameter
from hf_patrickstar.schedule.placement import ChunkBytes
from hf_patrickstar.setup.decisions import Decisions
from hf_patrickstar.setup.homes import chunk_bytes, lists_of


class Payloads:
    """Allocates the payloads of chunks, and the workspace of kernels.

    Args:
        decisions: The decisions for the model.
    """

    def __init__(self, decisions: Decisions) -> None:
        resources = decisions.situation.resources
        self._device = resources.device
        self._pool = resources.pool
        self._rank = resources.collectives.rank
        self._decisions = decisions
        self._kernels = decisions.situation.kernels

    @unseen()
    def allocate(self) -> list[Chunk]:
        """Allocates every payload at its home, and gives every parameter its place in a chunk; no value is moved yet.

        Raises:
            BudgetError: If a payload does not fit; all payloads are freed.
        """
        decisions = self._decisions
        chunks: list[Chunk] = []
        on_disk = [spec for spec in decisions.choice.layout.chunks if spec.index in decisions.homes.disk]
        if self._pool.disk is not None and on_disk:
            names = ((spec, name) for spec in on_disk for name in lists_of(spec, decisions.lists) if name != GRADIENT)
            self._pool.disk.reserve(spec.types.list_nbytes(name, spec.chunk_numel) for spec, name in names)
        try:
            for spec in decisions.choice.layout.chunks:
                home = Tier.DEVICE if spec.index in decisions.homes.device else Tier.HOST
                chunks.append(self.make_chunk(spec, home, locks_later=True))
            self.reserve(chunks)
        except PatrickStarError:
            while chunks:
                chunks.pop().give_back(self._pool)
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

    def make_chunk(self, spec: ChunkSpec, home: Tier, *, locks_later: bool = False) -> Chunk:
        """Allocates the payloads of one chunk.

        Args:
            spec: The chunk's spec.
            home: The tier of its home.
            locks_later: See ``PayloadPool.allocate``.

        Raises:
            BudgetError: If there is no room.
        """
        chunk, allocate = Chunk(spec, home, self._rank), self._pool.allocate
        numel, moves = spec.chunk_numel, home is Tier.HOST and not spec.on_host
        kind, setting = torch_dtype(spec.types.param), self._decisions.situation.config.updates
        states = Tier.DISK if home is Tier.HOST and spec.index in self._decisions.homes.disk else home
        chunk.is_streamed = setting == "device" and moves and spec.is_updated
        chunk.is_streamed = chunk.is_streamed and self._kernels[spec.optimizer_index].can_stream
        chunk.param = allocate(home, numel, kind, "param", pinned=moves, zero=True, locks_later=locks_later)
        try:
            for name in lists_of(spec, self._decisions.lists):
                dtype, block_numel = spec.types.of_list(name)
                lists = chunk.lists if name == MASTER else chunk.lists.fresh
                shape = -(-numel // block_numel), torch_dtype(dtype)
                tier = home if name == GRADIENT else states
                lists[name] = allocate(tier, *shape, name, pinned=chunk.is_streamed, zero=True, locks_later=locks_later)
            chunk.note_regions(self._pool.disk)
        except PatrickStarError:
            chunk.give_back(self._pool)
            raise
        return chunk

    def make_tensor(self, spec: TensorSpec, parameter: torch.nn.Parameter, offset_numel: int) -> ManagedParameter:
        """Makes a managed parameter; it is in no chunk yet.

        Args:
            spec: The parameter's spec.
            parameter: The parameter.
            offset_numel: Its offset in its chunk.
        """
        # Each parameter has its own placeholder, since libraries take parameters with one storage for tied ones.
        dtype = torch_dtype(spec.types.param)
        nothing = torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=self._device)
        return ManagedParameter(spec, parameter, offset_numel, nothing.expand(spec.shape))

    def nbytes_of(self, specs: Iterable[ChunkSpec]) -> list[ChunkBytes]:
        """The bytes of chunks over all lists."""
        decisions = self._decisions
        return chunk_bytes(specs, decisions.lists, decisions.situation, decisions.embeddings)

    def reserve(self, chunks: Sequence[Chunk], *also: Tier) -> None:
        """Lets the kernels allocate their workspace, if chunks have 16-bit parameters.

        Args:
            chunks: All chunks.
            *also: More tiers that chunks may move to.

        Raises:
            BudgetError: If there is no room.
        """
        for number, kernel in enumerate(self._kernels):
            own = [chunk for chunk in chunks if chunk.is_updated and chunk.spec.optimizer_index == number]
            kernel.reserve(own, *also, widens=self._decisions.situation.widens_gradients)

    def reserve_anew(self, chunks: Sequence[Chunk]) -> None:
        """Frees the workspace of the kernels, and allocates it again for these chunks; see ``reserve``.

        Tiers that had it have it again: chunks that live in the device margin may go back to the host.
        """
        for chunk in chunks:
            chunk.wait_for_update()  # on the device it uses the workspace
        self.reserve(chunks, *{tier for kernel in self._kernels for tier in kernel.release()})

    @property
    def splits_tensors(self) -> bool:
        """Whether a parameter may be spread over processes."""
        return all(kernel.splits_tensors for kernel in self._kernels)
