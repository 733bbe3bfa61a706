"""How long a chunk takes on its way, by the rates of a machine.

It decides chunk sizes and how far ahead loads begin.
"""

import math

from hf_patrickstar.machine import Machine
from hf_patrickstar.schedule.bounds import ADAM_NBYTES

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
