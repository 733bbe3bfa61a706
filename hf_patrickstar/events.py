"""What the runtime tells whoever listens. Plain data: the runtime emits, ``report`` sums up."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkLoaded:
    """A chunk was copied from its home on the host to the compute device."""

    chunk_index: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkEvicted:
    """The device copy of a chunk was dropped; it was clean, so nothing was copied."""

    chunk_index: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkInvalidated:
    """The device copy of a chunk was dropped because the optimizer changed its home."""

    chunk_index: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class GradientStored:
    """A gradient reached the home of its chunk. ``nbytes`` crossed from device to host (0 if nothing crossed)."""

    chunk_index: int
    tensor_index: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ValueRestored:
    """A parameter's value was written again over its gradient, from ``master``.

    ``nbytes`` crossed from host to device, because a device copy of the chunk had to follow.
    """

    chunk_index: int
    tensor_index: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class StepFinished:
    """The optimizer finished a step (or dropped it: ``skipped``, an overflow in fp16)."""

    step: int
    skipped: bool


Event = ChunkLoaded | ChunkEvicted | ChunkInvalidated | GradientStored | ValueRestored | StepFinished
Listener = Callable[[Event], None]
