"""Where a tensor is in a copy, and what a rank has of it at home."""

import pytest
import torch
from support.spec_builders import pack

from hf_patrickstar.layout.specs import TensorSpec
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import Chunk, ManagedParameter


def make_chunk(shapes, chunk_numel, world_size, rank, splits=True):
    specs = [TensorSpec(index, f"t{index}", shape, True) for index, shape in enumerate(shapes)]
    layout = pack(specs, chunk_numel, frozenset(), world_size, splits)
    (spec,) = layout.chunks
    chunk = Chunk(spec, Tier.HOST, rank)
    for index in spec.tensor_indices:
        parameter = torch.nn.Parameter(torch.full(specs[index].shape, 1.0))
        chunk.add(ManagedParameter(specs[index], parameter, layout.placements[index].offset_numel, parameter.detach()))
    return chunk


@pytest.mark.parametrize("rank", range(4))
def test_a_tensor_that_is_spread(rank):
    chunk = make_chunk([(10, 13)], 64, 4, rank)  # 130 elements in chunks of 64, two full, two elements, none
    (tensor,) = chunk.tensors
    assert tensor.parts == ((0, 64), (64, 128), (128, 130), (130, 130))
    assert (tensor.is_split, tensor.is_owned, tensor.own_numel) == (True, rank < 3, (64, 64, 2, 0)[rank])
    assert chunk.owned == [tensor] * tensor.is_owned
    buffer = torch.arange(chunk.spec.capacity_numel)
    home = chunk.own_slice(buffer).clone()
    assert torch.equal(tensor.view_copy(buffer), torch.arange(130).view(10, 13))
    assert torch.equal(tensor.view(home), tensor.own(tensor.view_copy(buffer)))
