"""Where threads are: their frames, and the line of the user's code."""

import contextlib
import gc
import linecache
import os
import sys
import threading
import traceback
import types
from collections.abc import Iterator

_LIBRARIES = frozenset(
    {"accelerate", "datasets", "hf_patrickstar", "huggingface_hub", "numpy", "peft", "safetensors", "torch", "tqdm"}
    | {"transformers", "trl"}
)
_OF_COLLECTIVES = ("torch.distributed.", "hf_patrickstar.dist.")


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


def find_caller() -> str:
    """The innermost line of this thread that belongs to neither a library of Hugging Face, nor torch, nor Python.

    Returns:
        For example ``/home/me/train.py:12 in main: weights = model.state_dict()``; empty if there is none, as in the
        threads in which autograd works for an accelerator.
    """
    return _look_up(sys._getframe(1))[0]


def find_place() -> tuple[str, bool]:
    """Where the program is: the line of a thread that waits in a collective, else that of the main thread.

    Returns:
        The line, as in ``find_caller``, and whether it waits in a collective: of the user, or of ``dist/``.
    """
    with frames_of_threads() as frames:
        idents = sorted(frames, key=lambda ident: ident != threading.main_thread().ident)
        places = [_look_up(frames[ident]) for ident in idents]
    return max(places, key=lambda place: place[1])  # the first of those that wait, or the first of all


def _look_up(innermost: types.FrameType) -> tuple[str, bool]:
    modules: list[str] = []
    for frame, number in traceback.walk_stack(innermost):
        # By the names of modules: those of scripts and notebooks are "__main__", wherever their files are.
        modules.append(str(frame.f_globals.get("__name__", "")))
        package = modules[-1].partition(".")[0]
        if package not in _LIBRARIES and package not in sys.stdlib_module_names:
            code = frame.f_code
            line = linecache.getline(code.co_filename, number, frame.f_globals).strip()
            waits = any(module.startswith(_OF_COLLECTIVES) for module in modules)
            waits |= len(modules) == 1 and ".wait(" in line  # of what ``async_op=True`` returned, which has no frame
            return f"{code.co_filename}:{number} in {code.co_name}{': ' if line else ''}{line}", waits
    return "", False
