"""What a micro-batch does with chunks: operators of a model and a layout -> a trace, and the script of its work.

[Note: from operators to chunks]
An ``OpTrace`` says what a model does with its parameters, whatever chunks they are in. Here the same micro-batch is
replayed chunk by chunk, as the engine would see it on a device (``runtime/manager.py``): each acquisition of a
parameter, unless a module computes with its chunk already, and each operand that backward needs, is a visit to its
chunk; a chunk is in use while a module computes with one of its parameters or a tensor looks into it; memory that
operators make is non-model data until it is free. A finished gradient goes home at once, and its memory is held until
the compute stream waits for its copy. With several processes it waits in the buffer of its group until all gradients of
the group are there.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from hf_patrickstar.layout.packing import ChunkSpec, Layout
from hf_patrickstar.layout.specs import TensorSpec
from hf_patrickstar.schedule import op_trace, script
from hf_patrickstar.schedule.trace import Activation, Shapes, StepKind, Trace, Visit, trace_key

_LAUNCHES = 5
"""Of an update by Adam on the device: it counts, widens gradients, multiplies them, computes, and rounds."""
_LEAST_IN_FLIGHT = 2
"""Gradients whose copies the compute stream need not wait for, however large; as in ``memory/streams.py``."""
_SUM_ITEMSIZE = 4
"""Bytes of an element of an accumulation list."""
_LEAST_ACTIVATION = 1e-4
"""Activations that are a smaller part of all non-model data are not worth a copy."""


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """Where each parameter is.

    Attributes:
        chunks: All chunks, by index.
        tensors: The parameters, by index.
        chunk_of: The chunk of each, by its index.
        own_numel: Elements that this process has at home of each, by its index.
    """

    chunks: Sequence[ChunkSpec]
    tensors: Mapping[int, TensorSpec]
    chunk_of: Mapping[int, int]
    own_numel: Mapping[int, int]

    @classmethod
    def of(cls, layout: Layout, rank: int = 0) -> "Places":
        """The places of a layout.

        Args:
            layout: The layout.
            rank: The process.
        """
        own = {}
        for spec, place in zip(layout.tensors, layout.placements, strict=True):
            begin, end = layout.chunks[place.chunk_index].parts_of(spec.numel, place.offset_numel)[rank]
            own[spec.index] = end - begin
        chunk_of = {place.tensor_index: place.chunk_index for place in layout.placements}
        return cls(layout.chunks, {spec.index: spec for spec in layout.tensors}, chunk_of, own)


@dataclasses.dataclass(frozen=True, slots=True)
class StepRules:
    """What a step does with gradients.

    Attributes:
        num_micro_batches: Micro-batches of a step; more than one add their gradients to a list.
        in_flight_nbytes: Bytes of gradients whose copies to the host the compute stream does not wait for; with 0 it
            waits for each copy.
        overlaps_reduction: Whether averages of a group go home when the next group is reduced, beside computation.
        widens_sums: Whether 16-bit gradients of a group are sent to other processes as fp32.
        has_norms: Whether the norm of every gradient is computed, because gradients are clipped.
        device_homed: Chunks that are at home on the device.
        updates: What it takes to update each chunk on the host, by index; nothing else is updated.
        overlaps_update: Whether the host's thread updates chunks, beside what comes next.
    """

    num_micro_batches: int = 1
    in_flight_nbytes: int = 0
    overlaps_reduction: bool = False
    widens_sums: bool = False
    has_norms: bool = True
    device_homed: frozenset[int] = frozenset()
    updates: Mapping[int, script.HostWork] = dataclasses.field(default_factory=dict)
    overlaps_update: bool = True


Entries = tuple[script.Entry, ...]


def micro_batch(
    ops: op_trace.OpTrace,
    places: Places,
    rules: StepRules,
    kind: StepKind,
    numbers: Iterator[int] | None = None,
    name: str = "",
) -> tuple[Trace, Entries]:
    """Translates what a model does into a trace and a script of chunks; see [Note: from operators to chunks].

    Args:
        ops: What the model does.
        places: Where its parameters are.
        rules: What becomes of gradients.
        kind: Which micro-batch of a step it is, or an evaluation.
        numbers: Counts copies, reductions and works of the thread in the whole script; by default from 0.
        name: The outermost module, if that is not the model.

    Returns:
        What the micro-batch visits, and what else takes memory; and what it does beside what its plan moves.
    """
    numbers = itertools.count() if numbers is None else numbers
    return _Translation(places, rules, kind, numbers, name).translate(ops.notes)


class _Translation:
    """The state of a micro-batch while its notes are replayed in order."""

    def __init__(self, places: Places, rules: StepRules, kind: StepKind, numbers: Iterator[int], name: str) -> None:
        self._chunks, self._tensors, self._chunk_of = places.chunks, places.tensors, places.chunk_of
        self._own_numel = places.own_numel
        self._rules = rules
        self._kind = kind
        self._name = name
        self._numbers = numbers
        self._sizes = tuple(chunk.nbytes for chunk in places.chunks)
        self._has_others = any(chunk.world_size > 1 for chunk in places.chunks)
        self._accumulates = rules.num_micro_batches > 1
        self._is_metered = self._is_inner = False
        self._shapes: Shapes = ()
        self._script: list[script.Entry] = []
        self._visits: list[Visit] = []
        self._forward_ends: list[int] = []
        # What is in use
        self._users: collections.Counter[int] = collections.Counter()  # acquisitions of each parameter
        self._seen: set[int] = set()  # parameters that tensors look into
        # Memory
        self._live: dict[int, int] = {}  # storages that are there -> their bytes
        self._held: collections.Counter[int] = collections.Counter()  # beside the model; -1 if nobody holds a storage
        self._total = self._peak = 0
        self._in_flight: collections.deque[tuple[int, int, int]] = collections.deque()  # storage, bytes, number
        self._in_flight_nbytes = 0
        self._deferred: dict[int, list[tuple[int, int]]] = {}
        self._num_kept = 0
        self._kept: dict[int, int] = {}  # what autograd keeps -> its storage
        self._activations: dict[int, Activation] = {}  # by storage; a moment that has not come is -1
        # Groups of several processes
        self._stored: dict[int, set[int]] = {}
        self._buffers: dict[int, int] = {}  # groups that have a buffer of gradients -> its bytes
        self._leaving_nbytes = self._buffers_peak = 0  # of the buffer whose averages are on their way home
        self._under_way: tuple[int, int] | None = None  # the group that is reduced, and the number of the reduction
        self._reduced: list[int] = []

    def translate(self, notes: Iterable[op_trace.Note]) -> tuple[Trace, Entries]:
        for note in notes:
            if self._is_inner and isinstance(note, (op_trace.Acquire, op_trace.Release)):
                continue  # an evaluation is a step of its own
            match note:  # the most frequent first
                case script.DeviceOp() | script.HostWork() | script.BlockingCopy() | script.Begin():
                    self._script.append(note)
                case op_trace.Allocate(storages):
                    self._allocate(storages)
                case op_trace.Free(storage):
                    self._free(storage)
                case op_trace.Kept(storage, kept):
                    self._keep(storage, kept)
                case op_trace.Wanted(kept):
                    self._want(kept)
                case op_trace.Acquire(index):
                    if not any(self._chunk_of[used] == self._chunk_of[index] for used in self._users):
                        self._visit(index)  # else a module computes with the chunk already, and nothing is to be moved
                    self._users[index] += 1
                case op_trace.Release(index, is_seen):
                    self._users[index] -= 1
                    if is_seen:
                        self._seen.add(index)
                    if not self._users[index]:
                        del self._users[index]
                case op_trace.Need(index):
                    self._visit(index)
                    self._seen.add(index)
                case op_trace.LetGo(index):
                    self._seen.discard(index)
                case op_trace.LookedUp(index):
                    self._script.append(script.Await(self._chunk_of[index]))
                case op_trace.Gradient():
                    self._take(note)
                case op_trace.EnterForward(is_inner=False):
                    self._begin(note)
                case op_trace.EnterForward(is_inner=True) | op_trace.LeaveForward(is_inner=True):
                    self._is_inner = isinstance(note, op_trace.EnterForward)
                case op_trace.LeaveForward():
                    self._forward_ends.append(len(self._visits))
                    if self._has_others:
                        self._script.append(script.Message())
                case op_trace.LeaveBackward():
                    self._end()
        self._close_moment()
        key = trace_key(f"{self._kind}:{self._name}" if self._name else self._kind, self._shapes)
        trace = Trace(key, self._sizes, tuple(self._visits), (self._shapes,), tuple(self._forward_ends))
        leaving = self._leaving(trace.non_model_peak_nbytes)
        trace = dataclasses.replace(trace, activations=tuple(self._activations[storage] for storage in leaving))
        return trace, tuple(self._numbered(leaving))

    def _begin(self, note: op_trace.EnterForward) -> None:
        if self._is_metered:
            return  # another forward of the same step
        self._is_metered = True
        self._shapes = note.shapes
        if self._has_others:
            self._script.append(script.Message())  # on what the step begins with
        self._live = {storage: self._live[storage] for storage in note.others if storage in self._live}
        # A loop reads the batches of all micro-batches first, or keeps those that it has computed with.
        num_batches = {StepKind.MIDDLE: self._rules.num_micro_batches - 1, StepKind.LAST: self._rules.num_micro_batches}
        self._total = num_batches.get(self._kind, 1) * note.nbytes + note.buffers_nbytes + sum(self._live.values())
        self._peak = self._total

    # Chunks

    def _visit(self, index: int) -> None:
        chunk = self._chunk_of[index]
        self._close_moment()
        in_use = {self._chunk_of[used] for used in (*self._users, *self._seen)}
        self._visits.append(Visit(chunk, tuple(sorted(in_use - {chunk}))))
        self._script.append(script.Reach(chunk))

    def _close_moment(self) -> None:
        """Notes the peaks since the last visit."""
        if self._visits:
            last, reduced = self._visits[-1], tuple(self._reduced)
            self._visits[-1] = Visit(last.chunk_index, last.pinned, self._peak, self._buffers_peak, reduced)
        self._reduced.clear()
        self._peak = self._total
        self._buffers_peak = sum(self._buffers.values()) + self._leaving_nbytes

    # Memory

    def _allocate(self, storages: Sequence[tuple[int, int]]) -> None:
        self._live.update(storages)
        self._total += sum(nbytes for _, nbytes in storages)
        self._peak = max(self._peak, self._total)

    def _free(self, storage: int) -> None:
        """Nobody but autograd keeps a storage any more, or autograd does not keep it any more."""
        known = self._activations.get(storage)
        if known is not None and known.idle_from < 0:
            self._activations[storage] = dataclasses.replace(known, idle_from=len(self._visits) - 1)
        self._release(self._kept.pop(storage, storage))

    def _keep(self, storage: int, kept: int) -> None:
        place, self._num_kept = self._num_kept, self._num_kept + 1
        storage = self._kept.get(storage, storage)  # backward may keep what it was given, again
        if storage not in self._live:
            return
        self._kept[kept] = storage
        self._held[storage] += 1
        if storage not in self._activations and not self._forward_ends and self._kind.is_training:
            self._activations[storage] = Activation(place, self._live[storage], len(self._visits) - 1, -1, -1)
            self._script.append(script.Keep(storage))

    def _want(self, kept: int) -> None:
        storage = self._kept.get(kept, -1)
        known = self._activations.get(storage)
        if known is not None and known.needed_at < 0:
            self._activations[storage] = dataclasses.replace(known, needed_at=len(self._visits) - 1)
            self._script.append(script.Restore(storage))

    def _leaving(self, peak_nbytes: int) -> dict[int, int]:
        """The storages of activations that can leave the device, with their numbers, in the order of their places."""
        least, ends = _LEAST_ACTIVATION * peak_nbytes, self._forward_ends
        can_leave = [
            storage
            for storage, found in self._activations.items()
            if found.nbytes >= least and 0 <= found.idle_from < found.needed_at - 1 and found.needed_at >= ends[0] - 1
        ]
        while can_leave and self._activations[can_leave[-1]].needed_at <= ends[-1]:
            del can_leave[-1]  # backward begins with it
        return {storage: number for number, storage in enumerate(can_leave)}

    def _numbered(self, leaving: Mapping[int, int]) -> Iterator[script.Entry]:
        """The script, with numbers of activations in place of storages, and without what does not leave."""
        for entry in self._script:
            if not isinstance(entry, (script.Keep, script.Restore)):
                yield entry
            elif entry.number in leaving:
                yield type(entry)(leaving[entry.number])

    def _release(self, storage: int) -> None:
        self._held[storage] -= 1
        if self._held[storage] < 0:
            self._total -= self._live.pop(storage, 0)

    # Gradients

    def _take(self, note: op_trace.Gradient) -> None:
        """A gradient is finished: it goes home, or to the buffer of its group."""
        spec, is_over_value = self._tensors[note.index], self._kind is StepKind.TRAINING and not self._accumulates
        if self._chunks[self._chunk_of[note.index]].world_size > 1:
            self._store(spec, note.nbytes)
        elif note.is_at_home:
            if self._rules.has_norms and not self._accumulates:
                self._script.append(script.HostWork("norm", 0, note.nbytes))
        elif is_over_value and (self._users[note.index] > 0 or note.is_kept):  # which is still needed there
            self._held[note.storage] += 1
            self._deferred.setdefault(note.index, []).append((note.storage, note.nbytes))
        else:
            self._send_home(spec, note.storage, note.nbytes)

    def _send_home(self, spec: TensorSpec, storage: int | None, nbytes: int) -> None:
        """Takes a gradient, or this process's average, to its home; ``storage`` has it if it is non-model data."""
        chunk, dtype = self._chunk_of[spec.index], spec.types.param
        if self._rules.has_norms and not self._accumulates:
            self._script.append(script.DeviceOp("norm", 0, nbytes, dtype))
        numel = nbytes // spec.types.itemsize
        if chunk in self._rules.device_homed:
            reads = 0 if self._kind in (StepKind.TRAINING, StepKind.FIRST) else numel * _SUM_ITEMSIZE
            width = _SUM_ITEMSIZE if self._accumulates else spec.types.itemsize
            self._script.append(script.DeviceOp("store a gradient", 0, nbytes + reads + numel * width, dtype))
            return
        number = next(self._numbers)
        self._script.append(script.Send(chunk, nbytes))
        if storage is not None:
            self._held[storage] += 1
            self._in_flight.append((storage, nbytes, number))
            self._in_flight_nbytes += nbytes
            self._wait_for_copies()
        if self._accumulates:
            self._add(numel, nbytes, number)

    def _add(self, numel: int, nbytes: int, number: int) -> None:
        """The host's thread adds a gradient to its list."""
        times = 1 if self._kind is StepKind.FIRST else 2
        works = [script.HostWork("add a gradient", 0, nbytes + times * numel * _SUM_ITEMSIZE)]
        if self._kind is StepKind.LAST and self._rules.has_norms:
            works.append(script.HostWork("norm", 0, numel * _SUM_ITEMSIZE))
        next(self._numbers)
        self._script.append(script.ThreadWork(tuple(works), frozenset(), (number,)))

    def _wait_for_copies(self) -> None:
        most, least = self._rules.in_flight_nbytes, _LEAST_IN_FLIGHT if self._rules.in_flight_nbytes else 0
        while self._in_flight_nbytes > most and len(self._in_flight) > least:
            storage, nbytes, number = self._in_flight.popleft()
            self._in_flight_nbytes -= nbytes
            self._script.append(script.Join(number))
            self._release(storage)

    def _release_in_flight(self) -> None:
        if self._in_flight:
            self._script.append(script.Join(self._in_flight[-1][2]))
        while self._in_flight:
            self._release(self._in_flight.popleft()[0])
        self._in_flight_nbytes = 0

    # Gradients of groups

    def _store(self, spec: TensorSpec, nbytes: int) -> None:
        chunk = self._chunk_of[spec.index]
        self._buffers.setdefault(chunk, self._sizes[chunk])
        self._buffers_peak = max(self._buffers_peak, sum(self._buffers.values()) + self._leaving_nbytes)
        stored = self._stored.setdefault(chunk, set())
        stored.add(spec.index)
        self._script.append(script.DeviceOp("store a gradient", 0, 2 * nbytes, spec.types.param))
        if len(stored) == sum(self._tensors[index].trainable for index in self._chunks[chunk].tensor_indices):
            self._reduce(chunk)

    def _reduce(self, chunk: int) -> None:
        spec = self._chunks[chunk]
        del self._stored[chunk]
        number = next(self._numbers)
        itemsize = _SUM_ITEMSIZE if self._rules.widens_sums else spec.types.itemsize
        self._script.append(script.Reduce((spec.world_size - 1) * spec.chunk_numel * itemsize))
        self._reduced.append(chunk)
        self._receive()
        self._under_way = chunk, number
        if not self._rules.overlaps_reduction:
            self._receive()
            self._leaving_nbytes = 0

    def _receive(self) -> None:
        """The averages of the reduction that is under way go home."""
        if self._under_way is None:
            return
        (chunk, number), self._under_way = self._under_way, None
        self._leaving_nbytes = 0
        self._script.append(script.Join(number))
        for index in self._chunks[chunk].tensor_indices:
            tensor, own_numel = self._tensors[index], self._own_numel[index]
            if own_numel and tensor.trainable:
                self._send_home(tensor, None, own_numel * tensor.types.itemsize)
        self._leaving_nbytes = self._buffers.pop(chunk)

    def _end(self) -> None:
        """A backward has ended: what waited goes home."""
        if self._has_others:
            self._script.append(script.Message())
        for chunk in sorted(self._stored):
            self._reduce(chunk)
        self._receive()
        self._leaving_nbytes = 0
        deferred, self._deferred = self._deferred, {}
        for index in sorted(deferred):
            for storage, nbytes in deferred[index]:
                self._send_home(self._tensors[index], storage, nbytes)
                self._release(storage)
        self._release_in_flight()


def traces_of(
    ops: op_trace.OpTrace, places: Places, rules: StepRules, *, is_training: bool = True, name: str = ""
) -> list[Trace]:
    """The traces of all micro-batches of a step that do the same, or of an evaluation.

    Args:
        ops: What each of them does.
        places: Where parameters are.
        rules: What becomes of gradients.
        is_training: Whether they belong to a step.
        name: The outermost module, if that is not the model.
    """
    kinds = kinds_of(rules.num_micro_batches) if is_training else (StepKind.EVALUATION,)
    return [micro_batch(ops, places, rules, kind, name=name)[0] for kind in kinds]


def kinds_of(num_micro_batches: int) -> Sequence[StepKind]:
    """The kinds of micro-batches that a step of so many has, each once."""
    if num_micro_batches == 1:
        return (StepKind.TRAINING,)
    return (StepKind.FIRST, *((StepKind.MIDDLE,) if num_micro_batches > 2 else ()), StepKind.LAST)


def whole_step(ops: op_trace.OpTrace, places: Places, rules: StepRules, kinds: Iterable[StepKind]) -> Entries:
    """The script of a step, chunk by chunk: the update of the last one, then forward and backward.

    Args:
        ops: What a micro-batch does; each does the same.
        places: Where parameters are.
        rules: What becomes of gradients.
        kinds: What each micro-batch is.
    """
    step = list(_update(ops, places, rules))
    numbers = itertools.count(sum(isinstance(entry, script.ThreadWork) for entry in step))
    homed, chunks = rules.device_homed, places.chunks
    is_at_rest = len(homed) == len(chunks) and all(chunk.world_size == 1 for chunk in chunks)
    for kind in kinds:  # where all chunks are at home on the device, the engine has nothing to do at a visit
        _, entries = micro_batch(ops, places, rules, kind, numbers)
        step += (entry for entry in entries if not (is_at_rest and isinstance(entry, script.Reach)))
    return tuple(step)


def _update(ops: op_trace.OpTrace, places: Places, rules: StepRules) -> Iterator[script.Entry]:
    """What ``optimizer.step()`` does, in the order in which forward comes to the chunks."""
    yield script.Begin(script.Part.UPDATE)
    if rules.has_norms:
        yield script.BlockingCopy(_SUM_ITEMSIZE, False, True, "the norm of all gradients")
        if any(chunk.world_size > 1 for chunk in places.chunks):
            yield script.Message()
    visited = (
        places.chunk_of[note.index]
        for note in ops.notes
        if isinstance(note, (op_trace.Acquire, op_trace.Need, op_trace.LookedUp))
    )
    for index in dict.fromkeys(itertools.chain(visited, rules.updates)):
        work = rules.updates.get(index)
        if work is None:
            continue
        if index in rules.device_homed:
            dtype = places.chunks[index].types.state
            yield from itertools.repeat(script.DeviceOp(work.name, 0, 0, dtype), max(work.num_calls, _LAUNCHES) - 1)
            yield script.DeviceOp(work.name, work.flops, work.nbytes, dtype)
        elif rules.overlaps_update:
            yield script.ThreadWork((work,), frozenset({index}), ())
        else:
            yield work
