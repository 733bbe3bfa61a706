"""Remembers what updates of the host do, so that of several that are alike only one calls operators.

[Note: updates that are alike]
An update of a chunk calls the same operators, on ranges of the same sizes, as that of any chunk that is laid out alike;
with tensors that have no bytes, nothing else tells them apart. What the first one did is kept as a tape: each operator
with the ranges that it touched. For the others the tape is played over their own memory, so that it costs exactly what
the update would have.

What an operator costs depends on what the cache still has. A large chunk has thousands of operators, and the cache
holds the last few ranges. So what a tape came to is kept, too, by what was in the cache before: which of the update's
own ranges, which of lasting memory, and how large the others are, in order. Where that is the same, so are the costs,
and what is in the cache afterwards.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from hf_patrickstar.memory.operators import storage_key
from hf_patrickstar.schedule.script import HostWork
from hf_patrickstar.virtual.costs import Cost, HostCache, Line, Touch


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


class Charge(NamedTuple):
    """What work of the host's thread costs.

    Attributes:
        works: Its operators, in order, with what the cache saves taken off.
        written: The storages that it writes.
    """

    works: tuple[HostWork, ...]
    written: frozenset[int]


class _Outcome(NamedTuple):
    """What a tape comes to with a cache in one state: its costs, and where each line comes from that is there then."""

    works: tuple[HostWork, ...]
    lines: tuple[tuple[Hashable, Line], ...]


class _Tape(NamedTuple):
    operators: list[Operator]
    own: list[int]  # storages of the update that was recorded
    lasting: frozenset[int]  # storages that other updates use too, for example scratch space
    written: frozenset[int]
    outcomes: dict[Hashable, _Outcome]


class Tapes:
    """What updates did, by what they are alike in; see [Note: updates that are alike].

    Args:
        cache: What of the host's memory is in a cache.
    """

    def __init__(self, cache: HostCache) -> None:
        self._cache = cache
        self._tapes: dict[Hashable, _Tape] = {}
        self._num_temporaries = 0

    def charge(self, operators: Iterable[Operator]) -> Charge:
        """What operators cost that have run; the cache has what they touched last.

        Args:
            operators: The operators, in order.
        """
        works: list[HostWork] = []
        written: set[int] = set()
        for operator in operators:
            saved = self._cache.saved_nbytes(operator.touches)
            works.append(HostWork(operator.name, operator.cost.flops, max(operator.cost.nbytes - saved, 0)))
            written.update(touch.storage for touch in operator.touches if touch.is_write)
        return Charge(tuple(works), frozenset(written))

    def play(self, likeness: Hashable, memory: Sequence[torch.Tensor]) -> Charge | None:
        """What an update costs that is like one that was recorded; ``None`` if none was.

        Args:
            likeness: What updates are alike in.
            memory: What it works with, in an order that is the same for updates that are alike.
        """
        tape = self._tapes.get(likeness)
        if tape is None:
            return None
        own = list(map(storage_key, memory))
        names: dict[int, Hashable] = {**{storage: storage for storage in tape.lasting}, **_places(own)}
        before = self._cache.lines()
        state = tuple(_seen(line, names) for line in before)
        outcome = tape.outcomes.get(state)
        if outcome is None:
            works = self.charge(self._over(tape, own)).works
            outcome = tape.outcomes[state] = _Outcome(works, tuple(_sources(self._cache.lines(), names, before)))
        else:
            self._cache.fill(self._line(*each, own, before) for each in outcome.lines)
        played = dict(zip(tape.own, own, strict=True))
        return Charge(outcome.works, frozenset(played.get(storage, storage) for storage in tape.written))

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
        touches = [touch for operator in operators for touch in operator.touches]
        lasting = frozenset(
            storage for storage in {touch.storage for touch in touches}.difference(own) if is_lasting(storage)
        )
        known = lasting.union(own)
        written = frozenset(touch.storage for touch in touches if touch.is_write and touch.storage in known)
        self._tapes[likeness] = _Tape(operators, own, lasting, written, {})

    def _over(self, tape: _Tape, own: Sequence[int]) -> list[Operator]:
        """The operators of a tape, over other memory."""
        found = {**{storage: storage for storage in tape.lasting}, **dict(zip(tape.own, own, strict=True))}

        def find(storage: int) -> int:
            if storage not in found:
                found[storage] = self._new_temporary()
            return found[storage]

        return [
            operator._replace(touches=tuple(touch._replace(storage=find(touch.storage)) for touch in operator.touches))
            for operator in tape.operators
        ]

    def _line(self, source: Hashable, line: Line, own: Sequence[int], before: Sequence[Line]) -> Line:
        """A line of an outcome, over an update's own memory."""
        match source:
            case "own", int(place):
                return line._replace(storage=own[place])
            case "before", int(place):
                return before[place]
            case "new":
                return line._replace(storage=self._new_temporary())
        return line  # of lasting memory

    def _new_temporary(self) -> int:
        self._num_temporaries += 1
        return -self._num_temporaries


def _places(own: Sequence[int]) -> Mapping[int, Hashable]:
    return {storage: ("own", place) for place, storage in enumerate(own)}


def _seen(line: Line, names: Mapping[int, Hashable]) -> tuple[Hashable, int, int, bool]:
    """What of a line makes a difference to an update: where it is, if the update touches that memory, and its size."""
    name = names.get(line.storage)
    begin = 0 if name is None else line.begin
    return name, begin, begin + line.end - line.begin, line.is_written


def _sources(
    after: Iterable[Line], names: Mapping[int, Hashable], before: Sequence[Line]
) -> Iterable[tuple[Hashable, Line]]:
    """Lines after an update, each with where it comes from."""
    places = {(line.storage, line.begin, line.end): ("before", place) for place, line in enumerate(before)}
    for line in after:
        source = names.get(line.storage) or places.get((line.storage, line.begin, line.end), "new")
        yield source, line
