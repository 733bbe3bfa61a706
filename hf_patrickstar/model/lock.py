"""The lock of an engine: one thread at a time runs a forward, a backward or a step of a model.

[Note: the engine's lock]
Between two calls of a model another thread may compute with it, also between a forward and its backward: both threads
get right values, since chunks come and go for each call. During a call another thread may not: its chunks would evict
chunks that the call needs. So a thread that begins a call waits for the thread that is inside one. Changes of the model
wait in the same way: an engine is attached and detached, and parameters are taken in, by a thread that has the lock.
The thread that has waited longest is next: one that computes all the time cannot keep the others out. A call that takes
too long is a mistake of the program (a forward that waits for a thread that runs a part of the same model, for
example), and what waits for it raises an error.

A backward has no end if it raises. Autograd alone keeps the function that it calls at the end, so the backward runs as
long as this function is alive.

[Note: other threads read]
Other threads may read parameters at any time, and find placeholders that answer (``live_parameter``). torch looks at
the class of an argument, lets other threads run, and then reads its value. So while a module computes with a parameter
and another thread may read, the class of the parameter answers other threads as if it were released
(``Guard``); and memory that a parameter had of its own is given up some time after the parameter answers.
"""

import collections
import contextlib
import functools
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch._C import _current_graph_task_id

from hf_patrickstar.common.callers import frames_of_threads
from hf_patrickstar.errors import EngineError
from hf_patrickstar.memory.operators import unseen

_P = ParamSpec("_P")
_T = TypeVar("_T")

_OF_LIBRARIES = re.compile(r"hf_patrickstar|tqdm|QueueFeederThread|.*\(_pin_memory_loop\)$")
"""Names that begin like this are of threads that do not read parameters."""
_FORWARD = torch.nn.Module._call_impl.__code__
_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_LIMIT_S = 60.0
"""Seconds that a thread waits for one call of another thread before it gives up."""
_LOOK_S = 0.1
"""Seconds between looks whether a backward has raised, or its thread has died: neither is reported."""
_READ_S = 0.2
"""Seconds in which a call of torch that has begun reads its operands."""


class _Backward(NamedTuple):
    """A backward: its graph task, a thread that runs it (one of autograd's, on a GPU), and what autograd calls last."""

    task: int
    thread: int
    end: Callable[[], Any]


class EngineLock:
    """A reentrant lock of threads, and of backwards that several threads run; see [Note: the engine's lock].

    Attributes:
        num_threads: How many threads there were when ``others_may_read`` was found out; 0 to find out again.
        others_read: What was found out then.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._owner: threading.Thread | None = None
        self._what = ""
        self._depth = 0
        self._backward: _Backward | None = None
        self._waiting: collections.deque[threading.Thread] = collections.deque()  # those that wait, in order
        self._since_s = 0.0  # when the lock was acquired
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

    def release(self) -> None:
        """Ends what ``acquire`` began."""
        with self._condition:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                self._condition.notify_all()

    def acquire_backward(self, end: Callable[[], None]) -> None:
        """Begins a backward: waits for the lock, unless the thread that holds it is the one that called backward.

        Args:
            end: What autograd calls when the backward has ended.
        """
        with self._condition:
            if self._is_part_of_backward():
                return
            if not self._is_called_by_owner():
                self._wait("a backward")
            self._backward = _Backward(_current_graph_task_id(), threading.get_ident(), weakref.ref(end))

    def release_backward(self) -> None:
        """Ends what ``acquire_backward`` began."""
        with self._condition:
            if self._backward is not None and self._backward.task == _current_graph_task_id():
                self._backward = None
                self._condition.notify_all()

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds the lock, or runs a backward."""
        return self._owner is threading.current_thread() or _current_graph_task_id() != -1

    @property
    def has_backward(self) -> bool:
        """Whether a backward is running that has the lock; one that raised is not."""
        found = self._backward  # another thread may end it meanwhile
        return found is not None and found.end() is not None

    def _wait(self, what: str) -> None:
        if self._is_part_of_backward():
            return
        this, begin_s = threading.current_thread(), time.monotonic()
        try:
            self._waiting.append(this)  # in here: Ctrl-C may raise as soon as it has returned
            while self._waiting[0] is not this or self._is_busy():
                self._condition.wait(_LOOK_S)
                if time.monotonic() - max(begin_s, self._since_s) > _LIMIT_S and self._is_busy():
                    whose = "autograd" if self._owner is None else f"thread '{self._owner.name}'"
                    raise self._too_long(what, whose, "a backward" if self._owner is None else self._what)
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(this)
            self._condition.notify_all()
        self._since_s = time.monotonic()

    def _is_busy(self) -> bool:
        """Whether another thread is inside; one that has died is not."""
        if self._owner is not None and not self._owner.is_alive():
            self._owner, self._depth = None, 0
        return self._owner is not None or (self._backward is not None and self.has_backward)

    def _is_part_of_backward(self) -> bool:
        """Whether this thread is inside of the backward that holds the lock, or of another one that this one began."""
        task, found = _current_graph_task_id(), self._backward
        is_same = found is not None and (found.task == task or found.thread == threading.get_ident())
        return task != -1 and is_same and self.has_backward

    def _is_called_by_owner(self) -> bool:
        """Whether the thread that holds the lock has called the backward, which one of autograd's may run."""
        owner, this = self._owner, threading.current_thread()
        if owner is None or owner is this or not isinstance(this, threading._DummyThread):
            return owner is this
        with frames_of_threads() as frames:
            return _is_inside(frames.get(owner.ident or 0), ())

    def _too_long(self, what: str, whose: str, doing: str) -> EngineError:
        return EngineError(
            f"thread '{threading.current_thread().name}' cannot begin {what}: {whose} has been inside of "
            f"{doing} for {_LIMIT_S:g} s. One thread at a time can use a model in chunks; wait until "
            f"{doing} has ended before {what} begins, or use a copy of the model (copy.deepcopy)"
        )

    # Other threads

    def others_may_read(self) -> bool:
        """Whether other threads may read parameters while this one computes with them."""
        if (num_threads := threading.active_count()) != self.num_threads:
            self.num_threads, self.others_read = num_threads, _has_readers()
        return self.others_read

    def let_others_read(self) -> None:
        """Waits until calls of torch in other threads have read what they were given, before parameters answer."""
        if _has_readers():
            time.sleep(_READ_S)

    def wait_for_forwards(self, modules: Iterable[torch.nn.Module], what: str) -> None:
        """Waits until no forward is running that began before the hooks of its module were there, and no backward.

        Args:
            modules: All modules of the model, which have hooks by now: a forward that begins waits for the lock.
            what: What this thread, which holds the lock, is about to do.

        Raises:
            EngineError: If another thread has been inside for too long.
        """
        if _current_graph_task_id() != -1:
            return  # inside of a backward, which does not end before this call
        known, deadline = {id(module) for module in modules}, time.monotonic() + _LIMIT_S
        while True:
            with self._condition:
                ours = {threading.get_ident(), *(thread.ident for thread in self._waiting)}
            with frames_of_threads() as frames:
                inside = [i for i, frame in frames.items() if i not in ours and _is_inside(frame, known)]
            if not inside:
                return
            if time.monotonic() > deadline:
                names = {thread.ident: thread.name for thread in threading.enumerate()}
                raise self._too_long(what, f"thread '{names.get(inside[0])}'", "a forward or backward")
            time.sleep(_LOOK_S / 50)


def locked(method: Callable[Concatenate[Any, _P], _T]) -> Callable[Concatenate[Any, _P], _T]:
    """Decorates a method of an optimizer that must not meet a forward of another thread; it works ``unseen``."""
    what, work = f"optimizer.{method.__name__.lstrip('_')}()", unseen()(torch.no_grad()(method))

    @functools.wraps(method)
    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with self._manager.lock.held(what):
            return work(self, *args, **kwargs)

    return call


def pauses_s() -> tuple[float, ...]:
    """Seconds to wait before each new attempt to get memory that another thread may release; the last is 0.

    A thread that reads parameters while a module computes with them holds their copies on the device.
    """
    return (0.001, 0.01, 0.1, 1.0, 0.0) if _has_readers() else (0.0,)


def _has_readers() -> bool:
    """Whether there is another thread that may read parameters.

    Autograd runs the backward of an accelerator in threads of its own, which Python calls dummies, while the thread
    that has called it waits.
    """
    this = threading.current_thread()
    caller = threading.main_thread() if isinstance(this, threading._DummyThread) else this
    for thread in threading.enumerate():
        is_known = thread in (this, caller) or isinstance(thread, threading._DummyThread)
        if not (is_known or _OF_LIBRARIES.match(thread.name)):
            return True
    return False


def _is_inside(frame: Any, modules: Iterable[int]) -> bool:
    """Whether a thread is inside of a backward, or of the forward of a module with one of these identities."""
    while frame is not None:
        if frame.f_code is _BACKWARD or (frame.f_code is _FORWARD and id(frame.f_locals.get("self")) in modules):
            return True
        frame = frame.f_back
    return False
