"""Names for what the engine does, in the traces of ``torch.profiler``."""

import contextlib
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled

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
