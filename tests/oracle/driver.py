"""The driver of a machine that is not here: every lane in virtual time.

[Note: virtual driver]
``VirtualDriver`` takes the place of an accelerator's driver below ``DeviceStreams``, as the simulated one of
``race_detector.py`` does, so that each wait of the engine is what it would be on a device. A copy is done at once,
and so is every operator; with fake tensors neither touches a byte. What they cost goes to the clock: an operator on
memory of the device takes the host the time to launch it, and the compute lane its time there; one on memory of the
host takes the host all of it. A value of the device that the program asks for stops the host.

The device is the CPU tier, so the engine decides as it does there. ``tracing/charges.py`` says which tensors are on the
host, and what operators cost.
"""

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from buffers import told_of_buffers
from oracle.host_cache import HostCache, touches_of

from hf_patrickstar.events import ChunkVisited, Event
from hf_patrickstar.machine import Machine
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import Chunk
from hf_patrickstar.schedule.clock import Lane, Mark, Timeline
from hf_patrickstar.schedule.replay import Player
from hf_patrickstar.schedule.script import BlockingCopy, HostWork, Kernel, Reduce, ThreadWork
from hf_patrickstar.tracing.answers import AnsweringMode
from hf_patrickstar.tracing.charges import Charges, caller
from hf_patrickstar.tracing.costs import cost_of
from hf_patrickstar.tracing.operands import storage_key


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


class VirtualDriver:
    """See [Note: virtual driver] and ``Driver``."""

    def __init__(self, machine: Machine) -> None:
        self._player = Player(machine)
        self._charges = Charges(has_accelerator=machine.has_accelerator)
        self._cache = HostCache()
        self.clock = self._player.clock
        self._streams = iter((VirtualStream(self, Lane.TO_DEVICE), VirtualStream(self, Lane.TO_HOST)))
        self._compute = VirtualStream(self, Lane.COMPUTE)
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
        """See ``Driver``: the lanes of copies, in the order of ``hf_patrickstar.memory.lanes.WorkLane``."""
        return next(self._streams)

    def current_stream(self) -> VirtualStream:
        return self._compute

    def record_moment(self, stream: VirtualStream) -> VirtualEvent:
        return stream.record_event()

    def inside(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

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

    def note_event(self, event: Event) -> None:
        """Hears what the engine tells: a listener."""
        if isinstance(event, ChunkVisited):
            self._player.visit()

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
        play = {Kernel: player.kernel, HostWork: player.host_work, BlockingCopy: player.blocking_copy}
        for work in self._charges.charge(operator, args, kwargs, result, cost):
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


class _Operators(AnsweringMode):
    """Tells a driver of every operator."""

    def __init__(self, driver: VirtualDriver) -> None:
        super().__init__()
        self._driver = driver

    def has_run(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if getattr(func, "_schema", None) is not None:
            self._driver.note_operator(func, args, kwargs, result)
