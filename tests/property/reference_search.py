"""The chunk-size search as one would write it down: every candidate is packed, tensor by tensor, into a whole layout.

``hf_patrickstar.layout`` must find the same in less time; see ``test_search_reference.py``.
"""

import dataclasses

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.layout.groups import CUT_STEPS
from hf_patrickstar.layout.packing import ChunkSpec, Layout, Placement
from hf_patrickstar.layout.search import (
    _BUDGET_SHARE,
    _ENOUGH_USED,
    _MAX_CHUNK_NUMEL,
    _MAX_PLACED_TENSORS,
    _MODEL_SHARE,
    _SPREAD_TOLERANCE,
    _TOLERANCE,
    MAX_CANDIDATES,
    ChunkSizeChoice,
    check_fits,
)
from hf_patrickstar.layout.specs import TensorSpec, Types
from hf_patrickstar.units import ALIGNMENT_NUMEL, align


@dataclasses.dataclass(slots=True)
class _OpenChunk:
    """A chunk that is being filled."""

    capacity_numel: int
    kind: "_Kind"
    on_host: bool = False
    end_numel: int = 0
    tensors: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def add(self, spec):
        self.tensors.append((spec.index, self.end_numel))
        self.end_numel += align(spec.numel)


_Kind = tuple[bool, int, Types]


def _kind(spec):
    """Tensors of different kinds have different lists, and are never in one chunk."""
    return (spec.trainable, spec.optimizer_index if spec.trainable else -1, spec.types)


def _fill_chunks(tensors, chunk_numel, on_host):
    """Chunks for one process, ordered by their first tensor."""
    closed = []
    current = {}
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


def _room(spec):
    """Elements that a tensor takes of a bin: at least some, so that one rank owns the offset of an empty tensor."""
    return max(align(spec.numel), ALIGNMENT_NUMEL)


@dataclasses.dataclass(slots=True)
class OpenGroup:
    """A communication group that is being filled: bins of one size, one per rank."""

    bin_numel: int
    bins: list[list[TensorSpec]]
    ends: list[int]

    @classmethod
    def of(cls, num_bins, bin_numel):
        """Makes an empty group."""
        return cls(bin_numel, [[] for _ in range(num_bins)], [0] * num_bins)

    @property
    def specs(self):
        """The tensors of all bins, in model order."""
        return sorted((spec for own in self.bins for spec in own), key=lambda spec: spec.index)

    def add(self, spec):
        """Puts a tensor into the first bin that has room for it, if one has."""
        room = _room(spec)
        for place, end in enumerate(self.ends):
            if end + room <= self.bin_numel:
                self.bins[place].append(spec)
                self.ends[place] = end + room
                return True
        return False

    def refilled(self, specs, bin_numel):
        """A group with bins of another size, filled with these tensors in this order; ``None`` if they do not fit."""
        group = OpenGroup.of(len(self.bins), bin_numel)
        return group if all(group.add(spec) for spec in specs) else None

    def cut(self):
        """A group of the same tensors in the smallest bins, largest tensor first; itself if no smaller bins do."""
        specs = sorted(self.specs, key=_room, reverse=True)
        least = max(align(-(-sum(self.ends) // len(self.bins))), _room(specs[0]))
        for bin_numel in range(least, self.bin_numel, align(-(-least // CUT_STEPS))):
            group = self.refilled(specs, bin_numel)
            if group is not None:
                return group
        return self

    def as_chunk(self, kind):
        """All bins in a row; the tensors of each in model order."""
        chunk = _OpenChunk(self.bin_numel * len(self.bins), kind)
        for place, own in enumerate(self.bins):
            chunk.end_numel = place * self.bin_numel
            for spec in sorted(own, key=lambda spec: spec.index):
                chunk.tensors.append((spec.index, chunk.end_numel))
                chunk.end_numel += _room(spec)
        return chunk


def fill_groups(specs, chunk_numel, world_size):
    """Distributes tensors of one kind over groups, in model order; the last group is not cut yet."""
    groups = []
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


def _close_last(groups, specs, chunk_numel):
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


def _pack_groups(tensors, chunk_numel, world_size, splits):
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
    return sorted(chunks, key=lambda chunk: min((index for index, _ in chunk.tensors)))


def pack(tensors, chunk_numel, on_host=frozenset(), world_size=1, splits=False):
    """As ``hf_patrickstar.layout.packing.pack``."""
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
    placements = [None] * len(tensors)
    chunks = []
    for index, chunk in enumerate(filled):
        for tensor_index, offset in chunk.tensors:
            placements[tensor_index] = Placement(tensor_index, index, offset)
        used = sum((tensors[tensor_index].numel for tensor_index, _ in chunk.tensors))
        indices = tuple((tensor_index for tensor_index, _ in chunk.tensors))
        capacity = max(chunk.capacity_numel, ALIGNMENT_NUMEL)
        trainable, optimizer_index, types = chunk.kind
        own = (trainable, chunk.on_host, world_size, optimizer_index, types)
        chunks.append(ChunkSpec(index, capacity, used, indices, *own))
    return Layout(tuple(tensors), tuple(chunks), tuple(p for p in placements if p is not None), chunk_numel)


def find_candidates(
    tensors, modules, on_host=frozenset(), world_size=1, staging_nbytes=lambda chunk_numel, dtype: 0, splits=False
):
    """The layouts that a search compares, smallest chunks first, and the bytes that each needs at least."""
    total = _total_numel(tensors, on_host)
    # Packing costs time in proportion to tensors x candidates: fewer candidates for models of very many tensors.
    num_candidates = min(MAX_CANDIDATES, max(32, _MAX_PLACED_TENSORS // max(len(tensors) * world_size, 1)))
    sizes = {align(max(1, -(-total // (parts * world_size)))) for parts in range(1, num_candidates + 1)}
    sizes |= {align(spec.numel) for spec in tensors if spec.numel}
    layouts = []
    for size in sorted(size for size in sizes if size <= max(_MAX_CHUNK_NUMEL, min(sizes))):
        layout = pack(tensors, size, on_host, world_size, splits)
        chunks, _ = layout.working_set_nbytes(modules)
        layouts.append((layout, chunks + _gradient_nbytes(layout, staging_nbytes)))
    return layouts


def search_layout(
    tensors,
    modules,
    device_nbytes,
    on_host=frozenset(),
    limits=(),
    world_size=1,
    staging_nbytes=lambda chunk_numel, dtype: 0,
    splits=False,
    exposed_ns=None,
):
    """As ``hf_patrickstar.layout.search.search_layout``."""
    layouts = find_candidates(tensors, modules, on_host, world_size, staging_nbytes, splits)
    fitting = [item for item in layouts if device_nbytes is None or item[1] <= device_nbytes]
    if not fitting:
        smallest = min(layouts, key=lambda item: item[1])[0]
        check_fits(smallest, modules, device_nbytes, limits, world_size, staging_nbytes, is_smallest=True)
    if device_nbytes is not None:
        itemsize = _mean_itemsize(tensors)
        most_numel = max(_total_numel(tensors, on_host) // _MODEL_SHARE, ALIGNMENT_NUMEL)
        share = min(device_nbytes // _BUDGET_SHARE, most_numel * itemsize)
        if world_size > 1:
            share = max(share, _least_group_nbytes([layout for layout, _ in fitting], itemsize, world_size))
        several = [item for item in fitting if item[0].chunk_numel * world_size * itemsize <= share]
        fitting = several or [min(fitting, key=lambda item: (item[1], item[0].chunk_numel))]
    best = max(item[0].utilisation for item in fitting)
    enough = best - (_SPREAD_TOLERANCE if splits else _TOLERANCE)
    well_used = [item for item in fitting if item[0].utilisation >= enough]
    if exposed_ns is None:
        layout, need = max(well_used, key=lambda item: item[0].chunk_numel)
        return ChunkSizeChoice(layout, len(layouts), need)
    times = [exposed_ns(len(layout.chunks), layout.chunk_numel) for layout, _ in well_used]
    place = min(range(len(times)), key=lambda number: (times[number], -well_used[number][0].chunk_numel))
    layout, need = well_used[place]
    return ChunkSizeChoice(layout, len(layouts), need, times[place])


def _gradient_nbytes(layout, staging_nbytes):
    """Bytes of gradients that are on the device until their group is reduced, and of the space to reduce them in."""
    largest = {}
    for chunk in layout.chunks:
        if chunk.trainable:
            largest[chunk.types.param] = max(chunk.chunk_numel, largest.get(chunk.types.param, 0))
    return layout.gradients_nbytes + sum((staging_nbytes(numel, dtype) for dtype, numel in largest.items()))


def _total_numel(tensors, on_host):
    """Elements of all tensors that chunks are searched for, with padding."""
    return sum(align(spec.numel) for spec in tensors if spec.index not in on_host)


def _mean_itemsize(tensors):
    """Bytes per element, over all tensors."""
    return sum(spec.nbytes for spec in tensors) / max(sum(spec.numel for spec in tensors), 1)


def _least_group_nbytes(layouts, itemsize, world_size):
    """Bytes of the smallest groups that are used well enough; small bins waste more than small chunks do."""
    enough = min(_ENOUGH_USED, max(layout.utilisation for layout in layouts) - _TOLERANCE)
    well_used = [layout.chunk_numel for layout in layouts if layout.utilisation >= enough]
    return min(well_used) * world_size * itemsize
