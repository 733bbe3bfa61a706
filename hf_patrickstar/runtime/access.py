"""What stands between a parameter and the engine: what answers for it, and the access of one call to its value."""

import functools
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch

from hf_patrickstar.memory.operators import has_modes_of_users, unseen


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


class Live(Protocol):
    """What answers for one parameter."""

    def access(self, func: Any, *, is_graph: bool, writes: bool = False) -> Access:
        """Begins the access of one call.

        Args:
            func: What is called.
            is_graph: Whether autograd will record the call.
            writes: Whether it may write to the value.
        """
        ...

    def get_grad(self) -> torch.Tensor | None:
        """The gradient."""
        ...

    def set_grad(self, gradient: torch.Tensor | None) -> None:
        """Replaces the gradient, or drops it."""
        ...

    def assign(self, value: torch.Tensor) -> None:
        """What ``parameter.data = value`` means."""
        ...

    def note_data_is_out(self) -> None:
        """Called when ``.data`` is read while the parameter is computed with."""
        ...

    def copy_from(self, source: torch.Tensor, is_graph: bool) -> bool:
        """Does ``parameter.copy_(source)`` if that must do more than write the parameter; returns whether it did."""
        ...

    def detached_for_state_dict(self) -> torch.Tensor:
        """What ``_save_to_state_dict`` gets; it is replaced later."""
        ...

    def host_value(self) -> torch.Tensor:
        """The value on the host, in the type that the model was loaded in; it may alias the chunk."""
        ...

    def copied_value(self) -> torch.Tensor:
        """A copy of ``host_value``."""
        ...

    def view_whole(self, func: Any) -> torch.Tensor:
        """A view of the whole parameter in the graph of autograd, made by ``func(parameter, parameter)``."""
        ...

    def value_for(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The value for a tensor that was exchanged with the parameter; ``None`` for the parameter itself."""
        ...


class _Unseen:
    """Does what an object does, unseen by modes of users; see [Note: modes of users]."""

    def __init__(self, found: Any) -> None:
        self._found = found

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._found, name)
        return _unseen(found) if callable(found) else found


def _unseen(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with unseen():
            result = method(*args, **kwargs)
            if isinstance(result, Access):
                return _Unseen(_made_private(result) if _makes_views(args[0]) else result)
            return result

    return call


def _made_private(access: Access) -> Access:
    """The access, with memory that results may alias: else the call would be repeated on it, and seen twice."""
    try:
        access.needs_copy([access.value])
    except BaseException:
        access.end()
        raise
    return access


def unseen_by_modes(live: Live) -> Live:
    """What answers for a parameter where modes are on: those of users do not see what it does.

    Args:
        live: What answers.
    """
    return cast(Live, _Unseen(live)) if has_modes_of_users() else live


_VIEWS = frozenset(
    (
        *("__get__", "__getitem__", "__iter__", "__reversed__", "adjoint", "as_strided", "broadcast_to", "chunk"),
        *("contiguous", "detach", "diagonal", "dsplit", "expand", "expand_as", "flatten", "hsplit", "movedim"),
        *("moveaxis", "narrow", "permute", "ravel", "reshape", "reshape_as", "select", "split", "split_with_sizes"),
        *("squeeze", "swapaxes", "swapdims", "t", "tensor_split", "transpose", "unbind", "unflatten", "unfold"),
        *("unsafe_chunk", "unsafe_split", "unsqueeze", "view", "view_as", "vsplit"),
    )
)


def _makes_views(func: Any) -> bool:
    """Whether a function of torch returns what looks into its operand, by the function's name."""
    return getattr(func, "__name__", "") in _VIEWS
