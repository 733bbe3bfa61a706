"""From specs to chunks: which chunk and which offset each tensor has. The same in every chunk list."""

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.layout.filling import Group, Kind, Piece, close_last, fill_groups, room_of
from hf_patrickstar.layout.specs import FP32, ModuleSpec, TensorSpec, Types
from hf_patrickstar.units import ALIGNMENT_NUMEL, align, format_count


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
    def kind(self) -> Kind:
        """The kind of its tensors."""
        return self.trainable, self.optimizer_index, self.types

    @property
    def chunk_numel(self) -> int:
        """Elements of one of its chunks: what one rank owns."""
        return self.capacity_numel // self.world_size

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return self.capacity_numel * self.types.itemsize

    def parts_of(self, numel: int, offset_numel: int) -> tuple[tuple[int, int], ...]:
        """Which elements of a tensor each rank has, as begin and end.

        Args:
            numel: Elements of the tensor.
            offset_numel: Where it begins in the whole buffer.
        """
        begins = [rank * self.chunk_numel - offset_numel for rank in range(self.world_size)]
        return tuple((min(max(begin, 0), numel), min(max(begin + self.chunk_numel, 0), numel)) for begin in begins)


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

    def describe(self) -> str:
        """How many chunks or groups there are, and of how many elements."""
        largest = [max([self.tensors[i].numel for i in chunk.tensor_indices], default=0) for chunk in self.chunks]
        larger = [numel for numel in largest if numel > self.chunk_numel]
        standard = [
            chunk.chunk_numel for chunk, numel in zip(self.chunks, largest, strict=True) if numel <= self.chunk_numel
        ]
        sizes = []
        if larger:
            most = format_count(max(larger))
            sizes.append(f"{len(larger)} with a tensor that is larger, the largest of {most} elements")
        if standard:
            sizes.append(f"{len(standard)} of up to {format_count(max(standard))} elements")
        world_size = self.chunks[0].world_size if self.chunks else 1
        what = "chunks" if world_size == 1 else f"groups of {world_size} chunks"
        return f"{len(self.chunks)} {what}" + (f": {', and '.join(sizes)}" if sizes else "")

    def working_set_nbytes(self, modules: Iterable[ModuleSpec]) -> tuple[int, ModuleSpec | None]:
        """Bytes of the chunks that the most demanding module needs on the device at once, and that module."""
        largest: tuple[int, ModuleSpec | None] = (0, None)
        for module in modules:
            chunks = {self.placements[index].chunk_index for index in module.tensor_indices}
            nbytes = sum(self.chunks[index].nbytes for index in chunks if not self.chunks[index].on_host)
            if nbytes > largest[0]:
                largest = (nbytes, module)
        return largest


def branches_nbytes(chunks: Iterable[ChunkSpec]) -> int:
    """Bytes that other processes may need on the device of one that computes in another branch; 0 with one process.

    All processes take part in what one of them asks for: a group that is gathered, and another one that is reduced.
    """
    return 2 * max((chunk.nbytes for chunk in chunks if chunk.world_size > 1), default=0)


def gradients_nbytes(chunks: Iterable[ChunkSpec | Group]) -> int:
    """Bytes of gradients that wait on the device for the rest of their group.

    0 with one process, where each gradient goes home at once; else the bytes of two groups, since backward begins the
    next group before the last gradients of the group before have come.
    """
    return sum(sorted(chunk.nbytes for chunk in chunks if chunk.trainable and chunk.world_size > 1)[-2:])


@dataclasses.dataclass(frozen=True, slots=True)
class Outline:
    """What chunks or groups come to.

    Attributes:
        num_chunks: How many there are.
        capacity_numel: Elements of all of them.
        largest: The most elements that one rank owns of one, by kind.
    """

    num_chunks: int
    capacity_numel: int
    largest: Mapping[Kind, int]

    @classmethod
    def of(cls, groups: Sequence[ChunkSpec | Group]) -> "Outline":
        """Adds up chunks or groups."""
        largest: dict[Kind, int] = {}
        for group in groups:
            largest[group.kind] = max(group.chunk_numel, largest.get(group.kind, 0))
        return cls(len(groups), sum(group.capacity_numel for group in groups), largest)


class _Run(NamedTuple):
    """Tensors of one kind that share chunks, and the elements that all before each of them, and all of them, take."""

    kind: Kind
    pieces: list[Piece]
    before: list[int]

    def cuts(self, chunk_numel: int) -> list[int]:
        """Where chunks begin, and where the last one ends."""
        before, cuts = self.before, [0]
        while cuts[-1] < len(self.pieces):
            cuts.append(bisect.bisect_right(before, before[cuts[-1]] + chunk_numel) - 1)
        return cuts

    def last_numel(self, cuts: Sequence[int]) -> int:
        """Elements of the last chunk, which is cut to what it holds."""
        return max(self.before[-1] - self.before[cuts[-2]], ALIGNMENT_NUMEL)

    def chunks(self, chunk_numel: int) -> list[Group]:
        """Its chunks with one process."""
        cuts, before = self.cuts(chunk_numel), self.before
        ends = itertools.pairwise(cuts)
        made = [Group(self.kind, chunk_numel, [self.pieces[i:j]], [before[j] - before[i]]) for i, j in ends]
        made[-1].chunk_numel = self.last_numel(cuts)
        return made

    def groups(self, chunk_numel: int, world_size: int) -> list[Group]:
        """Its groups with several processes; see [Note: communication groups]."""
        return close_last(fill_groups(self.kind, self.pieces, chunk_numel, world_size), self.pieces, chunk_numel)


@dataclasses.dataclass(eq=False)
class Packer:
    """Packs the tensors of a model into chunks of any size, in model order (PatrickStar section 6.1).

    Trainable and frozen tensors go to different chunks, since only the former have masters and optimizer states, and so
    do tensors of different optimizers and of different types. A tensor larger than a chunk, and a tensor computed on
    the host, gets a chunk of its own size. The last chunk of each kind is cut to what it holds. For several processes
    see [Note: communication groups].

    A search looks at hundreds of sizes, which are multiples of the alignment. ``fill`` and ``outline`` tell of one of
    them without the objects of a ``Layout``; with one process running sums tell where chunks end.

    Attributes:
        tensors: The specs in model order.
        on_host: Indices of embeddings that may be looked up on the host; each has a chunk of its own.
        world_size: Processes that share the model data: so many chunks are a group.
        splits: Whether a tensor may be spread over the chunks of a group of its own: the optimizer updates elements
            without looking at the rest of their tensor.
        used_numel: Elements of all tensors.
        padded_numel: Elements of all tensors but those on the host, with padding.

    Raises:
        ConfigError: If ``world_size`` is not positive, or if there are both several processes and tensors on the host.
    """

    tensors: Sequence[TensorSpec]
    on_host: frozenset[int] = frozenset()
    world_size: int = 1
    splits: bool = False

    def __post_init__(self) -> None:
        tensors, on_host, world_size = self.tensors, self.on_host, self.world_size
        if world_size < 1:
            raise ConfigError(f"world_size: expected a positive number of processes, got {world_size}")
        if world_size > 1 and on_host:
            raise ConfigError(f"cpu_embedding: not supported with {world_size} processes; set it to false")
        # Of how many bins a large tensor is alone in; 0 if it is not alone.
        self._parts = world_size if self.splits or world_size == 1 else 0
        # Of a group one rank owns the offset of an empty tensor, so it takes some elements.
        least = 0 if world_size == 1 else ALIGNMENT_NUMEL
        self.used_numel = sum(spec.numel for spec in tensors)
        self.padded_numel = sum(align(spec.numel) for spec in tensors if spec.index not in on_host)
        self._hosted: list[Group] = []
        self._kinds: dict[Kind, list[Piece]] = {}
        for spec in tensors:
            kind, piece = _kind(spec), Piece(spec.index, max(align(spec.numel, spec.types.alignment_numel), least))
            if spec.index in on_host:
                self._hosted.append(_alone(kind, piece, 1, on_host=True))
            else:
                self._kinds.setdefault(kind, []).append(piece)
        self._rooms = sorted({piece.room for pieces in self._kinds.values() for piece in pieces})
        self._filled: tuple[int, list[Group]] | None = None
        self._split: tuple[int, tuple[list[Group], Outline, list[_Run]]] | None = None

    def fill(self, chunk_numel: int) -> list[Group]:
        """The chunks or groups of a size, in no order; kept until another size is asked for."""
        if self._filled is None or self._filled[0] != chunk_numel:
            alone, _, runs = self._split_at(chunk_numel)
            groups = [*alone]
            for run in runs:
                groups += run.chunks(chunk_numel) if self.world_size == 1 else run.groups(chunk_numel, self.world_size)
            self._filled = (chunk_numel, groups)
        return self._filled[1]

    def outline(self, chunk_numel: int) -> Outline:
        """What ``fill`` comes to; with one process no chunk is made for that."""
        if self.world_size > 1:
            return Outline.of(self.fill(chunk_numel))
        _, alone, runs = self._split_at(chunk_numel)
        num, capacity, largest = alone.num_chunks, alone.capacity_numel, dict(alone.largest)
        for run in runs:
            cuts = run.cuts(chunk_numel)
            num_full, last = len(cuts) - 2, run.last_numel(cuts)
            num += num_full + 1
            capacity += num_full * chunk_numel + last
            largest[run.kind] = max(chunk_numel if num_full else last, largest.get(run.kind, 0))
        return Outline(num, capacity, largest)

    def layout(self, chunk_numel: int) -> Layout:
        """The chunk list of a size, which is rounded up to the alignment.

        Raises:
            ConfigError: If the size is not positive.
        """
        if chunk_numel < 1:
            raise ConfigError(f"chunk_numel: expected a positive number of elements, got {chunk_numel}")
        chunk_numel, tensors = align(chunk_numel), self.tensors
        placements: list[Placement | None] = [None] * len(tensors)
        chunks = []
        for index, group in enumerate(sorted(self.fill(chunk_numel), key=lambda group: group.pieces[0])):
            placed = group.placed()
            for tensor_index, offset in placed:
                placements[tensor_index] = Placement(tensor_index, index, offset)
            indices = tuple(tensor_index for tensor_index, _ in placed)
            used = sum(tensors[tensor_index].numel for tensor_index in indices)
            trainable, optimizer_index, types = group.kind
            own = (trainable, group.on_host, self.world_size, optimizer_index, types)
            chunks.append(ChunkSpec(index, group.capacity_numel, used, indices, *own))
        return Layout(tuple(tensors), tuple(chunks), tuple(p for p in placements if p is not None), chunk_numel)

    def _split_at(self, chunk_numel: int) -> tuple[list[Group], Outline, list[_Run]]:
        """Tensors that are alone, what these come to, and those that are together; kept until other ones are larger."""
        num_small = bisect.bisect_right(self._rooms, chunk_numel)
        if self._split is None or num_small != self._split[0]:
            alone, runs = [*self._hosted], []
            for kind, pieces in self._kinds.items():
                shared = [piece for piece in pieces if piece.room <= chunk_numel] if self._parts else pieces
                if len(shared) < len(pieces):
                    alone += [_alone(kind, piece, self._parts) for piece in pieces if piece.room > chunk_numel]
                if shared:
                    runs.append(_Run(kind, shared, [*itertools.accumulate(map(room_of, shared), initial=0)]))
            self._split = (num_small, (alone, Outline.of(alone), runs))
        return self._split[1]


def _kind(spec: TensorSpec) -> Kind:
    return spec.trainable, spec.optimizer_index if spec.trainable else -1, spec.types


def _alone(kind: Kind, piece: Piece, num_parts: int, *, on_host: bool = False) -> Group:
    """A chunk of one tensor, or a group of one with a part of it in each bin."""
    unit = kind[2].alignment_numel
    group = Group.of(kind, num_parts, max(align(-(-piece.room // num_parts), unit), unit))
    group.bins[0].append(piece)
    group.on_host = on_host
    return group
