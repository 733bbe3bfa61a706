"""Plays a step on a machine: puts its work on the clock, by any plan. The virtual driver uses the same player."""

from collections.abc import Iterable, Sequence

from hf_patrickstar.schedule.clock import Clock, Lane, Mark, Timeline
from hf_patrickstar.schedule.machine import Machine
from hf_patrickstar.schedule.plan import Plan
from hf_patrickstar.schedule.script import (
    Await,
    AwaitLoad,
    Begin,
    BlockingCopy,
    Entry,
    HostWork,
    Join,
    Kernel,
    Part,
    Reach,
    Send,
)


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

    def kernel(self, work: Kernel) -> None:
        """The host launches an operator on the device."""
        machine, clock = self.machine, self.clock
        clock.host(machine.operator_ns, f"launch {work.name}")
        end = clock.put(Lane.COMPUTE, machine.kernel_ns(work.flops, work.nbytes, work.dtype), work.name)
        if work.place:
            clock.wait(end, work.place)

    def host_work(self, work: HostWork) -> None:
        """The host runs an operator on its own memory."""
        machine = self.machine
        self.clock.host(machine.operator_ns + machine.host_ns(work.flops, work.nbytes), work.name)

    def blocking_copy(self, copy: BlockingCopy) -> None:
        """The host makes a copy, and waits for it."""
        machine, clock = self.machine, self.clock
        clock.host(machine.operator_ns, "start a copy")
        lane = lane_of(to_device=copy.to_device)
        clock.follow(lane, clock.end_of(Lane.COMPUTE))
        cost = machine.copy_ns(copy.nbytes, to_device=copy.to_device, is_pinned=copy.is_pinned)
        end = clock.put(lane, cost, "a blocking copy")
        clock.follow(Lane.COMPUTE, end)
        clock.wait(end, copy.place)

    def send(self, nbytes: int, what: str, *, to_device: bool) -> Mark:
        """The host starts a copy in the lane of its direction; what it comes after was said before.

        Args:
            nbytes: Bytes that cross.
            what: What it is.
            to_device: The direction.

        Returns:
            Its end.
        """
        self.clock.host(self.machine.operator_ns, "start a copy")
        return self.clock.put(lane_of(to_device=to_device), self.machine.copy_ns(nbytes, to_device=to_device), what)


def lane_of(*, to_device: bool) -> Lane:
    """The lane of copies in one direction."""
    return Lane.TO_DEVICE if to_device else Lane.TO_HOST


def replay(script: Sequence[Entry], plans: Sequence[Plan], chunk_nbytes: Sequence[int], machine: Machine) -> Timeline:
    """Plays a step by the plans of its micro-batches.

    Args:
        script: What the step does.
        plans: What moves at which moment of each micro-batch.
        chunk_nbytes: Bytes of every chunk's copy, by chunk index.
        machine: Where it runs.

    Returns:
        The timeline from an idle machine to the end of all work.
    """
    return _Replay(plans, chunk_nbytes, machine).run(script)


def device_ns(script: Iterable[Entry], machine: Machine) -> list[tuple[Part, int]]:
    """How long the compute lane works for each part of a step, in the order of the parts.

    Args:
        script: What the step does.
        machine: Where it runs.
    """
    parts: list[tuple[Part, int]] = []
    for entry in script:
        if isinstance(entry, Begin):
            parts.append((entry.part, 0))
        elif isinstance(entry, Kernel):
            part, nanoseconds = parts[-1]
            parts[-1] = (part, nanoseconds + machine.kernel_ns(entry.flops, entry.nbytes, entry.dtype))
    return parts


class _Replay:
    def __init__(self, plans: Sequence[Plan], chunk_nbytes: Sequence[int], machine: Machine) -> None:
        self._player = Player(machine)
        self._clock = self._player.clock
        self._plans = plans
        self._chunk_nbytes = chunk_nbytes
        self._micro_batch = -1
        self._moment = 0
        self._sent: list[Mark] = []
        self._last: dict[tuple[int, bool], Mark] = {}  # the last copy of a chunk in a direction
        self._arrivals: dict[int, Mark] = {}  # copies that were started ahead, and nobody has waited for

    def run(self, script: Sequence[Entry]) -> Timeline:
        player, clock = self._player, self._clock
        for entry in script:
            match entry:
                case Kernel():
                    player.kernel(entry)
                case HostWork():
                    player.host_work(entry)
                case BlockingCopy():
                    player.blocking_copy(entry)
                case Send(index, nbytes, to_device):
                    self._sent.append(self._send(index, nbytes, to_device=to_device))
                case Join(number):
                    clock.follow(Lane.COMPUTE, self._sent[number])
                case Await(number, place):
                    clock.wait(self._sent[number], place)
                case AwaitLoad(index, place):
                    clock.wait(self._last[index, True], place)
                case Reach(index):
                    self._reach(index)
                case Begin(Part.FORWARD):
                    self._micro_batch += 1
                    self._moment = 0
        return clock.timeline()

    def _reach(self, visited: int) -> None:
        for index in self._plans[self._micro_batch].moments[self._moment].load:
            end = self._send(index, self._chunk_nbytes[index], to_device=True)
            if index == visited:
                self._clock.follow(Lane.COMPUTE, end)
            else:
                self._arrivals[index] = end
        self._moment += 1
        if visited in self._arrivals:
            self._clock.follow(Lane.COMPUTE, self._arrivals.pop(visited))

    def _send(self, index: int, nbytes: int, *, to_device: bool) -> Mark:
        """Starts a copy after all that the compute lane was told, and after the last one the other way."""
        lane = lane_of(to_device=to_device)
        self._clock.follow(lane, self._clock.end_of(Lane.COMPUTE))
        self._clock.follow(lane, self._last.get((index, not to_device), Mark()))
        end = self._player.send(nbytes, f"chunk {index}, {nbytes} bytes", to_device=to_device)
        self._last[index, to_device] = end
        return end
