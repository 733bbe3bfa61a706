"""Copies between the tiers: a side stream and events on CUDA, plain copies on the budgeted CPU tier."""

import collections

import torch

from hf_patrickstar.units import MIB

_IN_FLIGHT_NBYTES = 64 * MIB


class Ticket:
    """A copy that may still be under way.

    Args:
        event: The CUDA event that follows the copy.
    """

    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Blocks until the host may read the target, or overwrite the source."""
        self._event.synchronize()


class Transfers:
    """Moves bytes between host and device.

    On CUDA all copies run in order on one side stream, which first waits for the compute stream: a buffer is never
    overwritten while an earlier kernel reads it, and a gradient is never copied before it is written.

    Args:
        device: The compute device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device = device
        self._in_flight: collections.deque[tuple[torch.cuda.Event, torch.Tensor, int]] = collections.deque()
        self._in_flight_nbytes = 0

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
        compute = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=source.is_pinned())
            event = torch.cuda.Event()
            event.record(self._stream)
        compute.wait_stream(self._stream)
        return Ticket(event)

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
        compute = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        self._keep(source, event, compute)
        return Ticket(event)

    def settle(self) -> None:
        """Lets go of gradients in flight: whatever the compute stream does next comes after their copies."""
        if self._in_flight:
            torch.cuda.current_stream(self._device).wait_event(self._in_flight[-1][0])
            self._in_flight.clear()
            self._in_flight_nbytes = 0

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
