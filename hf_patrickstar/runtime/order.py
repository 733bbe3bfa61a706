"""The order of collectives: what the processes gather and reduce next is agreed, or follows a plan that they share.

[Note: one order of collectives]
A collective in which not every process takes part never ends, and data may lead processes down different branches. So:

- A step begins with one small message: what it is, the shapes of its inputs, how much room there is. From the largest
  shapes and the least room every process makes the same plan, and executes all of its gathers and reductions, in its
  order, whether it needs them or not.
- Where there is no plan (a step that is recorded, say), and where a process has come to the end of one and still needs
  something, it asks: one message per collective. The others answer with what they want themselves, or that they have
  ended. All processes then do everything that was asked for, in one order.
- A forward, and a backward, ends when all say so. Gradients that came after their group was reduced are reduced again
  before that, and every process learns which parameters got one anywhere.

An order only says what comes next. The caller does it: nobody is called back.

All messages have the same length, so that processes which do different things find out, and say which, instead of
waiting.

A process that waits for a message gives up after a while where all should have come at once, see [Note: who gives up].
That is where nobody knows yet that the others come at all:

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
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from hf_patrickstar.errors import CollectiveError
from hf_patrickstar.runtime.collectives import Collectives
from hf_patrickstar.schedule.trace import Shapes, StepKind, Trace, common_trace

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


class Collective(NamedTuple):
    """A collective of model data: ``GATHER`` or ``REDUCE``, and of which group."""

    subject: Subject
    group: int


# What is said, and what comes of it


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


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """What a process says when a phase has ended on it.

    Attributes:
        phase: What has ended.
        is_diverged: Whether it left its trace.
        indices: Tensors that got a gradient there.
        is_recorded: Whether it makes a trace of the step.
    """

    phase: Phase
    is_diverged: bool = False
    indices: Sequence[int] = ()
    is_recorded: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """What all processes said.

    Attributes:
        collectives: What others still ask for; if there is any, the phase has not ended: do these, and say so again.
        is_diverged: Whether a process left its trace, or some processes record this step and others do not.
        indices: Tensors that got a gradient anywhere.
    """

    collectives: tuple[Collective, ...] = ()
    is_diverged: bool = False
    indices: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class _BeginMessage:
    """How a step begins on one process, in numbers; the first two must be the same everywhere."""

    kind: int
    version: int
    is_readable: int
    free_nbytes: int
    chunk_nbytes: int
    floor_nbytes: int
    resident: int
    structure: int
    traces: int
    num_sizes: int
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, kind: str, shapes: Shapes, traces: int, room: Room, version: int) -> "_BeginMessage":
        sizes = tuple(size for shape in shapes for size in shape)
        is_readable = bool(shapes) and len(sizes) <= _MOST_SHAPE_NUMBERS
        return cls(
            _checksum(kind),
            version,
            int(is_readable),
            room.free_nbytes,
            _NO_LIMIT if room.chunk_nbytes is None else room.chunk_nbytes,
            room.floor_nbytes,
            _checksum(repr(room.resident)),
            _checksum(repr([len(shape) for shape in shapes])),
            traces,
            len(sizes) if is_readable else 0,
            sizes if is_readable else (),
        )

    @classmethod
    def from_words(cls, words: Sequence[int]) -> "_BeginMessage":
        names = [field.name for field in dataclasses.fields(cls)][:-1]
        found: dict[str, Any] = dict(zip(names, words, strict=False))
        return cls(**found, sizes=tuple(words[len(names) : len(names) + found["num_sizes"]]))

    def to_words(self) -> list[int]:
        *fields, sizes = (getattr(self, field.name) for field in dataclasses.fields(self))
        return [*fields, *sizes]


@dataclasses.dataclass(frozen=True, slots=True)
class _EndMessage:
    """How a phase ends on one process, in numbers; the first two must be the same everywhere."""

    phase: int
    checksum: int
    is_diverged: int
    is_recorded: int
    bits: tuple[int, ...]

    @classmethod
    def of(cls, ending: Ending, checksum: int, num_words: int) -> "_EndMessage":
        words = [0] * num_words
        for index in ending.indices:
            words[index // _BITS] |= 1 << index % _BITS
        return cls(ending.phase, checksum, int(ending.is_diverged), int(ending.is_recorded), tuple(words))

    @classmethod
    def from_words(cls, words: Sequence[int], num_words: int) -> "_EndMessage":
        phase, checksum, is_diverged, is_recorded, *bits = words
        return cls(phase, checksum, is_diverged, is_recorded, tuple(bits[:num_words]))

    def to_words(self) -> list[int]:
        return [self.phase, self.checksum, self.is_diverged, self.is_recorded, *self.bits]

    @property
    def indices(self) -> Iterable[int]:
        """The tensors that have a bit."""
        return (place * _BITS + bit for place, word in enumerate(self.bits) for bit in range(_BITS) if word >> bit & 1)


# The orders


class Order(Protocol):
    """What comes next, as all processes see it."""

    @property
    def is_alone(self) -> bool:
        """Whether there is only one process: then nothing is agreed on."""
        ...

    def note_tensors(self, num_tensors: int) -> None:
        """Takes note of how many parameters there are."""
        ...

    def begin(self, kind: str, shapes: Shapes, traces: int, room: Room, version: int) -> Beginning:
        """Agrees on a step that begins.

        Args:
            kind: The kind of step and what it is of, for example ``"evaluation:encoder"``.
            shapes: Shapes of this process's inputs.
            traces: The fingerprint of the traces that this process has.
            room: What this process has to work with.
            version: Counts changes of parameters; it must be the same on all.

        Raises:
            CollectiveError: If another process begins something else, or has done fewer steps.
        """
        ...

    def agree_on_trace(self, trace: Trace) -> Trace:
        """Makes one trace of what the processes have recorded.

        Args:
            trace: What this one has.
        """
        ...

    def check(self, collective: Collective) -> None:
        """Takes note of the next collective of the plan, which the caller does now.

        Args:
            collective: What the plan says.

        Raises:
            CollectiveError: While debugging, if another process is about to do another one.
        """
        ...

    def ask(self, collective: Collective, who: str, *, is_in_step: bool) -> tuple[Collective, ...]:
        """Asks for a collective that no plan has.

        Args:
            collective: What is needed.
            who: What it is needed for, for errors.
            is_in_step: Whether a step has begun, so that all are known to come.

        Returns:
            What all processes do now, in this order: also what others asked for at the same time.

        Raises:
            CollectiveError: If another process does something that goes without it.
        """
        ...

    def end(self, ending: Ending) -> Ended:
        """Ends a forward, a backward or an evaluation, when all do; see ``Ended.collectives``.

        Args:
            ending: How it ended here.

        Raises:
            CollectiveError: If another process ended something else, or has done other collectives.
        """
        ...

    def agree(
        self, subject: Subject, payload: Sequence[int], what: str, *, is_patient: bool | None = None
    ) -> list[int]:
        """Makes sure that all processes are about to do the same; some may follow, see ``follow_readers``.

        Args:
            subject: ``READ``, ``NORM``, ``LEAVE``, ``ENTER`` or ``MEET``.
            payload: Of what; four numbers at most.
            what: The same in words.
            is_patient: Whether all are known to come; by default as the table of the note says.

        Returns:
            The ranks that do it; the others follow.

        Raises:
            CollectiveError: If they are not.
        """
        ...

    def follow_readers(self) -> tuple[Subject, list[int], list[int]]:
        """Learns what other processes, which read without this one being asked to, do next.

        Returns:
            ``READ`` or ``LEAVE``, the four numbers that they agreed on, and their ranks.

        Raises:
            CollectiveError: If they do different things, or nobody reads.
        """
        ...


def make_order(collectives: Collectives, num_tensors: int, checks_all: bool) -> Order:
    """The order for as many processes as there are.

    Args:
        collectives: How they talk.
        num_tensors: Parameters under management.
        checks_all: Agree on every gather and reduction of a plan before it is done (debugging).
    """
    if collectives.world_size == 1:
        return OwnOrder()
    return AgreedOrder(collectives, num_tensors, checks_all)


class OwnOrder:
    """The order of one process: whatever it wants comes next."""

    is_alone = True

    def note_tensors(self, num_tensors: int) -> None:
        """Nothing to do."""

    def begin(self, kind: str, shapes: Shapes, traces: int, room: Room, version: int) -> Beginning:
        """What is given."""
        return Beginning(shapes, True, room)

    def agree_on_trace(self, trace: Trace) -> Trace:
        """What is given."""
        return trace

    def check(self, collective: Collective) -> None:
        """Nothing to do."""

    def ask(self, collective: Collective, who: str, *, is_in_step: bool) -> tuple[Collective, ...]:
        """What is asked for."""
        return (collective,)

    def end(self, ending: Ending) -> Ended:
        """What is given."""
        return Ended((), ending.is_diverged, frozenset(ending.indices))

    def agree(
        self, subject: Subject, payload: Sequence[int], what: str, *, is_patient: bool | None = None
    ) -> list[int]:
        """This process."""
        return [0]

    def follow_readers(self) -> tuple[Subject, list[int], list[int]]:
        """There are none."""
        return Subject.LEAVE, [0, 0, 0, 0], [0]


class AgreedOrder:
    """The order of several processes; see [Note: one order of collectives] and ``Order``.

    Args:
        collectives: How they talk.
        num_tensors: Parameters under management.
        checks_all: Agree on every gather and reduction of a plan before it is done (debugging).
    """

    is_alone = False

    def __init__(self, collectives: Collectives, num_tensors: int, checks_all: bool) -> None:
        self._collectives = collectives
        self._checks_all = checks_all
        self._checksum = 0
        self.note_tensors(num_tensors)

    def note_tensors(self, num_tensors: int) -> None:
        """Takes note of how many parameters there are: messages have room for all of them."""
        self._num_words = -(-num_tensors // _BITS)
        self._length = 12 + max(_MOST_SHAPE_NUMBERS + 1, self._num_words)

    def begin(self, kind: str, shapes: Shapes, traces: int, room: Room, version: int) -> Beginning:
        """See ``Order``."""
        own = _BeginMessage.of(kind, shapes, traces, room, version)
        is_training = StepKind.of(kind).is_training
        rows = self._payloads(Subject.BEGIN, own.to_words(), f"begins '{kind}'", is_patient=is_training)
        found = [_BeginMessage.from_words(row) for row in rows]
        if not _are_same((message.kind, message.version) for message in found):
            self._mismatch(f"begins '{kind}' after change {version} of the parameters")
        if _are_same(message.structure for message in found) and all(message.is_readable for message in found):
            largest = map(max, zip(*(message.sizes for message in found), strict=True))
            shapes = tuple(tuple(next(largest) for _ in shape) for shape in shapes)
        else:  # of inputs that cannot be compared no trace is kept
            shapes = ()
        least_chunk_nbytes = min(message.chunk_nbytes for message in found)
        agreed = Room(
            min(message.free_nbytes for message in found),
            None if least_chunk_nbytes == _NO_LIMIT else least_chunk_nbytes,
            max(message.floor_nbytes for message in found),
            room.resident if _are_same(message.resident for message in found) else (),
        )
        return Beginning(shapes, _are_same(message.traces for message in found), agreed)

    def agree_on_trace(self, trace: Trace) -> Trace:
        """See ``Order``."""
        found = self._collectives.exchange_objects(trace.to_json(), f"agrees on the trace '{trace.key}'")
        return common_trace([Trace.from_json(text) for text in found])

    def check(self, collective: Collective) -> None:
        """See ``Order``."""
        what = f"is about to {collective.subject.name.lower()} group {collective.group}, as planned"
        if self._checks_all:
            rows = self._payloads(Subject.CHECK, collective, what)
            if not _are_same(tuple(row[:2]) for row in rows):
                self._mismatch(what)
        self._note(collective)

    def ask(self, collective: Collective, who: str, *, is_in_step: bool) -> tuple[Collective, ...]:
        """See ``Order``."""
        subject, index = collective
        what = f"needs group {index} ({subject.name.lower()}) for {who}"
        return self._wanted(self._exchange(subject, [index], what, _ASKING, is_patient=is_in_step))

    def end(self, ending: Ending) -> Ended:
        """See ``Order``."""
        what = f"has ended its {ending.phase.name.lower()}"
        own = _EndMessage.of(ending, self._checksum, self._num_words)
        messages = self._exchange(Subject.END, own.to_words(), what, _ASKING)
        if any(subject != Subject.END for subject, *_ in messages):
            return Ended(self._wanted(messages))
        found = [_EndMessage.from_words(words, self._num_words) for _, *words in messages]
        if not _are_same((message.phase, message.checksum) for message in found):
            self._mismatch(f"{what}, with collectives of checksum {self._checksum:08x} so far")
        is_diverged = any(message.is_diverged for message in found)
        is_diverged |= not _are_same(message.is_recorded for message in found)
        return Ended((), is_diverged, frozenset(index for message in found for index in message.indices))

    def agree(
        self, subject: Subject, payload: Sequence[int], what: str, *, is_patient: bool | None = None
    ) -> list[int]:
        """See ``Order``."""
        allowed = frozenset((subject, Subject.FOLLOW)) if subject in _FOLLOWED else frozenset((subject,))
        messages = self._exchange(subject, payload, what, allowed, is_patient=is_patient)
        return self._readers(messages, what)[1]

    def follow_readers(self) -> tuple[Subject, list[int], list[int]]:
        """See ``Order``."""
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
        message = [int(subject), *map(int, payload)]
        message += [0] * (self._length - len(message))
        if is_patient is None:
            is_patient = subject not in _ALONE
        messages = self._collectives.exchange(message, what, is_patient=is_patient)
        if not {found[0] for found in messages} <= allowed:
            self._mismatch(what)
        return messages

    def _wanted(self, messages: list[list[int]]) -> tuple[Collective, ...]:
        """What is asked for in messages, once each, in the order in which all do it."""
        asked = {(subject, index) for subject, index, *_ in messages if subject != Subject.END}
        collectives = tuple(Collective(Subject(subject), index) for subject, index in sorted(asked))
        for collective in collectives:
            self._note(collective)
        return collectives

    def _note(self, collective: Collective) -> None:
        self._checksum = zlib.crc32(b"%d %d" % collective, self._checksum)

    def _mismatch(self, what: str) -> None:
        doings = self._collectives.exchange_objects(what, "says what it does")
        listing = "; ".join(f"rank {rank} {doing}" for rank, doing in enumerate(doings))
        raise CollectiveError(
            f"the processes do not do the same: {listing}. Forward, backward, the optimizer's step, evaluation, saving "
            "and reading of parameters must be called by all of them, in the same order and equally often"
        )


def _are_same(values: Iterable[object]) -> bool:
    return len(set(values)) == 1


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode())
