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
import functools
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from hf_patrickstar.memory.driver import Pending

SMALL_NUMEL = 2**15
"""Work on so few elements is done sooner than another thread is awake; torch computes it in one thread anyway."""

_Item = TypeVar("_Item")


class HostWorkers:
    """A pool of host threads, each of which computes with one core; see [Note: one thread in a worker].

    All work is in one queue: no worker waits while anything is left of whatever was submitted. The threads start when
    there is work for the first time. They end with ``close``, or when nobody has the pool any more, and a program that
    exits does not wait for idle ones.

    Args:
        num: How many; ``None`` for as many as torch computes with.

    Attributes:
        num: How many.
    """

    def __init__(self, num: int | None = None) -> None:
        self.num = torch.get_num_threads() if num is None else num
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        self._queue: collections.deque[tuple[Pending, Callable[[], None]]] = collections.deque()
        self._num_at_work = 0
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

    def submit(self, work: Callable[[_Item], None], items: Iterable[_Item], *, first: bool = False) -> Pending:
        """Starts work, without recording it for autograd.

        Args:
            work: Is called for each item, by whichever worker is free; a worker has one item at a time. After an error
                no further item is begun.
            items: The items, in the order in which they are begun, after those that were submitted before.
            first: Whether they come before those: a drive has nothing to do meanwhile.

        Returns:
            A ticket to wait for.
        """
        items = list(items)
        ticket = Pending(len(items))
        with self._lock:  # the host's thread and that of a step may both be the first
            threads = self._threads = self._threads or self._start()
            is_ending = False
            try:
                for _ in range(min(self.num - self._num_at_work, len(self._queue) + len(items))):
                    threads.submit(self._work)
                    self._num_at_work += 1
            except RuntimeError as error:
                if "shutdown" not in str(error):
                    raise
                is_ending = True  # the program exits, which begins nothing in threads any more
                self._num_at_work += 1
            # Last: if the user interrupts before, nothing is begun of what nobody has a ticket for.
            works = [(ticket, functools.partial(work, item)) for item in items]
            self._queue.extendleft(reversed(works)) if first else self._queue.extend(works)
            del works
            del items  # what a worker has done is referred to no more
        if is_ending:
            self._work()
        return ticket

    @torch.no_grad()
    def _work(self) -> None:
        """Does what is in the queue until nothing is left."""
        while (ticket := self._do_next()) is not None:
            ticket.count()

    def _do_next(self) -> Pending | None:
        """Does the next item, which nothing refers to when this returns; returns its ticket."""
        with self._lock:
            if not self._queue:
                self._num_at_work -= 1
                return None
            ticket, item = self._queue.popleft()
        ticket.do(item)
        return ticket

    def close(self) -> None:
        """Ends the threads, when what was started is done."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def _start(self) -> concurrent.futures.ThreadPoolExecutor:
        """Starts all threads, since each has to be told to compute alone."""
        before = torch.get_num_threads()
        threads = concurrent.futures.ThreadPoolExecutor(self.num, "hf_patrickstar-update", _begin_worker)
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


def _begin_worker() -> None:
    torch.get_num_threads()
    torch.set_num_threads(1)
