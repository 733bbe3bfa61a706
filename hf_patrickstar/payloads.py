"""Allocates chunks and makes managed parameters according to the decisions, and computes the bytes of chunks."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch

from hf_patrickstar.checkpoint.progress import shown
from hf_patrickstar.decisions import Decisions
from hf_patrickstar.errors import PatrickStarError
from hf_patrickstar.homes import chunk_bytes, lists_of, widened_by
from hf_patrickstar.layout.packing import ChunkSpec
from hf_patrickstar.layout.specs import MASTER, TensorSpec
from hf_patrickstar.memory.operators import unseen
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.optim.kernel import Kernel
from hf_patrickstar.optim.workers import HostWorkers, WorkTicket
from hf_patrickstar.resources import Resources
from hf_patrickstar.runtime.chunk import Chunk, ManagedParameter, torch_dtype
from hf_patrickstar.schedule.placement import ChunkBytes
from hf_patrickstar.units import format_nbytes

_PART_NUMEL = 2**21
"""Elements that a worker fills with zeros before it takes the next part: a few milliseconds of work."""


class Payloads:
    """Allocates the payloads of chunks, and the workspace of kernels.

    Args:
        resources: What the engine runs on.
        decisions: The decisions for the model.
        kernels: The kernels that update chunks, one for each optimizer; the list may grow.
        workers: They fill new payloads with zeros.
    """

    def __init__(
        self, resources: Resources, decisions: Decisions, kernels: Sequence[Kernel], workers: HostWorkers
    ) -> None:
        self._device = resources.device
        self._pool = resources.pool
        self._rank = resources.collectives.rank
        self._decisions = decisions
        self._kernels = kernels
        self._workers = workers
        self._zeroing: list[WorkTicket] = []

    @unseen()
    def allocate(self) -> list[Chunk]:
        """Allocates every payload at its home, and gives every parameter its place in a chunk; no value is moved yet.

        Raises:
            BudgetError: If a payload does not fit; all payloads are freed.
        """
        decisions = self._decisions
        chunks: list[Chunk] = []
        try:
            with self._zeros():
                specs = decisions.choice.layout.chunks
                bar = shown(specs, "Allocating chunks", "chunks", is_first=self._rank == 0)
                for spec in bar:
                    home = Tier.DEVICE if spec.index in decisions.homes.device_homed else Tier.HOST
                    chunks.append(self._make_chunk(spec, home))
                    locked_nbytes = 0 if bar.disable else self._pool.pinned_nbytes
                    if locked_nbytes:
                        bar.set_postfix_str(f"{format_nbytes(locked_nbytes)} locked", refresh=False)
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
        with self._zeros():
            return self._make_chunk(spec, home)

    def _make_chunk(self, spec: ChunkSpec, home: Tier) -> Chunk:
        chunk = Chunk(spec, home, self._rank)
        chunk.lists.fill = self._fill
        moves = home is Tier.HOST and not spec.on_host
        chunk.param = self._new(home, spec.chunk_numel, torch_dtype(spec.types.param), "param", pinned=moves)
        try:
            for name in lists_of(spec, self._decisions.lists):
                dtype, block_numel = spec.types.of_list(name)
                numel, kind = -(-spec.chunk_numel // block_numel), torch_dtype(dtype)
                if name == MASTER:
                    chunk.lists[name] = self._new(home, numel, kind, name)
                else:
                    chunk.lists.fresh[name] = self._pool.allocate(home, numel, kind, name)
        except PatrickStarError:
            self._stop_zeroing()
            chunk.give_back(self._pool)
            raise
        return chunk

    def _new(self, home: Tier, numel: int, dtype: torch.dtype, owner: str, *, pinned: bool = False) -> torch.Tensor:
        """A payload of zeros; workers may write them while the caller page-locks the next one."""
        device = self._device if home is Tier.DEVICE else torch.device("cpu")
        is_apart = self._workers.suits_new(device, numel)
        payload = self._pool.allocate(home, numel, dtype, owner, pinned=pinned, zero=not is_apart)
        if is_apart:
            self._zeroing.append(self._workers.submit(_fill_with_zeros, payload.split(_PART_NUMEL)))
        return payload

    def _fill(self, payload: torch.Tensor) -> None:
        """Fills a payload with zeros, when somebody asks for it."""
        if self._workers.suits(payload, payload.numel()):
            self._workers.submit(_fill_with_zeros, payload.split(_PART_NUMEL)).wait()
        else:
            payload.zero_()

    @contextlib.contextmanager
    def _zeros(self) -> Iterator[None]:
        """When the block has ended, all payloads that were made in it are filled with zeros."""
        try:
            yield
            for ticket in self._zeroing:
                ticket.wait()
        finally:
            self._stop_zeroing()

    def _stop_zeroing(self) -> None:
        for ticket in self._zeroing:
            ticket.skip()  # all of them, before one is waited for
        for ticket in self._zeroing:
            ticket.cancel()
        self._zeroing.clear()

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
        return chunk_bytes(specs, decisions.lists, self._pool, decisions.embeddings)

    def reserve(self, chunks: Sequence[Chunk], *also: Tier) -> None:
        """Lets the kernels allocate their workspace, if chunks have 16-bit parameters.

        Args:
            chunks: All chunks.
            *also: More tiers that chunks may move to.

        Raises:
            BudgetError: If there is no room.
        """
        widens = self._decisions.widens_gradients
        for number, kernel in enumerate(self._kernels):
            kernel.reserve([chunk for chunk in chunks if widened_by(chunk.spec, number)], *also, widens=widens)

    def reserve_anew(self, chunks: Sequence[Chunk]) -> None:
        """Frees the workspace of the kernels, and allocates it again for these chunks; see ``reserve``.

        Tiers that had it have it again: chunks that live in the device margin may go back to the host.
        """
        for chunk in chunks:
            chunk.wait_for_update()  # on the device it uses the workspace
        tiers = {tier for kernel in self._kernels for tier in kernel.release()}
        self.reserve(chunks, *tiers)

    @property
    def splits_tensors(self) -> bool:
        """Whether a parameter may be spread over processes."""
        return all(kernel.splits_tensors for kernel in self._kernels)


def _fill_with_zeros(worker: int, part: torch.Tensor) -> None:
    part.zero_()
