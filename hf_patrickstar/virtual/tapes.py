"""Remembers what updates of the host do, so that of several that are alike only one calls operators.

[Note: updates that are alike]
An update of a chunk calls the same operators, on ranges of the same sizes, as that of any chunk that is laid out alike;
with tensors that have no bytes, nothing else tells them apart. What the first one did is kept as a tape: each operator
with the ranges that it touched. For the others the tape is played over their own memory, and costs what the update
would have. The first update of its kind is put together from tapes of its parts, since the tiles of large chunks are
alike, too. Memory that an update takes and gives back is new each time that a tape is played; torch may give it out
again, and then it may still be in the cache. torch's Adam that is not fused has such temporaries.

What an operator costs depends on what the cache still has. A large chunk has thousands of operators, and the cache
holds the last few ranges. So what a tape came to is kept, too, by what was in the cache before: which of the update's
own ranges, which of lasting memory, and how large the others are, in order. Where that is the same, so are the costs,
and what is in the cache afterwards.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from hf_patrickstar.memory.operators import storage_key
from hf_patrickstar.runtime.update import Likeness
from hf_patrickstar.schedule.script import HostWork
from hf_patrickstar.tracing.costs import Cost, HostCache, Line, Touch


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


class _Place(NamedTuple):
    """Memory of an update: a storage, and the byte from which ranges in it are counted."""

    storage: int
    begin: int


class _Tape(NamedTuple):
    operators: list[Operator]
    own: list[_Place]  # memory of the update that was recorded
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

    def play(self, likeness: Likeness) -> Charge | None:
        """What an update costs that is like one that was recorded; ``None`` if none was.

        Args:
            likeness: What updates are alike in, and what this one works with.
        """
        tape, own = self._tapes.get(likeness.key), _places(likeness)
        if tape is None or own is None:
            return None
        names = _names(tape, own)
        before = self._cache.lines()
        state = tuple(_seen(line, names) for line in before)
        outcome = tape.outcomes.get(state)
        if outcome is None:
            works = self.charge(self._over(tape, own)).works
            outcome = tape.outcomes[state] = _Outcome(works, tuple(_sources(self._cache.lines(), names, before)))
        else:
            self._cache.fill(self._line(*each, own, before) for each in outcome.lines)
        played = {known.storage: place.storage for known, place in zip(tape.own, own, strict=True)}
        return Charge(outcome.works, frozenset(played.get(storage, storage) for storage in tape.written))

    def recall(self, likeness: Likeness) -> list[Operator] | None:
        """What an update does that is like one that was recorded; ``None`` if none was. It costs nothing yet.

        Args:
            likeness: See ``play``.
        """
        tape, own = self._tapes.get(likeness.key), _places(likeness)
        return None if tape is None or own is None else self._over(tape, own)

    def keep(self, likeness: Likeness, operators: list[Operator], is_lasting: Callable[[int], bool]) -> None:
        """Keeps what an update did.

        Args:
            likeness: See ``play``.
            operators: What it did.
            is_lasting: Tells whether a storage stays when the update has ended.
        """
        own = _places(likeness)
        if own is None:
            return
        storages = {place.storage for place in own}
        touches = [touch for operator in operators for touch in operator.touches]
        others = {touch.storage for touch in touches} - storages
        lasting = frozenset(storage for storage in others if is_lasting(storage))
        known = lasting | storages
        written = frozenset(touch.storage for touch in touches if touch.is_write and touch.storage in known)
        self._tapes[likeness.key] = _Tape(operators, own, lasting, written, {})

    def _over(self, tape: _Tape, own: Sequence[_Place]) -> list[Operator]:
        """The operators of a tape, over other memory."""
        found = {storage: _Place(storage, 0) for storage in tape.lasting}
        for known, place in zip(tape.own, own, strict=True):
            found[known.storage] = _Place(place.storage, place.begin - known.begin)

        def over(touch: Touch) -> Touch:
            storage, begin, end, is_write, is_read = touch
            if storage not in found:
                found[storage] = _Place(self._new_temporary(), 0)
            target, shift = found[storage]
            return Touch(target, begin + shift, end + shift, is_write, is_read)

        return [Operator(name, cost, tuple(map(over, touches))) for name, cost, touches in tape.operators]

    def _line(self, source: Hashable, line: Line, own: Sequence[_Place], before: Sequence[Line]) -> Line:
        """A line of an outcome, over an update's own memory."""
        match source:
            case "own", int(number):
                storage, begin = own[number]
                return Line(storage, line.begin + begin, line.end + begin, line.is_written)
            case "before", int(number):
                return before[number]
            case "new":
                return line._replace(storage=self._new_temporary())
        return line  # of lasting memory

    def _new_temporary(self) -> int:
        self._num_temporaries += 1
        return -self._num_temporaries


def _places(likeness: Likeness) -> list[_Place] | None:
    """The memory of an update; ``None`` if tensors share a storage: nobody could tell from where a range is counted."""
    places = [
        _Place(storage_key(tensor), begin + int(tensor.storage_offset()) * tensor.itemsize)
        for tensor, begin in likeness.memory
    ]
    return places if len({place.storage for place in places}) == len(places) else None


def _names(tape: _Tape, own: Sequence[_Place]) -> Mapping[int, tuple[Hashable, int]]:
    """What an update's memory is called, by storage, and the byte from which ranges in it are counted."""
    lasting = {storage: (storage, 0) for storage in tape.lasting}
    return {**lasting, **{place.storage: (("own", number), place.begin) for number, place in enumerate(own)}}


def _seen(line: Line, names: Mapping[int, tuple[Hashable, int]]) -> tuple[Hashable, int, int, bool]:
    """What of a line makes a difference to an update: where it is in memory that the update knows, and its size."""
    name, first = names.get(line.storage, (None, line.begin))
    begin = line.begin - first
    return name, begin, begin + line.end - line.begin, line.is_written


def _sources(
    after: Iterable[Line], names: Mapping[int, tuple[Hashable, int]], before: Sequence[Line]
) -> Iterable[tuple[Hashable, Line]]:
    """Lines after an update, each with where it comes from; those of its own memory count from where that begins."""
    places = {(line.storage, line.begin, line.end): ("before", place) for place, line in enumerate(before)}
    for line in after:
        if line.storage in names:
            name, first = names[line.storage]
            yield name, line._replace(begin=line.begin - first, end=line.end - first)
        else:
            yield places.get((line.storage, line.begin, line.end), "new"), line
