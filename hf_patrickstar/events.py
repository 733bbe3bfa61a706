"""Events of the runtime, as plain data: the runtime emits them, ``report`` sums them up."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkLoaded:
    """A chunk was copied from its home on the host to the compute device; ``ahead`` of being needed, perhaps."""

    chunk_index: int
    nbytes: int
    ahead: bool = False


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
class ChunkRehomed:
    """A chunk moved its home, with all its lists: to the device, or back to the host."""

    chunk_index: int
    to_device: bool
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


Event = ChunkLoaded | ChunkEvicted | ChunkInvalidated | ChunkRehomed | GradientStored | ValueRestored | StepFinished
Listener = Callable[[Event], None]
