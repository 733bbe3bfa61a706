"""Work in threads of the host, and the copies of the budgeted CPU tier."""

import concurrent.futures
import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch

from hf_patrickstar.interrupts import held_back
from hf_patrickstar.memory.lanes import Begun, Copy, Event, TimedCopy, WorkLane
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.units import KIB

_AT_ONCE_NBYTES = 256 * KIB


class Series:
    """Work of the host's thread up to an error, which is raised once, for the first who waits.

    Attributes:
        failure: The error. Work that has something to be done in its place is not done after it.
        is_reported: Whether somebody has got it.
    """

    __slots__ = ("failure", "is_reported")

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.is_reported = False

    def report(self) -> None:
        """Raises the error if nobody has got it."""
        if self.failure is not None and not self.is_reported:
            self.is_reported = True
            raise self.failure

    def run(self, work: Callable[[], None], otherwise: Callable[[], None] | None) -> None:
        """Does work, or what is to be done in its place.

        Args:
            work: The work.
            otherwise: See ``Streams.on_host``.

        Raises:
            BaseException: What the work raised, or what earlier work did.
        """
        try:
            if self.failure is not None and otherwise is not None:
                raise self.failure  # who waits for the last piece of work waits for all
            work()
        except BaseException as error:
            self.failure = self.failure or error
            if otherwise is not None:
                otherwise()
            raise


class HostThread:
    """A thread that does work of the host in the order in which it was given; it starts with the first.

    A process that is forked has no such thread, so the fork waits for what is under way.

    Args:
        prepare: Is called in the thread first.
    """

    def __init__(self, prepare: Callable[[], None] | None = None) -> None:
        self._prepare = prepare
        self._series = Series()
        self._lock = threading.Lock()
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._last: concurrent.futures.Future[None] | None = None
        self._follows_forks = False

    def on_host(
        self, work: Callable[[], None], after: Iterable[Any], otherwise: Callable[[], None] | None = None
    ) -> Event:
        """See ``Driver``."""
        if self._pool is None:
            self._pool = self._start()
        if self._series.is_reported:
            self._series = Series()
        done = _Done(self._series)
        task = functools.partial(self._do, work, otherwise, tuple(after), done)
        try:
            with held_back():  # it would leave the pool's locks locked
                done.future = self._pool.submit(task)
        except RuntimeError as error:
            if "shutdown" not in str(error):
                raise
            self._wait()  # the program exits, which begins no work in threads
            _fulfil(done.future, task)
        self._last = done.future
        return done

    def begin_after(self, work: "_Done", stream: Any, begin: Callable[[Any], Event]) -> Begun:
        """See ``Driver``."""
        begun = _Begun(work, functools.partial(begin, stream))
        with self._lock:
            if work.followers is not None:
                work.followers.append(begun)
                return begun
        begun.begin()
        return begun

    def _start(self) -> concurrent.futures.ThreadPoolExecutor:
        if not self._follows_forks and hasattr(os, "register_at_fork"):
            self._follows_forks = True
            this = weakref.ref(self)
            os.register_at_fork(before=lambda: _call(this, HostThread._wait))
            os.register_at_fork(after_in_child=lambda: _call(this, HostThread._forget_thread))
        return concurrent.futures.ThreadPoolExecutor(1, "hf_patrickstar-host", self._prepare)

    def _wait(self) -> None:
        """Waits for all work, and leaves errors to those who ask for them."""
        if self._last is not None:
            concurrent.futures.wait([self._last])

    def _forget_thread(self) -> None:
        self._pool = None

    def _do(
        self,
        work: Callable[[], None],
        otherwise: Callable[[], None] | None,
        after: Iterable[Event],
        done: "_Done",
    ) -> None:
        def work_after() -> None:
            for event in after:
                event.synchronize()
            work()

        try:
            with torch.no_grad():
                done.series.run(work_after, otherwise)
        finally:
            with self._lock:
                followers, done.followers = done.followers or [], None
            for begun in followers:
                begun.begin()

    def close(self) -> None:
        """See ``Driver``."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _call(this: "weakref.ref[HostThread]", method: Callable[[HostThread], None]) -> None:
    thread = this()
    if thread is not None:
        method(thread)


def _fulfil(future: "concurrent.futures.Future[None]", task: Callable[[], None]) -> None:
    """Does in the caller's thread what a thread would have done."""
    try:
        task()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)


class _Done:
    """The event of work in a thread.

    Args:
        series: The work that it belongs to.

    Attributes:
        series: See above.
        future: What the thread fulfils.
        followers: What begins when the work is done; ``None`` when it has begun.
    """

    __slots__ = ("followers", "future", "series")

    def __init__(self, series: Series) -> None:
        self.series = series
        self.future: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.followers: list[_Begun] | None = []

    def query(self) -> bool:
        """See ``Event``."""
        return self.future.done()

    def synchronize(self) -> None:
        """See ``Event``."""
        if self.future.exception() is not None:
            self.series.report()


class _Begun:
    """A copy that comes after work in a thread; see ``Begun``. It is made also if the work fails.

    Args:
        work: The event of the work.
        begin: Puts the copy into its stream.
    """

    __slots__ = ("_begin", "_event", "_work")

    def __init__(self, work: _Done, begin: Callable[[], Event]) -> None:
        self._work = work
        self._begin: Callable[[], Event] | None = begin
        self._event: concurrent.futures.Future[Event] = concurrent.futures.Future()

    def begin(self) -> None:
        """Puts the copy into its stream."""
        begin, self._begin = self._begin, None
        assert begin is not None
        try:
            self._event.set_result(begin())
        except BaseException as error:
            self._event.set_exception(error)

    def done(self) -> bool:
        """See ``Begun``."""
        return self._event.done()

    def result(self) -> Event:
        """See ``Begun``."""
        self._work.synchronize()
        return self._event.result()


class HostTicket:
    """Work of the host's thread.

    Args:
        event: The event that follows it.
    """

    __slots__ = ("event",)
    lane = WorkLane.HOST_WORK

    def __init__(self, event: Event) -> None:
        self.event = event

    @property
    def is_done(self) -> bool:
        """Whether it is complete."""
        return self.event.query()

    def wait(self) -> None:
        """Blocks the host; raises what the work raised."""
        self.event.synchronize()

    join = wait


class ThreadTicket:
    """A copy in the copy thread of the budgeted CPU tier.

    Args:
        future: What the thread fulfils.
    """

    __slots__ = ("_future",)
    lane = WorkLane.TO_DEVICE

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
        self._timed: list[TimedCopy] | None = None
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None

    def fetch(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy] = ()) -> Copy | None:
        """See ``Streams``."""
        if source.nbytes <= self._at_once_nbytes or type(source) is not torch.Tensor:  # a fake tensor has no bytes
            self._make(WorkLane.TO_DEVICE, source, target)
            return None
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="hf_patrickstar-copy")
        # One memcpy: torch's own copy would start a second team of threads beside that of the computation. The list
        # is emptied by the copy itself: when it is done nothing looks into the buffers any more.
        arrays = [tensor.view(torch.uint8).numpy() for tensor in (target, source)]
        timed = self._timed
        work = self._copy if timed is None else functools.partial(self._copy_and_note, timed)
        return ThreadTicket(self._thread.submit(work, arrays))

    def _copy_and_note(self, timed: list[TimedCopy], arrays: list[Any]) -> None:
        nbytes, begin = int(arrays[0].nbytes), time.perf_counter_ns()
        self._copy(arrays)
        timed.append(TimedCopy(WorkLane.TO_DEVICE, begin, time.perf_counter_ns(), nbytes, True))

    def _make(self, lane: WorkLane, source: torch.Tensor, target: torch.Tensor) -> None:
        """Makes a copy in the thread of the caller."""
        timed = self._timed  # another thread may end the measuring meanwhile
        if timed is None:
            target.copy_(source)
            return
        begin = time.perf_counter_ns()
        target.copy_(source)
        timed.append(TimedCopy(lane, begin, time.perf_counter_ns(), source.nbytes, False))

    def begin_timing(self) -> None:
        """Measures every copy that is started from now on."""
        self._timed = []

    def end_timing(self) -> list[TimedCopy]:
        """Measures no more; returns the copies that are done and were measured, in the order of their ends."""
        timed, self._timed = self._timed, None
        return sorted(timed or [], key=lambda copy: copy.end_ns)

    def to_device(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy] = ()) -> Copy | None:
        """See ``Streams``."""
        self._make(WorkLane.TO_DEVICE, source, target)
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
        self._make(WorkLane.TO_HOST, source, target)
        return None

    def on_host(
        self, work: Callable[[], None], after: Iterable[Copy] = (), otherwise: Callable[[], None] | None = None
    ) -> Copy:
        """See ``Streams``: the cores are those of the computation, so the work is done at once."""
        for other in after:
            other.wait()
        done = _Done(Series())
        work()
        done.future.set_result(None)
        return HostTicket(done)

    def on_tier_of(self, source: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """See ``Streams``: all memory is that of the host."""
        return source

    def on_device(self, source: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
        """See ``Streams``."""
        return source.to(self.device, copy=copy)

    def release_in_flight(self) -> None:
        """Nothing is in flight."""

    def hold_at_most(self, nbytes: int) -> bool:
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
