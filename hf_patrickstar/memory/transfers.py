"""Copies between the tiers: a side stream and events on CUDA, a copy thread on the budgeted CPU tier."""

import collections
import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy
import torch

from hf_patrickstar.units import KIB, MIB

_IN_FLIGHT_NBYTES = 64 * MIB
_AT_ONCE_NBYTES = 256 * KIB


class Ticket(Protocol):
    """A copy that may still be under way."""

    @property
    def is_done(self) -> bool:
        """Whether it is complete, as far as the host can tell."""
        ...

    def wait(self) -> None:
        """Blocks until the host may read the target, or overwrite the source."""
        ...

    def join(self) -> None:
        """Makes whatever the compute device does next come after the copy."""
        ...


class StreamTicket:
    """A copy on the side stream of a CUDA device.

    Args:
        event: The event that follows the copy.
        device: The device whose current stream joins it.
    """

    __slots__ = ("_device", "_event")

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    @property
    def is_done(self) -> bool:
        """Whether the copy has run."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Blocks the host."""
        self._event.synchronize()

    def join(self) -> None:
        """Blocks the compute stream, not the host."""
        torch.cuda.current_stream(self._device).wait_event(self._event)


class ThreadTicket:
    """A copy in the copy thread of the budgeted CPU tier.

    Args:
        future: What the thread fulfils.
    """

    __slots__ = ("_future",)

    def __init__(self, future: "concurrent.futures.Future[None]") -> None:
        self._future = future

    @property
    def is_done(self) -> bool:
        """Whether the thread has finished it."""
        return self._future.done()

    def wait(self) -> None:
        """Blocks until it has, and raises what it met."""
        self._future.result()

    join = wait


def copy_bytes(arrays: list[Any]) -> None:
    """Copies ``arrays[1]`` to ``arrays[0]`` and lets go of both, on whichever thread this is."""
    try:
        numpy.copyto(arrays[0], arrays[1])
    finally:
        arrays.clear()


class Transfers:
    """Moves bytes between host and device.

    On CUDA all copies run in order on one side stream, which first waits for the compute stream: a buffer is never
    overwritten while an earlier kernel reads it, and a gradient is never copied before it is written. On the CPU tier
    copies that are started ahead run in order in one thread, except small ones: to hand one of those to the thread
    takes longer than to make it.

    Args:
        device: The compute device.
        copy: What the copy thread does with a pair of byte arrays, target first; it lets go of them.
        at_once_nbytes: The largest copy that the thread is not asked for.
    """

    def __init__(
        self,
        device: torch.device,
        copy: Callable[[list[Any]], None] = copy_bytes,
        at_once_nbytes: int = _AT_ONCE_NBYTES,
    ) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.device = device
        self._copy = copy
        self._at_once_nbytes = at_once_nbytes
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._in_flight: collections.deque[tuple[torch.cuda.Event, torch.Tensor, int]] = collections.deque()
        self._in_flight_nbytes = 0

    def fetch(self, source: torch.Tensor, target: torch.Tensor) -> Ticket | None:
        """Starts a copy host -> device and does not wait for it.

        Args:
            source: A host tensor.
            target: A device tensor of the same shape; nobody reads it before the ticket is joined.

        Returns:
            A ticket, or ``None`` if the copy is complete.
        """
        if self._stream is not None:
            return StreamTicket(self._copy_on_stream(source, target), self.device)
        if source.nbytes <= self._at_once_nbytes or type(source) is not torch.Tensor:  # a fake tensor has no bytes
            target.copy_(source)
            return None
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="hf_patrickstar-copy")
        # One memcpy: torch's own copy would start a second team of threads beside that of the computation. The list
        # is emptied by the copy itself: when it is done nothing looks into the buffers any more.
        arrays = [tensor.view(torch.uint8).numpy() for tensor in (target, source)]
        return ThreadTicket(self._thread.submit(self._copy, arrays))

    def close(self) -> None:
        """Ends the copy thread, when what was started is done."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def to_device(self, source: torch.Tensor, target: torch.Tensor) -> Ticket | None:
        """Copies host -> device; kernels that are launched afterwards see the result.

        Args:
            source: A host tensor.
            target: A device tensor of the same shape.

        Returns:
            A ticket to wait for before the host overwrites ``source``, or ``None`` if the copy is complete.
        """
        if self._stream is None:
            target.copy_(source)
            return None
        ticket = StreamTicket(self._copy_on_stream(source, target), self.device)
        ticket.join()
        return ticket

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """What is launched inside comes after all copies so far, and beside what the compute stream does next."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def to_slice(self, source: torch.Tensor, target: torch.Tensor) -> Ticket | None:
        """Copies home -> device for what is launched ``beside`` afterwards.

        Args:
            source: A tensor at home, on either tier.
            target: A device tensor of the same shape.

        Returns:
            As for ``to_device``.
        """
        if self._stream is None:
            target.copy_(source)
            return None
        return StreamTicket(self._copy_on_stream(source, target), self.device)

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> Ticket | None:
        """Copies device -> host.

        Args:
            source: What to copy; any device, any shape.
            target: A host tensor of the same shape.

        Returns:
            A ticket to wait for before the host reads ``target``, or ``None`` if the copy is complete.
        """
        if self._stream is None or source.device.type == "cpu" or not target.is_pinned():
            target.copy_(source)
            return None
        event = self._copy_on_stream(source, target)
        self._keep(source, event, torch.cuda.current_stream(self.device))
        return StreamTicket(event, self.device)

    def release_in_flight(self) -> None:
        """Lets go of gradients in flight: whatever the compute stream does next comes after their copies."""
        if self._in_flight:
            torch.cuda.current_stream(self.device).wait_event(self._in_flight[-1][0])
            self._in_flight.clear()
            self._in_flight_nbytes = 0

    def _copy_on_stream(self, source: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event:
        """Copies on the side stream, after all that the compute stream was told so far."""
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=source.is_pinned() or target.is_pinned())
            event = torch.cuda.Event()
            event.record(self._stream)
        return event

    def _keep(self, source: torch.Tensor, event: torch.cuda.Event, compute: torch.cuda.Stream) -> None:
        """Keeps a gradient until the compute stream has been told to wait for its copy; then its memory can be reused.

        ``record_stream`` would do the same by the clock of the host, which runs far ahead: every gradient in between
        would need memory of its own.
        """
        nbytes = source.numel() * source.dtype.itemsize
        self._in_flight.append((event, source, nbytes))
        self._in_flight_nbytes += nbytes
        while self._in_flight_nbytes > _IN_FLIGHT_NBYTES and len(self._in_flight) > 1:
            done, _, freed = self._in_flight.popleft()
            compute.wait_event(done)
            self._in_flight_nbytes -= freed
