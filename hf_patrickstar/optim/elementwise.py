"""The base of kernels that update elements, or blocks of them, without looking at the rest of their parameter.

[Note: same bits as torch]
torch's element-wise functions compute the last few elements of a tensor, which do not fill a vector register, with
other instructions than the rest, and may round them differently. So a kernel joins and cuts tensors only at multiples
of ``ALIGNMENT_NUMEL`` elements, or of its blocks. Every element is then computed by the same instructions as in an
optimizer that sees the parameters one by one, and the results are the same bit for bit. On the host a tile is computed
in one thread, so how many workers there are, and which of them has a tile, changes nothing.
"""

import abc
import collections
import dataclasses
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hf_patrickstar.errors import EngineError
from hf_patrickstar.layout.packing import ChunkSpec
from hf_patrickstar.layout.specs import GRADIENT, MASTER
from hf_patrickstar.memory.disk import PAGE_NBYTES, Lists, Ring, Tile
from hf_patrickstar.memory.driver import Pending, Work
from hf_patrickstar.memory.streams import NUM_SLOTS, Copy, Later
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.optim.kernel import SAVED_MASTER, WORKSPACE, Factors, Kernel, Means, settings_of
from hf_patrickstar.optim.slots import Slots
from hf_patrickstar.optim.workers import SMALL_NUMEL
from hf_patrickstar.runtime.chunk import Chunk
from hf_patrickstar.runtime.parameter import AT_HOME, GradientPlace, ManagedParameter, round_masters
from hf_patrickstar.runtime.update import Update
from hf_patrickstar.schedule.script import TILE_NUMEL as SLOT_NUMEL
from hf_patrickstar.units import ALIGNMENT_NUMEL, align

SHARE_NUMEL = 2**21
"""The most elements that a worker of the host updates in one call: some milliseconds of work."""
TILE_NUMEL = 2**19
"""The same where an optimizer's own functions are called from Python."""
_DEVICE_TILE_NUMEL = 2**24
"""The same on a device, which only pays for launching kernels; its 16-bit gradients are widened in scratch space."""
_MANY_WORKERS = 16
"""Shares are longer by their own length for each further 16 workers, so that they still end half a millisecond after
each other: a worker that ends one needs the interpreter's lock."""
_LEFT, _LIST = GradientPlace.LEFT, GradientPlace.LIST
_SHORT_SHARES = 8
"""The first and the last shares of a step are that part as long as others; see ``_rooms``."""


@dataclasses.dataclass(slots=True)
class Segment:
    """A range of a chunk whose elements are updated alike.

    Attributes:
        chunk: The chunk.
        payloads: The chunk's payloads at home.
        start: The first element.
        stop: One after the last.
        rule: Which settings hold for it, as a number.
        step: How many steps have updated it.
        place: Where its gradient is.
        fresh: The lists that are used for the first time; see [Note: lists of zeros].
        left: The gradient of its parameter, flat, if that is in no list; see [Note: rest].
        first: The first element of the parameter.
        offset: The element of the chunk with which payloads begin.
    """

    chunk: Chunk
    payloads: Mapping[str, torch.Tensor]
    start: int
    stop: int
    rule: int
    step: int
    place: GradientPlace
    fresh: Sequence[str] = ()
    left: torch.Tensor | None = None
    first: int = 0
    offset: int = 0

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return self.stop - self.start

    def part(self, name: str) -> torch.Tensor:
        """The range of a list, by the list's name."""
        block_numel = self.chunk.spec.types.of_list(name)[1] if name != "param" else 1
        start = (self.start - self.offset) // block_numel
        return self.payloads[name].narrow(0, start, -(-(self.stop - self.offset) // block_numel) - start)

    @property
    def gradient_name(self) -> str:
        """The list that has its gradient, if any has."""
        return GRADIENT if self.place is _LIST else "param"

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient of the range."""
        if self.left is not None:
            return self.left.narrow(0, self.start - self.first, self.stop - self.start)
        return self.part(GRADIENT if self.place is _LIST else "param")


@dataclasses.dataclass(slots=True)
class _Part:
    """Chunks that are updated together, with the ranges and the parameters that are updated of them."""

    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    segments: list[Segment] = dataclasses.field(default_factory=list)
    indices: list[int] = dataclasses.field(default_factory=list)
    numel: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """How ranges that have the same home are updated, as settings were when the optimizer's step began.

    Attributes:
        settings: The settings, by the numbers of rules.
        factor: Gradients are multiplied with it, unless it is ``None``.
        keeps: Whether gradients in the accumulation list stay there, multiplied.
        numbers: What a script needs that updates many tiles in one call; ``None`` if a kernel has no such script.
    """

    settings: Sequence[Mapping[str, Any]]
    factor: torch.Tensor | None
    keeps: bool
    numbers: Any


class ElementwiseKernel(Kernel):
    """Updates the lists of chunks range by range.

    On the host each worker updates a share of the elements; see [Note: same bits as torch]. The optimizers have no
    method beside ``step`` that uses parameters, so ``lent`` does nothing.

    Args:
        optimizer: See ``Kernel``. Every step reads its ``param_groups``.
        means: See ``Kernel``.
    """

    splits_tensors = True
    updates_at_once = False
    runs_beside = True
    can_stream = True
    cut_numel = ALIGNMENT_NUMEL
    """Ranges are cut at multiples of so many elements."""
    num_states = 2
    """Lists beside the master, scales left out."""
    num_narrow_states = 0
    """How many of its states are in fewer bits than the master, so that a device needs room for wide copies of them."""

    def __init__(self, optimizer: torch.optim.Optimizer, means: Means) -> None:
        super().__init__(optimizer, means)
        self._has_lanes = means.has_lanes
        self._workers = means.workers
        self._steps: dict[int, int | torch.Tensor] = {}  # tensors once somebody has seen them, and may write to them
        self._steps_lock = threading.Lock()

    def workspace_numel(self, tier: Tier, capacity_numel: int, *, widens: bool = True) -> int:
        """See ``Kernel``. A device widens a tile at a time; the host does so in its caches."""
        num = (int(widens) + self.num_narrow_states) if tier is Tier.DEVICE and self._has_lanes else 0
        return min(_DEVICE_TILE_NUMEL, num * align(capacity_numel, self.cut_numel))

    @functools.cached_property
    def _slots(self) -> Slots:
        """Made late: kernels say which lists they have when they are made."""
        return Slots(self._pool, self.list_names)

    def slots_nbytes(self, specs: Iterable[ChunkSpec], tile_part: int) -> int:
        """See ``Kernel``."""
        return self._slots.nbytes(specs, tile_part)

    def ring_nbytes(self, specs: Iterable[ChunkSpec]) -> int:
        """See ``Kernel``."""
        sizes = [0]
        for spec in specs:
            numel, names = min(spec.chunk_numel, SLOT_NUMEL), filter(spec.types.has_list, self.list_names)
            sizes.append(sum(align(spec.types.list_nbytes(name, numel), PAGE_NBYTES) for name in names))
        return Ring.nbytes_of(max(sizes))

    def reserve(self, chunks: Sequence[Chunk], *also: Tier, widens: bool = True) -> None:
        """See ``Kernel``. Chunks that are updated over the bus need slots, and those on the disk the ring."""
        super().reserve(chunks, *also, widens=widens)
        if (disk := self._pool.disk) is not None and Tier.HOST in {*also, *(chunk.home for chunk in chunks)}:
            need = self.ring_nbytes(chunk.spec for chunk in chunks)  # any of them may go there
            if need > disk.ring.nbytes:
                memory = self._pool.allocate(Tier.HOST, need, torch.uint8, WORKSPACE, pinned=True)
                self._release_ring()
                disk.ring.lend(memory)
        if any(chunk.is_streamed for chunk in chunks):
            tile_part = min(chunk.tile_part for chunk in chunks)
            self._slots.reserve([chunk.spec for chunk in chunks], tile_part, WORKSPACE)
        else:
            self._slots.release(WORKSPACE)

    def release(self) -> set[Tier]:
        """See ``Kernel``."""
        self._slots.release(WORKSPACE)
        self._release_ring()
        return super().release()

    def _release_ring(self) -> None:
        if self._pool.disk is not None and (buffer := self._pool.disk.ring.close()) is not None:
            self._pool.release(Tier.HOST, buffer, WORKSPACE)

    def prepare(
        self, chunks: Sequence[Chunk], groups: Mapping[int, int], factors: Factors, *, keeps: bool
    ) -> list[Update]:
        """See ``Kernel``. Updates on the host, which computes beside the device, come first."""
        rules, settings = self._rules(chunks, groups)
        # By where states are, and whether they cross the bus. The disk begins first, since it takes longest.
        host, disk, device = Tier.HOST, Tier.DISK, Tier.DEVICE
        lanes = (host, True), (disk, True), (disk, False), (host, False), (device, False)
        places = {lane: list[_Part]() for lane in lanes}
        # Whoever needs a chunk waits for its part alone; on a device large calls are the fastest.
        most = dict.fromkeys(lanes, 0)
        most[host, False], most[device, False] = SHARE_NUMEL, sys.maxsize if self._has_lanes else SHARE_NUMEL
        steps = self._steps
        for chunk in chunks:
            lane = disk if chunk.home_lists.regions else chunk.home, chunk.is_streamed
            fresh, parts, last = tuple(chunk.home_lists.fresh), places[lane], None
            if lane[0] is disk:
                chunk.home_lists.put_away(self.list_names)
                payloads = chunk.held
            else:  # ``payloads`` takes lists out of those that are fresh
                payloads = chunk.payloads if fresh else {"param": chunk.home_param, **chunk.home_lists}
            if not parts or parts[-1].numel >= most[lane]:
                parts.append(_Part())
            part = parts[-1]
            part.chunks.append(chunk)
            for tensor in chunk.owned:  # the loop calls nothing of this package: a step comes by every parameter
                index, place = tensor.spec.index, tensor.gradient
                if index not in groups or (place is not _LEFT and place not in AT_HOME):
                    continue
                part.indices.append(index)
                rule, step, start = rules[index], int(steps.get(index, 0)), tensor.home_offset_numel
                stop = start + tensor.part[1] - tensor.part[0]
                part.numel += stop - start
                # Places begin at multiples of the alignment (``layout/packing.py``).
                if last is not None and (last.stop, last.rule, last.step, last.place) == (start, rule, step, place):
                    last.stop = stop
                elif stop > start:
                    last = Segment(chunk, payloads, start, stop, rule, step, place, fresh)
                    part.segments.append(last)
                    if place is _LEFT and tensor.kept is not None:
                        last.left, last.first, last = tensor.kept.view(-1), start, None
        updates = []
        for lane, parts in places.items():
            if not parts:
                continue
            segments, first = [segment for part in parts for segment in part.segments], parts[0].chunks[0]
            factor = factors.get(first.device.torch_device if first.is_streamed else first.home_device)
            job = Job(settings, None if factor is None else factor.clone(), keeps, self._numbers(segments, settings))
            done, left = 0, sum([part.numel for part in parts])
            tiled = [[*self._tiles(job, part.segments)] if lane[0] is disk else [] for part in parts]
            ahead = itertools.chain.from_iterable(tiled)
            for part, tiles in zip(parts, tiled, strict=True):
                run: Work = functools.partial(self._run, job, part.segments, done, left)
                if lane[0] is disk and self._pool.disk is not None:
                    is_last = part is parts[-1]
                    run = functools.partial(self._pool.disk.ring.submit, tiles, ahead if is_last else ())
                take_back = functools.partial(self._count, part.indices, -1)
                restore, later = functools.partial(_round, part.segments), None
                if lane == (host, True) and part.segments:
                    (chunk,) = part.chunks
                    rooms = itertools.repeat(SLOT_NUMEL // chunk.tile_part)
                    shares = collections.deque(_cut(part.segments, rooms, self.cut_numel))
                    fills = part.numel == sum([tensor.own_numel for tensor in chunk.owned])
                    lock, work = chunk.device.streams.slots_lock, functools.partial(self._stream, job, chunk, shares)
                    later = Later(work, lock, fills=fills)
                updates.append(Update(part.chunks, run, take_back, restore, later))
                done, left = done + part.numel, left - part.numel
        for part in itertools.chain(*places.values()):  # when nothing can fail any more
            self._count(part.indices, 1)
        return updates

    def _rules(
        self, chunks: Sequence[Chunk], groups: Mapping[int, int]
    ) -> tuple[Mapping[int, int], Sequence[Mapping[str, Any]]]:
        """The rule of each tensor index, as a number, and the settings of each rule; by default, those of its group."""
        return groups, [settings_of(group) for group in self._optimizer.param_groups]

    def _numbers(self, segments: Sequence[Segment], settings: Sequence[Mapping[str, Any]]) -> Any:
        """See ``Job``."""
        return None

    def _count(self, indices: Iterable[int], num: int) -> None:
        """Adds to the numbers of steps of parameters; an update that fails in a thread takes its own back."""
        with self._steps_lock:
            for index in indices:
                before = self._steps.get(index, 0)
                self._steps[index] = before.add_(num) if isinstance(before, torch.Tensor) else before + num

    @torch.no_grad()
    def _run(self, job: Job, segments: Sequence[Segment], done: int, left: int) -> Pending | None:
        """Updates ranges, or has workers do so.

        Args:
            job: How.
            segments: The ranges; all have the same home.
            done: Elements that the step updates there before these.
            left: Elements that it updates there from these on.
        """
        if not segments:
            return None
        param, update = segments[0].payloads["param"], functools.partial(self._update_share, job)
        if self._is_on_device(segments[0].chunk):
            scratch = self._scratch.get(Tier.DEVICE)
            room = _DEVICE_TILE_NUMEL if scratch is None else scratch.numel() // (1 + self.num_narrow_states)
            most = room // self.cut_numel * self.cut_numel
        else:
            most = max(TILE_NUMEL if job.numbers is None else SHARE_NUMEL, self.cut_numel)
            numel = sum([segment.stop - segment.start for segment in segments])
            if self._workers.suits(param, numel):
                most *= max(self._workers.num // _MANY_WORKERS, 1)
                least, most = max(most // _SHORT_SHARES, SMALL_NUMEL), -(-numel // -(-numel // most))
                rooms = _rooms(done, left, 2 * self._workers.num, least, most)
                return self._workers.submit(update, _cut(segments, rooms, self.cut_numel))
        for share in _cut(segments, itertools.repeat(most), self.cut_numel):
            update(share)
        return None

    def _tiles(self, job: Job, segments: Sequence[Segment]) -> Iterator[tuple[Tile, Callable[[Lists], None]]]:
        """Ranges of a chunk whose lists are on the disk, tile by tile, and what updates them in the ring."""
        by_tile = collections.defaultdict[int, list[Segment]](list)
        for segment in segments:
            for offset in range(segment.start // SLOT_NUMEL * SLOT_NUMEL, segment.stop, SLOT_NUMEL):
                start, stop = max(segment.start, offset), min(segment.stop, offset + SLOT_NUMEL)
                by_tile[offset].append(dataclasses.replace(segment, start=start, stop=stop, fresh=(), offset=offset))
        for offset, share in by_tile.items():
            chunk, fresh = segments[0].chunk, tuple(segments[0].fresh)
            types, regions = chunk.spec.types, chunk.home_lists.regions
            lists = {name: (region, types.of_list(name)[1]) for name, region in regions.items()}
            tile = Tile(lists, offset, min(offset + SLOT_NUMEL, chunk.spec.chunk_numel), fresh)
            yield tile, functools.partial(self._update_tile, job, share)

    def _update_tile(self, job: Job, share: Sequence[Segment], lists: Lists) -> None:
        """Has workers, or the device, update ranges whose lists are in a buffer of the ring."""
        payloads = dict(share[0].payloads)
        for name in [name for name in ("param", GRADIENT) if name in payloads]:
            payloads[name] = payloads[name][share[0].offset :]
        here = [dataclasses.replace(segment, payloads={**payloads, **lists}) for segment in share]
        chunk = share[0].chunk
        if chunk.is_streamed:
            rooms = itertools.repeat(SLOT_NUMEL // chunk.tile_part)
            with chunk.device.streams.slots_lock:
                ticket = self._stream(job, chunk, collections.deque(_cut(here, rooms, self.cut_numel)), None)
            if ticket is not None:
                ticket.wait()
            return
        rooms = itertools.repeat(max(TILE_NUMEL if job.numbers is None else SHARE_NUMEL, self.cut_numel))
        update, shares = functools.partial(self._update_share, job), _cut(here, rooms, self.cut_numel)
        if self._workers.suits(payloads["param"], sum(segment.numel for segment in here)):
            self._workers.submit(update, shares, first=True).wait()
            return
        for each in shares:
            update(each)

    def _is_on_device(self, chunk: Chunk) -> bool:
        return (chunk.home is Tier.DEVICE or chunk.is_streamed) and self._has_lanes

    @torch.no_grad()
    def _stream(
        self, job: Job, chunk: Chunk, shares: "collections.deque[list[Segment]]", copy: torch.Tensor | None
    ) -> Copy | None:
        """Updates a chunk on the device; see [Note: updates over the bus].

        Args:
            job: How.
            chunk: The chunk.
            shares: What is left; each fits a slot. A share is taken out when it is on its way home.
            copy: Gets the new values, too: the chunk's copy on the device, or ``None``.

        Returns:
            The ticket of what has begun.
        """
        streams, counts, types = chunk.device.streams, chunk.device.counts, chunk.spec.types
        unit = types.alignment_numel  # as in the chunk, so that a share takes no more than its chunk has
        names, to_device, to_host = [*filter(types.has_list, self.list_names)], 0, 0
        # Gradients on their way home. Updates in the ring begin when they are there; later copies wait for the update.
        for before in () if chunk.is_on_disk else list(chunk.tickets.values()):
            before.join()
        try:
            for number in itertools.cycle(range(NUM_SLOTS)):
                if not shares:
                    break
                share, here, start = shares[0], list[Segment](), 0
                with streams.in_slot(number) as cross:
                    lists = self._slots.lists(number, types, sum(align(item.numel, unit) for item in share))
                    for segment in share:
                        stop = start + segment.numel
                        there = dataclasses.replace(segment, payloads=lists, start=start, stop=stop, place=_LIST)
                        here.append(dataclasses.replace(there, offset=0))
                        for name in [name for name in (*names, segment.gradient_name) if name not in segment.fresh]:
                            cross(segment.part(name), here[-1].part(name))
                            to_device += segment.part(name).nbytes
                        if segment.place is not _LIST:  # it becomes wide
                            here[-1].part(GRADIENT).copy_(here[-1].part("param"))
                        start = align(stop, unit)
                    self._update_share(job, share, here)
                    shares.popleft()  # from now on what is at home changes: it must not be done again
                    for segment, there in zip(share, here, strict=True):
                        for name in dict.fromkeys([*names, "param", segment.gradient_name if job.keeps else "param"]):
                            cross(there.part(name), segment.part(name))
                            to_host += segment.part(name).nbytes
                        if copy is not None:
                            copy.narrow(0, segment.start, segment.numel).copy_(there.part("param"))
        finally:
            if not chunk.is_on_disk:
                counts.host_to_device_nbytes += to_device
                counts.device_to_host_nbytes += to_host
            ticket = streams.join_slots(to_device, to_host)
            if ticket is not None:
                self._slots.keep(ticket, job)
                if shares:  # it has failed: the memory of the copy, or of the ring, may be used for something else
                    ticket.wait() if chunk.is_on_disk else ticket.join()
        return ticket

    def _update_share(self, job: Job, share: Sequence[Segment], here: Sequence[Segment] | None = None) -> None:
        """Updates ranges in the thread of one worker, or where they were brought on the device."""
        here = share if here is None else here
        try:
            if fresh := [segment.part(name) for segment in here for name in segment.fresh]:
                torch._foreach_zero_(fresh)  # the system gives huge pages here, and small ones to who reads first
            self._update(job, here)
        except Exception as error:
            error.add_note(f"while the optimizer updated {_named(share)}")
            raise

    @abc.abstractmethod
    def _update(self, job: Job, share: Sequence[Segment]) -> None:
        """Updates ranges that have the same home."""

    def _widened(self, chunk: Chunk, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients or states in the type of the master: copies of those that are narrow."""
        scratch, dtype = self._scratch.get(chunk.home), chunk.state_dtype
        narrow = [tensor for tensor in tensors if tensor.dtype != dtype]
        if not narrow or scratch is None or scratch.dtype is not dtype:
            return [tensor.to(dtype) for tensor in tensors]
        numels = [tensor.numel() for tensor in narrow]
        copies = scratch[: sum(numels)].split(numels)
        torch._foreach_copy_(copies, narrow)
        made = iter(copies)
        return [tensor if tensor.dtype == dtype else next(made) for tensor in tensors]

    # States

    def check_own_state(self, tensor: ManagedParameter, state: Mapping[str, Any]) -> None:
        """See ``Kernel``."""
        super().check_own_state(tensor, state)
        if state.keys() - {SAVED_MASTER}:
            step = state.get("step")
            is_count = isinstance(step, (int, float, torch.Tensor)) and 0 <= float(step) < float("inf")
            if not is_count or "max_exp_avg_sq" in state:
                what = "'max_exp_avg_sq' of amsgrad" if is_count else f"the step {step!r}"
                raise ValueError(
                    f"optimizer state of parameter '{tensor.spec.name}' has {what}: it was saved by another optimizer, "
                    "or with other options"
                )

    def load_own_state(self, tensor: ManagedParameter, state: dict[str, Any]) -> None:
        """See ``Kernel``."""
        if state:
            self._steps[tensor.spec.index] = int(state["step"])
            return
        self._steps.pop(tensor.spec.index, None)
        lists = tensor.chunk.home_lists
        if any(name in lists.held and name not in lists.fresh for name in self.list_names[1:]):  # else they are zeros
            for place in self.state_places(tensor).values():
                place.zero_()


def _round(segments: Iterable[Segment]) -> None:
    """Writes values from their masters; those that the drive does not give are NaN, so that nobody trains on."""
    for segment in segments:
        try:
            if MASTER in segment.chunk.home_lists.regions:
                segment.chunk.home_lists[MASTER]  # which reads it
            round_masters([segment.part(MASTER)], [segment.part("param")])
        except EngineError:
            segment.part("param").fill_(float("nan"))


def _rooms(done: int, left: int, num: int, least: int, most: int) -> Iterator[int]:
    """The sizes of shares, between ``least`` and ``most``.

    They are short at the beginning of a step, so that the first chunk is there soon, and at its end, so that all end
    together: a share has no more than one of ``num`` parts of the elements before it, or of those from it on.
    """
    while True:
        room = max(min(done // num, left // num, most), least)
        yield room
        done, left = done + room, left - room


def _cut(segments: Iterable[Segment], rooms: Iterator[int], cut_numel: int) -> Iterator[list[Segment]]:
    """Cuts ranges into shares.

    Args:
        segments: The ranges.
        rooms: The elements of each share, which are rounded up to multiples of ``cut_numel``.
        cut_numel: Where ranges may be cut.
    """
    share: list[Segment] = []
    room = 0
    for segment in segments:
        start = segment.start
        while start < segment.stop:
            if room <= 0:
                if share:
                    yield share
                share, room = [], -(-next(rooms) // cut_numel) * cut_numel
            stop = min(start + room, segment.stop)
            is_whole = (start, stop) == (segment.start, segment.stop)
            share.append(segment if is_whole else dataclasses.replace(segment, start=start, stop=stop))
            room -= -((start - stop) // cut_numel) * cut_numel  # what is left is a multiple, too
            start = stop
    if share:
        yield share


def _named(share: Sequence[Segment]) -> str:
    """The first and the last parameter of a share, for errors."""
    ends = []
    for segment in (share[0], share[-1]):
        inside = [
            tensor.spec.name
            for tensor in segment.chunk.owned
            if tensor.home_offset_numel < segment.stop and segment.start < tensor.home_offset_numel + tensor.own_numel
        ]
        ends.append([f"'{name}' (chunk {segment.chunk.spec.index})" for name in inside])
    return " to ".join(dict.fromkeys((ends[0][0], ends[1][-1])))
