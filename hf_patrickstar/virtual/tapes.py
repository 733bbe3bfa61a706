"""Remembers what updates of the host do, so that of several that are alike only one calls operators.

[Note: updates that are alike]
An update of a chunk calls the same operators, on ranges of the same sizes, as that of any chunk that is laid out alike;
with tensors that have no bytes, nothing else tells them apart. What the first one did is kept as a tape: each operator
with the ranges that it touched. For the others the tape is played over their own memory. What stays in the cache is
worked out anew each time, so that a tape costs exactly what the update would have.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch

from hf_patrickstar.memory.operators import storage_key
from hf_patrickstar.virtual.costs import Cost, Touch


class Operator(NamedTuple):
    """An operator that work of the host's thread has called.

    Attributes:
        name: The operator.
        cost: What it costs without a cache.
        touches: The ranges that it works with.
    """

    name: str
    cost: Cost
    touches: tuple[Touch, ...]


class _Tape(NamedTuple):
    operators: list[Operator]
    own: list[int]  # storages of the update that was recorded
    lasting: frozenset[int]  # storages that other updates use too, for example scratch space


class Tapes:
    """What updates did, by what they are alike in; see [Note: updates that are alike]."""

    def __init__(self) -> None:
        self._tapes: dict[Hashable, _Tape] = {}
        self._num_temporaries = 0

    def play(self, likeness: Hashable, memory: Sequence[torch.Tensor]) -> list[Operator] | None:
        """What an update does that is like one that was recorded; ``None`` if none was.

        Args:
            likeness: What updates are alike in.
            memory: What it works with, in an order that is the same for updates that are alike.
        """
        tape = self._tapes.get(likeness)
        if tape is None:
            return None
        found = {**dict.fromkeys(tape.lasting), **dict(zip(tape.own, map(storage_key, memory), strict=True))}

        def find(storage: int) -> int:
            if storage not in found:  # a temporary
                self._num_temporaries += 1
                found[storage] = -self._num_temporaries
            other = found[storage]
            return storage if other is None else other

        return [
            operator._replace(touches=tuple(touch._replace(storage=find(touch.storage)) for touch in operator.touches))
            for operator in tape.operators
        ]

    def keep(
        self,
        likeness: Hashable,
        memory: Sequence[torch.Tensor],
        operators: list[Operator],
        is_lasting: Callable[[int], bool],
    ) -> None:
        """Keeps what an update did.

        Args:
            likeness: See ``play``.
            memory: See ``play``.
            operators: What it did.
            is_lasting: Tells whether a storage stays when the update has ended.
        """
        own = list(map(storage_key, memory))
        touched = {touch.storage for operator in operators for touch in operator.touches}
        lasting = frozenset(storage for storage in touched.difference(own) if is_lasting(storage))
        self._tapes[likeness] = _Tape(operators, own, lasting)
