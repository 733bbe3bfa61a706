"""What a frozen base costs in chunks, by the engine's own ledger; docs/plugins.md has the numbers."""

import peft
import pytest
import torch
from models import make_model

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.memory.tiers import Tier


def make_adapted():
    model = make_model("llama")
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))


def count(model, *, trainable, among=""):
    return sum(p.numel() for name, p in model.named_parameters() if p.requires_grad == trainable and among in name)


@pytest.mark.parametrize(
    ("precision", "keep", "per_frozen", "per_trained"),
    [
        pytest.param("bf16", [], 2, 14, id="all_in_16_bits"),
        pytest.param("bf16", ["*embed_tokens*", "*norm*"], 2, 14, id="as_under_autocast"),
        pytest.param("no", "auto", 4, 16, id="fp32"),
    ],
)
def test_a_frozen_base_costs_its_values_alone(precision, keep, per_frozen, per_trained):
    model = make_adapted()
    frozen, trained = count(model, trainable=False), count(model, trainable=True)
    wide = 0
    if keep and keep != "auto":
        wide = sum(count(model, trainable=False, among=part) for part in ("embed_tokens", "norm"))
        assert 0 < wide < frozen / 4
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    engine = PatrickStarEngine(model, {"keep_fp32": keep}, optimizer, precision=precision)
    expected = per_frozen * frozen + (4 - per_frozen) * wide + per_trained * trained
    assert engine.stats()["model_data_nbytes"] == expected
    owners = [engine.ledger.owners(tier) for tier in Tier]
    booked = sum(bytes_ for by_list in owners for name, bytes_ in by_list.items() if name != "workspace")
    padding = booked - expected
    assert 0 <= padding < 0.03 * expected
    states = sum(by_list.get(name, 0) for by_list in owners for name in ("exp_avg", "exp_avg_sq"))
    assert states == 8 * trained, "a frozen parameter has no state"
