"""Notes of a model with few blocks, extended to those of one with many. Pure data.

[Note: blocks that repeat]
Most of a transformer is a stack of blocks that are alike, and what torch tells an engine repeats with them: in forward
from the first block to the last one, in backward from the last to the first. So the model runs with four blocks of a
stack, the places are found where its notes go from one block in the middle to the next one, and there the notes of a
block are inserted as often as blocks are missing. What notes say of parameters, modules and memory of a block is said
relative to the block; all else belongs to the beginning or to the end of the stack.

Nothing is taken on trust. The notes of five blocks, made of those of four, must be those of a run of five. A forward of
the whole model must be what the extended notes begin with, note by note (``tracing/micro_batch.py``), since code may
ask for the number of a block; backward is what autograd has kept of that forward. If anything differs the model is run
in full.
"""

import bisect
import collections
import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hf_patrickstar.schedule.op_trace import Acquire, Allocate, EnterForward, Free, Gradient, Need, Note

FEW_BLOCKS = 4
"""Blocks of a stack that notes are extended from."""
Names = Mapping[int, str]
"""The parameters of a model by their index."""


class IrregularError(Exception):
    """Notes do not repeat with the blocks of a stack."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stack:
    """Blocks of a list of modules that are alike.

    Attributes:
        path: The list's name in the model.
        first: The first module of the list that belongs to a block; those before it are of other kinds.
        period: How many modules are a block: more than one where kinds alternate.
        num_blocks: How many blocks there are; they are the end of the list.
    """

    path: str
    first: int
    period: int
    num_blocks: int

    def num_modules(self, num_blocks: int) -> int:
        """Modules of a list with so many blocks.

        Args:
            num_blocks: The blocks.
        """
        return self.first + num_blocks * self.period

    def split(self, name: str) -> tuple[tuple[str, int, str], int] | None:
        """The block that is meant with a name, if one is.

        Args:
            name: The name of a module or parameter, maybe with words around it.

        Returns:
            The name without the number of the block, and this number.
        """
        found = re.search(rf"(?<![\w.]){re.escape(self.path)}\.(\d+)(?!\w)", name)
        place = -1 if found is None else int(found[1]) - self.first
        if found is None or place < 0:
            return None
        return (name[: found.start(1)], place % self.period, name[found.end(1) :]), place // self.period

    def join(self, parts: tuple[str, int, str], block: int) -> str:
        """The opposite of ``split``.

        Args:
            parts: The name without the number of a block.
            block: The number.
        """
        return f"{parts[0]}{self.first + block * self.period + parts[1]}{parts[2]}"


@dataclasses.dataclass(frozen=True, slots=True)
class _Parsed:
    """A note, split into what repeats and what goes on from block to block.

    Attributes:
        note: The note.
        fixed: What must be the same in the notes of another block.
        place: The parameter: its block, or ``None`` if it is in none, and its place there or its index.
        name: The parts of a name of a module, and its block.
        storages: Where the storages that are meant were allocated: in which note, as which one of them.
    """

    note: Note
    fixed: Any
    place: tuple[int | None, int] | None = None
    name: tuple[tuple[str, int, str], int] | None = None
    storages: tuple[tuple[int, int], ...] = ()

    def blocks(self) -> tuple[int | None, int | None]:
        """The blocks of the parameter and of the name."""
        return self.place and self.place[0], self.name and self.name[1]


@dataclasses.dataclass(frozen=True, slots=True)
class _Loop:
    """Where notes of a block are followed by those of the next one, in the middle of the stack.

    Attributes:
        begin: The first note of the first of these blocks.
        length: How many notes each has.
        sign: 1 if blocks come in their order, -1 if they come the other way round.
    """

    begin: int
    length: int
    sign: int

    @property
    def end(self) -> int:
        """The note after those of both blocks."""
        return self.begin + 2 * self.length

    def contains(self, position: int) -> bool:
        """Whether a note is one of these two blocks."""
        return self.begin <= position < self.end

    def is_about(self, position: int) -> bool:
        """Whether a note is at most one block away from these two."""
        return self.begin - self.length <= position < self.end + self.length

    def is_about_both(self, first: int, second: int) -> bool:
        """Whether that is so for two notes."""
        return self.is_about(first) and self.is_about(second)

    def touches(self, first: int, second: int) -> bool:
        """Whether one of two notes is one of these two blocks."""
        return self.contains(first) or self.contains(second)

    def covers(self, before: int, after: int, sign: int) -> bool:
        """Whether two notes are of two blocks that follow each other here, in the same place.

        Args:
            before: A note.
            after: Another one.
            sign: 1 if its block is the next one of the stack, -1 if it is the one before.
        """
        return after - before == sign * self.sign * self.length and self.is_about(before) and self.is_about(after)


def extend(
    notes: Sequence[Note], names: Names, stacks: Sequence[Stack], num_blocks: Sequence[int]
) -> tuple[tuple[Note, ...], Names]:
    """Notes of a model with more blocks; see [Note: blocks that repeat].

    Args:
        notes: Those of a model with as many as the stacks say, at least four in each.
        names: The parameters of that model.
        stacks: Which blocks.
        num_blocks: How many are wanted in each stack.

    Returns:
        Its notes, and its parameters.

    Raises:
        IrregularError: If the notes do not repeat with the blocks.
    """
    notes = tuple(notes)
    for stack, num in zip(stacks, num_blocks, strict=True):
        notes, names = _Extension(notes, names, stack).to(num)
    return notes, names


class _Extension:
    """Extends the notes of one model by blocks of one stack."""

    def __init__(self, notes: Sequence[Note], names: Names, stack: Stack) -> None:
        self._stack = stack
        self._names = names
        self._middle = stack.num_blocks // 2  # the first block that belongs to the end of the stack
        self._base, self._size = _places(names, stack)
        self._parsed = list(self._parse(notes))
        self._loops: list[_Loop] = []
        self._find_loops(self._pairs_of_parameters())
        self._find_loops(self._pairs_of_memory())
        self._loops.sort(key=lambda loop: loop.begin)

    # What notes say

    def _parse(self, notes: Sequence[Note]) -> Iterator[_Parsed]:
        made: dict[int, tuple[int, int]] = {}  # storages -> where they were allocated
        try:
            for position, note in enumerate(notes):
                if isinstance(note, Allocate):
                    made.update((number, (position, rank)) for rank, (number, _) in enumerate(note.storages))
                    yield _Parsed(note, (Allocate, tuple(nbytes for _, nbytes in note.storages)))
                elif isinstance(note, Free):
                    yield _Parsed(note, Free, storages=(made[note.storage],))
                elif isinstance(note, EnterForward):
                    storages = tuple(made[storage] for storage in note.others)
                    yield self._parsed_name(dataclasses.replace(note, others=()), note, None, note.name, storages)
                elif hasattr(note, "index"):
                    yield self._parsed_use(note, made)
                else:
                    yield _Parsed(note, note)
        except KeyError as error:
            raise IrregularError(f"storage {error} was not allocated in this micro-batch") from error

    def _parsed_use(self, note: Any, made: Mapping[int, tuple[int, int]]) -> _Parsed:
        """A note of a parameter."""
        storages: tuple[tuple[int, int], ...] = ()
        fixed = dataclasses.replace(note, index=0)
        if isinstance(note, Gradient):
            fixed, storages = dataclasses.replace(fixed, storage=0), (made[note.storage],)
        who = note.who if isinstance(note, (Acquire, Need)) else ""
        return self._parsed_name(fixed, note, self._place_of(note.index), who, storages)

    def _parsed_name(
        self,
        fixed: Any,
        note: Note,
        place: tuple[int | None, int] | None,
        text: str,
        storages: tuple[tuple[int, int], ...],
    ) -> _Parsed:
        name = self._stack.split(text)
        if name is not None:
            key = "who" if hasattr(fixed, "who") else "name"
            fixed = dataclasses.replace(fixed, **{key: ""})
        within = None if place is None else place if place[0] is None else place[1]
        return _Parsed(note, (fixed, within, name and name[0]), place, name, storages)

    def _place_of(self, index: int) -> tuple[int | None, int]:
        block, place = divmod(index - self._base, self._size)
        return (block, place) if 0 <= block < self._stack.num_blocks else (None, index)

    # Where blocks follow each other

    def _pairs_of_parameters(self) -> list[tuple[int, int]]:
        """Notes that say the same of parameters of the block before the middle, and of the one after it."""
        found: dict[Any, list[list[int]]] = collections.defaultdict(lambda: [[], []])
        for position, parsed in enumerate(self._parsed):
            block = parsed.place[0] if parsed.place is not None else None
            if block is not None and 0 <= block - self._middle + 1 <= 1:
                found[parsed.fixed][block - self._middle + 1].append(position)
        if any(len(before) != len(after) for before, after in found.values()):
            raise IrregularError("parameters of two blocks are not used as often")
        return [pair for before, after in found.values() for pair in zip(before, after, strict=True)]

    def _pairs_of_memory(self) -> list[tuple[int, int]]:
        """Notes that say the same of memory that two blocks have made."""
        freed = {
            parsed.storages[0]: position
            for position, parsed in enumerate(self._parsed)
            if isinstance(parsed.note, Free)
        }
        pairs = []
        for loop in self._loops:
            for position in range(loop.begin, loop.begin + loop.length):
                note = self._parsed[position].note
                for rank in range(len(note.storages) if isinstance(note, Allocate) else 0):
                    both = freed.get((position, rank)), freed.get((position + loop.length, rank))
                    if (both[0] is None) is not (both[1] is None):
                        raise IrregularError("memory of a block stays, and that of another one does not")
                    if both[0] is not None and both[1] is not None:
                        pairs.append((both[0], both[1]) if loop.sign > 0 else (both[1], both[0]))
        return pairs

    def _find_loops(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Finds loops until each pair of notes is in one.

        Args:
            pairs: Notes of the block before the middle, and of the one after it.
        """
        for first, second in sorted(pairs, key=min):
            loop = _Loop(min(first, second), abs(second - first), 1 if first < second else -1)
            if not self._is_in_a_loop(first, second) and self._repeats(loop):
                self._loops.append(loop)
        for first, second in pairs:
            if not self._is_in_a_loop(first, second):
                raise IrregularError(f"blocks differ: {self._parsed[first].note}, {self._parsed[second].note}")

    def _is_in_a_loop(self, first: int, second: int) -> bool:
        """Whether a loop is known that two notes of blocks that follow each other are of."""
        return any(
            # The notes of the first and the last block may be more, or fewer.
            loop.covers(first, second, 1) or (loop.touches(first, second) and loop.is_about_both(first, second))
            for loop in self._loops
        )

    def _repeats(self, loop: _Loop) -> bool:
        """Whether the notes of two blocks are the same, relative to the block."""
        if loop.end > len(self._parsed):
            return False
        if any(loop.begin < known.end and known.begin < loop.end for known in self._loops):
            return False
        loops = [*self._loops, loop]
        middle = loop.begin + loop.length
        pairs = zip(self._parsed[loop.begin : middle], self._parsed[middle : loop.end], strict=True)
        return all(self._continues(before, after, loop.sign, loops) for before, after in pairs)

    def _continues(self, before: _Parsed, after: _Parsed, sign: int, loops: Sequence[_Loop]) -> bool:
        """Whether a note says of a block what another one says of the block that came before."""
        if before.fixed != after.fixed or len(before.storages) != len(after.storages):
            return False
        for mine, other in zip(before.blocks(), after.blocks(), strict=True):
            if mine is not None and other != mine + sign:
                return False
        return all(
            mine[1] == others[1] and self._home((mine[0], others[0]), sign, loops) is not None
            for mine, others in zip(before.storages, after.storages, strict=True)
        )

    def _home(self, places: tuple[int, int], sign: int, loops: Sequence[_Loop]) -> _Loop | None:
        """The loop that has made memory of two blocks that follow each other.

        Args:
            places: In which notes.
            sign: 1 if the second one is that of the next block of the stack, -1 if it is that of the one before.
            loops: All loops.
        """
        alike = self._parsed[places[0]].fixed == self._parsed[places[1]].fixed
        for loop in loops if alike else ():
            is_inside = loop.contains(places[0]) and loop.contains(places[1])
            if loop.covers(*places, sign) and loop.touches(*places):
                return loop
            if not is_inside and loop.touches(*places) and loop.is_about_both(*places):
                return loop  # the notes of the first and the last block may be more, or fewer
        return None

    # What comes of more blocks

    def to(self, num_blocks: int) -> tuple[tuple[Note, ...], Names]:
        """The notes of so many blocks, and the parameters."""
        num_added = num_blocks - self._stack.num_blocks
        storages: dict[tuple[int, int], int] = {}  # where they are allocated in the new notes -> their number
        notes: list[Note] = []
        for position, loop, turn in self._unrolled(num_added):
            parsed = self._parsed[position]
            note = parsed.note
            if isinstance(note, Allocate):
                first, at = len(storages), len(notes)
                storages.update(((at, rank), first + rank) for rank in range(len(note.storages)))
                sizes = (nbytes for _, nbytes in note.storages)
                note = Allocate(tuple(zip(itertools.count(first), sizes, strict=False)))
            elif parsed.storages:
                found = self._found(position, loop, turn, num_added)
                if any(each not in storages for each in found):
                    raise IrregularError(f"no memory is made where it should be for {note}")
                note = self._changed(parsed, loop, turn, num_added, [storages[each] for each in found])
            elif parsed.place is not None or parsed.name is not None:
                note = self._changed(parsed, loop, turn, num_added)
            notes.append(note)
        return tuple(notes), self._names_of(num_added)

    def _unrolled(self, num_added: int) -> Iterator[tuple[int, _Loop | None, int]]:
        """Which notes come in which order; those of a loop with their turn, from 0."""
        done = 0
        for loop in self._loops:
            yield from ((position, None, 0) for position in range(done, loop.begin))
            for turn in range(num_added + 2):
                yield from ((position, loop, turn) for position in range(loop.begin, loop.begin + loop.length))
            done = loop.end
        yield from ((position, None, 0) for position in range(done, len(self._parsed)))

    def _changed(
        self, parsed: _Parsed, loop: _Loop | None, turn: int, num_added: int, storages: Sequence[int] = ()
    ) -> Note:
        """A note in its new place, with the new numbers of its storages."""
        changes: dict[str, Any] = {}
        is_entry = isinstance(parsed.note, EnterForward)
        if parsed.place is not None:
            block, place = parsed.place
            if block is not None:
                changes["index"] = self._base + self._moved(block, loop, turn, num_added) * self._size + place
            else:
                changes["index"] = place + (num_added * self._size if place >= self._base else 0)
        if parsed.name is not None:
            parts, block = parsed.name
            name = self._stack.join(parts, self._moved(block, loop, turn, num_added))
            changes["name" if is_entry else "who"] = name
        if storages:
            changes |= {"others": tuple(storages)} if is_entry else {"storage": storages[0]}
        return dataclasses.replace(parsed.note, **changes)

    def _moved(self, block: int, loop: _Loop | None, turn: int, num_added: int) -> int:
        """The new number of a block."""
        if loop is None:
            return block if block < self._middle else block + num_added
        return block + turn if loop.sign > 0 else block + num_added - turn

    def _found(self, position: int, loop: _Loop | None, turn: int, num_added: int) -> list[tuple[int, int]]:
        """Where the new notes make the memory that a note means."""
        mine = self._parsed[position].storages
        if loop is None:
            return [(self._new_position(at, num_added), rank) for at, rank in mine]
        last = self._parsed[position + loop.length].storages
        places = [(first[0], last[0]) for first, last in zip(mine, last, strict=True)]
        ranks = [rank for _, rank in mine]
        return [
            (self._found_in_loop(place, loop, turn, num_added), rank) for place, rank in zip(places, ranks, strict=True)
        ]

    def _found_in_loop(self, places: tuple[int, int], loop: _Loop, turn: int, num_added: int) -> int:
        """The same for a note of a loop, of which the places are known that the first and the last turn mean."""
        home = self._home(places, loop.sign, self._loops)
        assert home is not None
        is_by_last = not home.contains(places[0])
        known_turn, known_place = (num_added + 1, places[1]) if is_by_last else (0, places[0])
        its_turn, offset = divmod(known_place - home.begin, home.length)
        way = home.sign * loop.sign
        if way == (1 if is_by_last else -1):  # then the place belongs to the turns after those that are added
            its_turn += num_added
        its_turn += way * (turn - known_turn)
        if 0 <= its_turn <= num_added + 1:
            return self._new_position(home.begin, num_added) + its_turn * home.length + offset
        if turn not in (0, num_added + 1):
            raise IrregularError("blocks in the middle use memory of the first or the last one")
        return self._new_position(places[turn > 0], num_added)

    def _new_position(self, position: int, num_added: int) -> int:
        """Where a note is in the new notes."""
        done = bisect.bisect_right(self._loops, position, key=lambda loop: loop.begin + loop.length)
        return position + num_added * sum(loop.length for loop in self._loops[:done])

    def _names_of(self, num_added: int) -> Names:
        """The parameters with more blocks."""
        names = {}
        for index, name in self._names.items():
            block, place = self._place_of(index)
            if block is None:
                names[index + (num_added * self._size if index >= self._base else 0)] = name
            elif block == 0:
                parts = self._stack.split(name)
                assert parts is not None
                for number in range(self._stack.num_blocks + num_added):
                    names[self._base + number * self._size + place] = self._stack.join(parts[0], number)
        return names


def _places(names: Names, stack: Stack) -> tuple[int, int]:
    """The index of the first parameter of a stack, and how many there are in each block.

    Raises:
        IrregularError: If blocks do not have the same parameters, one block after the other.
    """
    found: list[list[tuple[tuple[str, int, str], int]]] = [[] for _ in range(stack.num_blocks)]
    for index in sorted(names):
        split = stack.split(names[index])
        if split is not None:
            found[split[1]].append((split[0], index))
    base, size = found[0][0][1] if found[0] else 0, len(found[0])
    for block, parameters in enumerate(found):
        expected = [(parts, index + block * size) for parts, index in found[0]]
        if parameters != expected or not size or parameters[-1][1] - parameters[0][1] != size - 1:
            raise IrregularError(f"the parameters of block {block} of {stack.path} are not those of the first one")
    return base, size
