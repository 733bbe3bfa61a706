"""What a step does in backward for the next one: which chunks are updated there, and which come back. Pure numbers.

[Note: chunks for the next step]
Every chunk that was updated has to cross the bus again before the next forward computes with it. Where forward copies
for longer than it computes, the device waits for the bus there, while the bus has time to spare in backward. So some of
the chunks that are updated in backward come back to the device before the step ends, as soon as backward has left
enough room for them, and stay until the next forward.

As many are carried over as forward cannot copy beside its computation, and as the device has room for beside the
chunks that forward works with. They are spread evenly over the model. The chunks of the last layers are updated first;
if only these came back, forward would still wait for the bus in the first layers.
"""

from collections.abc import Sequence

from hf_patrickstar.machine import Machine
from hf_patrickstar.schedule import pace
from hf_patrickstar.schedule.plan import Ahead, spare_nbytes
from hf_patrickstar.schedule.sketch import ChunkWork
from hf_patrickstar.schedule.trace import Trace


def plan_ahead(
    trace: Trace, capacities: Sequence[int], works: Sequence[ChunkWork], machine: Machine, prefetch_depth: int
) -> Ahead:
    """Decides what a step does in backward for the next one; see [Note: chunks for the next step].

    Args:
        trace: The visits of the last micro-batch of a step.
        capacities: Bytes for moving chunks at each moment.
        works: What is done with each chunk, by chunk index.
        machine: Its rates.
        prefetch_depth: How many chunks are loaded ahead.
    """
    end = trace.forward_ends[-1] if trace.forward_ends else len(trace.visits)
    last = {visit.chunk_index: moment for moment, visit in enumerate(trace.visits)}
    static = frozenset(index for index, work in enumerate(works) if work.is_static)
    order = [index for index in sorted(last, key=last.__getitem__) if works[index].own_numel and index not in static]
    in_backward = [index for index in order if last[index] >= end]
    unvisited = [index for index in order if last[index] < end]  # backward needs their gradients, not their values
    sizes = trace.chunk_nbytes
    waiting = moved = sum(sizes[index] for index in last if index not in static)
    # The largest share of these bytes that may be on the device when forward begins: at each moment of forward, those
    # that it has not come to yet have to fit beside what it works with.
    most = 1.0 if prefetch_depth else 0.0
    seen: set[int] = set()
    for visit, spare in zip(trace.visits[:end], spare_nbytes(trace, capacities, static, prefetch_depth), strict=False):
        most = min(most, max(spare, 0) / max(waiting, 1))
        if visit.chunk_index not in seen | static:
            seen.add(visit.chunk_index)
            waiting -= sizes[visit.chunk_index]
    share = pace.share_beside_backward(trace, works, machine, most)
    updated = spread(in_backward, sizes, share)
    nbytes = sum(sizes[index] for index in updated)
    carried = min(pace.share_to_carry(trace, works, machine, share), most)
    carried_of_updated = spread(updated, sizes, min(carried * moved / max(nbytes, 1), 1.0))
    return Ahead((*updated, *spread(unvisited, sizes, share)), carried_of_updated)


def spread(indices: Sequence[int], sizes: Sequence[int], share: float) -> tuple[int, ...]:
    """Chooses chunks with this share of all bytes, spread evenly.

    Args:
        indices: The chunks, in order.
        sizes: The bytes of each, by chunk index.
        share: From 0 to 1.
    """
    chosen = []
    due = 0.0
    for index in indices:
        due += share * sizes[index]
        if due > 0:
            chosen.append(index)
            due -= sizes[index]
    return tuple(chosen)
