"""What users call on a live model beside its forward: state dictionaries, saving, copies, moves, ``zero_grad``."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from hf_patrickstar.errors import EngineError
from hf_patrickstar.memory.operators import unseen
from hf_patrickstar.model import captures
from hf_patrickstar.model.model_set import roots_of
from hf_patrickstar.runtime.autograd import Autograd
from hf_patrickstar.runtime.live_tensor import LiveManaged, LiveWeights, cannot_share
from hf_patrickstar.runtime.manager import ChunkManager
from hf_patrickstar.runtime.parameter import ManagedParameter

_HOOK_DICTIONARIES = tuple(name for name in vars(torch.nn.Module()) if "_hooks" in name)


class LiveModel:
    """Keeps the model the user's own while an engine is attached.

    Args:
        model: The model.
        manager: Has the parameters' values.
        weights: Reads full parameters.
        autograd: What autograd keeps.
        is_narrow: See ``LiveTensor``.
    """

    def __init__(
        self, model: torch.nn.Module, manager: ChunkManager, weights: LiveWeights, autograd: Autograd, is_narrow: bool
    ) -> None:
        self._model = model
        self._roots = roots_of(model)
        self._manager, self._weights, self._autograd = manager, weights, autograd
        self._is_narrow = is_narrow
        self._installed: dict[torch.nn.Module, set[str]] = {}
        self._hook_ids: Callable[[], Iterable[int]] = tuple

    def bind(self, tensors: Iterable[ManagedParameter]) -> None:
        """Lets parameters answer; nobody uses the memory that they had when this has returned."""
        for tensor in tensors:
            tensor.bind(LiveManaged(tensor, self._manager, self._weights, self._autograd, self._is_narrow))
        self._manager.lock.let_others_read()

    # Attributes of modules

    def attach(self, hook_ids: Callable[[], Iterable[int]]) -> None:
        """Replaces methods on the modules; ``detach`` takes them away again.

        Args:
            hook_ids: Tells the identities of the engine's own hooks: copies of a module do not get them.
        """
        self._hook_ids = hook_ids
        for root in self._roots:
            self._install(root, "zero_grad", _bound(self._zero_grad, root))
        captures.attach(self)
        self.refresh()

    def refresh(self) -> None:
        """Does the same for modules that have come, and undoes it for those that are gone."""
        together: dict[str, Any] = {"save_pretrained": self._save_together}
        if self._weights.needs_all:
            together["generate"] = self._generate_together
        modules = set(self._model.modules())
        for module in [module for module in self._installed if module not in modules]:
            self._uninstall(module)
        for module in modules - (self._installed.keys() - {*self._roots}):
            self._install(module, "_apply", _bound(self._apply, module))
            self._install(module, "__reduce_ex__", _bound(self._reduce, module))
            for name, keep_together in together.items():
                # A model's parts, PEFT's for example, answer for methods of what is inside of them.
                if hasattr(module if module in self._roots else type(module), name) and name not in module.__dict__:
                    self._install(module, name, keep_together(getattr(module, name)))

    def _install(self, module: torch.nn.Module, name: str, method: Any) -> None:
        module.__dict__[name] = method
        self._installed.setdefault(module, set()).add(name)

    def detach(self) -> None:
        """Takes the methods away."""
        captures.detach(self)
        for module in list(self._installed):
            self._uninstall(module)

    def _uninstall(self, module: torch.nn.Module) -> None:
        for name in self._installed.pop(module):
            module.__dict__.pop(name, None)

    def _zero_grad(self, module: torch.nn.Module, set_to_none: bool = True) -> None:
        self._manager.zero_gradients(module.parameters(), set_to_none=set_to_none)

    # Copies

    def _reduce(self, module: torch.nn.Module, protocol: Any) -> Any:
        """``copy.deepcopy`` and ``pickle``: an ordinary module, without what the engine has put there."""
        reduced = type(module).__reduce_ex__(module, protocol)
        if not (isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict)):
            return reduced
        ours = self._installed.get(module, set()) | {"patrickstar_engine", "backward"}
        state, hook_ids = {name: value for name, value in reduced[2].items() if name not in ours}, {*self._hook_ids()}
        for name in _HOOK_DICTIONARIES:
            hooks = state.get(name)
            if hooks and not hook_ids.isdisjoint(hooks):
                state[name] = type(hooks)((key, value) for key, value in hooks.items() if key not in hook_ids)
        return (*reduced[:2], state, *reduced[3:])

    # Moves

    def _apply(
        self, module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> torch.nn.Module:
        """``model.to(...)`` and its kin, in torch's order: other values are written, another type or device refused."""
        modules = list(_children_first(module)) if recurse else [module]
        stay = set()
        for parameter in (parameter for part in modules for parameter in part._parameters.values()):
            tensor = None if parameter is None else self._manager.find(parameter)
            if tensor is not None and not _changes(function, tensor):
                stay.add(tensor.spec.index)
        for part in modules:
            for parameter in part._parameters.values():
                tensor = None if parameter is None else self._manager.find(parameter)
                if parameter is not None and (tensor is None or tensor.spec.index not in stay):
                    _apply_to(parameter, function, is_managed=tensor is not None)
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = function(buffer)
        return module

    # Generating and saving

    def _generate_together(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        def generate_together(*args: Any, **kwargs: Any) -> Any:
            self._manager.sharing.enter("generates")
            # A process whose texts are complete goes on until those of all are.
            return generate(*args, **{**kwargs, "synced_gpus": True})

        return generate_together

    def _save_together(self, save: Callable[..., Any]) -> Callable[..., Any]:
        def save_together(*args: Any, **kwargs: Any) -> Any:
            is_together = self._weights.needs_all  # else there are no others, or they follow this process already
            is_main = not is_together or self._manager.sharing.rank == 0
            with self._weights.streamed(is_reader=is_main):
                result = save(*args, **kwargs) if is_main else None
            if is_together:
                self._manager.sharing.meet("waits until the model is saved")
            return result

        return save_together


def _bound(method: Callable[..., Any], module: torch.nn.Module, *first: Any) -> Callable[..., Any]:
    """A method of a module; the module is not kept alive by its own attribute."""
    this = weakref.ref(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        return method(this(), *first, *args, **kwargs)

    return call


def _children_first(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The order in which torch applies a function to the tensors of a model."""
    for child in module.children():
        yield from _children_first(child)
    yield module


@unseen()
def _changes(function: Callable[[torch.Tensor], torch.Tensor], tensor: ManagedParameter) -> bool:
    """Whether a function does anything to a parameter: ``model.to`` calls it for what is there already.

    Raises:
        EngineError: If it would move or share the parameter, or give it another type or shape.
    """
    probe = tensor.typed.new_full((1,) * len(tensor.spec.shape), 0)
    changed = function(probe)
    if (changed.dtype, changed.device, changed.shape) != (probe.dtype, probe.device, probe.shape):
        raise EngineError(
            f"parameter '{tensor.spec.name}' cannot get another device, type or shape while it is in a chunk (it would "
            f"be {changed.dtype} on {changed.device}); call model.patrickstar_engine.detach() first, or change a "
            "copy (copy.deepcopy)"
        )
    if probe.device.type == "cpu" and probe.is_shared():
        raise EngineError(cannot_share(tensor))
    return changed is not probe or probe._version > 0


@torch.no_grad()
def _apply_to(parameter: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor], *, is_managed: bool) -> None:
    """Applies a function to a parameter and its gradient."""
    value, gradient = function(parameter), parameter.grad
    if value is not parameter:
        parameter.data = value
    if gradient is not None and is_managed:
        gradient.copy_(function(gradient))
    elif gradient is not None:
        gradient.data = function(gradient)
