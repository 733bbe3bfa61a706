"""Events of autograd: which operands it keeps and needs, and when a backward begins and ends."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch._C import _current_graph_task_id
from torch._C._autograd import _saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
from torch._C._functorch import peek_interpreter_stack
from torch.utils import checkpoint
from torch.utils._pytree import tree_iter, tree_map_only

from hf_patrickstar.errors import EngineError
from hf_patrickstar.memory.operators import unseen
from hf_patrickstar.model.live_parameter import RAW, LiveMixin, storage_key
from hf_patrickstar.model.operands import KeptOperand, check_version
from hf_patrickstar.runtime.listener import ModelListener

_PACKAGE = __name__.partition(".")[0]


class _Kept(NamedTuple):
    """What the user's own hooks returned, with addresses in place of tensors in chunks."""

    value: Any


class Autograd:
    """What autograd keeps and needs, and when a backward begins and ends.

    Args:
        listener: Is told of it.

    Attributes:
        pack: That of the listener.
        graph_tasks: Backwards that have begun: threads may have one each.
    """

    def __init__(self, listener: ModelListener) -> None:
        self._listener = listener
        self.pack, self._unpack_address = listener.pack, listener.operand_needed
        self.graph_tasks: set[int] = set()
        self._beginnings: dict[int, threading.RLock] = {}

    @contextlib.contextmanager
    def kept_as_numbers(self) -> Iterator[None]:
        """Inside the block, autograd keeps addresses in place of operands that live in chunks.

        If the user's saved-tensors hooks are in force (offloading of activations, checkpointing of the whole model),
        they get every operand, as in torch; tensors in chunks that they return are kept as addresses. Under
        ``torch.func`` such hooks are not possible.

        Raises:
            EngineError: If the user has disabled hooks, and autograd would keep operands.
        """
        if not may_keep("what computes with parameters"):
            yield
            return
        others = torch._C._autograd._top_saved_tensors_default_hooks(True)
        pack, unpack = (self.pack, self._unpack) if others is None else self._around(*others)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def keep_inside(self) -> Any:
        """Does the same for a module that runs inside of saved-tensors hooks which its own caller has put on.

        Returns:
            The context, which has been entered, or ``None`` where no hooks of the user are innermost. Those of torch's
            checkpointing stay so.
        """
        others = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if others is None:
            may_keep("a module that computes under torch.enable_grad()")
        # Hooks that are methods in C have no module.
        if others is None or getattr(others[0], "__module__", None) in (__name__, checkpoint.__name__):
            return None
        context = torch.autograd.graph.saved_tensors_hooks(*self._around(*others))
        context.__enter__()
        return context

    def _around(
        self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
    ) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        """Hooks that call those around them, with detached values, since a parameter may be a placeholder by then.

        Those of another engine, in whose forward this model is called, get no parameter of this one: they keep versions
        of tensors, and chunks are written whenever they come.
        """
        is_engine = str(getattr(pack, "__module__", None)).startswith(_PACKAGE)

        def pack_both(view: torch.Tensor) -> Any:
            with RAW():
                shown = view.detach() if isinstance(view, LiveMixin) else view
            if is_engine and isinstance(mine := self.pack(view), KeptOperand):
                return _Kept(mine)
            theirs = pack(shown)
            if theirs is shown:
                return _Kept(_without_version(self.pack(view)))
            tensors = [leaf for leaf in tree_iter(theirs) if isinstance(leaf, torch.Tensor)]
            if not any(self._listener.is_parameter(storage_key(tensor)) for tensor in tensors):
                return theirs
            return _Kept(tree_map_only(torch.Tensor, lambda tensor: _without_version(self.pack(tensor)), theirs))

        def unpack_both(kept: Any) -> torch.Tensor:
            self.notice_backward()
            return unpack(tree_map_only(KeptOperand, self._unpack, kept.value) if isinstance(kept, _Kept) else kept)

        return pack_both, unpack_both

    def _unpack(self, saved: Any) -> torch.Tensor:
        task = _current_graph_task_id()
        if task != -1 and task not in self.graph_tasks:
            self.notice_backward()
        if type(saved) is tuple:
            if saved[0]._version != saved[1]:  # asked here, since each call of Python counts
                check_version(*saved)
            return saved[0]  # type: ignore[no-any-return]
        return saved if isinstance(saved, torch.Tensor) else self._unpack_address(saved)

    def notice_backward(self) -> None:
        """Begins the phase of a backward, once, and registers a callback for its end."""
        task = _current_graph_task_id()
        if task == -1 or task in self.graph_tasks:
            return
        # The threads of a device and of the CPU may come at once: neither may touch a chunk before it has begun.
        # Each backward has a lock of its own: it may wait until another one has ended, inside of which others begin.
        with self._beginnings.setdefault(task, threading.RLock()):
            if task in self.graph_tasks:
                return

            def end() -> None:
                self.graph_tasks.discard(task)
                self._beginnings.pop(task, None)
                self._listener.backward_end()

            self._listener.backward_begin(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)
            self.graph_tasks.add(task)


@unseen()
def drop_failed_graph() -> None:
    """Lets go of the graph of a backward that failed in this thread.

    What was ready to run is kept by torch until the next backward in the same thread, and so are its activations.
    """
    with torch.inference_mode(False):
        torch.zeros((), device="cpu", requires_grad=True).backward()


def _without_version(packed: Any) -> Any:
    return packed[0] if type(packed) is tuple else packed


def may_keep(what: str) -> bool:
    """Whether hooks on what autograd keeps are possible here.

    Args:
        what: What computes, for the error.

    Raises:
        EngineError: If they are needed, and the user has disabled them.
    """
    if peek_interpreter_stack() is not None:
        return False
    if _saved_tensors_hooks_is_enabled():
        return True
    if torch.is_grad_enabled():
        message = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
        raise EngineError(
            f"{what} is inside of torch.autograd.graph.disable_saved_tensors_hooks({message!r}), but the engine needs "
            "these hooks where autograd records, since parameters leave the memory that autograd would keep; leave "
            "that block before, or compute inside of torch.no_grad() if no backward follows"
        )
    return False


def refuse_reentrant(what: str) -> None:
    """Refuses what runs inside of the backward of torch's reentrant checkpointing, which hides it from the outer one.

    Args:
        what: What runs, for the error.

    Raises:
        EngineError: If it does.
    """
    if type(torch._C._current_autograd_node()).__name__ == "CheckpointFunctionBackward":
        raise EngineError(
            f"{what} is recomputed by reentrant checkpointing, which hides the backward of parameters; pass "
            "use_reentrant=False to torch.utils.checkpoint.checkpoint"
        )
