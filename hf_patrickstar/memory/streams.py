"""Copies between host and device, and work beside computation; see [Note: lanes] in ``lanes.py``."""

import collections
import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch

from hf_patrickstar.common.interrupts import held_back
from hf_patrickstar.memory.driver import Driver, HostThread, Work
from hf_patrickstar.memory.lanes import LaneTimes
from hf_patrickstar.schedule.clock import Lane
from hf_patrickstar.units import KIB, MIB

_AT_ONCE_NBYTES = 256 * KIB
"""The largest copy on the CPU tier that its thread is not asked for: to hand it over takes longer than to make it."""
_IN_FLIGHT_NBYTES = 256 * MIB
"""Bytes of gradients whose copies the compute stream does not wait for: some milliseconds of the bus."""
_LEAST_IN_FLIGHT = 2
"""Gradients that may be larger than that together: with one alone, computation would stand still for its copy."""
NUM_SLOTS = 3
"""Streams of updates on the device: states come, are updated and leave at the same time."""
CopyInSlot = Callable[[torch.Tensor, torch.Tensor], object]
Hold = bool | Callable[[], object]
"""Whether a tensor is held while it is copied, and perhaps what is called before its memory can be used again."""
_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
_STAGES = 4
"""Copies by way of page-locked memory that are under way at once, each through its part of that."""


class Copy:
    """The ticket of work of a thread: what the host's thread does, or a copy of the CPU tier.

    Args:
        event: Comes when it is done; of a copy that is late, what gives that event.
        lane: The lane that it runs in.
        times: Measures who waits for it.

    Attributes:
        lane: See above.
        after: The event of work of the host's thread, if that puts it into its lane when the work is done: it is late.
    """

    __slots__ = ("_event", "_times", "lane")
    after: Any = None

    def __init__(self, event: Any, lane: Lane, times: LaneTimes | None = None) -> None:
        self.lane = lane
        self._event = event
        self._times = times

    @property
    def event(self) -> Any:
        """Comes when the work is done. If it is late, the host waits for it, and gets what the work before raised."""
        if self.after is None:
            return self._event
        self.after.synchronize()
        return self._event.result()

    @property
    def is_done(self) -> bool:
        """Whether it is complete, as far as the host can tell."""
        if self.after is None:
            return bool(self._event.query())
        return self._event.done() and bool(self._event.result().query())

    def wait(self) -> None:
        """Blocks the host, and so whatever the compute device does next; raises what the work raised."""
        with _NOTHING if self._times is None else self._times.around(self.lane, Lane.HOST):
            self.event.synchronize()

    join = wait


class StreamCopy(Copy):
    """The ticket of a copy in a stream.

    Args:
        event: The event that follows the copy, or, if it comes late, what gives that event.
        lane: The lane of the copy.
        times: Measures who waits for it.
        driver: Gives the stream that joins it.
        after: See ``Copy``.
    """

    __slots__ = ("_driver", "after")

    def __init__(
        self, event: Any, lane: Lane, times: LaneTimes | None, driver: Driver, after: Any | None = None
    ) -> None:
        self._event, self.lane, self._times, self._driver, self.after = event, lane, times, driver, after

    def join(self) -> None:
        """Blocks the compute stream, and the host until the copy is in its stream."""
        times = self._times
        if times is None:
            self._join()
            return
        stream = self._driver.current_stream()
        with times.around(self.lane, Lane.HOST), times.around(self.lane, Lane.COMPUTE, stream=stream):
            self._join()

    def _join(self) -> None:
        self._driver.current_stream().wait_event(self._event if self.after is None else self.event)


class Later(Copy):
    """The ticket of work on the device that begins when somebody waits for it, or needs what it makes.

    Args:
        work: Does it; it is given a buffer of the device that gets what it makes, too, or ``None``, and returns a
            ticket, or ``None`` if it is done. If it fails, it can be called again, for what is left.
        lock: Held while it begins.
        fills: Whether it writes to all of the buffer that is used.
    """

    __slots__ = ("_fills", "_lock", "_work")

    def __init__(
        self, work: Callable[[torch.Tensor | None], Copy | None], lock: threading.RLock, *, fills: bool
    ) -> None:
        super().__init__(None, Lane.COMPUTE)
        self._work: Callable[[torch.Tensor | None], Copy | None] | None = work
        self._lock, self._fills = lock, fills

    def begin(self, buffer: torch.Tensor | None = None) -> Copy | None:
        """Begins it, unless it has been; returns its ticket, or ``None`` if it is done."""
        with self._lock, held_back():
            if self._work is not None:
                self._fills = False  # what is left, if it fails, does not fill a buffer
                self._event, self._work = self._work(buffer), None
            return self._event  # type: ignore[no-any-return]

    def fill(self, buffer: torch.Tensor) -> bool:
        """Begins it, and returns whether the buffer gets all that it makes: whoever joins it can use the buffer."""
        with self._lock:
            fills = self._fills
            self.begin(buffer if fills else None)
        return fills

    @property
    def has_begun(self) -> bool:
        """Whether all of it has been begun."""
        return self._work is None

    @property
    def event(self) -> Any:
        """See ``Copy``; asking for it begins the work."""
        ticket = self.begin()
        return None if ticket is None else ticket.event

    @property
    def is_done(self) -> bool:
        """See ``Copy``."""
        return self._work is None and (self._event is None or self._event.is_done)

    def wait(self) -> None:
        """See ``Copy``; the first who waits begins the work."""
        ticket = self.begin()
        if ticket is not None:
            ticket.wait()

    def join(self) -> None:
        """Blocks the compute stream."""
        ticket = self.begin()
        if ticket is not None:
            ticket.join()


def copy_bytes(arrays: list[Any]) -> None:
    """Copies ``arrays[1]`` to ``arrays[0]`` and lets go of both, on whichever thread this is."""
    try:
        numpy.copyto(arrays[0], arrays[1])
    finally:
        arrays.clear()


class Streams:
    """Copies between host and device. On the CPU tier, which this is, they are complete when the call returns.

    Only large ones that are started ahead are not: one thread makes them, in order.

    Args:
        device: The compute device.
        driver: Where streams come from; ``None`` if there are none.

    Attributes:
        device: See above.
        most_in_flight_nbytes: The most bytes of gradients that are held; see ``hold_at_most``.
        slots_lock: Held while an update is put into slots.
    """

    def __init__(self, device: torch.device, driver: Driver | None = None) -> None:
        self.device = device
        self.most_in_flight_nbytes = 0 if driver is None else _IN_FLIGHT_NBYTES
        self._times: LaneTimes | None = None
        self._driver = driver
        self._thread = HostThread(name="hf_patrickstar-copy") if driver is None else driver
        self._in_flight: collections.deque[tuple[Copy, torch.Tensor, Hold]] = collections.deque()
        self._in_flight_nbytes = 0
        self.slots_lock = threading.RLock()

    def begin_timing(self) -> LaneTimes:
        """Measures the lanes from now on; see [Note: measured lanes].

        Raises:
            RuntimeError: If the device cannot.
        """
        self._times = LaneTimes(self._driver)
        return self._times

    def end_timing(self) -> None:
        """Measures no more."""
        self._times = None

    def fetch(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy] = ()) -> Copy | None:
        """Starts a copy host -> device and does not wait for it.

        Args:
            source: A host tensor.
            target: A device tensor of the same shape; nobody reads it before the ticket is joined.
            after: Copies that come before it.

        Returns:
            A ticket, or ``None`` if the copy is complete.
        """
        times = self._times
        if source.nbytes <= _AT_ONCE_NBYTES or type(source) is not torch.Tensor:  # a fake tensor has no bytes
            return self.to_device(source, target)
        # One memcpy: torch's own copy would start a second team of threads beside that of the computation. The list
        # is emptied by the copy itself: when it is done nothing looks into the buffers any more.
        work: Work = functools.partial(copy_bytes, [tensor.view(torch.uint8).numpy() for tensor in (target, source)])
        if times is not None:
            work = times.of_work(work, Lane.TO_DEVICE, source.nbytes)
        return Copy(self._thread.on_host(work, ()), Lane.TO_DEVICE, times)

    def fetch_anew(self, source: torch.Tensor, after: Iterable[Copy] = ()) -> tuple[torch.Tensor, Copy | None]:
        """Does the same to new memory of the device, which is non-model data.

        Args:
            source: A host tensor.
            after: Copies that come before it.

        Returns:
            The new tensor, and what ``fetch`` returns.
        """
        target = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        return target, self.fetch(source, target, after)

    def to_device(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy] = ()) -> Copy | None:
        """Copies host -> device; kernels that are launched afterwards see the result.

        Args:
            source: A host tensor.
            target: A device tensor of the same shape.
            after: Copies that come before it.

        Returns:
            A ticket to wait for before the host overwrites ``source``, or ``None`` if the copy is complete.
        """
        times = self._times  # another thread may end the measuring meanwhile
        with _NOTHING if times is None else times.around(Lane.TO_DEVICE, None, Lane.HOST, nbytes=source.nbytes):
            target.copy_(source)
        return None

    def to_slice(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy] = ()) -> Copy | None:
        """Copies home -> device for what is launched ``beside`` afterwards.

        Args:
            source: A tensor at home, on either tier.
            target: A device tensor of the same shape.
            after: Copies that come before it.

        Returns:
            As for ``to_device``.
        """
        return self.to_device(source, target)

    def beside(self) -> contextlib.AbstractContextManager[None]:
        """Work that is launched inside waits for all copies to the device so far; the compute stream goes on beside."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def in_slot(self, number: int) -> Iterator[CopyInSlot]:
        """What is launched inside runs in a stream of its own, beside the other slots and what is computed next.

        Args:
            number: Which slot; each does what it is given in order.

        Yields:
            Copies a tensor between the tiers, in the same stream: source, target.
        """
        yield lambda source, target: target.copy_(source)

    def join_slots(self, to_device_nbytes: int, to_host_nbytes: int) -> Copy | None:
        """Returns a ticket for all that slots were given, or ``None`` if it is done.

        Args:
            to_device_nbytes: Bytes that have crossed since the last time.
            to_host_nbytes: Likewise.
        """
        return None

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in memory that copies cross from beside computation."""
        return self._driver is not None and self._driver.is_on_device(tensor)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor on the host can be copied to beside computation."""
        return self._driver is not None and self._driver.is_pinned(tensor)

    def to_host(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        after: Iterable[Copy] = (),
        *,
        holds: Hold = True,
        is_beside: bool | None = None,
    ) -> Copy | None:
        """Copies device -> host; the memory of ``source`` is held until it can be used again.

        Args:
            source: What to copy; any device, any shape.
            target: A host tensor of the same shape.
            after: Copies that come before it; if the copy is not made beside, the host must have waited for them.
            holds: If false, the caller holds ``source`` until it has joined the copy. What is called may be called at
                once; if it fails, nothing has been written.
            is_beside: Whether ``source`` is on the device and ``target`` page-locked, if the caller knows.

        Returns:
            A ticket to wait for before the host reads ``target``, or ``None`` if the copy is complete.
        """
        times = self._times
        with _NOTHING if times is None else times.around(Lane.TO_HOST, None, Lane.HOST, nbytes=source.nbytes):
            target.copy_(source)
        return None

    def copy_through(self, source: torch.Tensor, target: torch.Tensor, stage: torch.Tensor) -> None:
        """Copies between the tiers, and waits: pageable memory of the host by way of page-locked memory.

        Args:
            source: A contiguous tensor on either tier.
            target: One of the same type and shape on the other.
            stage: Page-locked memory that is overwritten, if copies to and from it run beside the host.
        """
        target.copy_(source)

    def on_host(
        self, work: Work, after: Iterable[Copy] = (), otherwise: Callable[[], None] | None = None
    ) -> Copy | None:
        """Has the host's thread begin work beside the host, in the order of these calls.

        Args:
            work: Reads and writes memory of the host alone. It may return what its workers go on with, which the next
                work does not wait for.
            after: What comes before it.
            otherwise: Is done in place of ``work`` if earlier work has failed and nobody has got the error yet, and
                after ``work`` if that fails. Work without it is always done.

        Returns:
            A ticket, or ``None`` if the work is done. The first who waits for this work, or for later work, gets what
            the work raised.

        Raises:
            BaseException: What ``work`` raised, where it is done at once; ``otherwise`` is the caller's then.
        """
        for other in after:  # the cores are those of the computation, so the work is done at once
            other.wait()
        work()
        return None

    def on_tier_of(self, source: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The values of a tensor on the tier of another one; the host waits for them if they have to cross.

        Args:
            source: A tensor.
            other: A tensor on the tier where the values are needed.

        Returns:
            ``source`` itself if it is there.
        """
        if self.is_on_device(source) is self.is_on_device(other):
            return source
        return source.to(other.device, copy=True)

    def on_device(self, source: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
        """The values of a tensor on the compute device; the host waits for them if they have to cross.

        Args:
            source: A tensor on either tier.
            copy: Whether they are copied even if they are there.

        Returns:
            ``source`` itself if it is there and not copied.
        """
        crosses = self._driver is not None and not self._driver.is_on_device(source)
        return source.to(self.device, copy=copy or crosses)

    def release_in_flight(self) -> None:
        """Lets go of gradients in flight: whatever the compute stream does next comes after their copies."""
        for _, _, holds in self._in_flight:
            if callable(holds):
                holds()
        if self._in_flight:
            self._in_flight[-1][0].join()  # they are of one lane: the last one is enough
            self._in_flight.clear()
            self._in_flight_nbytes = 0

    def hold_at_most(self, nbytes: int) -> bool:
        """From now on holds no more gradients in flight than that; lets go of them all if there are more.

        With 0, because the device has no room for them, the compute stream waits for each copy of a gradient. So a step
        that follows a plan does not hold what the step that was recorded for the plan had to let go of.

        Args:
            nbytes: Their bytes. Once lowered, the limit is not raised again.

        Returns:
            Whether that has freed any memory.
        """
        self.most_in_flight_nbytes = min(self.most_in_flight_nbytes, nbytes)
        if self._in_flight_nbytes <= self.most_in_flight_nbytes:
            return False
        self.release_in_flight()
        return True

    def close(self) -> None:
        """Waits for the work that was started, and ends the thread that does it."""
        self._thread.close()


class DeviceStreams(Streams):
    """Copies on an accelerator: a stream for each direction; see [Note: lanes].

    Args:
        device: The compute device.
        driver: Where streams come from.
    """

    _driver: Driver

    def __init__(self, device: torch.device, driver: Driver) -> None:
        super().__init__(device, driver)
        self._lanes = {lane: driver.new_stream() for lane in (Lane.TO_DEVICE, Lane.TO_HOST)}
        self._slots: list[torch.Stream] = []
        self._slots_begin: Any = None  # a moment, if lanes are measured

    def fetch(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy] = ()) -> Copy | None:
        """See ``Streams``."""
        after = tuple(after)
        work = [other.event for other in after if other.lane is Lane.HOST_WORK and not other.is_done]
        if not work:
            return self._copy(Lane.TO_DEVICE, source, target, after)
        events = [other.event for other in after if other.lane is not Lane.HOST_WORK]
        events.append(self._driver.current_stream().record_event())

        def begin(stream: torch.Stream) -> torch.Event:
            for event in events:
                stream.wait_event(event)
            self._put(Lane.TO_DEVICE, source, target, stream)
            return stream.record_event()

        begun = self._driver.begin_after(work[-1], self._lanes[Lane.TO_DEVICE], begin)
        return StreamCopy(begun, Lane.TO_DEVICE, self._times, self._driver, work[-1])

    def to_slice(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy] = ()) -> Copy | None:
        """See ``Streams``."""
        return self._copy(Lane.TO_DEVICE, source, target, after)

    def to_device(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy] = ()) -> Copy | None:
        """See ``Streams``."""
        ticket = self._copy(Lane.TO_DEVICE, source, target, after)
        ticket.join()
        return ticket

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """See ``Streams``."""
        lane = self._lanes[Lane.TO_DEVICE]
        lane.wait_stream(self._driver.current_stream())
        with self._driver.inside(lane):
            yield

    @contextlib.contextmanager
    def in_slot(self, number: int) -> Iterator[CopyInSlot]:
        """See ``Streams``."""
        if not self._slots:
            self._slots = [self._driver.new_stream() for _ in range(NUM_SLOTS)]
        stream = self._slots[number]
        stream.wait_stream(self._driver.current_stream())

        if self._times is not None and self._slots_begin is None:
            self._slots_begin = self._driver.record_moment(stream)
        with self._driver.launching_in(stream):
            yield lambda source, target: self._driver.copy(source, target, stream)

    def join_slots(self, to_device_nbytes: int, to_host_nbytes: int) -> Copy | None:
        """See ``Streams``. Tiles are too many to be measured one by one."""
        first, *others = self._slots
        for other in others:
            first.wait_stream(other)
        times, begin, self._slots_begin = self._times, self._slots_begin, None
        if times is not None and begin is not None:
            end = self._driver.record_moment(first)
            times.add(Lane.TO_DEVICE, begin, end, to_device_nbytes)
            times.add(Lane.TO_HOST, begin, end, to_host_nbytes)
        return StreamCopy(first.record_event(), Lane.COMPUTE, times, self._driver)

    def to_host(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        after: Iterable[Copy] = (),
        *,
        holds: Hold = True,
        is_beside: bool | None = None,
    ) -> Copy | None:
        """See ``Streams``."""
        if is_beside is None:
            is_beside = self.is_on_device(source) and self.is_pinned(target)
        if not is_beside:
            target.copy_(source)
            return None
        if holds:
            self._let_go_for(source.nbytes)
        is_held = holds and self.most_in_flight_nbytes > 0
        if callable(holds) and not is_held:
            holds()
        ticket = self._copy(Lane.TO_HOST, source, target, after)
        if is_held:
            self._in_flight.append((ticket, source, holds))
            self._in_flight_nbytes += source.nbytes
        elif holds:
            ticket.join()
        return ticket

    def copy_through(self, source: torch.Tensor, target: torch.Tensor, stage: torch.Tensor) -> None:
        """See ``Streams``."""
        to_device = self._driver.is_on_device(target)
        if self._driver.is_on_device(source) is to_device or not self._driver.is_pinned(stage):
            target.copy_(source)
            return
        one, other, locked = (tensor.view(torch.uint8) for tensor in (source, target, stage))
        nbytes = max(stage.nbytes // _STAGES, 1)
        slots = locked.split(nbytes)[:_STAGES]
        under_way: collections.deque[tuple[Copy, torch.Tensor, torch.Tensor]] = collections.deque()

        def finish() -> None:
            copy, slot, place = under_way.popleft()
            copy.wait()
            if not to_device:
                place.copy_(slot)

        try:
            for part, place, whole in zip(one.split(nbytes), other.split(nbytes), itertools.cycle(slots), strict=False):
                if len(under_way) == len(slots):
                    finish()
                slot = whole[: part.numel()]
                if to_device:
                    copy = self._copy(Lane.TO_DEVICE, slot.copy_(part), place, ())
                else:
                    copy = self._copy(Lane.TO_HOST, part, slot, ())
                under_way.append((copy, slot, place))
        finally:
            while under_way:
                finish()

    def on_host(
        self, work: Work, after: Iterable[Copy] = (), otherwise: Callable[[], None] | None = None
    ) -> Copy | None:
        """See ``Streams``."""
        events = [other.event for other in after if other.lane is not Lane.HOST_WORK]
        times = self._times
        if times is not None:
            work = times.of_work(work, Lane.HOST_WORK)
        return Copy(self._driver.on_host(work, events, otherwise), Lane.HOST_WORK, times)

    def _copy(self, lane: Lane, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy]) -> StreamCopy:
        stream = self._lanes[lane]
        stream.wait_stream(self._driver.current_stream())
        for other in after:
            if other.lane is Lane.HOST_WORK:
                other.wait()  # no stream can
            elif other.lane is not lane or other.after is not None:
                stream.wait_event(other.event)
        self._put(lane, source, target, stream)
        return StreamCopy(stream.record_event(), lane, self._times, self._driver)

    def _put(self, lane: Lane, source: torch.Tensor, target: torch.Tensor, stream: torch.Stream) -> None:
        times = self._times  # a late copy is put here by the host's thread, while the caller's may end the measuring
        with _NOTHING if times is None else times.around(lane, None, stream=stream, nbytes=source.nbytes):
            self._driver.copy(source, target, stream)

    def _let_go_for(self, nbytes: int) -> None:
        """Makes the compute stream wait for the copies of gradients, until another one can be held beside the rest.

        A gradient is held until then, and its memory can be reused. ``record_stream`` would do the same by the clock of
        the host, which runs far ahead: every gradient in between would need memory of its own.
        """
        most = self.most_in_flight_nbytes
        while self._in_flight_nbytes + nbytes > most and len(self._in_flight) >= _LEAST_IN_FLIGHT:
            done, freed, holds = self._in_flight[0]
            if callable(holds):
                holds()
            done.join()
            self._in_flight.popleft()
            self._in_flight_nbytes -= freed.nbytes


def make_streams(device: torch.device) -> Streams:
    """The streams of a device.

    Args:
        device: The compute device.
    """
    return Streams(device) if device.type == "cpu" else DeviceStreams(device, Driver(device))


def synchronize(device: torch.device) -> None:
    """Blocks the host until the compute stream has done all that it was given.

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
