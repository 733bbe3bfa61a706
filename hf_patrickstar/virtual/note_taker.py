"""Notes what torch tells an engine in a micro-batch; see [Note: micro-batches that are told again]."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from hf_patrickstar.memory.meters import storages_of
from hf_patrickstar.memory.operators import storage_key
from hf_patrickstar.runtime.chunk import Chunk, ManagedTensor
from hf_patrickstar.schedule.op_trace import (
    Allocate,
    EnterForward,
    Free,
    Gradient,
    Keep,
    LeaveBackward,
    LetGo,
    Note,
    OpTrace,
    Show,
)
from hf_patrickstar.schedule.script import Begin, BlockingCopy, HostWork, Kernel
from hf_patrickstar.schedule.trace import Shapes
from hf_patrickstar.states import Stage


class NoteTaker:
    """Writes down what torch tells an engine; what the engine does of its own is no part of it.

    Attributes:
        watches: Tells whether something may write to a chunk without a trace.
    """

    def __init__(self) -> None:
        self.watches: Callable[[Chunk], bool] = _nothing
        self._notes: list[Note] | None = None
        self._depth = 0  # calls of the engine that are running
        self._is_odd = False
        self._owns: Callable[[int], bool] = _nothing
        self._inputs: list[int] = []  # storages of the batch
        self._buffers: set[int] = set()
        self._live: dict[int, tuple[int, Any]] = {}  # storages -> their number, and who tells that they are free
        self._num_storages = 0
        self._seen: list[ManagedTensor] = []  # tensors may look into their chunks
        self._kept: dict[ManagedTensor, int] = {}
        self._placeholders: dict[int, int] = {}  # their storages -> the parameters

    @property
    def is_listening(self) -> bool:
        """Whether what happens now is noted, because it comes from the model."""
        return self._notes is not None and not self._depth

    def begin(
        self,
        inputs: Iterable[torch.Tensor],
        buffers: Iterable[torch.Tensor],
        tensors: Iterable[ManagedTensor],
        owns: Callable[[int], bool],
    ) -> None:
        """Begins to listen.

        Args:
            inputs: The tensors of the batch.
            buffers: Those of the model.
            tensors: Its parameters.
            owns: Tells from the address of a storage whether it belongs to the engine.
        """
        self._placeholders = {tensor.placeholder_key: tensor.spec.index for tensor in tensors}
        self._inputs, self._buffers = list(map(storage_key, inputs)), set(map(storage_key, buffers))
        self._owns = owns
        self._num_storages, self._is_odd = 0, False
        self._seen.clear()
        self._kept.clear()
        self._notes = []

    def end(self) -> OpTrace | None:
        """Ends it.

        Returns:
            What was noted; ``None`` if something was told that the notes have no word for.
        """
        self._look()
        notes, self._notes = self._notes, None
        self._live.clear()
        assert notes is not None
        return None if self._is_odd else OpTrace(tuple(notes))

    def let_go(self) -> None:
        """Drops references to the engine.

        ``weakref.finalize`` keeps the function that closes the engine's collectives. These refer to the driver, and the
        driver to this object: the engine could not be collected.
        """
        self.watches = self._owns = _nothing
        self._live.clear()
        self._seen.clear()
        self._kept.clear()

    # What the driver tells

    def note_work(self, work: Kernel | HostWork | BlockingCopy | Begin) -> None:
        """An operator of the model has run, or a part of the step has begun."""
        if self.is_listening:
            self._look()
            self._add(work)

    def note_results(self, results: Any) -> None:
        """An operator of the model has returned something."""
        if not self.is_listening:
            return
        made = []
        for value in results if isinstance(results, (tuple, list)) else (results,):
            for item in value if isinstance(value, (tuple, list)) else (value,):
                for found in storages_of(item) if isinstance(item, torch.Tensor) else ():
                    made += self._take(*found)
        if made:
            self._add(Allocate(tuple(made)))

    def _take(self, owner: Any, key: int, nbytes: int) -> list[tuple[int, int]]:
        """The number and the bytes of a storage, if it is a new one of the model."""
        if key in self._placeholders:
            self._add(Show(self._placeholders.pop(key)))
            return []
        is_known = key in self._live or key in self._inputs or key in self._buffers
        if is_known or not nbytes or self._owns(key):
            return []
        number = self._num_storages
        self._num_storages += 1
        live, this = self._live, weakref.ref(self)

        def forget(_: Any) -> None:
            taker = this()
            if live.pop(key, None) is not None and taker is not None:
                taker._add(Free(number))

        live[key] = number, weakref.ref(owner, forget)
        return [(number, nbytes)]

    # What the engine tells

    @contextlib.contextmanager
    def inside(self) -> Iterator[bool]:
        """Inside the block the engine works.

        Yields:
            Whether the model has called it.
        """
        is_called = self.is_listening
        if is_called:
            self._look()
        self._depth += 1
        try:
            yield is_called
        finally:
            self._depth -= 1

    def note_call(self, note: Note) -> None:
        """The engine is called."""
        self._add(note)

    def note_forward(self, stage: Stage, name: str, shapes: Shapes, present: Iterable[torch.Tensor]) -> None:
        """An outermost forward begins; ``present`` is there already."""
        if stage is not Stage.FORWARD:
            self._is_odd = True
        inputs, others = [], []
        batch: dict[int, int] = {}
        buffers: dict[int, int] = {}
        for tensor in present:
            for _, key, nbytes in storages_of(tensor):
                if key in self._buffers:
                    buffers[key] = nbytes
                elif key in self._inputs:
                    batch[key] = nbytes
                if key in self._inputs:
                    inputs.append(self._inputs.index(key))
                elif key in self._live:
                    others.append(self._live[key][0])
                elif key not in self._buffers and nbytes:
                    self._is_odd = True
        self._add(EnterForward(name, shapes, tuple(inputs), tuple(others), sum(batch.values()), sum(buffers.values())))

    def note_use(self, tensor: ManagedTensor) -> None:
        """Tensors may look into the place of a parameter from now on."""
        if tensor not in self._seen:
            self._seen.append(tensor)

    def note_gradient(self, tensor: ManagedTensor, gradient: torch.Tensor, *, is_at_home: bool) -> None:
        """A gradient is finished."""
        self._kept.setdefault(tensor, 0)
        self._count_kept()
        found = self._live.get(storage_key(gradient))
        if found is None or gradient.is_sparse:
            self._is_odd = True
            return
        dtype = str(gradient.dtype).removeprefix("torch.")
        size, stride, offset = tuple(gradient.shape), gradient.stride(), int(gradient.storage_offset())
        self._add(Gradient(tensor.spec.index, found[0], dtype, size, stride, offset, is_at_home))

    def note_backward_end(self, held: Iterable[ManagedTensor]) -> None:
        """A backward ends; ``held`` are parameters that code in backward has read."""
        self._count_kept()
        self._is_odd = self._is_odd or any(True for _ in held)
        self._add(LeaveBackward())

    def note_odd(self) -> None:
        """Something is told that the notes have no word for."""
        self._is_odd = True

    def _count_kept(self) -> None:
        for tensor, num in self._kept.items():
            if tensor.num_saved != num:
                self._kept[tensor] = tensor.num_saved
                self._add(Keep(tensor.spec.index, tensor.num_saved))

    def _look(self) -> None:
        """Looks which parameters nobody sees any more."""
        for tensor in [tensor for tensor in self._seen if not tensor.chunk.is_aliased]:
            self._seen.remove(tensor)
            self._add(LetGo(tensor.spec.index))

    def _add(self, note: Note) -> None:
        if self._notes is not None:
            self._notes.append(note)


def _nothing(_: Any) -> bool:
    return False
