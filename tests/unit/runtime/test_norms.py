"""Norms of gradients on the host beside an accelerator, which are computed in blocks."""

import pytest
import torch

from hf_patrickstar.runtime.norms import Norms, norm_in_blocks

NUMEL = 2**22 + 2**17 + 37  # more than one part; the last block is not full


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(NUMEL,), (2**17, 64), (7,)])
def test_blocks_come_as_close_to_the_norm_as_the_type_allows(dtype, shape):
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for each in (gradient, gradient.flip(0), gradient.reshape(-1)[::3]):
        found = norm_in_blocks(each, torch.float32)
        torch.testing.assert_close(found, each.double().norm().float(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_only_large_2_norms_beside_an_accelerator_are_computed_in_blocks(norm_type):
    def norm_of(gradient, device):
        norms = Norms(torch.device(device))
        found = norms.add(gradient, torch.float32, norm_type)
        norms.fill()
        return found

    large, small = torch.rand(NUMEL, generator=torch.Generator().manual_seed(0)), torch.rand(2**16)
    of_torch, in_blocks = torch.linalg.vector_norm(large, norm_type), norm_in_blocks(large, torch.float32)
    assert of_torch != in_blocks, "the sums are in another order"
    assert norm_of(large, "cpu") == of_torch
    assert norm_of(large, "cuda") == (in_blocks if norm_type == 2.0 else of_torch)
    assert norm_of(small, "cuda") == torch.linalg.vector_norm(small, norm_type)
