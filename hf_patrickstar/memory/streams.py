"""Work beside computation: every stream, event and copy thread.

[Note: lanes]
On an accelerator work is put into lanes, each of which runs its work in order: the compute stream, which belongs to the
user, and one stream for copies in each direction. The host puts work into lanes and runs ahead of all of them. Nothing
orders work of different lanes but what is said here:

- A copy begins after all that the compute stream was told before the copy was started: its source is written, and
  kernels that use the memory of its target are done.
- A copy begins after the copies that its caller names (``after``): those that use the same home.
- The compute stream goes on after a copy whose ticket is joined, the host after one whose ticket is waited for.
- The memory of a gradient is held until the compute stream was told to wait for its copy.

On a machine without an accelerator one thread makes the copies that are started ahead, and all others are complete when
the call returns.
"""

import collections
import concurrent.futures
import contextlib
import enum
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy
import torch

from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.units import KIB, MIB

_IN_FLIGHT_NBYTES = 64 * MIB
_AT_ONCE_NBYTES = 256 * KIB


class CopyLane(enum.Enum):
    """A lane of copies."""

    TO_DEVICE = "host -> device"
    TO_HOST = "device -> host"


class Ticket(Protocol):
    """Work that may still be under way."""

    @property
    def is_done(self) -> bool:
        """Whether it is complete, as far as the host can tell."""
        ...

    def wait(self) -> None:
        """Blocks until the host may read the target, or overwrite the source."""
        ...

    def join(self) -> None:
        """Makes whatever the compute device does next come after the work."""
        ...


class Copy(Ticket, Protocol):
    """The ticket of a copy."""

    @property
    def lane(self) -> CopyLane:
        """The lane that it runs in."""
        ...


class Event(Protocol):
    """What ``torch.Event`` does: a point in a stream."""

    def query(self) -> bool:
        """Whether the stream has come to it."""
        ...

    def synchronize(self) -> None:
        """Blocks the host until it has."""
        ...


class Stream(Protocol):
    """What ``torch.Stream`` does: work in order."""

    def wait_stream(self, other: Any, /) -> None:
        """Makes what comes next wait for all that the other stream was told."""
        ...

    def wait_event(self, event: Any, /) -> None:
        """Makes what comes next wait for an event."""
        ...

    def record_event(self) -> Event:
        """An event that comes when all is done that the stream was told."""
        ...

    def synchronize(self) -> None:
        """Blocks the host until all is done that the stream was told."""
        ...


class Driver(Protocol):
    """Where the streams of a device come from, and what copies on them."""

    def new_stream(self) -> Stream:
        """A stream."""
        ...

    def current_stream(self) -> Stream:
        """The compute stream of this thread."""
        ...

    def inside(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        """Makes a stream the current one of this thread."""
        ...

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device."""
        ...

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor is page-locked, so that a copy of it does not block the host."""
        ...

    def copy(self, source: torch.Tensor, target: torch.Tensor, stream: Stream) -> None:
        """Puts a copy between host and device into a stream; it blocks the host if the host tensor is not pinned."""
        ...

    def take(self, buffer: torch.Tensor, tier: Tier, owner: str) -> None:
        """See ``Streams``."""
        ...

    def free(self, buffer: torch.Tensor) -> None:
        """See ``Streams``."""
        ...


class AcceleratorDriver:
    """The driver of any accelerator that torch knows.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
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


class Streams(Protocol):
    """Copies between host and device.

    Attributes:
        device: The compute device.
    """

    device: torch.device

    def fetch(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy] = ()) -> Copy | None:
        """Starts a copy host -> device and does not wait for it.

        Args:
            source: A host tensor.
            target: A device tensor of the same shape; nobody reads it before the ticket is joined.
            after: Copies that come before it.

        Returns:
            A ticket, or ``None`` if the copy is complete.
        """
        ...

    def to_device(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy] = ()) -> Copy | None:
        """Copies host -> device; kernels that are launched afterwards see the result.

        Args:
            source: A host tensor.
            target: A device tensor of the same shape.
            after: Copies that come before it.

        Returns:
            A ticket to wait for before the host overwrites ``source``, or ``None`` if the copy is complete.
        """
        ...

    def to_slice(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy] = ()) -> Copy | None:
        """Copies home -> device for what is launched ``beside`` afterwards.

        Args:
            source: A tensor at home, on either tier.
            target: A device tensor of the same shape.
            after: Copies that come before it.

        Returns:
            As for ``to_device``.
        """
        ...

    def beside(self) -> contextlib.AbstractContextManager[None]:
        """Work that is launched inside waits for all copies to the device so far; the compute stream goes on beside."""
        ...

    def copies_beside(self, source: torch.Tensor, target: torch.Tensor) -> bool:
        """Whether ``to_host`` would return before the copy is complete."""
        ...

    def to_host(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy] = ()) -> Copy | None:
        """Copies device -> host; the memory of ``source`` is held until it can be used again.

        Args:
            source: What to copy; any device, any shape.
            target: A host tensor of the same shape.
            after: Copies that come before it; if the copy is not made beside, the host must have waited for them.

        Returns:
            A ticket to wait for before the host reads ``target``, or ``None`` if the copy is complete.
        """
        ...

    def on_tier_of(self, source: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The values of a tensor on the tier of another one; the host waits for them if they have to cross.

        Args:
            source: A tensor.
            other: A tensor on the tier where the values are needed.

        Returns:
            ``source`` itself if it is there.
        """
        ...

    def release_in_flight(self) -> None:
        """Lets go of gradients in flight: whatever the compute stream does next comes after their copies."""
        ...

    def hold_none(self) -> bool:
        """Lets go of gradients in flight, and from now on holds none: the device has no room for them.

        The compute stream then waits for each copy of a gradient. So a step that follows a plan does not hold what the
        step that was recorded for the plan had to let go of.

        Returns:
            Whether that has freed any memory.
        """
        ...

    def take(self, buffer: torch.Tensor, tier: Tier, owner: str) -> None:
        """Is told of a buffer that is used from now on; one that was kept comes again.

        Args:
            buffer: The buffer.
            tier: Where it is.
            owner: What it is used for.
        """
        ...

    def free(self, buffer: torch.Tensor) -> None:
        """Is told of a buffer whose memory is given back."""
        ...

    def close(self) -> None:
        """Waits for the copies, and ends the threads that make them."""
        ...


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

    def __init__(self, event: Event, lane: CopyLane, driver: Driver) -> None:
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


class DeviceStreams:
    """Copies on an accelerator: a stream for each direction; see [Note: lanes].

    Args:
        device: The compute device.
        driver: Where streams come from.
    """

    def __init__(self, device: torch.device, driver: Driver) -> None:
        self.device = device
        self._driver = driver
        self._lanes = {lane: driver.new_stream() for lane in CopyLane}
        self._in_flight: collections.deque[tuple[StreamTicket, torch.Tensor]] = collections.deque()
        self._in_flight_nbytes = 0
        self._most_nbytes = _IN_FLIGHT_NBYTES

    def fetch(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy] = ()) -> Copy | None:
        """See ``Streams``."""
        return self._copy(CopyLane.TO_DEVICE, source, target, after)

    to_slice = fetch

    def to_device(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy] = ()) -> Copy | None:
        """See ``Streams``."""
        ticket = self._copy(CopyLane.TO_DEVICE, source, target, after)
        ticket.join()
        return ticket

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """See ``Streams``."""
        lane = self._lanes[CopyLane.TO_DEVICE]
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
        ticket = self._copy(CopyLane.TO_HOST, source, target, after)
        self._hold(source, ticket)
        return ticket

    def on_tier_of(self, source: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """See ``Streams``."""
        if self._driver.is_on_device(source) is self._driver.is_on_device(other):
            return source
        return source.to(other.device, copy=True)

    def release_in_flight(self) -> None:
        """See ``Streams``."""
        if self._in_flight:
            self._in_flight[-1][0].join()  # they are of one lane: the last one is enough
            self._in_flight.clear()
            self._in_flight_nbytes = 0

    def hold_none(self) -> bool:
        """See ``Streams``."""
        held, self._most_nbytes = self._in_flight_nbytes, 0
        self.release_in_flight()
        return held > 0

    def take(self, buffer: torch.Tensor, tier: Tier, owner: str) -> None:
        """See ``Streams``."""
        self._driver.take(buffer, tier, owner)

    def free(self, buffer: torch.Tensor) -> None:
        """See ``Streams``."""
        self._driver.free(buffer)

    def close(self) -> None:
        """See ``Streams``."""

    def _copy(self, lane: CopyLane, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy]) -> StreamTicket:
        stream = self._lanes[lane]
        stream.wait_stream(self._driver.current_stream())
        for other in after:
            if other.lane is not lane and isinstance(other, StreamTicket):
                stream.wait_event(other.event)
        self._driver.copy(source, target, stream)
        return StreamTicket(stream.record_event(), lane, self._driver)

    def _hold(self, source: torch.Tensor, ticket: StreamTicket) -> None:
        """Holds a gradient until the compute stream has been told to wait for its copy; then its memory can be reused.

        ``record_stream`` would do the same by the clock of the host, which runs far ahead: every gradient in between
        would need memory of its own.
        """
        self._in_flight.append((ticket, source))
        self._in_flight_nbytes += source.nbytes
        while self._in_flight_nbytes > self._most_nbytes and len(self._in_flight) > bool(self._most_nbytes):
            done, freed = self._in_flight.popleft()
            done.join()
            self._in_flight_nbytes -= freed.nbytes


# Without one


class ThreadTicket:
    """A copy in the copy thread of the budgeted CPU tier.

    Args:
        future: What the thread fulfils.
    """

    __slots__ = ("_future",)
    lane = CopyLane.TO_DEVICE

    def __init__(self, future: "concurrent.futures.Future[None]") -> None:
        self._future = future

    @property
    def is_done(self) -> bool:
        """Whether the thread has finished it."""
        return self._future.done()

    def wait(self) -> None:
        """Blocks until the copy is complete, and raises the error that it ended with."""
        self._future.result()

    join = wait


def copy_bytes(arrays: list[Any]) -> None:
    """Copies ``arrays[1]`` to ``arrays[0]`` and lets go of both, on whichever thread this is."""
    try:
        numpy.copyto(arrays[0], arrays[1])
    finally:
        arrays.clear()


class ThreadStreams:
    """Copies on the budgeted CPU tier: those that are started ahead run in order in one thread.

    Small ones are made at once: to hand one of those to the thread takes longer than to make it.

    Args:
        device: The compute device.
        copy: What the copy thread does with a pair of byte arrays, target first; it lets go of them.
        at_once_nbytes: The largest copy that the thread is not asked for.
    """

    def __init__(
        self,
        device: torch.device,
        copy: Callable[[list[Any]], None] = copy_bytes,
        at_once_nbytes: int = _AT_ONCE_NBYTES,
    ) -> None:
        self.device = device
        self._copy = copy
        self._at_once_nbytes = at_once_nbytes
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None

    def fetch(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy] = ()) -> Copy | None:
        """See ``Streams``."""
        if source.nbytes <= self._at_once_nbytes or type(source) is not torch.Tensor:  # a fake tensor has no bytes
            target.copy_(source)
            return None
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="hf_patrickstar-copy")
        # One memcpy: torch's own copy would start a second team of threads beside that of the computation. The list
        # is emptied by the copy itself: when it is done nothing looks into the buffers any more.
        arrays = [tensor.view(torch.uint8).numpy() for tensor in (target, source)]
        return ThreadTicket(self._thread.submit(self._copy, arrays))

    def to_device(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy] = ()) -> Copy | None:
        """See ``Streams``."""
        target.copy_(source)
        return None

    to_slice = to_device

    def beside(self) -> contextlib.AbstractContextManager[None]:
        """See ``Streams``."""
        return contextlib.nullcontext()

    def copies_beside(self, source: torch.Tensor, target: torch.Tensor) -> bool:
        """See ``Streams``."""
        return False

    def to_host(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy] = ()) -> Copy | None:
        """See ``Streams``."""
        target.copy_(source)
        return None

    def on_tier_of(self, source: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """See ``Streams``: all memory is that of the host."""
        return source

    def release_in_flight(self) -> None:
        """Nothing is in flight."""

    def hold_none(self) -> bool:
        """Nothing is in flight."""
        return False

    def take(self, buffer: torch.Tensor, tier: Tier, owner: str) -> None:
        """Nothing to do."""

    def free(self, buffer: torch.Tensor) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Ends the copy thread, when what was started is done."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
