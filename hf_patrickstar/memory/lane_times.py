"""When the lanes of an accelerator worked, in a step that is measured.

[Note: measured lanes]
A moment of a stream has a time that can be read when the stream has come to it. While a step is measured, moments are
put around every copy, and around what the compute stream waits for; the host's thread, and the host where it waits,
look at their own clock. The first moment is put into a stream that has nothing to do, while the host looks at its
clock: so all times are those of ``time.perf_counter_ns``, later by the few microseconds that the host takes for that.
The times are read after the step, so nothing in the step waits for them.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from hf_patrickstar.memory.lanes import Driver, Moment, TimedCopy, WorkLane

_NS_PER_MS = 1_000_000
_LEAST_STOP_NS = 20_000
"""What stands still for less is not late: it is the time of the call, and of the moments around it."""


class Stop(NamedTuple):
    """Something stood still until work of another lane was done.

    Attributes:
        lane: Whose work it waited for.
        begin_ns: Since when, in nanoseconds of ``time.perf_counter_ns``.
        end_ns: Until when.
        is_host: Whether the host stood still; else the compute stream.
    """

    lane: WorkLane
    begin_ns: int
    end_ns: int
    is_host: bool


class LaneTimes:
    """Measures the lanes of an accelerator from now on; see [Note: measured lanes].

    Args:
        driver: The driver of its streams.

    Raises:
        RuntimeError: If moments have no times there.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._copies: list[tuple[WorkLane, Moment, Moment, int]] = []
        self._stops: list[tuple[WorkLane, Moment, Moment]] = []
        self._works: list[TimedCopy] = []
        self._waits: list[Stop] = []
        self._first = self.mark()
        self._first.synchronize()
        self._first_ns = time.perf_counter_ns()
        self._first.elapsed_time(self._first)

    def mark(self) -> Moment:
        """A moment of the compute stream: after all that it was told so far."""
        return self._driver.record_moment(self._driver.current_stream())

    def ns_of(self, moment: Moment) -> int:
        """The time of a moment, in nanoseconds of ``time.perf_counter_ns``; waits until it has come."""
        moment.synchronize()
        return self._first_ns + round(self._first.elapsed_time(moment) * _NS_PER_MS)

    @contextlib.contextmanager
    def around_copy(self, lane: WorkLane, stream: Any, nbytes: int) -> Iterator[None]:
        """Measures the copy that is put into a stream inside the block."""
        begin = self._driver.record_moment(stream)
        yield
        self._copies.append((lane, begin, self._driver.record_moment(stream), nbytes))

    @contextlib.contextmanager
    def around_stop(self, lane: WorkLane) -> Iterator[None]:
        """Measures for how long the compute stream waits for what it is told inside the block."""
        begin = self.mark()
        yield
        self._stops.append((lane, begin, self.mark()))

    @contextlib.contextmanager
    def around_wait(self, lane: WorkLane) -> Iterator[None]:
        """Measures for how long the host waits inside the block."""
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            self._waits.append(Stop(lane, begin, time.perf_counter_ns(), True))

    def of_work(self, work: Callable[[], None]) -> Callable[[], None]:
        """The same work for the host's thread, which measures it."""

        def timed() -> None:
            begin = time.perf_counter_ns()
            try:
                work()
            finally:
                self._works.append(TimedCopy(WorkLane.HOST_WORK, begin, time.perf_counter_ns(), 0, True))

        return timed

    def works(self) -> list[TimedCopy]:
        """What the lanes beside computation did; waits until it is done. Work of the host's thread has no bytes."""
        copies = [
            TimedCopy(lane, self.ns_of(begin), self.ns_of(end), nbytes, True)
            for lane, begin, end, nbytes in self._copies
        ]
        self._driver.on_host(_nothing, ()).synchronize()  # comes after all work that the thread was given
        return [*copies, *self._works]

    def stops(self) -> list[Stop]:
        """Where the compute stream, and the host, stood still for long enough to be seen."""
        found = [Stop(lane, self.ns_of(begin), self.ns_of(end), False) for lane, begin, end in self._stops]
        return [stop for stop in (*found, *self._waits) if stop.end_ns - stop.begin_ns >= _LEAST_STOP_NS]


def _nothing() -> None:
    """Nothing."""


class Timed:
    """What a ticket is, too, whose waits are measured.

    Attributes:
        times: What measures them.
        lane: See ``Copy``.
    """

    times: LaneTimes
    lane: WorkLane

    def wait(self) -> None:
        """See ``Ticket``."""
        with self.times.around_wait(self.lane):
            super().wait()  # type: ignore[misc]

    def join(self) -> None:
        """See ``Ticket``; the host may have to wait, too."""
        with self.times.around_wait(self.lane), self.times.around_stop(self.lane):
            super().join()  # type: ignore[misc]
