"""Where threads are: the line of the user's code, and whether they wait in a collective of the user's."""

import contextlib
import gc
import linecache
import os
import sys
import threading
import types
from collections.abc import Iterator

_LIBRARIES = frozenset(
    {"accelerate", "datasets", "hf_patrickstar", "huggingface_hub", "numpy", "peft", "safetensors", "torch", "tqdm"}
    | {"transformers", "trl"}
)
_WAITING = ("torch.distributed.distributed_c10d", "torch.distributed._functional_collectives")
"""Modules of torch in which a thread waits for other processes; in others, such as checkpoints, it may also work."""


class _Looks:
    """Keeps Python from collecting garbage while any thread looks at frames; see ``frames_of_threads``."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a handler of a signal may look, too
        self._num, self._collects = 0, False

    def begin(self) -> None:
        """A thread begins to look."""
        with self._lock:
            if not self._num:
                self._collects = gc.isenabled()
                gc.disable()
            self._num += 1

    def end(self) -> None:
        """A thread has looked."""
        with self._lock:
            self._num -= 1
            if not self._num and self._collects:
                gc.enable()

    def after_fork(self) -> None:
        """In a new process nobody looks: threads that did are not there."""
        if self._num and self._collects:
            gc.enable()
        self._lock, self._num = threading.RLock(), 0


_looks = _Looks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_looks.after_fork)


@contextlib.contextmanager
def frames_of_threads() -> Iterator[dict[int, types.FrameType]]:
    """Gives the frames in which all threads are, by their numbers, to be looked at inside of the block alone.

    Python begins no collection of garbage there. Python 3.11 makes the object of a frame when somebody asks for it, and
    a collection that this begins may let the thread of the frame go on: then ``f_back`` reads freed memory. While
    Python looks for the frames it also holds a lock, for which a collection waits that frees a ``threading.local``: for
    ever (issue 106883 of CPython).
    """
    frames: dict[int, types.FrameType] = {}
    _looks.begin()
    try:
        frames = sys._current_frames()
        frames[threading.get_ident()] = sys._getframe(2)  # that of this generator leads to none around it
        yield frames
    finally:
        frames.clear()  # the frame of this call is among them: the cycle would keep what all threads compute with
        _looks.end()


def numbers_of_threads() -> set[int]:
    """The numbers of the threads that run Python code."""
    with frames_of_threads() as frames:
        return set(frames)


def find_caller(frame: types.FrameType | None = None) -> str:
    """The innermost line of a thread that belongs to neither a library of Hugging Face, nor torch, nor Python.

    Args:
        frame: Where the thread is; by default this thread.

    Returns:
        For example ``/home/me/train.py:12 in main: weights = model.state_dict()``; empty if there is none, as in the
        threads in which autograd works for an accelerator.
    """
    frame = frame or sys._getframe(1)
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    if frame is None:
        return ""
    code, scope = frame.f_code, frame.f_globals
    line = linecache.getline(code.co_filename, frame.f_lineno, scope).strip()
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}{': ' if line else ''}{line}"


def find_collective(frame: types.FrameType | None) -> str:
    """The collective of ``torch.distributed`` that a thread is inside of, if this package has not called it.

    Args:
        frame: Where the thread is.

    Returns:
        For example ``torch.distributed.all_gather``; empty if there is none.
    """
    found = ""
    while frame is not None and _is_library(frame):
        name, function = _module_of(frame), frame.f_code.co_name
        if name == "hf_patrickstar.dist.collectives" or (_is_work(name) and not found and name not in _WAITING):
            return ""
        if _is_work(name) and function != "wrapper":  # the wrapper is what logs calls, in torch.distributed.c10d_logger
            found = f"{name.removesuffix('.distributed_c10d')}.{function}"
        frame = frame.f_back
    return found


def is_idle(frame: types.FrameType | None) -> bool:
    """Whether a thread has ended, or has nothing to do, as one of a pool between two calls.

    Args:
        frame: Where the thread is, if it is anywhere.
    """
    while frame is not None:
        if _module_of(frame).partition(".")[0] not in sys.stdlib_module_names:
            return False
        frame = frame.f_back
    return True


def _is_work(module: str) -> bool:
    return module.startswith("torch.distributed.")


def _module_of(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_library(frame: types.FrameType) -> bool:
    # By the names of modules: those of scripts and notebooks are "__main__", wherever their files are.
    name = _module_of(frame).partition(".")[0]
    return name in _LIBRARIES or name in sys.stdlib_module_names
