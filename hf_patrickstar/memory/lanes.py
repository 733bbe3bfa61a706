"""What may run beside computation, and how to wait for it.

[Note: lanes]
On an accelerator work is put into lanes, each of which runs its work in order: the compute stream, which belongs to the
user, and one stream for copies in each direction. The host puts work into lanes and runs ahead of all of them. Nothing
orders work of different lanes but what is said here:

- A copy begins after all that the compute stream was told before the copy was started: its source is written, and
  kernels that use the memory of its target are done.
- A copy begins after the copies that its caller names (``after``): those that use the same home.
- The compute stream goes on after a copy whose ticket is joined, the host after one whose ticket is waited for.
- The memory of a gradient is held until the compute stream was told to wait for its copy.
- Work of the host's thread begins after what its caller names, and the host goes on beside it. No stream can wait for
  it: a copy that is started ahead is put into its lane by that thread, when the work is done; where another copy comes
  after it, or its ticket is joined, the host waits.

On a machine without an accelerator one thread makes the copies that are started ahead, and all others, and the work of
the host's thread, are complete when the call returns.
"""

import contextlib
import enum
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch

from hf_patrickstar.memory.tiers import Tier


class WorkLane(enum.Enum):
    """A lane beside computation: copies in one direction, or a thread of the host."""

    TO_DEVICE = "host -> device"
    TO_HOST = "device -> host"
    HOST_WORK = "host work"


class TimedCopy(NamedTuple):
    """A copy that was measured: its lane, and when it began and ended, in nanoseconds of ``time.perf_counter_ns``.

    ``is_ahead``: whether a thread made it beside the caller, who else stood still.
    """

    lane: WorkLane
    begin_ns: int
    end_ns: int
    nbytes: int
    is_ahead: bool


class Ticket(Protocol):
    """Work that may still be under way."""

    @property
    def is_done(self) -> bool:
        """Whether it is complete, as far as the host can tell."""
        ...

    def wait(self) -> None:
        """Blocks until the host may read the target, or overwrite the source."""
        ...

    def join(self) -> None:
        """Makes whatever the compute device does next come after the work."""
        ...


class Copy(Ticket, Protocol):
    """The ticket of a copy, or of work of the host's thread."""

    @property
    def lane(self) -> WorkLane:
        """The lane that it runs in."""
        ...


class Event(Protocol):
    """What ``torch.Event`` does: a point in a stream."""

    def query(self) -> bool:
        """Whether the stream has come to it."""
        ...

    def synchronize(self) -> None:
        """Blocks the host until it has."""
        ...


class Moment(Protocol):
    """What ``torch.Event`` does that has a time."""

    def synchronize(self) -> None:
        """Blocks the host until it has come."""
        ...

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from this moment to another one; both have come."""
        ...


class Begun(Protocol):
    """The event of something that may not be in its stream yet; what ``concurrent.futures.Future`` does."""

    def done(self) -> bool:
        """Whether it is in the stream, or never will be."""
        ...

    def result(self) -> Any:
        """The event, as soon as it is in the stream."""
        ...


class Stream(Protocol):
    """What ``torch.Stream`` does: work in order."""

    def wait_stream(self, other: Any, /) -> None:
        """Makes what comes next wait for all that the other stream was told."""
        ...

    def wait_event(self, event: Any, /) -> None:
        """Makes what comes next wait for an event."""
        ...

    def record_event(self) -> Event:
        """An event that comes when all is done that the stream was told."""
        ...

    def synchronize(self) -> None:
        """Blocks the host until all is done that the stream was told."""
        ...


class Driver(Protocol):
    """Where the streams of a device come from, and what copies on them."""

    def new_stream(self) -> Stream:
        """A stream."""
        ...

    def current_stream(self) -> Stream:
        """The compute stream of this thread."""
        ...

    def inside(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        """Makes a stream the current one of this thread."""
        ...

    def record_moment(self, stream: Any) -> Moment:
        """Puts a moment into a stream; see [Note: measured lanes]."""
        ...

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device."""
        ...

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor is page-locked, so that a copy of it does not block the host."""
        ...

    def copy(self, source: torch.Tensor, target: torch.Tensor, stream: Stream) -> None:
        """Puts a copy between host and device into a stream; it blocks the host if the host tensor is not pinned."""
        ...

    def on_host(
        self, work: Callable[[], None], after: Iterable[Any], otherwise: Callable[[], None] | None = None
    ) -> Event:
        """Has the host's thread do work when events have come; see ``Streams``.

        Returns:
            An event that comes when it is done; the first who waits gets what the work raised.
        """
        ...

    def begin_after(self, work: Any, stream: Stream, begin: Callable[[Any], Event]) -> "Begun":
        """Puts something into a stream when work of the host's thread is done; what comes next does not wait for it.

        Args:
            work: The event of the work, from ``on_host``.
            stream: The stream.
            begin: Puts it into the stream that it is given, and returns the event that follows.

        Returns:
            Tells that event; the first who asks gets what the work raised.
        """
        ...

    def close(self) -> None:
        """Waits for the work of the host's thread, and ends it."""
        ...

    def take(self, buffer: torch.Tensor, tier: Tier, owner: str) -> None:
        """See ``Streams``."""
        ...

    def free(self, buffer: torch.Tensor) -> None:
        """See ``Streams``."""
        ...


class Streams(Protocol):
    """Copies between host and device.

    Attributes:
        device: The compute device.
    """

    device: torch.device

    def fetch(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy] = ()) -> Copy | None:
        """Starts a copy host -> device and does not wait for it.

        Args:
            source: A host tensor.
            target: A device tensor of the same shape; nobody reads it before the ticket is joined.
            after: Copies that come before it.

        Returns:
            A ticket, or ``None`` if the copy is complete.
        """
        ...

    def to_device(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy] = ()) -> Copy | None:
        """Copies host -> device; kernels that are launched afterwards see the result.

        Args:
            source: A host tensor.
            target: A device tensor of the same shape.
            after: Copies that come before it.

        Returns:
            A ticket to wait for before the host overwrites ``source``, or ``None`` if the copy is complete.
        """
        ...

    def to_slice(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy] = ()) -> Copy | None:
        """Copies home -> device for what is launched ``beside`` afterwards.

        Args:
            source: A tensor at home, on either tier.
            target: A device tensor of the same shape.
            after: Copies that come before it.

        Returns:
            As for ``to_device``.
        """
        ...

    def beside(self) -> contextlib.AbstractContextManager[None]:
        """Work that is launched inside waits for all copies to the device so far; the compute stream goes on beside."""
        ...

    def copies_beside(self, source: torch.Tensor, target: torch.Tensor) -> bool:
        """Whether ``to_host`` would return before the copy is complete."""
        ...

    def to_host(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Copy] = ()) -> Copy | None:
        """Copies device -> host; the memory of ``source`` is held until it can be used again.

        Args:
            source: What to copy; any device, any shape.
            target: A host tensor of the same shape.
            after: Copies that come before it; if the copy is not made beside, the host must have waited for them.

        Returns:
            A ticket to wait for before the host reads ``target``, or ``None`` if the copy is complete.
        """
        ...

    def on_host(
        self, work: Callable[[], None], after: Iterable[Copy] = (), otherwise: Callable[[], None] | None = None
    ) -> Copy:
        """Has the host's thread do work beside the host, in the order of these calls.

        Args:
            work: Reads and writes memory of the host alone.
            after: What comes before it.
            otherwise: Is done in place of ``work`` if earlier work has failed and nobody has got the error yet, and
                after ``work`` if that fails. Work without it is always done.

        Returns:
            A ticket. The first who waits for this work, or for later work, gets what the work raised.

        Raises:
            BaseException: What ``work`` raised, where it is done at once; ``otherwise`` is the caller's then.
        """
        ...

    def on_tier_of(self, source: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The values of a tensor on the tier of another one; the host waits for them if they have to cross.

        Args:
            source: A tensor.
            other: A tensor on the tier where the values are needed.

        Returns:
            ``source`` itself if it is there.
        """
        ...

    def on_device(self, source: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
        """The values of a tensor on the compute device; the host waits for them if they have to cross.

        Args:
            source: A tensor on either tier.
            copy: Whether they are copied even if they are there.

        Returns:
            ``source`` itself if it is there and not copied.
        """
        ...

    def release_in_flight(self) -> None:
        """Lets go of gradients in flight: whatever the compute stream does next comes after their copies."""
        ...

    def hold_at_most(self, nbytes: int) -> bool:
        """From now on holds no more gradients in flight than that; lets go of them all if there are more.

        With 0, because the device has no room for them, the compute stream waits for each copy of a gradient. So a step
        that follows a plan does not hold what the step that was recorded for the plan had to let go of.

        Args:
            nbytes: Their bytes. Once lowered, the limit is not raised again.

        Returns:
            Whether that has freed any memory.
        """
        ...

    def take(self, buffer: torch.Tensor, tier: Tier, owner: str) -> None:
        """Is told of a buffer that is used from now on; one that was kept comes again.

        Args:
            buffer: The buffer.
            tier: Where it is.
            owner: What it is used for.
        """
        ...

    def free(self, buffer: torch.Tensor) -> None:
        """Is told of a buffer whose memory is given back."""
        ...

    def close(self) -> None:
        """Waits for the copies, and ends the threads that make them."""
        ...
