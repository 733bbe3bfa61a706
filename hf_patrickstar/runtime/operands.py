"""What autograd keeps of operands that live in chunks: where they were, not what they were."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._C import _current_graph_task_id
from torch.utils._pytree import tree_iter, tree_map_only

from hf_patrickstar.errors import EngineError
from hf_patrickstar.runtime.chunk import Epoch, ManagedTensor
from hf_patrickstar.runtime.live_parameter import RAW, LiveMixin, storage_key
from hf_patrickstar.runtime.manager import ChunkManager


class SavedView:
    """A view of a parameter, as numbers.

    After ``parameter.data = x`` a graph of before goes on with the memory that a view looked into, but where it kept
    the parameter itself, with ``x``; so it is in torch.
    """

    __slots__ = ("epoch", "num_steps", "num_writes", "offset", "size", "stride", "tensor")

    def __init__(
        self, tensor: ManagedTensor, size: Sequence[int], stride: Sequence[int], offset: int, num_steps: int
    ) -> None:
        self.tensor = tensor
        self.size = size
        self.stride = stride
        self.offset = offset
        self.epoch: Epoch | None = tensor.epoch
        self.num_writes = tensor.num_writes
        self.num_steps = num_steps
        tensor.num_saved += 1

    def __del__(self) -> None:
        self.tensor.num_saved -= 1


class _Kept(NamedTuple):
    """What the hooks of somebody else gave back, with numbers in place of what lives in chunks."""

    value: Any


class Operands:
    """Replaces operands that autograd keeps, and brings them back in backward.

    Args:
        manager: The manager of the chunks.
    """

    def __init__(self, manager: ChunkManager) -> None:
        self._manager = manager
        self._find = manager.copies.find  # the chunk that a storage belongs to
        self._graph_tasks: set[int] = set()  # backwards that have begun: threads may have one each
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def kept_as_numbers(self) -> Iterator[None]:
        """Inside, autograd keeps numbers in place of operands that live in chunks.

        Where somebody else's hooks are in force (offloading of activations, checkpointing of the whole model) they are
        asked for every operand, as they are in torch; numbers are kept of what they give back that lives in a chunk.
        Under ``torch.func`` hooks are not possible.
        """
        if torch._C._functorch.peek_interpreter_stack() is not None:
            yield
            return
        others = torch._C._autograd._top_saved_tensors_default_hooks(True)
        pack, unpack = (self.pack, self.unpack) if others is None else self._around(*others)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _around(
        self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
    ) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        """Hooks that ask those of somebody else; a released parameter as such would be a placeholder by then."""

        def pack_both(view: torch.Tensor) -> Any:
            with RAW():
                shown = view.detach() if isinstance(view, LiveMixin) else view
            theirs = pack(shown)
            if theirs is shown:
                return _Kept(self.pack(view))
            in_chunks = [
                t for t in tree_iter(theirs) if isinstance(t, torch.Tensor) and self._find(storage_key(t)) is not None
            ]
            return _Kept(tree_map_only(torch.Tensor, self.pack, theirs)) if in_chunks else theirs

        def unpack_both(kept: Any) -> torch.Tensor:
            self.notice_backward()
            return unpack(tree_map_only(SavedView, self.unpack, kept.value) if isinstance(kept, _Kept) else kept)

        return pack_both, unpack_both

    def pack(self, view: torch.Tensor) -> torch.Tensor | SavedView:
        """Replaces an operand by its address, if it lives in a chunk."""
        if isinstance(view, LiveMixin):
            return self._pack_parameter(view)
        chunk = self._find(storage_key(view))
        if chunk is None or view.dtype is not chunk.param.dtype:
            # Of an output that is saved by its own operator the tensor itself would be a cycle that nobody collects.
            return view.detach() if view.requires_grad else view
        offset = int(view.storage_offset())
        return SavedView(chunk.tensor_at(offset), view.size(), view.stride(), offset, self._manager.num_steps)

    def _pack_parameter(self, parameter: torch.Tensor) -> torch.Tensor | SavedView:
        manager = self._manager
        tensor = manager.find(parameter)
        if tensor is not None:
            storage = tensor.chunk.storage
            is_there = storage is not None and storage_key(parameter) == storage._cdata
            if is_there or not tensor.is_materialized:  # ``ctx.save_for_backward(parameter)`` of a released one
                saved = SavedView(tensor, tensor.spec.shape, tensor.strides, tensor.offset_numel, manager.num_steps)
                saved.epoch = None
                return saved
        with RAW():
            return self.pack(parameter.detach())

    def unpack(self, saved: torch.Tensor | SavedView) -> torch.Tensor:
        """Brings back an operand of backward.

        The result aliases the chunk, and while it is alive the chunk cannot be evicted.

        Raises:
            EngineError: If the parameter was changed since forward.
        """
        self.notice_backward()
        if not isinstance(saved, SavedView):
            return saved
        tensor = saved.tensor
        if saved.epoch is not None and saved.epoch.value is not None:  # parameter.data was assigned since
            return saved.epoch.value.as_strided(saved.size, saved.stride, saved.offset - tensor.offset_numel)
        if saved.num_writes != tensor.num_writes:
            by_whom = "in place" if saved.num_steps == self._manager.num_steps else "by the optimizer"
            raise EngineError(
                f"parameter '{tensor.spec.name}' was changed {by_whom} between this forward and its backward; call "
                "backward before the change"
            )
        payload = self._manager.reach(tensor, f"the backward of a use of '{tensor.spec.name}'")
        view = payload.as_strided(saved.size, saved.stride, saved.offset)
        # A backward that is recorded itself (create_graph) keeps its operands, and no hooks are in force there.
        return view.clone() if torch.is_grad_enabled() else view

    def notice_backward(self) -> None:
        """Asks autograd, once per backward, to be told of its end."""
        task = _current_graph_task_id()
        if task == -1 or task in self._graph_tasks:
            return
        with self._lock:  # a CUDA device's thread and the caller's may both come first
            is_new = task not in self._graph_tasks
            self._graph_tasks.add(task)
        if is_new:
            self._manager.begin_backward()

            def end() -> None:
                self._graph_tasks.discard(task)
                self._manager.end_backward()

            torch.autograd.Variable._execution_engine.queue_callback(end)
