"""Tensors that have no bytes, and copies of models and of their inputs that have such tensors.

A copy shares nothing with what is copied that a forward changes.

[Note: what a copy refers to]
``copy.deepcopy`` does not copy functions. A function in a module's ``__dict__`` (``model.forward = wrapper``) may refer
to the module itself, in its closure, in its attributes or through a bound method, and the copy would run the user's
module. So functions are copied here, too, with what they refer to:

- A function of the user's: all that it refers to is copied, since it may change any of it; so are global variables
  while nobody shall see the copy run (``user_state.py``).
- A function of a library (``LIBRARIES``) changes nothing that it refers to but the model; only what leads to the model
  is copied.

Hooks of the user's look at values, and a copy has none: it does not have these hooks. Hooks of libraries take part in
what a model computes (NEFTune adds noise to embeddings), and the copy has them. What the engine has put on a model, the
copy has not.
"""

import contextlib
import contextvars
import copy
import copyreg
import functools
import operator
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from hf_patrickstar.errors import TraceError
from hf_patrickstar.model.live_parameter import LiveMixin
from hf_patrickstar.model.quantized import is_packed, packed_type
from hf_patrickstar.runtime.hooks import tensors_in
from hf_patrickstar.units import MIB

LIBRARIES = ("torch", "transformers", "peft", "trl", "accelerate")
"""Packages whose hooks take part in what a model computes. Hooks of any other code are the user's."""

OTHERS_CODE = frozenset({*LIBRARIES, "numpy", *sys.stdlib_module_names} - {"__main__"})
"""Packages whose code is not the user's: its functions change nothing that they refer to."""
_PACKAGE = __name__.partition(".")[0]
_MOST_ARRAY_NBYTES = 64 * MIB
_ATOMIC = {
    *(type(None), type(...), type(NotImplemented), bool, int, float, complex, str, bytes, range, slice, object),
    *(types.CodeType, types.GetSetDescriptorType, types.MemberDescriptorType, torch.Size, torch.dtype, torch.device),
    *(torch.layout, torch.memory_format, torch.jit.ScriptFunction),
}
_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque)
_CALLED = (types.FunctionType, types.MethodType, functools.partial)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OTHER_HOOKS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
"""Hooks that no forward or backward calls."""
_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class FakeTensors(FakeTensorMode):
    """Inside of it new tensors have no bytes.

    ``deepcopy`` copies the attributes of a fake tensor, and its mode is one of them: the copies, of layers that a model
    makes of its first one for example, would be those of another mode, with which torch does not compute.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "FakeTensors":
        return self


def copy_without_bytes(
    value: Any, *, shapes: Mapping[int, Sequence[int]] | None = None, device: torch.device | None = None
) -> Any:
    """Copies a model, or inputs, with tensors that have no bytes; called under ``FakeTensorMode``.

    The model may have an engine: no parameter is read, and the copy is an ordinary model. See [Note: what a copy refers
    to].

    Args:
        value: The model, its inputs, or a tuple of both; tensors may be those of an engine, on the meta device, or of
            ``deferred_weights``.
        shapes: The shapes that some tensors among inputs get, by their place among ``tensors_in(value)``.
        device: The device of all tensors; by default each has its own.

    Raises:
        TraceError: If something cannot be copied, such as an open file.
    """
    copier = Copier(device)
    for model in value if isinstance(value, tuple) else (value,):
        if isinstance(model, torch.nn.Module):
            copier.names |= {id(module): name or "the model" for name, module in model.named_modules()}
    tensors = list(tensors_in(value)) if shapes else []
    for place, shape in (shapes or {}).items():
        copier.make_tensor(tensors[place], shape)
    with reported("the model" if isinstance(value, torch.nn.Module) else "an input of the model"):
        return copier.copy(value)


def as_fake(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of a module whose tensors have no bytes; called under fake tensors.

    Args:
        module: The module; its parameters may be those of ``deferred_weights``, or on the meta device.
    """
    copied: torch.nn.Module = copy_without_bytes(module, device=torch.device("cpu"))
    for part in copied.modules():
        if "name_or_path" in vars(part):
            vars(part)["name_or_path"] = ""  # or the engine would compare frozen weights with files
    return copied


def copying() -> FakeCopyMode:
    """Inside of it ``deepcopy`` makes fake tensors of ordinary ones."""
    return FakeCopyMode(fake_mode())


own_code: contextvars.ContextVar[Any] = contextvars.ContextVar("own_code", default=None)
"""The ``OwnCode`` (``user_state.py``) of the thread that traces; ``None`` where copies run with variables of users."""


def is_of_user(name: str) -> bool:
    """Whether a module of Python is neither a library nor this package.

    Args:
        name: The name of the module.
    """
    return name.partition(".")[0] not in (*OTHERS_CODE, _PACKAGE)


def origin_of(value: Any) -> str:
    """The top-level package of the code of a function or method, or of the class of an object."""
    function = _function_of(value)
    # The name of the globals, since ``functools.wraps`` gives a wrapper the ``__module__`` of what it wraps.
    is_function = isinstance(function, types.FunctionType)
    name = function.__globals__.get("__name__", "") if is_function else type(function).__module__
    return str(name).partition(".")[0]


def _function_of(value: Any) -> Any:
    """The function of a method; anything else as it is."""
    return value.__func__ if isinstance(value, types.MethodType) else value


def is_of_library(hook: Any, seen: set[int] | None = None) -> bool:
    """Whether a hook, and all that it wraps, is code of ``LIBRARIES``.

    Args:
        hook: A function, method, partial or callable object.
        seen: The ``id`` of what was looked at before.
    """
    seen = set() if seen is None else seen
    if id(hook) in seen:
        return True
    seen.add(id(hook))
    if isinstance(hook, functools.partial):
        parts = [hook.func, *hook.args, *hook.keywords.values()]
    elif origin_of(hook) not in LIBRARIES:
        return False
    else:
        function = _function_of(hook)
        is_function = isinstance(function, types.FunctionType)
        parts = _references(function) if is_function else list(getattr(hook, "__dict__", {}).values())
    return all(is_of_library(part, seen) for part in parts if isinstance(part, _CALLED))


def fake_mode() -> FakeTensorMode:
    """What makes tensors without bytes."""
    mode = detect_fake_mode()
    assert mode is not None, "tensors are copied under FakeTensorMode"
    return mode


def _refuse_owner(cls: type) -> None:
    """Refuses to copy what owns something: the copy would close a file, say, of the user's when it dies."""
    end = getattr(cls, "__del__", None)
    if isinstance(end, types.FunctionType) and origin_of(end) not in LIBRARIES:
        raise TraceError(
            f"class {cls.__name__} has a __del__, which a copy runs, too; use weakref.finalize in its place"
        )


def _references(function: types.FunctionType) -> list[Any]:
    """What a function refers to, beside global variables."""
    found = [function.__defaults__, *(function.__kwdefaults__ or {}).values(), *vars(function).values()]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            found.append(cell.cell_contents)
    return found


def _is_ours(name: str, value: Any) -> bool:
    """Whether an attribute of a module was put there by this package."""
    is_code = isinstance(value, (types.FunctionType, types.MethodType))
    return name in ("patrickstar_engine", "_compiled_call_impl") or (is_code and origin_of(value) == _PACKAGE)


@contextlib.contextmanager
def reported(what: str) -> Iterator[None]:
    """Says what could not be copied."""
    try:
        yield
    except TraceError:
        raise
    except Exception as error:  # what others' ``__reduce__`` and ``__deepcopy__`` raise may be anything
        raise TraceError(
            f"{what} cannot be copied ({type(error).__name__}: {error}); keep it where no forward uses it, or give "
            "its class a __deepcopy__"
        ) from error


class Copier:
    """Copies objects, each once.

    Args:
        device: The device of all tensors; ``None`` for that of each.

    Attributes:
        names: The name of each module of the model, by its ``id``.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._memo: dict[int, Any] = {}
        self._seen: dict[int, Any] = {}  # by the ``id``, which no other object can get meanwhile
        self.names: dict[int, str] = {}

    def copy(self, value: Any) -> Any:
        """The copy of an object; the object itself if nothing of it can change."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        cls = type(value)
        if cls in _ATOMIC:
            return value
        own = own_code.get()
        if isinstance(value, types.ModuleType):
            return value if own is None else own.module(value)
        if own is not None:
            own.keep(value if isinstance(value, type) else cls)
        if isinstance(value, type):
            return value
        if isinstance(value, torch.Tensor):
            return self.make_tensor(value, value.shape)
        make = _MAKERS.get(cls)
        if make is not None:
            return self._remember(value, make(self, value))
        if isinstance(value, torch.nn.Module):
            return self._module(value)
        return self._object(value)

    def _remember(self, value: Any, made: Any) -> Any:
        self._memo[id(value)] = made
        self._seen[id(value)] = value
        return made

    # Tensors

    def make_tensor(self, tensor: Any, shape: Sequence[int]) -> torch.Tensor:
        """Copies a tensor.

        Args:
            tensor: The tensor; its values are not read.
            shape: The shape of the copy.
        """
        is_parameter, needs_grad = isinstance(tensor, torch.nn.Parameter), bool(tensor.requires_grad)
        made: Any
        if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
            made = fake_mode().from_tensor(tensor, static_shapes=True)
            return self._remember(tensor, made)  # type: ignore[no-any-return]
        made = torch.zeros((), dtype=tensor.dtype, device=self._device or tensor.device)
        # A parameter in a chunk is contiguous, and its placeholder is not.
        is_dense = is_parameter or isinstance(tensor, LiveMixin) or tuple(shape) != tuple(tensor.shape)
        made = made.new_zeros(shape) if is_dense else made.new_empty_strided(tuple(shape), tensor.stride())
        made = torch.nn.Parameter(made, needs_grad) if is_parameter else made.requires_grad_(needs_grad)
        if is_packed(tensor):
            made.__class__ = packed_type(FakeTensor, type(tensor).__name__)
        self._remember(tensor, made)
        if not isinstance(tensor, FakeTensor):  # whose attributes are those of fake tensors
            own = {name: value for name, value in vars(tensor).items() if name not in ("_live", "recipe")}
            made.__dict__.update((name, self.copy(value)) for name, value in own.items())
        if needs_grad:
            for name in _HOOKS_OF_TENSORS:
                hooks = self._hooks(name, getattr(tensor, name) or {})
                if hooks:
                    setattr(made, name, hooks)
        return made  # type: ignore[no-any-return]

    def _hooks(self, name: str, hooks: Mapping[int, Any]) -> "OrderedDict[int, Any]":
        """Those hooks of an attribute that the copy has, too."""
        kept = {} if name in _OTHER_HOOKS else {key: hook for key, hook in hooks.items() if is_of_library(hook)}
        return OrderedDict((key, self.copy(hook)) for key, hook in kept.items())

    # Modules

    def _module(self, module: torch.nn.Module) -> Any:
        cls: Any = type(module)
        _refuse_owner(cls)
        own = getattr(cls, "__deepcopy__", None)
        if own is not None and own.__module__ != "torch.nn.utils.parametrize":  # which copies ``__dict__``
            return self._module_by_own_method(module)
        reduced: Any = cls.__reduce_ex__(module, 4) if own is None else ()
        if len(reduced) < 3:  # what ``torch.compile`` returns is pickled as a call that compiles again
            made = self._remember(module, cls.__new__(cls))
            made.__dict__.update(self._module_state(module, vars(module)))
            return made
        made = self._remember(module, reduced[0](*map(self.copy, reduced[1])))
        made.__setstate__(self._module_state(module, reduced[2]))
        return made

    def _module_state(self, module: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        name = self.names.get(id(module), "a module")
        for attribute, value in state.items():
            if _is_ours(attribute, value):
                continue
            with reported(f"attribute '{attribute}' of {name} ({type(module).__name__})"):
                is_hooks = attribute in (*HOOKS, *_OTHER_HOOKS)
                found[attribute] = self._hooks(attribute, value) if is_hooks else self.copy(value)
        return found

    def _module_by_own_method(self, module: torch.nn.Module) -> Any:
        """A module whose class has a ``__deepcopy__``."""
        for name, value in vars(module).items():
            if _is_ours(name, value):
                self._remember(value, None)
            elif name in (*HOOKS, *_OTHER_HOOKS):
                self._remember(value, self._hooks(name, value))
        for tensor in (*module.parameters(), *module.buffers()):
            self.copy(tensor)
        return self._by_own_method(module, type(module).__deepcopy__)  # type: ignore[attr-defined]

    # Anything else

    def _by_own_method(self, value: Any, own: Callable[[Any, dict[int, Any]], Any]) -> Any:
        with copying():
            return self._remember(value, own(value, self._memo))

    def _object(self, value: Any) -> Any:
        cls: Any = type(value)
        if isinstance(value, RemovableHandle):  # it would lead to hooks of the model, of this package, too
            return self._remember(value, RemovableHandle(OrderedDict()))
        if origin_of(value) == _PACKAGE:
            raise TraceError(
                f"the model refers to a {cls.__name__} of {_PACKAGE}, which has no copy; keep it outside of the model"
            )
        if cls.__module__.startswith("torch._dynamo"):  # what compiles
            return self._led_to_model(value)
        _refuse_owner(cls)
        if isinstance(value, numpy.ndarray):
            if not value.flags.writeable:
                return value
            if value.nbytes > _MOST_ARRAY_NBYTES:
                raise TraceError(
                    f"the model has an array of numpy of {value.nbytes} bytes, too many to be copied; let nobody write "
                    "to it (array.flags.writeable = False)"
                )
        own = getattr(cls, "__deepcopy__", None)
        if own is not None:
            return self._by_own_method(value, own)
        reductor = copyreg.dispatch_table.get(cls)
        found = value.copy() if cls in _CONTAINERS else value  # another thread may append meanwhile
        reduced: Any = reductor(value) if reductor is not None else cls.__reduce_ex__(found, 4)
        if isinstance(reduced, str):  # the name of something global
            return value
        self._seen[id(value)] = value
        put_together: Any = copy._reconstruct  # type: ignore[attr-defined]
        return put_together(value, self._memo, *reduced[:5], deepcopy=lambda part, _: self.copy(part))

    def _tuple(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        items = [self.copy(item) for item in value]
        return value if all(map(operator.is_, items, value)) else self._memo.get(id(value), tuple(items))

    def _reference(self, value: Any) -> Any:
        target = value()
        return value if target is None else type(value)(self.copy(target))

    def _proxy(self, value: Any) -> Any:
        raise TraceError("the model has a weakref.proxy, which cannot refer to a copy; use weakref.ref in its place")

    def _builtin(self, value: Any) -> Any:
        """A method of a list (``seen.append``), or a function of a module."""
        owner = value.__self__
        copied = owner if isinstance(owner, types.ModuleType) else self.copy(owner)
        return value if copied is owner else getattr(copied, value.__name__)

    def _local(self, value: threading.local) -> threading.local:
        made = threading.local()
        vars(made).update(self.copy(vars(value)))
        return made

    def _condition(self, value: Any) -> Any:
        raise TraceError(
            "the model waits for another thread (threading.Event, Semaphore, queue.Queue), which wakes no copy; keep "
            "that outside of the model"
        )

    # Functions

    def _function(self, function: types.FunctionType) -> Any:
        """A function with copies of what it refers to; see [Note: what a copy refers to]."""
        cells, variables, code = function.__closure__ or (), function.__globals__, own_code.get()
        origin = origin_of(function)
        if code is not None and is_of_user(origin):
            variables = code.namespace(variables)
        copied = self._led_to_model if origin in OTHERS_CODE else self.copy
        named = zip(function.__code__.co_freevars, cells, strict=True)
        new = {name: cell for name, cell in named if id(cell) not in self._memo}
        own = tuple(self._memo.get(id(cell)) or self._remember(cell, types.CellType()) for cell in cells)
        made: Any = types.FunctionType(function.__code__, variables, function.__name__, None, own)
        self._remember(function, made)
        for name, cell in new.items():
            try:
                value = cell.cell_contents
            except ValueError:  # a variable that has no value yet
                continue
            with reported(f"'{name}', a variable of {function.__qualname__},"):
                self._memo[id(cell)].cell_contents = copied(value)
        made.__defaults__, made.__kwdefaults__ = copied(function.__defaults__), copied(function.__kwdefaults__)
        made.__dict__.update((name, copied(value)) for name, value in vars(function).items())
        if variables is function.__globals__ and all(map(operator.is_, _references(function), _references(made))):
            return function
        for name in ("__qualname__", "__module__", "__doc__", "__annotations__"):
            setattr(made, name, getattr(function, name))
        return made

    def _led_to_model(self, value: Any) -> Any:
        """What a library's function refers to; a copy if it leads to the model or to the user's code."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, (torch.nn.Module, *_CALLED)):
            return self.copy(value)
        if id(value) in self._seen:  # it may refer to itself
            return value
        self._seen[id(value)] = value
        if type(value) in (list, tuple):
            items = [self._led_to_model(item) for item in value]
            return value if all(map(operator.is_, items, value)) else self._remember(value, type(value)(items))
        is_object = origin_of(value) in LIBRARIES and not isinstance(value, (type, torch.Tensor))
        state = value if type(value) is dict else getattr(value, "__dict__", None) if is_object else None
        if not isinstance(state, dict):
            return value
        found = {name: self._led_to_model(item) for name, item in state.items()}
        if all(map(operator.is_, found.values(), state.values())):
            return value
        if state is value:
            return self._remember(value, found)
        cls: Any = type(value)
        made = self._remember(value, cls.__new__(cls))
        made.__dict__.update(found)
        return made


_MAKERS: dict[type, Callable[[Copier, Any], Any]] = {
    tuple: Copier._tuple,
    weakref.ReferenceType: Copier._reference,
    **dict.fromkeys((weakref.ProxyType, weakref.CallableProxyType), Copier._proxy),
    torch.Generator: lambda _, value: value.clone_state(),
    types.BuiltinFunctionType: Copier._builtin,
    types.MethodType: lambda to, value: types.MethodType(to.copy(value.__func__), to.copy(value.__self__)),
    types.FunctionType: Copier._function,
    # The copy of a function that remembers its results remembers none.
    type(functools.cache(len)): lambda to, f: functools.lru_cache(**f.cache_parameters())(to.copy(f.__wrapped__)),
    property: lambda to, value: type(value)(*map(to.copy, (value.fget, value.fset, value.fdel)), value.__doc__),
    **dict.fromkeys((staticmethod, classmethod), lambda to, value: type(value)(to.copy(value.__func__))),
    threading.local: Copier._local,
    threading.Condition: Copier._condition,
    type(threading.Lock()): lambda *_: threading.Lock(),
    type(threading.RLock()): lambda *_: threading.RLock(),
}
