"""The threads that fill chunks and update optimizer states on the host, one for each core.

[Note: one thread in a worker]
torch's operators start a team of OpenMP threads of their own in every Python thread that calls them: two workers on two
cores would run four threads. How many threads a team has is a number of the calling thread, which
``torch.set_num_threads`` sets; it also sets the number that threads begin with that call torch for the first time. So a
worker asks for its number once, because torch replaces it at the first use of a thread, then sets it to one, and
whoever started the workers sets its own number again: it has changed in the workers alone.

An operator releases Python's lock while it computes. Where operators are called from Python on 512 K elements two
workers wait less than 1 % of the time for the lock; on 32 K they lose a third.
"""

import collections
import concurrent.futures
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

SMALL_NUMEL = 2**15
"""Work on so few elements is done sooner than another thread is awake; torch computes it in one thread anyway."""

_Item = TypeVar("_Item")


class WorkTicket:
    """Work that ``HostWorkers`` have been given, a ``Ticket``.

    Args:
        futures: One for each worker.
        remaining: The items that no worker has begun.
    """

    def __init__(self, futures: "list[concurrent.futures.Future[None]]", remaining: "collections.deque[_Item]") -> None:
        self._futures = futures
        self._remaining = remaining

    @property
    def is_done(self) -> bool:
        """Whether the workers have ended, also if one of them did with an error."""
        return all(future.done() for future in self._futures)

    def wait(self) -> None:
        """Blocks until no worker is at this work any more, and raises the error that one of them ended with."""
        try:
            concurrent.futures.wait(self._futures)
        except BaseException:  # the user has interrupted: nobody may write to chunks any more when this is left
            self.cancel()
            raise
        for future in self._futures:
            future.result()

    join = wait

    def skip(self) -> None:
        """Lets workers begin no further item."""
        self._remaining.clear()

    def cancel(self) -> None:
        """Begins no further item, and blocks until no worker is at this work any more; errors are not raised."""
        self.skip()
        concurrent.futures.wait(self._futures)


class HostWorkers:
    """A pool of host threads, each of which computes with one core; see [Note: one thread in a worker].

    The threads start when there is work for the first time. They end with ``close``, or when nobody has the pool any
    more, and a program that exits does not wait for idle ones.

    Args:
        num: How many; ``None`` for as many as torch computes with.

    Attributes:
        num: How many.
    """

    def __init__(self, num: int | None = None) -> None:
        self.num = torch.get_num_threads() if num is None else num
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        self._local = threading.local()
        self._lock = threading.Lock()

    def suits(self, payload: torch.Tensor, numel: int) -> bool:
        """Whether operators on a buffer are to run here rather than in the thread of the caller.

        Those of an accelerator are not, nor what is done sooner than it is handed over, nor fake tensors: modes of
        operators are in force in the caller's thread alone. One worker is of no use where torch has one thread.

        Args:
            payload: The buffer.
            numel: How many of its elements are worked on.
        """
        is_faster = numel > SMALL_NUMEL and (self.num > 1 or torch.get_num_threads() > 1)
        is_plain = type(payload) is torch.Tensor and payload.device.type == "cpu"
        return is_plain and torch._C._len_torch_dispatch_stack() == 0 and is_faster

    def submit(self, work: Callable[[int, _Item], None], items: Iterable[_Item]) -> WorkTicket:
        """Starts work, without recording it for autograd.

        Args:
            work: Is called for each item, by whichever worker is free, with the number of the worker, below ``num``. A
                worker has one item at a time. After an error no further item is begun.
            items: The items, in the order in which they are begun.

        Returns:
            A ticket to wait for.
        """
        remaining = collections.deque(items)

        @torch.no_grad()
        def run() -> None:
            try:
                while remaining:
                    try:
                        item = remaining.popleft()
                    except IndexError:  # another worker has taken the last one
                        return
                    work(getattr(self._local, "number", 0), item)
            except BaseException:
                remaining.clear()
                raise

        futures: list[concurrent.futures.Future[None]] = []
        try:
            with self._lock:  # the host's thread and that of a step may both be the first
                threads = self._threads = self._threads or self._start()
            for _ in range(min(self.num, len(remaining))):
                futures.append(threads.submit(run))  # one by one: whoever got work before an error is waited for
        except RuntimeError as error:
            if "shutdown" not in str(error):
                raise
            if not futures:  # the program exits, which begins no threads and waits for what was begun
                run()
        except BaseException:  # the user has interrupted
            remaining.clear()
            concurrent.futures.wait(futures)
            raise
        return WorkTicket(futures, remaining)

    def close(self) -> None:
        """Ends the threads, when what was started is done."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def _start(self) -> concurrent.futures.ThreadPoolExecutor:
        """Starts all threads, since each has to be told to compute alone."""
        before = torch.get_num_threads()
        threads = concurrent.futures.ThreadPoolExecutor(
            self.num, "hf_patrickstar-update", _begin_worker, (self._local, itertools.count())
        )
        gate = threading.Barrier(self.num)
        try:
            for arrival in [threads.submit(gate.wait) for _ in range(self.num)]:
                arrival.result()
        except BaseException:  # the system has no more threads
            gate.abort()
            threads.shutdown()
            raise
        finally:
            torch.set_num_threads(before)
        return threads


def _begin_worker(local: threading.local, numbers: Iterator[int]) -> None:
    local.number = next(numbers)
    torch.get_num_threads()
    torch.set_num_threads(1)
