"""The order of collectives: what the processes gather and reduce next is agreed, or follows a plan that they share.

[Note: one order of collectives]
A collective in which not every process takes part never ends, and data may lead processes down different branches. So:

- A step begins with one small message of each process: the kind of step, the shapes of its inputs, and the room on the
  device. From the largest shapes and the least room every process makes the same plan. Every process executes all
  gathers and reductions of the plan, in its order, whether it needs them or not.
- Traces that are made before a step are compared like recorded ones: a process may have padding that others do not
  have, or take another branch. Where one process has none, all record the step.
- Without a plan (in a step that is recorded, for example), or after the end of its plan, a process asks for each
  collective with one message. The others answer with the collective that they need themselves, or that they have ended.
  All processes then do all collectives that were asked for, in one order. Such a message names only the subject and
  the group: type and size of the data follow from the layout, which each process makes from the model and settings that
  all have compared.
- A forward or a backward ends when all processes say so. Before that, gradients that came after their group was reduced
  are reduced once more, and every process learns which parameters got a gradient on any process.

An order only says what comes next; the caller executes it.

Messages on different subjects may meet, also with those of other parts of the package (see ``dist/messages.py``). So
processes that do different things find out, and raise an error that says what each one does, instead of waiting.

A process that waits for a message gives up (see [Note: who gives up]) only where it does not know yet whether the
others come at all:

| subject | gives up |
|---|---|
| `BEGIN` of an evaluation, `GATHER` between steps, `READ`, `NORM`, `ENTER` | yes |
| `BEGIN` of training: its batch may take long | no |
| `GATHER`, `REDUCE`, `CHECK`, `END` of a step: all have begun it | no |
| `READ`, `LEAVE`, `FOLLOW` while the model is saved, `MEET`: all have entered, and a disk may be slow | no |

Where it says no, a process still gives up if all others wait as well, and not all of them for the same.
"""

import dataclasses
import enum
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.dist.messages import DOES, disagreement
from hf_patrickstar.schedule.trace import Shapes, StepKind, Trace, common_trace

_MOST_SHAPE_NUMBERS = 96
_LEAST_NUMBERS = 6
"""The numbers of a message on reading: the subject and the payload."""
_BITS = 62
_NO_LIMIT = 1 << _BITS
_ABOUT = "what comes next"
"""The subject of all messages of an order for ``Collectives``; these are about a ``Subject`` each."""
DTYPES = tuple(sorted({found for found in vars(torch).values() if isinstance(found, torch.dtype)}, key=str))
"""The types of torch; messages name a type by its place here."""


class Subject(enum.IntEnum):
    """What a message is about.

    All ranks must send the same subject, except that they may mix the first three, and ``FOLLOW`` with ``READ`` or
    ``LEAVE``.
    """

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
    """The part of a step that has ended."""

    FORWARD = 1
    BACKWARD = 2
    EVALUATION = 3


_ASKING = frozenset({Subject.GATHER, Subject.REDUCE, Subject.END})
_FOLLOWED = frozenset({Subject.READ, Subject.LEAVE})
_ALONE = frozenset({Subject.READ, Subject.NORM, Subject.ENTER})
"""Subjects of messages for which a rank gives up by default."""


class Collective(NamedTuple):
    """A collective of model data: ``GATHER`` or ``REDUCE``, and of which group."""

    subject: Subject
    group: int


# Messages, and what processes agree on


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """The memory that a step has, as far as its plan depends on it.

    Attributes:
        free_nbytes: Bytes of the device for chunks and non-model data.
        chunk_nbytes: The most bytes for chunks, or ``None`` for no limit.
        floor_nbytes: Non-model bytes that are there at every moment.
        resident: The chunks on the device, the least recently visited first.
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
        is_traced: Whether all processes have traces of the same steps.
        room: The least room; its ``resident`` is empty unless it was the same on all processes.
    """

    shapes: Shapes
    is_traced: bool
    room: Room


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """What a process says when a phase has ended on it.

    Attributes:
        phase: The phase.
        is_diverged: Whether the process left its trace.
        indices: Tensors that got a gradient on this process.
        is_recorded: Whether the process records a trace of the step.
    """

    phase: Phase
    is_diverged: bool = False
    indices: Sequence[int] = ()
    is_recorded: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """What all processes said about the end of a phase.

    Attributes:
        collectives: Collectives that processes still ask for. If there are any, the phase has not ended: the caller
            executes them and calls ``end`` again.
        is_diverged: Whether a process left its trace, or some processes record this step and others do not.
        indices: Tensors that got a gradient anywhere.
    """

    collectives: tuple[Collective, ...] = ()
    is_diverged: bool = False
    indices: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class _BeginMessage:
    """How a step begins on one process, in numbers; the first two must be the same on all processes."""

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
    """How a phase ends on one process, in numbers; the first two must be the same on all processes."""

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
    def from_words(cls, words: Sequence[int]) -> "_EndMessage":
        phase, checksum, is_diverged, is_recorded, *bits = words
        return cls(phase, checksum, is_diverged, is_recorded, tuple(bits))

    def to_words(self) -> list[int]:
        return [self.phase, self.checksum, self.is_diverged, self.is_recorded, *self.bits]

    @property
    def indices(self) -> Iterable[int]:
        """The tensors that have a bit."""
        return (place * _BITS + bit for place, word in enumerate(self.bits) for bit in range(_BITS) if word >> bit & 1)


# The orders


class Order(Protocol):
    """Decides which collective comes next, the same on all processes."""

    @property
    def is_alone(self) -> bool:
        """Whether there is only one process: then nothing is agreed on."""
        ...

    def note_tensors(self, num_tensors: int) -> None:
        """Notes the number of parameters."""
        ...

    def begin(self, kind: str, shapes: Shapes, traces: int, room: Room, version: int) -> Beginning:
        """Agrees on a step that begins.

        Args:
            kind: The kind of step, and the module if that is not the model, for example ``"evaluation:encoder"``.
            shapes: Shapes of this process's inputs.
            traces: The fingerprint of the traces that this process has.
            room: The memory that this process has.
            version: The number of changes of parameters so far; it must be the same on all processes.

        Raises:
            CollectiveError: If another process begins something else, or has done fewer steps.
        """
        ...

    def agree_on_trace(self, trace: Trace) -> Trace:
        """Makes one trace of what the processes have recorded.

        Args:
            trace: The trace of this process.
        """
        ...

    def agree_on_foreseen(self, traces: Sequence[Trace]) -> Sequence[Trace]:
        """Makes one trace of each that the processes have made before a step.

        Args:
            traces: The traces of this process, by kind; none if it has not made any.

        Returns:
            The traces of all, or none if a process has none.
        """
        ...

    def check(self, collective: Collective, dtype: torch.dtype, numel: int) -> None:
        """Notes the next collective of the plan, which the caller executes now.

        Args:
            collective: The collective.
            dtype: The type of the data.
            numel: Elements of the data, of all processes.

        Raises:
            CollectiveError: While debugging, if another process is about to execute another collective, or to send
                data of another type or size.
        """
        ...

    def ask(self, collective: Collective, who: str, *, is_in_step: bool) -> tuple[Collective, ...]:
        """Asks for a collective that is in no plan.

        Args:
            collective: The collective.
            who: What needs it, for errors.
            is_in_step: Whether a step has begun, so that all processes are known to come.

        Returns:
            The collectives that all processes execute now, in this order, with those that other processes asked for.

        Raises:
            CollectiveError: If another process does something else.
        """
        ...

    def end(self, ending: Ending) -> Ended:
        """Ends a forward, a backward or an evaluation, if all processes end it; see ``Ended.collectives``.

        Args:
            ending: How the phase ended on this process.

        Raises:
            CollectiveError: If another process ended something else, or has executed other collectives.
        """
        ...

    def agree(
        self, subject: Subject, payload: Sequence[int], what: str, *, is_patient: bool | None = None
    ) -> list[int]:
        """Makes sure that all processes are about to do the same; some may follow, see ``follow_readers``.

        Args:
            subject: ``READ``, ``NORM``, ``LEAVE``, ``ENTER`` or ``MEET``.
            payload: What identifies the parameter or call that it is about: five integers at most.
            what: What this process is about to do, as a verb phrase, for warnings and errors.
            is_patient: Whether all processes are known to come; by default as the table of the note says.

        Returns:
            The ranks that do it; the others follow.

        Raises:
            CollectiveError: If the processes are about to do different things.
        """
        ...

    def follow_readers(self) -> tuple[Subject, list[int], list[int]]:
        """Waits for what the reading processes do next, on a process that only follows them.

        Returns:
            ``READ`` or ``LEAVE``, the five integers of the readers' payload, and the ranks of the readers.

        Raises:
            CollectiveError: If the readers do different things, or no process reads.
        """
        ...


def make_order(collectives: Collectives, num_tensors: int, checks_all: bool) -> Order:
    """Makes the order of one process, or of several.

    Args:
        collectives: Sends messages between the processes.
        num_tensors: The number of managed parameters.
        checks_all: Whether processes agree on every gather and reduction of a plan before it is done (debugging).
    """
    if collectives.world_size == 1:
        return OwnOrder()
    return AgreedOrder(collectives, num_tensors, checks_all)


class OwnOrder:
    """The order of one process: nothing has to be agreed on."""

    is_alone = True

    def note_tensors(self, num_tensors: int) -> None:
        """Nothing to do."""

    def begin(self, kind: str, shapes: Shapes, traces: int, room: Room, version: int) -> Beginning:
        """Returns what was given."""
        return Beginning(shapes, True, room)

    def agree_on_trace(self, trace: Trace) -> Trace:
        """Returns what was given."""
        return trace

    def agree_on_foreseen(self, traces: Sequence[Trace]) -> Sequence[Trace]:
        """Returns what was given."""
        return traces

    def check(self, collective: Collective, dtype: torch.dtype, numel: int) -> None:
        """Nothing to do."""

    def ask(self, collective: Collective, who: str, *, is_in_step: bool) -> tuple[Collective, ...]:
        """Returns the given collective."""
        return (collective,)

    def end(self, ending: Ending) -> Ended:
        """Returns what was given."""
        return Ended((), ending.is_diverged, frozenset(ending.indices))

    def agree(
        self, subject: Subject, payload: Sequence[int], what: str, *, is_patient: bool | None = None
    ) -> list[int]:
        """Returns this process."""
        return [0]

    def follow_readers(self) -> tuple[Subject, list[int], list[int]]:
        """Returns at once: there are no readers."""
        return Subject.LEAVE, [0, 0, 0, 0, 0], [0]


class AgreedOrder:
    """The order of several processes; see [Note: one order of collectives] and ``Order``.

    Args:
        collectives: Sends messages between the processes.
        num_tensors: The number of managed parameters.
        checks_all: Whether processes agree on every gather and reduction of a plan before it is done (debugging).
    """

    is_alone = False

    def __init__(self, collectives: Collectives, num_tensors: int, checks_all: bool) -> None:
        self._collectives = collectives
        self._checks_all = checks_all
        self._checksum = 0
        self.note_tensors(num_tensors)

    def note_tensors(self, num_tensors: int) -> None:
        """Notes the number of parameters: messages have a bit of each."""
        self._num_words = -(-num_tensors // _BITS)

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
        else:  # inputs cannot be compared, so no trace of this step is kept
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
        return common_trace(self._collectives.exchange_objects(trace, f"compares what it has recorded ('{trace.key}')"))

    def agree_on_foreseen(self, traces: Sequence[Trace]) -> Sequence[Trace]:
        """See ``Order``."""
        found = self._collectives.exchange_objects(list(traces), "compares what it foresees of a step")
        if not all(found):
            return ()
        return [common_trace(same) for same in zip(*found, strict=True)]

    def check(self, collective: Collective, dtype: torch.dtype, numel: int) -> None:
        """See ``Order``."""
        if self._checks_all:
            what = f"is about to {collective.subject.name.lower()} group {collective.group}, as planned"
            what = f"{what} ({numel} elements of {dtype})"
            rows = self._payloads(Subject.CHECK, [*collective, number_of(dtype), numel], what)
            if not _are_same(tuple(row[:4]) for row in rows):
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
        found = [_EndMessage.from_words(words) for _, *words in messages]
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
        """The message of the ranks that do not follow, which must be the same on all of them, and these ranks."""
        readers = [rank for rank, row in enumerate(messages) if row[0] != Subject.FOLLOW]
        if len({tuple(messages[rank]) for rank in readers}) != 1:
            self._mismatch(what)
        return messages[readers[0]], readers

    def _payloads(
        self, subject: Subject, payload: Sequence[int], what: str, *, is_patient: bool = True
    ) -> list[list[int]]:
        """Sends a message on a subject; returns the payloads of all ranks."""
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
        message += [0] * (_LEAST_NUMBERS - len(message))
        if is_patient is None:
            is_patient = subject not in _ALONE
        messages = self._collectives.exchange(message, what, subject=_ABOUT, is_patient=is_patient)
        if not {found[0] for found in messages} <= allowed:
            self._mismatch(what)
        return messages

    def _wanted(self, messages: list[list[int]]) -> tuple[Collective, ...]:
        """The collectives that messages ask for, each once, in the order in which all processes execute them."""
        asked = {(subject, index) for subject, index, *_ in messages if subject != Subject.END}
        collectives = tuple(Collective(Subject(subject), index) for subject, index in sorted(asked))
        for collective in collectives:
            self._note(collective)
        return collectives

    def _note(self, collective: Collective) -> None:
        self._checksum = zlib.crc32(b"%d %d" % collective, self._checksum)

    def _mismatch(self, what: str) -> None:
        raise disagreement(self._collectives.exchange_objects(what, DOES))


def _are_same(values: Iterable[object]) -> bool:
    return len(set(values)) == 1


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode())


def number_of(dtype: torch.dtype) -> int:
    """What a type is called in messages."""
    return DTYPES.index(dtype)
