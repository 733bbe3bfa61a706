"""Measures a machine in all processes that train together on it, and the links between them."""

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.machine import Machine
from hf_patrickstar.memory.accelerator import find_device
from hf_patrickstar.memory.streams import seconds_of
from hf_patrickstar.report.measure import Effort, measure_machine
from hf_patrickstar.units import ALIGNMENT_NUMEL, align

_CPU = torch.device("cpu")


def measure_together(
    effort: Effort | None = None,
    progress: Callable[[list[str]], Iterable[str]] = lambda names: names,
    visit: Callable[[], float] | None = None,
) -> Machine:
    """Measures the machine as each of several processes has it while all of them work, and their links.

    All processes of the default group call it, and measure each figure at the same time: cores, memory and buses that
    they share are then shared as in training. The figures are medians over the processes. Gathers have the sizes of
    large chunks, and of the smallest one; messages are those with which the processes agree on what they do. Of small
    gathers and of messages each process takes the mean of many.

    Args:
        effort: How much work goes into it.
        progress: As for ``measure_machine``.
        visit: As for ``measure_machine``; each process has an engine of its own in it.

    Returns:
        A machine with a device for each process, the same in all processes.

    Raises:
        CollectiveError: If a process is missing.
    """
    effort, device = effort or Effort(), find_device(None)
    with contextlib.closing(Collectives.connect(None, device)) as collectives:
        size, links = collectives.world_size, dict[str, float]()
        numel = align(max(effort.nbytes // (4 * size), 1))

        def gathering(numel: int) -> Callable[[], object]:
            buffer = torch.ones(size * numel, device=device)
            return lambda: collectives.all_gather(buffer, "what is measured").join()

        measures: dict[str, Callable[[], float]] = {
            "link_bandwidth": lambda: (size - 1) * numel * 4 / _median(device, gathering(numel), effort.repetitions),
            "link_latency_s": lambda: _mean(device, gathering(ALIGNMENT_NUMEL), effort.calls),
            "message_s": lambda: _mean(_CPU, lambda: collectives.exchange([0], "measures messages"), effort.calls),
        }

        def at_once(names: Sequence[str]) -> Iterator[str]:
            for name in progress([*names, *measures]):
                collectives.exchange([0], f"measures {name}")
                if name in measures:
                    links[name] = measures[name]()
                else:
                    yield name

        machine = measure_machine(effort, at_once, visit)
        host_nbytes = machine.host_nbytes // collectives.local_world_size
        machine = dataclasses.replace(machine, num_devices=size, host_nbytes=host_nbytes, **links)  # type: ignore[arg-type]
        return _median_of(collectives.exchange(machine, "compares what was measured"))


def _mean(device: torch.device, work: Callable[[], object], calls: int) -> float:
    """Seconds of work that a step does often, the mean of so many calls; in all processes equally often.

    Now and then one process waits long for another. A step contains such waits, and a median leaves them out.
    """
    work()

    def all_calls() -> None:
        for _ in range(calls):
            work()

    return seconds_of(device, all_calls) / calls


def _median(device: torch.device, work: Callable[[], object], repetitions: int) -> float:
    """Seconds of work, after it was done once; in all processes equally often."""
    work()
    return statistics.median(seconds_of(device, work) for _ in range(repetitions))


def _median_of(machines: Sequence[Machine]) -> Machine:
    """A machine whose rates are in the middle of those of several processes; names and sizes are those of the first."""
    numbers: dict[str, Any] = {}
    for field in dataclasses.fields(Machine):
        values = [getattr(machine, field.name) for machine in machines]
        if all(isinstance(value, float) for value in values):
            numbers[field.name] = statistics.median(values)
    common = [name for name in machines[0].flops if all(name in machine.flops for machine in machines)]
    flops = {name: statistics.median([machine.flops[name] for machine in machines]) for name in common}
    return dataclasses.replace(machines[0], flops=flops, **numbers)
