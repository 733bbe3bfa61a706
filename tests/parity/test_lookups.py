"""Embeddings looked up on the CPU: what crosses, and which are; ``test_stock_trainer`` has every architecture."""

import pytest
import torch
from models import make_batch, make_model
from torch import nn

from hf_patrickstar import PatrickStarEngine


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)


def embeddings_of(engine):
    modules = {id(m.weight) for m in engine.model.modules() if isinstance(m, nn.Embedding)}
    return [tensor for tensor in engine.manager.tensors if id(tensor.parameter) in modules]


def test_optimizer_state_of_a_tied_embedding_exists_once():
    model = make_model("gpt2")
    engine = PatrickStarEngine(model, {"cpu_embedding": True, "chunk_budget": 40000}, adamw(model))
    model(**make_batch("gpt2")).loss.backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    assert model.lm_head.weight is model.transformer.wte.weight
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert engine.stats()["model_data_nbytes"] == 16 * numel
    assert len(engine.optimizer.state_dict()["state"]) == len(list(model.parameters()))


def test_what_crosses():
    """Untied, neither the weight nor its gradient; tied, once each, for the head."""

    class Tied(nn.Module):
        def __init__(self, tie):
            super().__init__()
            self.embedding = nn.Embedding(64, 8)
            self.head = nn.Linear(8, 64, bias=False)
            if tie:
                self.head.weight = self.embedding.weight

        def forward(self, ids):
            return self.head(self.embedding(ids)).square().mean()

    weight_nbytes = 64 * 8 * 4
    for tie in (False, True):
        model = Tied(tie)
        engine = PatrickStarEngine(model, {"cpu_embedding": True, "chunk_budget": 2048}, adamw(model))
        for _ in range(2):
            model(torch.randint(0, 64, (2, 3))).backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        stats = engine.stats()
        assert stats["host_to_device_nbytes"] == 2 * weight_nbytes
        assert stats["device_to_host_nbytes"] == 2 * weight_nbytes
        assert stats["chunk_loads"] == 2


def test_variants_of_embeddings():
    """Padding, scaling by frequency, renormalisation in place, sparse gradients, a subclass that scales."""

    class Scaled(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) * 3.0

    makers = (
        lambda: nn.Embedding(20, 8, padding_idx=0),
        lambda: nn.Embedding(20, 8, scale_grad_by_freq=True),
        lambda: nn.Embedding(20, 8, max_norm=0.5),
        lambda: nn.Embedding(20, 8, sparse=False),
        lambda: Scaled(20, 8),
    )
    for make in makers:
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(nn.Sequential(make(), nn.Linear(8, 8), nn.Linear(8, 8)))
        plain, managed = models
        optimizer = adamw(plain)
        engine = PatrickStarEngine(
            managed, {"cpu_embedding": True, "chunk_budget": 600, "chunk_numel": 64}, adamw(managed)
        )
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


@pytest.mark.parametrize(("rows", "tokens", "at_home"), [(5000, 64, True), (4096, 5000, False)])
def test_auto_decides_by_the_bytes_of_the_first_step(rows, tokens, at_home):
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Embedding(rows, 8), nn.Linear(8, 8), nn.Linear(8, 8)))
    plain, managed = models
    engine = PatrickStarEngine(managed, {"chunk_budget": rows * 8 * 4 + 4096}, adamw(managed))
    optimizer = adamw(plain)
    for step in range(5):
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


def test_auto_keeps_at_home_what_does_not_fit_the_device():
    """More tokens than rows would speak for the device, but the weight is larger than the budget."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4096, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    engine = PatrickStarEngine(model, {"chunk_budget": 20000}, adamw(model))
    for step in range(3):
        model(torch.randint(0, 4096, (5000,), generator=torch.Generator().manual_seed(step))).square().sum().backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    assert engine.manager.tensors[0].lookup == "home"


def test_evaluations_do_not_count_as_rows_of_a_micro_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5000, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    engine = PatrickStarEngine(model, {"chunk_budget": 5000 * 32 + 4096}, adamw(model))
    with torch.no_grad():
        for _ in range(10):
            model(torch.randint(0, 5000, (1000,)))
    model(torch.randint(0, 5000, (1000,))).square().sum().backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    assert engine.manager.tensors[0].lookup == "home"
