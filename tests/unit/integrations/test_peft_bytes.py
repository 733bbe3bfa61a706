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


@pytest.mark.parametrize(
    ("precision", "keep", "per_frozen", "per_trained"), [("bf16", [], 2, 14), ("no", "auto", 4, 16)]
)
def test_a_frozen_base_costs_its_values_alone(precision, keep, per_frozen, per_trained):
    model = make_adapted()
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained = sum(map(torch.Tensor.numel, adapters))
    frozen = sum(map(torch.Tensor.numel, model.parameters())) - trained
    engine = PatrickStarEngine(model, {"keep_fp32": keep}, torch.optim.AdamW(adapters, fused=True), precision=precision)
    expected = per_frozen * frozen + per_trained * trained
    assert engine.stats()["model_data_nbytes"] == expected
    owners = [engine.ledger.owners(tier) for tier in Tier]
    booked = sum(nbytes for by_list in owners for name, nbytes in by_list.items() if name != "workspace")
    assert 0 <= booked - expected < 0.03 * expected, "the rest is padding"
    states = sum(by_list.get(name, 0) for by_list in owners for name in ("exp_avg", "exp_avg_sq"))
    assert states == 8 * trained, "a frozen parameter has no state"
