"""Comparing tensors by their bits: NaN equals itself, and 0 is not -0."""

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.view(_INTEGERS[value.dtype.itemsize])


def differs(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Where two tensors of one type have different bits."""
    return _bits(left) != _bits(right)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one type have the same bits."""
    return torch.equal(_bits(left), _bits(right))
