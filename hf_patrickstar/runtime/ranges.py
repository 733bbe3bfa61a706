"""Names for what the engine does, in the traces of ``torch.profiler``."""

import contextlib
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled

_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def named(what: str, chunk_index: int | None = None) -> contextlib.AbstractContextManager[Any]:
    """A context whose work is one range of a trace, for example ``patrickstar: load chunk 7``.

    Without a profiler it costs a tenth of a microsecond.

    Args:
        what: What is done.
        chunk_index: The chunk, or the group, that it is done with.
    """
    if not _profiler_enabled():
        return _NOTHING
    name = what if chunk_index is None else f"{what} chunk {chunk_index}"
    return torch.profiler.record_function(f"patrickstar: {name}")
