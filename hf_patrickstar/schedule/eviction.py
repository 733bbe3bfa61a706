"""Which chunk leaves a full device. Pure decisions: numbers go in, the index of a chunk comes out."""

from collections.abc import Iterable

from hf_patrickstar.schedule.trace import Cursor


class Chooser:
    """Applies the policy of a configuration; it knows the next uses only where a step follows a trace.

    ``"list_order"`` takes the first chunk of the chunk list, the rule of the warm-up iteration (PatrickStar section
    8.1); ``"lru"`` the one that was unused longest; ``"belady"`` the one that is the latest to be needed next (section
    8.3). Among equals they take the first of the list. The runtime and the simulator both decide here.

    Args:
        name: The policy. Belady needs a trace: the warm-up step evicts in list order, a step that leaves its trace by
            least recent use.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def choose(self, chunks: Iterable[tuple[int, int]], cursor: Cursor | None, is_diverged: bool = False) -> int:
        """Chooses the chunk to evict.

        Args:
            chunks: Index and last access of every chunk that may leave; not empty.
            cursor: The place in the trace that the step follows, or ``None``.
            is_diverged: Whether the step has left its trace.

        Returns:
            The index of the victim.
        """
        if self.name == "belady" and cursor is not None:
            visits = [(cursor.next_visit(index), -index) for index, _ in chunks]
            return -max((float("inf") if moment is None else moment, place) for moment, place in visits)[1]
        if self.name == "lru" or (self.name == "belady" and is_diverged):
            return min((last, index) for index, last in chunks)[1]
        return min(index for index, _ in chunks)
