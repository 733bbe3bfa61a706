"""Moves the values that a model has when its engine is made into chunks.

[Note: parallel filling]
Workers read, convert and round pieces of parameters; they begin them in the order in which the parameters were given.
Everything else is done by the caller, in that order too: it takes up a parameter when its values are there, and then
frees what memory the parameter had. So errors, logs and what is left after a failure are those of one thread, and no
thread writes to a chunk any more when an error is raised.

A worker has one piece in memory at a time. What could need more is done by the caller alone, when its turn comes: the
results of functions, which are computed as a whole, values that are not contiguous, and those that are not on the host.
"""

import dataclasses
import itertools
import logging
import zlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hf_patrickstar.checkpoint.deferred import DeferredTensor, Reader
from hf_patrickstar.checkpoint.progress import shown
from hf_patrickstar.checkpoint.weight_files import ModelFiles, origin_of
from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.errors import EngineError
from hf_patrickstar.layout.specs import MASTER
from hf_patrickstar.memory.driver import Pending
from hf_patrickstar.model.live_parameter import raw_data
from hf_patrickstar.optim.workers import HostWorkers
from hf_patrickstar.runtime.parameter import ManagedParameter

logger = logging.getLogger(__name__)

_SAMPLE_NUMEL = 64

_Piece = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, int]
"""What is filled at once: a part of a place in a chunk, the same part of what is rounded of it if there is a master,
the value that has the elements, and the first of them."""


@dataclasses.dataclass
class FirstValues:
    """Moves values into chunks, in model order; deferred values are read straight from their files.

    Workers fill the chunks; see [Note: parallel filling].

    Attributes:
        tensors: The parameters, in model order.
        collectives: The processes that share them.
        piece_numel: Elements that each worker has in memory at once where values have to be converted.
        workers: The workers; ``None`` for the thread of the caller alone.
    """

    tensors: Sequence[ManagedParameter]
    collectives: Collectives
    piece_numel: int
    workers: HostWorkers | None = None

    def __post_init__(self) -> None:
        self.tensors = [*self.tensors]  # an engine that fails forgets its own
        self._tickets: dict[int, Pending] = {}
        self._reader = Reader()
        self._unread: dict[int, torch.Tensor] = {}
        self._files: ModelFiles | None = None

    def begin(self, model: torch.nn.Module) -> None:
        """Turns deferred parameters into ordinary ones, which stay the same objects, and reads deferred buffers.

        Args:
            model: The model.

        Raises:
            CheckpointError: If a file cannot be read any more.
        """
        self._files = ModelFiles(model)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if isinstance(buffer, DeferredTensor):
                    module._buffers[name] = self._reader.read_whole(buffer).clone()
        for tensor in self.tensors:
            parameter = tensor.parameter
            if isinstance(parameter, DeferredTensor):
                ordinary = torch.nn.Parameter(tensor.placeholder, requires_grad=parameter.requires_grad)
                torch.utils.swap_tensors(parameter, ordinary)
                self._unread[tensor.spec.index] = ordinary

    def give_back(self) -> None:
        """Undoes ``begin`` for the parameters whose values have not been read."""
        for index, deferred in self._unread.items():
            torch.utils.swap_tensors(self.tensors[index].parameter, deferred)
        self._unread.clear()

    @torch.no_grad()
    def move_in(self, buffers: Iterable[torch.Tensor], take_in: Callable[[Sequence[ManagedParameter]], None]) -> None:
        """Moves every value into its chunk, and frees the memory that it had before.

        Frozen parameters come last: without a master they could not be restored exactly if a later parameter failed.
        The caller has the lock of ``Device``: threads that read a parameter wait until its memory is gone.

        Args:
            buffers: The model's buffers; rank 0 sends its own to all processes.
            take_in: Makes parameters answer; whoever reads one gets what is in its chunk by then.

        Raises:
            CheckpointError: If a file cannot be read any more.
            EngineError: If some processes have values and others have deferred parameters.
        """
        self._make_equal(buffers)
        order = sorted(self.tensors, key=lambda tensor: not tensor.spec.trainable)
        what = "Reading weights" if self._unread else "Moving weights into chunks"
        try:
            take_in(order)
            for tensor in order:
                self._begin_filling(tensor)
            for tensor in shown(order, what, "tensors", is_first=self.collectives.rank == 0):
                if (ticket := self._tickets.pop(tensor.spec.index, None)) is not None:
                    ticket.wait()
                elif self._has_value(tensor):
                    self._fill(self._whole(tensor))
                if tensor.is_owned and tensor.is_rounded:
                    value, files = self._value_of(tensor), self._files
                    tensor.origin = origin_of(value) or (files.find(tensor, value) if files else None)
                    if tensor.origin is None and self._has_value(tensor):
                        tensor.keep_original(self._reader.read(value, *tensor.part))
                tensor.move_in()
                self._unread.pop(tensor.spec.index, None)
        finally:
            for ticket in self._tickets.values():
                ticket.cancel()
            self._tickets.clear()
        self._files = None  # closes the files that no origin refers to
        if rounded := [tensor for tensor in self.tensors if tensor.is_owned and tensor.is_rounded]:
            text = "patrickstar: %d of %d frozen parameters are read with more bits than are computed with"
            logger.info(text, len([tensor for tensor in rounded if tensor.origin is not None]), len(rounded))
        self.collectives.exchange(None, "reads the weights")  # one process may have a slower disk

    def _has_value(self, tensor: ManagedParameter) -> bool:
        """Whether this process fills the place of a parameter: it owns it, and there are bytes to fill it with."""
        return tensor.is_owned and (tensor.spec.index in self._unread or not isinstance(tensor.parameter, FakeTensor))

    def _value_of(self, tensor: ManagedParameter) -> torch.Tensor:
        return self._unread.get(tensor.spec.index, raw_data(tensor.parameter))

    def _whole(self, tensor: ManagedParameter) -> _Piece:
        chunk = tensor.chunk
        has_master = chunk.has_list(MASTER)
        place = tensor.view(chunk.lists[MASTER] if has_master else chunk.param).view(-1)
        rounded = tensor.view(chunk.param).view(-1) if has_master else None
        return place, rounded, self._value_of(tensor), tensor.part[0]

    def _begin_filling(self, tensor: ManagedParameter) -> None:
        """Lets workers fill the place of a parameter, if they may; see [Note: parallel filling]."""
        if self.workers is None or not self._has_value(tensor):
            return
        place, rounded, value, start = self._whole(tensor)
        if isinstance(value, DeferredTensor):
            is_for_threads = getattr(value.recipe, "is_for_threads", False)
        else:
            is_for_threads = type(value) is torch.Tensor and value.device.type == "cpu" and value.is_contiguous()
        if is_for_threads and all(self.workers.suits(v, v.numel()) for v in (place, rounded) if v is not None):
            # Rounding a piece finds it in the processor's cache.
            parts = itertools.repeat(None) if rounded is None else rounded.split(self.piece_numel)
            starts = itertools.count(start, self.piece_numel)
            pieces = zip(place.split(self.piece_numel), parts, itertools.repeat(value), starts, strict=False)
            self._tickets[tensor.spec.index] = self.workers.submit(self._fill, pieces)

    def _fill(self, piece: _Piece) -> None:
        place, rounded, value, start = piece
        self._reader.fill(place, value, start, self.piece_numel)
        if rounded is not None:
            rounded.copy_(place)

    def _make_equal(self, buffers: Iterable[torch.Tensor]) -> None:
        """Sends the buffers of rank 0, and its parameters of which a sample differs, to all processes."""
        collectives, tensors = self.collectives, self.tensors
        if collectives.world_size == 1:
            return
        samples = [None if t.spec.index in self._unread else _sample(t.parameter.data) for t in tensors]
        found = collectives.exchange(samples, "compares parameters")
        if len({tuple(value is None for value in row) for row in found}) > 1:
            raise EngineError("some processes made the model inside deferred_weights and others did not; let all do so")
        if different := [tensor for place, tensor in enumerate(tensors) if len({row[place] for row in found}) > 1]:
            text = "patrickstar: %d parameters ('%s' is the first) differ between processes; those of rank 0 are taken"
            logger.warning(text, len(different), different[0].spec.name)
        for tensor in different:
            collectives.begin_broadcast(tensor.parameter.data, 0, f"sends parameter '{tensor.spec.name}' to all")()
        for buffer in buffers:
            collectives.begin_broadcast(buffer, 0, "sends buffers to all")()


def _sample(value: torch.Tensor) -> int:
    """A checksum of some elements of a tensor: enough to tell different initialisations apart."""
    if isinstance(value, FakeTensor):
        return 0  # it has no values
    flat = value.reshape(-1)
    some = flat[:: max(flat.numel() // _SAMPLE_NUMEL, 1)].to("cpu", torch.float64)
    return zlib.crc32(repr(some.tolist()).encode())
