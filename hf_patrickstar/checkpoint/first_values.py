"""Moves the values that a model has when its engine is made into chunks."""

import logging
import zlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hf_patrickstar.checkpoint.deferred import DeferredTensor, Reader
from hf_patrickstar.checkpoint.filling import Filler, Workers
from hf_patrickstar.checkpoint.origins import ModelFiles, origin_of
from hf_patrickstar.checkpoint.progress import shown
from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.errors import EngineError
from hf_patrickstar.runtime.chunk import ManagedParameter
from hf_patrickstar.runtime.live_parameter import raw_data
from hf_patrickstar.runtime.originals import Origin

logger = logging.getLogger(__name__)

_SAMPLE_NUMEL = 64


class FirstValues:
    """Moves values into chunks, in model order; deferred values are read straight from their files.

    Workers fill the chunks; see [Note: parallel filling].

    Args:
        tensors: The parameters, in model order.
        collectives: The processes that share them.
        piece_numel: Elements that each worker has in memory at once where values have to be converted.
        workers: The workers; ``None`` for the thread of the caller alone.
    """

    def __init__(
        self,
        tensors: Sequence[ManagedParameter],
        collectives: Collectives,
        piece_numel: int,
        workers: Workers | None = None,
    ) -> None:
        self._tensors = tensors
        self._collectives = collectives
        self._filler = Filler(workers, piece_numel)
        self._unread: dict[int, torch.Tensor] = {}
        self._files: ModelFiles | None = None

    def begin(self, model: torch.nn.Module) -> None:
        """Turns deferred parameters into ordinary ones, which stay the same objects, and reads deferred buffers.

        Args:
            model: The model.

        Raises:
            CheckpointError: If a file cannot be read any more.
        """
        reader = Reader()
        self._files = ModelFiles(model)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if isinstance(buffer, DeferredTensor):
                    module._buffers[name] = reader.read_whole(buffer).clone()
        for tensor in self._tensors:
            parameter = tensor.parameter
            if isinstance(parameter, DeferredTensor):
                ordinary = torch.nn.Parameter(tensor.placeholder, requires_grad=parameter.requires_grad)
                torch.utils.swap_tensors(parameter, ordinary)
                self._unread[tensor.spec.index] = ordinary

    def give_back(self) -> None:
        """Undoes ``begin`` for the parameters whose values have not been read."""
        for index, deferred in self._unread.items():
            torch.utils.swap_tensors(self._tensors[index].parameter, deferred)
        self._unread.clear()

    @torch.no_grad()
    def move_in(self, buffers: Iterable[torch.Tensor], take_in: Callable[[Sequence[ManagedParameter]], None]) -> None:
        """Moves every value into its chunk, and frees the memory that it had before.

        Frozen parameters come last: without a master they could not be restored exactly if a later parameter failed.
        The caller has the lock of ``Values``: threads that read a parameter wait until its memory is gone.

        Args:
            buffers: The model's buffers; rank 0 sends its own to all processes.
            take_in: Makes parameters answer; whoever reads one gets what is in its chunk by then.

        Raises:
            CheckpointError: If a file cannot be read any more.
            EngineError: If some processes have values and others have deferred parameters.
        """
        self._make_equal(buffers)
        order = sorted(self._tensors, key=lambda tensor: not tensor.spec.trainable)
        what, is_first = (
            "Reading weights" if self._unread else "Moving weights into chunks",
            self._collectives.rank == 0,
        )
        try:
            take_in(order)
            self._filler.begin((tensor for tensor in order if self._has_value(tensor)), self._value_of)
            for tensor in shown(order, what, "tensors", is_first=is_first):
                if self._has_value(tensor):
                    self._filler.finish(tensor, self._value_of(tensor))
                if tensor.is_owned and tensor.is_rounded:
                    tensor.origin = self._find_origin(tensor, self._value_of(tensor))
                tensor.move_in()
                self._unread.pop(tensor.spec.index, None)
        finally:
            self._filler.stop()
        self._files = None  # closes the files that no origin refers to
        self._explain_origins()
        self._collectives.exchange(None, "reads the weights")  # one process may have a slower disk

    def _has_value(self, tensor: ManagedParameter) -> bool:
        """Whether this process fills the place of a parameter: it owns it, and there are bytes to fill it with."""
        return tensor.is_owned and (tensor.spec.index in self._unread or not isinstance(tensor.parameter, FakeTensor))

    def _value_of(self, tensor: ManagedParameter) -> torch.Tensor:
        return self._unread.get(tensor.spec.index, raw_data(tensor.parameter))

    def _find_origin(self, tensor: ManagedParameter, value: torch.Tensor) -> Origin | None:
        if isinstance(value, DeferredTensor):
            return origin_of(value)
        return None if self._files is None else self._files.find(tensor, value)

    def _explain_origins(self) -> None:
        rounded = [tensor for tensor in self._tensors if tensor.is_owned and tensor.is_rounded]
        if rounded:
            lost = [tensor.spec.name for tensor in rounded if tensor.origin is None]
            logger.info(
                "patrickstar: frozen_master=false: %d of %d frozen parameters that are rounded are read again from "
                "their files when they are saved or merged",
                len(rounded) - len(lost),
                len(rounded),
            )
            if lost:
                logger.warning(
                    "patrickstar: %d frozen fp32 parameters ('%s' is the first) came from no safetensors file that is "
                    "there. They are computed with in 16 bits, and saved and merged as rounded to them; pass "
                    "frozen_master=true to keep all of their bits, 4 bytes for each element",
                    len(lost),
                    lost[0],
                )

    def _make_equal(self, buffers: Iterable[torch.Tensor]) -> None:
        """Sends the buffers of rank 0, and its parameters of which a sample differs, to all processes."""
        collectives, tensors = self._collectives, self._tensors
        if collectives.world_size == 1:
            return
        samples = [None if t.spec.index in self._unread else _sample(t.parameter.data) for t in tensors]
        found = collectives.exchange(samples, "compares parameters")
        if len({tuple(value is None for value in row) for row in found}) > 1:
            raise EngineError("some processes made the model inside deferred_weights and others did not; let all do so")
        different = [tensor for place, tensor in enumerate(tensors) if len({row[place] for row in found}) > 1]
        if different:
            logger.warning(
                "patrickstar: %d parameters ('%s' is the first) differ between processes; those of rank 0 are taken",
                len(different),
                different[0].spec.name,
            )
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
