"""Ties a listener to a model: every hook is registered here, and ``detach`` removes every one.

The model is not wrapped. Its modules get a forward pre-hook and a forward hook, its trainable parameters a
post-accumulate-grad hook, and every parameter a class that answers while it has no value (``live_parameter``).
"""

import dataclasses
import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._C import _current_graph_task_id, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._autograd import _profiler_enabled, _top_saved_tensors_default_hooks
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._pytree import tree_iter, tree_map_only

from hf_patrickstar.common.stage import Stage
from hf_patrickstar.memory.operators import unseen
from hf_patrickstar.model.casting import Casting
from hf_patrickstar.model.compiled import (
    NAMES_OF_CALLS,
    CompiledCall,
    calls_of,
    ends_graphs,
    hide_from_dynamo,
    is_compiled,
    may_be_traced,
)
from hf_patrickstar.model.live_parameter import GET_GRAD, RAW, SET_GRAD, LiveMixin, raw_data, requires_grad
from hf_patrickstar.model.model_set import roots_of
from hf_patrickstar.model.quantized import PackedLayers, parameters_of
from hf_patrickstar.runtime.autograd import Autograd, may_keep, refuse_reentrant
from hf_patrickstar.runtime.frames import Call, Frame
from hf_patrickstar.runtime.listener import ModelListener
from hf_patrickstar.runtime.parameter import ManagedParameter, ValuePlace
from hf_patrickstar.schedule.trace import input_shapes

# A name of the module is found faster than a member of an enum.
_FORWARD, _BACKWARD, _EVALUATION = Stage.FORWARD, Stage.BACKWARD, Stage.EVALUATION
_GIVEN_UP = ValuePlace.GIVEN_UP


class ModelHooks:
    """All hooks of one model.

    Args:
        model: The model.
        listener: What the hooks call.
        device: The compute device.
        casting: The types that forwards compute in.
        follow_model: Called before an outermost forward, with whether it is a training forward.

    Attributes:
        autograd: What autograd keeps and needs.
        packed_layers: The layers whose weights are packed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        listener: ModelListener,
        device: torch.device,
        casting: Casting,
        follow_model: Callable[[bool], bool] | None = None,
    ) -> None:
        self._model = model
        self._casting = casting
        self._roots = roots_of(model)
        self._listener = listener
        self._device = device
        self._follow_model = follow_model
        # Their tensors and hooks.
        self._of_modules: dict[torch.nn.Module, tuple[list[ManagedParameter], list[Any]]] = {}
        self._of_tensors: dict[int, Any] = {}
        self._of_model: list[Any] = []
        self._places: list[dict[str, Any]] = []  # where modules keep their parameters and modules
        self._attributes: list[dict[str, Any]] = []  # of modules
        self._structure: tuple[list[int], list[Any]] = [], []  # at the last look: entries per place, all entries
        self._names: dict[torch.nn.Module, str] = {}
        self.packed_layers = PackedLayers()
        self._compiled: dict[torch.nn.Module, Any] = {}  # with what is called; see [Note: compiled parts]
        self._parameters = listener.parameters
        self.autograd = Autograd(listener)
        self._is_attached = self._is_resting = False
        self._resting: frozenset[int] = frozenset()  # the chunks of parameters that keep their values
        self._is_blind = False  # whether a model returns nothing that a backward begins with
        self._store_gradient = self._make_store()

    # Attach and detach

    def attach(self) -> None:
        """Registers everything."""
        hide_from_dynamo()
        self._attach_modules()
        self._attach_tensors()
        self._is_attached = True
        if self._casting.inputs is not None:
            for root in self._roots:
                self._of_model.append(root.register_forward_pre_hook(self._cast_inputs, with_kwargs=True))

    def _attach_tensors(self) -> None:
        for tensor in self._listener.tensors:
            self.attach_tensor(tensor)

    def follow_rest(self) -> None:
        """Lets inner modules have no hooks whose parameters all keep their values; see [Note: rest]."""
        before = self._resting, self._is_resting
        if before == self._listener.resting:
            return
        self._resting, self._is_resting = self._listener.resting
        with temporarily_clear_interpreter_stack():
            self._attach_modules()
            if self._is_resting:
                self._detach_tensors()
            elif before[1]:
                self._attach_tensors()

    def ids(self) -> set[int]:
        """Identities of all hooks of modules."""
        handles = [handle for _, own in self._of_modules.values() for handle in own]
        return {handle.id for handle in (*handles, *self._of_model)}

    def _attach_modules(self) -> None:
        """Registers hooks of modules that are new, removes those of modules that are gone, and notes what all hold."""
        self._names = {module: name or type(self._model).__name__ for name, module in self._model.named_modules()}
        self.packed_layers.prepare(self._names)
        compiled = {module: calls_of(module) for module in self._names if is_compiled(module)}
        lists = {}
        if compiled != self._compiled:  # others have hooks now
            lists = {module: own for module, (own, _) in self._of_modules.items()}
            for module in list(self._of_modules):
                self._detach_module(module)
        inside = {part for module in compiled for part in module.modules() if part is not module}
        self._compiled = compiled
        held = {module: self._held_by(module) for module in self._names if any(True for _ in module.parameters())}
        if self._resting:
            for own in held.values():
                own[:] = [tensor for tensor in own if tensor.chunk.spec.index not in self._resting]
            held = {module: own for module, own in held.items() if own or module in self._roots}
        for module in [module for module in self._of_modules if module not in held]:
            self._detach_module(module)
        for module, own in held.items():
            if module in self._of_modules:
                self._of_modules[module][0][:] = own  # in place: its hooks refer to this list
            else:
                here = lists.get(module, [])  # a hook that is running goes on with this list
                here[:] = own
                self._of_modules[module] = here, [] if module in inside else self._attach_module(module, here)
        self._places = [place for module in self._names for place in (module._parameters, module._modules)]
        self._attributes = [module.__dict__ for module in self._names]
        self._compiled = {module: calls_of(module) for module in self._compiled}
        self._structure = self._found_structure()

    def _detach_module(self, module: torch.nn.Module) -> None:
        own, handles = self._of_modules.pop(module)
        own.clear()  # a thread that waits for the lock in the hook goes on without
        for handle in handles:
            handle.remove()

    def attach_tensor(self, tensor: ManagedParameter) -> None:
        """Registers the hook that takes the gradient of a parameter."""
        if not tensor.spec.trainable or self._is_resting:
            return
        parameter: Any = tensor.parameter
        needs_grad = requires_grad(parameter)
        parameter.requires_grad_(True)  # torch takes no such hook of a parameter that is frozen for the moment
        handle = parameter.register_post_accumulate_grad_hook(self._store_gradient)
        hooks = parameter._post_accumulate_grad_hooks
        for key in [key for key in hooks if key != handle.id]:
            hooks[key] = hooks.pop(key)  # those of users come after it
        self._of_tensors[tensor.spec.index] = handle
        # torch.utils.swap_tensors takes what calls the hooks along, and leaves them here.
        parameter._post_accumulate_grad_hooks = hooks
        parameter.requires_grad_(needs_grad)

    def detach(self) -> None:
        """Removes every hook; the model's attributes are as they were before ``attach``."""
        self._is_attached = False
        self._listener.unwind()
        for module in list(self._of_modules):
            self._detach_module(module)
        self._detach_tensors()
        for handle in self._of_model:
            handle.remove()
        self._of_model.clear()

    def _detach_tensors(self) -> None:
        for handle in self._of_tensors.values():
            handle.remove()
        self._of_tensors.clear()

    # Changes of the model

    def may_have_changed(self, is_training: bool) -> bool:
        """Whether modules or parameters of the model may have changed since the last look.

        Args:
            is_training: Whether a frozen parameter with ``requires_grad`` counts as a change.
        """
        (sizes, found), (sizes_before, before) = self._found_structure(), self._structure
        if sizes != sizes_before or not all(map(operator.is_, found, before)):
            return True
        for tensor in self._listener.tensors:
            # Asked of the class first, since each call of Python counts: ``is_ours`` is one.
            if tensor.place is _GIVEN_UP or not (isinstance(tensor.parameter, LiveMixin) or tensor.is_ours):
                return True
            if is_training and not tensor.spec.trainable and requires_grad(tensor.parameter):
                return True
        return False

    def _found_structure(self) -> tuple[list[int], list[Any]]:
        contents = [place.values() for place in self._places]
        calls = [own.get(name) for name in NAMES_OF_CALLS for own in self._attributes]
        return list(map(len, contents)), [*itertools.chain.from_iterable(contents), *calls]

    def refresh(self) -> None:
        """Registers hooks anew where modules hold other parameters now."""
        self._attach_modules()

    def release(self, tensor: ManagedParameter) -> None:
        """Removes the hook of a parameter that is given back."""
        handle = self._of_tensors.pop(tensor.spec.index, None)
        if handle is not None:
            handle.remove()

    def _attach_module(self, module: torch.nn.Module, own: list[ManagedParameter]) -> list[Any]:
        listener, frames, autograd, name = self._listener, self._listener.frames, self.autograd, self._names[module]
        parameters = self._parameters
        reads_rows = _is_embedding(module)
        is_model, is_root = module is self._model, module in self._roots

        @ends_graphs
        def before(_module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            stack = frames.stack
            if stack and (is_model or (is_root and stack[0].module is _module)):
                listener.unwind()  # of a forward that was interrupted: torch runs no hooks after a KeyboardInterrupt
            frame = Frame(
                _module,
                _BACKWARD if _current_graph_task_id() != -1 else _FORWARD if torch.is_grad_enabled() else _EVALUATION,
            )
            if not stack:
                self._enter_outermost(frame, name, args, kwargs)
            stack.append(frame)
            if not own:
                return None
            if reads_rows and len(own) == 1 and self._looks_up(own[0]):
                return self._begin_lookup(frame, own[0], args, kwargs)
            if peek_interpreter_stack() is not None:
                self._replace(frame, name)
                return None
            if _len_torch_function_stack() or _len_torch_dispatch_stack() or _profiler_enabled():
                listener.before_module(frame, own, name)
            else:
                parameters.acquire_all(own, name, frame.acquired, is_recomputed=frame.stage is _BACKWARD)
            others = _top_saved_tensors_default_hooks(True)
            if frame.saved_tensors is None and (others is None or others[0] is not autograd.pack):
                frame.saved_tensors = autograd.keep_inside()
            if frame.stage is _BACKWARD and may_be_traced(_module):
                self._replace_frozen(frame)
            return None

        def after(_module: torch.nn.Module, args: Any, output: Any) -> Any:
            stack = frames.stack
            if not stack or stack[-1].module is not _module:
                return None
            frame = stack.pop()
            if stack and frame.saved_tensors is not None:
                frame.leave_contexts()
            if frame.replaced and frame.stage is _BACKWARD:
                self._take_over_written(frame)
            if frame.replaced or _len_torch_function_stack() or _len_torch_dispatch_stack() or _profiler_enabled():
                listener.after_module(frame)
            elif frame.acquired:
                parameters.release_all(frame.acquired)
            for lookup in frame.lookups.values():
                counts = frame.stage is Stage.FORWARD and isinstance(output, torch.Tensor)
                nbytes = output.numel() * output.element_size() if counts else 0
                listener.lookup_end(lookup, nbytes)
            result = _to(output, self._device) if frame.lookups and self._device.type != "cpu" else output
            if frame.autocast is not None:
                result = self._casting.widen(result)
            if not stack:
                self._leave_outermost(frame, result)
            return None if result is output else result

        if module._compiled_call_impl is not None:
            return [CompiledCall(module, before, after)]
        return [
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_hook(after, always_call=True),
        ]

    def _held_by(self, module: torch.nn.Module) -> list[ManagedParameter]:
        """What a module computes with itself, each parameter once."""
        return list(dict.fromkeys(tensor for _, _, tensor in self._places_of(module)))

    @unseen()
    def _replace(self, frame: Frame, name: str) -> None:
        """Puts copies in the place of a module's parameters, for a forward under ``torch.func``.

        There autograd keeps the parameter itself as an operand, which has no value any more when backward uses it, and
        saved-tensors hooks are not possible. The copies belong to the graph, and take memory as long as it lives.
        """
        for places, key, tensor in self._places_of(frame.module):
            self._parameters.acquire_all((tensor,), name, [], is_recomputed=False)
            places[key] = tensor.parameter.clone()
            self._parameters.release_all((tensor,))
            frame.replaced.append((places, key, tensor.parameter))

    @unseen()
    def _replace_frozen(self, frame: Frame) -> None:
        """Puts frozen parameters that are aliases in the place of those of a module that is recomputed.

        Checkpointing would keep the objects of frozen ones, so these have no value. To dynamo the aliases are what the
        parameters were in the forward, down to which of them are one: the same graph is run.
        """
        aliases: dict[ManagedParameter, torch.Tensor | None] = {}
        for places, key, tensor in self._places_of(frame.module):
            if tensor not in aliases:
                aliases[tensor] = tensor.live.stand_in()
            alias = aliases[tensor]
            if alias is not None:
                places[key] = alias
                frame.replaced.append((places, key, tensor.parameter))

    def _take_over_written(self, frame: Frame) -> None:
        """Takes over what a module has written to aliases of its parameters."""
        for places, key, parameter in frame.replaced:
            alias, tensor = places.get(key), self._parameters.find(parameter)
            if isinstance(alias, LiveMixin) and tensor is not None and alias._version:  # type: ignore[attr-defined]
                tensor.live.take_over_stand_in(raw_data(alias))  # type: ignore[arg-type]

    def _places_of(self, module: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str, ManagedParameter]]:
        """Where what a module computes with is held: a dictionary, the name in it, and what stands for it."""
        for part in _computed_by(module):
            for place, key, _ in parameters_of(part):
                tensor = None if place[key] is None else self._parameters.find(place[key])
                if tensor is not None:
                    yield place, key, tensor

    def _looks_up(self, tensor: ManagedParameter) -> bool:
        """Whether an embedding reads its rows at home; not if the user has hooks on the gradient of the weight."""
        if not tensor.is_cpu_embedding or peek_interpreter_stack() is not None:
            return False
        return not has_hooks_of_user(tensor.parameter, tensor.spec.trainable)

    def _begin_lookup(self, frame: Frame, tensor: ManagedParameter, args: Any, kwargs: dict[str, Any]) -> Any:
        """Lets an embedding look rows up where its weight is at home: only activations cross the bus."""
        lookup = frame.lookups[id(tensor.parameter)] = self._listener.lookup_begin(tensor)
        if lookup.leaf.requires_grad:
            this, parameter = weakref.ref(self), tensor.parameter

            def store(found: torch.Tensor) -> None:
                hooks, gradient = this(), found.grad
                found.grad = None
                if gradient is not None and (hooks is None or not hooks._is_attached):
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
                elif hooks is not None and gradient is not None:
                    hooks.autograd.notice_backward()
                    hooks._listener.gradient_ready(tensor, gradient, is_at_home=True)

            lookup.leaf.register_post_accumulate_grad_hook(store)
        if self._device.type == "cpu":
            return None
        return _to((args, kwargs), torch.device("cpu"))

    # Forward

    def _cast_inputs(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any] | None = None) -> Any:
        # Torch passes no named arguments to a hook that was removed while the hook before it waited for the lock.
        return None if kwargs is None else self._casting.narrow(args, kwargs)

    @unseen()
    def _enter_outermost(self, frame: Frame, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        if frame.stage is Stage.BACKWARD:
            # Checkpointing needs its own saved-tensors hooks to be innermost, so a recomputation does not enter ours.
            refuse_reentrant(f"module '{name}'")
            self._begin_autocast(frame)
            return
        frame.handled = sys.exc_info()[1]
        may_keep(f"the forward of {name}")
        self._listener.lock.acquire(f"the forward of {name}")
        if not self._is_attached:  # another thread has detached the engine, or failed to attach it, meanwhile
            self._listener.lock.release()
            return
        try:
            if self._follow_model is not None:
                self._follow_model(frame.stage is Stage.FORWARD)
            inputs = list(tensors_in((args, kwargs)))
            shapes = input_shapes([tensor.shape for tensor in inputs])
            present = itertools.chain(inputs, self._model.buffers(), self.packed_layers.tables())
            name = "" if frame.module is self._model else name
            is_usual = frame.module in self._roots and not self._is_blind
            call = Call(name, args, kwargs, frame.stage is Stage.FORWARD, is_usual)
            self._listener.before_forward(call, shapes, present)
            self.follow_rest()
        except BaseException:
            self._listener.lock.release()
            raise
        frame.has_lock = True
        if not self._is_resting:
            frame.saved_tensors = self.autograd.kept_as_numbers()
            frame.saved_tensors.__enter__()
        self._begin_autocast(frame)

    def _begin_autocast(self, frame: Frame) -> None:
        frame.autocast = self._casting.autocast(is_recomputed=frame.stage is Stage.BACKWARD)
        if frame.autocast is not None:
            frame.autocast.__enter__()

    def _leave_outermost(self, frame: Frame, output: Any) -> None:
        frame.leave_contexts()
        if frame.has_lock:
            has_failed = sys.exc_info()[1] is not frame.handled
            is_transformed = peek_interpreter_stack() is not None
            if self._is_resting and frame.stage is _FORWARD and not (has_failed or is_transformed):
                self._announce_backward(output)
            self._listener.after_forward(frame, has_failed=has_failed)

    # Backward

    @unseen()
    def _announce_backward(self, output: Any) -> None:
        """Lets the first gradient of what a model has returned begin the phase of a backward."""
        this = weakref.ref(self.autograd)

        def begin(_: torch.Tensor) -> None:
            autograd = this()
            if autograd is not None:
                autograd.notice_backward()

        found = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        for tensor in found:
            tensor.register_hook(begin)
        self._is_blind = not found

    def _make_store(self) -> Callable[[torch.Tensor], None]:
        """Makes the hook that takes what autograd has added up in ``parameter.grad``."""
        # The garbage collector cannot see through a parameter's hooks: a strong reference would be a leak.
        this = weakref.ref(self)

        def store(parameter: torch.Tensor) -> None:
            hooks = this()
            if hooks is None:
                return
            if _current_graph_task_id() not in hooks.autograd.graph_tasks:
                hooks.autograd.notice_backward()
            listener, tensor = hooks._listener, hooks._parameters.by_parameter.get(id(parameter))
            if tensor is None or tensor.place is _GIVEN_UP:
                return
            with RAW():
                gradient = GET_GRAD(parameter)
                SET_GRAD(parameter, None)
            if gradient is None:
                return
            if gradient.requires_grad:  # backward(create_graph=True)
                listener.recorded_gradient_ready(tensor, gradient)
            elif _len_torch_function_stack() or _len_torch_dispatch_stack() or _profiler_enabled():
                listener.gradient_ready(tensor, gradient)
            else:
                listener.store_gradient(tensor, gradient)

        return store


def _computed_by(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules with whose parameters a module computes itself, instead of calling them."""
    if is_compiled(module):
        return list(module.modules())
    return [module, module.out_proj] if isinstance(module, torch.nn.MultiheadAttention) else [module]


def has_hooks_of_user(parameter: Any, is_trainable: bool) -> bool:
    """Whether a parameter has hooks on its gradient beside ours, which is that of a trainable one."""
    with RAW():
        return bool(parameter._backward_hooks) or len(parameter._post_accumulate_grad_hooks or ()) > int(is_trainable)


def _is_embedding(module: torch.nn.Module) -> bool:
    """Whether a module reads rows and does nothing else; one with a buffer, a scale say, computes on the device."""
    return isinstance(module, torch.nn.Embedding) and not any(True for _ in module.buffers())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among a module's inputs, in order; mappings and dataclasses that pytree does not know count too."""
    for leaf in tree_iter(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from tensors_in(list(leaf.values()))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


def _to(value: Any, device: torch.device) -> Any:
    """Moves every tensor in a value to a device."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)
