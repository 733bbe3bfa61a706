"""Calls of operators on tensors with bytes, as a model makes them."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """A tensor without bytes, for another process.

    Attributes:
        dtype: Its type.
        shape: Its shape.
        stride: Its strides.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Operand":
        """What is to be known of a tensor."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride())

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last one in memory."""
        if 0 in self.shape:
            return 0
        steps = ((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return (1 + sum(steps)) * self.dtype.itemsize

    def make(self, device: torch.device) -> torch.Tensor:
        """A tensor with bytes: numbers between 0 and 1, or zeros that are valid as places."""
        make = torch.rand if self.dtype.is_floating_point else torch.zeros
        memory = make(self.nbytes // self.dtype.itemsize, dtype=self.dtype, device=device)
        return memory.as_strided(self.shape, self.stride)


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorCall:
    """A call of an operator that another process can make, too.

    Attributes:
        name: The overload, as in ``torch.ops``.
        args: Its positional arguments; tensors are ``Operand`` s.
        kwargs: Its named arguments.
    """

    name: str
    args: Any
    kwargs: Any

    @classmethod
    def of(cls, operator: Any, args: Any, kwargs: Any) -> "OperatorCall":
        """The call of an overload; its tensors need no bytes."""
        return cls(str(operator), *tree_map_only(torch.Tensor, Operand.of, (args, kwargs)))

    def make(self, device: torch.device, operator: Any = None) -> Callable[[], Any]:
        """What makes the call, on operands that are made once.

        Args:
            device: Where they are.
            operator: The overload; by default that of the name.

        Raises:
            Exception: What an operator raises that does not take such values.
        """
        found: Any = operator or attrgetter(self.name)(torch.ops)
        args, kwargs = tree_map_only(Operand, lambda operand: operand.make(device), (self.args, self.kwargs))
        if found._overloadpacket is _aten._grouped_mm:  # its groups end at these rows
            rows, ends = args[0].shape[0], args[2]
            ends.copy_(torch.linspace(rows / len(ends), rows, len(ends)).round())
        return functools.partial(found, *args, **kwargs)


@contextlib.contextmanager
def as_they_are(device: torch.device) -> Iterator[None]:
    """Inside the block operators are called as they are: nobody watches them, and no type is changed."""
    with _disable_current_modes(), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield
