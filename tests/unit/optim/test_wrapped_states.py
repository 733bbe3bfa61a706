"""States that wrap other tensors, as the 8-bit states of torchao do."""

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.memory.tiers import Tier


class Momentum(torch.optim.Optimizer):
    """Its momentum is the sum of two tensors of bf16: what the first one rounds away is in the second one."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            if not state:
                zeros = torch.zeros_like(parameter, dtype=torch.bfloat16)
                state["momentum"] = TwoTensor(zeros, zeros.clone())
            kept = state["momentum"]
            momentum = 0.9 * (kept.a.float() + kept.b.float()) + parameter.grad
            kept.a.copy_(momentum)
            kept.b.copy_(momentum - kept.a.float())
            parameter.sub_(momentum, alpha=0.1)


def make(config=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 4))
    optimizer = Momentum(model.parameters())
    engine = None if config is None else PatrickStarEngine(model, config, optimizer)
    return model, optimizer if engine is None else engine.optimizer, engine


def train(model, optimizer, seeds):
    for seed in seeds:
        model(torch.ones(2, 16) * seed).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("optimizer_format", ["sharded", "torch"])
def test_bytes_and_checkpoints(optimizer_format, tmp_path):
    expected = train(*make()[:2], range(1, 5))
    model, optimizer, engine = make({"optimizer_format": optimizer_format, "placement": "host", "chunk_budget": "1KiB"})
    train(model, optimizer, (1, 2))
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert engine.ledger.owners(Tier.HOST)["optimizer_state"] == 2 * 2 * numel
    engine.save_checkpoint(tmp_path)
    engine.detach()
    resumed, optimizer, engine = make({})
    with torch.serialization.safe_globals([TwoTensor]):
        engine.load_checkpoint(tmp_path)
    assert all(map(torch.equal, train(resumed, optimizer, (3, 4)), expected))
