"""Replays a step on a machine: puts its work on the clock, by any plan."""

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hf_patrickstar.machine import Machine
from hf_patrickstar.schedule import script
from hf_patrickstar.schedule.clock import Clock, Lane, Mark, Timeline
from hf_patrickstar.schedule.move_plan import MovePlan

_LAUNCHES_PER_TILE = 14
"""Copies of lists, and kernels, of a tile that is updated over the bus."""
LOADS = "the update of a chunk that is loaded"
LOADS_TOGETHER = "the update of a chunk that is gathered"
WAITS_FOR_ARRIVAL = "the update of a chunk that is used"
LOOKS_UP = "the update of a chunk whose rows are looked up"
"""What the host waits for where chunks are updated on the host."""


class Player:
    """Puts work on the clock of a machine.

    Args:
        machine: The machine.

    Attributes:
        clock: The time.
        machine: The machine.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.clock = Clock()
        self._launch_ns = machine.operator_ns
        # How long kernels take, and what their launches are called, by the id of the kernel; how long operators take,
        # by the id of their tuple. Nothing else has the id while the object is here.
        self._kernels: dict[int, tuple[script.DeviceOp, int, str]] = {}
        self._works: dict[int, tuple[tuple[script.HostWork, ...], int]] = {}

    def kernel(self, work: script.DeviceOp) -> None:
        """The host launches an operator on the device."""
        machine, clock = self.machine, self.clock
        known = self._kernels.get(id(work))
        if known is None:
            known = self._kernels[id(work)] = work, work.duration_ns(machine), f"launch {work.name}"
        _, duration_ns, launch = known
        clock.host(self._launch_ns, launch)
        end = clock.put(Lane.COMPUTE, duration_ns, work.name)
        if work.place:
            clock.wait(end, work.place)
        elif not machine.has_accelerator:
            clock.follow(Lane.HOST, end)  # which computes itself

    def visit(self) -> None:
        """The host runs the engine, because a module begins or backward needs a chunk."""
        self.clock.host(self.machine.visit_ns, "visit")

    def host_work(self, work: script.HostWork) -> None:
        """The host runs an operator on its own memory."""
        machine, disk = self.machine, self._disk(work.disk_nbytes)
        self.clock.host(work.num_calls * machine.operator_ns + machine.host_ns(work.flops, work.nbytes), work.name)
        self.clock.wait(disk, "the disk")

    def _disk(self, nbytes: int) -> Mark:
        """Reads and writes on the disk; returns its end."""
        return self.clock.put(Lane.DISK, self.machine.disk_ns(nbytes), "update states") if nbytes else Mark()

    def thread_work(self, work: script.ThreadWork, after: Iterable[Mark]) -> Mark:
        """The host gives work to its thread, which has workers: one launches its operator while others compute.

        Args:
            work: The work.
            after: What it comes after.

        Returns:
            Its end.
        """
        machine, clock = self.machine, self.clock
        clock.host(machine.operator_ns, "give work to the thread")
        for mark in after:
            clock.follow(Lane.HOST_WORK, mark)
        cost, disk = self._work_ns(work.operators), self._disk(sum(each.disk_nbytes for each in work.operators))
        chunks = ", ".join(map(str, sorted(work.chunk_indices)))
        return max(disk, clock.put(Lane.HOST_WORK, cost, f"update chunks {chunks}" if chunks else "add gradients"))

    def _work_ns(self, operators: tuple[script.HostWork, ...]) -> int:
        """How long the thread works; updates that are alike share their operators, thousands for a large chunk."""
        known = self._works.get(id(operators))
        if known is not None:
            return known[1]
        machine = self.machine
        launching = machine.operator_ns * sum(operator.num_calls for operator in operators)
        computing = sum(machine.host_ns(operator.flops, operator.nbytes) for operator in operators)
        cost = launching + computing if machine.num_cores == 1 else max(launching, computing)
        self._works[id(operators)] = operators, cost
        return cost

    def blocking_copy(self, copy: script.BlockingCopy) -> None:
        """The host makes a copy, and waits for it."""
        machine, clock = self.machine, self.clock
        clock.host(machine.operator_ns, "start a copy")
        lane = lane_of(to_device=copy.to_device)
        clock.follow(lane, clock.end_of(Lane.COMPUTE))
        cost = machine.copy_ns(copy.nbytes, to_device=copy.to_device, is_pinned=copy.is_pinned)
        end = clock.put(lane, cost, "a blocking copy")
        clock.follow(Lane.COMPUTE, end)
        clock.wait(end, copy.place)

    def send(self, nbytes: int, what: str, *, to_device: bool, is_here: bool = False) -> Mark:
        """The host starts a copy in the lane of its direction; what it comes after was said before.

        Args:
            nbytes: Bytes that are copied.
            what: What it is.
            to_device: The direction.
            is_here: Whether they are on the device already, and are read and written there.

        Returns:
            Its end.
        """
        machine = self.machine
        self.clock.host(machine.operator_ns, "start a copy")
        cost = machine.kernel_ns(0, 2 * nbytes, "") if is_here else machine.copy_ns(nbytes, to_device=to_device)
        if not machine.has_accelerator:
            self.clock.host(cost // machine.num_cores, "a core copies")  # which computes meanwhile
        return self.clock.put(lane_of(to_device=to_device), cost, what)

    def gather(self, nbytes: int) -> Mark:
        """The host starts an all-gather, which comes after what was loaded so far.

        Args:
            nbytes: Bytes that this process sends.

        Returns:
            Its end.
        """
        self.clock.follow(Lane.GATHERS, self.clock.end_of(Lane.TO_DEVICE))
        end = self._collective(Lane.GATHERS, nbytes, "gather")
        if not self.machine.has_accelerator:  # threads of gloo take a core, which would compute meanwhile
            self.clock.host(self.machine.collective_ns(nbytes) // self.machine.num_cores, "a core gathers")
        return end

    def reduce(self, work: script.Reduce) -> Mark:
        """The host starts a reduce-scatter; returns its end."""
        self.clock.follow(Lane.REDUCTIONS, self.clock.end_of(Lane.COMPUTE))
        end = self._collective(Lane.REDUCTIONS, work.nbytes, "reduce")
        if not self.machine.has_accelerator:
            self.clock.wait(end, "a reduction")  # on gloo the thread that computes adds what it receives
        return end

    def _collective(self, lane: Lane, nbytes: int, what: str) -> Mark:
        self.clock.host(self.machine.operator_ns, f"start to {what}")
        return self.clock.put(lane, self.machine.collective_ns(nbytes), f"{what}, {nbytes} bytes sent")

    def message(self) -> None:
        """The host exchanges a message with all other processes."""
        self.clock.host(self.machine.message_ns, "exchange a message")


def lane_of(*, to_device: bool) -> Lane:
    """The lane of copies in one direction."""
    return Lane.TO_DEVICE if to_device else Lane.TO_HOST


def replay(
    entries: Sequence[script.Entry], plans: Sequence[MovePlan], loads: Sequence[script.Load], machine: Machine
) -> Timeline:
    """Replays a step by the plans of its micro-batches.

    Args:
        entries: What the step does.
        plans: What moves at which moment of each micro-batch.
        loads: What it takes to load each chunk, by chunk index.
        machine: Where it runs.

    Returns:
        The timeline from an idle machine to the end of all work.
    """
    return _Replay(plans, loads, machine).run(entries)


def device_ns(entries: Iterable[script.Entry], machine: Machine) -> list[tuple[script.Part, int]]:
    """How long the compute lane works for each part of a step, in the order of the parts.

    Args:
        entries: What the step does.
        machine: Where it runs.
    """
    parts: list[tuple[script.Part, int]] = []
    for entry in entries:
        if isinstance(entry, script.Begin):
            parts.append((entry.part, 0))
        elif isinstance(entry, script.DeviceOp):
            part, nanoseconds = parts[-1]
            parts[-1] = (part, nanoseconds + entry.duration_ns(machine))
    return parts


class _Replay:
    def __init__(self, plans: Sequence[MovePlan], loads: Sequence[script.Load], machine: Machine) -> None:
        self._player = Player(machine)
        self._clock = self._player.clock
        self._plans = iter(plans)
        self._loads = loads
        self._sent: list[Mark] = []
        self._last = collections.defaultdict[tuple[int, bool], Mark](Mark)  # the last copy of a chunk in a direction
        self._works = collections.defaultdict[int, Mark](Mark)  # the last work of the host's thread on a chunk's home
        self._arrivals: dict[int, Mark] = {}  # copies that were started ahead, and nobody has waited for
        self._to_update = {index for index, load in enumerate(loads) if load.states_nbytes}  # when they are loaded
        self._leaving: Mark | None = None  # the copy of the activation that has left last
        self._left: dict[int, int] = {}  # bytes of activations that are on the host, by number
        self._back: dict[int, Mark] = {}  # copies of activations that come back ahead

    def run(self, entries: Sequence[script.Entry]) -> Timeline:
        player, clock, sent = self._player, self._clock, self._sent
        play: dict[type, Callable[[Any], object]] = {
            script.DeviceOp: player.kernel,
            script.HostWork: player.host_work,
            script.BlockingCopy: player.blocking_copy,
            script.Message: lambda _: player.message(),
            script.ThreadWork: self._work,
            script.Reach: lambda entry: self._reach(entry.chunk_index),
            script.Await: lambda entry: clock.wait(self._works[entry.chunk_index], LOOKS_UP),
            script.Send: lambda entry: sent.append(self._send(entry.chunk_index, entry.nbytes, to_device=False)),
            script.Reduce: lambda entry: sent.append(player.reduce(entry)),
            script.Join: lambda entry: clock.follow(Lane.COMPUTE, sent[entry.number]),
            script.Keep: lambda entry: self._keep(entry.number),
            script.Restore: lambda entry: self._restore(entry.number),
            script.Begin: lambda entry: self._begin(entry.part),
        }
        for entry in entries:
            play[type(entry)](entry)
        return clock.timeline()

    def _begin(self, part: script.Part) -> None:
        if part is script.Part.FORWARD:
            self._plan = next(self._plans)
            self._moments = iter(self._plan.moments)
        elif part is script.Part.BACKWARD:
            self._join_leaving()

    def _reach(self, visited: int) -> None:
        for index in next(self._moments).load:
            load = self._loads[index]
            if load.sent_nbytes or index == visited:
                self._clock.wait(self._works[index], LOADS_TOGETHER if load.sent_nbytes else LOADS)
            if index in self._to_update:
                end = self._update(index, load)
            if load.sent_nbytes or index not in self._to_update:
                end = self._send(index, load.nbytes, to_device=True, is_here=load.is_here)
            self._to_update.discard(index)
            if load.sent_nbytes:
                end = self._player.gather(load.sent_nbytes)
            elif index == visited:
                self._clock.follow(Lane.COMPUTE, end)
                continue
            self._arrivals[index] = end
        if visited in self._arrivals:
            self._clock.wait(self._works[visited], WAITS_FOR_ARRIVAL)
            self._clock.follow(Lane.COMPUTE, self._arrivals.pop(visited))
        self._player.visit()

    def _keep(self, number: int) -> None:
        """An activation leaves; its memory is free when the compute lane has waited for its copy."""
        self._join_leaving()
        offloaded = self._plan.offloaded
        if number < len(offloaded):
            self._left[number] = offloaded[number]
            self._leaving = self._carry(number, offloaded[number], to_device=False)

    def _join_leaving(self) -> None:
        if self._leaving is not None:
            self._clock.follow(Lane.COMPUTE, self._leaving)
            self._leaving = None

    def _restore(self, number: int) -> None:
        """Backward needs an activation; the one before it begins to come back."""
        self._bring(number)
        if number in self._back:
            self._clock.follow(Lane.COMPUTE, self._back.pop(number))
        self._bring(number - 1)

    def _bring(self, number: int) -> None:
        if number in self._left:
            self._back[number] = self._carry(number, self._left.pop(number), to_device=True)

    def _carry(self, number: int, nbytes: int, *, to_device: bool) -> Mark:
        self._clock.follow(lane_of(to_device=to_device), self._clock.end_of(Lane.COMPUTE))
        return self._player.send(nbytes, f"activation {number}, {nbytes} bytes", to_device=to_device)

    def _update(self, index: int, load: script.Load) -> Mark:
        """States of a chunk come and leave at the same time, a tile at a time."""
        clock, machine, ends = self._clock, self._player.machine, list[Mark]()
        clock.host(load.num_tiles * _LAUNCHES_PER_TILE * machine.operator_ns, "launch updates over the bus")
        clock.follow(Lane.TO_DEVICE, clock.end_of(Lane.COMPUTE))
        clock.follow(Lane.TO_HOST, clock.end_of(Lane.TO_DEVICE))
        for nbytes, to_device in zip(load.states_nbytes, (True, False), strict=True):
            crossing = round(nbytes / machine.duplex_share)
            ends.append(self._player.send(crossing, f"update chunk {index}, {nbytes} bytes", to_device=to_device))
        self._works[index] = self._last[index, False] = max(ends)
        return max(ends)

    def _work(self, work: script.ThreadWork) -> None:
        end = self._player.thread_work(work, [self._sent[number] for number in work.after])
        self._sent.append(end)
        self._works.update(dict.fromkeys(work.chunk_indices, end))

    def _send(self, index: int, nbytes: int, *, to_device: bool, is_here: bool = False) -> Mark:
        """Starts a copy after all that the compute lane was given, the last one the other way, and the thread."""
        lane = lane_of(to_device=to_device)
        self._clock.follow(lane, self._clock.end_of(Lane.COMPUTE))
        self._clock.follow(lane, self._last[index, not to_device])
        self._clock.follow(lane, self._works[index])
        end = self._player.send(nbytes, f"chunk {index}, {nbytes} bytes", to_device=to_device, is_here=is_here)
        self._last[index, to_device] = end
        return end
