"""Names for what the engine does, in the traces of ``torch.profiler``."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._autograd import _profiler_enabled

from hf_patrickstar.memory.operators import unseen

_P = ParamSpec("_P")
_T = TypeVar("_T")
_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def named(what: str, *chunk_indices: int) -> contextlib.AbstractContextManager[Any]:
    """A context whose work is one range of a trace, for example ``patrickstar: load chunk 7``.

    Without a profiler it costs a tenth of a microsecond.

    Args:
        what: What is done.
        *chunk_indices: The chunk, or the group, that it is done with; several if they are updated together.
    """
    if not _profiler_enabled():
        return _NOTHING
    plural = "s" if len(chunk_indices) > 1 else ""
    chunks = f" chunk{plural} {', '.join(map(str, chunk_indices))}" if chunk_indices else ""
    return torch.profiler.record_function(f"patrickstar: {what}{chunks}")


def phase(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Makes each call of a method a range that has the name of the method, for example ``patrickstar: before_module``.

    Modes of users do not see what the method does; see [Note: modes of users].

    Args:
        function: A method of ``ChunkManager``.
    """
    what = function.__name__

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        has_modes = _len_torch_function_stack() or _len_torch_dispatch_stack()
        if not (has_modes or _profiler_enabled()):
            return function(*args, **kwargs)
        with unseen() if has_modes else _NOTHING, named(what):
            return function(*args, **kwargs)

    return call
