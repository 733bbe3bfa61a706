"""Memory of the device in which chunks at home on the host are updated; see [Note: updates over the bus]."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from hf_patrickstar.layout.packing import ChunkSpec
from hf_patrickstar.layout.specs import GRADIENT, ITEMSIZES, Types
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.streams import NUM_SLOTS, Copy
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.schedule.script import TILE_NUMEL
from hf_patrickstar.units import align

_ALIGNMENT = 256
"""Lists in a slot begin at multiples of so many bytes."""


class Slots:
    """A few slots, each of which has room for a tile of all lists of a chunk, its values and its gradients.

    Args:
        pool: Gives the memory, in one buffer.
        list_names: The lists beside ``param`` that an update reads and writes.

    """

    def __init__(self, pool: PayloadPool, list_names: Sequence[str]) -> None:
        self._under_way: list[tuple[Copy, object]] = []
        self._pool, self._names = pool, (*list_names, GRADIENT, "param")
        self._buffer: torch.Tensor | None = None

    def nbytes(self, specs: Iterable[ChunkSpec], tile_part: int) -> int:
        """Bytes of all slots.

        Args:
            specs: The chunks that are updated.
            tile_part: See ``Homes``.
        """
        specs = list(specs)
        numel = min(TILE_NUMEL // tile_part, max([align(spec.chunk_numel, _ALIGNMENT) for spec in specs], default=0))
        sizes = [sum(nbytes for *_, nbytes in self._places(spec.types, numel)) for spec in specs]
        return NUM_SLOTS * max(sizes, default=0)

    def reserve(self, specs: Iterable[ChunkSpec], tile_part: int, owner: str) -> None:
        """Allocates them, unless they are there; raises ``BudgetError`` if there is no room."""
        nbytes = self.nbytes(specs, tile_part)
        if self._buffer is None or self._buffer.numel() != nbytes:
            self.release(owner)
            self._buffer = self._pool.allocate(Tier.DEVICE, nbytes, torch.uint8, owner)

    def release(self, owner: str) -> None:
        """Gives them back."""
        if self._buffer is not None:
            for ticket, _ in self._under_way:
                ticket.join()
            self._pool.release(Tier.DEVICE, self._buffer, owner, keep=False)
            self._buffer, self._under_way = None, []

    def keep(self, ticket: Copy, used: object) -> None:
        """Holds what an update reads on the device until it has ended: its memory is of another stream."""
        self._under_way = [pair for pair in self._under_way if not pair[0].is_done] + [(ticket, used)]

    def lists(self, number: int, types: Types, numel: int) -> dict[str, torch.Tensor]:
        """A slot, cut into lists.

        Args:
            number: Which slot.
            types: The types of a chunk.
            numel: Elements of a tile, at most.
        """
        assert self._buffer is not None
        slot, begin, lists = self._buffer.chunk(NUM_SLOTS)[number], 0, dict[str, torch.Tensor]()
        for name, dtype, nbytes in self._places(types, numel):
            lists[name] = slot.narrow(0, begin, nbytes).view(getattr(torch, dtype))
            begin += nbytes
        return lists

    def _places(self, types: Types, numel: int) -> Iterator[tuple[str, str, int]]:
        """The names, types and bytes of the lists of a tile."""
        for name in filter(types.has_list, self._names):
            dtype, block_numel = (types.param, 1) if name == "param" else types.of_list(name)
            yield name, dtype, align(-(-numel // block_numel) * ITEMSIZES[dtype], _ALIGNMENT)
