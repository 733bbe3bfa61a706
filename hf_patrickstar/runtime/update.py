"""An update of chunks that is prepared and can run later."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import torch


def _do_nothing() -> None:
    pass


class Likeness(NamedTuple):
    """Identifies updates that do the same over other memory.

    Attributes:
        key: Equal for updates that call the same operators on ranges of the same sizes.
        memory: The tensors that the update works with, in an order that updates of one key share. Each comes with the
            number of bytes after its beginning from which ranges are counted.
    """

    key: Hashable
    memory: Sequence[tuple[torch.Tensor, int]]


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """What the optimizer does to chunks that have the same home; see [Note: an update under way].

    Attributes:
        run: Computes with the payloads at home.
        take_back: Takes back what was counted when the update was prepared, because it fails or is not done.
        restore: Writes values from their masters, over gradients that stand in their places.
        likeness: Tells which updates do the same over other memory; ``None`` if nobody knows. A simulation runs only
            the first one of a key.
        parts: The updates that it consists of where one thread does it, in order; ``None`` if it is not divided. A
            simulation runs only the first part of each key.
    """

    run: Callable[[], None]
    take_back: Callable[[], None] = _do_nothing
    restore: Callable[[], None] = _do_nothing
    likeness: Callable[[], Likeness] | None = None
    parts: Callable[[], Iterable["Update"]] | None = None

    def __call__(self) -> None:
        """See ``run``."""
        self.run()

    def give_up(self) -> None:
        """Leaves the chunks as after a step that did not update them: values are the masters, gradients are lost."""
        self.take_back()
        self.restore()
