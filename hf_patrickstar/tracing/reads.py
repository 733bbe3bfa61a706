"""What answers for a parameter while a plain model is recorded: each call that reads it is noted as an engine has it.

The answers are those of ``runtime/live_tensor.py``, without chunks: a parameter that no module computes with is
acquired for the length of one call, and everything that looks into it looks into the parameter's own memory.
"""

from typing import Any

import torch

from hf_patrickstar.runtime.autograd import Autograd, may_keep, refuse_reentrant
from hf_patrickstar.runtime.live_parameter import (
    RAW,
    Access,
    Live,
    raw_data,
    raw_grad,
    requires_grad,
    set_raw_grad,
    storage_key,
)
from hf_patrickstar.runtime.live_tensor import EXPORTS, WITHOUT_GRAPH, computes, needs_shown
from hf_patrickstar.states import Stage
from hf_patrickstar.tracing.notes import Notes, Watched


class Reads(Live):
    """Answers for one parameter; see ``Live``.

    Args:
        watched: The parameter.
        notes: Where it is written down what reads it.
        autograd: What autograd keeps.
        is_narrow: See ``Live``.
    """

    def __init__(self, watched: Watched, notes: Notes, autograd: Autograd, is_narrow: bool) -> None:
        self.tensor, self._notes, self._autograd = watched, notes, autograd
        self.frames, self.is_narrow = notes.frames, is_narrow

    def access(self, func: Any, *, is_graph: bool, writes: bool = False) -> Access:
        """See ``Live.access``."""
        frames, parameter = self.frames, self.tensor.parameter
        is_exact = not writes and needs_shown(func, self.typed, self.tensor.placeholder.dtype)
        leaf = frames.find_lookup(parameter)
        if leaf is not None:
            return Access(leaf)
        is_graph = is_graph and func not in WITHOUT_GRAPH
        if frames.is_inside and frames.stage is Stage.BACKWARD:
            self._autograd.notice_backward()
        if frames.is_inside and (is_graph or (not writes and computes(self.tensor, frames, func))):
            inner: Access = _InsideAccess(self.tensor, self._notes, func)
        elif is_graph:
            inner = _GraphAccess(self.tensor, self._notes, self._autograd)
        else:
            self._notes.is_odd = True  # read where it is at home: what that waits for no notes can tell
            return Access(raw_data(parameter).to(self.typed.dtype))
        return _ExactAccess(inner, self.tensor, self._notes) if is_exact else inner

    def get_grad(self) -> torch.Tensor | None:
        """See ``Live``: what is there in the middle of a backward."""
        return raw_grad(self.tensor.parameter)

    def set_grad(self, gradient: torch.Tensor | None) -> None:
        """See ``Live``."""
        set_raw_grad(self.tensor.parameter, gradient)

    def assign(self, value: torch.Tensor) -> None:
        """See ``Live``; the parameter stays as it is, since the model is not the recording's to change."""
        self._notes.is_odd |= value is not self.tensor.parameter

    def host_value(self) -> torch.Tensor:
        """See ``Live``."""
        self._notes.is_odd = True
        return raw_data(self.tensor.parameter)

    def view_whole(self, func: Any) -> torch.Tensor:
        """See ``Live``."""
        with torch.enable_grad(), RAW():
            return func(self.tensor.parameter, self.tensor.parameter)


class _InsideAccess(Access):
    """Inside of a forward or backward; see ``_InsideAccess`` of ``runtime/live_tensor.py``."""

    def __init__(self, watched: Any, notes: Notes, func: Any) -> None:
        self._watched, self._notes = watched, notes
        self._is_kept = func in EXPORTS
        is_backward = notes.frames.stage is Stage.BACKWARD
        if is_backward:
            refuse_reentrant(f"code that reads parameter '{watched.spec.name}'")
        is_alias = is_backward and not requires_grad(watched.parameter)
        notes.acquire(watched, is_alias=is_alias)
        super().__init__(raw_data(watched.parameter) if is_alias else watched.parameter)

    def note_returned(self) -> None:
        self._is_kept = True

    def end(self) -> None:
        stack = self._notes.frames.stack
        if not self._is_kept:
            self._notes.release(self._watched)
        elif stack:
            stack[-1].acquired.append(self._watched)
        else:
            self._notes.is_odd = True  # by code in backward with no forward around it


class _GraphAccess(Access):
    """Between forward and backward, recorded by autograd; see ``_GraphAccess`` of ``runtime/live_tensor.py``."""

    def __init__(self, watched: Watched, notes: Notes, autograd: Autograd) -> None:
        self._watched, self._notes = watched, notes
        may_keep(f"code that computes with parameter '{watched.spec.name}'")
        notes.acquire(watched)
        self._kept = autograd.kept_as_numbers()
        self._kept.__enter__()
        super().__init__(watched.parameter)

    def needs_copy(self, results: list[torch.Tensor]) -> bool:
        is_seen = any(result.layout is torch.strided and storage_key(result) == self._watched.key for result in results)
        if is_seen:
            self.value = self.value.clone()
        return is_seen

    def end(self) -> None:
        self._kept.__exit__(None, None, None)
        self._notes.release(self._watched)


class _ExactAccess(Access):
    """A call that gets the value as users see it; see ``_ExactAccess`` of ``runtime/live_tensor.py``."""

    def __init__(self, inner: Access, watched: Watched, notes: Notes) -> None:
        self._inner, self._exact = inner, notes.exact
        super().__init__(inner.value.to(watched.typed.dtype))
        self._exact[storage_key(self.value)] = watched

    def end(self) -> None:
        self._exact.pop(storage_key(self.value))
        self._inner.end()
