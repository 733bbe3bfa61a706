"""How long it takes from an engine to the end of its first step, by the rates of a machine and numbers of bytes."""

from collections.abc import Mapping, Sequence

from hf_patrickstar.machine import Machine
from hf_patrickstar.schedule.placement import ChunkBytes

_PAGES_PER_CORE = 1.6e9
"""Bytes per second that the system gives to each core that asks for memory: 16 of an H200's host got 25.6 GB/s."""
_LOCKED = 21e9
"""Bytes per second that the driver locks; measured there."""


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
