"""Keeps the processes in step: what they gather and reduce next is agreed, or follows a plan that they share.

[Note: one order of collectives]
A collective in which not every process takes part never ends, and data may lead processes down different branches. So:

- A step begins with one small message: what it is, the shapes of its inputs, how much room there is. From the largest
  shapes and the least room every process makes the same plan, and executes all of its gathers and reductions, in its
  order, whether it needs them or not.
- Where there is no plan (a step that is recorded, say) and where a process has come to the end of one and still needs
  something, it asks: one message per collective. The others answer with what they want themselves, or that they have
  ended; everything that was asked for is done by all, in one order.
- A forward, and a backward, ends when all say so. Gradients that came after their group was reduced are reduced again
  before that, and every process learns which parameters got one anywhere.

Messages have one length, so that processes which do different things find out, and say which, instead of waiting.

Whoever waits for a message gives up after a while where all should have come at once, see [Note: who gives up]. That is
where nobody knows yet that the others come at all:

| subject | gives up |
|---|---|
| `BEGIN` of an evaluation, `GATHER` between steps, `READ`, `NORM`, `ENTER` | yes |
| `BEGIN` of training: its batch may take long | no |
| `GATHER`, `REDUCE`, `CHECK`, `END` of a step: all have begun it | no |
| `READ`, `LEAVE`, `FOLLOW` while the model is saved, `MEET`: all have entered, and a disk may be slow | no |
"""

import dataclasses
import enum
import zlib
from collections.abc import Callable, Sequence

from hf_patrickstar.errors import CollectiveError
from hf_patrickstar.runtime.collectives import Collectives
from hf_patrickstar.schedule.trace import Shapes

_MOST_SHAPE_NUMBERS = 96
_BITS = 62
_NO_LIMIT = 1 << _BITS


class Subject(enum.IntEnum):
    """What a message is about. The first three go together; any other must be the same on all ranks."""

    GATHER = 1
    REDUCE = 2
    END = 3
    BEGIN = 4
    READ = 5
    NORM = 6
    CHECK = 7
    FOLLOW = 8
    LEAVE = 9
    ENTER = 10
    MEET = 11


class Phase(enum.IntEnum):
    """What has ended."""

    FORWARD = 1
    BACKWARD = 2
    EVALUATION = 3


_ASKING = frozenset({Subject.GATHER, Subject.REDUCE, Subject.END})
_FOLLOWED = frozenset({Subject.READ, Subject.LEAVE})
_ALONE = frozenset({Subject.READ, Subject.NORM, Subject.ENTER})
"""What may be said without the others having come."""


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """What a step has to work with, as far as it decides about plans.

    Attributes:
        free_nbytes: Bytes of the device for chunks and non-model data.
        chunk_nbytes: Bytes for chunks at most, or ``None``.
        floor_nbytes: Non-model bytes that are there at every moment.
        resident: The chunks on the device, the one visited longest ago first.
    """

    free_nbytes: int
    chunk_nbytes: int | None
    floor_nbytes: int
    resident: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Beginning:
    """What all processes agreed on when a step began.

    Attributes:
        shapes: The largest of the input shapes.
        is_traced: Whether all have traces of the same steps.
        room: The least room; its ``resident`` is empty unless it was the same everywhere.
    """

    shapes: Shapes
    is_traced: bool
    room: Room


class Lockstep:
    """Agreements between processes; see [Note: one order of collectives].

    Args:
        collectives: How they talk.
        num_tensors: Parameters under management.
        checks_all: Agree on every gather and reduction of a plan before it is done (debugging).
    """

    def __init__(self, collectives: Collectives, num_tensors: int, checks_all: bool) -> None:
        self.in_step: Callable[[], bool] = lambda: True
        self.gather: Callable[[int], None] = lambda index: None
        self.reduce: Callable[[int], None] = lambda index: None
        self._collectives = collectives
        self._checks_all = checks_all
        self._checksum = 0
        self.note_tensors(num_tensors)

    def note_tensors(self, num_tensors: int) -> None:
        """Takes note of how many parameters there are: messages have room for all of them."""
        self._num_words = -(-num_tensors // _BITS)
        self._length = 12 + max(_MOST_SHAPE_NUMBERS + 1, self._num_words)

    @property
    def is_alone(self) -> bool:
        """Whether there is only one process: then nothing is agreed on."""
        return self._collectives.world_size == 1

    def begin(self, what: str, shapes: Shapes, traces: int, room: Room, version: int) -> Beginning:
        """Agrees on a step that begins.

        Args:
            what: The kind of step, for example ``"training"``.
            shapes: Shapes of this process's inputs.
            traces: The fingerprint of the traces that this process has.
            room: What this process has to work with.
            version: Counts changes of parameters; it must be the same on all.

        Raises:
            CollectiveError: If another process begins something else, or has done fewer steps.
        """
        flat, is_readable = _flatten(shapes)
        most = _NO_LIMIT if room.chunk_nbytes is None else room.chunk_nbytes
        header = [_checksum(what), version, int(is_readable), room.free_nbytes, most, room.floor_nbytes]
        header.append(_checksum(repr(room.resident)))
        header += [_checksum(repr([len(shape) for shape in shapes])), traces]
        payload = [*header, len(flat), *flat]
        is_training = what.startswith("training")
        rows = self._payloads(Subject.BEGIN, payload, f"begins '{what}'", is_patient=is_training)
        if len({tuple(row[:2]) for row in rows}) > 1:
            self._mismatch(f"begins '{what}' after change {version} of the parameters")
        structures = {row[7] for row in rows}
        if len(structures) == 1 and all(row[2] for row in rows):
            largest = [max(row[10 + place] for row in rows) for place in range(len(flat))]
            shapes = _unflatten(largest, shapes)
        else:  # of inputs that cannot be compared no trace is kept
            shapes = ()
        least_chunk_nbytes = min(row[4] for row in rows)
        return Beginning(
            shapes,
            len({row[8] for row in rows}) == 1,
            Room(
                min(row[3] for row in rows),
                None if least_chunk_nbytes == _NO_LIMIT else least_chunk_nbytes,
                max(row[5] for row in rows),
                room.resident if len({row[6] for row in rows}) == 1 else (),
            ),
        )

    def follow(self, subject: Subject, index: int) -> None:
        """Does the next collective of the plan that all processes share.

        Args:
            subject: ``GATHER`` or ``REDUCE``.
            index: The group.

        Raises:
            CollectiveError: If it fails, or, while debugging, if another process is about to do another one.
        """
        what = f"is about to {subject.name.lower()} group {index}, as planned"
        if self._checks_all:
            rows = self._payloads(Subject.CHECK, [subject, index], what)
            if len({tuple(row[:2]) for row in rows}) > 1:
                self._mismatch(what)
        self._do(subject, index)

    def ask(self, subject: Subject, index: int, who: str) -> None:
        """Asks for a collective that no plan has; what others ask for at the same time is done too.

        Args:
            subject: ``GATHER`` or ``REDUCE``.
            index: The group.
            who: What it is needed for, for errors.

        Raises:
            CollectiveError: If it fails, or another process does something that goes without it.
        """
        what = f"needs group {index} ({subject.name.lower()}) for {who}"
        self._serve(self._exchange(subject, [index], what, _ASKING, is_patient=self.in_step()))

    def end(
        self, phase: Phase, is_lost: bool, indices: Sequence[int] = (), *, is_recorded: bool = False
    ) -> tuple[bool, frozenset[int]]:
        """Ends a forward, a backward or an evaluation, when all do, having served those that have not.

        Args:
            phase: What has ended.
            is_lost: Whether this process left its trace.
            indices: Tensors that got a gradient here.
            is_recorded: Whether this process makes a trace of it.

        Returns:
            Whether any process left its trace, or only some make one, and the tensors that got a gradient anywhere.

        Raises:
            CollectiveError: If another process ended something else, or has done other collectives.
        """
        words = [0] * self._num_words
        for index in indices:
            words[index // _BITS] |= 1 << index % _BITS
        what = f"has ended its {phase.name.lower()}"
        while True:
            messages = self._exchange(
                Subject.END, [phase, self._checksum, int(is_lost) + 2 * is_recorded, *words], what, _ASKING
            )
            if all(subject == Subject.END for subject, *_ in messages):
                break
            self._serve(messages)
        rows = [payload for _, *payload in messages]
        if len({tuple(row[:2]) for row in rows}) > 1:
            self._mismatch(f"{what}, with collectives of checksum {self._checksum:08x} so far")
        union = [0] * self._num_words
        for row in rows:
            union = [left | right for left, right in zip(union, row[3 : 3 + self._num_words], strict=True)]
        found = (place * _BITS + bit for place, word in enumerate(union) for bit in range(_BITS) if word >> bit & 1)
        states = {row[2] for row in rows}
        return any(state & 1 for state in states) or len(states) > 1, frozenset(found)

    def agree(
        self, subject: Subject, payload: Sequence[int], what: str, *, is_patient: bool | None = None
    ) -> list[int]:
        """Makes sure that all processes are about to do the same; some may follow, see ``follow_readers``.

        Args:
            subject: ``READ``, ``NORM``, ``LEAVE``, ``ENTER`` or ``MEET``.
            payload: Of what; four numbers at most.
            what: The same in words.
            is_patient: Whether all are known to come; by default as the table above says.

        Returns:
            The ranks that do it; the others follow.

        Raises:
            CollectiveError: If they are not.
        """
        if self.is_alone:
            return [0]
        allowed = frozenset((subject, Subject.FOLLOW)) if subject in _FOLLOWED else frozenset((subject,))
        messages = self._exchange(subject, payload, what, allowed, is_patient=is_patient)
        return self._readers(messages, what)[1]

    def follow_readers(self) -> tuple[Subject, list[int], list[int]]:
        """Learns what other processes, which read without this one being asked to, do next.

        Returns:
            ``READ`` or ``LEAVE``, the four numbers that they agreed on, and their ranks.

        Raises:
            CollectiveError: If they do different things, or nobody reads.
        """
        what = "follows the processes that save the model"
        messages = self._exchange(Subject.FOLLOW, [], what, _FOLLOWED | {Subject.FOLLOW})
        (subject, *payload), readers = self._readers(messages, what)
        return Subject(subject), payload, readers

    # Inside

    def _readers(self, messages: list[list[int]], what: str) -> tuple[list[int], list[int]]:
        """What those do that do not follow, all the same, and who they are."""
        readers = [rank for rank, row in enumerate(messages) if row[0] != Subject.FOLLOW]
        if len({tuple(messages[rank][:5]) for rank in readers}) != 1:
            self._mismatch(what)
        return messages[readers[0]][:5], readers

    def _payloads(
        self, subject: Subject, payload: Sequence[int], what: str, *, is_patient: bool = True
    ) -> list[list[int]]:
        """What all ranks say on one subject."""
        messages = self._exchange(subject, payload, what, frozenset({subject}), is_patient=is_patient)
        return [found for _, *found in messages]

    def _exchange(
        self,
        subject: Subject,
        payload: Sequence[int],
        what: str,
        allowed: frozenset[Subject],
        *,
        is_patient: bool | None = None,
    ) -> list[list[int]]:
        """Sends a message and gets those of all ranks: the subject, then the payload."""
        message = [int(subject), *payload]
        message += [0] * (self._length - len(message))
        if is_patient is None:
            is_patient = subject not in _ALONE
        messages = self._collectives.exchange(message, what, is_patient=is_patient)
        if not {found[0] for found in messages} <= allowed:
            self._mismatch(what)
        return messages

    def _serve(self, messages: list[list[int]]) -> None:
        wanted = {(found, index) for found, index, *_ in messages if found != Subject.END}
        for found, index in sorted(wanted):
            self._do(Subject(found), index)

    def _do(self, subject: Subject, index: int) -> None:
        self._checksum = zlib.crc32(b"%d %d" % (subject, index), self._checksum)
        (self.gather if subject is Subject.GATHER else self.reduce)(index)

    def _mismatch(self, what: str) -> None:
        doings = self._collectives.exchange_objects(what, "says what it does")
        listing = "; ".join(f"rank {rank} {doing}" for rank, doing in enumerate(doings))
        raise CollectiveError(
            f"the processes do not do the same: {listing}. Forward, backward, the optimizer's step, evaluation, saving "
            "and reading of parameters must be called by all of them, in the same order and equally often"
        )


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode())


def _flatten(shapes: Shapes) -> tuple[list[int], bool]:
    """All sizes in one list, and whether there was room for them."""
    flat = [size for shape in shapes for size in shape]
    return (flat, bool(shapes)) if len(flat) <= _MOST_SHAPE_NUMBERS else ([], False)


def _unflatten(flat: Sequence[int], like: Shapes) -> Shapes:
    sizes = iter(flat)
    return tuple(tuple(next(sizes) for _ in shape) for shape in like)
