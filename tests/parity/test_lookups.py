"""Embeddings looked up on the CPU: what crosses, and which are; ``test_stock_trainer`` has every architecture."""

import pytest
import torch
from support import inside
from torch import nn

from hf_patrickstar import PatrickStarEngine


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)


def embeddings_of(engine):
    modules = {id(m.weight) for m in engine.model.modules() if isinstance(m, nn.Embedding)}
    return [tensor for tensor in inside.tensors(engine) if id(tensor.parameter) in modules]


def test_variants_of_embeddings():
    """Padding, scaling by frequency, renormalisation in place, sparse gradients, a subclass that scales."""

    class Scaled(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) * 3.0

    class Buffered(Scaled):
        """It is computed with on the device."""

        def __init__(self, *args):
            super().__init__(*args)
            self.register_buffer("factor", torch.tensor(3.0))

        def forward(self, ids):
            return super().forward(ids) * self.factor

    makers = (
        lambda: nn.Embedding(20, 8, padding_idx=0),
        lambda: nn.Embedding(20, 8, scale_grad_by_freq=True),
        lambda: nn.Embedding(20, 8, max_norm=0.5),
        lambda: nn.Embedding(20, 8, sparse=False),
        lambda: Scaled(20, 8),
        lambda: Buffered(20, 8),
    )
    for make in makers:
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(nn.Sequential(make(), nn.Linear(8, 8), nn.Linear(8, 8)))
        plain, managed = models
        optimizer = adamw(plain)
        config = {"cpu_embedding": True, "chunk_budget": 600 if make is not makers[-1] else 1000, "chunk_numel": 64}
        engine = PatrickStarEngine(managed, config, adamw(managed))
        for step in range(4):
            ids = torch.randint(0, 20, (3, 4), generator=torch.Generator().manual_seed(step))
            losses = []
            for model, one in ((plain, optimizer), (managed, engine.optimizer)):
                loss = model(ids).square().sum()
                loss.backward()
                one.step()
                model.zero_grad()
                losses.append(loss.item())
            assert losses[0] == losses[1]
        for key, value in plain.state_dict().items():
            assert torch.equal(value, managed.state_dict()[key]), key


def make_stack(rows):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(rows, 8), nn.Linear(8, 8), nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("rows", "tokens", "budget", "evaluations", "at_home"),
    [
        (5000, 64, 5000 * 8 * 4 + 4096, 0, True),
        (4096, 5000, 4096 * 8 * 4 + 4096, 0, False),
        (4096, 5000, 20000, 0, True),  # the weight is larger than the budget
        (5000, 1000, 5000 * 8 * 4 + 4096, 10, True),  # rows of evaluations do not count
    ],
)
def test_auto_decides_by_the_bytes_of_the_first_step(rows, tokens, budget, evaluations, at_home):
    plain, managed = make_stack(rows), make_stack(rows)
    engine = PatrickStarEngine(managed, {"chunk_budget": budget}, adamw(managed))
    with torch.no_grad():
        for _ in range(evaluations):
            managed(torch.randint(0, rows, (tokens,)))
    optimizer = adamw(plain)
    for step in range(3):
        ids = torch.randint(0, rows, (tokens,), generator=torch.Generator().manual_seed(step))
        for model, one in ((plain, optimizer), (managed, engine.optimizer)):
            model(ids).square().sum().backward()
            one.step()
            model.zero_grad()
    (tensor,) = embeddings_of(engine)
    assert tensor.lookup == ("home" if at_home else "device")
    assert (engine.stats()["host_to_device_nbytes"] > rows * 8 * 4) is not at_home
    assert engine.stats()["diverged_steps"] == 0
    for key, value in plain.state_dict().items():
        assert torch.equal(value, managed.state_dict()[key]), key
