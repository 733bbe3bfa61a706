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
Every run measures a step, with clocks of its own. ``torch.profiler`` cannot do that in every run: a process has one
session, and where a user's callback begins a second one, both end without any event (torch 2.13).

A moment of a stream has a time that can be read when the stream has come to it. While a step is measured, moments are
put around every copy, and around what the compute stream waits for; threads, and the host where it waits, look at their
own clock. The first moment is put into a stream that has nothing to do, while the host looks at its clock: so all times
are those of ``time.perf_counter_ns``, later by the few microseconds that the host takes for that. The times are read
after the step, so nothing in the step waits for them.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from hf_patrickstar.counts import Counts
from hf_patrickstar.memory.driver import Driver, Pending, Work
from hf_patrickstar.schedule.clock import Lane
from hf_patrickstar.schedule.script import Part

_NS_PER_MS = 1_000_000
_LEAST_WAIT_NS = 20_000
"""Who waits for less is not held up: it is the time of the call, and of the moments around it."""


class Ticket(Protocol):
    """Work that may still be under way: a copy, work of the host's thread, or a collective."""

    @property
    def is_done(self) -> bool:
        """Whether it is complete, as far as the host can tell."""

    def wait(self) -> None:
        """Blocks until the host may read the target, or overwrite the source; raises what the work raised."""

    def join(self) -> None:
        """Makes whatever the compute device does next come after the work."""


class Timed(NamedTuple):
    """Something that was measured.

    Attributes:
        lane: Where work ran.
        waiter: Who stood still until it was done: the host, or the compute lane; ``None`` for the work itself.
        begin: When it began: nanoseconds of ``time.perf_counter_ns``, or a moment of a stream that has such a time.
        end: When it ended.
        nbytes: The bytes of a copy; 0 for work of the host's thread, and for who waits for a ticket.
    """

    lane: Lane
    waiter: Lane | None
    begin: Any
    end: Any
    nbytes: int = 0


class LaneTimes:
    """Measures lanes from now on; see [Note: measured lanes].

    Args:
        driver: The driver of an accelerator's streams; by default there are none, but threads.

    Attributes:
        has_streams: Whether there is one.
        parts: Parts of the step, and what ``now`` returned at the begin and at the end of each.

    Raises:
        RuntimeError: If moments have no times there.
    """

    def __init__(self, driver: Driver | None = None) -> None:
        self.has_streams = driver is not None
        self.parts: list[tuple[str, tuple[int, Any], tuple[int, Any]]] = []
        self._found: list[Timed] = []
        self._worked_until_ns = dict.fromkeys(Lane, 0)
        if driver is not None:
            self._driver = driver
            self._first = driver.record_moment(driver.current_stream())
            self._first.synchronize()
            self._first_ns = time.perf_counter_ns()
            self._first.elapsed_time(self._first)

    def now(self) -> tuple[int, Any]:
        """The host's time, and where there are streams, the moment after all that the compute stream was given."""
        moment = self._driver.record_moment(self._driver.current_stream()) if self.has_streams else None
        return time.perf_counter_ns(), moment

    def ns_of(self, moment: Any) -> int:
        """The time of a moment, in nanoseconds of ``time.perf_counter_ns``; waits until it has come."""
        if isinstance(moment, int):
            return moment
        moment.synchronize()
        return self._first_ns + round(self._first.elapsed_time(moment) * _NS_PER_MS)

    @contextlib.contextmanager
    def around(self, lane: Lane, *waiters: Lane | None, stream: Any = None, nbytes: int = 0) -> Iterator[None]:
        """Measures what is done inside the block, for each waiter: by the clock of a stream, or else of the host."""
        begin = self._moment(stream)
        try:
            yield
        finally:
            end = self._moment(stream)
            self._found.extend(Timed(lane, waiter, begin, end, nbytes) for waiter in waiters)

    def _moment(self, stream: Any) -> Any:
        return time.perf_counter_ns() if stream is None else self._driver.record_moment(stream)

    def add(self, lane: Lane, begin: Any, end: Any, nbytes: int) -> None:
        """Takes note of what a lane has copied between two moments."""
        self._found.append(Timed(lane, None, begin, end, nbytes))

    def of_work(self, work: Work, lane: Lane, nbytes: int = 0) -> Work:
        """The same work for a thread, which measures it, with what its workers do."""

        def timed() -> Pending | None:
            begin, until = time.perf_counter_ns(), self._worked_until_ns

            def end(_: object = None) -> None:  # workers have one queue: an update begins when the one before has ended
                since, until[lane] = max(begin, until[lane]), time.perf_counter_ns()
                self._found.append(Timed(lane, None, since, until[lane], nbytes))

            try:
                pending = work()
            except BaseException:
                end()
                raise
            if pending is None:
                end()
            else:
                pending.future.add_done_callback(end)
            return pending

        return timed

    def found(self) -> list[Timed]:
        """All that was measured, with times in nanoseconds; waits until an accelerator's lanes have done their work."""
        if self.has_streams:
            self._driver.finish()
        read = [timed._replace(begin=self.ns_of(timed.begin), end=self.ns_of(timed.end)) for timed in self._found]
        return [one for one in read if one.nbytes or one.waiter is None or one.end - one.begin >= _LEAST_WAIT_NS]


_Now = tuple[int, Any]
"""The host's time, and a moment of the compute stream; see ``LaneTimes.now``."""


class Durations:
    """Adds up seconds by the host's clock, from the begin of a part to its end; a part that was given up is left out.

    An accelerator works beside the host, so a part of a step there may go on when the host has left it.

    Args:
        counts: Gets the sums.

    Attributes:
        times: Gets the parts of a step whose lanes are measured.
    """

    def __init__(self, counts: Counts) -> None:
        self.times: LaneTimes | None = None
        self._counts = counts
        self._begin: _Now | None = None
        self._forward_end: _Now | None = None
        self._end: _Now | None = None

    def begin_computing(self) -> None:
        """A micro-batch begins."""
        self._begin, self._forward_end, self._end = self._now(), None, None

    def end_forward(self) -> None:
        """An outermost forward has ended; of several the last one counts."""
        self._forward_end = self._now()

    def end_computing(self) -> None:
        """The backward of a micro-batch has ended."""
        if self._begin is None:
            return
        self._end = self._now()
        middle = self._begin if self._forward_end is None else self._forward_end
        self._add(Part.FORWARD, self._begin, middle)
        self._add(Part.BACKWARD, middle, self._end)
        self._counts.computing_seconds += (self._end[0] - self._begin[0]) / 1e9
        self._begin = None

    def begin_update(self) -> None:
        """The optimizer's step begins."""
        now = self._now()
        if self._end is not None:
            self._counts.settling_seconds += (now[0] - self._end[0]) / 1e9
        self._begin, self._end = now, None

    def end_update(self) -> None:
        """The optimizer's step has ended."""
        if self._begin is not None:
            now = self._now()
            self._add(Part.UPDATE, self._begin, now)
            self._counts.updating_seconds += (now[0] - self._begin[0]) / 1e9
        self._begin = None

    def _now(self) -> _Now:
        times = self.times  # another thread may end the measuring meanwhile
        return (time.perf_counter_ns(), None) if times is None else times.now()

    def _add(self, part: Part, begin: _Now, end: _Now) -> None:
        times = self.times
        if times is not None:
            times.parts.append((part, begin, end))
