"""Which forwards are running, on which thread, and what their modules hold."""

import dataclasses
import threading
from typing import Any, NamedTuple

import torch
from torch._C import _current_graph_task_id

from hf_patrickstar.common.stage import Stage
from hf_patrickstar.runtime.parameter import ManagedParameter


class Lookup(NamedTuple):
    """An embedding weight that is read at its home: a leaf stands in for the parameter while its module runs.

    Attributes:
        tensor: The parameter.
        leaf: Aliases the home, in the parameter's shape; its gradient belongs to the parameter.
        version: The version counter of the leaf when the lookup began.
    """

    tensor: ManagedParameter
    leaf: torch.Tensor
    version: int


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A call of an outermost module.

    Attributes:
        name: Its name; empty for the model itself.
        args: Positional arguments.
        kwargs: Named arguments.
        is_training: Whether a backward follows.
        is_usual: Whether it is that of a whole model, which returns what a backward begins with.
    """

    name: str
    args: Any
    kwargs: Any
    is_training: bool
    is_usual: bool = True

    @property
    def has_padding(self) -> bool:
        """Whether some tokens are masked by an attention mask, if there is one; it waits for the device."""
        mask = self.kwargs.get("attention_mask")
        return isinstance(mask, torch.Tensor) and mask.dim() == 2 and not bool(mask.all())


@dataclasses.dataclass(slots=True)
class Frame:
    """A module whose forward is running, and the parameters that it holds.

    Attributes:
        module: The module.
        stage: Whether the forward belongs to training, evaluation, or a backward that recomputes.
        acquired: Parameters that are released when the forward ends.
        lookups: Embeddings that are looked up on the CPU, by the ``id`` of the parameter.
        replaced: Parameters that a copy stands in for: the dictionary of the module, the name, and the parameter.
        saved_tensors: The context of saved-tensors hooks, if this forward entered it: the outermost one does, and one
            inside of which hooks of the user would be innermost.
        autocast: The context of autocast, if this forward entered it.
        handled: The exception that the caller was handling when the forward began.
        has_lock: Whether the forward acquired the engine's lock, which it then releases; see ``EngineLock``.
    """

    module: torch.nn.Module
    stage: Stage
    acquired: list[ManagedParameter] = dataclasses.field(default_factory=list)
    lookups: dict[int, Lookup] = dataclasses.field(default_factory=dict)
    replaced: list[tuple[dict[str, Any], str, torch.Tensor]] = dataclasses.field(default_factory=list)
    saved_tensors: Any = None
    autocast: Any = None
    handled: BaseException | None = None
    has_lock: bool = False

    def leave_contexts(self) -> None:
        """Leaves autocast and the hooks on saved tensors."""
        autocast, self.autocast = self.autocast, None
        if autocast is not None:
            autocast.__exit__(None, None, None)
        saved_tensors, self.saved_tensors = self.saved_tensors, None
        if saved_tensors is not None:
            saved_tensors.__exit__(None, None, None)


class Frames(threading.local):
    """The forwards of one engine that are running on this thread: each thread sees its own.

    Attributes:
        stack: The forwards, innermost last.
    """

    def __init__(self) -> None:
        self.stack: list[Frame] = []

    def end(self, frame: Frame) -> None:
        """Puts parameters back that copies stood in for."""
        for parameters, name, parameter in frame.replaced:
            parameters[name] = parameter
        frame.replaced.clear()

    @property
    def is_inside(self) -> bool:
        """Whether this thread is inside of a forward or backward."""
        return bool(self.stack) or _current_graph_task_id() != -1

    @property
    def stage(self) -> Stage:
        """The stage of this thread."""
        return self.stack[-1].stage if self.stack else current_stage()

    def find_lookup(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The leaf that stands in for a parameter that is looked up on the CPU just now."""
        for frame in reversed(self.stack):
            lookup = frame.lookups.get(id(parameter))
            if lookup is not None:
                return lookup.leaf
        return None


_FORWARD, _BACKWARD, _EVALUATION = Stage.FORWARD, Stage.BACKWARD, Stage.EVALUATION


def current_stage() -> Stage:
    """The stage of a forward that begins now."""
    if _current_graph_task_id() != -1:
        return _BACKWARD
    return _FORWARD if torch.is_grad_enabled() else _EVALUATION
