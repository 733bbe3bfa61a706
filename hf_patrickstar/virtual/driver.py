"""The driver of a machine that is not here: every lane in virtual time.

[Note: virtual driver]
``VirtualDriver`` takes the place of an accelerator's driver below ``DeviceStreams``, as the simulated one of
``memory/simulation.py`` does, so that each wait of the engine is what it would be on a device. A copy is done at once,
and so is every operator; with fake tensors neither touches a byte. What they cost goes to the clock: an operator on
memory of the device takes the host the time to launch it, and the compute lane its time there; one on memory of the
host takes the host all of it. A value of the device that the program asks for stops the host.

The device is the CPU tier, so the engine decides as it does there. A tensor is on the host if the pool says so, or if
it was computed from such tensors alone. Where an operator has operands on both, those of the host are copied first; if
it writes to the host, those of the device.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from hf_patrickstar.events import ChunkLoaded, ChunkVisited, Event
from hf_patrickstar.machine import Machine
from hf_patrickstar.memory.operators import storage_key
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import Chunk
from hf_patrickstar.runtime.update import Likeness, Update
from hf_patrickstar.schedule.clock import Lane, Mark, Timeline
from hf_patrickstar.schedule.replay import LOADS, LOADS_TOGETHER, WAITS_FOR_ARRIVAL, Player, Simple
from hf_patrickstar.schedule.script import (
    Await,
    AwaitLoad,
    Begin,
    BlockingCopy,
    Entry,
    Join,
    Message,
    Part,
    Reach,
    Reduce,
    Send,
    ThreadWork,
)
from hf_patrickstar.tracing.answers import AnsweringMode
from hf_patrickstar.tracing.charges import Charges, caller
from hf_patrickstar.tracing.costs import HostCache, cost_of, touches_of
from hf_patrickstar.virtual.tapes import Charge, Operator, Tapes
from hf_patrickstar.virtual.timing import OperatorTimes

_BY_PLAN = frozenset({LOADS, LOADS_TOGETHER, WAITS_FOR_ARRIVAL})
"""Where the host waits as a plan says, which is no part of a script."""


@dataclasses.dataclass(slots=True)
class _Copy:
    """A copy or reduction in a lane: of which chunk, which one of which script, and whether a plan says it instead."""

    chunk_index: int
    to_device: bool
    number: int
    script: list[Entry]
    is_load: bool = False


class VirtualEvent:
    """A point in a lane; see ``torch.Event``.

    Args:
        driver: Has the clock.
        mark: When it comes.
        copy: The copy or the reduction that it follows.
    """

    def __init__(self, driver: "VirtualDriver", mark: Mark, copy: _Copy | None) -> None:
        self.mark = mark
        self.copy = copy
        self._driver = driver

    def query(self) -> bool:
        """Whether the host's time is past it."""
        return self.mark.time_ns <= self._driver.clock.now_ns

    def synchronize(self) -> None:
        """Stops the host until it comes."""
        self._driver.wait(self)

    def elapsed_time(self, end: "VirtualEvent", /) -> float:
        """See ``Moment``."""
        return (end.mark.time_ns - self.mark.time_ns) / 1e6


class VirtualBegun:
    """A copy that comes after work of the host's thread; see ``Begun``.

    Args:
        driver: Has the clock.
        work: The event of the work.
        event: The event that follows the copy.
    """

    def __init__(self, driver: "VirtualDriver", work: VirtualEvent, event: VirtualEvent) -> None:
        self._driver = driver
        self._work = work
        self._event = event

    def done(self) -> bool:
        """See ``Begun``."""
        return self._work.query()

    def result(self) -> VirtualEvent:
        """See ``Begun``: stops the host until the work is done."""
        self._driver.wait(self._work)
        return self._event


class VirtualStream:
    """A lane; see ``torch.Stream``.

    Args:
        driver: Has the clock.
        lane: Which one it is.
    """

    def __init__(self, driver: "VirtualDriver", lane: Lane) -> None:
        self.lane = lane
        self.last: _Copy | None = None
        self._driver = driver

    def wait_stream(self, other: "VirtualStream", /) -> None:
        """See ``Stream``."""
        self._driver.clock.follow(self.lane, self._driver.clock.end_of(other.lane))

    def wait_event(self, event: VirtualEvent, /) -> None:
        """See ``Stream``."""
        self._driver.join(self.lane, event)

    def record_event(self) -> VirtualEvent:
        """See ``Stream``."""
        return VirtualEvent(self._driver, self._driver.clock.end_of(self.lane), self.last)

    def synchronize(self) -> None:
        """See ``Stream``."""
        self.record_event().synchronize()


class VirtualDriver:
    """See [Note: virtual driver] and ``Driver``.

    Args:
        machine: The machine that is not here.
        times: What operators take, if the machine is the one at hand after all; else its rates say it.

    Attributes:
        clock: The time.
        script: What was done since ``begin``, without what plans say.
        measured_on: The machine, if operators were timed on it.
    """

    def __init__(self, machine: Machine, times: OperatorTimes | None = None) -> None:
        self._player = Player(machine)
        self._charges = Charges(has_accelerator=machine.has_accelerator, times=times)
        self.measured_on = None if times is None else machine
        self.clock = self._player.clock
        self.script: list[Entry] = []
        self._to_device, to_host = VirtualStream(self, Lane.TO_DEVICE), VirtualStream(self, Lane.TO_HOST)
        self._streams = iter((self._to_device, to_host))
        self._compute = VirtualStream(self, Lane.COMPUTE)
        self._begin = (0, 0)
        self._chunks: dict[int, int] = {}  # the storage of a chunk's home -> its number
        self._num_sent = 0
        self._at_work: list[Operator] | None = None  # of the thread
        self._tapes = Tapes(HostCache())
        self._is_copying = False  # then the operator that copies is not charged

    @property
    def machine(self) -> Machine:
        """The machine."""
        return self._player.machine

    # What ``DeviceStreams`` asks for

    def new_stream(self) -> VirtualStream:
        """See ``Driver``: the lanes of copies, in the order of ``hf_patrickstar.memory.streams.WorkLane``."""
        return next(self._streams)

    def current_stream(self) -> VirtualStream:
        """See ``Driver``."""
        return self._compute

    def record_moment(self, stream: VirtualStream) -> VirtualEvent:
        """See ``Driver``."""
        return stream.record_event()

    def inside(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """See ``Driver``."""
        return contextlib.nullcontext()

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """See ``Driver``."""
        return self.tier_of(tensor) is Tier.DEVICE

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """See ``Driver``: all memory of the host that the pool gave is, where copies go beside computation at all."""
        return self._charges.is_pinned(tensor)

    def copy(self, source: torch.Tensor, target: torch.Tensor, stream: Any) -> None:
        """See ``Driver``."""
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
        stream.last = self._count(index, to_device=to_device)
        self.script.append(Send(index, source.nbytes, to_device))

    def on_host(
        self, work: Callable[[], None], after: Iterable[Any], otherwise: Callable[[], None] | None = None
    ) -> VirtualEvent:
        """See ``Driver``; an error of work is raised at once."""
        events = list(after)
        known = [event.copy for event in events if event.copy is not None and event.copy.script is self.script]
        numbers = tuple(copy.number for copy in known if not copy.is_load)
        loads = tuple(copy.chunk_index for copy in known if copy.is_load)
        charge = self._charge(work)
        chunks = frozenset(self._chunks[storage] for storage in charge.written if storage in self._chunks)
        entry = ThreadWork(charge.works, chunks, numbers, loads)
        mark = self._player.thread_work(entry, [event.mark for event in events])
        self.script.append(entry)
        return VirtualEvent(self, mark, self._count(-1, to_device=False))

    def _charge(self, work: Callable[[], None]) -> Charge:
        """What work of the thread costs; it is not done where that is known. See [Note: updates that are alike]."""
        alike = work.likeness() if isinstance(work, Update) and work.likeness is not None else None
        known = None if alike is None else self._tapes.play(alike)
        return self._tapes.charge(self._operators_of(work, alike)) if known is None else known

    def _operators_of(self, work: Callable[[], None], alike: Likeness | None) -> list[Operator]:
        """What work of the thread does, which is kept if other work may be like it."""
        operators: list[Operator] = []
        if isinstance(work, Update) and work.parts is not None:
            for part in work.parts():
                likeness = None if part.likeness is None else part.likeness()
                known = None if likeness is None else self._tapes.recall(likeness)
                operators += self._operators_of(part, likeness) if known is None else known
        else:
            self._at_work = operators
            try:
                with torch.no_grad():
                    work()
            finally:
                self._at_work = None
        if alike is not None:
            self._tapes.keep(alike, operators, self._charges.known.__contains__)
        return operators

    def begin_after(self, work: Any, stream: Any, begin: Callable[[Any], Any]) -> VirtualBegun:
        """See ``Driver``."""
        stream.wait_event(work)
        return VirtualBegun(self, work, begin(stream))

    def close(self) -> None:
        """See ``Driver``."""

    def _count(self, index: int, *, to_device: bool) -> _Copy:
        self._num_sent += 1
        return _Copy(index, to_device, self._num_sent - 1, self.script)

    def join(self, lane: Lane, event: VirtualEvent) -> None:
        """A lane goes on after an event."""
        self.clock.follow(lane, event.mark)
        copy = event.copy
        if lane is Lane.COMPUTE and copy is not None and copy.script is self.script and not copy.is_load:
            self.script.append(Join(copy.number))  # copies of before ``begin`` are done

    def wait(self, event: VirtualEvent) -> None:
        """The host waits for an event."""
        place = caller()
        self.clock.wait(event.mark, place)
        copy = event.copy
        if place in _BY_PLAN:
            return
        if copy is not None and copy.script is self.script:  # copies of before ``begin`` are done
            self.script.append(AwaitLoad(copy.chunk_index, place) if copy.is_load else Await(copy.number, place))

    def note_event(self, event: Event) -> None:
        """Hears what the engine tells: a listener. What plans say is not a part of the script."""
        if isinstance(event, ChunkVisited):
            self.script.append(Reach(event.chunk_index))
            self._player.visit()
        elif isinstance(event, ChunkLoaded):
            if isinstance(self.script[-1], Join):  # what is not ahead is waited for at once
                self.script.pop()
            assert isinstance(self.script[-1], Send)
            self.script.pop()
            self._num_sent -= 1
            assert self._to_device.last is not None
            self._to_device.last.is_load = True

    # What ``VirtualCollectives`` asks for

    def gather(self, nbytes: int) -> VirtualEvent:
        """Starts an all-gather of the chunk whose own part was sent last: a part of its load, which plans say.

        Args:
            nbytes: Bytes that this process sends.

        Returns:
            Its end.
        """
        return VirtualEvent(self, self._player.gather(nbytes), self._to_device.last)

    def reduce(self, nbytes: int) -> VirtualEvent:
        """Starts a reduce-scatter.

        Args:
            nbytes: Bytes that this process sends.

        Returns:
            Its end.
        """
        work = Reduce(nbytes)
        mark = self._player.reduce(work)
        self.script.append(work)
        return VirtualEvent(self, mark, self._count(-1, to_device=False))

    def message(self) -> None:
        """The host exchanges a message with all other processes."""
        self.play(Message())

    def bring_home(self, tensor: torch.Tensor) -> None:
        """The host needs the values of a tensor that the engine has made for it, and has it from then on.

        Args:
            tensor: The tensor; computed on the device, it is copied, since the engine takes the device for the host.
        """
        if self.is_on_device(tensor):
            self.play(BlockingCopy(tensor.nbytes, False, False, caller()))
            self._charges.put(tensor, Tier.HOST)

    def take(self, buffer: torch.Tensor, tier: Tier, owner: str) -> None:
        """See ``Driver``."""
        self._charges.put(buffer, tier)

    def free(self, buffer: torch.Tensor) -> None:
        """See ``Driver``."""
        self._charges.forget(buffer)

    # What operators do

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside the block operators take time; parts of a model that are compiled run as they are written.

        Dynamo would compile what the engine and the modes of operators do in them, too.
        """
        with torch.compiler.set_stance("force_eager"), _Operators(self):
            yield

    def tier_of(self, tensor: torch.Tensor) -> Tier:
        """Where a tensor is; what is not known is on the device."""
        return self._charges.tier_of(tensor)

    def note_operator(self, operator: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """An operator has run.

        Args:
            operator: The overload that was called.
            args: Its positional arguments.
            kwargs: Its named arguments.
            result: What it returned.
        """
        cost = None if self._is_copying else cost_of(operator, args, kwargs, result)
        if cost is None:
            return
        if self._at_work is not None:
            name = str(operator._overloadpacket)
            self._at_work.append(Operator(name, cost, tuple(touches_of(operator, args, kwargs))))
            return
        for work in self._charges.charge(operator, args, kwargs, result, cost):
            self.play(work)

    def play(self, entry: Simple) -> None:
        """Charges work of the host or of the device.

        Args:
            entry: The work.
        """
        self.script.append(entry)
        self._player.play(entry)

    # Steps

    def begin(self, chunks: Iterable[Chunk] = ()) -> None:
        """A timeline and a script begin; what was put into lanes before is done.

        Args:
            chunks: The chunks of the engine.
        """
        known = [chunk for chunk in chunks if not chunk.is_retired]
        self._chunks = {storage_key(chunk.payloads["param"]): chunk.spec.index for chunk in known}
        self.clock.wait_for_all("the beginning")
        self._begin = (self.clock.now_ns, len(self.clock.spans))
        self.script, self._num_sent = [], 0
        self._player.forget()

    def begin_part(self, part: Part) -> None:
        """A part of the step begins."""
        self.script.append(Begin(part))

    def end(self) -> Timeline:
        """The timeline since ``begin``, up to the end of all that was put into lanes."""
        timeline = self.clock.timeline(*self._begin)
        self.clock.wait_for_all("the end")
        return timeline


class _Operators(AnsweringMode):
    """Tells a driver of every operator."""

    def __init__(self, driver: VirtualDriver) -> None:
        super().__init__()
        self._driver = driver

    def has_run(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if getattr(func, "_schema", None) is not None:
            self._driver.note_operator(func, args, kwargs, result)
