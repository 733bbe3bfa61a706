"""Which chunks live in the device margin, optimizer states and all (PatrickStar section 8.2)."""

import dataclasses
import heapq
import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from hf_patrickstar.schedule.placement import ChunkBytes
from hf_patrickstar.schedule.trace import StepKind, Trace
from hf_patrickstar.units import format_nbytes

_NUM_ROUNDS = 3
_LARGE = 3
"""A chunk of more than so many times the mean is large: that of an embedding or of a head, say."""
AS_FAST = 1.01
"""Steps whose times differ by less are equally fast: the clock knows computation only roughly."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepCost:
    """What a step costs: its time by the simulator's clock, and the bytes that cross between the tiers.

    Attributes:
        duration_ns: How long the step takes.
        moved_nbytes: Bytes that cross.
        copying_ns: How long its end has to wait for copies and collectives: their part of the critical path.
        updating_ns: How long its end has to wait for the host's thread, likewise.
        num_steps: How many steps this is the sum of: one of each bucket of inputs.
    """

    duration_ns: int
    moved_nbytes: int
    copying_ns: int = 0
    updating_ns: int = 0
    num_steps: int = 1

    @property
    def seconds(self) -> float:
        """Seconds of one step."""
        return self.duration_ns / self.num_steps / 1e9


def needed_nbytes(
    traces: Sequence[Trace], kept: frozenset[int], unusable_nbytes: int
) -> list[tuple[int, frozenset[int]]]:
    """What the device must have room for at each moment: bytes, and the moving chunks that are in use then.

    Args:
        traces: The recorded traces.
        kept: Chunks that are at home on the device: they do not move.
        unusable_nbytes: Bytes of the device that chunks may not take even where non-model data leaves them.
    """
    needs = []
    for trace in traces:
        is_update = trace.kind is StepKind.UPDATE
        for visit in trace.visits:
            in_use = frozenset() if is_update else frozenset({visit.chunk_index, *visit.pinned}) - kept
            chunks = sum(trace.chunk_nbytes[index] for index in in_use)
            needs.append((max(visit.non_model_nbytes, unusable_nbytes) + visit.gradient_nbytes + chunks, in_use))
    return needs


def in_order(chunk_indices: Iterable[int], traces: Sequence[Trace]) -> list[int]:
    """Chunks in the order in which steps need them first; those that none needs come last.

    Args:
        chunk_indices: The chunks.
        traces: The recorded traces.
    """
    first: dict[int, int] = {}
    for trace in traces:
        for moment, visit in enumerate(trace.visits):
            first[visit.chunk_index] = min(moment, first.get(visit.chunk_index, moment))
    last = max(first.values(), default=0) + 1
    return sorted(chunk_indices, key=lambda index: (first.get(index, last), index))


def fill_margin(
    chunks: Sequence[ChunkBytes],
    traces: Sequence[Trace],
    device_nbytes: int,
    prefetched: Sequence[int],
    kept: frozenset[int] = frozenset(),
    unusable_nbytes: int = 0,
    *,
    copies_stay: bool = False,
) -> tuple[int, ...]:
    """Finds the chunks that the margin has room for.

    The margin is the memory that the device has left at every moment of every trace beside non-model data, the chunks
    in use and the prefetched copy. Large chunks come first: whatever waits for one waits for its whole update and
    copy. Then come those of the first layers: their gradients arrive last in backward, and their parameters are needed
    first in forward, when no computation could hide the copies.

    Args:
        chunks: The bytes of every chunk that may move its home.
        traces: The recorded traces; not empty.
        device_nbytes: Bytes for chunks and non-model data, without workspaces.
        prefetched: Bytes that each chunk takes where it is brought in ahead, by chunk index: room for the largest
            that still moves is kept free.
        kept: Chunks that are at home on the device whatever happens; their bytes are taken off ``device_nbytes``.
        unusable_nbytes: Bytes of the device that chunks may not take even where non-model data leaves them.
        copies_stay: Whether a chunk in the margin still needs a copy to be computed with: with several processes what
            is at home is only a part of its group.

    Returns:
        Chunk indices, the first to move in first.
    """
    by_index = {chunk.chunk_index: chunk for chunk in chunks}
    needs = needed_nbytes(traces, frozenset() if copies_stay else kept, unusable_nbytes)
    highest = _Highest([nbytes for nbytes, _ in needs])
    moments: dict[int, list[int]] = {}  # at which each chunk is in use
    for moment, (_, indices) in enumerate(needs):
        for index in indices:
            moments.setdefault(index, []).append(moment)
    ahead = _Highest([nbytes if index in moments else 0 for index, nbytes in enumerate(prefetched)])
    homed: list[int] = []
    taken = 0
    large = _LARGE * statistics.mean([chunk.param_nbytes for chunk in chunks]) if chunks else 0
    for index in sorted(in_order(by_index, traces), key=lambda index: by_index[index].param_nbytes <= large):
        chunk = by_index[index]
        if index in kept:
            continue
        used = () if copies_stay else moments.get(index, ())
        highest.lower(used, chunk.param_nbytes)
        ahead.lower([index] if used else (), prefetched[index])
        if taken + chunk.device_nbytes + highest.value + ahead.value <= device_nbytes:
            homed.append(index)
            taken += chunk.device_nbytes
        elif chunk.param_nbytes <= large:
            break
        else:
            highest.lower(used, -chunk.param_nbytes)
            ahead.lower([index] if used else (), -prefetched[index])
    return tuple(homed)


class _Highest:
    """The highest of numbers of which some become lower, or are set back."""

    def __init__(self, values: list[int]) -> None:
        self._values = values
        self._heap = [(-value, place) for place, value in enumerate(values)]
        heapq.heapify(self._heap)

    @property
    def value(self) -> int:
        """The highest; 0 if there are none."""
        while self._heap:
            known, place = -self._heap[0][0], self._heap[0][1]
            if known == self._values[place]:
                return known
            heapq.heapreplace(self._heap, (-self._values[place], place))
        return 0

    def lower(self, places: Iterable[int], amount: int) -> None:
        """Lowers the numbers of some places; a negative amount sets them back."""
        for place in places:
            self._values[place] -= amount
            if amount < 0:
                heapq.heappush(self._heap, (-self._values[place], place))


def plan_margin(
    chunks: Sequence[ChunkBytes],
    candidates: Sequence[int],
    cost_of: Callable[[frozenset[int]], StepCost | None],
    machine_name: str,
    least: int = 0,
) -> tuple[tuple[int, ...], str]:
    """Decides how many of the chunks that fit the margin are worth it.

    A chunk in the margin neither crosses the bus nor is updated on the host. But the same bytes of the device could
    keep parameters of several other chunks from forward to backward, or hold copies that are brought in ahead. So
    several numbers of chunks are compared by the time of a step: none, half, all, and those around the best. Of those
    that are equally fast, the one that moves least is chosen.

    Args:
        chunks: The bytes of every chunk that may move its home.
        candidates: What ``fill_margin`` found.
        cost_of: What a step costs if these chunks live in the margin; ``None`` if it cannot work.
        machine_name: Whose rates the times follow.
        least: So many of the candidates, the first ones, live there in any case: the host has no room for them.

    Returns:
        The chunks, in the order in which they move in, and why.
    """
    sizes = {chunk.chunk_index: chunk.device_nbytes for chunk in chunks}
    costs: dict[int, StepCost | None] = {}  # by how many of the candidates live in the margin
    most = len(candidates)
    width = most / 2
    counts = [0, int(width), most]
    for _ in range(_NUM_ROUNDS):
        for count in {min(max(count, least), most) for count in counts} - costs.keys():
            costs[count] = cost_of(frozenset(candidates[:count]))
        known = {count: cost for count, cost in costs.items() if cost is not None}
        if not known:
            return (), "the device margin is empty: the recorded steps leave no room"
        limit_ns = min(cost.duration_ns for cost in known.values()) * AS_FAST
        count = min(
            (count for count, cost in known.items() if cost.duration_ns <= limit_ns),
            key=lambda count: (known[count].moved_nbytes, known[count].duration_ns, count),
        )
        width /= 2  # half way to its neighbours, and one chunk at least
        counts = [math.floor(count - width), math.ceil(count + width)]
    chosen = tuple(candidates[:count])
    taken = format_nbytes(sum(sizes[index] for index in chosen))
    return (
        chosen,
        f"{count} of {len(chunks)} chunks stay on the device with their optimizer states ({taken}; {most} would fit)"
        + f". Of {len(costs)} simulated numbers it is the fastest, at the rates of '{machine_name}'" * (len(costs) > 1)
        + f". At least {least} have to stay there, because the host is full" * (least > 0),
    )
