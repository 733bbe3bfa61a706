"""Comparing tensors by their bits: NaN equals itself, and 0 is not -0."""

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differs(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Where two tensors of one type have different bits."""
    integers = _INTEGERS[left.dtype.itemsize]
    return left.view(integers) != right.view(integers)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one type have the same bits."""
    integers = _INTEGERS[left.dtype.itemsize]
    return torch.equal(left.view(integers), right.view(integers))
