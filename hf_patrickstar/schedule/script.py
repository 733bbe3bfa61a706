"""What a step does beside what its plans move: work and waits in order, for any machine. Pure data.

A step begins with the update by the gradients of the last one, which goes on beside what comes next; then come forward
and backward of every micro-batch. Each micro-batch follows a plan of its own, which begins with its forward.
"""

import dataclasses
import enum

from hf_patrickstar.machine import Machine

TILE_NUMEL = 2**22
"""Elements that cross together for an update over the bus: about a millisecond of copies, so that nothing else that
crosses waits for long."""
TILE_PARTS = (1, 4)
"""By how much tiles are divided, in the order in which it is tried: where the device has no room for slots of whole
tiles, smaller ones may have room. Each tile costs the host time for launches."""


class Part(enum.StrEnum):
    """A part of a step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceOp:
    """An operator on the device.

    Attributes:
        name: The operator.
        flops: Floating-point operations of matrix products.
        nbytes: Bytes read and written.
        dtype: The type that it computes in.
        kind: The kind of product; see ``Machine.kernel_ns``.
        place: Where the host waits for its result; empty if it does not.
        measured_ns: How long it took on the machine that was planned; ``None`` if the rates of a machine say it.
    """

    name: str
    flops: int
    nbytes: int
    dtype: str
    kind: str = ""
    place: str = ""
    measured_ns: int | None = None

    def duration_ns(self, machine: Machine) -> int:
        """Nanoseconds of the device.

        Args:
            machine: Where it runs.
        """
        if self.measured_ns is not None:
            return self.measured_ns
        return machine.kernel_ns(self.flops, self.nbytes, self.dtype, self.kind)


@dataclasses.dataclass(frozen=True, slots=True)
class HostWork:
    """An operator on memory of the host.

    Attributes:
        name: The operator.
        flops: Floating-point operations of matrix products.
        nbytes: Bytes read and written.
        num_calls: How many operators it stands for; each is called by itself.
        disk_nbytes: Bytes that are read from the disk before it and written there after it, tile by tile.
    """

    name: str
    flops: int
    nbytes: int
    num_calls: int = 1
    disk_nbytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ThreadWork:
    """Work that the host gives to its thread: operators on memory of the host, beside what the host does next.

    Attributes:
        operators: What the thread does, in order.
        chunk_indices: The chunks whose homes it writes: copies of these come after it.
        after: Which ``Send`` s it comes after, counted as for ``Join``.
    """

    operators: tuple[HostWork, ...]
    chunk_indices: frozenset[int]
    after: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class BlockingCopy:
    """A copy between the tiers that comes after computation and stops the host.

    Attributes:
        nbytes: Bytes that cross.
        to_device: The direction.
        is_pinned: Whether the host memory is page-locked.
        place: Where in the program.
    """

    nbytes: int
    to_device: bool
    is_pinned: bool
    place: str


@dataclasses.dataclass(frozen=True, slots=True)
class Send:
    """A copy from the device into the home of a chunk, in a lane of its own.

    Attributes:
        chunk_index: The chunk.
        nbytes: Bytes that cross.
    """

    chunk_index: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Keep:
    """Autograd keeps an activation that may leave the device.

    Attributes:
        number: Which one of ``Trace.activations``.
    """

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Restore:
    """Backward needs an activation that may have left the device; the one kept before it is brought back next.

    Attributes:
        number: Which one of ``Trace.activations``.
    """

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Reduce:
    """A reduce-scatter of several processes, in a lane of its own, after all that the compute lane was given.

    Attributes:
        nbytes: Bytes that this process sends.
    """

    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """The host exchanges a few numbers with the hosts of all other processes, and waits for theirs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Join:
    """The compute lane goes on after a ``Send`` or a ``Reduce``.

    Attributes:
        number: Which one of these and ``ThreadWork``, counted from 0.
    """

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Reach:
    """The micro-batch comes to the next moment of its trace, where the plan has actions.

    Attributes:
        chunk_index: The chunk that is visited.
    """

    chunk_index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Await:
    """The host waits for the update of a chunk on the host: it reads rows of an embedding there.

    Attributes:
        chunk_index: The chunk.
    """

    chunk_index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Begin:
    """A part of the step begins, in the order in which the host puts it into lanes.

    Attributes:
        part: Which one.
    """

    part: Part


_OfCopies = Send | Reduce | Join | Keep | Restore
Entry = DeviceOp | HostWork | ThreadWork | BlockingCopy | Message | Reach | Await | Begin | _OfCopies


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What it takes to bring a chunk to the device.

    Attributes:
        nbytes: Bytes that this process has at home.
        sent_nbytes: Bytes that it sends to other processes, which gather the chunk; 0 with one process.
        is_here: Whether its home is the device: then nothing crosses the bus.
        states_nbytes: What crosses to the device, and back, in place of its bytes when it is loaded first after the
            optimizer's step, if the device updates it then; see [Note: updates over the bus].
        num_tiles: How many pieces it crosses in then.
    """

    nbytes: int
    sent_nbytes: int = 0
    is_here: bool = False
    states_nbytes: tuple[int, ...] = ()
    num_tiles: int = 0
