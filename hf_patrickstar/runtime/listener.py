"""Who is told what torch tells: the engine, which acts, or the recorder of traces, which notes.

``hooks.py``, ``autograd.py`` and ``live_tensor.py`` translate events of modules, of autograd and of single calls for
one listener. ``ChunkManager`` is the one of an engine; ``tracing/recorder.py`` has the one of a trace.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from hf_patrickstar.model.lock import EngineLock
from hf_patrickstar.runtime.frames import Call, Frame, Frames, Lookup
from hf_patrickstar.schedule.trace import Shapes


class ParameterValues(Protocol):
    """Gives parameters their values; see ``Parameters``, which has the meaning of each argument.

    Attributes:
        by_parameter: What stands for a parameter, by the ``id`` of the parameter.
        exact: That of which calls have the value as users see it just now, by the address of its storage.
        held_outside_forward: Those that code in backward acquired with no forward around it.
        needs_frames: Whether something has used values in ways that only hooks of all modules bring to an end: a
            recomputation, which looks into chunks without a trace, or code that holds one until its module ends.
    """

    by_parameter: dict[int, Any]
    exact: dict[int, Any]
    held_outside_forward: list[Any]
    needs_frames: bool

    def find(self, parameter: torch.Tensor) -> Any | None:
        """What stands for a parameter, or ``None``."""

    def acquire_all(self, tensors: Sequence[Any], caller: str, acquired: list[Any], *, is_recomputed: bool) -> None:
        """Gives parameters their values, and adds each to ``acquired``."""

    def release_all(self, tensors: Sequence[Any]) -> None:
        """Ends one acquisition of each."""


class ModelListener(Protocol):
    """Listens to one model.

    Attributes:
        frames: The forwards that run on this thread.
        lock: Held by the thread that runs a forward.
    """

    frames: Frames
    lock: EngineLock

    @property
    def resting(self) -> tuple[frozenset[int], bool]:
        """The chunks whose parameters keep their values, and whether these are all; see [Note: rest]."""

    @property
    def parameters(self) -> ParameterValues:
        """Gives parameters their values."""

    @property
    def tensors(self) -> Sequence[Any]:
        """What stands for each parameter."""

    # Modules

    def before_forward(self, call: Call, shapes: Shapes, present: Iterable[torch.Tensor]) -> None:
        """An outermost forward begins, and no recomputation; see ``ChunkManager.before_forward``."""

    def after_forward(self, frame: Frame, *, has_failed: bool) -> None:
        """It has ended; the listener releases the lock."""

    def before_module(self, frame: Frame, own: Sequence[Any], name: str) -> None:
        """A module is about to compute with its own parameters, while modes or a profiler are on."""

    def after_module(self, frame: Frame) -> None:
        """It has computed, while modes or a profiler are on, or copies stood in for its parameters."""

    def lookup_begin(self, tensor: Any) -> Lookup:
        """An embedding is about to read rows of its weight where that is at home."""

    def lookup_end(self, lookup: Lookup, nbytes: int) -> None:
        """It has read so many bytes."""

    def unwind(self) -> None:
        """Every forward that is open on this thread was interrupted, and ends."""

    # Autograd

    def is_parameter(self, key: int) -> bool:
        """Whether the value of a parameter is in the storage with this address."""

    def pack(self, operand: torch.Tensor) -> Any:
        """Autograd keeps an operand; returns what it keeps instead: an address, a tensor, or it and its version."""

    def operand_needed(self, saved: Any) -> torch.Tensor:
        """Backward needs an operand; ``saved`` is what ``pack`` has returned, if that is no tensor."""

    def backward_begin(self, end: Callable[[], None]) -> None:
        """A backward begins; autograd calls ``end`` when it has ended, and keeps it until then."""

    def backward_end(self) -> None:
        """A backward has ended."""

    def store_gradient(self, tensor: Any, gradient: torch.Tensor, *, is_at_home: bool = False) -> None:
        """Autograd has finished a gradient."""

    def gradient_ready(self, tensor: Any, gradient: torch.Tensor, *, is_at_home: bool = False) -> None:
        """Does the same while modes or a profiler are on."""

    def recorded_gradient_ready(self, tensor: Any, gradient: torch.Tensor) -> None:
        """Autograd has finished a gradient that has a graph itself: ``backward(create_graph=True)``."""
