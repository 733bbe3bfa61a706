"""A fair lock: one thread at a time runs a forward, a backward or a step of a model.

[Note: the model lock]
Between two calls of a model another thread may compute with it, also between a forward and its backward: both threads
get right values, since chunks come and go for each call. During a call another thread may not: its chunks would evict
chunks that the call needs. So a thread that begins a call waits for the thread that is inside one. The thread that has
waited longest is next: one that computes all the time cannot keep the others out. A call that takes too long is a
mistake of the program (a forward that waits for a thread that runs a part of the same model, for example), and what
waits for it raises an error.
"""

import collections
import contextlib
import functools
import math
import pathlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch._C import _current_graph_task_id

from hf_patrickstar.callers import frames_of_threads, numbers_of_threads
from hf_patrickstar.errors import EngineError
from hf_patrickstar.memory.operators import unseen

_P = ParamSpec("_P")
_T = TypeVar("_T")

_OF_OTHERS = re.compile(r"hf_patrickstar|tqdm|QueueFeederThread|.*\(_pin_memory_loop\)$")
"""Names that begin like this are of threads that do not read parameters."""

_STANDARD_LIBRARY = ("threading", "concurrent/futures/thread", "queue", "selectors", "socket", "ssl", "subprocess")
_IDLE = {str(pathlib.Path(threading.__file__).parent / f"{name}.py") for name in _STANDARD_LIBRARY} | {
    str(pathlib.Path(__file__).with_name(name)) for name in ("live_tensor.py", "live_model.py", "mirrors.py")
}
"""Files whose functions wait for something: those of the standard library may do so for ever, ours for a lock."""

_LIMIT_S = 60.0
_CALL_LIMIT_S = 2.0
_CALL_LOOK_S = 0.001
_NUM_LOOKS = 100
"""A thread that hardly computes during so many looks does not wait for a processor: the thread that looks gets one."""
_COMPUTES_S = 0.002
"""Seconds that a call computes in the time of so many looks; a thread that sleeps and polls computes less."""
_LOOK_S = 0.1
"""Seconds between looks whether the backward of another thread still runs; one that raised does not report it."""


_Place = tuple[int, int, float]
"""A frame, an instruction in it, and how long the thread has computed until then."""


class ModelLock:
    """A reentrant lock of threads, and of backwards that several threads run; see [Note: the model lock].

    Args:
        limit_s: Seconds that a thread waits for one call of another thread before it gives up.

    Attributes:
        num_threads: How many threads there were when ``others_may_read`` was found out; 0 to find out again.
        others_read: What was found out then.
    """

    def __init__(self, limit_s: float = _LIMIT_S) -> None:
        self._limit_s = limit_s
        self._condition = threading.Condition()
        self._owner: threading.Thread | None = None
        self._what = ""
        self._depth = 0
        self._backward: tuple[int, int] | None = None  # its graph task and a thread that runs it: autograd's, on a GPU
        self._waiting: collections.deque[threading.Thread] = collections.deque()  # those that wait, in order
        self._since_s = 0.0  # when the lock was acquired
        self._blocked: dict[int, _Place] = {}  # where threads are that ``wait_for_calls`` waited for in vain
        self.num_threads = 0
        self.others_read = False

    @contextlib.contextmanager
    def held(self, what: str) -> Iterator[None]:
        """Holds the lock inside the block; see ``acquire``."""
        self.acquire(what)
        try:
            yield
        finally:
            self.release()

    def acquire(self, what: str) -> None:
        """Waits for the lock; a thread that holds it may acquire it again.

        Args:
            what: What begins, for the errors of other threads.

        Raises:
            EngineError: If another thread has had it for too long.
        """
        this = threading.current_thread()
        with self._condition:
            if self._owner is not this:
                self._wait(what)
                self._owner, self._what = this, what
                self.num_threads = 0
            self._depth += 1

    @property
    def is_computing(self) -> bool:
        """Whether this thread holds the lock, or runs a backward."""
        return self._owner is threading.current_thread() or _current_graph_task_id() != -1

    def others_may_read(self) -> bool:
        """Whether other threads may read parameters while this one computes with them."""
        num_threads = threading.active_count()
        if num_threads != self.num_threads:
            self.num_threads, self.others_read = num_threads, _has_readers()
        return self.others_read

    def wait_for_calls(self) -> None:
        """Waits until other threads have ended the calls of torch that they are in; 2 s at most.

        torch looks at the class of a parameter, lets other threads run, and then reads the value. So a parameter that
        answers from now on may lose its memory when the calls that began before have ended. A thread that something
        else blocks (a sleep, a socket) is waited for briefly, and not again before it has run.
        """
        this, deadline = threading.current_thread(), time.monotonic() + _CALL_LIMIT_S
        others = [t for t in threading.enumerate() if t is not this and not _OF_OTHERS.match(t.name)]
        places = _places(others)
        blocked = {ident: place for ident, place in places.items() if self._blocked.get(ident) == place}
        inside = {ident: (place, 0) for ident, place in places.items() if ident not in blocked}
        while inside and time.monotonic() < deadline:
            time.sleep(_CALL_LOOK_S)
            found = _places(thread for thread in others if thread.ident in inside)
            for ident, (place, num_looks) in list(inside.items()):
                now = found.get(ident)
                if now is None or now[:2] != place[:2]:
                    del inside[ident]
                elif num_looks < _NUM_LOOKS:
                    inside[ident] = place, num_looks + 1
                elif now[2] - place[2] < _COMPUTES_S:
                    blocked[ident] = now
                    del inside[ident]
                else:  # it computes, and the call has not ended
                    inside[ident] = now, 0
        # A thread that computes is not found again with the same time; without a clock its place alone is known.
        self._blocked = blocked | {ident: place for ident, (place, _) in inside.items()}

    def release(self) -> None:
        """Ends what ``acquire`` began."""
        with self._condition:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                self._condition.notify_all()

    def acquire_backward(self) -> None:
        """Begins a backward: waits for the lock, unless the thread that holds it is the one that called backward."""
        with self._condition:
            owner = self._owner
            if owner is not None and (owner is threading.current_thread() or runs_backward(owner.ident)):
                return
            self._wait("a backward")
            self._backward = _current_graph_task_id(), threading.get_ident()

    def release_backward(self) -> None:
        """Ends what ``acquire_backward`` began."""
        with self._condition:
            self._backward = None
            self._condition.notify_all()

    def _wait(self, what: str) -> None:
        if self._is_part_of_backward():
            return
        this, begin_s = threading.current_thread(), time.monotonic()
        try:
            self._waiting.append(this)  # in here: Ctrl-C may raise as soon as it has returned
            while self._waiting[0] is not this or self._is_busy():
                self._condition.wait(_LOOK_S)
                if time.monotonic() - max(begin_s, self._since_s) > self._limit_s and self._is_busy():
                    self._refuse(what)
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(this)
            self._condition.notify_all()
        self._since_s = time.monotonic()

    def _is_part_of_backward(self) -> bool:
        """Whether this thread is inside of the backward that holds the lock, or of another one that this one began."""
        task, found = _current_graph_task_id(), self._backward
        return task != -1 and found is not None and (found[0] == task or found[1] == threading.get_ident())

    def _refuse(self, what: str) -> None:
        whose = "autograd" if self._owner is None else f"thread '{self._owner.name}'"
        doing = "a backward" if self._owner is None else self._what
        raise EngineError(
            f"thread '{threading.current_thread().name}' cannot begin {what}: {whose} has been inside of "
            f"{doing} for {self._limit_s:g} s. One thread at a time can use a model in chunks; wait until "
            f"{doing} has ended before {what} begins, or use a copy of the model (copy.deepcopy)"
        )

    def _is_busy(self) -> bool:
        """Whether another thread is inside; one that has died, or whose backward raised, is not."""
        if self._owner is not None and not self._owner.is_alive():
            self._owner, self._depth = None, 0
        if self._backward is not None and not is_backward_elsewhere():
            self._backward = None
        return self._owner is not None or self._backward is not None


def holds_model_lock(method: Callable[Concatenate[Any, _P], _T]) -> Callable[Concatenate[Any, _P], _T]:
    """Decorates a method of an optimizer that must not meet a forward of another thread; it works ``unseen``."""
    what, work = f"optimizer.{method.__name__.lstrip('_')}()", unseen()(torch.no_grad()(method))

    @functools.wraps(method)
    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with self._manager.model_lock.held(what):
            return work(self, *args, **kwargs)

    return call


def pauses_s() -> tuple[float, ...]:
    """Seconds to wait before each new attempt to get memory that another thread may release; the last is 0.

    A thread that reads parameters while a module computes with them holds their copies on the device.
    """
    return (0.001, 0.01, 0.1, 1.0, 0.0) if _has_readers() else (0.0,)


def _places(threads: Iterable[threading.Thread]) -> dict[int, _Place]:
    """Where in their Python code threads are, but for those that wait for something."""
    places = {}
    with frames_of_threads() as frames:
        for thread in threads:
            frame = frames.get(thread.ident or 0)
            if frame is not None and (frame.f_code.co_filename not in _IDLE or frame.f_code.co_name == "run"):
                places[thread.ident or 0] = id(frame), frame.f_lasti, _processor_time_s(thread)
    return places


def _processor_time_s(thread: threading.Thread) -> float:
    """How long a thread has computed; ``math.nan`` where the system does not tell."""
    if sys.platform != "linux" or thread.native_id is None:
        return math.nan
    try:
        # What time.pthread_getcpuclockid returns, which reads freed memory if the thread has ended meanwhile.
        return time.clock_gettime((~thread.native_id << 3) | 6)
    except OSError:
        return math.nan


def _has_readers() -> bool:
    """Whether there is another thread that may read parameters."""
    this = threading.current_thread()
    for thread in threading.enumerate():
        # Autograd runs the backward of an accelerator in threads of C++, which Python knows once they have called it.
        is_idle = isinstance(thread, threading._DummyThread) and thread.ident not in numbers_of_threads()
        # A thread that waits in a call of backward reads nothing: this thread runs that backward, for an accelerator.
        is_known = thread is this or is_idle or _OF_OTHERS.match(thread.name) or runs_backward(thread.ident)
        if not is_known:
            return True
    return False


def is_backward_elsewhere() -> bool:
    """Whether a thread other than this one is inside of a call of backward."""
    this = threading.get_ident()
    return any(runs_backward(ident) for ident in numbers_of_threads() if ident != this)


def runs_backward(ident: int | None) -> bool:
    """Whether a thread is inside of a call of backward."""
    with frames_of_threads() as frames:
        frame = frames.get(ident) if ident is not None else None
        while frame is not None:
            if is_backward(frame):
                return True
            frame = frame.f_back
    return False


def is_backward(frame: FrameType) -> bool:
    """Whether a frame is the call of a backward."""
    return frame.f_code is torch.autograd.graph._engine_run_backward.__code__
