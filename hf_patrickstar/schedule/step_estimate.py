"""Estimates a step from its traces alone, so that an engine can compare ways to do it by the simulator's clock.

[Note: the estimate of a step]
The engine knows which chunks a step visits, but not what the device computes in between: nobody watches operators on a
real device. An estimate puts in what every transformer does: each matrix is multiplied with each row (token) of a
micro-batch once in forward and twice in backward. The rest is known: the copies are those of the plan, gradients leave
when a chunk has been visited for the last time, and the optimizer reads and writes 28 bytes per parameter at home. The
script is run by the same ``replay`` as that of a recorded step.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from hf_patrickstar.layout.packing import ChunkSpec
from hf_patrickstar.layout.specs import GRADIENT, TensorSpec
from hf_patrickstar.schedule import script
from hf_patrickstar.schedule.bounds import ADAM_NBYTES, update_nbytes
from hf_patrickstar.schedule.trace import Shapes, StepKind, Trace

_ADDING_NBYTES = 8
"""Bytes per element to add a gradient to a list of fp32, beside the gradient itself."""
_PATCH_NUMEL = 256
"""Pixels of a row of an image model."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkWork:
    """What a step does with a chunk, beside moving it.

    Attributes:
        matrix_numel: Elements of matrices, which computation multiplies rows with.
        own_numel: Elements that the optimizer updates in this process; 0 if the chunk is frozen.
        gradient_nbytes: Bytes of this process's gradients.
        sent_nbytes: Bytes of gradients that it sends to other processes.
        dtype: The type that is computed in.
        may_move: Whether its home may move to the device margin.
        update_nbytes: See ``update_nbytes``, for an element.
        summed_nbytes: Bytes of this process's gradients in an accumulation list.
        chunk_numel: Elements of its chunk, with what is in no parameter.
        optimizer_index: Which optimizer updates it.
    """

    matrix_numel: int
    own_numel: int
    gradient_nbytes: int
    sent_nbytes: int
    dtype: str
    may_move: bool = True
    update_nbytes: int = ADAM_NBYTES
    summed_nbytes: int = 0
    chunk_numel: int = 1
    optimizer_index: int = 0

    @classmethod
    def of(cls, spec: ChunkSpec, tensors: Iterable[tuple[TensorSpec, int]], looked_up: Container[int]) -> "ChunkWork":
        """What a step does with a chunk; see [Note: the estimate of a step].

        Args:
            spec: The chunk.
            tensors: What is in it, and how many elements of each tensor this process has at home.
            looked_up: Indices of the tensors that are looked up on the host.
        """
        tensors = list(tensors)
        moving = [tensor for tensor, _ in tensors if tensor.index not in looked_up]
        multiplied = sum(tensor.numel for tensor in moving if len(tensor.shape) > 1)
        own = sum(own_numel for _, own_numel in tensors) if spec.is_updated else 0
        nbytes = spec.chunk_numel * spec.types.itemsize
        summed = spec.types.list_nbytes(GRADIENT, spec.chunk_numel)
        may_move = spec.trainable and len(moving) == len(tensors)
        others = may_move, update_nbytes(spec.types), summed, spec.chunk_numel, spec.optimizer_index
        return cls(multiplied, own, nbytes, spec.nbytes - nbytes, spec.types.param, *others)


def num_rows(shapes: Shapes) -> int:
    """About how many rows a micro-batch has that matrices are multiplied with: tokens, or patches of images.

    Args:
        shapes: Shapes of its inputs.
    """

    def rows(shape: tuple[int, ...]) -> int:
        if len(shape) < 4:
            return math.prod(shape[:2])
        return shape[0] * max(math.prod(shape[2:]) // _PATCH_NUMEL, 1)

    return max(map(rows, shapes), default=1)


def steps_of(traces: Iterable[Trace], num_micro_batches: int) -> list[list[Trace]]:
    """The steps that recorded micro-batches make: each bucket of inputs one, or all that accumulate together.

    Args:
        traces: The traces of training.
        num_micro_batches: Micro-batches of a step.
    """
    by_kind: dict[StepKind, list[Trace]] = {}
    for trace in traces:
        by_kind.setdefault(trace.kind, []).append(trace)
    steps = [[trace] for trace in by_kind.get(StepKind.TRAINING, ())]
    if first := by_kind.get(StepKind.FIRST):
        middle = by_kind.get(StepKind.MIDDLE, [])[:1] * max(num_micro_batches - 2, 0)
        steps.append([first[0], *middle, *by_kind.get(StepKind.LAST, [])[:1]])
    return steps


def estimate_script(
    traces: Sequence[Trace],
    works: Sequence[ChunkWork],
    at_home: frozenset[int],
    streamed: frozenset[int] = frozenset(),
    disk: Mapping[int, int] = MappingProxyType({}),
    *,
    overlaps_update: bool,
) -> list[script.Entry]:
    """The script of a step: the update of the last one, then forward and backward of every micro-batch.

    Args:
        traces: What each micro-batch visits.
        works: What is done with each chunk, by chunk index.
        at_home: Chunks that are at home on the device, where they are updated.
        streamed: Chunks that are updated when they are loaded.
        disk: Bytes that are read from the disk and written there for the update of chunks, by their index. Those of
            them that are ``streamed`` are updated on the device when they have been read.
        overlaps_update: Whether the host updates chunks beside what follows.
    """
    entries: list[script.Entry] = [script.Begin(script.Part.UPDATE)]
    visited = dict.fromkeys(itertools.chain.from_iterable(trace.visited for trace in traces))
    elsewhere = [index for index, work in enumerate(works) if work.own_numel and index not in visited]
    looked_up = [index for index in elsewhere if not (works[index].may_move or index in at_home)]
    for index in (*looked_up, *(index for index in visited if works[index].own_numel)):
        work = works[index]
        if index in streamed and index not in disk:
            continue
        nbytes = 0 if index in streamed else work.update_nbytes * work.own_numel
        operator = script.HostWork("update", 0, nbytes, disk_nbytes=disk.get(index, 0))
        if index in at_home:
            entries.append(script.DeviceOp("update", 0, ADAM_NBYTES * work.own_numel, "float32"))
        else:
            entries.append(script.ThreadWork((operator,), frozenset({index}), ()) if overlaps_update else operator)
    entries += [script.Await(index) for index in looked_up]
    number = itertools.count(len([entry for entry in entries if isinstance(entry, script.ThreadWork)]))
    for trace in traces:
        entries += _micro_batch(trace, works, at_home, number, accumulates=len(traces) > 1)
    return entries


def _micro_batch(
    trace: Trace, works: Sequence[ChunkWork], at_home: frozenset[int], number: Iterator[int], *, accumulates: bool
) -> Iterator[script.Entry]:
    """``number`` counts copies, reductions and works of the thread, as ``Join`` does."""
    end = trace.forward_ends[-1] if trace.forward_ends else len(trace.visits)
    rows = num_rows(trace.shapes[0])
    by_plan = any(visit.reduced for visit in trace.visits)
    last = {visit.chunk_index: moment for moment, visit in enumerate(trace.visits)}
    kept: dict[int, list[script.Entry]] = {}
    for place, activation in enumerate(trace.activations):
        kept.setdefault(activation.kept_at, []).append(script.Keep(place))
    for place, activation in reversed([*enumerate(trace.activations)]):
        kept.setdefault(activation.needed_at, []).append(script.Restore(place))
    for part, begin, stop, products in (
        (script.Part.FORWARD, 0, end, 1),
        (script.Part.BACKWARD, end, len(trace.visits), 2),
    ):
        yield script.Begin(part)
        # By chunk: a player knows how long a kernel takes that it has met before.
        kernels: dict[int, script.DeviceOp] = {}
        visits = trace.visits[begin:stop]
        counts = collections.Counter(visit.chunk_index for visit in visits)
        for moment, visit in enumerate(visits, begin):
            index, work = visit.chunk_index, works[visit.chunk_index]
            yield script.Reach(index)
            if index not in kernels:
                share = work.matrix_numel // counts[index]
                kernels[index] = script.DeviceOp("compute", 2 * products * rows * share, 0, work.dtype)
            yield kernels[index]
            yield from kept.get(moment, ())
            if part is script.Part.BACKWARD:
                done = visit.reduced if by_plan else (index,) * (last[index] == moment)
                for leaving in done:
                    is_home = leaving in at_home
                    yield from _gradients(leaving, works[leaving], number, is_home=is_home, accumulates=accumulates)


def _gradients(
    index: int, work: ChunkWork, number: Iterator[int], *, is_home: bool, accumulates: bool
) -> Iterator[script.Entry]:
    if work.sent_nbytes:
        next(number)
        yield script.Reduce(work.sent_nbytes)
    if is_home or not work.own_numel:
        return
    sent = next(number)
    yield script.Send(index, work.gradient_nbytes)
    if accumulates:
        next(number)
        adding = script.HostWork("add gradients", 0, work.gradient_nbytes + _ADDING_NBYTES * work.own_numel)
        yield script.ThreadWork((adding,), frozenset(), (sent,))
