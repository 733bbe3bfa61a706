"""Which chunk leaves a full device. Pure decisions: numbers go in, the index of a chunk comes out."""

import heapq
import math
from collections.abc import Collection, Iterable, Iterator

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

    def in_order(
        self, chunks: Iterable[tuple[int, int]], cursor: Cursor | None, is_diverged: bool = False
    ) -> Iterator[int]:
        """The chunks in the order in which they leave; what comes first is known without sorting all.

        Args:
            chunks: Index and last access of every chunk that may leave.
            cursor: The place in the trace that the step follows, or ``None``.
            is_diverged: Whether the step has left its trace.

        Yields:
            Indices.
        """
        heap = [(self.rank(index, last, cursor, is_diverged), index) for index, last in chunks]
        heapq.heapify(heap)
        while heap:
            yield heapq.heappop(heap)[1]

    def rank(self, index: int, last_access: int, cursor: Cursor | None, is_diverged: bool = False) -> float:
        """The place of a chunk in the order in which chunks leave, the lowest first; only a visit to it changes it.

        Args:
            index: The chunk.
            last_access: When it was visited last.
            cursor: See ``in_order``.
            is_diverged: See ``in_order``.
        """
        if self.name == "belady" and cursor is not None:
            moment = cursor.next_visit(index)
            return -math.inf if moment is None else -moment
        if self.name == "lru" or (self.name == "belady" and is_diverged):
            return last_access
        return 0


class EvictionQueue:
    """The chunks on the device while a plan is made, in the order in which ``Chooser.in_order`` lets them leave.

    Since only a visit changes a rank, each visit puts one entry into a heap. Entries of before stay there until they
    come to the top.

    Args:
        chooser: Has the policy.
        cursor: The place in the trace that is planned.
    """

    def __init__(self, chooser: Chooser, cursor: Cursor) -> None:
        self._chooser = chooser
        self._cursor = cursor
        self._ranks: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def visit(self, index: int, moment: int) -> None:
        """Notes a chunk that is on the device from now on.

        Args:
            index: The chunk.
            moment: When it was visited last.
        """
        rank = self._chooser.rank(index, moment, self._cursor)
        if self._ranks.get(index) != rank:
            self._ranks[index] = rank
            heapq.heappush(self._heap, (rank, index))

    def remove(self, index: int) -> None:
        """Notes a chunk that has left."""
        del self._ranks[index]

    def pop(self, in_use: Collection[int]) -> int | None:
        """Removes the chunk that leaves next.

        Args:
            in_use: Chunks that cannot leave now; the one that is visited is among them.

        Returns:
            Its index, or ``None`` if all that are there are in use.
        """
        passed = []
        victim = None
        while self._heap and victim is None:
            rank, index = entry = heapq.heappop(self._heap)
            if self._ranks.get(index) != rank:
                continue
            if index in in_use:
                passed.append(entry)
            else:
                victim = index
                self.remove(index)
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return victim
