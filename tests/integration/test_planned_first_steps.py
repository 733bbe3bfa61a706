"""First steps of usual models follow a plan: nothing is recorded, and nothing differs from its trace."""

import copy

import pytest
import torch
from models import make_batch, make_model
from trainers import assert_same_weights, logged, pair, run, smallest_budget
from transformers import ViTConfig, ViTForImageClassification

from hf_patrickstar import PatrickStarEngine


def vit():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=3))


def images(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(4, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 3, (4,), generator=generator),
    }


def train(model, optimizer, batch_of):
    """Losses of three steps, with an evaluation after each."""
    losses = []
    torch.manual_seed(3)
    for step in range(3):
        loss = model.train()(**batch_of(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            evaluated = model.eval()(**batch_of(99)).loss
        losses += [loss.item(), evaluated.item()]
    return losses


@pytest.mark.parametrize("name", ["gpt2", "t5", "mixtral", "vit"])
def test_a_loop_with_evaluations_records_no_step_and_has_the_losses_of_plain_torch(name):
    plain = vit() if name == "vit" else make_model(name)
    model = copy.deepcopy(plain)
    batch_of = images if name == "vit" else lambda seed: make_batch(name, seed=seed)
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), batch_of)
    made = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = PatrickStarEngine(model, {"chunk_budget": smallest_budget(model)}, made, device="cpu")
    assert train(model, engine.optimizer, batch_of) == expected
    assert_same_weights(plain, model)
    stats = engine.stats()
    assert stats["chunk_evictions"] > 0
    assert stats["recorded_steps"] == stats["diverged_steps"] == 0


def test_the_trainer_with_an_evaluation_in_each_step_records_none(tmp_path):
    stock, ours = pair(tmp_path, max_steps=3, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4)
    run(stock)
    run(ours)
    for key in ("loss", "eval_loss", "grad_norm"):
        assert len(logged(stock, key)) == 3
        assert logged(ours, key) == logged(stock, key)
    assert_same_weights(stock.model, ours.model)
    stats = ours.patrickstar_stats()
    assert stats["chunk_evictions"] > 0
    assert stats["recorded_steps"] == stats["diverged_steps"] == 0
