"""Which gradients an attempt at a micro-batch has stored, for the case that the attempt fails and is repeated."""

import collections

from hf_patrickstar.runtime.gradient_place import GradientPlace


class Attempts:
    """Counts the contributions to gradients over attempts at one micro-batch.

    A gradient that a failed attempt was the first to store is dropped. A contribution that was added to the gradient of
    earlier micro-batches cannot be subtracted without rounding, so it stays. The next attempt computes the same
    contributions in the same order, and skips those that are there already.
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
        """Ends the last attempt; nothing is counted until ``begin``."""
        self.begin()
        self._is_running = False

    def is_counted(self, tensor_index: int) -> bool:
        """Notes a contribution; returns whether a failed attempt has added it already."""
        if not self._is_running:
            return False
        self._num_stored[tensor_index] += 1
        return self._num_stored[tensor_index] <= self._num_counted.get(tensor_index, 0)

    def note_before(self, tensor_index: int, before: GradientPlace) -> None:
        """Notes where a gradient was before an attempt moved it to the place to which contributions are added."""
        if self._is_running:
            self._before.setdefault(tensor_index, before)

    def note_placed(self, tensor_index: int, before: GradientPlace) -> None:
        """Notes that all contributions so far are stored, and where the gradient was before the first one."""
        if self._is_running:
            self._before.setdefault(tensor_index, before)
            self._num_placed[tensor_index] = self._num_stored[tensor_index]

    @property
    def has_leftovers(self) -> bool:
        """Whether failed attempts have left contributions, so that only a repetition completes the gradients."""
        return bool(self._num_counted)

    def undo(self) -> set[int]:
        """Begins the next attempt after a failed one.

        Returns:
            Indices of the tensors whose gradients the failed attempt was the first to store; the caller drops these.
        """
        dropped = {index for index, before in self._before.items() if before is GradientPlace.NONE}
        for index in self._before.keys() - dropped:
            self._num_counted[index] = self._num_placed.get(index, 0)
        self._before.clear()
        self._num_stored.clear()
        return dropped
