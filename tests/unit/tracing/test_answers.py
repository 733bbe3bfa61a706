"""What operators return for fake tensors is like what torch returns, and keeps what torch knows of their values."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hf_patrickstar.tracing.answers import AnsweringMode

CALLS = {
    "as_strided": lambda x: x.as_strided((2, 3), (1, 2), 1),
    "slice": lambda x: x[1:3],
    "select": lambda x: x[2],
    "expand": lambda x: x[:1].expand(5, -1),
    "new_empty": lambda x: x.new_empty(3, 2, dtype=torch.float16),
    "empty": lambda x: torch.empty(2, 3, dtype=torch.bfloat16, device="cpu"),
    "full": lambda x: torch.full((3,), 2, device="cpu"),
    "norm": lambda x: torch.linalg.vector_norm(x, dtype=torch.float64),
    "sum": lambda x: x[0, 0] + 1,
    "clone": lambda x: x[0, 0].clone(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_results_are_like_those_of_torch(call):
    expected = call(torch.zeros(4, 6))
    with FakeTensorMode(), AnsweringMode():
        found = call(torch.zeros(4, 6, device="cpu"))
        assert isinstance(found, FakeTensor)
    for name in ("shape", "dtype", "device", "requires_grad"):
        assert getattr(found, name) == getattr(expected, name), name
    assert (found.stride(), found.storage_offset()) == (expected.stride(), expected.storage_offset())


def single():
    return torch.tensor([3.0], device="cpu")


@pytest.mark.parametrize(
    "look",
    [
        lambda: single().view(1),
        lambda: single()[0:1],
        lambda: single().detach(),
        lambda: single().clone(),
        lambda: torch.tensor(3.0, device="cpu").clone().view(1),
    ],
)
def test_values_that_torch_knows_are_known_of_views_and_copies(look):
    with FakeTensorMode(), AnsweringMode():
        assert look().nonzero().shape == (1, 1)
