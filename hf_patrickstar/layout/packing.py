"""From specs to chunks: which chunk and which offset each tensor has. The same in every chunk list.

[Note: communication groups]
With p processes an entry of the chunk list is a communication group (PatrickStar section 7): p consecutive chunks of
equal size, gathered into one contiguous buffer and reduced together. Rank r owns the r-th chunk: this rank alone has
its masters and optimizer states, so a tensor lies as a whole in one of the p chunks, here called bins. Padding is
gathered too, so groups of neighbours in the model are filled like this, with little padding:

- A tensor goes into the first bin with room of the current group of its kind (one type; frozen, or trained by one
  optimizer).
- A tensor larger than the bins makes the bins of the current group as large as itself. If the group is too full for
  that, or if no bin has room, the next group begins. Later tensors fill the bins beside a large tensor.
- Some groups are cut to the smallest bins that hold their tensors, which are distributed again, largest first: the last
  group, a group that a large tensor closed, and the group before one that was filled backwards.
- A large tensor at the end of the model, such as an output embedding, has no tensors after it, and its group cannot be
  cut below its size. This group is filled backwards, with the tensors before it, if that takes fewer elements in all.

All this is for optimizers that need whole tensors. A model smaller than p times its largest tensor has much padding
then. For element-wise optimizers a tensor larger than a chunk is alone in a group and spread over its chunks, cut at
multiples of the alignment; the device then needs no more room than the tensor itself.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.layout.specs import FP32, ModuleSpec, TensorSpec, Types
from hf_patrickstar.units import ALIGNMENT_NUMEL

CUT_STEPS = 256
"""Bins are cut in steps of the least possible size divided by this."""


def align(numel: int) -> int:
    """The smallest multiple of the alignment that holds ``numel`` elements."""
    return -(-numel // ALIGNMENT_NUMEL) * ALIGNMENT_NUMEL


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Where one tensor lives: in one chunk, as a whole.

    Attributes:
        tensor_index: Its place in model order.
        chunk_index: The entry of the chunk list that it is in.
        offset_numel: Elements before it in the whole buffer of that entry, over all ranks.
    """

    tensor_index: int
    chunk_index: int
    offset_numel: int


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkSpec:
    """A contiguous buffer of one dtype, as numbers.

    With several processes it is a communication group, see [Note: communication groups]: ``world_size`` chunks of equal
    size in a row, one per rank. A tensor lies in one of them, unless it is alone in the group and spread over all.

    Attributes:
        index: Its place in the chunk list.
        capacity_numel: Elements of the whole buffer, that of all ranks.
        used_numel: Elements of tensors in it.
        tensor_indices: The tensors in it, in offset order.
        trainable: Whether its tensors receive gradients. A chunk never mixes both kinds.
        on_host: Whether it holds only an embedding that may be looked up on the host; then the chunk never moves.
        world_size: Processes that share it.
        optimizer_index: Which optimizer updates it, and so which lists it has; -1 if none does.
        types: The types of its lists.
    """

    index: int
    capacity_numel: int
    used_numel: int
    tensor_indices: tuple[int, ...]
    trainable: bool
    on_host: bool = False
    world_size: int = 1
    optimizer_index: int = 0
    types: Types = FP32

    @property
    def is_updated(self) -> bool:
        """Whether an optimizer changes its tensors."""
        return self.trainable and self.optimizer_index >= 0

    @property
    def chunk_numel(self) -> int:
        """Elements of one of its chunks: what one rank owns."""
        return self.capacity_numel // self.world_size

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return self.capacity_numel * self.types.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The chunk list: every tensor in exactly one chunk.

    Attributes:
        tensors: All tensor specs, in model order.
        chunks: All chunks, ordered by their first tensor.
        placements: One per tensor, in the order of ``tensors``.
        chunk_numel: Elements of a standard chunk (a tensor larger than it has a chunk of its own, or a group of larger
            chunks where there are several processes).
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

    @property
    def gradients_nbytes(self) -> int:
        """Bytes of gradients that wait on the device for the rest of their group.

        0 with one process, where each gradient goes home at once; else the bytes of two groups, since backward begins
        the next group before the last gradients of the group before have come.
        """
        sizes = sorted(chunk.nbytes for chunk in self.chunks if chunk.trainable and chunk.world_size > 1)
        return sum(sizes[-2:])

    def working_set_nbytes(self, modules: Iterable[ModuleSpec]) -> tuple[int, ModuleSpec | None]:
        """Bytes of the chunks that the most demanding module needs on the device at once, and that module."""
        largest: tuple[int, ModuleSpec | None] = (0, None)
        for module in modules:
            chunks = {self.placements[index].chunk_index for index in module.tensor_indices}
            nbytes = sum(self.chunks[index].nbytes for index in chunks if not self.chunks[index].on_host)
            if nbytes > largest[0]:
                largest = (nbytes, module)
        return largest


@dataclasses.dataclass(slots=True)
class _OpenChunk:
    """A chunk that is being filled."""

    capacity_numel: int
    kind: "_Kind"
    on_host: bool = False
    end_numel: int = 0
    tensors: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def add(self, spec: TensorSpec) -> None:
        self.tensors.append((spec.index, self.end_numel))
        self.end_numel += align(spec.numel)


_Kind = tuple[bool, int, Types]


def _kind(spec: TensorSpec) -> _Kind:
    """Tensors of different kinds have different lists, and are never in one chunk."""
    return spec.trainable, spec.optimizer_index if spec.trainable else -1, spec.types


def _fill_chunks(tensors: Sequence[TensorSpec], chunk_numel: int, on_host: frozenset[int]) -> list[_OpenChunk]:
    """Chunks for one process, ordered by their first tensor."""
    closed: list[_OpenChunk] = []
    current: dict[_Kind, _OpenChunk] = {}
    for spec in tensors:
        numel = align(spec.numel)
        if spec.index in on_host or numel > chunk_numel:
            own = _OpenChunk(numel, _kind(spec), on_host=spec.index in on_host)
            own.add(spec)
            closed.append(own)
            continue
        chunk = current.get(_kind(spec))
        if chunk is None or chunk.end_numel + numel > chunk_numel:
            chunk = current[_kind(spec)] = _OpenChunk(chunk_numel, _kind(spec))
            closed.append(chunk)
        chunk.add(spec)
    for chunk in current.values():
        chunk.capacity_numel = max(chunk.end_numel, ALIGNMENT_NUMEL)
    return closed


def _room(spec: TensorSpec) -> int:
    """Elements that a tensor takes of a bin: at least some, so that one rank owns the offset of an empty tensor."""
    return max(align(spec.numel), ALIGNMENT_NUMEL)


@dataclasses.dataclass(slots=True)
class OpenGroup:
    """A communication group that is being filled: bins of one size, one per rank.

    Attributes:
        bin_numel: Elements of a bin.
        bins: The tensors of each bin.
        ends: Elements taken of each bin.
    """

    bin_numel: int
    bins: list[list[TensorSpec]]
    ends: list[int]

    @classmethod
    def of(cls, num_bins: int, bin_numel: int) -> "OpenGroup":
        """Makes an empty group."""
        return cls(bin_numel, [[] for _ in range(num_bins)], [0] * num_bins)

    @property
    def specs(self) -> list[TensorSpec]:
        """The tensors of all bins, in model order."""
        return sorted((spec for own in self.bins for spec in own), key=lambda spec: spec.index)

    def add(self, spec: TensorSpec) -> bool:
        """Puts a tensor into the first bin that has room for it, if one has."""
        room = _room(spec)
        for place, end in enumerate(self.ends):
            if end + room <= self.bin_numel:
                self.bins[place].append(spec)
                self.ends[place] = end + room
                return True
        return False

    def refilled(self, specs: Iterable[TensorSpec], bin_numel: int) -> "OpenGroup | None":
        """A group with bins of another size, filled with these tensors in this order; ``None`` if they do not fit."""
        group = OpenGroup.of(len(self.bins), bin_numel)
        return group if all(group.add(spec) for spec in specs) else None

    def cut(self) -> "OpenGroup":
        """A group of the same tensors in the smallest bins, largest tensor first; itself if no smaller bins do."""
        specs = sorted(self.specs, key=_room, reverse=True)
        least = max(align(-(-sum(self.ends) // len(self.bins))), _room(specs[0]))
        for bin_numel in range(least, self.bin_numel, align(-(-least // CUT_STEPS))):
            group = self.refilled(specs, bin_numel)
            if group is not None:
                return group
        return self

    def as_chunk(self, kind: _Kind) -> _OpenChunk:
        """All bins in a row; the tensors of each in model order."""
        chunk = _OpenChunk(self.bin_numel * len(self.bins), kind)
        for place, own in enumerate(self.bins):
            chunk.end_numel = place * self.bin_numel
            for spec in sorted(own, key=lambda spec: spec.index):
                chunk.tensors.append((spec.index, chunk.end_numel))
                chunk.end_numel += _room(spec)
        return chunk


def fill_groups(specs: Sequence[TensorSpec], chunk_numel: int, world_size: int) -> list[OpenGroup]:
    """Distributes tensors of one kind over groups, in model order; the last group is not cut yet.

    Args:
        specs: The tensors.
        chunk_numel: Elements of a bin, unless a tensor is larger.
        world_size: Bins of a group.
    """
    groups: list[OpenGroup] = []
    for spec in specs:
        if groups and groups[-1].add(spec):
            continue
        room = _room(spec)
        if groups and room > groups[-1].bin_numel:
            grown = groups[-1].refilled([*groups[-1].specs, spec], room)
            groups[-1] = grown or groups[-1].cut()
            if grown is not None:
                continue
        groups.append(OpenGroup.of(world_size, max(chunk_numel, room)))
        groups[-1].add(spec)
    return groups


def _close_last(groups: list[OpenGroup], specs: Sequence[TensorSpec], chunk_numel: int) -> list[OpenGroup]:
    """Cuts the last group; fills it from the tensors before it where that takes fewer elements in all."""
    cut = groups[-1].cut()
    plain = [*groups[:-1], cut]
    last = dataclasses.replace(cut, bins=[list(own) for own in cut.bins], ends=list(cut.ends))
    num_before = len(specs) - len(last.specs)
    while num_before and last.add(specs[num_before - 1]):
        num_before -= 1
    if last.ends == cut.ends:
        return plain
    before = fill_groups(specs[:num_before], chunk_numel, len(last.bins))
    backwards = [*before[:-1], *(group.cut() for group in before[-1:]), last]
    return min(plain, backwards, key=lambda made: sum(group.bin_numel for group in made))


def _pack_groups(tensors: Sequence[TensorSpec], chunk_numel: int, world_size: int, splits: bool) -> list[_OpenChunk]:
    """See [Note: communication groups]."""
    chunks = []
    spread = {spec.index for spec in tensors if splits and spec.numel > chunk_numel}
    for spec in tensors:
        if spec.index in spread:
            group = _OpenChunk(world_size * align(-(-spec.numel // world_size)), _kind(spec))
            group.add(spec)
            chunks.append(group)
    for kind in dict.fromkeys(_kind(spec) for spec in tensors):
        specs = [spec for spec in tensors if _kind(spec) == kind and spec.index not in spread]
        groups = fill_groups(specs, chunk_numel, world_size)
        closed = _close_last(groups, specs, chunk_numel) if groups else []
        chunks += [group.as_chunk(kind) for group in closed]
    return sorted(chunks, key=lambda chunk: min(index for index, _ in chunk.tensors))


def pack(
    tensors: Sequence[TensorSpec],
    chunk_numel: int,
    on_host: frozenset[int] = frozenset(),
    world_size: int = 1,
    splits: bool = False,
) -> Layout:
    """Packs tensors into chunks, in model order (PatrickStar section 6.1).

    Trainable and frozen tensors go to different chunks, since only the former have masters and optimizer states, and so
    do tensors of different optimizers and of different types. A tensor larger than a chunk, and a tensor computed on
    the host, gets a chunk of its own size. The last chunk of each kind is cut to what it holds. For several processes
    see [Note: communication groups].

    Args:
        tensors: The specs in model order.
        chunk_numel: Elements per chunk, of which a group has ``world_size``; rounded up to the alignment.
        on_host: Indices of embeddings that may be looked up on the host; each has a chunk of its own.
        world_size: Processes that share the model data.
        splits: Whether a tensor may be spread over the chunks of a group of its own: the optimizer updates elements
            without looking at the rest of their tensor.

    Raises:
        ConfigError: If ``chunk_numel`` or ``world_size`` is not positive, or if there are both several processes and
            tensors on the host.
    """
    if chunk_numel < 1:
        raise ConfigError(f"chunk_numel: expected a positive number of elements, got {chunk_numel}")
    if world_size < 1:
        raise ConfigError(f"world_size: expected a positive number of processes, got {world_size}")
    if world_size > 1 and on_host:
        raise ConfigError(f"cpu_embedding: not supported with {world_size} processes; set it to false")
    chunk_numel = align(chunk_numel)
    if world_size == 1:
        filled = _fill_chunks(tensors, chunk_numel, on_host)
    else:
        filled = _pack_groups(tensors, chunk_numel, world_size, splits)
    placements: list[Placement | None] = [None] * len(tensors)
    chunks = []
    for index, chunk in enumerate(filled):
        for tensor_index, offset in chunk.tensors:
            placements[tensor_index] = Placement(tensor_index, index, offset)
        used = sum(tensors[tensor_index].numel for tensor_index, _ in chunk.tensors)
        indices = tuple(tensor_index for tensor_index, _ in chunk.tensors)
        capacity = max(chunk.capacity_numel, ALIGNMENT_NUMEL)
        trainable, optimizer_index, types = chunk.kind
        own = (trainable, chunk.on_host, world_size, optimizer_index, types)
        chunks.append(ChunkSpec(index, capacity, used, indices, *own))
    return Layout(tuple(tensors), tuple(chunks), tuple(p for p in placements if p is not None), chunk_numel)
