"""What operators return for fake tensors, where torch does not know it or takes long to find out.

[Note: answers for fake tensors]
``FakeTensorMode`` looks up what an operator returns by all its arguments, which takes some 70 microseconds, and several
hundred where they are new. What a view is like needs no such search. The tensor of the meta device below a fake tensor
is asked instead, and its answer is made a fake tensor again: the same sizes, strides, type and storage. Of a few fake
tensors torch knows the value, and of their views: it is asked about these. What is written to an operand, when a model
is initialised say, changes nothing.

[Note: grouped products]
torch tells the shape of ``aten._grouped_mm`` for bfloat16 alone, although it computes the product in other types, too;
and it does not count its operations. Groups are ranges of rows of one operand or of both, which only values tell; all
rows are taken to be in one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

from hf_patrickstar.memory.operators import OperatorMode, tensors_among

_aten = torch.ops.aten
GROUPED = _aten._grouped_mm
_ALIGNED_NBYTES = 16
"""Rows of the result of a grouped product begin at multiples of it."""
_ASKS_DEVICE = torch.ops.prim.device.default
ASKS_VALUE = _aten._local_scalar_dense.default
"""What ``item``, ``tolist`` and a condition ask for."""
_Arguments = Sequence[Any]
_Named = dict[str, Any]


class AnsweringMode(OperatorMode):
    """Answers for fake tensors; see [Note: answers for fake tensors]."""

    def has_run(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """An operator has run.

        Args:
            func: The overload that was called, or an operator of higher order.
            args: Its positional arguments.
            kwargs: Its named arguments.
            result: What it returned.
        """

    def answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What an operator returns; see ``has_run``."""
        known = _ANSWERS.get(func)
        found = NotImplemented if known is None else known(func, args, kwargs)
        return func(*args, **kwargs) if found is NotImplemented else found

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would wrap ``__torch_dispatch__`` to keep dynamo out of it, at the cost of one more answer per call.

        Nothing is compiled inside of the mode. The name is private to torch: where it has no such method, nothing calls
        this one.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ASKS_DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device  # torch asks twice per operator; through the modes below it would take long
        kwargs = kwargs or {}
        result = self.answer(func, args, kwargs)
        self.has_run(func, args, kwargs, result)
        return result


def has_no_value(tensor: Any) -> bool:
    """Whether a tensor is a fake one whose value torch does not know.

    Args:
        tensor: The tensor.
    """
    return isinstance(tensor, FakeTensor) and tensor.constant is None


def _changed(func: Any, args: _Arguments, kwargs: _Named) -> Any:
    """Operators that change their operands and return nothing new: there are no bytes to write."""
    if not all(isinstance(tensor, FakeTensor) for tensor in tensors_among((args, kwargs))):
        return NotImplemented
    return args[0] if func._schema.returns else None


def _plausible(func: Any, args: _Arguments, kwargs: _Named) -> Any:
    """A value in place of one that a fake tensor has not: a small norm, a finite number, nothing that overflowed.

    Half is neither 0 nor 1, of which optimizers take a logarithm, or what is left to 1 to divide by.
    """
    tensor = args[0]
    if not has_no_value(tensor):
        return NotImplemented
    if tensor.dtype is torch.bool:
        return False
    return 0.5 if tensor.is_floating_point() else 1


def _grouped(func: Any, args: _Arguments, kwargs: _Named) -> Any:
    """See [Note: grouped products]."""
    return grouped_result(*args, **kwargs) if isinstance(args[0], FakeTensor) else NotImplemented


def grouped_result(
    first: torch.Tensor,
    second: torch.Tensor,
    ends: torch.Tensor | None = None,
    bias: Any = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """What ``aten._grouped_mm`` returns, without values.

    Args:
        first: The first operand.
        second: The second operand.
        ends: Where groups end.
        bias: What is added; torch supports none.
        out_dtype: The type of the result; by default that of the first operand.
    """
    rows, columns = first.shape[-2], second.shape[-1]
    are_matrices = first.dim() == 2, second.dim() == 2
    if all(are_matrices):
        assert ends is not None
        shape = [ends.shape[0], rows, columns]
    else:
        shape = [rows, columns] if any(are_matrices) else [first.shape[0], rows, columns]
    dtype = out_dtype or first.dtype
    step = _ALIGNED_NBYTES // dtype.itemsize
    padded = -(-columns // step) * step
    return first.new_empty_strided(shape, [rows * padded, padded, 1][-len(shape) :], dtype=dtype)


def _view(func: Any, args: _Arguments, kwargs: _Named) -> Any:
    """Another look at the same storage."""
    tensor = args[0]
    if type(tensor) is not FakeTensor or tensor.constant is not None:
        return NotImplemented
    mode = tensor.fake_mode
    with in_kernel_invocation_manager(mode):
        result = func(*args, **kwargs)
    return FakeTensor(mode, result, tensor.fake_device)


_CHANGES = (
    *(_aten.copy_, _aten.fill_, _aten.zero_, _aten.uniform_, _aten.normal_, _aten._foreach_copy_),
    *(_aten._foreach_mul_, _aten._foreach_add_, _aten._fused_adamw_, _aten._fused_adam_),
)
_VIEWS = (
    *(_aten.as_strided.default, _aten.slice.Tensor, _aten.select.int, _aten.view.default, _aten.expand.default),
    *(_aten.detach.default, _aten.alias.default, _aten.t.default, _aten.transpose.int, _aten.permute.default),
    *(_aten.unsqueeze.default, _aten._unsafe_view.default),
)
_ANSWERS: dict[Any, Callable[[Any, _Arguments, _Named], Any]] = {
    **{getattr(packet, name): _changed for packet in _CHANGES for name in packet.overloads()},
    **dict.fromkeys(_VIEWS, _view),
    ASKS_VALUE: _plausible,
    GROUPED.default: _grouped,
}
