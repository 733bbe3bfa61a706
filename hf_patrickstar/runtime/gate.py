"""Keeps other threads out of a model while an engine is attached to it, or detached from it.

[Note: the gate]
Hooks and the model lock keep threads apart while an engine is attached. They know nothing of a forward that began
before there were hooks: it holds the memory of parameters that are about to move, and would go on with NaN. While the
gate is closed, a forward, a ``state_dict`` or a ``deepcopy`` of another thread that begins waits until the gate is open
again, before torch looks for hooks. One that had begun before goes on, through the gate where it calls other modules of
the model, and ``Gate.wait`` waits until it has ended. It also waits for a backward of any model that has begun. From
then on nothing goes on: a ``forward`` that was called as a function, past the gate, waits where it calls the next
module. The stacks of the threads tell which threads are inside. The gate is made of attributes of the modules, which
are removed when it opens. A thread that has waited then looks the method up again: another gate may be closed by then.

Dynamo would trace the gate, and fail with ``fullgraph=True``. So modules inside of a compiled one have no gate before
their forward: that of a module around them keeps threads out.
"""

import copy
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch._C import _current_graph_task_id

from hf_patrickstar.callers import frames_of_threads
from hf_patrickstar.errors import EngineError
from hf_patrickstar.runtime.compiled import is_compiled
from hf_patrickstar.runtime.model_lock import is_backward

STATE_DICT = ("state_dict",)
FORWARD = ("_call_impl", "forward")
"""What goes through a gate, by the methods of modules: some programs call ``forward`` itself."""

_CALL = "_wrapped_call_impl"
"""What looks up the first of ``FORWARD``: a thread in there may have found the one without a gate."""

_LIMIT_S = 60.0
_LOOK_S = 0.002


class Gate:
    """A gate before the modules of a model, closed inside of a ``with`` block; see [Note: the gate].

    Args:
        modules: All modules of the model.
        ways: ``FORWARD``, ``STATE_DICT`` or both together: what has to wait.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], ways: tuple[str, ...]) -> None:
        self._modules = {id(module): module for module in modules}
        self._ways = ways
        self._owner = threading.get_ident()
        self._opened = threading.Event()
        self._is_clear = False  # nobody is inside, and nobody goes on any more
        self._waiting: set[int] = set()  # threads that wait at this gate
        self._waits_for_backward = "forward" in ways and _current_graph_task_id() == -1
        self._before: list[tuple[dict[str, Any], str, Any]] = []

    def __enter__(self) -> "Gate":
        deadline = time.monotonic() + _LIMIT_S  # of a dictionary that is being copied, which must not change its size
        while self._threads_inside(self._is_copying) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        compiled = [module for module in self._modules.values() if is_compiled(module)]
        # The call of one that was compiled in place is traced itself; other compiled ones are called around the graph.
        traced = {part for module in compiled for part in module.modules() if part is not module}
        traced |= {module for module in compiled if module._compiled_call_impl is not None}
        for module in self._modules.values():
            self._close(module, "__deepcopy__", self._gated_copy(module))
            for way in self._ways:
                if module not in traced or way not in FORWARD:
                    self._close(module, way, self._gated(module, way))
        return self

    def _close(self, module: torch.nn.Module, way: str, method: Any) -> None:
        self._before.append((module.__dict__, way, module.__dict__.get(way)))
        module.__dict__[way] = method

    def __exit__(self, *_: object) -> None:
        for attributes, way, before in self._before:
            _restore(attributes, way, before)
        self._opened.set()

    def _gated(self, module: torch.nn.Module, way: str) -> Callable[..., Any]:
        method = getattr(module, way)

        @functools.wraps(method)
        def enter(*args: Any, **kwargs: Any) -> Any:
            return (getattr(module, way) if self._has_waited(sys._getframe(1)) else method)(*args, **kwargs)

        return enter

    def _gated_copy(self, module: torch.nn.Module) -> Callable[..., Any]:
        method = getattr(module, "__deepcopy__", None)

        def enter(memo: dict[int, Any]) -> Any:
            if self._has_waited(sys._getframe(1)):
                return copy.deepcopy(module, memo)
            if method is not None:
                return method(memo)
            # A copy in a forward that goes on: without the gate, which would lead the copy into this module for ever.
            reduced: Any = module.__reduce_ex__(4)
            make, arguments, state = reduced[0], reduced[1], dict(reduced[2])
            for attributes, way, before in self._before:
                if attributes is module.__dict__:
                    _restore(state, way, before)
            copied = memo[id(module)] = make(*arguments)
            copied.__setstate__(copy.deepcopy(state, memo))
            return copied

        return enter

    def _has_waited(self, caller: FrameType) -> bool:
        """Waits until the gate is open, unless it is, or what calls may go on; returns whether it has waited."""
        this = threading.get_ident()
        if this == self._owner or self._opened.is_set() or self._goes_on(caller):
            return False
        self._waiting.add(this)
        self._opened.wait()
        return True

    def _goes_on(self, caller: FrameType) -> bool:
        if self._is_clear:
            return False
        return _current_graph_task_id() != -1 or self._is_inside(caller)  # autograd's own threads have no caller

    def wait(self, what: str, limit_s: float = _LIMIT_S) -> None:
        """Waits until no other thread is inside of what had begun before the gate was closed.

        Args:
            what: What this thread is about to do, for the error.
            limit_s: Seconds that it waits before it gives up.

        Raises:
            EngineError: If another thread has been inside for too long.
        """
        deadline = time.monotonic() + limit_s
        while (inside := self._threads_inside(self._may_be_inside)) or not self._is_clear:
            if not inside:
                self._is_clear = True  # and look again: some may just have been allowed to go on
            elif time.monotonic() > deadline:
                names = {thread.ident: thread.name for thread in threading.enumerate()}
                this, other = threading.current_thread().name, names.get(inside[0], inside[0])
                raise EngineError(
                    f"thread '{this}' cannot {what}: thread '{other}' has been inside of a forward or a state_dict of "
                    f"the model, or of a backward, for {limit_s:g} s; wait until thread '{other}' has ended that call "
                    f"before you {what}, or let it use a copy of the model (copy.deepcopy)"
                )
            time.sleep(_LOOK_S)

    def _threads_inside(self, is_inside: Callable[[FrameType], bool]) -> list[int]:
        ours = {self._owner, *self._waiting}
        with frames_of_threads() as frames:
            return [ident for ident, frame in frames.items() if ident not in ours and is_inside(frame)]

    def _is_inside(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_name in self._ways and id(frame.f_locals.get("self")) in self._modules:
                return True
            if self._waits_for_backward and is_backward(frame):
                return True
            frame = frame.f_back
        return False

    def _may_be_inside(self, frame: FrameType | None) -> bool:
        return self._is_inside(frame) or self._is_about_to_enter(frame)

    def _is_about_to_enter(self, frame: FrameType | None) -> bool:
        """Whether a thread has looked up what it calls, which may be what was there before the gate."""
        while frame is not None:
            name, module = frame.f_code.co_name, None
            if name == _CALL and "forward" in self._ways:
                module = frame.f_locals.get("self")
            elif name == "enter" and frame.f_locals.get("way") in self._ways:  # it has waited at another gate
                module = frame.f_locals.get("module")
            if id(module) in self._modules:
                return True
            frame = frame.f_back
        return False

    def _is_copying(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code is copy.deepcopy.__code__ and id(frame.f_locals.get("x")) in self._modules:
                return True
            frame = frame.f_back
        return False


def _restore(attributes: dict[str, Any], way: str, before: Any) -> None:
    if before is None:
        attributes.pop(way, None)
    else:
        attributes[way] = before
