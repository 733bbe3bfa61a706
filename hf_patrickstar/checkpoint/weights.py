"""Full parameters of a live model: read from and written to chunks, in the type that the model was loaded in."""

import contextlib
import functools
import threading
from collections.abc import Generator, Iterable, Iterator

import torch

from hf_patrickstar.checkpoint.deferred import PIECE_NUMEL, DeferredTensor, Source
from hf_patrickstar.checkpoint.safetensors_file import streamed_writing
from hf_patrickstar.dist.sharing import Held
from hf_patrickstar.errors import EngineError
from hf_patrickstar.memory.operators import unseen
from hf_patrickstar.model.live_parameter import raw_data, set_raw_grad, take_raw_grad
from hf_patrickstar.runtime.manager import ChunkManager
from hf_patrickstar.runtime.parameter import ManagedParameter, ValuePlace


class ChunkWeights:
    """Reads and writes full parameters and gradients.

    Args:
        manager: The manager of the chunks.
    """

    def __init__(self, manager: ChunkManager) -> None:
        self._manager = manager
        self._collected: dict[int, torch.Tensor] | None = None
        self._deferred: dict[int, torch.Tensor] | None = None
        self._is_reader = True
        self._saver = 0  # the thread inside of ``streamed``

    @property
    def needs_all(self) -> bool:
        """Whether all processes must read together now, since each has only its part."""
        return not self._manager.sharing.is_alone and self._collected is None and self._deferred is None

    @property
    def is_streaming(self) -> bool:
        """Whether ``state_dict`` gives deferred tensors; see ``streamed``."""
        return self._deferred is not None

    @property
    def is_elsewhere(self) -> bool:
        """Whether another process reads the model, and this one must not; see ``streamed`` and ``collected``."""
        return self._collected == {} or (self._deferred is not None and not self._is_reader)

    @property
    def piece_numel(self) -> int:
        """Elements that are in memory at once while chunks are saved: a chunk at most."""
        return min(max((chunk.spec.chunk_numel for chunk in self._manager.chunks), default=PIECE_NUMEL), PIECE_NUMEL)

    @contextlib.contextmanager
    def streamed(self, *, is_reader: bool) -> Iterator[None]:
        """Saves the model piece by piece: inside the block ``state_dict`` gives deferred tensors to this thread.

        Writers of safetensors files (transformers', PEFT's, Accelerate's) read them as they write. All processes must
        enter the block together. A process that does not read sends the readers what it has at home, until every
        reader has left the block. Its own code in the block runs only then, and cannot read parameters.

        Args:
            is_reader: Whether this process reads; all readers must read the same parts of the same parameters.

        Raises:
            CheckpointError: On a process that does not read, if a reader has failed.
        """
        if self._deferred is not None:
            yield
            return
        sharing = self._manager.sharing
        sharing.enter("saves the model")
        with sharing.led(lambda index: self._held(self._manager.by_index[index]), is_reader=is_reader):
            self._deferred, self._is_reader, self._saver = {}, is_reader, threading.get_ident()
            try:
                with streamed_writing(self.piece_numel):
                    yield
            finally:
                self._deferred = None

    def deferred(self, tensor: ManagedParameter) -> torch.Tensor | None:
        """The deferred tensor of a parameter inside ``streamed``, the same for tied names; ``None`` elsewhere.

        There is none for scales, since libraries look deferred tensors up among the parameters of the model.
        """
        is_scales = not isinstance(tensor.parameter, torch.nn.Parameter)
        if is_scales or self._deferred is None or threading.get_ident() != self._saver:
            return None
        index = tensor.spec.index
        if index not in self._deferred:
            stream = functools.partial(self._parts, tensor)
            made = DeferredTensor.make(Source(tensor.spec.shape, tensor.original_dtype, streams=stream))
            self._deferred[index] = torch.nn.Parameter(made, requires_grad=False)
        return self._deferred[index]

    def _held(self, tensor: ManagedParameter) -> Held:
        self._manager.writes.take_over(tensor)
        if tensor.place is ValuePlace.OPEN:
            return Held(tensor.spec, tensor.parts, tensor.own(tensor.parameter.data), tensor.original_dtype)
        return tensor.held(tensor.original_dtype)

    def _parts(
        self, tensor: ManagedParameter, start: int, stop: int, piece_numel: int
    ) -> Generator[torch.Tensor, None, None]:
        """Reads a parameter in its original type, see ``Source.stream``; with several processes all take part.

        Raises:
            EngineError: On a process that does not read the model that is being saved.
        """
        if self._deferred is not None and not self._is_reader:
            raise EngineError(
                f"parameter '{tensor.spec.name}' is being saved by another process, not by this one; read it on the "
                "process that saves"
            )
        is_prompt = not self.is_streaming  # else the others have come to save, and a disk may be slow
        held = self._held(tensor)
        return self._manager.sharing.parts(held, "the value", start, stop, piece_numel, is_prompt=is_prompt)

    @contextlib.contextmanager
    def collected(self, *, is_reader: bool) -> Iterator[None]:
        """Collects all parameters, so that one process may read them alone inside the block.

        All processes must enter it together; with one process nothing happens.

        Args:
            is_reader: Whether this process will read; the others keep nothing.
        """
        if not self.needs_all:
            yield
            return
        values = ((tensor.spec.index, self.read(tensor)) for tensor in self._manager.tensors)
        self._collected = {index: value for index, value in values if is_reader}
        try:
            yield
        finally:
            self._collected = None

    def read(self, tensor: ManagedParameter) -> torch.Tensor:
        """The value of a parameter.

        With several processes all must call it, for the same parameter, unless ``collected`` has all of them here.

        Args:
            tensor: The parameter.

        Returns:
            A copy on the host, in the parameter's shape and original type: the fp32 master if there is one, or what a
            frozen parameter was loaded from, so that nothing is lost.

        Raises:
            EngineError: If the parameters were collected for another process.
            CollectiveError: If another process does something else.
        """
        if self._collected is not None:
            if tensor.spec.index not in self._collected:
                raise EngineError(
                    f"parameter '{tensor.spec.name}' was collected for another process, not for this one; read it on "
                    "that process"
                )
            return self._collected[tensor.spec.index]
        self._manager.writes.take_over(tensor)
        if tensor.place is ValuePlace.OPEN:
            return tensor.parameter.data.to(device="cpu", dtype=tensor.original_dtype, copy=True)
        return tensor.read()

    def hand_out(self, tensor: ManagedParameter) -> torch.Tensor:
        """The value for ``state_dict``: a mirror, unless the parameter is collected or open; see [Note: mirrors]."""
        if self._collected is not None or tensor.place is ValuePlace.OPEN:
            return self.read(tensor)
        return self._manager.mirrors.hand_out(tensor, is_on_host=True).detach()

    def check_closed(self) -> None:
        """Raises an ``EngineError`` if a parameter is open in ``full_parameters``, for ``detach``."""
        if opened := [tensor.spec.name for tensor in self._manager.tensors if tensor.place is ValuePlace.OPEN]:
            raise EngineError(f"parameter '{opened[0]}' is open in full_parameters(); detach after the block has ended")

    @contextlib.contextmanager
    def opened(self, tensors: Iterable[ManagedParameter], writeback: bool, with_grads: bool) -> Iterator[None]:
        """Inside the block parameters have their full values, as ordinary tensors on the host.

        Args:
            tensors: The parameters to open; those that are open already, or are in no chunk, stay as they are.
            writeback: Whether the engine takes over what the block changed.
            with_grads: Whether parameters also have ``.grad``: the gradient of this step so far, or ``None``; in the
                parameter's original type, not unscaled and not clipped. With ``writeback`` the engine also takes over
                gradients that the block changed, set or removed.

        Raises:
            EngineError: At the end, if the block gave a parameter another shape; everything else is written.
        """
        opened: list[ManagedParameter] = []
        gradients: dict[int, tuple[torch.Tensor, int]] = {}
        lock = self._manager.gradients.lock  # other threads may read parameters
        with self._manager.lock.held("full_parameters()"):
            try:
                with unseen():
                    self._manager.take_gradients()
                    self._manager.rest.take_written()
                    for tensor in tensors:
                        with lock:  # what was written to it, or somebody has exchanged it
                            if tensor.place is ValuePlace.PARAMETER:  # in a forward
                                self._manager.writes.take_back(tensor)
                            else:
                                self._manager.writes.take_over(tensor)
                        if tensor.place in (ValuePlace.OPEN, ValuePlace.GIVEN_UP):
                            continue
                        value = self.read(tensor)
                        with lock:
                            tensor.open(value)
                        opened.append(tensor)
                        if with_grads and tensor.has_gradient:
                            handed = self._manager.read_gradient(tensor, tensor.original_dtype)
                            tensor.parameter.grad = handed
                            gradients[tensor.spec.index] = (handed, handed._version)
                yield
            finally:
                if opened and writeback:
                    self._manager.sharing.meet("leaves full_parameters()")
                reshaped = [tensor.spec.name for tensor in opened if tensor.parameter.shape != tensor.spec.shape]
                with lock:
                    for tensor in opened:
                        tensor.answer()
                    self._manager.lock.let_others_read()
                    for tensor in opened:
                        self._close(tensor, writeback, with_grads, gradients.get(tensor.spec.index))
                if reshaped and writeback:
                    raise EngineError(
                        f"parameter '{reshaped[0]}' was given another shape inside full_parameters(), which chunks "
                        "cannot follow; call detach() before changing the model"
                    )

    @unseen()
    @torch.no_grad()
    def _close(
        self, tensor: ManagedParameter, writeback: bool, with_grads: bool, handed: tuple[torch.Tensor, int] | None
    ) -> None:
        value, gradient = raw_data(tensor.parameter), take_raw_grad(tensor.parameter)
        if tensor.is_bound and tensor.parameter.__dict__.get("_live") is not tensor.live:  # it was exchanged
            self._manager.writes.give_up(tensor, value)
            set_raw_grad(tensor.parameter, gradient)
            return
        tensor.take_value()
        if not writeback or tuple(value.shape) != tensor.spec.shape:
            return
        before = self.read(tensor)
        if value.dtype != before.dtype or not torch.equal(value.cpu(), before):
            self._manager.writes.apply(tensor, value)
        if not with_grads or (handed is not None and gradient is handed[0] and gradient._version == handed[1]):
            return
        self._manager.gradient_mirrors.forget(tensor)
        if gradient is None:
            self._manager.gradients.drop(tensor)
        else:
            self._manager.gradients.put(tensor, tensor.own(gradient))
