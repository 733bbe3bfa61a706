"""Fills the places of parameters in chunks with values, a piece in each worker.

[Note: parallel filling]
Workers read, convert and round pieces of parameters; they begin them in the order in which the parameters were given.
Everything else is done by the caller, in that order too: it takes up a parameter when its values are there, and then
frees what memory the parameter had. So errors, logs and what is left after a failure are those of one thread. If
several pieces fail, the error is that of the first parameter among them, and no thread writes to a chunk any more when
it is raised.

A worker has one piece in memory at a time. What could need more is done by the caller alone, when its turn comes: the
results of functions, which are computed as a whole, values that are not contiguous, and those that are not on the host.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch

from hf_patrickstar.checkpoint.deferred import PIECE_NUMEL, DeferredTensor, Reader, is_read_by_any_thread
from hf_patrickstar.runtime.chunk import MASTER, ManagedParameter

PART_NUMEL = 2**21
"""Elements that a worker fills before it takes the next part: a few milliseconds of work."""


class Work(Protocol):
    """What workers have been given."""

    def cancel(self) -> None:
        """Begins no further item, and blocks until no worker is at this work any more; errors are not raised."""
        ...


class Workers(Protocol):
    """Threads of the host."""

    def suits(self, payload: torch.Tensor, numel: int) -> bool:
        """Whether operators on a buffer are to run in workers rather than in the thread of the caller.

        Args:
            payload: The buffer.
            numel: How many of its elements are worked on.
        """
        ...

    def submit(self, work: Callable[[int, Any], None], items: Iterable[Any]) -> Work:
        """Starts work on items, in their order.

        Args:
            work: Is called for each item with the number of the worker; after an error no further item is begun.
            items: The items.
        """
        ...


class Filling:
    """One parameter whose place in a chunk is filled.

    Args:
        tensor: The parameter.
        value: Its value: a tensor in memory, or a deferred one.
    """

    def __init__(self, tensor: ManagedParameter, value: torch.Tensor) -> None:
        chunk = tensor.chunk
        self.tensor = tensor
        self.value = value
        self.home = tensor.view(chunk.param)
        self.place = tensor.view(chunk.lists[MASTER]) if chunk.has_list(MASTER) else self.home
        self._start = tensor.part[0]
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._num_left = 0
        self._errors: dict[int, BaseException] = {}

    def fill(self, reader: Reader, piece_numel: int) -> None:
        """Fills the whole place in the thread of the caller."""
        reader.fill(self.place, self.value, self._start, piece_numel)
        if self.place is not self.home:
            self.home.copy_(self.place)

    def is_for(self, workers: Workers) -> bool:
        """Whether workers may fill the place; see [Note: parallel filling]."""
        if not all(workers.suits(place, self.tensor.own_numel) for place in (self.home, self.place)):
            return False
        if isinstance(self.value, DeferredTensor):
            return is_read_by_any_thread(self.value)
        is_plain = type(self.value) is torch.Tensor and self.value.device.type == "cpu"
        return is_plain and self.value.is_contiguous()

    def parts(self) -> "list[Part]":
        """What workers do one after the other; from now on ``wait`` waits for all of it."""
        numel = self.tensor.own_numel
        parts = [Part(self, begin, min(begin + PART_NUMEL, numel)) for begin in range(0, numel, PART_NUMEL)]
        self._num_left = len(parts)
        return parts

    def fill_part(self, begin: int, end: int, reader: Reader, piece_numel: int) -> None:
        """Fills elements of the place in a worker; each piece is rounded while it is in the processor's cache."""
        try:
            place, home = self.place.view(-1), self.home.view(-1)
            for piece in range(begin, end, piece_numel):
                bounds = slice(piece, min(piece + piece_numel, end))
                reader.fill(place[bounds], self.value, self._start + piece, piece_numel)
                if self.place is not self.home:
                    home[bounds].copy_(place[bounds])
        except BaseException as error:
            self._errors[begin] = error
            self._done.set()
            raise
        with self._lock:
            self._num_left -= 1
            if not self._num_left:
                del self.value  # the worker may look at this object later than the caller frees the parameter's memory
                self._done.set()

    def wait(self) -> bool:
        """Waits until workers have filled the place; false if one of them has failed."""
        self._done.wait()
        return not self._errors

    @property
    def error(self) -> BaseException:
        """The error of the first part that has failed."""
        return self._errors[min(self._errors)]


class Part(NamedTuple):
    """What a worker fills before it takes the next: elements of a place, from ``begin`` to ``end``."""

    filling: Filling
    begin: int
    end: int


class Filler:
    """Fills places in chunks, in the threads of workers where these may; see [Note: parallel filling].

    Args:
        workers: The workers; ``None`` for the thread of the caller alone.
        piece_numel: Elements that each worker has in memory at once where values have to be converted.
    """

    def __init__(self, workers: Workers | None, piece_numel: int = PIECE_NUMEL) -> None:
        self._workers = workers
        self._piece_numel = piece_numel
        self._reader = Reader()
        self._begun: dict[int, Filling] = {}
        self._work: Work | None = None

    def begin(self, tensors: Iterable[ManagedParameter], value_of: Callable[[ManagedParameter], torch.Tensor]) -> None:
        """Starts to fill the places that workers may fill.

        Args:
            tensors: The parameters, in the order in which they will be finished.
            value_of: The value of a parameter.
        """
        if self._workers is None:
            return
        parts: list[Part] = []
        for tensor in tensors:
            filling = Filling(tensor, value_of(tensor))
            if filling.is_for(self._workers):
                self._begun[tensor.spec.index] = filling
                parts += filling.parts()
        if parts:
            self._work = self._workers.submit(self._fill_part, parts)

    def finish(self, tensor: ManagedParameter, value: torch.Tensor) -> None:
        """Returns when the place of a parameter is filled; fills it if workers do not.

        Args:
            tensor: The parameter.
            value: Its value.

        Raises:
            CheckpointError: If a file cannot be read any more.
        """
        filling = self._begun.pop(tensor.spec.index, None)
        if filling is None:
            Filling(tensor, value).fill(self._reader, self._piece_numel)
        elif not filling.wait():
            self.stop()  # so that the first of several errors is known
            raise filling.error

    def stop(self) -> None:
        """Returns when no worker fills anything any more; what was not begun is not filled."""
        if self._work is not None:
            self._work.cancel()
        self._begun.clear()

    def _fill_part(self, worker: int, part: Part) -> None:
        part.filling.fill_part(part.begin, part.end, self._reader, self._piece_numel)
