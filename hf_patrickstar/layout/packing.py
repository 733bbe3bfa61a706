"""From specs to chunks: which chunk and which offset each tensor has. The same in every chunk list."""

import dataclasses
from collections.abc import Iterable, Sequence

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.layout.specs import ModuleSpec, TensorSpec

ALIGNMENT_NUMEL = 64
"""Offsets are multiples of this many elements: 128 bytes in 16-bit, 256 in fp32."""


def align(numel: int) -> int:
    """The smallest multiple of the alignment that holds ``numel`` elements."""
    return -(-numel // ALIGNMENT_NUMEL) * ALIGNMENT_NUMEL


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Where one tensor lives: in one chunk, as a whole."""

    tensor_index: int
    chunk_index: int
    offset_numel: int


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkSpec:
    """A contiguous buffer of one dtype, as numbers.

    Attributes:
        index: Its place in the chunk list.
        capacity_numel: Elements that it is allocated with.
        used_numel: Elements of tensors in it.
        tensor_indices: The tensors in it, in offset order.
        trainable: Whether its tensors have masters and optimizer states. A chunk never mixes both kinds.
        on_host: Whether it holds an embedding alone that may be looked up on the host, and then never moves.
    """

    index: int
    capacity_numel: int
    used_numel: int
    tensor_indices: tuple[int, ...]
    trainable: bool
    on_host: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The chunk list: every tensor in exactly one chunk.

    Attributes:
        tensors: All tensor specs, in model order.
        chunks: All chunks, ordered by their first tensor.
        placements: One per tensor, in the order of ``tensors``.
        chunk_numel: Elements of a standard chunk (a tensor larger than it has a chunk of its own).
    """

    tensors: tuple[TensorSpec, ...]
    chunks: tuple[ChunkSpec, ...]
    placements: tuple[Placement, ...]
    chunk_numel: int

    @property
    def utilisation(self) -> float:
        """Elements of tensors over elements allocated, between 0 and 1."""
        capacity = sum(chunk.capacity_numel for chunk in self.chunks)
        return sum(chunk.used_numel for chunk in self.chunks) / capacity if capacity else 1.0

    def working_set_numel(self, modules: Iterable[ModuleSpec]) -> tuple[int, ModuleSpec | None]:
        """Elements of the chunks that the most demanding module needs on the device at once, and that module."""
        largest: tuple[int, ModuleSpec | None] = (0, None)
        for module in modules:
            chunks = {self.placements[index].chunk_index for index in module.tensor_indices}
            numel = sum(self.chunks[index].capacity_numel for index in chunks if not self.chunks[index].on_host)
            if numel > largest[0]:
                largest = (numel, module)
        return largest


@dataclasses.dataclass(slots=True)
class _OpenChunk:
    """A chunk that is being filled."""

    capacity_numel: int
    trainable: bool
    on_host: bool = False
    end_numel: int = 0
    tensors: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def add(self, spec: TensorSpec) -> None:
        self.tensors.append((spec.index, self.end_numel))
        self.end_numel += align(spec.numel)


def pack(tensors: Sequence[TensorSpec], chunk_numel: int, on_host: frozenset[int] = frozenset()) -> Layout:
    """Packs tensors into chunks, in model order (PatrickStar section 6.1).

    Trainable and frozen tensors go to different chunks, since only the former have masters and optimizer states. A
    tensor larger than a chunk, and a tensor computed on the host, gets a chunk of its own size. The last chunk of
    each kind is cut to what it holds.

    Args:
        tensors: The specs in model order.
        chunk_numel: Elements per chunk; rounded up to the alignment.
        on_host: Indices of embeddings that may be looked up on the host; each has a chunk of its own.

    Raises:
        ConfigError: If ``chunk_numel`` is not positive.
    """
    if chunk_numel < 1:
        raise ConfigError(f"chunk_numel: expected a positive number of elements, got {chunk_numel}")
    chunk_numel = align(chunk_numel)
    closed: list[_OpenChunk] = []
    current: dict[bool, _OpenChunk] = {}
    for spec in tensors:
        numel = align(spec.numel)
        if spec.index in on_host or numel > chunk_numel:
            own = _OpenChunk(numel, spec.trainable, on_host=spec.index in on_host)
            own.add(spec)
            closed.append(own)
            continue
        chunk = current.get(spec.trainable)
        if chunk is None or chunk.end_numel + numel > chunk_numel:
            chunk = current[spec.trainable] = _OpenChunk(chunk_numel, spec.trainable)
            closed.append(chunk)
        chunk.add(spec)
    for chunk in current.values():
        chunk.capacity_numel = max(chunk.end_numel, ALIGNMENT_NUMEL)
    placements: list[Placement | None] = [None] * len(tensors)
    chunks = []
    for index, chunk in enumerate(closed):
        for tensor_index, offset in chunk.tensors:
            placements[tensor_index] = Placement(tensor_index, index, offset)
        used = sum(tensors[tensor_index].numel for tensor_index, _ in chunk.tensors)
        indices = tuple(tensor_index for tensor_index, _ in chunk.tensors)
        capacity = max(chunk.capacity_numel, ALIGNMENT_NUMEL)
        chunks.append(ChunkSpec(index, capacity, used, indices, chunk.trainable, chunk.on_host))
    return Layout(tuple(tensors), tuple(chunks), tuple(p for p in placements if p is not None), chunk_numel)
