"""Fills chunks, and groups of chunks, with tensors that are only numbers here.

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

import bisect
import dataclasses
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hf_patrickstar.layout.specs import Types
from hf_patrickstar.units import align

CUT_STEPS = 256
"""Bins are cut in steps of the least possible size divided by this."""


Kind = tuple[bool, int, Types]
"""Tensors of different kinds have different lists, and are never in one chunk."""


class Piece(NamedTuple):
    """A tensor that is placed: its place in model order, and the elements that it takes."""

    tensor_index: int
    room: int


@dataclasses.dataclass(slots=True)
class Group:
    """A communication group, or a chunk where there is one process, while it is filled: equal bins, one per rank.

    Attributes:
        kind: The kind of its tensors.
        chunk_numel: Elements of a bin: what one rank owns.
        bins: The tensors of each bin.
        ends: Elements taken of each bin.
        on_host: Whether it holds only an embedding that may be looked up on the host.
    """

    kind: Kind
    chunk_numel: int
    bins: list[list[Piece]]
    ends: list[int]
    on_host: bool = False

    @classmethod
    def of(cls, kind: Kind, num_bins: int, chunk_numel: int) -> "Group":
        """Makes an empty group."""
        return cls(kind, chunk_numel, [[] for _ in range(num_bins)], [0] * num_bins)

    @property
    def trainable(self) -> bool:
        """Whether its tensors receive gradients."""
        return self.kind[0]

    @property
    def types(self) -> Types:
        """The types of its lists."""
        return self.kind[2]

    @property
    def world_size(self) -> int:
        """Processes that share it."""
        return len(self.bins)

    @property
    def capacity_numel(self) -> int:
        """Elements of all bins."""
        return self.chunk_numel * len(self.bins)

    @property
    def nbytes(self) -> int:
        """Bytes of all bins."""
        return self.capacity_numel * self.types.itemsize

    @property
    def num_tensors(self) -> int:
        """How many tensors it has."""
        return sum(map(len, self.bins))

    @property
    def pieces(self) -> list[Piece]:
        """The tensors of all bins, in model order."""
        return sorted(itertools.chain.from_iterable(self.bins))

    def add(self, piece: Piece) -> bool:
        """Puts a tensor into the first bin that has room for it, if one has."""
        room = piece.room
        most = self.chunk_numel - room
        for place, end in enumerate(self.ends):
            if end <= most:
                self.bins[place].append(piece)
                self.ends[place] = end + room
                return True
        return False

    def refilled(self, pieces: Iterable[Piece], chunk_numel: int) -> "Group | None":
        """A group with bins of another size, filled with these tensors in this order; ``None`` if they do not fit."""
        group = Group.of(self.kind, len(self.bins), chunk_numel)
        return group if all(map(group.add, pieces)) else None

    def cut(self) -> "Group":
        """A group of the same tensors in the smallest bins, largest tensor first; itself if no smaller bins do."""
        pieces = sorted(self.pieces, key=room_of, reverse=True)
        least = max(align(-(-sum(self.ends) // len(self.bins))), pieces[0].room)
        for chunk_numel in range(least, self.chunk_numel, align(-(-least // CUT_STEPS))):
            group = self.refilled(pieces, chunk_numel)
            if group is not None:
                return group
        return self

    def placed(self) -> list[tuple[int, int]]:
        """Every tensor and its offset, all bins in a row; the tensors of each bin in model order."""
        found = []
        for place, own in enumerate(self.bins):
            offset = place * self.chunk_numel
            for piece in sorted(own):
                found.append((piece.tensor_index, offset))
                offset += piece.room
        return found


room_of = operator.attrgetter("room")


def fill_groups(kind: Kind, pieces: Sequence[Piece], chunk_numel: int, world_size: int) -> list[Group]:
    """Distributes tensors of one kind over groups, in model order; the last group is not cut yet.

    Args:
        kind: The kind.
        pieces: The tensors.
        chunk_numel: Elements of a bin, unless a tensor is larger.
        world_size: Bins of a group.
    """
    if not pieces:
        return []
    group = Group.of(kind, world_size, chunk_numel)
    groups = [group]
    for piece in pieces:
        if group.add(piece):
            continue
        if piece.room > group.chunk_numel:
            grown = group.refilled([*group.pieces, piece], piece.room)
            groups[-1] = grown or group.cut()
            if grown is not None:
                group = grown
                continue
        group = Group.of(kind, world_size, max(chunk_numel, piece.room))
        group.add(piece)
        groups.append(group)
    return groups


def close_last(groups: list[Group], pieces: Sequence[Piece], chunk_numel: int) -> list[Group]:
    """Cuts the last group; fills it from the tensors before it where that takes fewer elements in all."""
    cut = groups[-1].cut()
    plain = [*groups[:-1], cut]
    last = dataclasses.replace(cut, bins=[list(own) for own in cut.bins], ends=list(cut.ends))
    num_before = len(pieces) - last.num_tensors
    while num_before and last.add(pieces[num_before - 1]):
        num_before -= 1
    if last.ends == cut.ends:
        return plain
    # The groups before the one that gives tensors away are as they were.
    starts = [0, *itertools.accumulate(group.num_tensors for group in groups)]
    place = max(bisect.bisect_left(starts, num_before) - 1, 0)
    before = [*groups[:place], *fill_groups(cut.kind, pieces[starts[place] : num_before], chunk_numel, len(last.bins))]
    backwards = [*before[:-1], *(group.cut() for group in before[-1:]), last]
    return min(plain, backwards, key=lambda made: sum(group.chunk_numel for group in made))
