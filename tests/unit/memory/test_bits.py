"""Comparing by bits."""

import pytest
import torch

from hf_patrickstar.memory.bits import differs, same_bits


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str
)
def test_nan_is_itself_and_zero_is_not_minus_zero(dtype):
    left = torch.tensor([1.0, float("nan"), 0.0, 0.0]).to(dtype)
    right = torch.tensor([1.0, float("nan"), -0.0, 0.0]).to(dtype)
    assert differs(left, right).tolist() == [False, False, True, False]
    assert not same_bits(left, right)
    assert same_bits(left[:2], right[:2].clone())
