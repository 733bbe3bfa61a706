"""Modes that watch operators: the engine's own, and those of users.

[Note: modes of users]
Under a mode of the user (``TorchDispatchMode``, ``TorchFunctionMode``, ``with torch.device(...)``) the model computes
as in plain torch. What the engine does meanwhile is no operator of the model: a mode that counts, caches or changes
operators must neither see it nor change it. So each phase of a step, and whatever answers for a parameter outside of
its module, takes the modes of users off this thread until it ends. A mode of the engine that is put on meanwhile goes
below them: they come off when the user's block ends, which may be earlier.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

_P = ParamSpec("_P")
_T = TypeVar("_T")
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_nothing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
_NOTHING = _nothing()


class EngineMode(TorchDispatchMode):
    """A mode of the engine, which sees what the engine does; see [Note: modes of users]."""

    supports_higher_order_operators = True


class OperatorMode(EngineMode):
    """A mode that is there before training and after it; the meter's own mode may come and go inside of it.

    Attributes:
        sees_all: Whether it also sees what the engine does ``without_modes``.
    """

    sees_all = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Whether torch lets other modes be taken off while this one stays."""
        return True


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Takes all modes off, torch's own and the engine's, too, but those that see everything."""
    with unseen(), _disable_current_modes() as modes, contextlib.ExitStack() as stack:
        for mode in reversed(modes):
            if isinstance(mode, OperatorMode) and mode.sees_all:
                stack.enter_context(mode)
        yield


def as_it_is(payload: torch.Tensor | None = None) -> contextlib.AbstractContextManager[None]:
    """Leaves inference mode and function transforms, so that tensors which are made here are ordinary ones.

    In inference mode they could never be trained with, and inside a function transform they would be wrappers.

    Args:
        payload: What is made shall be as this is: fake if this is, and seen by meters. By default all modes are off.
    """
    is_fake = torch._C._get_dispatch_mode(_FAKE) is not None
    has_modes = payload is None and bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())
    is_disguised = is_fake and (payload is None or type(payload) is torch.Tensor)
    if has_modes or is_disguised or torch.is_inference_mode_enabled() or peek_interpreter_stack() is not None:
        return _as_it_is(without_modes if payload is None else unset_fake_temporarily if is_disguised else _nothing)
    return _NOTHING


@contextlib.contextmanager
def _as_it_is(without: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    with torch.inference_mode(False), temporarily_clear_interpreter_stack(), without():
        yield


def has_modes_of_users() -> bool:
    """Whether a mode is on in this thread that is not the engine's."""
    if torch._C._len_torch_function_stack():
        return True
    for mode in _get_current_dispatch_mode_stack():
        if not isinstance(mode, EngineMode) and getattr(mode, "_mode_key", None) is None:
            return True
    return False


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """What the engine does in the block, or in the function that this decorates, is not seen by modes of users."""
    if not has_modes_of_users():
        yield
        return
    functions = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    before = pop_dispatch_modes()
    push_dispatch_modes(mode for mode in before if isinstance(mode, EngineMode))
    try:
        yield
    finally:
        now = pop_dispatch_modes()
        push_dispatch_modes(mode for mode in now if mode not in before)
        push_dispatch_modes(mode for mode in before if mode in now or not isinstance(mode, EngineMode))
        for mode in reversed(functions):
            torch._C._push_on_torch_function_stack(mode)


def with_modes_of_users(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Lets a function of the user run under the modes that are on now, where the engine calls it ``unseen``."""
    if not has_modes_of_users():
        return function
    functions = torch.overrides._get_current_function_mode_stack()
    dispatch = [mode for mode in _get_current_dispatch_mode_stack() if not isinstance(mode, EngineMode)]

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with contextlib.ExitStack() as stack:
            for mode in functions:
                torch._C._push_on_torch_function_stack(mode)
                stack.callback(torch._C._pop_torch_function_stack)
            push_dispatch_modes(dispatch)
            stack.callback(take_off_dispatch_modes, lambda mode: mode in dispatch)
            return function(*args, **kwargs)

    return call


def take_off_dispatch_modes(is_chosen: Callable[[TorchDispatchMode], bool]) -> None:
    """Takes some dispatch modes off, wherever they are among the others."""
    push_dispatch_modes(mode for mode in pop_dispatch_modes() if not is_chosen(mode))


def pop_dispatch_modes() -> list[TorchDispatchMode]:
    """Takes all dispatch modes off but torch's own, which come first; returns them, the innermost last."""
    modes = [mode for mode in _get_current_dispatch_mode_stack() if getattr(mode, "_mode_key", None) is None]
    for _ in modes:
        _pop_mode()
    return modes


def push_dispatch_modes(modes: Iterable[TorchDispatchMode]) -> None:
    """Puts modes on, the innermost last."""
    for mode in modes:
        _push_mode(mode)


def tensors_among(value: Any) -> list[torch.Tensor]:
    """The tensors among arguments or results of an operator: alone, or in lists, as schemas allow.

    Args:
        value: An argument, arguments, a result, or results.
    """
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    # Called once for a list and not for each of its items: modes ask at every operator.
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return
    for item in value:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (tuple, list, dict)):
            _collect(item, found)


PACKED_PRODUCT = "bitsandbytes::gemm_4bit"
"""The product with a weight that bitsandbytes has packed into 4 bits."""


def unpacked(operator: Any, args: Any, result: Any) -> torch.Tensor | None:
    """As much memory as an operator takes for the values of a packed weight while it runs, which it does not return.

    Args:
        operator: The operator.
        args: Its arguments.
        result: What it returned.
    """
    schema = getattr(operator, "_schema", None)
    return result.new_empty(args[2]) if schema is not None and schema.name == PACKED_PRODUCT else None
