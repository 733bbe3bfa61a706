"""Comparing by bits."""

import pytest
import torch

from hf_patrickstar.runtime.bits import differs, same_bits


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str
)
def test_nan_is_itself_and_zero_is_not_minus_zero(dtype):
    left = torch.tensor([1.0, float("nan"), 0.0, 0.0]).to(dtype)
    right = torch.tensor([1.0, float("nan"), -0.0, 0.0]).to(dtype)
    assert differs(left, right).tolist() == [False, False, True, False]
    assert not same_bits(left, right)
    assert same_bits(left[:2], right[:2].clone())


def test_the_least_difference_counts_in_any_shape_and_layout():
    value = torch.tensor([1.0, 2.0])
    assert differs(value, value.nextafter(torch.tensor([2.0, 2.0]))).tolist() == [True, False]
    for shape in ((), (0,), (2, 3)):
        value = torch.full(shape, 3.0)
        assert differs(value, value.clone()).shape == shape
        assert same_bits(value, value.clone())
    value = torch.arange(6.0).view(2, 3)
    assert same_bits(value.t(), value.t().contiguous())
    assert not same_bits(value.t(), value.t().flip(0))
    assert not same_bits(torch.zeros(2), torch.zeros(3))
