"""The driver of a machine that is not here: every lane in virtual time.

[Note: virtual driver]
``VirtualDriver`` takes the place of an accelerator's driver below ``DeviceStreams``, as the simulated one of
``race_detector.py`` does, so that each wait of the engine is what it would be on a device. A copy is done at once,
and so is every operator; with fake tensors neither touches a byte. What they cost goes to the clock: an operator on
memory of the device takes the host the time to launch it, and the compute lane its time there; one on memory of the
host takes the host all of it. A value of the device that the program asks for stops the host.

The device is the CPU tier, so the engine decides as it does there. ``tracing/costs.py`` says which tensors are on the
host, and what operators cost.

[Note: virtual processes]
One process of several runs in virtual time. Its engine, plans, groups of chunks and buckets of gradients are those of a
real run. The others are imagined: they do the same at the same time. So nobody waits for a straggler, and every answer
to a message is the message. ``VirtualCollectives`` takes the place of the backend of a device below ``Collectives``: a
gather and a reduction are work in two lanes, as on two communicators, and each has the links for itself.
"""

import collections
import concurrent.futures
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from support.buffers import told_of_buffers

from hf_patrickstar.counts import Counts
from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.machine import Machine
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.model.live_parameter import storage_key
from hf_patrickstar.runtime.chunk import Chunk
from hf_patrickstar.schedule.clock import Lane, Mark, Timeline
from hf_patrickstar.schedule.replay import Player, lane_of
from hf_patrickstar.schedule.script import BlockingCopy, DeviceOp, HostWork, Reduce, ThreadWork
from hf_patrickstar.tracing.answers import AnsweringMode
from hf_patrickstar.tracing.costs import (
    ADAMS,
    READS_ROWS,
    Charges,
    caller,
    cost_of,
    read_operands,
    writes_over,
    written_operands,
)
from hf_patrickstar.units import MIB


class VirtualEvent:
    """A point in a lane; see ``torch.Event``."""

    def __init__(self, driver: "VirtualDriver", mark: Mark) -> None:
        self.mark = mark
        self._driver = driver

    def query(self) -> bool:
        """Whether the host's time is past it."""
        return self.mark.time_ns <= self._driver.clock.end_of(Lane.HOST).time_ns

    def synchronize(self) -> None:
        """Stops the host until it comes."""
        self._driver.clock.wait(self.mark, caller())

    def elapsed_time(self, end: "VirtualEvent", /) -> float:
        """Milliseconds from this event to another one."""
        return (end.mark.time_ns - self.mark.time_ns) / 1e6


class VirtualStream:
    """A lane; see ``torch.Stream``."""

    def __init__(self, driver: "VirtualDriver", lane: Lane) -> None:
        self.lane = lane
        self._driver = driver

    def wait_stream(self, other: "VirtualStream", /) -> None:
        self._driver.clock.follow(self.lane, self._driver.clock.end_of(other.lane))

    def wait_event(self, event: VirtualEvent, /) -> None:
        self._driver.clock.follow(self.lane, event.mark)

    def record_event(self) -> VirtualEvent:
        return VirtualEvent(self._driver, self._driver.clock.end_of(self.lane))

    def synchronize(self) -> None:
        self.record_event().synchronize()


class VirtualSlot(VirtualStream):
    """A stream with copies in both directions, and kernels beside the compute lane: each piece follows the last one."""

    def __init__(self, driver: "VirtualDriver") -> None:
        super().__init__(driver, Lane.COMPUTE)
        self.mark = Mark()

    def wait_stream(self, other: "VirtualStream", /) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: VirtualEvent, /) -> None:
        self.mark = max(self.mark, event.mark)

    def record_event(self) -> VirtualEvent:
        return VirtualEvent(self._driver, self.mark)

    def copy(self, nbytes: int, player: Player, *, to_device: bool) -> None:
        """A copy, while others cross in the other direction."""
        player.clock.follow(lane_of(to_device=to_device), self.mark)
        crossing = round(nbytes / player.machine.duplex_share)
        self.mark = player.send(crossing, f"update, {nbytes} bytes", to_device=to_device)

    def kernel(self, work: DeviceOp, player: Player) -> None:
        """An operator."""
        player.clock.host(player.machine.operator_ns, f"launch {work.name}")
        begin = max(self.mark, player.clock.end_of(Lane.HOST))
        self.mark = begin._replace(time_ns=begin.time_ns + work.duration_ns(player.machine))


class VirtualDriver:
    """See [Note: virtual driver] and ``Driver``."""

    def __init__(self, machine: Machine) -> None:
        self._player = Player(machine)
        self._charges = Charges(has_accelerator=machine.has_accelerator)
        self._cache = HostCache()
        self.clock = self._player.clock
        self._streams = iter((VirtualStream(self, Lane.TO_DEVICE), VirtualStream(self, Lane.TO_HOST)))
        self._compute = VirtualStream(self, Lane.COMPUTE)
        self._slot: VirtualSlot | None = None
        self._begin = (0, 0)
        self._chunks: dict[int, int] = {}  # the storage of a chunk's home -> its number
        self._at_work: list[HostWork] | None = None  # operators of the thread
        self._written: set[int] = set()  # storages to which the thread writes
        self._is_copying = False  # then the operator that copies is not charged

    @property
    def machine(self) -> Machine:
        """The machine."""
        return self._player.machine

    # What ``DeviceStreams`` asks for

    def new_stream(self) -> VirtualStream:
        """See ``Driver``: the lanes of copies, to the device and to the host, and then slots."""
        return next(self._streams, None) or VirtualSlot(self)

    def current_stream(self) -> VirtualStream:
        return self._compute

    def record_moment(self, stream: VirtualStream) -> VirtualEvent:
        return stream.record_event()

    def inside(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def launching_in(self, stream: Any) -> Iterator[None]:
        before, self._slot = self._slot, stream if isinstance(stream, VirtualSlot) else None
        try:
            yield
        finally:
            self._slot = before

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        return self.tier_of(tensor) is Tier.DEVICE

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """See ``Driver``: all memory of the host that the pool gave is, where copies go beside computation at all."""
        return self._charges.is_pinned(tensor)

    def copy(self, source: torch.Tensor, target: torch.Tensor, stream: Any) -> None:
        self._is_copying = True
        try:
            with torch.no_grad():
                target.copy_(source)
        finally:
            self._is_copying = False
        if isinstance(stream, VirtualSlot):
            stream.copy(source.nbytes, self._player, to_device=self.is_on_device(target))
            return
        to_device = stream.lane is Lane.TO_DEVICE
        index = self._chunks.get(storage_key(source if to_device else target), -1)
        is_here = to_device and self.is_on_device(source)  # a part of a group that is at home on the device
        what = f"chunk {index}, {source.nbytes} bytes"
        self._player.send(source.nbytes, what, to_device=to_device, is_here=is_here)

    def on_host(
        self, work: Callable[[], None], after: Iterable[Any], otherwise: Callable[[], None] | None = None
    ) -> VirtualEvent:
        """See ``Driver``; an error of work is raised at once."""
        self._at_work, self._written = works, written = list[HostWork](), set[int]()
        try:
            with torch.no_grad():
                work()
        finally:
            self._at_work = None
        chunks = frozenset(self._chunks[storage] for storage in written if storage in self._chunks)
        entry = ThreadWork(tuple(works), chunks, ())
        return VirtualEvent(self, self._player.thread_work(entry, [event.mark for event in after]))

    def begin_after(
        self, work: Any, stream: Any, begin: Callable[[Any], Any]
    ) -> "concurrent.futures.Future[VirtualEvent]":
        stream.wait_event(work)
        begun: concurrent.futures.Future[VirtualEvent] = concurrent.futures.Future()
        begun.set_result(begin(stream))
        return begun

    def finish(self) -> None:
        """See ``Driver``."""
        self.clock.wait(self.clock.end_of(Lane.HOST_WORK), caller())

    def close(self) -> None:
        """See ``Driver``."""

    def follow(self, counts: Counts) -> None:
        """Charges the host for each visit to a chunk, at its moment."""
        counts.log = _Visits(self._player)

    # What ``VirtualCollectives`` asks for

    def gather(self, nbytes: int) -> VirtualEvent:
        """Starts an all-gather, which comes after what was loaded so far; returns its end."""
        return VirtualEvent(self, self._player.gather(nbytes))

    def reduce(self, nbytes: int) -> VirtualEvent:
        """Starts a reduce-scatter; returns its end."""
        return VirtualEvent(self, self._player.reduce(Reduce(nbytes)))

    def message(self) -> None:
        """The host exchanges a message with all other processes."""
        self._player.message()

    def bring_home(self, tensor: torch.Tensor) -> None:
        """The host needs the values of a tensor that the engine has made for it, and has it from then on."""
        if self.is_on_device(tensor):
            self._player.blocking_copy(BlockingCopy(tensor.nbytes, False, False, caller()))
            self._charges.put(tensor, Tier.HOST)

    def take(self, buffer: torch.Tensor, tier: Tier, owner: str) -> None:
        """A pool gives out a buffer."""
        self._charges.put(buffer, tier)

    def free(self, buffer: torch.Tensor) -> None:
        """A pool gives the memory of a buffer back."""
        self._charges.put(buffer, Tier.DEVICE)

    # What operators do

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside the block operators take time; parts of a model that are compiled run as they are written.

        Dynamo would compile what the engine and the modes of operators do in them, too.
        """
        with torch.compiler.set_stance("force_eager"), told_of_buffers(self.take, self.free), _Operators(self):
            yield

    def tier_of(self, tensor: torch.Tensor) -> Tier:
        """Where a tensor is; what is not known is on the device."""
        return self._charges.tier_of(tensor)

    def note_operator(self, operator: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """An operator has run."""
        cost = None if self._is_copying else cost_of(operator, args, kwargs, result)
        if cost is None:
            return
        if self._at_work is not None:
            touches = touches_of(operator, args, kwargs)
            nbytes = max(cost.nbytes - self._cache.saved_nbytes(touches), 0)
            self._at_work.append(HostWork(str(operator._overloadpacket), cost.flops, nbytes))
            self._written.update(touch.storage for touch in touches if touch.is_write)
            return
        player = self._player
        play = {DeviceOp: player.kernel, HostWork: player.host_work, BlockingCopy: player.blocking_copy}
        for work in self._charges.charge(operator, args, kwargs, result, cost):
            if self._slot is not None and isinstance(work, DeviceOp):
                self._slot.kernel(work, player)
            else:
                play[type(work)](work)

    # Steps

    def begin(self, chunks: Iterable[Chunk] = ()) -> None:
        """A timeline begins; what was put into lanes before is done."""
        known = [chunk for chunk in chunks if not chunk.is_retired]
        self._chunks = {storage_key(chunk.payloads["param"]): chunk.spec.index for chunk in known}
        for lane in Lane:
            self.clock.wait(self.clock.end_of(lane), "the beginning")
        self._begin = (self.clock.end_of(Lane.HOST).time_ns, len(self.clock.spans))

    def end(self) -> Timeline:
        """The timeline since ``begin``, up to the end of all that was put into lanes."""
        timeline = self.clock.timeline(*self._begin)
        for lane in Lane:
            self.clock.wait(self.clock.end_of(lane), "the end")
        return timeline


class _Visits(list[tuple[str, int]]):
    """A log of an engine's counts that keeps nothing, and has a player play visits."""

    def __init__(self, player: Player) -> None:
        super().__init__()
        self._player = player

    def append(self, entry: tuple[str, int], /) -> None:
        if entry[0] == "visit":
            self._player.visit()


class _Operators(AnsweringMode):
    """Tells a driver of every operator."""

    def __init__(self, driver: VirtualDriver) -> None:
        super().__init__()
        self._driver = driver

    def has_run(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if getattr(func, "_schema", None) is not None:
            self._driver.note_operator(func, args, kwargs, result)


HOST_CACHE_NBYTES = 16 * MIB
"""Bytes that the caches of a core keep: a tile of Adam's lists, which is made to stay there (``adam_script.py``)."""


class Touch(NamedTuple):
    """A range of memory that an operator on the host works with."""

    storage: int
    begin: int
    end: int
    is_write: bool
    is_read: bool


def touches_of(operator: Any, args: Any, kwargs: dict[str, Any]) -> list[Touch]:
    """What an operator works with that may be in a cache, in order."""
    packet = operator._overloadpacket
    if packet in READS_ROWS:
        return []
    written = written_operands(operator, args, kwargs)
    only_read = {id(tensor) for tensor in (args[1] if packet in ADAMS else ())}
    touches = [_touch(tensor, is_write=False, is_read=True) for tensor in read_operands(written, args, kwargs)]
    is_read = not writes_over(operator)
    for tensor in written:
        is_write = id(tensor) not in only_read
        touches.append(_touch(tensor, is_write=is_write, is_read=is_read or not is_write))
    return touches


def _touch(tensor: torch.Tensor, *, is_write: bool, is_read: bool) -> Touch:
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return Touch(storage_key(tensor), begin, begin + tensor.nbytes, is_write, is_read)


class HostCache:
    """What operators on the host have touched last, and need not fetch from memory again.

    What was written there comes to memory once, whatever is written over it meanwhile.
    """

    def __init__(self, nbytes: int = HOST_CACHE_NBYTES) -> None:
        self._nbytes = nbytes
        self._used = 0
        self._lines: collections.OrderedDict[tuple[int, int, int], bool] = collections.OrderedDict()  # is it written?

    def saved_nbytes(self, touches: Iterable[Touch]) -> int:
        """Bytes of an operator's cost that stay in the cache; what it touches is there from now on."""
        saved = 0
        for storage, begin, end, is_write, is_read in touches:
            key = (storage, begin, end)
            was_written = self._lines.pop(key, None)
            if was_written is None:
                self._used += end - begin
            else:
                saved += (end - begin) * (is_read + (is_write and was_written))
            self._lines[key] = bool(was_written) or is_write
            while self._used > self._nbytes:
                (_, first, last), _ = self._lines.popitem(last=False)
                self._used -= last - first
        return saved


class VirtualPeers:
    """Makes the collectives of processes that are not here; see ``Resources.find``."""

    def __init__(self, driver: VirtualDriver, world_size: int) -> None:
        self._driver = driver
        self._world_size = world_size

    def __call__(self, device: torch.device, counts: Counts, reduce_dtype: str) -> Collectives:
        """Makes them."""
        return VirtualCollectives(self._driver, self._world_size, device, counts, reduce_dtype)


class VirtualWork:
    """A collective in a lane; see ``torch.distributed.Work``."""

    def __init__(self, driver: VirtualDriver, event: VirtualEvent) -> None:
        self._driver = driver
        self._event = event

    def is_completed(self) -> bool:
        """Whether the host's time is past its end."""
        return self._event.query()

    def wait(self) -> None:
        """Makes the compute lane go on after it."""
        self._driver.clock.follow(Lane.COMPUTE, self._event.mark)


class VirtualCollectives(Collectives):
    """The collectives of one process among others that are not here; see [Note: virtual processes]."""

    def __init__(
        self, driver: VirtualDriver, world_size: int, device: torch.device, counts: Counts, reduce_dtype: str
    ) -> None:
        super().__init__(0, world_size, device, counts=counts, reduce_dtype=reduce_dtype)
        self._driver = driver
        self._is_gloo = not driver.machine.has_accelerator

    def exchange(self, value: Any, what: str, *, subject: str | None = None, is_prompt: bool = False) -> list[Any]:
        self._exchange()
        return [value] * self.world_size

    def all_reduce(self, tensor: torch.Tensor, what: str) -> None:
        """See ``Collectives``; the host waits for what the device has computed of it, and sends it."""
        if self.world_size > 1 and tensor.numel():
            self._driver.bring_home(tensor)
            self._driver.message()

    def begin_broadcast(self, tensor: torch.Tensor, source: int, what: str) -> Callable[[], None]:
        """See ``Collectives``; the values that all get are those that this process has."""
        return self._exchange

    def _exchange(self) -> None:
        if self.world_size > 1:
            self._counts.messages += 1
            self._driver.message()

    def _broadcast(self, slices: Sequence[torch.Tensor]) -> list[VirtualWork]:
        return [self._gather(slices[0], slices[self.rank])]

    def _receive(self, piece: torch.Tensor, source: int) -> VirtualWork:
        return VirtualWork(self._driver, self._driver.reduce(piece.nbytes))

    def _send(self, piece: torch.Tensor, target: int) -> VirtualWork:
        """It ends with what is received, which has the link."""
        return VirtualWork(self._driver, VirtualEvent(self._driver, Mark()))

    def _gather(self, buffer: torch.Tensor, own: torch.Tensor) -> VirtualWork:
        return VirtualWork(self._driver, self._driver.gather((self.world_size - 1) * own.nbytes))

    def _scatter(self, total: torch.Tensor, terms: torch.Tensor) -> VirtualWork:
        return VirtualWork(self._driver, self._driver.reduce((self.world_size - 1) * total.nbytes))

    def _wait(self, work: VirtualWork, what: str) -> None:
        work.wait()

    @contextlib.contextmanager
    def _guarded(self, what: str, *, is_blocking: bool = False) -> Iterator[Any]:
        """Nothing fails, and nobody is missing."""
        yield None
