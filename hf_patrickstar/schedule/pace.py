"""How long a chunk takes on its way, by the rates of a machine.

It decides chunk sizes, how far ahead loads begin, and how much of the optimizer's work fits beside backward.
"""

import collections
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


def updated_beside_backward(
    trace: Trace, works: Sequence[ChunkWork], machine: Machine, backward_ns: int | None = None
) -> int:
    """Elements that the host updates while the gradients of a backward arrive, of all that it updates.

    Args:
        trace: The visits of a micro-batch.
        works: What is done with each chunk, by chunk index.
        machine: Its rates.
        backward_ns: How long gradients arrive, if that was measured.
    """
    numel = sum(work.own_numel for work in works if not work.is_static)
    if backward_ns is None:
        backward_ns = _backward_ns(trace, works, machine)
    return min(int(numel * backward_ns / max(machine.host_ns(0, ADAM_NBYTES * numel), 1)), numel)


def _backward_ns(trace: Trace, works: Sequence[ChunkWork], machine: Machine) -> int:
    """About how long backward takes; see [Note: a sketch of a step].

    Each matrix is multiplied twice with each row, and once more if activations are computed again: a chunk is then
    visited more often than in forward.
    """
    end = trace.forward_ends[-1] if trace.forward_ends else len(trace.visits)
    before = collections.Counter(visit.chunk_index for visit in trace.visits[:end])
    after = collections.Counter(visit.chunk_index for visit in trace.visits[end:])
    rows = num_rows(trace.shapes[0])
    duration_ns = 0
    for index, num_visits in after.items():
        products = 3 if num_visits > before[index] else 2
        duration_ns += machine.kernel_ns(2 * products * rows * works[index].matrix_numel, 0, works[index].dtype)
    return duration_ns
