"""Ties the manager to a model: every hook is registered here, and ``detach`` removes every one.

The model is not wrapped. Its modules get a forward pre-hook and a forward hook, its trainable parameters a
post-accumulate-grad hook, and the dictionaries that hold parameters one that notices attribute access.
"""

import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from hf_patrickstar.errors import EngineError
from hf_patrickstar.runtime.chunk import ManagedTensor
from hf_patrickstar.runtime.manager import ChunkManager
from hf_patrickstar.states import Stage


class LiveWeights(Protocol):
    """Reads and writes full parameters; what makes ``state_dict`` and ``load_state_dict`` truthful."""

    def read(self, tensor: ManagedTensor) -> torch.Tensor:
        """The parameter's value, on the host, in the type that the model was loaded in."""
        ...

    def write(self, tensor: ManagedTensor, value: torch.Tensor) -> None:
        """Changes the parameter's value."""
        ...


@dataclasses.dataclass(slots=True)
class _Frame:
    """A module whose forward is running, and the parameters that it holds."""

    module: torch.nn.Module
    stage: Stage
    acquired: list[ManagedTensor] = dataclasses.field(default_factory=list)
    saved_tensors: Any = None


class _WatchedParameters(dict):  # type: ignore[type-arg]
    """A module's ``_parameters`` that reports attribute access: a parameter may be read outside its own module."""

    def __init__(self, parameters: dict[str, Any], on_access: Callable[[torch.nn.Parameter], torch.Tensor]) -> None:
        super().__init__(parameters)
        self._on_access = on_access

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        return None if parameter is None else self._on_access(parameter)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class ModelHooks:
    """All hooks of one model.

    Args:
        model: The model.
        manager: What they call.
        weights: Reads and writes full parameters.
        on_zero_grad: Called after ``model.zero_grad()``.
        device: The compute device.
        training: Whether gradients are managed; an engine for evaluation leaves them to torch.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        manager: ChunkManager,
        weights: LiveWeights,
        on_zero_grad: Callable[[], None],
        device: torch.device,
        training: bool,
    ) -> None:
        self._model = model
        self._manager = manager
        self._weights = weights
        self._on_zero_grad = on_zero_grad
        self._device = device
        self._training = training
        self._handles: list[Any] = []
        self._watched: list[torch.nn.Module] = []
        self._managed = {id(tensor.parameter): tensor for tensor in manager.tensors}
        self._names = {module: name or type(model).__name__ for name, module in model.named_modules()}
        self._local = threading.local()
        self._graph_task = -1
        self._read_cache: dict[int, tuple[int, Any]] = {}
        self._loading: dict[torch.nn.Module, list[ManagedTensor]] = {}

    # Attach and detach

    def attach(self) -> None:
        """Registers everything."""
        for module in self._model.modules():
            own = tuple(
                self._managed[id(parameter)] for parameter in module._parameters.values() if parameter is not None
            )
            if own or any(True for _ in module.parameters()):
                self._attach_module(module, own)
        if self._training:
            # The garbage collector cannot see through a parameter's hooks: a strong reference would be a leak.
            this = weakref.ref(self)

            def store(parameter: torch.Tensor) -> None:
                hooks = this()
                if hooks is not None:
                    hooks._store_gradient(parameter)

            for tensor in self._manager.tensors:
                if tensor.spec.trainable:
                    self._handles.append(tensor.parameter.register_post_accumulate_grad_hook(store))
        original = self._model.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            original(set_to_none=set_to_none)
            self._on_zero_grad()

        self._model.__dict__.update(zero_grad=zero_grad, _apply=self._apply, __reduce_ex__=_refuse_copy)

    def detach(self) -> None:
        """Removes every hook; the model's attributes are as they were before ``attach``."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in self._watched:
            module._parameters = dict(module._parameters)
        self._watched.clear()
        for name in ("zero_grad", "_apply", "__reduce_ex__"):
            self._model.__dict__.pop(name, None)

    def _attach_module(self, module: torch.nn.Module, own: tuple[ManagedTensor, ...]) -> None:
        on_host = bool(own) and all(tensor.chunk.spec.on_host for tensor in own) and self._device.type != "cpu"
        stack_of, manager, name = self._stack, self._manager, self._names[module]

        def before(_module: torch.nn.Module, args: Any) -> Any:
            stack = stack_of()
            frame = _Frame(_module, _current_stage())
            if not stack and frame.stage is Stage.BACKWARD:
                _refuse_reentrant(name)
            stack.append(frame)
            if len(stack) == 1 and frame.stage is not Stage.BACKWARD:
                # A recomputation must not enter them: checkpointing counts on its own hooks being innermost.
                frame.saved_tensors = torch.autograd.graph.saved_tensors_hooks(manager.pack, self._unpack)
                frame.saved_tensors.__enter__()
            for tensor in own:
                manager.acquire(tensor, name)
                frame.acquired.append(tensor)
            return tuple(_to(value, torch.device("cpu")) for value in args) if on_host else None

        def after(_module: torch.nn.Module, args: Any, output: Any) -> Any:
            stack = stack_of()
            if not stack or stack[-1].module is not _module:
                return None
            frame = stack.pop()
            for tensor in frame.acquired:
                manager.release(tensor, frame.stage)
            if frame.saved_tensors is not None:
                frame.saved_tensors.__exit__(None, None, None)
            return _to(output, self._device) if on_host else None

        self._handles.append(module.register_forward_pre_hook(before, prepend=True))
        self._handles.append(module.register_forward_hook(after, always_call=True))
        if own:
            module._parameters = _WatchedParameters(module._parameters, self._on_attribute)
            self._watched.append(module)
            self._attach_state_dict(module)

    def _attach_state_dict(self, module: torch.nn.Module) -> None:
        # torch marks this hook with an attribute, which a bound method cannot carry.
        self._handles.append(module.register_state_dict_post_hook(lambda *args: self._fill_state_dict(*args)))
        self._handles.append(module.register_load_state_dict_pre_hook(self._open_for_loading))
        self._handles.append(module.register_load_state_dict_post_hook(self._close_after_loading))

    def _apply(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> torch.nn.Module:
        """``model.to(...)`` and its kin: buffers follow; what would move or change parameters is refused."""
        for tensor in self._manager.tensors:
            placeholder = tensor.placeholder.reshape(-1)[:1]
            changed = function(placeholder)
            if (changed.dtype, changed.device) != (placeholder.dtype, placeholder.device):
                raise EngineError(
                    f"the model cannot be moved to {changed.device} as {changed.dtype} while its parameters are in "
                    "chunks; call model.patrickstar_engine.detach() first"
                )
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = function(buffer)
        return self._model

    # Forward

    def _stack(self) -> list[_Frame]:
        stack = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack

    def _on_attribute(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """A parameter was read as an attribute: inside a forward it gets its value until that forward ends.

        Checkpointing keeps a frozen operand of a recomputation as the very object that it was given, which would be
        a placeholder again when backward comes to use it. So there it is given an alias of the chunk instead.
        """
        stack = self._stack()
        tensor = self._managed.get(id(parameter)) if stack else None
        if tensor is None:
            return parameter
        frame = stack[-1]
        if tensor.users == 0:
            self._manager.acquire(tensor, self._names[frame.module])
            frame.acquired.append(tensor)
        if frame.stage is Stage.BACKWARD and not parameter.requires_grad:
            return parameter.detach()
        return parameter

    # Backward

    def _unpack(self, saved: Any) -> torch.Tensor:
        self._notice_backward()
        return self._manager.unpack(saved)

    def _store_gradient(self, parameter: torch.Tensor) -> None:
        self._notice_backward()
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            self._manager.store_gradient(self._managed[id(parameter)], gradient)

    def _notice_backward(self) -> None:
        """Asks autograd, once per backward, to be told of its end."""
        task = torch._C._current_graph_task_id()
        if task != -1 and task != self._graph_task:
            self._graph_task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._manager.end_backward)

    # State dictionaries

    def _fill_state_dict(self, module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        for name, parameter in module._parameters.items():
            key = prefix + name
            if parameter is not None and key in state_dict:
                state_dict[key] = self._read(parameter)

    def _read(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The value of a parameter; tied names of one ``state_dict`` call share one tensor, as they do in torch."""
        tensor = self._managed[id(parameter)]
        version, reference = self._read_cache.get(tensor.spec.index, (-1, None))
        if len(tensor.spec.aliases) and reference is not None and version == self._manager.version:
            value = reference()
            if value is not None:
                return value
        value = self._weights.read(tensor)
        self._read_cache[tensor.spec.index] = (self._manager.version, weakref.ref(value))
        return value

    def _open_for_loading(self, module: torch.nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
        opened = []
        for name, parameter in module._parameters.items():
            tensor = self._managed.get(id(parameter))
            if tensor is not None and prefix + name in state_dict:
                tensor.parameter.data = self._weights.read(tensor)
                opened.append(tensor)
        self._loading[module] = opened

    def _close_after_loading(self, module: torch.nn.Module, incompatible_keys: Any) -> None:
        for tensor in self._loading.pop(module, []):
            value = tensor.parameter.data
            tensor.parameter.data = tensor.placeholder
            self._weights.write(tensor, value)


def _current_stage() -> Stage:
    if torch._C._current_graph_task_id() != -1:
        return Stage.BACKWARD
    return Stage.FORWARD if torch.is_grad_enabled() else Stage.EVALUATION


def _refuse_copy(protocol: int) -> Any:
    raise EngineError(
        "a model with an engine attached cannot be copied or pickled, since its values are in chunks: copy "
        "model.state_dict() or use save_pretrained(), or call model.patrickstar_engine.detach() first"
    )


def _refuse_reentrant(name: str) -> None:
    """A forward inside the backward of torch's reentrant checkpointing would hide parameters from the outer one."""
    if type(torch._C._current_autograd_node()).__name__ == "CheckpointFunctionBackward":
        raise EngineError(
            f"module '{name}' is recomputed by reentrant checkpointing, which hides the backward of parameters; pass "
            "use_reentrant=False to torch.utils.checkpoint.checkpoint"
        )


def _to(value: Any, device: torch.device) -> Any:
    """Moves a tensor, or the tensors of a tuple, to a device; leaves anything else alone."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, (tuple, list)):
        return type(value)(_to(item, device) for item in value)
    return value
