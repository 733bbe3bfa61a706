"""How long chunks take on their way, by the rates of a machine: in a step, and until the first one has ended.

It decides chunk sizes and how far ahead loads begin.
"""

import math
from collections.abc import Mapping, Sequence

from hf_patrickstar.machine import Machine
from hf_patrickstar.schedule.bounds import ADAM_NBYTES
from hf_patrickstar.schedule.placement import ChunkBytes

_LEAD_NS = 20_000_000
"""How much of the bus's time may be under way ahead: enough for a head of 0.5 GB on PCIe 4."""
_LEAST_DEPTH, _MOST_DEPTH = 2, 8
_OPERATORS_PER_CHUNK = 10
"""What the host does for a chunk in a step, in launches of operators: copies, events, the update."""
_PAGES_PER_CORE = 1.6e9
"""Bytes per second that the system gives to each core that asks for memory: 16 of an H200's host got 25.6 GB/s."""
_LOCKED = 21e9
"""Bytes per second that the driver locks; measured there."""


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


def seconds_to_first_step(
    chunks: Sequence[ChunkBytes],
    masters: Sequence[int],
    first: frozenset[int],
    homed: frozenset[int],
    machine: Machine,
    step_s: float,
) -> dict[str, float]:
    """Seconds of what follows each other.

    Weights come from the page cache; what tracing takes, and other programs that are loaded, is not counted.

    Args:
        chunks: The bytes of all chunks; states are zeros until they are used.
        masters: How many of those of its states are a chunk's masters.
        first: Those that are at home on the device when the engine is made, by index.
        homed: Those that are when the first step begins.
        machine: The machine.
        step_s: Seconds of a step.
    """
    pages = min(machine.num_cores * _PAGES_PER_CORE, machine.host_bandwidth)

    def nbytes(indices: frozenset[int]) -> tuple[int, int, int]:
        param, master = sum(chunks[index].param_nbytes for index in indices), sum(masters[index] for index in indices)
        return param, param + master, sum(chunks[index].state_nbytes for index in indices) - master

    all_of_them = frozenset(range(len(chunks)))
    param, made, _ = nbytes(all_of_them - first)
    _, there, _ = nbytes(first)
    _, moved, _ = nbytes(first ^ homed)
    return {
        "weights": max(made / pages, machine.has_accelerator * param / _LOCKED, machine.host_ns(0, 2 * made) / 1e9)
        + there / machine.pageable_bandwidth,
        "moving home": moved / min(machine.to_device_bandwidth, machine.to_host_bandwidth, machine.host_bandwidth / 2),
        "first step": step_s + nbytes(all_of_them - homed)[2] / pages,
    }


def describe_start(seconds: Mapping[str, float], machine: str) -> str:
    """What ``seconds_to_first_step`` returned, in a sentence.

    Args:
        seconds: What it returned.
        machine: The name of the machine.
    """
    parts = ", ".join(f"{name} {taken:.1f} s" for name, taken in seconds.items())
    total = f"about {sum(seconds.values()):.1f} s from the engine to the end of the first step"
    return f"{total} ({parts}) at the rates of '{machine}'"
