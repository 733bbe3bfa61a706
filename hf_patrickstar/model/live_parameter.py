"""Parameters that answer while their value is in a chunk.

[Note: a parameter that answers]
While no module computes with a parameter its tensor is a placeholder: NaN in the right shape, without memory.
Its class is then ``ReleasedParameter``, whose ``__torch_function__`` brings the value, or the gradient, for the length
of one call: shapes and flags are answered without it, functions get the value, functions that write reach every place
where the value is, and ``.grad`` is the gradient. While a module runs its parameters are ``AcquiredParameter``: they
have their value, and torch treats them as it treats any ``nn.Parameter``; only ``.data`` and ``.grad`` are noticed. The
object stays the same; only its class changes, as torch does it when an ``UninitializedParameter`` is materialised.

Under autocast, modules compute with 16 bits of a parameter that was loaded in fp32. All other code sees what plain
torch shows: the type that was loaded, and the value of the master, or of the original, with all bits. To torch the
parameter has 16 bits all the time, since torch makes another node for its gradient where the type changes. So a call
that autograd records gets a stand-in (``_Alias`` in ``live_tensor.py``), whose gradient goes to the parameter's place.

Code that goes around ``__torch_function__`` (an extension in C++ that was handed a released parameter) finds NaN.
"""

import copy
import functools
import sys
import types
from collections.abc import Callable, Collection
from typing import Any, cast

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_iter, tree_map_only

from hf_patrickstar.errors import EngineError
from hf_patrickstar.memory.operators import has_modes_of_users, unseen, with_modes_of_users
from hf_patrickstar.model.compiled import is_dynamo_tracing
from hf_patrickstar.model.lock import EngineLock
from hf_patrickstar.model.quantized import bases_of, is_packed

RAW = torch._C.DisableTorchFunctionSubclass
"""A context in which a released parameter shows its placeholder."""

NOT_OVERRIDDEN: Any = torch._C._disabled_torch_function_impl
"""As ``__torch_function__`` of a class: torch treats its tensors as tensors."""

_Base: Any = torch._C.TensorBase
_Tensor: Any = torch.Tensor
_get_data, SET_DATA = _Base.data.__get__, _Base.data.__set__
"""``SET_DATA`` is what torch itself does for ``parameter.data = value``; see ``set_data_inside``."""
_STATE_DICT = "_save_to_state_dict"
"""The method of modules that detaches parameters for ``state_dict``."""
GET_GRAD, SET_GRAD = _Base.grad.__get__, _Base.grad.__set__
_get_requires_grad = _Base.requires_grad.__get__


class Access:
    """One call's access to one released parameter; this base class gives access to a value that stands in for it.

    Args:
        value: What the called function gets in place of the parameter.
    """

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def needs_copy(self, results: list[torch.Tensor]) -> bool:
        """Whether results of the call alias memory that they must not alias; if so, ``value`` has become a copy."""
        return False

    def make_room(self) -> None:
        """Makes ``value`` a copy that needs no chunk on the device, if it can."""

    def finish(self) -> None:
        """Takes over what the call has written; called once, after it returned."""

    def note_returned(self) -> None:
        """Called if a call that does not write returned the value itself: later code may use it without torch."""

    def end(self) -> None:
        """Lets go of the value; called once, whatever happened."""


class Live:
    """What answers for one parameter; this base class answers for one that was made from a live one.

    Such a parameter has its own value, and becomes an ordinary one.

    Args:
        parameter: The parameter.
    """

    __slots__ = ("_parameter",)

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter

    @property
    def typed(self) -> torch.Tensor:
        """A tensor in the type that the parameter shows."""
        return raw_data(self._parameter)

    def access(self, func: Any, *, is_graph: bool, writes: bool = False) -> Access:
        """Begins the access of one call.

        Args:
            func: What is called.
            is_graph: Whether autograd will record the call.
            writes: Whether it may write to the value.
        """
        return Access(self._become_ordinary())

    def get_grad(self) -> torch.Tensor | None:
        """The gradient."""
        return self._become_ordinary().grad

    def set_grad(self, gradient: torch.Tensor | None) -> None:
        """Replaces the gradient, or drops it."""
        self._become_ordinary().grad = gradient

    def assign(self, value: torch.Tensor) -> None:
        """What ``parameter.data = value`` means."""
        self._become_ordinary().data = value

    def note_data_is_out(self) -> None:
        """Called when ``.data`` is read while the parameter is computed with."""

    def value_for_state_dict(self) -> torch.Tensor:
        """What ``state_dict`` gets: a tensor that stays the same as the value."""
        return self.host_value()

    def host_value(self) -> torch.Tensor:
        """The value on the host, in the type that the model was loaded in; it may alias the chunk."""
        return self._become_ordinary().detach()

    def copied_value(self) -> torch.Tensor:
        """A copy of ``host_value``."""
        return self.host_value().clone()

    def view_whole(self, func: Any) -> torch.Tensor:
        """A view of the whole parameter in the graph of autograd, made by ``func(parameter, parameter)``."""
        parameter = self._become_ordinary()
        return func(parameter, parameter)

    def value_for(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The value for a tensor that was exchanged with the parameter; ``None`` for the parameter itself."""
        return None

    def _become_ordinary(self) -> Any:
        parameter: Any = self._parameter
        parameter.__class__ = original_type(type(parameter))
        parameter.__dict__.pop("_live", None)
        return parameter


class _Unseen:
    """Does what an object does, unseen by modes of users; see [Note: modes of users]."""

    def __init__(self, found: Any) -> None:
        self._found = found

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._found, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with unseen():
                result = found(*args, **kwargs)
                if isinstance(result, Access):
                    return _Unseen(_made_private(result) if getattr(args[0], "__name__", "") in _VIEWS else result)
                return result

        return call if callable(found) else found


def _made_private(access: Access) -> Access:
    """The access, with memory that results may alias: else the call would be repeated on it, and seen twice."""
    try:
        access.needs_copy([access.value])
    except BaseException:
        access.end()
        raise
    return access


_VIEWS = {
    *("__get__", "__getitem__", "__iter__", "__reversed__", "adjoint", "as_strided", "broadcast_to", "chunk"),
    *("contiguous", "detach", "diagonal", "dsplit", "expand", "expand_as", "flatten", "hsplit", "movedim"),
    *("moveaxis", "narrow", "permute", "ravel", "reshape", "reshape_as", "select", "split", "split_with_sizes"),
    *("squeeze", "swapaxes", "swapdims", "t", "tensor_split", "transpose", "unbind", "unflatten", "unfold"),
    *("unsafe_chunk", "unsafe_split", "unsqueeze", "view", "view_as", "vsplit"),
}
"""The names of functions of torch that return what looks into their operand."""


class LiveMixin:
    """What acquired and released parameters have in common: their copies are ordinary parameters."""

    __torch_function__: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes an ordinary parameter: ``type(parameter)(data)`` must not make another live one."""
        return _maker(cls)(*args, **kwargs)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        """As in torch, where copies of parameters have no attributes, and those of packed weights have them all."""
        if id(self) not in memo:  # a module's own ``__deepcopy__`` may call this one, of a shared parameter twice
            made = memo[id(self)] = _maker(type(self))(_live_of(self).copied_value(), requires_grad(self))
            if is_packed(self):
                made.__dict__.update(copy.deepcopy(_attributes(self), memo))
        return memo[id(self)]

    def __copy__(self: Any) -> Any:
        """As in torch: the same memory, and the same attributes."""
        made = _maker(type(self))(self.data, requires_grad(self))
        made.__dict__.update(_attributes(self))
        return made

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        made = _maker(type(self))(_live_of(self).host_value(), requires_grad(self))
        made.__dict__.update(_attributes(self))
        return made.__reduce_ex__(protocol)


def _attributes(parameter: Any) -> dict[str, Any]:
    """What users and libraries have put on a parameter."""
    return {name: value for name, value in parameter.__dict__.items() if name != "_live"}


def _live_of(parameter: Any) -> Live:
    """What answers for it: not what ``swap_tensors`` brought here, nor an engine that a thread has just detached."""
    live: Live | None = parameter.__dict__.get("_live")
    if live is None:
        return Live(parameter)
    if (_len_torch_dispatch_stack() or _len_torch_function_stack()) and has_modes_of_users():
        live = cast(Live, _Unseen(live))
    value = live.value_for(parameter)
    if value is None:
        return live
    orphan = Live(parameter)
    with unseen():
        orphan.host_value()
        set_raw_data(parameter, value)
    return orphan


class AcquiredMixin(LiveMixin):
    """A parameter that has its value: ``torch.nn.Parameter`` in all but two properties."""

    __torch_function__: Any = NOT_OVERRIDDEN

    @property
    def data(self) -> torch.Tensor:
        """The value, detached; what is written to it counts."""
        _live_of(self).note_data_is_out()
        return _Base.data.__get__(self)  # type: ignore[no-any-return]  # for another thread this is a call

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Assigns a value; the engine takes it over when the module that computes with it has ended."""
        if isinstance(value, torch.Tensor) and value.shape != self.shape:  # type: ignore[attr-defined]
            # A view of the same memory in another shape has neither another address nor another version.
            torch.autograd.graph.increment_version(self)  # type: ignore[arg-type]
        _Base.data.__set__(self, value)

    def detach(self) -> torch.Tensor:
        """As of any tensor; ``state_dict`` gets what outlives the forward that it is called in."""
        is_kept = sys._getframe(1).f_code.co_name == _STATE_DICT
        return _live_of(self).value_for_state_dict() if is_kept else _Base.detach(self)  # type: ignore[no-any-return]

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of this step so far."""
        if is_dynamo_tracing():
            return raw_grad(self)  # type: ignore[arg-type]
        return _live_of(self).get_grad()

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        """Replaces the gradient."""
        _live_of(self).set_grad(gradient)


class ReleasedMixin(LiveMixin):
    """A parameter whose value is in a chunk; see [Note: a parameter that answers]."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WITHOUT_VALUE or is_dynamo_tracing():
            return call_without_values(func, args, kwargs or {})
        own = _OWN_ANSWERS.get(func)
        if own is not None:
            return own(*args, **(kwargs or {}))
        return call_with_values(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        access = _live_of(self).access(torch.Tensor.__repr__, is_graph=False)
        try:
            return repr(_maker(type(self))(access.value, requires_grad(self)))
        finally:
            access.end()

    # Programs read these in loops over all parameters; through torch's dispatch that would be slow.

    @property
    def shape(self) -> torch.Size:
        """As of any tensor."""
        with RAW():
            return _Base.shape.__get__(self)

    @property
    def requires_grad(self) -> bool:
        """As of any tensor."""
        return requires_grad(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        """As of any leaf."""
        with RAW():
            _Base.requires_grad.__set__(self, value)

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of this step so far."""
        if is_dynamo_tracing():
            return raw_grad(self)  # type: ignore[arg-type]
        if _len_torch_function_stack():  # whose modes see that it is read
            return _Base.grad.__get__(self)  # type: ignore[no-any-return]
        live: Any = self.__dict__.get("_live")
        if live is None or live.tensor.parameter is not self or _len_torch_dispatch_stack():
            live = _live_of(self)
        return live.get_grad()

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        """Replaces the gradient."""
        _Base.grad.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        """Drops the gradient."""
        _Base.grad.__delete__(self)

    def numel(self) -> int:
        """As of any tensor."""
        with RAW():
            return int(_Base.numel(self))


def _live_type(mixin: type, original: type, **members: Any) -> type:
    members |= {"_original": original, "__module__": original.__module__}
    return type(original.__name__, (mixin, *bases_of(original)), members)


@functools.cache
def acquired_type(original: type) -> type:
    """The class of a parameter of a class while it has its value."""
    return _live_type(AcquiredMixin, original)


@functools.cache
def released_type(original: type) -> type:
    """The class of a parameter of a class while its value is in a chunk."""
    return _live_type(ReleasedMixin, original)


def original_type(cls: type) -> Any:
    """The class that a parameter had, and will have again."""
    return getattr(cls, "_original", cls)


def _maker(cls: type) -> Any:
    """What makes an ordinary parameter of a class; under fake tensors ``Parameter`` makes fake ones."""
    original = original_type(cls)
    if original is torch.Tensor:
        return torch.Tensor.requires_grad_
    return torch.nn.Parameter if issubclass(original, FakeTensor) else original


def can_answer(parameter: torch.Tensor) -> bool:
    """Whether the engine can change a parameter's class; a fake one is of the class of all fake tensors."""
    return type(parameter) is torch.Tensor or issubclass(type(parameter), (torch.nn.Parameter, FakeTensor))


# The tensor that is there, placeholder or not


def raw_data(parameter: torch.Tensor) -> torch.Tensor:
    """``parameter.data`` as torch has it."""
    with RAW():
        return _get_data(parameter)


def set_raw_data(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Assigns ``parameter.data`` as torch does, and between devices where torch does not, too.

    torch refuses a tensor of another device where one of them is a device that torch does not have itself
    (``PrivateUse1``). There the parameter stays the same object, with its class, attributes, hooks and
    ``requires_grad``, but gets another tensor inside, without a gradient. A graph of before has the tensor of before:
    its backward raises when it comes to the parameter.

    Args:
        parameter: A leaf: a parameter, or a buffer.
        value: Its value from now on.
    """
    with RAW():
        set_data_inside(parameter, value)


def set_data_inside(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Does what ``set_raw_data`` does, for a caller that has entered ``RAW``."""
    try:
        SET_DATA(parameter, value)
    except RuntimeError:
        if parameter.device.type == value.device.type or torch._has_compatible_shallow_copy_type(parameter, value):
            raise
        _exchange(parameter, value)


def _exchange(parameter: Any, value: torch.Tensor) -> None:
    """Does what ``torch.utils.swap_tensors`` does inside; that refuses a tensor which a graph still refers to."""
    if needs_grad := _get_requires_grad(parameter):
        torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(_refuse_gradient)
    torch._C._swap_tensor_impl(parameter, value.detach().requires_grad_(needs_grad))
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        setattr(parameter, hooks, getattr(parameter, hooks))  # what calls them went with the tensor of before


def _refuse_gradient(_: Any) -> None:
    raise EngineError(
        "backward came to a parameter that was moved to another device after the forward, by an engine that was made "
        "or detached, or by full_parameters(): run the backward before, or the forward again"
    )


def raw_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """``parameter.grad`` as autograd has it."""
    with RAW():
        return GET_GRAD(parameter)


def set_raw_grad(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Assigns ``parameter.grad`` as autograd does."""
    with RAW():
        SET_GRAD(parameter, gradient)


def take_raw_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """``parameter.grad`` as autograd has it; it has none afterwards."""
    gradient = raw_grad(parameter)
    set_raw_grad(parameter, None)
    return gradient


def requires_grad(parameter: Any) -> bool:
    """Whether a parameter says that it is trained."""
    with RAW():
        return bool(_get_requires_grad(parameter))


storage_key: Callable[[torch.Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]
"""The address of a tensor's storage object, which, unlike a data pointer, fake tensors have too.

It is what ``untyped_storage()._cdata`` is, without a new object. For what has no storage, as sparse tensors and
wrappers of ``torch.func``, it raises ``NotImplementedError``.
"""


# Calls


def call_without_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function of torch that asks for shapes and flags, or for types, as parameters show them."""
    if func in _OF_TYPES and not is_dynamo_tracing():
        args, kwargs = tree_map_only(LiveMixin, lambda p: _live_of(p).typed if _has_no_value(p) else p, (args, kwargs))
    with RAW():
        return func(*args, **kwargs)


def call_with_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function of torch with values in place of released parameters.

    Args:
        func: The function.
        args: Its arguments, which may contain parameters anywhere.
        kwargs: Its named arguments.

    Returns:
        What the function returns; if it returns one of the values itself, as in-place functions do, the parameter.
    """
    leaves = list(tree_iter((args, kwargs)))
    is_graph = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and requires_grad(x) for x in leaves)
    released = {id(leaf): leaf for leaf in leaves if _has_no_value(leaf)}
    written = _written(getattr(func, "__name__", ""), args, kwargs)
    accesses: dict[int, Access] = {}
    try:
        for key, parameter in released.items():
            try:
                accesses[key] = _live_of(parameter).access(func, is_graph=is_graph, writes=key in written)
            except MemoryError:  # the device has no room for the chunks of all of them
                for access in accesses.values():
                    access.make_room()
                accesses[key] = _live_of(parameter).access(func, is_graph=is_graph, writes=key in written)
        result = _substituted(func, args, kwargs, accesses)
        if _needs_copies(result, accesses.values()):
            result = _substituted(func, args, kwargs, accesses)
        for access in accesses.values():
            access.finish()
        owners = {id(access.value): released[key] for key, access in accesses.items()}
        returned = owners.keys() & {id(leaf) for leaf in tree_iter(result)}
        if returned:
            for access in accesses.values():
                if id(access.value) in returned and not written:
                    access.note_returned()
            result = tree_map_only(torch.Tensor, lambda tensor: owners.get(id(tensor), tensor), result)
        return result
    finally:
        for access in reversed(accesses.values()):
            access.end()


def _has_no_value(leaf: Any) -> bool:
    """Whether an argument is a parameter that has no value, or none for this thread."""
    return isinstance(leaf, LiveMixin) and leaf.__torch_function__ is not NOT_OVERRIDDEN


def _needs_copies(result: Any, accesses: Collection[Access]) -> bool:
    """Whether a call must be repeated on copies, since what it returned looks into a chunk."""
    values = {id(access.value) for access in accesses}
    found = [leaf for leaf in tree_iter(result) if isinstance(leaf, torch.Tensor) and id(leaf) not in values]
    return bool([access for access in accesses if access.needs_copy(found)])  # each one is asked


def _written(name: str, args: Any, kwargs: Any) -> set[int]:
    """The ``id`` of each tensor that a function writes to, by the function's name; some writes leave no other trace."""
    if name.startswith("__i"):
        is_in_place = name not in ("__invert__", "__int__", "__index__")
    else:
        is_in_place = name == "__setitem__" or (name.endswith("_") and not name.startswith("__"))
    first = args[:1] or tuple(kwargs.values())[:1]
    leaves = tree_iter((first if is_in_place else (), kwargs.get("out")))  # None is a leaf, too
    return {id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}


def _substituted(func: Any, args: Any, kwargs: Any, accesses: dict[int, Access]) -> Any:
    values = {key: access.value for key, access in accesses.items()}
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: values.get(id(tensor), tensor), (args, kwargs))
    return func(*args, **kwargs)


def named(owner: Any, names: str) -> set[Any]:
    """The functions among some names that a module or class of torch has."""
    return {getattr(owner, name) for name in names.split() if hasattr(owner, name)}


def _properties(names: str, accessor: str = "__get__") -> set[Any]:
    return {getattr(getattr(torch.Tensor, name), accessor) for name in names.split() if hasattr(torch.Tensor, name)}


_OF_TYPES = frozenset(
    _properties("dtype itemsize nbytes grad_dtype")
    | named(torch.Tensor, "element_size new_empty new_zeros new_ones new_full new_empty_strided new")
    | named(torch, "result_type zeros_like ones_like empty_like full_like rand_like randn_like randint_like")
)
"""Functions without values that tell a type, or make something in it."""

_METHODS = (
    "dim size numel nelement ndimension is_floating_point is_complex is_signed is_inference is_conj is_neg get_device "
    "requires_grad_ detach_ register_hook register_post_accumulate_grad_hook retain_grad __len__ has_names _is_view "
    "is_pinned is_shared is_same_size is_distributed is_coalesced _is_zerotensor"
)
WITHOUT_VALUE = _OF_TYPES | frozenset(
    _properties(
        "shape device layout ndim requires_grad is_leaf grad_fn _grad_fn output_nr names name is_cpu "
        "is_cuda is_xpu is_mps is_hpu is_ipu is_mtia is_maia is_vulkan is_mkldnn is_nested is_quantized is_meta "
        "is_sparse is_sparse_csr retains_grad _version _base _backward_hooks _post_accumulate_grad_hooks volatile "
        "_cdata"
    )
    | _properties("requires_grad names _backward_hooks _post_accumulate_grad_hooks grad_dtype", "__set__")
    | named(torch.Tensor, _METHODS)
    | named(torch, _METHODS)
    | named(torch.ops.aten.set_, " ".join(torch.ops.aten.set_.overloads()))  # where a dispatch mode calls it
)
"""Functions that need shapes and flags alone, or that mean the parameter itself and not its value."""


def _find_caller() -> types.CodeType:
    """The Python code that has called into torch, which may have called a mode of the user first."""
    frame: Any = sys._getframe(3)
    while frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame.f_code  # type: ignore[no-any-return]


def detach(parameter: Any) -> torch.Tensor:
    """Answers ``parameter.detach()``; what has called torch must be the caller's caller."""
    if _find_caller().co_name == _STATE_DICT:
        return _live_of(parameter).value_for_state_dict()
    value: torch.Tensor = call_with_values(torch.Tensor.detach, (parameter,), {})
    if _find_caller() is not torch.nn.Parameter.__new__.__code__:
        return value
    # ``nn.Parameter(parameter)`` insists on the type that it was given, and returns this.
    return torch.Tensor._make_subclass(type(parameter), value)


def _view_whole(func: Any) -> Callable[..., Any]:
    """``parameter.view_as(parameter)`` is a common way to find the autograd node that accumulates its gradient."""

    def answer(parameter: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        if parameter is other and torch.is_grad_enabled() and requires_grad(parameter):
            return _live_of(parameter).view_whole(with_modes_of_users(func))
        return call_with_values(func, (parameter, other, *args), kwargs)

    return answer


def _strides(func: Any) -> Callable[..., Any]:
    """Parameters in chunks are contiguous; placeholders are not."""
    return lambda parameter, *args, **kwargs: func(torch.zeros(parameter.shape, device="meta"), *args, **kwargs)


BACKWARDS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
"""Functions that run a whole backward."""


def _undisturbed(func: Any) -> Callable[..., Any]:
    """Passes the parameters themselves to a function that runs a whole backward.

    Calls inside must still reach ``__torch_function__``, so it cannot be switched off meanwhile.
    """

    def answer(*args: Any, **kwargs: Any) -> Any:
        leaves = {id(leaf): leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, ReleasedMixin)}
        released = [(leaf, type(leaf)) for leaf in leaves.values()]
        for parameter, cls in released:
            parameter.__class__ = acquired_type(original_type(cls))
        try:
            result = func(*args, **kwargs)
        finally:
            for parameter, cls in released:
                parameter.__class__ = cls
        if func is not torch.autograd.grad:
            return result
        inputs = args[1] if len(args) > 1 else kwargs["inputs"]
        pairs = zip([inputs] if isinstance(inputs, torch.Tensor) else inputs, result, strict=True)
        return tuple(None if made is None else made.to(getattr(item, "dtype", made.dtype)) for item, made in pairs)

    return answer


_AS_THEY_ARE = WITHOUT_VALUE | {_Tensor.data.__set__}
_DATA: Any = AcquiredMixin.data


class Guard:
    """The ``__torch_function__`` of parameters that one thread computes with while others may read them.

    It is switched off for the thread that computes, and answers all others as if the parameter were released; see
    [Note: other threads read].

    Args:
        lock: Knows which thread computes.
    """

    def __init__(self, lock: EngineLock) -> None:
        self._lock = lock
        self._types: dict[type, type] = {}

    def __get__(self, parameter: Any, owner: type) -> Any:
        """What torch finds as ``__torch_function__``, of a parameter or of its class."""
        return NOT_OVERRIDDEN if self._lock.is_mine else self._answer

    def _set_data(self, parameter: Any, value: torch.Tensor) -> None:
        """Assigns ``.data``; of a parameter that another thread computes with, when it has done so."""
        if self._lock.is_mine:
            _DATA.fset(parameter, value)
            return
        with self._lock.held("an assignment to the data of a parameter"):
            parameter.data = value

    def type_of(self, original: type) -> type:
        """The class of a guarded parameter.

        Args:
            original: The class that it had.
        """
        if original not in self._types:
            data = property(_DATA.fget, self._set_data)
            self._types[original] = _live_type(AcquiredMixin, original, __torch_function__=self, data=data)
        return self._types[original]

    def _answer(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _AS_THEY_ARE:
            return call_without_values(func, args, kwargs)
        if func in BACKWARDS:
            with self._lock.held("a backward"):
                return func(*args, **kwargs)
        return detach(*args) if func is torch.Tensor.detach else call_with_values(func, args, kwargs)


_OWN_ANSWERS: dict[Any, Callable[..., Any]] = {
    _Tensor.grad.__get__: lambda parameter: _live_of(parameter).get_grad(),
    _Tensor.grad.__set__: lambda parameter, gradient: _live_of(parameter).set_grad(gradient),
    _Tensor.grad.__delete__: lambda parameter: _live_of(parameter).set_grad(None),
    _Tensor.data.__set__: lambda parameter, value: _live_of(parameter).assign(value),
    torch.Tensor.detach: detach,
    torch.Tensor.stride: _strides(torch.Tensor.stride),
    torch.Tensor.is_contiguous: _strides(torch.Tensor.is_contiguous),
    torch.Tensor.storage_offset: _strides(torch.Tensor.storage_offset),
    torch.Tensor.__format__: lambda parameter, spec: object.__format__(parameter, spec),
    torch.Tensor.view_as: _view_whole(torch.Tensor.view_as),
    torch.Tensor.expand_as: _view_whole(torch.Tensor.expand_as),
    **{backward: _undisturbed(backward) for backward in BACKWARDS},
}
