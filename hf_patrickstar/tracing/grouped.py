"""Products of groups of rows, one for each expert, of tensors that have no bytes.

[Note: grouped products]
torch tells the shape of ``aten._grouped_mm`` for bfloat16 alone, although it computes the product in other types, too;
and it does not count its operations. Groups are ranges of rows of one operand or of both, which only values tell; all
rows are taken to be in one.
"""

from typing import Any

import torch

GROUPED = torch.ops.aten._grouped_mm
_ALIGNED_NBYTES = 16
"""Rows of the result begin at multiples of it."""


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
    strides = [rows * padded, padded, 1]
    return first.new_empty_strided(shape, strides[-len(shape) :], dtype=dtype)


def grouped_flops(first: torch.Tensor, second: torch.Tensor, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Floating-point operations of ``aten._grouped_mm``.

    Args:
        first: The first operand.
        second: The second operand.
        args: What else it is called with.
        out_val: What it returned.
        kwargs: What else it is called with, by name.
    """
    groups = first.shape[0] if first.dim() == second.dim() == 3 else 1
    return 2 * groups * first.shape[-2] * first.shape[-1] * second.shape[-1]
