"""A chunk: where it is, and how it comes, leaves and moves its home.

A copy of a chunk on the device is never dirty, so dropping one copies nothing. A chunk that is computed with where it
is at home (a static one) has no copy. What moves when is decided elsewhere.

[Note: groups at run time]
With several processes a ``Chunk`` is a communication group (PatrickStar section 7). Modules compute with one buffer,
the copy, that holds the chunks of all ranks; the lists at home hold only this rank's chunk. So a tensor has two places:
one in the copy, on every rank, and one at home, on its owner. With one process both are the same.

[Note: an update under way]
``optimizer.step()`` settles what it does and returns; workers of the host then update chunks, in the order of the next
forward, with several of them under way at a time. So nobody may meet values of before: who asks a chunk for a list at
home waits for the update of that chunk, whatever the list is wanted for. The copies to the device name the update as
what they come after, and the kernel that updates has the payloads from ``payloads``.

[Note: updates over the bus]
A chunk that is ``is_streamed`` is at home on the host, and updated on the device: a few million elements at a time,
states, masters and gradients cross to the device, are updated there and cross back (``ElementwiseKernel._stream``).
``step()`` only prepares that, when the norm of all gradients is known. It begins when the chunk is loaded, in the order
and in the memory that the plan has for loads, and the copy gets the new values; or when anybody asks for a list at home
(``Later``). Nothing at home changes before a tile has been computed, so what has failed can be begun again.

[Note: lists of zeros]
Optimizer states are zeros until somebody writes them. Until somebody asks for it, a list of states is apart from the
others (``Lists.fresh``). So nobody can have written to it, and a chunk that moves its home before its first update
needs no copy of it. The system gives memory when it is touched for the first time: memory of states is taken when they
are needed, where they are needed.

A list on the disk is apart, too, while it is put away: nobody has asked for it since the last update (``Lists.regions``
and [Note: states on the disk]).
"""

import bisect
import contextlib
import dataclasses
import threading
import time
from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled

from hf_patrickstar.common.interrupts import held_back
from hf_patrickstar.counts import Counts
from hf_patrickstar.dist.sharing import Sharing
from hf_patrickstar.errors import BudgetError, DeviceMemoryError
from hf_patrickstar.layout.packing import ChunkSpec
from hf_patrickstar.layout.specs import GRADIENT
from hf_patrickstar.memory.disk import Disk, Region
from hf_patrickstar.memory.lanes import Ticket
from hf_patrickstar.memory.meters import Meter
from hf_patrickstar.memory.operators import as_it_is
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.streams import Copy, Later, Streams
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.parameter import ManagedParameter, ValuePlace
from hf_patrickstar.runtime.ranges import named
from hf_patrickstar.schedule.clock import Lane

GRADIENTS = "gradients"
STAGING = "staging"
"""Owners of buffers on the device: gradients of groups until they are reduced, and scratch space to reduce them in."""
_use_count = torch._C._storage_Use_Count
_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def torch_dtype(name: str) -> torch.dtype:
    """The torch type with this name."""
    return getattr(torch, name)


class Lists(dict[str, torch.Tensor]):
    """The payloads of a chunk at home but ``param``, by the name of the list; see [Note: lists of zeros].

    Attributes:
        fresh: Those that nobody has asked for, which are zeros. ``lists[name]`` finds them, too, and takes them out of
            here.
        regions: Those that are on the disk. ``lists[name]`` opens one that is put away.
        lock: Held while that happens, and while all get other memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fresh: dict[str, torch.Tensor] = {}
        self.regions: dict[str, Region] = {}
        self.lock = threading.Lock()

    def __missing__(self, name: str) -> torch.Tensor:
        with self.lock:
            if name not in self:
                self[name] = self.fresh[name] if name in self.fresh else self.regions[name].open()
                self.fresh.pop(name, None)
            return self[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The list, or the default if there is none."""
        return self[name] if name in self or name in self.fresh or name in self.regions else default

    @property
    def held(self) -> dict[str, torch.Tensor]:
        """All of them, for their sizes and places: nobody may read values here, or write them."""
        # In this order: another thread may take one out meanwhile.
        return {**{name: region.tensor for name, region in self.regions.items()}, **self.fresh, **self}

    def put_away(self, names: Iterable[str]) -> None:
        """Puts those away that are on the disk, but for those that somebody looks into."""
        with self.lock:
            for name in [name for name in names if name in self.regions]:
                if name in self.fresh or (name in self and not is_looked_into(self[name])):
                    self.fresh.pop(name, None)
                    self.pop(name, None)
                    self.regions[name].put_away()

    def clear(self) -> None:
        """Forgets all of them."""
        super().clear()
        self.fresh.clear()
        self.regions.clear()


def is_looked_into(payload: torch.Tensor) -> bool:
    """Whether any tensor beside a list itself has its memory."""
    # The list itself is one user of its storage, and the object that is made here to ask for it another.
    return type(payload) is torch.Tensor and _use_count(payload.untyped_storage()._cdata) > 2


@dataclasses.dataclass(slots=True, eq=False)
class Chunk:
    """One chunk over all lists; see [Note: an update under way].

    ``param`` is the payload at home. ``compute`` is the payload on the compute tier, which modules compute with, or
    ``None``; for a static chunk it is ``param`` itself. See [Note: groups at run time].

    Args:
        spec: The chunk as numbers.
        home: The tier where its lists live.
        rank: Which of the group's chunks this process owns.
    """

    spec: ChunkSpec
    home: Tier
    rank: int = 0
    # What follows from the spec and the home.
    dtype: torch.dtype = dataclasses.field(init=False)  # of ``param``
    state_dtype: torch.dtype = dataclasses.field(init=False)  # of the master, and of gradients that accumulate
    is_mixed: bool = False  # whether its values are rounded masters, and gradients are widened for the optimizer
    is_group: bool = False  # whether its copy has the chunks of several ranks; it stays true when the home changes
    is_static: bool = False  # whether modules compute with its payload at home, so that it never moves
    is_updated: bool = False  # whether an optimizer changes its tensors
    copy_nbytes: int = 0  # bytes of the buffer that modules compute with
    tensors: list[ManagedParameter] = dataclasses.field(default_factory=list)
    owned: list[ManagedParameter] = dataclasses.field(default_factory=list)  # those that this rank has any elements of
    _offsets: list[int] = dataclasses.field(default_factory=list)
    # The payloads at home.
    home_param: torch.Tensor = dataclasses.field(init=False)  # read it after ``update``, as ``param`` does
    is_pinned: bool | None = None  # whether ``param`` is page-locked, once that was asked
    home_lists: Lists = dataclasses.field(default_factory=Lists)
    tickets: dict[Lane, Copy] = dataclasses.field(default_factory=dict)  # out of and into them, the last of a lane
    update: Copy | None = None  # of the optimizer, which may still write to them
    is_streamed: bool = False  # whether it is updated on the device though it is at home on the host
    tile_part: int = 1  # how many times smaller its tiles are then; see ``Homes``
    reader: threading.Event | None = None  # of a checkpoint that is being written from the fp32 lists
    # The payload that modules compute with.
    compute: torch.Tensor | None = None
    storage: torch.UntypedStorage | None = None
    base_use_count: int = 0  # users of the storage that are known
    num_views: int = 0  # places of its parameters that are kept; see ``view_of``
    arrival: Ticket | None = None  # of a copy that was started ahead
    last_access: int = 0
    num_computing: int = 0  # parameters that modules compute with
    num_watched: int = 0  # parameters whose copy may have been written to without a trace; see ``Writes.watch``
    device: "Device" = dataclasses.field(init=False)  # the device of its engine

    def __post_init__(self) -> None:
        types = self.spec.types
        self.dtype, self.state_dtype = torch_dtype(types.param), torch_dtype(types.state)
        self.is_mixed, self.is_group = types.is_mixed, self.spec.world_size > 1
        self.copy_nbytes = self.spec.capacity_numel * self.dtype.itemsize
        self.is_updated = self.spec.is_updated
        self.live_on(self.home)

    def add(self, tensor: ManagedParameter) -> None:
        """Adds a tensor; tensors come in offset order."""
        tensor.chunk = self
        numel = tensor.spec.numel
        tensor.parts = self.spec.parts_of(numel, tensor.offset_numel)
        begin, end = tensor.part = tensor.parts[self.rank]
        tensor.own_numel = end - begin
        tensor.is_split = sum(stop > start for start, stop in tensor.parts) > 1
        tensor.is_owned = tensor.own_numel > 0 or (numel == 0 and self.rank == 0)
        tensor.home_offset_numel = max(tensor.offset_numel - self.rank * self.spec.chunk_numel, 0)
        self.tensors.append(tensor)
        if tensor.is_owned:
            self.owned.append(tensor)
        self._offsets.append(tensor.offset_numel)

    def remove(self, tensor: ManagedParameter) -> None:
        """Removes a tensor; its place stays unused."""
        place = self.tensors.index(tensor)
        del self.tensors[place], self._offsets[place]
        self._drop_view(tensor)
        if tensor in self.owned:
            self.owned.remove(tensor)

    def tensor_at(self, offset_numel: int) -> ManagedParameter:
        """The tensor that holds the element at an offset."""
        return self.tensors[max(bisect.bisect_right(self._offsets, offset_numel) - 1, 0)]

    def live_on(self, home: Tier) -> None:
        """Takes note of the tier where its lists live from now on."""
        self.home, self.is_streamed = home, self.is_streamed and home is Tier.HOST
        self.is_static = home is Tier.DEVICE and not self.is_group

    # The lists at home

    @property
    def param(self) -> torch.Tensor:
        """The ``param`` payload at home."""
        if self.update is not None:
            self.wait_for_update()
        return self.home_param

    @param.setter
    def param(self, payload: torch.Tensor) -> None:
        """Gives the chunk another one."""
        self.home_param, self.is_pinned = payload, None

    @property
    def lists(self) -> Lists:
        """The other payloads at home, by the name of the list; see [Note: lists of zeros]."""
        if self.update is not None:
            self.wait_for_update()
        return self.home_lists

    @property
    def payloads(self) -> dict[str, torch.Tensor]:
        """All payloads at home; the caller comes after the update itself."""
        lists = self.home_lists
        for name in [*lists.fresh]:
            lists[name]  # which fills it
        return {"param": self.home_param, **lists}

    @property
    def held(self) -> dict[str, torch.Tensor]:
        """All payloads at home, for their sizes and places; see ``Lists.held``."""
        return {"param": self.home_param, **self.home_lists.held}

    @property
    def home_device(self) -> torch.device:
        """The torch device of the payloads at home."""
        return self.home_param.device

    @property
    def state_nbytes(self) -> int:
        """Bytes of all lists but ``param``."""
        return sum(payload.nbytes for payload in self.home_lists.held.values())

    def has_list(self, name: str) -> bool:
        """Whether the chunk has a list of a name."""
        lists = self.home_lists
        return name in lists or name in lists.fresh or name in lists.regions

    @property
    def is_on_disk(self) -> bool:
        """Whether its masters and states are on the disk."""
        return bool(self.home_lists.regions)

    def is_lent(self, names: Iterable[str]) -> bool:
        """Whether somebody looks into one of these lists at home, and so sees what is there at any moment.

        Args:
            names: The lists, ``param`` among them or not.
        """
        update = self.update
        if update is not None and not update.is_done:
            return False  # to get at them is to wait for it; but its own views of them count as users
        for name in names:
            payload = self.home_param if name == "param" else dict.get(self.home_lists, name)
            if payload is not None and is_looked_into(payload):
                return True
        return False

    def wait_for_update(self) -> None:
        """Waits until the optimizer has written the home; the first who waits gets the error of an update."""
        update = self.update
        if update is not None:
            update.wait()
            if self.update is update:  # another thread may have noted a later one meanwhile
                self.update = None

    @property
    def is_retired(self) -> bool:
        """Whether nothing is in it any more."""
        return not self.spec.capacity_numel

    @property
    def param_nbytes(self) -> int:
        """Bytes of its ``param`` payload at home."""
        return self.home_param.numel() * self.dtype.itemsize

    def own_slice(self, payload: torch.Tensor) -> torch.Tensor:
        """This rank's chunk in the buffer that modules compute with, or in a buffer of the same layout."""
        numel = self.spec.chunk_numel
        return payload[self.rank * numel : (self.rank + 1) * numel]

    def view_of(self, tensor: ManagedParameter) -> torch.Tensor:
        """The place of a parameter in the payload to compute with; that of a static chunk is made once for all uses.

        It is for the engine alone: ``is_aliased`` does not count views that are kept.
        """
        assert self.compute is not None
        view = tensor.view_copy(self.compute)
        if self.is_static and type(view) is type(self.compute):  # else it is of a mode that is in force just now
            tensor.view_on_device = view
            self.num_views += 1
        return view

    def rest(self) -> None:
        """Lets the parameters of a static chunk keep their values from now on; see [Note: rest]."""
        for tensor in self.tensors:
            view = self.view_of(tensor) if tensor.view_on_device is None else tensor.view_on_device
            if tensor.released is tensor.placeholder:
                tensor.release_as(view)
                self.num_views += 1

    def renew(self) -> None:
        """Gives the values of a static chunk other memory: what a graph has of them stays as it is.

        Raises:
            BudgetError: If there is no room.
        """
        new = self.device.pool.allocate(Tier.DEVICE, self.spec.chunk_numel, self.dtype, "param")
        old, storage = self.home_param, self.storage
        assert storage is not None
        self.device.pool.release(Tier.DEVICE, old, "param", keep=False)
        del self.device.by_storage[storage._cdata]
        self.param = new.copy_(old)
        self.compute_with(new)
        for tensor in self.tensors:
            if tensor.view_on_device is not None:
                self.num_views -= 1
                tensor.release_as(self.view_of(tensor))

    def wake(self, tensor: ManagedParameter) -> None:
        """Ends that one of its parameters keeps its value; from now on it answers."""
        if tensor.released is not tensor.placeholder:
            self.num_views -= 1
            self.device.has_woken = True
            tensor.release_as(tensor.placeholder)
            if tensor.place is ValuePlace.HOME:
                tensor.answer()
            # A graph that keeps the parameter itself would compute with the placeholder: to torch it has changed.
            torch.autograd.graph.increment_version(tensor.parameter)

    def _drop_view(self, tensor: ManagedParameter) -> None:
        self.wake(tensor)
        self.num_views -= tensor.view_on_device is not None
        tensor.view_on_device = None

    @property
    def is_aliased(self) -> bool:
        """Whether any tensor beyond those known still looks into the compute payload.

        Neither autograd nor a recomputed segment reports when it is done with an operand, so the reference count of the
        storage decides.
        """
        if self.storage is None:
            return False
        return _use_count(self.storage._cdata) > self.base_use_count + self.num_views

    @property
    def is_in_use(self) -> bool:
        """Whether it cannot leave: a module computes with it, a tensor aliases it, or it may have been written to."""
        if self.num_computing or self.num_watched:
            return True
        storage = self.storage  # as ``is_aliased``: a recorded visit asks every chunk
        return storage is not None and _use_count(storage._cdata) > self.base_use_count + self.num_views

    @property
    def can_rehome(self) -> bool:
        """Whether its home can move now; with several processes no module computes with the payload at home."""
        return self.is_group or not self.is_in_use

    def note(self, ticket: Copy | None) -> None:
        """Remembers work on the home that may still be under way."""
        if ticket is not None:
            self.tickets[ticket.lane] = ticket  # copies of a lane run in order: the last one is enough

    @property
    def under_way(self) -> tuple[Copy, ...]:
        """What may still be under way in the ``param`` list: the next copy out of it, or into it, comes after that."""
        if not self.tickets and self.update is None:
            return ()
        copies = (ticket for lane, ticket in self.tickets.items() if lane is not Lane.HOST_WORK)
        update = self.update
        return (*copies, *(() if update is None else (update,)))

    def wait(self) -> None:
        """Waits until the host may read and write the home: gradients have arrived, copies to the device are done."""
        if self.update is not None:
            self.wait_for_update()
        for lane, ticket in list(self.tickets.items()):
            ticket.wait()
            if self.tickets.get(lane) is ticket:  # another thread may have noted a later one meanwhile
                del self.tickets[lane]

    def wait_for_host_work(self) -> None:
        """Waits for what the host's thread does with the lists: it has added gradients, and computed their norms."""
        ticket = self.tickets.get(Lane.HOST_WORK)
        if ticket is not None:
            ticket.wait()

    def wait_for_reader(self) -> None:
        """Waits until the fp32 lists may change: a checkpoint that is written in the background has what it needs."""
        if self.reader is not None:
            self.reader.wait()
            self.reader = None

    # Its copy on the device

    @property
    def has_copy(self) -> bool:
        """Whether it is at home elsewhere, and can be computed with on the device."""
        return self.compute is not None and not self.is_static

    def load(self, *, ahead: bool) -> None:
        """Copies it, if this process has all of it, from its home to the device.

        Args:
            ahead: Whether nobody needs it yet: the copy is started, and the compute device does not wait for it; see
                ``wait_for_copy``.

        Raises:
            DeviceMemoryError: If the device has no room.
        """
        home, begin, streams = self.home_param, time.perf_counter(), self.device.streams
        name = "bring in ahead" if ahead else "load"
        with named(name, self.spec.index) if _profiler_enabled() else _NOTHING, as_it_is(home):
            payload = self._allocate_copy()
            update, copy = self.update, None
            try:  # the copy comes after an update that is under way
                if is_updated := isinstance(update, Later) and update.fill(payload):
                    self.arrival = update
                elif ahead:
                    self.arrival = copy = streams.fetch(home, payload, self.under_way)
                else:
                    copy = streams.to_device(home, payload, self.under_way)
            except BaseException:
                if isinstance(update, Later) and update.has_begun:  # and the user has interrupted
                    update.join()
                self.drop_copy()
                raise
        if copy is not None:
            self.note(copy)
        self._count_load(ahead, 0 if is_updated else home.nbytes)
        if not ahead:
            self.device.counts.loading_seconds += time.perf_counter() - begin

    @contextlib.contextmanager
    def gathered(self, *, ahead: bool) -> Iterator[torch.Tensor]:
        """Copies this rank's chunk of a group from its home; inside of the block those of others are brought.

        Args:
            ahead: Whether nobody needs it yet.

        Yields:
            The buffer of the group.

        Raises:
            DeviceMemoryError: If the device has no room.
        """
        home, streams = self.home_param, self.device.streams
        with as_it_is(home):
            payload = self._allocate_copy()
            try:
                self.note(streams.to_slice(home, self.own_slice(payload), self.under_way))
                with streams.beside():
                    yield payload
            except BaseException:
                self.drop_copy()
                raise
        self._count_load(ahead, home.nbytes)

    def _allocate_copy(self) -> torch.Tensor:
        try:
            payload = self.device.pool.allocate(Tier.DEVICE, self.spec.capacity_numel, self.dtype, "param")
        except BudgetError as error:
            raise DeviceMemoryError(str(error)) from error
        self.compute_with(payload)
        return payload

    def _count_load(self, ahead: bool, nbytes: int) -> None:
        counts = self.device.counts
        counts.chunk_loads += 1
        counts.prefetches += ahead
        if self.home is Tier.HOST:
            counts.host_to_device_nbytes += nbytes
        if counts.log is not None:
            counts.log.append(("load ahead" if ahead else "load", self.spec.index))

    def compute_with(self, payload: torch.Tensor) -> None:
        """Lets modules compute with a payload: a copy, or the one at home."""
        self.compute, self.storage = payload, payload.untyped_storage()
        self.base_use_count = _use_count(self.storage._cdata)
        self.device.by_storage[self.storage._cdata] = self

    def wait_for_copy(self) -> float | None:
        """Lets the compute device wait for a copy that was started ahead.

        Returns:
            Seconds that the host waited, or ``None`` if the copy had arrived.
        """
        arrival = self.arrival
        assert arrival is not None
        is_late = not arrival.is_done
        begin = time.perf_counter()
        with named("wait for", self.spec.index):
            arrival.join()
        self.arrival = None
        return time.perf_counter() - begin if is_late else None

    def evict(self) -> None:
        """Drops the copy for want of room; a copy is never dirty, so nothing is copied."""
        with named("evict", self.spec.index) if _profiler_enabled() else _NOTHING:
            self.drop_copy()
        counts = self.device.counts
        counts.chunk_evictions += 1
        if counts.log is not None:
            counts.log.append(("evict", self.spec.index))

    def invalidate(self) -> None:
        """Drops the copy, if there is one, because the home has changed."""
        if self.has_copy:
            self.drop_copy()
            counts = self.device.counts
            counts.chunk_invalidations += 1
            if counts.log is not None:
                counts.log.append(("drop", self.spec.index))

    def drop_copy(self) -> None:
        """Ends that modules can compute with it; a payload at home stays."""
        if self.arrival is not None:
            self.wait_for_copy()
        aliased, payload, storage = self.is_aliased, self.compute, self.storage
        assert payload is not None
        assert storage is not None
        self.compute = self.storage = None
        del self.device.by_storage[storage._cdata]
        if self.num_views:
            for tensor in self.tensors:
                self._drop_view(tensor)
        if not self.is_static:
            self.device.pool.release(Tier.DEVICE, payload, "param", keep=not aliased)

    # Its home

    def move_home(self, home: Tier, states: Tier | None = None, *, anew: bool = False) -> None:
        """Moves it, with all its lists, to another tier. None of its tensors may be in use.

        Lists of zeros are not copied; see [Note: lists of zeros]. Lists that are there already stay as they are.

        Args:
            home: Where it shall live.
            states: Where its masters and states shall be, by default there: ``DISK`` if it is at home on the host.
            anew: Whether lists get other memory that are there already, but for those on the disk.

        Raises:
            BudgetError: If there is no room; the chunk stays where it is.
        """
        self.wait()
        self.wait_for_reader()
        if self.has_copy and not self.is_group:
            self.drop_copy()  # a copy with the chunks of others stays true
        lists, pool, name = self.home_lists, self.device.pool, f"move home to the {home.value} of"
        # Ctrl-C waits: the old ``param`` list may have been overwritten before the new one takes its place.
        with held_back(), lists.lock, named(name, self.spec.index), as_it_is(self.home_param):
            old, new = self.held, self._copy_lists(home, states or home, anew=anew)
            if self.is_static:
                self.drop_copy()
            self.give_back(pool, {name for name in new if new[name] is old[name]})
            self.param = new["param"]
            lists.update({name: new[name] for name in lists})
            lists.fresh.update({name: new[name] for name in lists.fresh})
            self.note_regions(pool.disk)
            self.live_on(home)
        self.device.note_chunks()
        counts = self.device.counts
        nbytes = sum(payload.nbytes for name, payload in new.items() if payload is not old[name])
        counts.chunk_moves += 1
        if home is Tier.DEVICE:
            counts.moved_home_to_device_nbytes += nbytes
        else:
            counts.moved_home_to_host_nbytes += nbytes
        if counts.log is not None:
            counts.log.append(("move home", self.spec.index))

    def pin(self) -> None:
        """Moves a chunk that is at home on the host into pinned memory, if that is wanted and there is room for it."""
        needs = self.held.values() if self.is_streamed and not self.is_on_disk else [self.home_param]
        if self.device.pool.pins_memory and not all(payload.is_pinned() for payload in needs):
            with contextlib.suppress(BudgetError):  # copies are slower then, and right
                self.move_home(Tier.HOST, Tier.DISK if self.is_on_disk else None, anew=True)

    def note_regions(self, disk: Disk | None) -> None:
        """Takes note of which lists are on the disk."""
        lists = self.home_lists
        found = {} if disk is None else {name: disk.find(payload) for name, payload in lists.held.items()}
        lists.regions = {name: region for name, region in found.items() if region is not None}
        for name, region in lists.regions.items():
            region.what = f"'{name}' of chunk {self.spec.index}"

    def _copy_lists(self, home: Tier, states: Tier, *, anew: bool) -> dict[str, torch.Tensor]:
        """The lists on another tier, without the values of those that have none; all or none.

        The host's ``param`` list may be page-locked: the others go through it, before its own values come there or
        after they have left it.
        """
        for name in () if states is Tier.DISK else self.home_lists.regions.keys() - self.home_lists.fresh.keys():
            self.home_lists[name] = self.home_lists.regions[name].open()
        old, new, fresh = self.held, dict[str, torch.Tensor](), self.home_lists.fresh
        to_host, is_lent, is_overwritten = home is Tier.HOST, self.is_lent(("param",)), False
        pool, streams = self.device.pool, self.device.streams
        try:
            for name, payload in old.items():
                pinned = to_host and (name == "param" or self.is_streamed)
                kind, is_zero = payload.dtype, name in fresh
                tier = home if name in ("param", GRADIENT) else states
                if pool.tier_of(payload, self.home) is tier and (tier is Tier.DISK or not anew):
                    new[name] = payload
                    continue
                new[name] = pool.allocate(tier, payload.numel(), kind, name, pinned=pinned, zero=is_zero)
            names = [name for name in old if name not in fresh and new[name] is not old[name]]
            for name in sorted(names, key=lambda name: (name == "param") is to_host):
                if name == "param" or (is_lent and not to_host):
                    new[name].copy_(old[name])
                else:
                    is_overwritten = not to_host
                    streams.copy_through(old[name], new[name], (new if to_host else old)["param"])
        except BaseException:
            if is_overwritten:
                old["param"].copy_(new["param"])
            for name, payload in new.items():
                if payload is not old[name]:
                    pool.release(pool.tier_of(payload, home), payload, name, keep=False)
            raise
        return new

    def give_back(self, pool: PayloadPool, but: Container[str] = ()) -> None:
        """Gives the payloads at home back to where they come from, but for some."""
        for name, payload in [(name, payload) for name, payload in self.held.items() if name not in but]:
            pool.release(pool.tier_of(payload, self.home), payload, name, keep=False)

    def retire(self, pool: PayloadPool) -> None:
        """Frees a chunk that has become empty; its index stays, and is not used again."""
        self.wait()
        self.wait_for_reader()
        if self.compute is not None:
            self.drop_copy()
        self.give_back(pool)
        self.spec = dataclasses.replace(self.spec, capacity_numel=0, used_numel=0, tensor_indices=(), trainable=False)
        self.copy_nbytes, self.is_updated, self.is_streamed = 0, False, False
        self.live_on(Tier.HOST)
        self.param = self.param[:0].clone()
        self.lists.clear()


class Device:
    """The compute device of an engine, as chunks see it: which can be computed with there, and how bytes cross.

    Args:
        chunks: All chunks; the list may grow.
        pool: Where payloads come from; it has the ledger.
        meter: Measures what else is on the device.
        streams: How bytes cross.
        sharing: Reads what other ranks have at home.
        counts: Counts what moves.

    Attributes:
        ledger: Has the bytes of both tiers, and their limits.
        torch_device: The device as torch names it.
        lock: Held while values or gradients change their places.
        version: Counts changes of values.
        num_mirrors: How many mirrors look into each storage, by its address; see ``Mirrors``.
        looked_into: Chunks of which code has got a value where it is; they are asked at the next recorded visit.
        warned: What was said of originals that are lost, which is said once.
        by_storage: The chunks that can be computed with, by the address of the storage that modules compute with, in
            the order in which they came: those with a copy, and those that are at home on the device.
        moves: Whether any chunk is not computed with where it is at home.
        resting: The chunks whose parameters keep their values; see [Note: rest].
        is_resting: Whether these are all chunks, so that autograd keeps operands and gradients itself.
        keeps_values: Whether graphs may keep parameters themselves: while it is so, and until the next step begins.
        has_woken: Whether one of these parameters has lost its value since that began.
    """

    def __init__(
        self, chunks: list[Chunk], pool: PayloadPool, meter: Meter, streams: Streams, sharing: Sharing, counts: Counts
    ) -> None:
        self.chunks, self.pool, self.ledger, self.meter = chunks, pool, pool.ledger, meter
        self.streams, self.torch_device = streams, streams.device
        self.sharing, self.counts = sharing, counts
        self.lock = threading.RLock()
        self.version = 0
        self.num_mirrors: dict[int, int] = {}
        self.warned: set[str] = set()
        self.looked_into: set[Chunk] = set()
        self.by_storage: dict[int, Chunk] = {}
        self.moves = self.is_resting = self.keeps_values = self.has_woken = False
        self.resting: frozenset[int] = frozenset()
        self.note_chunks()

    def note_chunks(self) -> None:
        """Takes note of chunks that came, went or have another home."""
        for chunk in self.chunks:
            chunk.device = self
            if chunk.is_static and chunk.compute is None:
                chunk.compute_with(chunk.param)
        self.moves = any(not (chunk.is_static or chunk.is_retired) for chunk in self.chunks)

    @property
    def copies(self) -> list[Chunk]:
        """The chunks with a copy."""
        return [chunk for chunk in self.by_storage.values() if not chunk.is_static]

    def evict_unused(self) -> None:
        """Evicts every copy that can leave, and gives up the buffers that are kept for reuse."""
        for chunk in self.unused():
            chunk.evict()
        self.pool.trim()

    def unused(self, exclude: Chunk | None = None) -> list[Chunk]:
        """Chunks whose copies nobody computes with or looks into: these can leave."""
        return [chunk for chunk in self.copies if chunk is not exclude and not chunk.is_in_use]
