"""An update of chunks that is prepared and can run later."""

import dataclasses
from collections.abc import Callable, Sequence

from hf_patrickstar.memory.driver import Work
from hf_patrickstar.memory.streams import Later
from hf_patrickstar.runtime.chunk import Chunk


def _do_nothing() -> None:
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """What the optimizer does to chunks; see [Note: an update under way].

    Attributes:
        chunks: The chunks.
        run: Computes with the payloads at home, or has workers do so, which it returns then.
        take_back: Takes back what was counted when the update was prepared, because it fails or is not done.
        restore: Writes values from their masters, over gradients that stand in their places.
        stream: Computes on the device, for a chunk at home on the host; see [Note: updates over the bus].
    """

    chunks: Sequence[Chunk]
    run: Work
    take_back: Callable[[], None] = _do_nothing
    restore: Callable[[], None] = _do_nothing
    stream: Later | None = None

    def give_up(self) -> None:
        """Leaves the chunks as after a step that did not update them: values are the masters, gradients are lost."""
        self.take_back()
        self.restore()
