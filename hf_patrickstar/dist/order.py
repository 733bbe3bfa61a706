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

Processes that do different things find out, and raise an error that says what each one does, instead of waiting; see
[Note: messages of any length].

A message is prompt, so that a rank gives up that waits for it alone, where a rank does not know yet whether the others
come at all (see [Note: how long a rank waits]):

| message | prompt |
|---|---|
| the beginning of an evaluation, a gather between steps; see `dist/sharing.py`: a read, a norm, `enter` | yes |
| the beginning of training: its batch may take long | no |
| a gather, a reduction, a check or an end in a step: all have begun it | no |
| while the model is saved, and `meet`: all have entered, and a disk may be slow | no |
"""

import enum
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.schedule.trace import Shapes, StepKind, Trace, common_trace
from hf_patrickstar.common.stage import Stage

_ABOUT = "what comes next"
"""The subject of messages that ask for a collective or end a phase, which may meet."""


class CollectiveKind(enum.IntEnum):
    """What a message is about that asks for a collective or ends a phase."""

    GATHER = 1
    REDUCE = 2
    END = 3


class Collective(NamedTuple):
    """A collective of model data: ``GATHER`` or ``REDUCE``, and of which group."""

    subject: CollectiveKind
    group: int


class Room(NamedTuple):
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


class Beginning(NamedTuple):
    """What all processes agreed on when a step began.

    Attributes:
        shapes: The largest of the input shapes.
        is_traced: Whether all processes have traces of the same steps.
        room: The least room; its ``resident`` is empty unless it was the same on all processes.
    """

    shapes: Shapes
    is_traced: bool
    room: Room


class Ended(NamedTuple):
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


class Order:
    """Decides which collective comes next, the same on all processes; see [Note: one order of collectives].

    Args:
        collectives: Sends messages between the processes.
        checks_all: Whether processes agree on every gather and reduction of a plan before it is done (debugging).

    Attributes:
        is_alone: Whether there is only one process: then nothing has to be agreed on.
    """

    def __init__(self, collectives: Collectives, *, checks_all: bool = False) -> None:
        self.is_alone = collectives.world_size == 1
        self._collectives = collectives
        self._checks_all = checks_all
        self._checksum = 0

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
        if self.is_alone:
            return Beginning(shapes, True, room)
        what, is_prompt = f"begins '{kind}'", not StepKind.of(kind).is_training
        resident = zlib.crc32(repr(room.resident).encode())
        own = kind, version, shapes, traces, room.free_nbytes, room.chunk_nbytes, room.floor_nbytes, resident
        found = self._collectives.exchange(own, what, subject="the beginning of a step", is_prompt=is_prompt)
        kinds, versions, inputs, known, free, limits, floors, residents = zip(*found, strict=True)
        if not (_are_same(kinds) and _are_same(versions)):
            raise self._collectives.disagreement(f"{what} after change {version} of the parameters")
        least = min((limit for limit in limits if limit is not None), default=None)
        agreed = Room(min(free), least, max(floors), room.resident if _are_same(residents) else ())
        return Beginning(_find_largest(inputs), _are_same(known), agreed)

    def agree_on_trace(self, trace: Trace) -> Trace:
        """Makes one trace of what the processes have recorded.

        Args:
            trace: The trace of this process.
        """
        return common_trace(self._collectives.exchange(trace, f"compares what it has recorded ('{trace.key}')"))

    def agree_on_estimated(self, traces: Sequence[Trace]) -> Sequence[Trace]:
        """Makes one trace of each that the processes have made before a step.

        Args:
            traces: The traces of this process, by kind; none if it has not made any.

        Returns:
            The traces of all, or none if a process has none.
        """
        found = self._collectives.exchange(traces, "compares what it estimates of a step")
        return [common_trace(same) for same in zip(*found, strict=True)] if all(found) else ()

    def agree_on_offload(self, num: int, most: int) -> int:
        """Makes one number of activations that leave the device of those that the processes have chosen.

        Args:
            num: How many leave.
            most: How many may, where other processes need more.
        """
        found = self._collectives.exchange((num, most), "compares how many activations leave the device")
        return min(max(num for num, _ in found), min(most for _, most in found))

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
        if self._checks_all:
            what = f"is about to {collective.subject.name.lower()} group {collective.group}, as planned"
            self._collectives.exchange(None, f"{what} ({numel} elements of {dtype})")
        self._note(collective)

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
        subject, index = collective
        what = f"needs group {index} ({subject.name.lower()}) for {who}"
        own = int(subject), index
        return self._wanted(self._collectives.exchange(own, what, subject=_ABOUT, is_prompt=not is_in_step))

    def end(self, phase: Stage, indices: Sequence[int] = (), *, is_diverged: bool, is_recorded: bool) -> Ended:
        """Ends a forward, a backward or an evaluation, if all processes end it; see ``Ended.collectives``.

        Args:
            phase: What has ended on this process.
            indices: Tensors that got a gradient on this process.
            is_diverged: Whether this process left its trace.
            is_recorded: Whether this process records a trace of the step.

        Raises:
            CollectiveError: If another process ended something else, or has executed other collectives.
        """
        what = f"has ended its {phase.value}"
        bits = sum(1 << index for index in set(indices))  # messages about a model of 10,000 parameters stay short
        own = int(CollectiveKind.END), phase.value, self._checksum, is_diverged, is_recorded, bits
        messages = self._collectives.exchange(own, what, subject=_ABOUT)
        if any(message[0] != CollectiveKind.END for message in messages):
            return Ended(self._wanted(messages))
        _, phases, checksums, diverged, recorded, found = zip(*messages, strict=True)
        if not (_are_same(phases) and _are_same(checksums)):
            what = f"{what}, with collectives of checksum {self._checksum:08x} so far"
            raise self._collectives.disagreement(what)
        those = (place for bits in set(found) for place in range(bits.bit_length()) if bits >> place & 1)
        return Ended((), any(diverged) or not _are_same(recorded), frozenset(those))

    # Inside

    def _wanted(self, messages: Sequence[tuple[Any, ...]]) -> tuple[Collective, ...]:
        """The collectives that messages ask for, each once, in the order in which all processes execute them."""
        asked = {(subject, index) for subject, index, *_ in messages if subject != CollectiveKind.END}
        collectives = tuple(Collective(CollectiveKind(subject), index) for subject, index in sorted(asked))
        for collective in collectives:
            self._note(collective)
        return collectives

    def _note(self, collective: Collective) -> None:
        self._checksum = zlib.crc32(b"%d %d" % collective, self._checksum)


def _are_same(values: Iterable[object]) -> bool:
    return len(set(values)) == 1


def _find_largest(found: Sequence[Shapes]) -> Shapes:
    """The largest of the shapes; none if they cannot be compared, so that no trace of the step is kept."""
    if not _are_same(tuple(map(len, shapes)) for shapes in found):
        return ()
    return tuple(tuple(map(max, zip(*same, strict=True))) for same in zip(*found, strict=True))
