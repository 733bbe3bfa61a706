"""What a step did: which chunk was visited when, what could not leave then, and what else took memory. Pure data.

A visit's place in its trace is its moment (PatrickStar section 8.1).
"""

import bisect
import dataclasses
import enum
import functools
import itertools
import operator
import re
from collections.abc import Iterator, Mapping, Sequence

Shapes = tuple[tuple[int, ...], ...]

_MOST_SHAPES = 16


class StepKind(enum.StrEnum):
    """The kind of a step; the key of its trace begins with it.

    A micro-batch is ``TRAINING`` if an optimizer step follows each one; where gradients accumulate it is ``FIRST``,
    ``MIDDLE`` or ``LAST``. ``UPDATE`` is the optimizer's step, which visits chunks at home.
    """

    TRAINING = "training"
    FIRST = "training first"
    MIDDLE = "training middle"
    LAST = "training last"
    EVALUATION = "evaluation"
    UPDATE = "optimizer"

    @property
    def is_training(self) -> bool:
        """Whether a backward belongs to it."""
        return self not in (StepKind.EVALUATION, StepKind.UPDATE)

    @property
    def is_last(self) -> bool:
        """Whether it is the last micro-batch of a step, or the only one."""
        return self in (StepKind.TRAINING, StepKind.LAST)

    @classmethod
    def of(cls, key: str) -> "StepKind":
        """The kind of the step whose trace has this key."""
        return cls(re.split("[:/]", key, maxsplit=1)[0])


@dataclasses.dataclass(frozen=True, slots=True)
class Visit:
    """One access to a chunk on the compute device; its place in the trace is its moment.

    Attributes:
        chunk_index: The chunk.
        pinned: Other chunks that were in use at that moment and could not have left.
        non_model_nbytes: The most non-model bytes on the device between this moment and the next.
        gradient_nbytes: The most bytes of gradients that waited on the device in that time: for their group, or for the
            update.
        reduced: Groups whose gradients were reduced in that time, in this order.
    """

    chunk_index: int
    pinned: tuple[int, ...] = ()
    non_model_nbytes: int = 0
    gradient_nbytes: int = 0
    reduced: tuple[int, ...] = ()

    def with_most_of(self, other: "Visit") -> "Visit":
        """This visit, with the larger bytes of it and another one, and what was in use in one of them."""
        pinned = tuple(sorted({*self.pinned, *other.pinned}))
        non_model_nbytes = max(self.non_model_nbytes, other.non_model_nbytes)
        gradient_nbytes = max(self.gradient_nbytes, other.gradient_nbytes)
        return Visit(self.chunk_index, pinned, non_model_nbytes, gradient_nbytes, self.reduced)


@dataclasses.dataclass(frozen=True, slots=True)
class Activation:
    """Memory that autograd keeps from forward to backward, and that can leave the device meanwhile.

    Attributes:
        place: How many operands autograd has kept before it in the micro-batch; see [Note: activations that leave] in
            ``runtime/activations.py``.
        nbytes: Its bytes.
        kept_at: The moment at which autograd begins to keep it.
        idle_from: The moment from which autograd alone keeps it.
        needed_at: The moment at which backward needs it first.
    """

    place: int
    nbytes: int
    kept_at: int
    idle_from: int
    needed_at: int


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """The visits of one step of one kind.

    Attributes:
        key: What the step was; see ``trace_key``.
        chunk_nbytes: Bytes of every chunk's ``param`` payload, by chunk index.
        visits: The visits, in order.
        shapes: Shapes of the inputs of each step that it was recorded from.
        forward_ends: For each outermost forward, the number of visits before its end.
        activations: What can leave the device between forward and backward, in the order in which autograd keeps it.
        num_offloaded: So many of them leave, the first ones: ``visits`` have the bytes that are left.
    """

    key: str
    chunk_nbytes: tuple[int, ...]
    visits: tuple[Visit, ...]
    shapes: tuple[Shapes, ...] = ((),)
    forward_ends: tuple[int, ...] = ()
    activations: tuple[Activation, ...] = ()
    num_offloaded: int = 0

    @property
    def kind(self) -> StepKind:
        """What the step was."""
        return StepKind.of(self.key)

    @property
    def non_model_peak_nbytes(self) -> int:
        """The most non-model bytes of any moment."""
        return max(map(operator.attrgetter("non_model_nbytes"), self.visits), default=0)

    @property
    def peak_nbytes(self) -> int:
        """The most bytes of non-model data and of gradients that wait, together, of any moment."""
        return max((visit.non_model_nbytes + visit.gradient_nbytes for visit in self.visits), default=0)

    def at_rest(self, gradient_nbytes: Sequence[int]) -> "Trace":
        """This trace, if gradients stay where autograd leaves them; see [Note: rest] in ``runtime/rest.py``.

        Args:
            gradient_nbytes: Bytes of the gradients of each chunk. They count from its first visit after the first
                forward on, or from the end of that forward if it has none.
        """
        begin = min(self.forward_ends[0] if self.forward_ends else 0, len(self.visits) - 1)
        left = dict(enumerate(gradient_nbytes))
        there = sum(left.values()) - sum(left.get(index, 0) for index in {*self.visited[begin:]})
        visits = list(self.visits[:begin])
        for visit in self.visits[begin:]:
            there += left.pop(visit.chunk_index, 0)
            visits.append(dataclasses.replace(visit, gradient_nbytes=there))
        return dataclasses.replace(self, visits=tuple(visits))

    @property
    def visited(self) -> list[int]:
        """The chunks that it visits, in order."""
        return [visit.chunk_index for visit in self.visits]

    def covers(self, shapes: Shapes) -> bool:
        """Whether a step with inputs of these shapes needs no more memory than a recorded one did."""
        return shapes in self.shapes or any(_covers(recorded, shapes) for recorded in self.shapes)

    def without_input(self, place: int) -> "Trace":
        """This trace, for steps also that have all inputs but one, and need no more memory than with it.

        Args:
            place: Which one, of those that are more than one number.
        """
        fewer = tuple(shapes[:place] + shapes[place + 1 :] for shapes in map(_with_sizes, self.shapes))
        return dataclasses.replace(self, shapes=tuple(dict.fromkeys(self.shapes + fewer)))

    def with_non_model_nbytes(self, nbytes: Sequence[int]) -> "Trace":
        """This trace with other non-model bytes, one number for each moment."""
        visits = (
            dataclasses.replace(visit, non_model_nbytes=measured)
            for visit, measured in zip(self.visits, nbytes, strict=True)
        )
        return dataclasses.replace(self, visits=tuple(visits))

    # Activations that leave; see [Note: activations that leave] in ``runtime/activations.py``

    @property
    def offloaded(self) -> tuple[Activation, ...]:
        """The activations that leave the device."""
        return self.activations[: self.num_offloaded]

    @property
    def offloaded_nbytes(self) -> int:
        """Their bytes."""
        return sum(activation.nbytes for activation in self.offloaded)

    def offloading(self, num: int) -> "Trace":
        """This trace if so many of its activations leave the device, the first ones."""
        num = min(num, len(self.activations))
        if num == self.num_offloaded:
            return self
        change = [0] * (len(self.visits) + 1)  # of the bytes of a moment to those of the one before
        for count, sign in ((self.num_offloaded, 1), (num, -1)):
            for begin, end, nbytes in self._absences(count):
                change[begin] += sign * nbytes
                change[end] -= sign * nbytes
        sums = itertools.accumulate(change)
        left = [max(visit.non_model_nbytes + nbytes, 0) for visit, nbytes in zip(self.visits, sums, strict=False)]
        return dataclasses.replace(self.with_non_model_nbytes(left), num_offloaded=num)

    def _absences(self, num: int) -> Iterator[tuple[int, int, int]]:
        """The moments during which each activation that leaves is not on the device: the first, the end, its bytes.

        It is there until the copy of it is waited for, when autograd keeps the next one, and comes back when backward
        needs that.
        """
        last = (self.forward_ends[-1] if self.forward_ends else len(self.visits)) - 1
        for place, activation in enumerate(self.activations[:num], 1):
            after = self.activations[place] if place < len(self.activations) else None
            gone = max(activation.idle_from, last if after is None else after.kept_at) + 1
            back = activation.needed_at if after is None else min(activation.needed_at, after.needed_at)
            if gone < back:
                yield gone, back, activation.nbytes

    def merged(self, earlier: "Trace") -> "Trace":
        """This trace, with the larger byte counts of it and an earlier one, if both visit the same chunks."""
        num = max(self.num_offloaded, earlier.num_offloaded)
        if self.visited != earlier.visited:
            return self.offloading(num)
        activations, most = self.activations, 0
        if [known.place for known in activations] == [known.place for known in earlier.activations]:
            # Compared is what is left if all leave: one may have the largest peak, and the other the larger activation.
            same = zip(activations, earlier.activations, strict=True)
            activations, most = tuple(max(pair, key=operator.attrgetter("nbytes")) for pair in same), len(activations)
        visits = tuple(map(Visit.with_most_of, self.offloading(most).visits, earlier.offloading(most).visits))
        kept = tuple(theirs for theirs in earlier.shapes if not self.covers(theirs))
        shapes = self.shapes + kept[: _MOST_SHAPES - 1]
        changed = {"visits": visits, "shapes": shapes, "activations": activations, "num_offloaded": most}
        return dataclasses.replace(self, **changed).offloading(num)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, slots=True)
class KnownTraces:
    """The traces of a training that a plan, or an earlier run, has left, and what was decided from them.

    Attributes:
        key: Names what traces depend on: model, layout, types, versions. Traces are true for trainings of the same key.
        traces: The traces, by their own keys; empty if nothing is known.
        lookups: Where input embeddings are looked up, ``"home"`` or ``"device"``, by the index of the parameter: those
            for which ``cpu_embedding="auto"`` was decided.
        has_padding: Whether the batches had padding, for which a model may make a mask of all pairs of tokens.
    """

    key: str = ""
    traces: Mapping[str, Trace] = dataclasses.field(default_factory=dict)
    lookups: Mapping[int, str] = dataclasses.field(default_factory=dict)
    has_padding: bool = False

    def offloading(self, num: int) -> "KnownTraces":
        """The same if so many activations leave the device between forward and backward.

        Args:
            num: How many, of each micro-batch.
        """
        return dataclasses.replace(self, traces={key: made.offloading(num) for key, made in self.traces.items()})


def common_trace(traces: Sequence[Trace]) -> Trace:
    """One trace for several processes that recorded the same step; every process computes the same one.

    Where processes visited different chunks, the longest trace is used; each of its moments then has room for the most
    bytes that the other processes needed at any moment, with all activations on the device.

    Args:
        traces: What each process recorded, by rank.
    """
    num = max(trace.num_offloaded for trace in traces)
    traces = [trace.offloading(num) for trace in traces]
    chosen = max(traces, key=lambda trace: len(trace.visits))  # the first of the longest
    for other in traces:
        if other.visited == chosen.visited:
            chosen = chosen.merged(other)
            continue
        peak = other.offloading(0).non_model_peak_nbytes
        least = Visit(-1, (), peak, max((visit.gradient_nbytes for visit in other.visits), default=0))
        chosen = dataclasses.replace(chosen, visits=tuple(visit.with_most_of(least) for visit in chosen.visits))
    return chosen


@functools.lru_cache
def trace_key(name: str, shapes: Shapes) -> str:
    """The name of the trace that a step belongs to: what it is, and its bucket of input shapes.

    Steps of one bucket share a trace: each size is rounded up to a power of two or to 1.5 times one, so that batches
    with many different lengths make few traces. Inputs that are a number alone make no difference.

    Args:
        name: The kind of step, and the outermost module if that is not the model: ``"evaluation:encoder"``.
        shapes: Shapes of its inputs.
    """
    sizes = dict.fromkeys("x".join(str(_round_up(size)) for size in shape) for shape in _with_sizes(shapes))
    return f"{name}/{','.join(sizes)}" if sizes else str(name)


def _round_up(size: int) -> int:
    power = 1 << max(size - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and size <= power * 3 // 4 else power


class Cursor:
    """Follows a trace while its step is repeated, and tells when each chunk is needed next.

    Args:
        trace: The trace.
        dropped_after: Chunks whose device copies are void after the step: those that the optimizer updates.

    Attributes:
        moment: The moment of the last visit; -1 before the first.
    """

    def __init__(self, trace: Trace, dropped_after: frozenset[int] = frozenset()) -> None:
        self.trace = trace
        self._dropped_after = dropped_after
        self.moment = -1
        self._moments: dict[int, list[int]] = {}  # made when it is needed: a step with a plan needs none

    def advance(self, chunk_index: int) -> bool:
        """Notes a visit.

        Returns:
            Whether the trace expected it.
        """
        self.moment += 1
        visits = self.trace.visits
        return self.moment < len(visits) and visits[self.moment].chunk_index == chunk_index

    def next_visit(self, chunk_index: int) -> int | None:
        """The moment at which a chunk is visited next, in this repetition of the step or in the next one.

        Returns:
            The moment, or ``None`` if the copy that is there now is never visited again.
        """
        if not self._moments:
            for moment, visit in enumerate(self.trace.visits):
                self._moments.setdefault(visit.chunk_index, []).append(moment)
        moments = self._moments.get(chunk_index)
        if moments is None:
            return None
        place = bisect.bisect_right(moments, self.moment)
        if place < len(moments):
            return moments[place]
        return None if chunk_index in self._dropped_after else moments[0] + len(self.trace.visits)


@functools.lru_cache
def _covers(recorded: Shapes, shapes: Shapes) -> bool:
    recorded, shapes = _with_sizes(recorded), _with_sizes(shapes)
    if [len(shape) for shape in recorded] != [len(shape) for shape in shapes]:
        return False
    pairs = zip(recorded, shapes, strict=True)
    return all(size <= known for ours, theirs in pairs for known, size in zip(ours, theirs, strict=True))


def _with_sizes(shapes: Shapes) -> Shapes:
    """The shapes of inputs that are more than one number, as the Trainer's ``num_items_in_batch`` is."""
    return tuple(shape for shape in shapes if shape)


def input_shapes(shapes: Sequence[Sequence[int]]) -> Shapes:
    """Shapes as a trace keeps them."""
    return tuple([(*map(int, shape),) for shape in shapes])
