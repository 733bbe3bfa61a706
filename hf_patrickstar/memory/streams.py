"""The streams of a device: every stream and event; see [Note: lanes] in ``lanes.py``."""

import collections
import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from hf_patrickstar.memory.lane_times import LaneTimes, Timed
from hf_patrickstar.memory.lanes import Begun, Copy, Driver, Event, Moment, Stream, Streams, WorkLane
from hf_patrickstar.memory.threads import HostThread, HostTicket, ThreadStreams
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.units import MIB

_T = TypeVar("_T")
_IN_FLIGHT_NBYTES = 256 * MIB
"""Bytes of gradients whose copies the compute stream does not wait for: some milliseconds of the bus."""
_LEAST_IN_FLIGHT = 2
"""Gradients that may be larger than that together: with one alone, computation would stand still for its copy."""


class AcceleratorDriver(HostThread):
    """The driver of any accelerator that torch knows.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(functools.partial(_choose, device))
        self._device = device

    def new_stream(self) -> Stream:
        """See ``Driver``."""
        return torch.Stream(self._device)

    def current_stream(self) -> Stream:
        """See ``Driver``."""
        return torch.accelerator.current_stream(self._device)

    def inside(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """See ``Driver``. A ``torch.Stream`` remembers in itself what was current before, so each block has its own."""
        alias = torch.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )
        return alias  # type: ignore[return-value]

    def record_moment(self, stream: Any) -> Moment:
        """See ``Driver``."""
        moment = torch.Event(self._device, enable_timing=True)
        moment.record(stream)
        return moment

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """See ``Driver``."""
        return tensor.device.type != "cpu"

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """See ``Driver``."""
        return tensor.is_pinned()

    def copy(self, source: torch.Tensor, target: torch.Tensor, stream: Any) -> None:
        """See ``Driver``."""
        with self.inside(stream):
            target.copy_(source, non_blocking=source.is_pinned() or target.is_pinned())

    def take(self, buffer: torch.Tensor, tier: Tier, owner: str) -> None:
        """Nothing to do: torch's allocator has a buffer used again after all that the compute stream was told."""

    def free(self, buffer: torch.Tensor) -> None:
        """Nothing to do."""


def _choose(device: torch.device) -> None:
    """A thread begins with the first device, where its first call would take memory."""
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)


def make_streams(device: torch.device) -> Streams:
    """The streams of a device.

    Args:
        device: The compute device.
    """
    return ThreadStreams(device) if device.type == "cpu" else DeviceStreams(device, AcceleratorDriver(device))


def synchronize(device: torch.device) -> None:
    """Blocks the host until the compute stream has done all that it was told.

    Args:
        device: An accelerator.
    """
    torch.accelerator.current_stream(device).synchronize()


def seconds_of(device: torch.device, work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Seconds that the compute stream of a device takes for work; on the CPU, those of the call.

    Args:
        device: The device.
        work: Puts work into the compute stream, or makes it wait for copies.
        before: Is called first and not counted. What it puts into the compute stream runs while the host puts the work
            there, so that the work is not held up by the host.
    """
    if device.type == "cpu":
        before()
        since = time.perf_counter()
        work()
        return time.perf_counter() - since
    synchronize(device)
    stream = torch.accelerator.current_stream(device)
    begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    before()
    begin.record(stream)
    work()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


# On an accelerator


class StreamTicket:
    """A copy in a stream.

    Args:
        event: The event that follows the copy.
        lane: The lane of the copy.
        driver: Gives the stream that joins it.
    """

    __slots__ = ("_driver", "event", "lane")

    def __init__(self, event: Event, lane: WorkLane, driver: Driver) -> None:
        self.event = event
        self.lane = lane
        self._driver = driver

    @property
    def is_done(self) -> bool:
        """Whether the copy has run."""
        return bool(self.event.query())

    def wait(self) -> None:
        """Blocks the host."""
        self.event.synchronize()

    def join(self) -> None:
        """Blocks the compute stream, not the host."""
        self._driver.current_stream().wait_event(self.event)


class LateTicket:
    """A copy to the device that the host's thread puts into the stream when it has done what the copy comes after.

    Args:
        begun: Tells the event that follows the copy.
        driver: Gives the stream that joins it.
    """

    __slots__ = ("_begun", "_driver")
    lane = WorkLane.TO_DEVICE

    def __init__(self, begun: Begun, driver: Driver) -> None:
        self._begun = begun
        self._driver = driver

    @property
    def event(self) -> Event:
        """The event that follows the copy; the host waits until the copy is in the stream."""
        event: Event = self._begun.result()
        return event

    @property
    def is_done(self) -> bool:
        """Whether the copy has run."""
        return self._begun.done() and self.event.query()

    def wait(self) -> None:
        """Blocks the host; raises what the work before the copy raised."""
        self.event.synchronize()

    def join(self) -> None:
        """Blocks the compute stream, and the host until the copy is in its stream."""
        self._driver.current_stream().wait_event(self.event)


class _TimedStreamTicket(Timed, StreamTicket):
    pass


class _TimedLateTicket(Timed, LateTicket):
    pass


class _TimedHostTicket(Timed, HostTicket):
    pass


_TIMED: dict[type, type] = {
    StreamTicket: _TimedStreamTicket,
    LateTicket: _TimedLateTicket,
    HostTicket: _TimedHostTicket,
}
"""Tickets, and what they are in a step that is measured."""


class DeviceStreams:
    """Copies on an accelerator: a stream for each direction; see [Note: lanes].

    Args:
        device: The compute device.
        driver: Where streams come from.
    """

    def __init__(self, device: torch.device, driver: Driver) -> None:
        self.device = device
        self._driver = driver
        self._lanes = {lane: driver.new_stream() for lane in (WorkLane.TO_DEVICE, WorkLane.TO_HOST)}
        self._in_flight: collections.deque[tuple[StreamTicket, torch.Tensor]] = collections.deque()
        self._in_flight_nbytes = 0
        self._most_nbytes = _IN_FLIGHT_NBYTES
        self._times: LaneTimes | None = None

    @property
    def most_in_flight_nbytes(self) -> int:
        """The most bytes of gradients that are held; see ``hold_at_most``."""
        return self._most_nbytes

    def begin_timing(self) -> LaneTimes:
        """Measures the lanes from now on; see [Note: measured lanes]."""
        self._times = LaneTimes(self._driver)
        return self._times

    def end_timing(self) -> None:
        """Measures no more."""
        self._times = None

    def fetch(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy] = ()) -> Copy | None:
        """See ``Streams``."""
        after = tuple(after)
        work = [other.event for other in after if isinstance(other, HostTicket) and not other.is_done]
        if not work:
            return self._copy(WorkLane.TO_DEVICE, source, target, after)
        events = [other.event for other in after if isinstance(other, (StreamTicket, LateTicket))]
        events.append(self._driver.current_stream().record_event())

        def begin(stream: Stream) -> Event:
            for event in events:
                stream.wait_event(event)
            self._put(WorkLane.TO_DEVICE, source, target, stream)
            return stream.record_event()

        lane = self._lanes[WorkLane.TO_DEVICE]
        return self._make(LateTicket, self._driver.begin_after(work[-1], lane, begin), self._driver)

    def to_slice(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy] = ()) -> Copy | None:
        """See ``Streams``."""
        return self._copy(WorkLane.TO_DEVICE, source, target, after)

    def to_device(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy] = ()) -> Copy | None:
        """See ``Streams``."""
        ticket = self._copy(WorkLane.TO_DEVICE, source, target, after)
        ticket.join()
        return ticket

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """See ``Streams``."""
        lane = self._lanes[WorkLane.TO_DEVICE]
        lane.wait_stream(self._driver.current_stream())
        with self._driver.inside(lane):
            yield

    def copies_beside(self, source: torch.Tensor, target: torch.Tensor) -> bool:
        """See ``Streams``."""
        return self._driver.is_on_device(source) and self._driver.is_pinned(target)

    def to_host(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy] = ()) -> Copy | None:
        """See ``Streams``."""
        if not self.copies_beside(source, target):
            target.copy_(source)
            return None
        ticket = self._copy(WorkLane.TO_HOST, source, target, after)
        self._hold(source, ticket)
        return ticket

    def on_host(
        self, work: Callable[[], None], after: Iterable[Copy] = (), otherwise: Callable[[], None] | None = None
    ) -> Copy:
        """See ``Streams``."""
        events = [other.event for other in after if isinstance(other, (StreamTicket, LateTicket))]
        times = self._times
        if times is not None:
            work = times.of_work(work)
        return self._make(HostTicket, self._driver.on_host(work, events, otherwise))

    def on_tier_of(self, source: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """See ``Streams``."""
        if self._driver.is_on_device(source) is self._driver.is_on_device(other):
            return source
        return source.to(other.device, copy=True)

    def on_device(self, source: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
        """See ``Streams``."""
        return source.to(self.device, copy=copy or not self._driver.is_on_device(source))

    def release_in_flight(self) -> None:
        """See ``Streams``."""
        if self._in_flight:
            self._in_flight[-1][0].join()  # they are of one lane: the last one is enough
            self._in_flight.clear()
            self._in_flight_nbytes = 0

    def hold_at_most(self, nbytes: int) -> bool:
        """See ``Streams``."""
        self._most_nbytes = min(self._most_nbytes, nbytes)
        if self._in_flight_nbytes <= self._most_nbytes:
            return False
        self.release_in_flight()
        return True

    def take(self, buffer: torch.Tensor, tier: Tier, owner: str) -> None:
        """See ``Streams``."""
        self._driver.take(buffer, tier, owner)

    def free(self, buffer: torch.Tensor) -> None:
        """See ``Streams``."""
        self._driver.free(buffer)

    def close(self) -> None:
        """See ``Streams``."""
        self._driver.close()

    def _copy(self, lane: WorkLane, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy]) -> StreamTicket:
        stream = self._lanes[lane]
        stream.wait_stream(self._driver.current_stream())
        for other in after:
            if isinstance(other, HostTicket):
                other.wait()  # no stream can
            elif isinstance(other, LateTicket) or (isinstance(other, StreamTicket) and other.lane is not lane):
                stream.wait_event(other.event)
        self._put(lane, source, target, stream)
        return self._make(StreamTicket, stream.record_event(), lane, self._driver)

    def _put(self, lane: WorkLane, source: torch.Tensor, target: torch.Tensor, stream: Stream) -> None:
        times = self._times  # a late copy is put here by the host's thread, while the caller's may end the measuring
        if times is None:
            self._driver.copy(source, target, stream)
            return
        with times.around_copy(lane, stream, source.nbytes):
            self._driver.copy(source, target, stream)

    def _make(self, kind: type[_T], *args: Any) -> _T:
        """A ticket, whose waits are measured if the step is."""
        times = self._times
        if times is None:
            return kind(*args)
        ticket: Any = _TIMED[kind](*args)
        ticket.times = times
        return ticket  # type: ignore[no-any-return]

    def _hold(self, source: torch.Tensor, ticket: StreamTicket) -> None:
        """Holds a gradient until the compute stream has been told to wait for its copy; then its memory can be reused.

        ``record_stream`` would do the same by the clock of the host, which runs far ahead: every gradient in between
        would need memory of its own.
        """
        self._in_flight.append((ticket, source))
        self._in_flight_nbytes += source.nbytes
        least = _LEAST_IN_FLIGHT if self._most_nbytes else 0
        while self._in_flight_nbytes > self._most_nbytes and len(self._in_flight) > least:
            done, freed = self._in_flight.popleft()
            done.join()
            self._in_flight_nbytes -= freed.nbytes
