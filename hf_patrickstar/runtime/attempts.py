"""Which gradients a micro-batch has left behind that may have to be undone and repeated."""

import collections

from hf_patrickstar.runtime.chunk import GradientPlace


class Attempts:
    """Counts the contributions to gradients over attempts at one micro-batch.

    A gradient that an attempt was the first to store can be dropped when the attempt fails. One that was added to those
    of earlier micro-batches cannot be taken out without rounding: it stays, and the next attempt, which computes the
    same contributions in the same order, must not count as many of them again.
    """

    def __init__(self) -> None:
        self._is_running = False
        self._before: dict[int, GradientPlace] = {}
        self._num_stored: collections.Counter[int] = collections.Counter()
        self._num_placed: dict[int, int] = {}
        self._num_counted: dict[int, int] = {}

    def begin(self) -> None:
        """Begins the first attempt."""
        self._is_running = True
        self._before.clear()
        self._num_stored.clear()
        self._num_placed.clear()
        self._num_counted.clear()

    def end(self) -> None:
        """Ends the last one; until the next begins nothing is counted."""
        self.begin()
        self._is_running = False

    def is_counted(self, tensor_index: int) -> bool:
        """Takes notice of a contribution; whether an attempt that failed has left it in its place."""
        if not self._is_running:
            return False
        self._num_stored[tensor_index] += 1
        return self._num_stored[tensor_index] <= self._num_counted.get(tensor_index, 0)

    def note_placed(self, tensor_index: int, before: GradientPlace) -> None:
        """Notes that all contributions so far are in their place, and where the gradient was before the first."""
        if self._is_running:
            self._before.setdefault(tensor_index, before)
            self._num_placed[tensor_index] = self._num_stored[tensor_index]

    @property
    def has_leftovers(self) -> bool:
        """Whether attempts that failed have left contributions that only a repetition makes whole."""
        return bool(self._num_counted)

    def undo(self) -> set[int]:
        """Begins the next attempt after one that failed.

        Returns:
            Indices of the tensors whose gradients it was the first to store: they are to be dropped.
        """
        dropped = {index for index, before in self._before.items() if before is GradientPlace.NONE}
        for index in self._before.keys() - dropped:
            self._num_counted[index] = self._num_placed[index]
        self._before.clear()
        self._num_stored.clear()
        return dropped
