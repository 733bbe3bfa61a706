"""Keeps other threads out of a model while an engine is attached to it, or detached from it.

[Note: the gate]
Hooks and turns keep threads apart while an engine is attached. They know nothing of a forward that began before there
were hooks: it holds the memory of parameters that are about to move, and would go on with NaN. While the gate is
closed, a forward or a ``state_dict`` of another thread that begins waits until the gate is open again, before torch
looks for hooks. One that had begun before goes on, through the gate where it calls other modules of the model, and
``Gate.wait`` waits until it has ended. The stacks of the threads tell which threads are inside. While no gate is closed
the modules have nothing of it.
"""

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch

from hf_patrickstar.errors import EngineError

STATE_DICT = ("state_dict",)
FORWARD = ("_call_impl", "forward")
"""What goes through a gate, by the methods of modules: some programs call ``forward`` itself."""

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
        self._before: list[tuple[dict[str, Any], str, Any]] = []

    def __enter__(self) -> "Gate":
        for module in self._modules.values():
            for way in self._ways:
                self._before.append((module.__dict__, way, module.__dict__.get(way)))
                module.__dict__[way] = self._gated(getattr(module, way))
        return self

    def __exit__(self, *_: object) -> None:
        for attributes, way, before in self._before:
            if before is None:
                attributes.pop(way, None)
            else:
                attributes[way] = before
        self._opened.set()

    def _gated(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def enter(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._owner and not self._is_inside(sys._getframe(1)):
                self._opened.wait()
            return method(*args, **kwargs)

        return enter

    def wait(self, what: str, limit_s: float = _LIMIT_S) -> None:
        """Waits until no other thread is inside of what had begun before the gate was closed.

        Args:
            what: What this thread is about to do, for the error.
            limit_s: Seconds that it waits before it gives up.

        Raises:
            EngineError: If another thread has been inside for too long.
        """
        deadline = time.monotonic() + limit_s
        while inside := self._threads_inside():
            if time.monotonic() > deadline:
                names = {thread.ident: thread.name for thread in threading.enumerate()}
                this, other = threading.current_thread().name, names.get(inside[0], inside[0])
                raise EngineError(
                    f"thread '{this}' cannot {what}: thread '{other}' has been inside of a forward or a state_dict of "
                    f"the model for {limit_s:g} s; begin it after that has ended, or let that thread use a copy of the "
                    "model (copy.deepcopy)"
                )
            time.sleep(_LOOK_S)

    def _threads_inside(self) -> list[int]:
        this = self._owner  # no variable has the frames: they would keep what other threads compute with
        return [ident for ident, frame in sys._current_frames().items() if ident != this and self._is_inside(frame)]

    def _is_inside(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_name in self._ways and id(frame.f_locals.get("self")) in self._modules:
                return True
            frame = frame.f_back
        return False
