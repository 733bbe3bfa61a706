"""The least time that a step with the same copies can take on a machine. Pure numbers."""

import dataclasses
from collections.abc import Iterable, Sequence

from hf_patrickstar.layout.specs import Types
from hf_patrickstar.machine import Machine
from hf_patrickstar.schedule.clock import Lane, Timeline
from hf_patrickstar.schedule.replay import device_ns
from hf_patrickstar.schedule.script import Entry, Load, Part

ADAM_NBYTES = 28
"""Bytes that Adam reads and writes per parameter in fp32: it reads four numbers, and writes three."""
BLOCKWISE_NBYTES = 100
"""Bytes that the host could read and write while it decodes a state of 8 bits and encodes the new one: 9 ns on a core
that updates a parameter by Adam in 2.5 ns."""
OTHERS_NBYTES = 12
"""Bytes that any optimizer reads and writes: it reads a value and its gradient, and writes a value."""
ADAM = "Adam"


def update_nbytes(types: Types, num_states: int = 2) -> int:
    """What the update of an element on the host takes, as bytes that are read and written in the same time.

    Args:
        types: Its types.
        num_states: How many states it has beside the master.
    """
    return ADAM_NBYTES + (BLOCKWISE_NBYTES * num_states if types.states == "uint8" else 0)


def streaming_ns(load: Load, machine: Machine, update_nbytes: int) -> int:
    """How long the bus takes for the update of a chunk, in both directions at once, while the host updates others.

    Args:
        load: What crosses.
        machine: The machine; its host's memory has to serve both.
        update_nbytes: What an update on the host takes for an element; see ``update_nbytes``.
    """
    both = max(_crossing_ns([load], machine, to_device=to_device) for to_device in (True, False))
    left = max(machine.memory_bandwidth, machine.host_bandwidth) - machine.host_bandwidth * ADAM_NBYTES / update_nbytes
    return max(both, round(sum(load.states_nbytes) / max(left, 1.0) * 1e9))


def _crossing_ns(loads: Iterable[Load], machine: Machine, *, to_device: bool) -> int:
    nbytes = [load.states_nbytes[0 if to_device else 1] for load in loads if load.states_nbytes]
    return sum(machine.copy_ns(round(each / machine.duplex_share), to_device=to_device) for each in nbytes)


_OF_THE_HOST = (Lane.HOST, Lane.HOST_WORK)


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a step.

    Attributes:
        lanes_ns: What every lane has to do at least: nothing can be faster than the busiest one.
        first_forward_ns: The device's work of the first forward of the step.
        until_gradients_ns: The device's work from there to the last gradient: the backward, recomputation included, and
            all further micro-batches.
        update: The lane of the optimizer on the host, as it is called in ``lanes_ns``.
        streaming_ns: What the bus does for the optimizer.
    """

    lanes_ns: dict[str, int]
    first_forward_ns: int
    until_gradients_ns: int
    update: str = f"host {ADAM}"
    streaming_ns: int = 0

    @property
    def lower_ns(self) -> int:
        """``max(compute, host -> device, device -> host, gathers, reductions, optimizer on the host)``."""
        return max(self.lanes_ns.values())

    @property
    def binding(self) -> str:
        """The lane that has the most to do."""
        return max(self.lanes_ns, key=self.lanes_ns.__getitem__)

    @property
    def clipped_ns(self) -> int:
        """The bound with clipping by the norm of all gradients.

        The optimizer cannot begin before the last gradient is there. Then it can overlap with the first forward of the
        next step alone: ``(N - 1) * (forward + backward) + backward + max(forward, host)`` for N micro-batches, where
        ``host`` is the optimizer there; so it is with updates over the bus, and with states on the disk.
        """
        disk_ns = self.lanes_ns.get(Lane.DISK.value, 0)
        after = max(self.first_forward_ns, self.lanes_ns[self.update], self.streaming_ns, disk_ns)
        return max(self.lower_ns, self.until_gradients_ns + after)


def bounds_of(
    script: Sequence[Entry],
    timeline: Timeline,
    machine: Machine,
    updated_nbytes: int,
    optimizer: str = ADAM,
    loads: Sequence[Load] = (),
) -> Bounds:
    """The bounds of a step.

    Args:
        script: What the step does.
        timeline: How it went, by some plan: its copies count.
        machine: Where it ran.
        updated_nbytes: Bytes that the optimizer reads and writes on the host, at least.
        optimizer: What it is called.
        loads: What crosses with loads, for updates over the bus.
    """
    lanes = {lane.value: nanoseconds for lane, nanoseconds in timeline.busy_ns().items() if lane not in _OF_THE_HOST}
    update = f"host {optimizer}"
    first, *others = [nanoseconds for part, nanoseconds in device_ns(script, machine) if part is not Part.UPDATE]
    lanes[update] = machine.host_ns(0, updated_nbytes)
    streaming = max(_crossing_ns(loads, machine, to_device=to_device) for to_device in (True, False))
    return Bounds(lanes, first, sum(others), update, streaming)
