"""Notes of a model with few blocks, extended to those of one with many. Pure data.

[Note: blocks that repeat]
Most of a transformer is a stack of blocks that are alike, and what torch tells an engine repeats with them: in forward
from the first block to the last one, in backward from the last to the first. So the model runs with four blocks of a
stack, the places are found where its notes go from one block in the middle to the next one, and there the notes of a
block are inserted as often as blocks are missing. The numbers of parameters and of memory in these notes go on from one
block to the next by the same step; all else belongs to the beginning or to the end of the stack.

Nothing is taken on trust. The notes of five blocks, made of those of four, must be those of a run of five. A forward of
the whole model must be what the extended notes begin with, note by note (``tracing/micro_batch.py``), since code may
ask for the number of a block; backward is what autograd has kept of that forward. If anything differs the model is run
in full.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hf_patrickstar.schedule.op_trace import Allocate, EnterForward, Free, Gradient, Kept, Note, Wanted

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

    def split(self, name: str) -> tuple[tuple[int, str], int] | None:
        """The block that a parameter is in, if it is in one.

        Args:
            name: The name of the parameter.

        Returns:
            The module of the block and the name in it, and the number of the block.
        """
        number, _, rest = name.removeprefix(f"{self.path}.").partition(".")
        if not name.startswith(f"{self.path}.") or not number.isdigit() or int(number) < self.first:
            return None
        block, module = divmod(int(number) - self.first, self.period)
        return (module, rest), block

    def join(self, parts: tuple[int, str], block: int) -> str:
        """The opposite of ``split``.

        Args:
            parts: The module of a block and the name in it.
            block: The number of the block.
        """
        return f"{self.path}.{self.first + block * self.period + parts[0]}.{parts[1]}"


@dataclasses.dataclass(frozen=True, slots=True)
class _Range:
    """Numbers that go on from block to block: of parameters of a stack, or of memory that a loop makes.

    Attributes:
        begin: The first number.
        middle: The first number of a block that belongs to the end of the stack.
        end: The number after the last one.
        step: How many there are in a block.
    """

    begin: int
    middle: int
    end: int
    step: int

    def __contains__(self, number: int) -> bool:
        return self.begin <= number < self.end

    def num_before(self, number: int, num_added: int) -> int:
        """How many numbers come before another one if so many blocks are added in the middle."""
        return num_added * self.step if number >= self.middle else 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Parsed:
    """A note, split into what repeats and the numbers that go on from block to block.

    Attributes:
        note: The note.
        fixed: What must be the same in the notes of another block.
        indices: The parameter, if it is about one.
        storages: The storages that it is about.
    """

    note: Any
    fixed: Any
    indices: tuple[int, ...] = ()
    storages: tuple[int, ...] = ()

    def joined(self, indices: Sequence[int], storages: tuple[int, ...]) -> Note:
        """The note with other numbers."""
        match self.note:
            case Allocate(made):
                return Allocate(tuple((number, nbytes) for number, (_, nbytes) in zip(storages, made, strict=True)))
            case Free() | Kept() | Wanted() if storages:
                return type(self.note)(*storages)  # type: ignore[no-any-return]
            case EnterForward():
                return dataclasses.replace(self.note, others=storages)
            case Gradient():
                return dataclasses.replace(self.note, index=indices[0], storage=storages[0])
        return dataclasses.replace(self.note, index=indices[0]) if indices else self.note


@dataclasses.dataclass(frozen=True, slots=True)
class _Loop:
    """Where notes of a block are followed by those of the next one, in the middle of the stack.

    Attributes:
        begin: The first note of the first of these blocks.
        length: How many notes each has.
        made: The memory that both make.
    """

    begin: int
    length: int
    made: _Range

    @property
    def middle(self) -> int:
        """The first note of the second block."""
        return self.begin + self.length

    @property
    def end(self) -> int:
        """The note after those of both blocks."""
        return self.begin + 2 * self.length

    def pairs(self, first: int, second: int) -> bool:
        """Whether two notes are of blocks that follow each other here.

        The notes of the first and the last block of a stack may be more than those of others, or fewer.
        """
        are_inside = [self.begin <= place < self.end for place in (first, second)]
        are_about = [self.begin - self.length <= place < self.end + self.length for place in (first, second)]
        return all(are_about) and (any(are_inside) or abs(second - first) == self.length)


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
        self._parameters = _places(names, stack)
        self._num_made = list(itertools.accumulate(map(_num_made, notes), initial=0))  # before each note
        self._parsed = [self._parse(note, num) for note, num in zip(notes, self._num_made, strict=False)]
        self._loops: list[_Loop] = []
        self._find_loops(self._pairs_of_parameters())
        self._find_loops(self._pairs_of_memory())
        self._loops.sort(key=lambda loop: loop.begin)

    # What notes say

    def _parse(self, note: Any, num_made: int) -> _Parsed:
        match note:
            case Allocate(made):
                fixed: Any = (Allocate, tuple(nbytes for _, nbytes in made))
                return _Parsed(note, fixed, storages=tuple(number for number, _ in made))
            case Kept(storage, kept):
                if storage >= num_made:
                    raise IrregularError(f"memory was not allocated in this micro-batch: {note}")
                return _Parsed(note, (Kept, kept < 0), storages=(storage, kept) if kept >= 0 else ())
            case Free(storage) | Wanted(storage):
                parsed = _Parsed(note, type(note), storages=(storage,))
            case EnterForward(_, others):
                parsed = _Parsed(note, (dataclasses.replace(note, others=()), len(others)), storages=others)
            case Gradient(index, storage):
                fixed = dataclasses.replace(note, index=0, storage=0), self._place_of(index)
                parsed = _Parsed(note, fixed, (index,), (storage,))
            case _ if hasattr(note, "index"):
                parsed = _Parsed(note, (dataclasses.replace(note, index=0), self._place_of(note.index)), (note.index,))
            case _:
                parsed = _Parsed(note, note)
        if any(storage >= num_made for storage in parsed.storages):
            raise IrregularError(f"memory was not allocated in this micro-batch: {note}")
        return parsed

    def _place_of(self, index: int) -> tuple[bool, int]:
        """Whether a parameter is in a block, and its place there or its index."""
        known = self._parameters
        return (True, (index - known.begin) % known.step) if index in known else (False, index)

    # Where blocks follow each other

    def _pairs_of_parameters(self) -> list[tuple[int, int]]:
        """Notes that say the same of parameters of the block before the middle, and of the one after it."""
        known = self._parameters
        found: dict[Any, tuple[list[int], list[int]]] = collections.defaultdict(lambda: ([], []))
        for position, parsed in enumerate(self._parsed):
            for index in parsed.indices:
                if known.middle - known.step <= index < known.middle + known.step:
                    found[parsed.fixed][index >= known.middle].append(position)
        if any(len(before) != len(after) for before, after in found.values()):
            raise IrregularError("parameters of two blocks are not used as often")
        return [pair for before, after in found.values() for pair in zip(before, after, strict=True)]

    def _pairs_of_memory(self) -> list[tuple[int, int]]:
        """Notes that say the same of memory that two blocks have made."""
        freed = {parsed.storages[0]: at for at, parsed in enumerate(self._parsed) if isinstance(parsed.note, Free)}
        pairs = []
        for loop in self._loops:
            for storage in range(loop.made.begin, loop.made.middle):
                first, second = freed.get(storage), freed.get(storage + loop.made.step)
                if (first is None) is not (second is None):
                    raise IrregularError("memory of a block stays, and that of another one does not")
                if first is not None and second is not None:
                    pairs.append((first, second))
        return pairs

    def _find_loops(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Finds loops until each pair of notes is in one.

        Args:
            pairs: Notes of blocks that follow each other.
        """
        for first, second in sorted(pairs, key=min):
            begin, length = min(first, second), abs(second - first)
            if begin + 2 * length < len(self._num_made) and not self._is_in_a_loop(first, second):
                loops = (self._loop_at(at, length) for at in (self._first_kept_before(begin), begin))
                self._loops += itertools.islice(filter(self._repeats, loops), 1)
        for first, second in pairs:
            if not self._is_in_a_loop(first, second):
                raise IrregularError(f"blocks differ: {self._parsed[first].note}, {self._parsed[second].note}")

    def _loop_at(self, begin: int, length: int) -> _Loop:
        made, middle, end = (self._num_made[begin + turn * length] for turn in range(3))
        return _Loop(begin, length, _Range(made, middle, end, middle - made))

    def _first_kept_before(self, position: int) -> int:
        """Where a block begins whose inputs are kept, since it is recomputed."""
        while position and isinstance(self._parsed[position - 1].note, Kept):
            position -= 1
        return position

    def _is_in_a_loop(self, first: int, second: int) -> bool:
        return any(loop.pairs(first, second) for loop in self._loops)

    def _repeats(self, loop: _Loop) -> bool:
        """Whether the notes of two blocks are the same, relative to the block."""
        if any(loop.begin < known.end and known.begin < loop.end for known in self._loops):
            return False
        memory = [*(known.made for known in self._loops), loop.made]
        pairs = zip(self._parsed[loop.begin : loop.middle], self._parsed[loop.middle : loop.end], strict=True)
        return all(
            before.fixed == after.fixed
            and _go_on(before.storages, after.storages, memory)
            and _go_on(before.indices, after.indices, [self._parameters])
            for before, after in pairs
        )

    # What comes of more blocks

    def to(self, num_blocks: int) -> tuple[tuple[Note, ...], Names]:
        """The notes of so many blocks, and the parameters."""
        num_added = num_blocks - self._stack.num_blocks
        memory = [loop.made for loop in self._loops]
        notes = []
        for first, second, turn in self._unrolled(num_added):
            indices = _numbers_at(first.indices, second.indices, turn, num_added, [self._parameters])
            notes.append(first.joined(indices, _numbers_at(first.storages, second.storages, turn, num_added, memory)))
        return tuple(notes), self._names_of(num_added)

    def _unrolled(self, num_added: int) -> Iterator[tuple[_Parsed, _Parsed, int]]:
        """Which notes come in which order: those of two blocks of a loop with their turn, others twice."""
        done = 0
        for loop in self._loops:
            yield from ((parsed, parsed, 0) for parsed in self._parsed[done : loop.begin])
            for turn in range(num_added + 2):
                for position in range(loop.begin, loop.middle):
                    yield self._parsed[position], self._parsed[position + loop.length], turn
            done = loop.end
        yield from ((parsed, parsed, 0) for parsed in self._parsed[done:])

    def _names_of(self, num_added: int) -> Names:
        """The parameters with more blocks."""
        known = self._parameters
        names = {}
        for index, name in self._names.items():
            split = self._stack.split(name)
            if split is None:
                names[index + known.num_before(index, num_added)] = name
            elif split[1] == 0:
                for number in range(self._stack.num_blocks + num_added):
                    names[index + number * known.step] = self._stack.join(split[0], number)
        return names


def _num_made(note: Note) -> int:
    """How many numbers of memory a note gives."""
    match note:
        case Allocate(made):
            return len(made)
        case Kept(_, kept):
            return int(kept >= 0)
    return 0


def _go_on(before: Sequence[int], after: Sequence[int], ranges: Sequence[_Range]) -> bool:
    """Whether the notes of two blocks have the same numbers, or numbers that follow each other."""
    return all(_goes_on(first, second, ranges) for first, second in zip(before, after, strict=True))


def _goes_on(first: int, second: int, ranges: Sequence[_Range]) -> bool:
    for each in ranges:
        are_inside = first in each, second in each
        if any(are_inside) and (abs(second - first) == each.step or not all(are_inside)):
            return True  # the numbers of the first and the last block may be others
    return first == second


def _numbers_at(
    first: Sequence[int], second: Sequence[int], turn: int, num_added: int, ranges: Sequence[_Range]
) -> tuple[int, ...]:
    """The numbers that a note of a loop has in one of its turns, or those of another note in its new place.

    Args:
        first: Its numbers in the first turn, as they were.
        second: Those in the second turn, which is the last one.
        turn: The turn, from 0.
        num_added: How many blocks were added, and turns.
        ranges: What numbers go on in.
    """
    return tuple(_number_at(*pair, turn, num_added, ranges) for pair in zip(first, second, strict=True))


def _number_at(first: int, second: int, turn: int, num_added: int, ranges: Sequence[_Range]) -> int:
    home = next((each for each in ranges if first in each or second in each), None)
    if first == second or home is None or (turn == 0 and first not in home):
        return first + sum(each.num_before(first, num_added) for each in ranges)
    if turn == num_added + 1 and second not in home:
        return second + sum(each.num_before(second, num_added) for each in ranges)
    step = home.step if second > first else -home.step
    start = first if first in home else second - step
    if step < 0:  # the first turn is of the block that comes last in the stack
        start += num_added * home.step
    return start + turn * step + sum(each.num_before(home.begin, num_added) for each in ranges)


def _places(names: Names, stack: Stack) -> _Range:
    """Where the parameters of a stack are: those of each block follow those of the one before.

    Raises:
        IrregularError: If blocks do not have the same parameters, one block after the other.
    """
    found: list[list[tuple[tuple[int, str], int]]] = [[] for _ in range(stack.num_blocks)]
    for index in sorted(names):
        split = stack.split(names[index])
        if split is not None:
            found[split[1]].append((split[0], index))
    base, size = found[0][0][1] if found[0] else 0, len(found[0])
    for block, parameters in enumerate(found):
        expected = [(parts, index + block * size) for parts, index in found[0]]
        if parameters != expected or not size or parameters[-1][1] - parameters[0][1] != size - 1:
            raise IrregularError(f"the parameters of block {block} of {stack.path} are not those of the first one")
    return _Range(base, base + stack.num_blocks // 2 * size, base + stack.num_blocks * size, size)
