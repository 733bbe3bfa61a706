"""What an accelerator's streams and copies are made of, and the thread that works on the host beside them."""

import concurrent.futures
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hf_patrickstar.common.interrupts import held_back


class Pending:
    """Work that goes on in workers when the call that began it has returned: it counts down items that have not ended.

    Args:
        num: How many items there are.

    Attributes:
        future: Comes when no item is left and no worker is at one; it has the error that one of them ended with.
        is_begun: Whether a worker has been at an item.
        is_skipped: Whether no further item is begun: one has failed, or nobody wants the rest.
    """

    def __init__(self, num: int) -> None:
        self.future: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.is_begun = self.is_skipped = False
        self._num_left = num
        self._is_whole = True
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        if not num:
            self.future.set_result(None)

    def wait(self) -> None:
        """Blocks until no worker is at this work any more, and raises the error that one of them ended with."""
        try:
            self.future.result()
        except BaseException:  # the user may have interrupted: nobody may write to chunks any more when this is left
            self.cancel()
            raise

    def cancel(self) -> bool:
        """Begins no further item, and blocks until no worker is at this work any more; errors are not raised.

        Returns:
            Whether all of it was done.
        """
        self.is_skipped = True
        concurrent.futures.wait([self.future])
        return self._is_whole

    def do(self, work: Callable[[], None]) -> None:
        """Does an item, unless no further one is to be begun."""
        if not self.is_skipped:
            self.is_begun = True
            try:
                work()
                return
            except BaseException as error:
                self._error = self._error or error
                self.is_skipped = True
        self._is_whole = False

    def count(self) -> None:
        """Counts an item that has ended, in whichever way; nothing refers to it any more."""
        with self._lock:
            self._num_left -= 1
            is_last = not self._num_left
        if is_last and self._error is None:
            self.future.set_result(None)
        elif is_last:
            self.future.set_exception(self._error)


Work = Callable[[], Pending | None]
"""Work of the host's thread; it returns what it has only begun."""


class Series:
    """Work of the host's thread up to an error, which is raised once, for the first who waits.

    Attributes:
        failure: The error. Once it is known, work that has something to be done in its place is not begun; what workers
            have been given by then goes on.
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

    def run(self, work: Work, otherwise: Callable[[], None] | None) -> Pending | None:
        """Does work, or what is to be done in its place.

        Args:
            work: The work.
            otherwise: See ``Streams.on_host``.

        Returns:
            What the work has only begun; ``fail`` is for the error that this ends with.

        Raises:
            BaseException: What the work raised, or what earlier work did.
        """
        try:
            if self.failure is not None and otherwise is not None:
                raise self.failure
            return work()
        except BaseException as error:
            self.fail(error, otherwise)
            raise

    def fail(self, error: BaseException, otherwise: Callable[[], None] | None) -> None:
        """Notes the error that work has ended with, and does what is to be done in its place."""
        self.failure = self.failure or error
        if otherwise is not None:
            otherwise()


class Done(concurrent.futures.Future[Any]):
    """The event of work in a thread: it comes when the work is done.

    Args:
        series: Raises an error of the work once; by default all who wait get it.

    Attributes:
        followers: What begins when the work is done; ``None`` when it has begun.
    """

    def __init__(self, series: Series | None = None) -> None:
        super().__init__()
        self.followers: list[Callable[[], None]] | None = []
        self._series = series

    query = concurrent.futures.Future.done

    def synchronize(self) -> None:
        """Blocks the host until the event has come; raises what the work raised."""
        if self._series is None:
            self.result()
        elif self.exception() is not None:
            self._series.report()

    def fulfil(self, work: Callable[[], Any]) -> None:
        """Does the work in the thread of the caller."""
        try:
            result = work()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(result)


class HostThread:
    """A thread that begins work in the order in which it was given; it starts with the first.

    Updates go on in workers while it begins what comes next. A process that is forked has none of these threads, so the
    fork waits for what is under way.

    Args:
        prepare: Is called in the thread first.
        name: What the thread is called.
    """

    def __init__(self, prepare: Callable[[], None] | None = None, name: str = "hf_patrickstar-host") -> None:
        self._prepare = prepare
        self._name = name
        self._series = Series()
        self._lock = threading.Lock()
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._under_way: set[Done] = set()
        self._follows_forks = False

    def on_host(self, work: Work, after: Iterable[Any], otherwise: Callable[[], None] | None = None) -> Done:
        """Has the thread begin work when events have come; see ``Streams.on_host``.

        Returns:
            An event that comes when it is done; the first who waits gets what the work raised.
        """
        if self._series.is_reported:
            self._series = Series()
        series, events = self._series, tuple(after)
        done = Done(series)

        def work_after() -> Pending | None:
            for event in events:
                event.synchronize()
            return work()

        @torch.no_grad()
        def task() -> None:
            error = None
            try:
                pending = series.run(work_after, otherwise)
                if pending is not None:
                    pending.future.add_done_callback(end)
                    return
            except BaseException as failure:
                error = failure
            for begin in self._end(done, error):
                begin()

        def end(future: "concurrent.futures.Future[None]") -> None:
            error = future.exception()
            try:
                if error is not None:
                    series.fail(error, otherwise)
            finally:
                for begin in self._end(done, error):
                    self._launch(begin)

        self._give(done, task)
        return done

    def begin_after(self, work: Done, stream: Any, begin: Callable[[Any], Any]) -> "concurrent.futures.Future[Any]":
        """Puts something into a stream when work is done, even if it fails; what comes next does not wait for it.

        Args:
            work: The event of the work, from ``on_host``.
            stream: The stream.
            begin: Puts it into the stream that it is given, and returns the event that follows.

        Returns:
            Gives that event as soon as there is one.
        """
        begun = Done()
        with self._lock:
            if work.followers is not None:
                work.followers.append(lambda: begun.fulfil(lambda: begin(self._own(stream))))
                return begun
        begun.fulfil(lambda: begin(stream))
        return begun

    def _own(self, stream: Any) -> Any:
        """The stream, for this thread."""
        return stream

    def finish(self) -> None:
        """Waits for all work, and leaves errors to those who ask for them."""
        concurrent.futures.wait(list(self._under_way))

    def close(self) -> None:
        """Waits for the work, and ends the thread."""
        self.finish()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _give(self, done: Done, task: Callable[[], None]) -> None:
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(1, self._name, self._prepare)
            if not self._follows_forks:  # Python never forgets what it is to call
                self._follows_forks, this = True, weakref.ref(self)
                os.register_at_fork(before=lambda: _call(this, HostThread.finish))
                os.register_at_fork(after_in_child=lambda: _call(this, HostThread._forget_thread))
        try:
            with held_back():  # it would leave the pool's locks locked
                self._under_way.add(done)
                self._pool.submit(task)
        except RuntimeError as error:
            self._under_way.discard(done)
            if "shutdown" not in str(error):
                raise
            self.finish()  # the program exits, which begins no work in threads
            task()

    def _launch(self, begin: Callable[[], None]) -> None:
        """Has the thread begin what follows the work of a worker, which has the next share to compute."""
        pool = self._pool
        try:
            begin() if pool is None else pool.submit(begin)
        except RuntimeError:  # the program exits
            begin()

    def _end(self, done: Done, error: BaseException | None) -> list[Callable[[], None]]:
        """Lets the event of work come; returns what begins then."""
        with self._lock:
            followers, done.followers = done.followers or [], None
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
        self._under_way.discard(done)
        return followers

    def _forget_thread(self) -> None:
        self._pool = None


def _call(this: "weakref.ref[HostThread]", method: Callable[[HostThread], None]) -> None:
    thread = this()
    if thread is not None:
        method(thread)


class Driver(HostThread):
    """The streams of any accelerator that torch knows, its copies, and the thread of its host.

    A ``torch.Stream`` that is entered remembers in itself what was current before. So the host's thread, and blocks
    inside of others, have objects of their own for the same stream.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(functools.partial(_choose, device))
        self._device = device
        self._of_thread: dict[torch.Stream, torch.Stream] = {}

    def new_stream(self) -> torch.Stream:
        """A stream."""
        stream = torch.Stream(self._device)
        self._of_thread[stream] = self.inside(stream)
        return stream

    def current_stream(self) -> torch.Stream:
        """The compute stream of this thread."""
        return torch.accelerator.current_stream(self._device)

    def inside(self, stream: torch.Stream) -> torch.Stream:
        """A context that makes a stream the current one of this thread."""
        return torch.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )

    launching_in = inside
    """The same for kernels; drivers of tests know by this that these are not collectives of the host."""

    def record_moment(self, stream: torch.Stream) -> torch.Event:
        """Puts an event that has a time into a stream; see [Note: measured lanes]."""
        moment = torch.Event(self._device, enable_timing=True)
        moment.record(stream)
        return moment

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device."""
        return not tensor.is_cpu

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor is page-locked, so that a copy to it does not block the host."""
        return tensor.is_pinned()

    def copy(self, source: torch.Tensor, target: torch.Tensor, stream: torch.Stream) -> None:
        """Puts a copy between host and device into a stream, which the caller of no other thread enters meanwhile.

        It never waits for the stream: tickets order whoever uses the host tensor next. One that is not pinned is read,
        or written, before the call returns.
        """
        with stream:
            target.copy_(source, non_blocking=True)

    def _own(self, stream: torch.Stream) -> torch.Stream:
        return self._of_thread[stream]


def _choose(device: torch.device) -> None:
    """A thread begins with the first device, where its first call would take memory."""
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)
