"""Where each chunk is at home, decided from byte counts alone (PatrickStar section 8.2)."""

import bisect
import dataclasses
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.machine import Machine
from hf_patrickstar.units import format_nbytes

Needs = Sequence[tuple[int, frozenset[int]]]
"""What the device must have room for at each moment: bytes, and the chunks whose copies are among them."""

NEW_MEMORY = 3
"""A byte of large tensors that is written for the first time takes as long as so many others: the kernel of the system
maps each page then. An embedding's gradient of 1 GB took 0.35 s in one thread and 0.21 s in two, of which zeros in
memory that was there already took 0.12 s and 0.07 s (Xeon, torch 2.13)."""
_MOST_SUMS = 1000
_T = TypeVar("_T")
FIRST_HOMES = "first homes"
"""What a reason is about that was found before a step was known."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkBytes:
    """The bytes of one chunk over all its lists.

    Attributes:
        chunk_index: Its place in the chunk list.
        param_nbytes: Bytes of its ``param`` payload.
        host_param_nbytes: Bytes that this payload takes on the host, where pinning rounds up.
        state_nbytes: Bytes of masters, optimizer states and accumulated gradients.
        on_host: Whether its home must be the host, because an embedding is looked up there.
        list_nbytes: Bytes of masters and optimizer states, if these may be on the disk.
        is_on_disk: Whether they are there, if it is at home on the host.
    """

    chunk_index: int
    param_nbytes: int
    host_param_nbytes: int
    state_nbytes: int
    on_host: bool = False
    list_nbytes: int = 0
    is_on_disk: bool = False

    @property
    def device_nbytes(self) -> int:
        """Bytes on the device if it is at home there."""
        return self.param_nbytes + self.state_nbytes

    @property
    def host_nbytes(self) -> int:
        """Bytes on the host if it is at home there."""
        return self.host_param_nbytes + self.state_nbytes - self.disk_nbytes

    @property
    def disk_nbytes(self) -> int:
        """Bytes on the disk if it is at home on the host."""
        return self.list_nbytes if self.is_on_disk else 0


@dataclasses.dataclass(frozen=True, slots=True)
class Homes:
    """Where all chunks are at home, and why: on the device or on the host.

    Attributes:
        device: The chunks on the device.
        margin: Those of them that live in the margin, the first to move in first. Before a step is known they are
            those that the host has no room for.
        reasons: What was decided, a sentence each, by what it is about.
        streamed: The chunks on the host that are updated on the device.
        tile_part: How many times smaller than ``TILE_NUMEL`` the tiles are in which they cross.
        disk: The chunks on the host whose masters and optimizer states are on the disk.
    """

    device: frozenset[int]
    margin: tuple[int, ...] = ()
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)
    streamed: frozenset[int] = frozenset()
    tile_part: int = 1
    disk: frozenset[int] = frozenset()

    @property
    def kept(self) -> frozenset[int]:
        """The chunks on the device that are there because all seemed to fit, or must not move."""
        return self.device.difference(self.margin)


@dataclasses.dataclass(frozen=True, slots=True)
class Tiers:
    """What both tiers have for chunks, and what they need beside chunks at home.

    Attributes:
        host_nbytes: Bytes for chunks on the host.
        device_nbytes: Bytes for chunks on the device, and for whatever else ``needs`` has.
        needs: What the device must have room for at each moment if no chunk is at home there, and the chunks whose
            copies are among it.
        host_workspace_nbytes: Bytes of scratch space that the optimizer needs on the host if it updates chunks there.
        device_workspace_nbytes: Bytes of it that it needs on the device.
        disk_nbytes: Bytes for masters and optimizer states on the disk.
    """

    host_nbytes: int
    device_nbytes: int
    needs: Needs
    host_workspace_nbytes: int = 0
    device_workspace_nbytes: int = 0
    disk_nbytes: int = 0

    def on_host(self, chunks: Iterable[ChunkBytes]) -> int:
        """Bytes that the host needs if these chunks are at home there."""
        chunks = list(chunks)
        workspace = self.host_workspace_nbytes if any(chunk.state_nbytes for chunk in chunks) else 0
        return sum(chunk.host_nbytes for chunk in chunks) + workspace

    def on_device(self, chunks: Sequence[ChunkBytes], homed: Collection[int]) -> int:
        """Bytes that the device needs if these chunks, of all, are at home there."""
        own = [chunk for chunk in chunks if chunk.chunk_index in homed]
        workspace = self.device_workspace_nbytes if any(chunk.state_nbytes for chunk in own) else 0
        return sum(chunk.device_nbytes for chunk in own) + workspace + self.highest(chunks, homed)[0]

    def highest(self, chunks: Sequence[ChunkBytes], homed: Collection[int]) -> tuple[int, frozenset[int]]:
        """The bytes of the moment that needs most beside the chunks at home, and the chunks that have copies then."""
        here = {chunk.chunk_index: chunk.param_nbytes for chunk in chunks if chunk.chunk_index in homed}
        found = [(nbytes - sum(here.get(index, 0) for index in indices), indices) for nbytes, indices in self.needs]
        nbytes, indices = max(found, key=operator.itemgetter(0), default=(0, frozenset()))
        return nbytes, indices - here.keys()


def plan_homes(
    chunks: Sequence[ChunkBytes],
    tiers: Tiers,
    share_nbytes: int | None = None,
    gathered_nbytes: int = 0,
    *,
    keeps_off: bool = False,
) -> Homes:
    """Decides the home of every chunk while no step is known.

    If all model data fits its share of the device, all of it lives there and nothing ever moves. Otherwise chunks are
    at home on the host, where the optimizer updates them; if the host is too small, the chunks of ``spill`` are at home
    on the device.

    Args:
        chunks: The bytes of every chunk.
        tiers: What both tiers have.
        share_nbytes: Bytes for all model data on the device; by default all that the device has for chunks.
        gathered_nbytes: Bytes of copies beside them, if chunks at home on the device are gathered to be computed with.
        keeps_off: Whether chunks are at home on the device only if the host has no room for them (debugging).

    Raises:
        BudgetError: If both tiers together cannot hold the model data.
    """
    movable = frozenset(chunk.chunk_index for chunk in chunks if not chunk.on_host)
    total = sum(chunk.device_nbytes for chunk in chunks if not chunk.on_host)
    on_device = total + tiers.device_workspace_nbytes + gathered_nbytes
    on_host = tiers.on_host(chunk for chunk in chunks if chunk.on_host)
    share = tiers.device_nbytes if share_nbytes is None else share_nbytes
    if on_device <= share and on_host <= tiers.host_nbytes and not keeps_off:
        reason = f"all model data ({format_nbytes(total)}) is at home on the device: it fits the device budget"
        return Homes(movable, (), {FIRST_HOMES: reason})

    # That the device has room for the copies of a module was made sure of when the layout was chosen.
    def find(chunks: Sequence[ChunkBytes]) -> frozenset[int] | None:
        return frozenset() if tiers.on_host(chunks) <= tiers.host_nbytes else spill(chunks, tiers)

    homed = find(chunks)
    if homed is None:
        order = [chunk.chunk_index for chunk in reversed(chunks)]
        found = least_on_disk(chunks, order, tiers.disk_nbytes, find)
        if found is None:
            raise BudgetError(too_small(chunks, tiers))
        chunks, homed = found
    disk = frozenset(chunk.chunk_index for chunk in chunks if chunk.is_on_disk) - homed
    need = tiers.on_host(chunk for chunk in chunks if chunk.chunk_index not in homed)
    reason = f"model data ({format_nbytes(need)}) is at home on the host, chunks move to the device"
    if homed:
        reason = f"{len(homed)} of {len(movable)} chunks are at home on the device: the host is full"
    return Homes(homed, tuple(sorted(homed)), {FIRST_HOMES: reason}, disk=disk)


def least_on_disk(
    chunks: Sequence[ChunkBytes], order: Sequence[int], most_nbytes: int, find: Callable[[list[ChunkBytes]], _T | None]
) -> tuple[list[ChunkBytes], _T] | None:
    """Chunks of which as few as will do have their masters and states on the disk.

    Args:
        chunks: The bytes of every chunk.
        order: The chunks, those first that are to go to the disk first: that the next forward needs last.
        most_nbytes: What the disk has room for.
        find: Finds a home for each of these chunks, or returns ``None`` if there is no room.

    Returns:
        The chunks, and what was found; ``None`` if nothing was.
    """
    may_go = [index for index in order if chunks[index].list_nbytes]
    sizes = itertools.accumulate(chunks[index].list_nbytes for index in may_go)
    may_go = may_go[: sum(size <= most_nbytes for size in sizes)]

    def marked(num: int) -> list[ChunkBytes]:
        gone = frozenset(may_go[:num])
        return [dataclasses.replace(chunk, is_on_disk=chunk.chunk_index in gone) for chunk in chunks]

    numbers = range(len(may_go) + 1)
    fewest = marked(bisect.bisect_left(numbers, True, key=lambda num: find(marked(num)) is not None))
    found = find(fewest)
    return None if found is None else (fewest, found)


def spill(chunks: Sequence[ChunkBytes], tiers: Tiers, order: Sequence[int] | None = None) -> frozenset[int] | None:
    """Chooses the chunks that are at home on the device because the host has no room for them.

    They take the fewest bytes of the device that let the host hold the rest; so less than one of them is left free on
    the host. The fewest are found exactly while there are at most ``_MOST_SUMS`` sums of chunk sizes, which are few
    because most chunks are of one size. What is needed beside them is as if all chunks moved; where that is too much,
    those that are needed at the highest moment get a home on the device first.

    Args:
        chunks: The bytes of every chunk.
        tiers: What both tiers have.
        order: Which chunks to prefer of those that are equally large; by default the last ones.

    Returns:
        Chunk indices, or ``None`` if none were found with which both tiers have room.
    """
    by_index = {chunk.chunk_index: chunk for chunk in chunks if not chunk.on_host}
    places = order if order is not None else [*reversed(by_index)]
    movable = [by_index[index] for index in places if index in by_index]
    movable.sort(key=lambda chunk: chunk.is_on_disk)  # these free less of the host
    if _are_too_many(chunks, movable, tiers):
        return None
    updated = frozenset(chunk.chunk_index for chunk in movable if chunk.state_nbytes)
    found = [_spill(chunks, tiers, movable)]
    # A tier on which the optimizer updates no chunk needs no scratch space.
    if tiers.device_workspace_nbytes:
        found.append(_spill(chunks, tiers, [chunk for chunk in movable if chunk.chunk_index not in updated]))
    if tiers.host_workspace_nbytes:
        found.append(_spill(chunks, tiers, movable, updated))
    fitting = [homed for homed in found if homed is not None]
    return min(fitting, key=lambda homed: tiers.on_device(chunks, homed), default=None)


def _are_too_many(chunks: Sequence[ChunkBytes], movable: Sequence[ChunkBytes], tiers: Tiers) -> bool:
    """Whether the bytes that have to leave the host are more than the device has room for, whatever chunks they are."""
    excess = sum(chunk.host_nbytes for chunk in chunks) - tiers.host_nbytes
    need, _ = tiers.highest(chunks, frozenset(chunk.chunk_index for chunk in movable))
    for chunk in sorted(movable, key=lambda chunk: chunk.device_nbytes / max(chunk.host_nbytes, 1)):
        if excess <= 0:
            break
        need += int(chunk.device_nbytes * min(1.0, excess / max(chunk.host_nbytes, 1)))  # as if it could be divided
        excess -= chunk.host_nbytes
    return excess > 0 or need > tiers.device_nbytes


def _spill(
    chunks: Sequence[ChunkBytes], tiers: Tiers, movable: Sequence[ChunkBytes], least: frozenset[int] = frozenset()
) -> frozenset[int] | None:
    """As ``spill``, of the ``movable`` chunks only, and with some of them in any case."""
    forced = set(least)
    tiers = dataclasses.replace(tiers, needs=_highest_of_each(tiers.needs))
    while True:
        rest = [chunk for chunk in movable if chunk.chunk_index not in forced]
        need = tiers.on_host(chunk for chunk in chunks if chunk.chunk_index not in forced)
        # Where the disk takes what is left, the best choice would save less than a chunk there, and takes long.
        choose = _first if any(chunk.is_on_disk for chunk in chunks) else _least
        found = choose(rest, need - tiers.host_nbytes)
        if found is None:
            return None
        homed = frozenset(forced | found)
        if tiers.on_device(chunks, homed) <= tiers.device_nbytes:
            return homed
        _, in_use = tiers.highest(chunks, homed)
        candidates = [chunk for chunk in rest if chunk.chunk_index in in_use]
        if not candidates:
            return None
        forced.add(max(candidates, key=lambda chunk: chunk.param_nbytes / chunk.device_nbytes).chunk_index)


def _highest_of_each(needs: Needs) -> Needs:
    """Of moments at which the same chunks are in use the highest."""
    highest: dict[frozenset[int], int] = {}
    for nbytes, indices in needs:
        highest[indices] = max(nbytes, highest.get(indices, 0))
    return [(nbytes, indices) for indices, nbytes in highest.items()]


def _first(chunks: Sequence[ChunkBytes], excess: int) -> set[int] | None:
    """As ``_least``, the first ones."""
    found = set[int]()
    for chunk in chunks:
        if excess <= 0:
            break
        found.add(chunk.chunk_index)
        excess -= chunk.host_nbytes
    return found if excess <= 0 else None


def _least(chunks: Sequence[ChunkBytes], excess: int) -> set[int] | None:
    """The chunks that take the fewest bytes of the device and so many, or more, of the host; ``None`` if all are less.

    Args:
        chunks: What there is to choose from, those first that are preferred of equally large ones.
        excess: Bytes that have to leave the host.
    """
    if excess <= 0:
        return set()
    by_size: dict[tuple[int, int], list[int]] = {}
    for chunk in chunks:
        by_size.setdefault((chunk.device_nbytes, chunk.host_nbytes), []).append(chunk.chunk_index)
    # For each sum of bytes that leave the host: the fewest bytes on the device, and how many chunks of each size.
    sums: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for (device_nbytes, host_nbytes), indices in by_size.items():
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        for left, (taken, counts) in sums.items():
            for count in range(len(indices) + 1):
                leaving = min(left + count * host_nbytes, excess)
                option = (taken + count * device_nbytes, (*counts, count))
                if leaving not in found or option[0] < found[leaving][0]:
                    found[leaving] = option
                if leaving == excess:
                    break
        sums = _thinned(found, excess)
    if excess not in sums:
        return None
    chosen = zip(by_size.values(), sums[excess][1], strict=True)
    return {index for indices, count in chosen for index in indices[:count]}


def _thinned(sums: dict[int, tuple[int, tuple[int, ...]]], excess: int) -> dict[int, tuple[int, tuple[int, ...]]]:
    """At most so many sums, evenly spread: of those that are close to each other the one that wastes least."""
    if len(sums) <= _MOST_SUMS:
        return sums
    kept: dict[int, int] = {}
    for left in sorted(sums):
        place = left * (_MOST_SUMS - 1) // excess
        if place not in kept or sums[left][0] - left <= sums[kept[place]][0] - kept[place]:
            kept[place] = left
    return {left: sums[left] for left in kept.values()}


def too_small(chunks: Sequence[ChunkBytes], tiers: Tiers, left_nbytes: int = 0) -> str:
    """The message of an error: what is needed, by kind, if no chunk is at home on the device, and what there is.

    Args:
        chunks: The bytes of every chunk.
        tiers: What both tiers have.
        left_nbytes: Bytes of activations on the host, which are none of those that it has for chunks.
    """
    on_host, (on_device, _) = tiers.on_host(chunks) + left_nbytes, tiers.highest(chunks, ())
    kinds = {
        "activations": left_nbytes,
        "parameters": sum(chunk.host_param_nbytes for chunk in chunks),
        "masters and states": sum(chunk.state_nbytes - chunk.disk_nbytes for chunk in chunks),
    }
    kinds["workspace"] = on_host - sum(kinds.values())
    parts = ", ".join(f"{kind} {format_nbytes(nbytes)}" for kind, nbytes in kinds.items() if nbytes)
    return (
        f"host_budget and device_budget are together too small for the model data: {format_nbytes(on_host)} ({parts}), "
        f"for which the host has {format_nbytes(tiers.host_nbytes + left_nbytes)}; the device, where a step needs "
        f"{format_nbytes(on_device)}, has {format_nbytes(tiers.device_nbytes)}, too little for the rest"
        + (f", and the disk {format_nbytes(tiers.disk_nbytes)}" if tiers.disk_nbytes else "")
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Lookups:
    """What one micro-batch does with an embedding.

    Attributes:
        weight_nbytes: Bytes of its weight.
        rows_nbytes: Bytes of the rows that were looked up.
        is_trained: Whether it has a gradient.
    """

    weight_nbytes: int
    rows_nbytes: int
    is_trained: bool

    def at_home_ns(self, machine: Machine) -> int:
        """Nanoseconds if rows are looked up on the host: they cross, and so do their gradients.

        torch makes the gradient of the whole weight, zeros and all, in new memory; the engine reads it for its norm
        and takes it home.
        """
        rows_ns = machine.copy_ns(self.rows_nbytes, to_device=True)
        if not self.is_trained:
            return rows_ns
        reads = 3 if machine.has_accelerator else 2  # else the norm costs the same on either tier
        gradient_ns = machine.host_ns(0, (NEW_MEMORY + reads) * self.weight_nbytes)
        return rows_ns + machine.copy_ns(self.rows_nbytes, to_device=False) + gradient_ns

    def on_device_ns(self, machine: Machine) -> int:
        """Nanoseconds if the weight is brought to the device, and its gradient comes back."""
        weight_ns = machine.copy_ns(self.weight_nbytes, to_device=True)
        if not self.is_trained:
            return weight_ns
        gradient_ns = machine.kernel_ns(0, 3 * self.weight_nbytes, "")
        return weight_ns + machine.copy_ns(self.weight_nbytes, to_device=False) + gradient_ns


def plan_lookups(lookups: Mapping[int, Lookups], machine: Machine, room_nbytes: int) -> tuple[dict[int, str], str]:
    """Decides which embeddings are worth being looked up on the host (PatrickStar section 8.2), by time.

    Args:
        lookups: What a micro-batch does with each embedding, by tensor index.
        machine: Its rates.
        room_nbytes: Bytes of the device that nothing else needs; larger embeddings stay at home.

    Returns:
        Where each is looked up, ``"home"`` or ``"device"``, and why.
    """
    at_home_ns = {index: found.at_home_ns(machine) for index, found in lookups.items()}
    on_device_ns = {index: found.on_device_ns(machine) for index, found in lookups.items()}
    too_large = [index for index, found in lookups.items() if found.weight_nbytes > room_nbytes]
    at_home = {*too_large, *(index for index in lookups if at_home_ns[index] < on_device_ns[index])}
    forced = f" ({len(too_large)} of them because the device has no room)" if too_large else ""
    return (
        {index: "home" if index in at_home else "device" for index in lookups},
        f"cpu_embedding=auto: {len(at_home)} of {len(lookups)} untied embeddings are looked up on the CPU{forced}: by "
        f"the rates of '{machine.name}' a micro-batch takes {sum(at_home_ns.values()) / 1e6:.2f} ms for it on the CPU, "
        f"{sum(on_device_ns.values()) / 1e6:.2f} ms on the device",
    )
