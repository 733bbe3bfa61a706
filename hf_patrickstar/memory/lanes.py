"""What may run beside computation, how to wait for it, and when it ran in a step that is measured.

[Note: lanes]
On an accelerator work is put into lanes, each of which runs its work in order: the compute stream, which belongs to the
user, and one stream for copies in each direction. The host puts work into lanes and runs ahead of all of them. Nothing
orders work of different lanes but what is said here:

- A copy begins after all that the compute stream was given before the copy was started: its source is written, and
  kernels that use the memory of its target are done.
- A copy begins after the copies that its caller names (``after``): those that use the same home.
- The compute stream goes on after a copy whose ticket is joined, the host after one whose ticket is waited for.
- The memory of a gradient is held until the compute stream has been made to wait for its copy.
- Work of the host's thread begins after what its caller names, and the host goes on beside it. No stream can wait for
  it: a copy that is started ahead is put into its lane by that thread, when the work is done; where another copy comes
  after it, or its ticket is joined, the host waits.

On a machine without an accelerator one thread makes the copies that are started ahead, and all others, and the work of
the host's thread, are complete when the call returns.

[Note: measured lanes]
A moment of a stream has a time that can be read when the stream has come to it. While a step is measured, moments are
put around every copy, and around what the compute stream waits for; threads, and the host where it waits, look at their
own clock. The first moment is put into a stream that has nothing to do, while the host looks at its clock: so all times
are those of ``time.perf_counter_ns``, later by the few microseconds that the host takes for that. The times are read
after the step, so nothing in the step waits for them.
"""

import contextlib
import enum
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from hf_patrickstar.memory.driver import Driver, Pending, Work

_NS_PER_MS = 1_000_000
_LEAST_STOP_NS = 20_000
"""What stands still for less is not late: it is the time of the call, and of the moments around it."""


class WorkLane(enum.Enum):
    """A lane beside computation: copies in one direction, or a thread of the host."""

    TO_DEVICE = "host -> device"
    TO_HOST = "device -> host"
    HOST_WORK = "host work"

    __hash__ = object.__hash__  # members are compared by identity; Enum's own is a Python function


class Ticket(Protocol):
    """Work that may still be under way: a copy, work of the host's thread, or a collective."""

    @property
    def is_done(self) -> bool:
        """Whether it is complete, as far as the host can tell."""

    def wait(self) -> None:
        """Blocks until the host may read the target, or overwrite the source; raises what the work raised."""

    def join(self) -> None:
        """Makes whatever the compute device does next come after the work."""


class TimedCopy(NamedTuple):
    """Work of a lane that was measured: when it began and ended, in nanoseconds of ``time.perf_counter_ns``.

    ``is_ahead``: whether it was done beside the caller, who else stood still.
    """

    lane: WorkLane
    begin_ns: int
    end_ns: int
    nbytes: int
    is_ahead: bool


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
    """Measures lanes from now on; see [Note: measured lanes].

    Args:
        driver: The driver of an accelerator's streams; by default there are none, but threads.

    Raises:
        RuntimeError: If moments have no times there.
    """

    def __init__(self, driver: Driver | None = None) -> None:
        self._copies: list[tuple[WorkLane, Any, Any, int]] = []
        self._stops: list[tuple[WorkLane, Any, Any]] = []
        self._works: list[TimedCopy] = []
        self._waits: list[Stop] = []
        self._worked_until_ns = 0
        if driver is not None:
            self._driver = driver
            self._first = self.mark()
            self._first.synchronize()
            self._first_ns = time.perf_counter_ns()
            self._first.elapsed_time(self._first)

    def mark(self) -> Any:
        """A moment of the compute stream: after all that it was given so far."""
        return self._driver.record_moment(self._driver.current_stream())

    def ns_of(self, moment: Any) -> int:
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
    def around_join(self, lane: WorkLane) -> Iterator[None]:
        """Measures for how long the compute stream, and the host, wait for what the stream is told inside the block."""
        with self.around_wait(lane):
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

    def of_work(self, work: Callable[[], Any], lane: WorkLane, nbytes: int = 0, *, is_ahead: bool = True) -> Work:
        """The same work for a thread, which measures it, with what its workers do."""

        def timed() -> Pending | None:
            begin, future = time.perf_counter_ns(), None

            def end(_: object = None) -> None:
                now, since = time.perf_counter_ns(), begin
                if lane is WorkLane.HOST_WORK:  # workers have one queue: an update begins when the one before has ended
                    since, self._worked_until_ns = max(begin, self._worked_until_ns), now
                self._works.append(TimedCopy(lane, since, now, nbytes, is_ahead))

            try:
                pending = work()
                future = getattr(pending, "future", None)
            finally:
                if future is None:
                    end()
            if future is None:
                return None
            future.add_done_callback(end)
            return pending  # type: ignore[no-any-return]

        return timed

    def works(self) -> list[TimedCopy]:
        """What lanes did; waits until an accelerator's have done it. Work of the host's thread has no bytes."""
        if self._copies:
            self._driver.finish()
        found = ((lane, self.ns_of(begin), self.ns_of(end), nbytes) for lane, begin, end, nbytes in self._copies)
        return [*(TimedCopy(*copy, is_ahead=True) for copy in found), *self._works]

    def stops(self) -> list[Stop]:
        """Where the compute stream, and the host, stood still for long enough to be seen."""
        found = [Stop(lane, self.ns_of(begin), self.ns_of(end), False) for lane, begin, end in self._stops]
        return [stop for stop in (*found, *self._waits) if stop.end_ns - stop.begin_ns >= _LEAST_STOP_NS]
