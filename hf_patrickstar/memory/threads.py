"""Work in threads of the host, and the copies of the budgeted CPU tier."""

import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch

from hf_patrickstar.memory.lanes import Begun, Copy, Event, WorkLane
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.units import KIB

_AT_ONCE_NBYTES = 256 * KIB


class Series:
    """Work of the host's thread up to an error, which is raised once, for the first who waits.

    Attributes:
        failure: The error. Work that comes after it is not done.
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


class HostThread:
    """A thread that does work of the host in the order in which it was given; it starts with the first.

    When some work has failed, no later work is done until somebody who waits has got the error.
    """

    def __init__(self) -> None:
        self._series = Series()
        self._lock = threading.Lock()
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None

    def on_host(self, work: Callable[[], None], after: Iterable[Any]) -> Event:
        """See ``Driver``."""
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="hf_patrickstar-host")
        if self._series.is_reported:
            self._series = Series()
        done = _Done(self._series)
        done.future = self._pool.submit(self._do, work, tuple(after), done)
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

    def _do(self, work: Callable[[], None], after: Iterable[Event], done: "_Done") -> None:
        try:
            if done.series.failure is not None:  # who waits for the last piece of work waits for all
                raise done.series.failure
            for event in after:
                event.synchronize()
            with torch.no_grad():
                work()
        except BaseException as error:
            done.series.failure = error
            raise
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

    def on_host(self, work: Callable[[], None], after: Iterable[Copy] = ()) -> Copy:
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
