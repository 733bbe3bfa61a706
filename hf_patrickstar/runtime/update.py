"""An update of chunks that is prepared and can run later."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import torch


def _do_nothing() -> None:
    pass


class Likeness(NamedTuple):
    """What updates are alike in.

    Attributes:
        key: Equal for updates that call the same operators on ranges of the same sizes.
        memory: What the update works with, in an order that updates of one key share. Each tensor comes with the byte
            from which its ranges are counted.
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
            one of them.
        parts: The updates that it consists of, in order; ``None`` if it does not. A simulation runs only those of its
            parts that are not like others.
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
