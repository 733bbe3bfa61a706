"""How long a chunk takes on its way, by the rates of a machine.

It decides chunk sizes, how far ahead loads begin, and how much of the optimizer's work fits beside backward.
"""

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


def share_beside_backward(trace: Trace, works: Sequence[ChunkWork], machine: Machine) -> float:
    """The share of all updates that the host makes beside backward; see [Note: updates on both sides].

    [Note: updates on both sides]
    Gradients arrive from the last layer to the first, and the next forward needs values from the first layer to the
    last. Were chunks updated as they arrive until there is no time left, all that is left would belong to the first
    layers: forward would stand still there, and then the host beside the other layers. So the same share of every part
    of the model is updated beside backward, and the rest beside forward.

    At most as much as the host can do in backward should be done there, and at least so much that it has time for the
    rest in forward. Between both the share is in the middle. Where the host has not the time for all, it is the larger
    one: the device then waits in backward, where it is not needed.

    By the rates of the machine each matrix is multiplied once with each row in forward, and twice in backward.
    Forward lasts at least as long as its copies, and backward as long as gradients take to the host.

    Args:
        trace: The visits of a micro-batch.
        works: What is done with each chunk, by chunk index.
        machine: Its rates.
    """
    end = trace.forward_ends[-1] if trace.forward_ends else len(trace.visits)
    rows = num_rows(trace.shapes[0])

    def duration_ns(indices: set[int], num_products: int, *, to_device: bool) -> int:
        chosen = [works[index] for index in indices]
        moved = [work for work in chosen if not work.is_static]
        flops = 2 * num_products * rows
        computing = sum(machine.kernel_ns(flops * work.matrix_numel, 0, work.dtype) for work in chosen)
        copying = sum(machine.copy_ns(work.gradient_nbytes, to_device=to_device) for work in moved)
        sending = sum(machine.collective_ns(work.sent_nbytes) for work in moved if work.sent_nbytes)
        return max(computing, copying, sending)

    forward_ns = duration_ns({visit.chunk_index for visit in trace.visits[:end]}, 1, to_device=True)
    backward_ns = duration_ns({visit.chunk_index for visit in trace.visits[end:]}, 2, to_device=False)
    updating_ns = max(machine.host_ns(0, ADAM_NBYTES * sum(work.own_numel for work in works if not work.is_static)), 1)
    least, most = max(1 - forward_ns / updating_ns, 0.0), min(backward_ns / updating_ns, 1.0)
    return max(least, (least + most) / 2)
