"""Tracing and exporting of live models: torch's C++ code there does not call ``__torch_function__``.

A traced or exported module keeps its parameters and computes with them in C++, where a released parameter is NaN. So
torch gets an ordinary copy of the model, with the present values in memory of its own. While an engine is attached,
torch's entry points make that copy; models that are not live pass through unchanged.
"""

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from hf_patrickstar.model.live_parameter import LiveMixin

_ENTRY_POINTS = (
    *((torch.jit, "trace"), (torch.jit, "trace_module"), (torch.jit, "script")),
    *((torch.export, "export"), (torch.export, "draft_export"), (torch.onnx, "export")),
)


class Capture:
    """Stands in for one entry point of torch.

    Args:
        function: The entry point.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the entry point with copies in place of live modules and of their methods."""
        return self.function(*map(_ordinary, args), **{name: _ordinary(value) for name, value in kwargs.items()})


def attach(user: Any) -> None:
    """Lets live models be captured until ``detach``, or as long as the user object lives.

    Args:
        user: The object that needs this.
    """
    for owner, name in _ENTRY_POINTS:
        if not isinstance(getattr(owner, name), Capture):
            setattr(owner, name, Capture(getattr(owner, name)))
        getattr(owner, name).users.add(user)


def detach(user: Any) -> None:
    """Ends ``attach``; without any user left the entry points are torch's own again.

    Args:
        user: The object that ``attach`` got.
    """
    for owner, name in _ENTRY_POINTS:
        if isinstance(present := getattr(owner, name), Capture):
            present.users.discard(user)
            if not present.users:
                setattr(owner, name, present.function)


def _ordinary(value: Any) -> Any:
    """For a live module a copy on its compute device, for its method that of a copy; anything else unchanged."""
    if isinstance(getattr(value, "__self__", None), torch.nn.Module):
        owner = _ordinary(value.__self__)
        return value if owner is value.__self__ else getattr(owner, value.__name__)
    if not isinstance(value, torch.nn.Module):
        return value
    live = next((parameter for parameter in value.parameters() if isinstance(parameter, LiveMixin)), None)
    return value if live is None else copy.deepcopy(value).to(live.device)
