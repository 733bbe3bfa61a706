"""Embeddings looked up on the CPU: tied and untied, trainable and frozen, bit for bit the plain model."""

import pytest
import torch
from models import make_batch, make_model
from reference import Reference
from torch import nn
from trainers import assert_same_run, smallest_budget, train

from hf_patrickstar import PatrickStarEngine


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)


def embeddings_of(engine):
    modules = {id(m.weight) for m in engine.model.modules() if isinstance(m, nn.Embedding)}
    return [tensor for tensor in engine.manager.tensors if id(tensor.parameter) in modules]


def freeze_embeddings(model):
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.weight.requires_grad_(False)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("name", ["gpt2", "bert_mlm", "bert", "t5", "opt", "llama"])
def test_fp32(tmp_path, name, frozen, accumulation):
    """GPT-2, BERT's masked language model, T5 and OPT are tied, Llama and the classifier are not."""
    kwargs = {"change": freeze_embeddings if frozen else None, "gradient_accumulation_steps": accumulation}
    expected = train(name, tmp_path / "plain", **kwargs)
    config = {"chunk_budget": int(1.5 * smallest_budget(make_model(name))), "cpu_embedding": True}
    ours = train(name, tmp_path / "ours", config, **kwargs)
    assert_same_run(expected, ours)
    engine = ours[0].model.patrickstar_engine
    assert all(tensor.is_looked_up or tensor.spec.aliases for tensor in embeddings_of(engine))
    assert any(tensor.is_looked_up for tensor in embeddings_of(engine))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", ["gpt2", "bert_mlm", "t5"])
def test_bf16_tied(name, accumulation, checkpointing):
    """Both uses add up in the parameter's type before they are accumulated, as in autograd."""
    models = [make_model(name).train() for _ in range(2)]
    if checkpointing:
        for model in models:
            model.gradient_checkpointing_enable()
    budget = int(1.5 * smallest_budget(make_model(name), "bf16", checkpointing))
    reference = Reference(
        models[0], torch.bfloat16, lambda named: torch.optim.AdamW(named.values(), lr=1e-2, fused=True), None, None
    )
    engine = PatrickStarEngine(
        models[1],
        {"dtype": "bf16", "cpu_embedding": True, "chunk_budget": budget},
        adamw(models[1]),
        gradient_accumulation_steps=accumulation,
    )
    for step in range(3):
        batches = [make_batch(name, seed=10 * step + micro) for micro in range(accumulation)]
        torch.manual_seed(step)
        expected, _ = reference.step(batches)
        torch.manual_seed(step)
        losses = []
        for batch in batches:
            loss = models[1](**batch).loss
            (loss / accumulation).backward()
            losses.append(loss.item())
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        assert losses == expected
    state_dict = models[1].state_dict()
    for key, master in reference.masters.items():
        assert torch.equal(state_dict[key], master.data), key


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
