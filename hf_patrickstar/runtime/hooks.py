"""Ties the manager to a model: every hook is registered here, and ``detach`` removes every one.

The model is not wrapped. Its modules get a forward pre-hook and a forward hook, its trainable parameters a
post-accumulate-grad hook, and the dictionaries that hold parameters one that notices attribute access.
"""

import contextlib
import dataclasses
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from hf_patrickstar.errors import EngineError
from hf_patrickstar.runtime.chunk import ManagedTensor
from hf_patrickstar.runtime.manager import ChunkManager
from hf_patrickstar.schedule.trace import input_shapes
from hf_patrickstar.states import Stage


class LiveWeights(Protocol):
    """Reads and writes full parameters; what makes ``state_dict`` and ``load_state_dict`` truthful."""

    def read(self, tensor: ManagedTensor) -> torch.Tensor:
        """The parameter's value, on the host, in the type that the model was loaded in."""
        ...

    def write(self, tensor: ManagedTensor, value: torch.Tensor) -> None:
        """Changes the parameter's value."""
        ...

    @property
    def needs_all(self) -> bool:
        """Whether all processes must read together."""
        ...

    def streamed(self, *, is_reader: bool) -> contextlib.AbstractContextManager[None]:
        """Saves the model piece by piece, the other processes following the one that reads."""
        ...

    def deferred(self, tensor: ManagedTensor) -> torch.Tensor | None:
        """A parameter as it is read while the model is saved piece by piece, or ``None``."""
        ...


@dataclasses.dataclass(slots=True)
class _Frame:
    """A module whose forward is running, and the parameters that it holds."""

    module: torch.nn.Module
    stage: Stage
    acquired: list[ManagedTensor] = dataclasses.field(default_factory=list)
    lookups: dict[int, "_Lookup"] = dataclasses.field(default_factory=dict)
    saved_tensors: Any = None
    handled: BaseException | None = None  # what the caller was handling when it began


class _Lookup(NamedTuple):
    """An embedding weight that is read at its home: a leaf stands in for the parameter while its module runs."""

    tensor: ManagedTensor
    leaf: torch.Tensor
    version: int


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
        self._together: list[tuple[torch.nn.Module, str]] = []
        self._managed = {id(tensor.parameter): tensor for tensor in manager.tensors}
        self._names = {module: name or type(model).__name__ for name, module in model.named_modules()}
        self._local = threading.local()
        self._graph_task = -1
        self._lock = threading.Lock()
        self._read_cache: dict[int, tuple[int, Any]] = {}
        self._loading: dict[torch.nn.Module, list[ManagedTensor]] = {}
        self._is_attached = False
        manager.unwind = self.unwind

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
        self._is_attached = True
        if self._manager.dtype is not torch.float32:
            self._handles.append(self._model.register_forward_pre_hook(self._cast_inputs, with_kwargs=True))
        original = self._model.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            original(set_to_none=set_to_none)
            self._on_zero_grad()

        self._model.__dict__.update(zero_grad=zero_grad, _apply=self._apply, __reduce_ex__=_refuse_copy)
        self._attach_methods()

    def _attach_methods(self) -> None:
        """Saving goes piece by piece; what processes call on a model that they share must keep them together."""
        together: dict[str, Any] = {"save_pretrained": self._save_together}
        if self._weights.needs_all:
            together["generate"] = self._generate_together
        for module in self._model.modules():
            for name, keep_together in together.items():
                is_there = hasattr(module if module is self._model else type(module), name)
                if is_there and name not in module.__dict__:
                    module.__dict__[name] = keep_together(getattr(module, name))
                    self._together.append((module, name))

    def _generate_together(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        def generate_together(*args: Any, **kwargs: Any) -> Any:
            self._manager.sharing.enter("generates")
            # A process whose texts are complete goes on until those of all are.
            return generate(*args, **{**kwargs, "synced_gpus": True})

        return generate_together

    def _save_together(self, save: Callable[..., Any]) -> Callable[..., Any]:
        def save_together(*args: Any, **kwargs: Any) -> Any:
            is_alone = not self._weights.needs_all  # or others follow this process already
            is_main = is_alone or self._manager.sharing.rank == 0
            with self._weights.streamed(is_reader=is_main), self._parameters_as_saved(save.__self__):  # type: ignore[attr-defined]
                result = save(*args, **kwargs) if is_main else None
            if not is_alone:
                self._manager.sharing.meet("waits until the model is saved")
            return result

        return save_together

    @contextlib.contextmanager
    def _parameters_as_saved(self, module: torch.nn.Module) -> Iterator[None]:
        """What is written into a model's configuration about its type is that of the files, not that of the chunks."""
        parameters = module.parameters

        def as_saved(*args: Any, **kwargs: Any) -> Iterator[torch.Tensor]:
            for parameter in parameters(*args, **kwargs):
                tensor = self._managed.get(id(parameter))
                deferred = None if tensor is None else self._weights.deferred(tensor)
                yield parameter if deferred is None else deferred

        module.__dict__["parameters"] = as_saved
        try:
            yield
        finally:
            module.__dict__.pop("parameters", None)

    def detach(self) -> None:
        """Removes every hook; the model's attributes are as they were before ``attach``."""
        self._is_attached = False
        self.unwind()
        self._manager.release_borrowed()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in self._watched:
            module._parameters = dict(module._parameters)
        self._watched.clear()
        for name in ("zero_grad", "_apply", "__reduce_ex__"):
            self._model.__dict__.pop(name, None)
        for module, name in self._together:
            module.__dict__.pop(name, None)
        self._together.clear()

    def _attach_module(self, module: torch.nn.Module, own: tuple[ManagedTensor, ...]) -> None:
        manager, name = self._manager, self._names[module]
        # One with a buffer (a scale, say) computes with it on the device.
        is_embedding = (
            isinstance(module, torch.nn.Embedding) and len(own) == 1 and not any(True for _ in module.buffers())
        )

        def before(_module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            stack = self._stack()
            if stack and _module is self._model:
                self.unwind()  # of a forward that was interrupted: torch runs no hooks after a KeyboardInterrupt
            frame = _Frame(_module, _current_stage())
            if not stack:
                self._enter_outermost(frame, name, args, kwargs)
            stack.append(frame)
            if is_embedding and self._looks_up(own[0]):
                return self._begin_lookup(frame, own[0], args, kwargs)
            for tensor in own:
                manager.acquire(tensor, name)
                frame.acquired.append(tensor)
            return None

        def after(_module: torch.nn.Module, args: Any, output: Any) -> Any:
            stack = self._stack()
            if not stack or stack[-1].module is not _module:
                return None
            frame = stack.pop()
            returned = _parameters_in(output)
            for tensor in frame.acquired:
                if id(tensor.parameter) in returned:
                    # Whoever called is about to use it: it stays until that forward ends.
                    (stack[-1].acquired if stack else manager.borrowed).append(tensor)
                else:
                    manager.release(tensor, frame.stage)
            for lookup in frame.lookups.values():
                counts = frame.stage is Stage.FORWARD and isinstance(output, torch.Tensor)
                nbytes = output.numel() * output.element_size() if counts else 0
                manager.end_look_up(*lookup, nbytes)
            if not stack:
                self._leave_outermost(frame)
            return _to(output, self._device) if frame.lookups and self._device.type != "cpu" else None

        self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, always_call=True))
        if own:
            module._parameters = _WatchedParameters(module._parameters, self._on_attribute)
            self._watched.append(module)
            self._attach_state_dict(module)

    def _looks_up(self, tensor: ManagedTensor) -> bool:
        """Whether an embedding reads its rows at home; not where somebody watches the gradient of the weight."""
        if not tensor.is_home_lookup or torch._C._functorch.peek_interpreter_stack() is not None:
            return False
        parameter: Any = tensor.parameter
        own = int(self._training and tensor.spec.trainable)
        return not parameter._backward_hooks and len(parameter._post_accumulate_grad_hooks or ()) <= own

    def _begin_lookup(self, frame: _Frame, tensor: ManagedTensor, args: Any, kwargs: dict[str, Any]) -> Any:
        """Lets an embedding look rows up where its weight is at home: only activations cross the bus."""
        leaf = self._manager.look_up(tensor)
        if leaf.requires_grad:
            this, parameter = weakref.ref(self), tensor.parameter

            def store(found: torch.Tensor) -> None:
                hooks, gradient = this(), found.grad
                found.grad = None
                if gradient is not None and (hooks is None or not hooks._is_attached):
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
                elif hooks is not None and gradient is not None:
                    hooks._notice_backward()
                    hooks._manager.store_gradient(tensor, gradient, is_at_home=True)

            leaf.register_post_accumulate_grad_hook(store)
        frame.lookups[id(tensor.parameter)] = _Lookup(tensor, leaf, leaf._version)
        if self._device.type == "cpu":
            return None
        host = torch.device("cpu")
        return _to(args, host), {name: _to(value, host) for name, value in kwargs.items()}

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
            if changed.dtype != placeholder.dtype or changed.device != placeholder.device:
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

    def _cast_inputs(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Floating inputs (pixels, features) follow the parameters' 16-bit type; labels keep their precision."""

        def cast(value: Any) -> Any:
            is_wide = isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64)
            return value.to(self._manager.dtype) if is_wide else value

        named = {name: value if "label" in name else cast(value) for name, value in kwargs.items()}
        return tuple(cast(value) for value in args), named

    def _enter_outermost(self, frame: _Frame, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        if frame.stage is Stage.BACKWARD:
            # A recomputation must not enter our hooks: checkpointing counts on its own being innermost.
            _refuse_reentrant(name)
            return
        frame.handled = sys.exc_info()[1]
        inputs = _tensors_in((args, kwargs))
        shapes = input_shapes([tensor.shape for tensor in inputs])
        present = (*inputs, *self._model.buffers())
        begin = self._manager.begin_evaluation if frame.stage is Stage.EVALUATION else self._manager.begin_forward
        begin("" if frame.module is self._model else name, shapes, present)
        # Where somebody else's hooks are in force (offloading of activations, checkpointing of the whole model) they
        # get all operands, and under torch.func hooks are not possible: an operand in a chunk then pins the chunk.
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is None and (
            torch._C._functorch.peek_interpreter_stack() is None
        ):
            frame.saved_tensors = torch.autograd.graph.saved_tensors_hooks(self._manager.pack, self._unpack)
            frame.saved_tensors.__enter__()

    def _leave_outermost(self, frame: _Frame) -> None:
        if frame.saved_tensors is not None:
            frame.saved_tensors.__exit__(None, None, None)
        has_failed = sys.exc_info()[1] is not frame.handled
        if frame.stage is Stage.EVALUATION:
            self._manager.steps.end_interlude(is_whole=not has_failed)
        elif frame.stage is Stage.FORWARD and has_failed:
            self._manager.steps.forget_step()
        elif frame.stage is Stage.FORWARD:
            self._manager.steps.end_forward()

    @property
    def is_running(self) -> bool:
        """Whether this thread is inside of a forward or backward."""
        return bool(self._stack()) or torch._C._current_graph_task_id() != -1

    def unwind(self) -> None:
        """Ends every forward that is open on this thread, because it was interrupted."""
        stack = self._stack()
        self._manager.steps.forget_step()
        while stack:
            frame = stack.pop()
            for tensor in frame.acquired:
                self._manager.release(tensor, frame.stage)
            if frame.saved_tensors is not None:
                frame.saved_tensors.__exit__(None, None, None)

    def _stack(self) -> list[_Frame]:
        stack = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack

    def _on_attribute(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """A parameter was read as an attribute: inside a forward it gets its value until that forward ends.

        Outside (a loss that uses ``model.lm_head.weight``, say) it has its value until the backward that may use it has
        ended, or until the next optimizer step, ``zero_grad`` or evaluation.

        Checkpointing keeps a frozen operand of a recomputation as the very object that it was given, which would be
        a placeholder again when backward comes to use it. So there it is given an alias of the chunk instead.
        """
        stack = self._stack()
        tensor = self._managed.get(id(parameter))
        if tensor is None or tensor.is_open:
            return parameter
        deferred = self._weights.deferred(tensor)
        if deferred is not None:
            return deferred
        if not stack:
            if tensor.users == 0 and self._is_attached:
                self._manager.acquire(tensor, "code outside of every forward that reads a parameter")
                self._manager.borrowed.append(tensor)
            return parameter
        frame = stack[-1]
        if id(parameter) in frame.lookups:
            return frame.lookups[id(parameter)].leaf
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
        if parameter.grad is not None:
            self._manager.store_gradient(self._managed[id(parameter)], parameter.grad)
            parameter.grad = None

    def _notice_backward(self) -> None:
        """Asks autograd, once per backward, to be told of its end."""
        task = torch._C._current_graph_task_id()
        with self._lock:  # a CUDA device's thread and the caller's may both come first
            is_new = task != -1 and task != self._graph_task
            if is_new:
                self._graph_task = task
        if is_new:
            self._manager.in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._manager.end_backward)

    # State dictionaries

    def _fill_state_dict(self, module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        for name, parameter in module._parameters.items():
            key = prefix + name
            if parameter is not None and key in state_dict and id(parameter) in self._managed:
                state_dict[key] = self._read(parameter)

    def _read(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The value of a parameter; tied names of one ``state_dict`` call share one tensor, as they do in torch."""
        self._manager.release_borrowed()
        tensor = self._managed[id(parameter)]
        deferred = self._weights.deferred(tensor)
        if deferred is not None:
            return deferred
        version, reference = self._read_cache.get(tensor.spec.index, (-1, None))
        if len(tensor.spec.aliases) and reference is not None and version == self._manager.version:
            value = reference()
            if value is not None:
                if self._weights.needs_all:  # others may not have kept theirs
                    self._weights.read(tensor)
                return value
        value = self._weights.read(tensor)
        self._read_cache[tensor.spec.index] = (self._manager.version, weakref.ref(value))
        return value

    def _open_for_loading(self, module: torch.nn.Module, state_dict: Any, prefix: str, metadata: Any, *_: Any) -> None:
        if metadata.get("assign_to_params_buffers", False):
            raise EngineError("load_state_dict(assign=True) replaces parameters that are in chunks; leave assign out")
        self._manager.release_borrowed()
        opened = []
        for name, parameter in module._parameters.items():
            tensor = self._managed.get(id(parameter))
            if tensor is not None and not tensor.is_open and prefix + name in state_dict:
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


def _parameters_in(output: Any) -> frozenset[int]:
    """Identities of the parameters among a module's outputs."""
    if isinstance(output, torch.Tensor):
        return frozenset((id(output),)) if isinstance(output, torch.nn.Parameter) else frozenset()
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return frozenset(id(value) for value in values if isinstance(value, torch.nn.Parameter))


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors among a module's inputs, in order; tuples, lists, mappings and dataclasses are looked into."""
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for item in values for tensor in _tensors_in(item)]


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
    if type(value) in (tuple, list):
        return type(value)(_to(item, device) for item in value)
    return value
