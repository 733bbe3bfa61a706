"""Events of the runtime, as plain data: the runtime emits them, ``report`` sums them up."""

import dataclasses
from collections.abc import Callable


class Event:
    """What the runtime tells its listeners."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True, slots=True)
class ModelDecided(Event):
    """It was decided where model data will live; nothing is allocated yet. ``text``: what it will take, in one line."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkLoaded(Event):
    """A chunk was copied from its home on the host to the compute device; ``ahead`` of being needed, perhaps.

    ``waited_s``: how long the host was busy with a copy that had not been started ahead.
    """

    chunk_index: int
    nbytes: int
    ahead: bool = False
    waited_s: float = dataclasses.field(default=0.0, compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkVisited(Event):
    """A chunk was needed on the device, and is there now.

    ``is_hit``: it is one that moves, was there already, and nobody had to wait for it. ``waited_s``: how long the host
    waited for a copy that had been started ahead and had not arrived; ``None`` if there was none such.
    """

    chunk_index: int
    is_hit: bool
    waited_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkEvicted(Event):
    """The device copy of a chunk was dropped; it was clean, so nothing was copied."""

    chunk_index: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkInvalidated(Event):
    """The device copy of a chunk was dropped because the optimizer changed its home."""

    chunk_index: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkRehomed(Event):
    """A chunk moved its home, with all its lists: to the device, or back to the host."""

    chunk_index: int
    to_device: bool
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class GradientStored(Event):
    """A gradient reached the home of its chunk. ``nbytes`` crossed from device to host (0 if nothing crossed)."""

    chunk_index: int
    tensor_index: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ValueRestored(Event):
    """A parameter's value was written again over its gradient, from ``master``.

    ``nbytes`` crossed from host to device, because a device copy of the chunk had to follow.
    """

    chunk_index: int
    tensor_index: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ActivationLeft(Event):
    """Memory that autograd keeps began to leave the device for the host."""

    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ActivationReturned(Event):
    """Memory that autograd keeps began to come back to the device, for backward."""

    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class StepFinished(Event):
    """The optimizer finished a step (or dropped it: ``skipped``, an overflow in fp16)."""

    step: int
    skipped: bool


@dataclasses.dataclass(frozen=True, slots=True)
class StepRecorded(Event):
    """A step was recorded; its trace has this key."""

    key: str


@dataclasses.dataclass(frozen=True, slots=True)
class StepDiverged(Event):
    """A step has differed from the trace with this key, and goes on without a plan."""

    key: str


@dataclasses.dataclass(frozen=True, slots=True)
class MicroBatchRepeated(Event):
    """A micro-batch is repeated, because the device had run out of memory; the first repetition is number 1.

    ``is_defragmented``: the memory was there in pieces, so the budget is as before.
    """

    attempt: int
    is_defragmented: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class SlicesGathered(Event):
    """This rank sent ``nbytes`` of parameters in an all-gather: one slice to every other rank, as many as in a ring."""

    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class SlicesReduced(Event):
    """This rank sent ``nbytes`` of gradients in a reduce-scatter, counted as for ``SlicesGathered``."""

    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class MessageExchanged(Event):
    """The processes told each other something short."""


Listener = Callable[[Event], None]


def tell_nobody(event: Event) -> None:
    """A listener that does nothing."""


def both(first: Listener, second: Listener) -> Listener:
    """Two listeners as one."""

    def emit(event: Event) -> None:
        first(event)
        second(event)

    return emit
