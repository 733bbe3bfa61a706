"""What answers for a parameter while a plain model is recorded: each call that reads it is noted as an engine has it.

The answers are those of ``runtime/live_tensor.py``, without chunks: a parameter that no module computes with is
acquired for the length of one call, and everything that looks into it looks into the parameter's own memory.
"""

import contextlib
from typing import Any, Protocol

import torch

from hf_patrickstar.runtime.access import Access
from hf_patrickstar.runtime.autograd import Autograd, may_keep, refuse_reentrant
from hf_patrickstar.runtime.live_parameter import (
    RAW,
    raw_data,
    raw_grad,
    requires_grad,
    set_raw_grad,
    storage_key,
)
from hf_patrickstar.runtime.live_tensor import EXPORTS, WITHOUT_GRAPH
from hf_patrickstar.states import Stage
from hf_patrickstar.tracing.notes import Watched


class Uses(Protocol):
    """Notes uses of parameters.

    Attributes:
        autograd: What autograd keeps.
    """

    autograd: Autograd

    @property
    def stage(self) -> Stage | None:
        """The stage of the forward that runs, or of the backward; ``None`` outside of both."""
        ...

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward runs, of training or evaluation, or in a backward that recomputes."""
        ...

    def find_lookup(self, watched: Watched) -> torch.Tensor | None:
        """The leaf that stands in for a parameter whose rows are looked up just now."""
        ...

    def acquire(self, watched: Watched, who: str, *, is_alias: bool = False) -> None:
        """Somebody begins to compute with a parameter."""
        ...

    def release(self, watched: Watched) -> None:
        """Somebody ends it."""
        ...

    def hold(self, watched: Watched) -> None:
        """An acquisition ends with the innermost forward, or with the backward."""
        ...

    def note_odd(self) -> None:
        """Something is done that the notes have no word for."""
        ...


class Reads:
    """Answers for one parameter; see ``access.Live``.

    Args:
        watched: The parameter.
        uses: Notes what is read.
    """

    def __init__(self, watched: Watched, uses: Uses) -> None:
        self._watched = watched
        self._uses = uses

    def access(self, func: Any, *, is_graph: bool, writes: bool = False) -> Access:
        """See ``Live.access``."""
        leaf = self._uses.find_lookup(self._watched)
        if leaf is not None:
            return Access(leaf)
        is_graph = is_graph and func not in WITHOUT_GRAPH
        stage = self._uses.stage
        if stage is not None and (is_graph or (self._uses.is_in_forward and not writes and func not in WITHOUT_GRAPH)):
            return _InsideAccess(self._watched, self._uses, stage, func)
        if stage is None and is_graph:
            return _GraphAccess(self._watched, self._uses)
        self._uses.note_odd()  # read where it is at home: what that waits for no notes can tell
        return Access(raw_data(self._watched.parameter))

    def get_grad(self) -> torch.Tensor | None:
        """See ``Live``: what is there in the middle of a backward."""
        return raw_grad(self._watched.parameter)

    def set_grad(self, gradient: torch.Tensor | None) -> None:
        """See ``Live``."""
        set_raw_grad(self._watched.parameter, gradient)

    def assign(self, value: torch.Tensor) -> None:
        """See ``Live``; the parameter stays as it is, since the model is not the recording's to change."""
        self._uses.note_odd()

    def note_data_is_out(self) -> None:
        """See ``Live``."""

    def copy_from(self, source: torch.Tensor, is_graph: bool) -> bool:
        """See ``Live``."""
        return False

    def host_value(self) -> torch.Tensor:
        """See ``Live``."""
        self._uses.note_odd()
        return raw_data(self._watched.parameter)

    detached_for_state_dict = host_value

    def copied_value(self) -> torch.Tensor:
        """See ``Live``."""
        return self.host_value().clone()

    def view_whole(self, func: Any) -> torch.Tensor:
        """See ``Live``."""
        with torch.enable_grad(), RAW():
            result: torch.Tensor = func(self._watched.parameter, self._watched.parameter)
            return result

    def value_for(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """See ``Live``."""
        return None


class _InsideAccess(Access):
    """Inside of a forward or backward; see ``_InsideAccess`` of ``runtime/live_tensor.py``."""

    def __init__(self, watched: Watched, uses: Uses, stage: Stage, func: Any) -> None:
        self._watched, self._uses = watched, uses
        self._is_kept = func in EXPORTS
        if stage is Stage.BACKWARD:
            refuse_reentrant(f"code that reads parameter '{watched.spec.name}'")
        is_alias = stage is Stage.BACKWARD and not requires_grad(watched.parameter)
        uses.acquire(watched, "code that reads a parameter of another module", is_alias=is_alias)
        super().__init__(raw_data(watched.parameter) if is_alias else watched.parameter)

    def note_returned(self) -> None:
        self._is_kept = True

    def end(self) -> None:
        if self._is_kept:
            self._uses.hold(self._watched)
        else:
            self._uses.release(self._watched)


class _GraphAccess(Access):
    """Between forward and backward, recorded by autograd; see ``_GraphAccess`` of ``runtime/live_tensor.py``."""

    def __init__(self, watched: Watched, uses: Uses) -> None:
        self._watched, self._uses = watched, uses
        may_keep(f"code that computes with parameter '{watched.spec.name}'")
        uses.acquire(watched, "code outside of every forward that computes with a parameter")
        self._kept = contextlib.ExitStack()
        self._kept.enter_context(uses.autograd.kept_as_numbers())
        super().__init__(watched.parameter)

    def needs_copy(self, results: list[torch.Tensor]) -> bool:
        is_seen = any(result.layout is torch.strided and storage_key(result) == self._watched.key for result in results)
        if is_seen:
            self.value = self.value.clone()
        return is_seen

    def end(self) -> None:
        self._kept.close()
        self._uses.release(self._watched)
