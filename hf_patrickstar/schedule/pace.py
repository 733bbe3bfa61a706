"""How long a chunk takes on its way, by the rates of a machine.

It decides chunk sizes, how far ahead loads begin, and how much of the optimizer's work fits beside backward.
"""

import itertools
import math
from collections.abc import Sequence

from hf_patrickstar.machine import Machine
from hf_patrickstar.schedule.bounds import ADAM_NBYTES
from hf_patrickstar.schedule.sketch import ChunkWork, num_rows
from hf_patrickstar.schedule.trace import Trace

_LEAD_NS = 20_000_000
"""How much of the bus's time may be under way ahead: enough for a head of 0.5 GB on PCIe 4."""
_LEAST_DEPTH, _MOST_DEPTH = 2, 8
_OPERATORS_PER_CHUNK = 10
"""What the host does for a chunk in a step, in launches of operators: copies, events, the update."""


def exposed_ns(num_chunks: int, chunk_numel: int, itemsize: float, machine: Machine) -> int:
    """What copies and updates add to a step, where all of it runs beside computation but its two ends.

    The first chunk has to be updated and to arrive before forward can begin, and the gradients of the last one leave
    when backward has ended. Every copy takes a latency beside its bytes, and every chunk the host some of its time. So
    neither the largest chunks nor the smallest are the fastest.

    Args:
        num_chunks: How many chunks there are.
        chunk_numel: Elements of a chunk.
        itemsize: Bytes of an element on the device.
        machine: Its rates.
    """
    nbytes = round(chunk_numel * itemsize)
    ends = machine.host_ns(0, ADAM_NBYTES * chunk_numel)
    ends += machine.copy_ns(nbytes, to_device=True) + machine.copy_ns(nbytes, to_device=False)
    latency = machine.copy_ns(0, to_device=True) + machine.copy_ns(0, to_device=False)
    return ends + num_chunks * (latency + _OPERATORS_PER_CHUNK * machine.operator_ns)


def choose_depth(chunk_nbytes: int, machine: Machine) -> tuple[int, str]:
    """Decides how many chunks may be loaded ahead.

    Args:
        chunk_nbytes: Bytes of a chunk on the device.
        machine: Its rates.

    Returns:
        The number, and why.
    """
    copy_ns = machine.copy_ns(chunk_nbytes, to_device=True)
    depth = min(max(math.ceil(_LEAD_NS / copy_ns), _LEAST_DEPTH), _MOST_DEPTH)
    return depth, (
        f"prefetch_depth=auto: {depth} chunks are loaded ahead; by the rates of '{machine.name}' a chunk takes "
        f"{copy_ns / 1e6:.2f} ms on the bus"
    )


def share_beside_backward(
    trace: Trace, works: Sequence[ChunkWork], machine: Machine, share_carried: float = 0.0
) -> float:
    """The share of all updates that the host makes beside backward; see [Note: updates on both sides].

    [Note: updates on both sides]
    Gradients arrive from the last layer to the first, and the next forward needs values from the first layer to the
    last. Were chunks updated as they arrive until there is no time left, all that is left would belong to the first
    layers: forward would stand still there, and then the host beside the other layers. So the same share of every part
    of the model is updated beside backward, and the rest beside forward.

    At most as much as the host can do in backward should be done there, and at least so much that it has time for the
    rest in forward. Between both the share is in the middle. Where the host has not the time for all, it works on both
    sides in the proportion in which the device does: so it stays right where operators that are not counted here make
    both longer, and the host has the time after all.

    By the rates of the machine each matrix is multiplied once with each row in forward, and twice in backward, or three
    times where backward computes forward again. Forward lasts at least as long as its copies, and backward as long as
    gradients take to the host.

    Args:
        trace: The visits of a micro-batch.
        works: What is done with each chunk, by chunk index.
        machine: Its rates.
        share_carried: The share of the bytes of all chunks that are on the device when forward begins.
    """
    computing_ns, copying_ns, sending_ns = _lanes_ns(trace, works, machine, is_forward=True)
    forward_ns = max(computing_ns, round((1 - share_carried) * copying_ns), sending_ns)
    backward_ns = max(_lanes_ns(trace, works, machine, is_forward=False))
    updating_ns = max(_updating_ns(works, machine), 1)
    least, most = max(1 - forward_ns / updating_ns, 0.0), min(backward_ns / updating_ns, 1.0)
    if least > most:
        return min(backward_ns / max(computing_ns + backward_ns, 1), least)
    return (least + most) / 2


def share_to_carry(trace: Trace, works: Sequence[ChunkWork], machine: Machine, share_updated: float) -> float:
    """The share of the bytes of all chunks without which forward copies no longer than it has to last anyway.

    It lasts as long as the device computes, and as long as the host takes for the updates that are left.

    Args:
        trace: The visits of a micro-batch.
        works: What is done with each chunk, by chunk index.
        machine: Its rates.
        share_updated: The share of all updates that the host makes beside backward.
    """
    computing_ns, copying_ns, _ = _lanes_ns(trace, works, machine, is_forward=True)
    lasting_ns = max(computing_ns, round((1 - share_updated) * _updating_ns(works, machine)))
    return max(1 - lasting_ns / copying_ns, 0.0) if copying_ns else 0.0


def _updating_ns(works: Sequence[ChunkWork], machine: Machine) -> int:
    """How long the host takes for all of its updates."""
    return machine.host_ns(0, ADAM_NBYTES * sum(work.own_numel for work in works if not work.is_static))


def _lanes_ns(trace: Trace, works: Sequence[ChunkWork], machine: Machine, *, is_forward: bool) -> tuple[int, int, int]:
    """How long computing, copying and sending take in one direction."""
    end = trace.forward_ends[-1] if trace.forward_ends else len(trace.visits)
    visits = trace.visits[:end] if is_forward else trace.visits[end:]
    chosen = [works[index] for index in {visit.chunk_index for visit in visits}]
    moved = [work for work in chosen if not work.is_static]
    num_products = 1 if is_forward else 3 if _is_recomputed(trace, end) else 2
    flops = 2 * num_products * num_rows(trace.shapes[0])
    return (
        sum(machine.kernel_ns(flops * work.matrix_numel, 0, work.dtype) for work in chosen),
        sum(machine.copy_ns(work.gradient_nbytes, to_device=is_forward) for work in moved),
        sum(machine.collective_ns(work.sent_nbytes) for work in moved if work.sent_nbytes),
    )


def _is_recomputed(trace: Trace, end: int) -> bool:
    """Whether backward computes most of forward again: it then visits chunks in the order in which forward does."""
    indices = [visit.chunk_index for visit in trace.visits]
    in_forward = set(itertools.pairwise(indices[:end]))
    in_backward = list(itertools.pairwise(indices[end:]))
    return 2 * sum(pair in in_forward for pair in in_backward) > len(in_backward)
