"""Model data that fills the device and the host together: it trains, to the last percent, or is refused at once."""

import re

import pytest
import torch
from support.models import IDS
from support.reference import Reference
from transformers import GPT2Config, GPT2LMHeadModel

from hf_patrickstar import BudgetError, PatrickStarEngine
from hf_patrickstar.setup.payloads import Payloads

STEPS = 3


def make_model():
    torch.manual_seed(0)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_positions=8, n_embd=64, n_layer=24, n_head=2, **drops, **IDS))
    model.gradient_checkpointing_enable()
    return model.train()


def make_batch(step, size=1):
    ids = torch.randint(3, 96, (size, 4), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def adamw(parameters):
    named = parameters.values() if isinstance(parameters, dict) else parameters
    return torch.optim.AdamW(named, lr=1e-2, fused=True)


def model_data_nbytes(**config):
    model = make_model()
    engine = PatrickStarEngine(model, {"cpu_embedding": False, **config}, adamw(model.parameters()))
    return engine.stats()["model_data_nbytes"]


def budgets(part, **config):
    """Budgets of which model data is a part, with two fifths on the device."""
    both = model_data_nbytes(**config) / part
    return {"device_budget": int(both * 0.4), "host_budget": int(both * 0.6), **config}


def train(config, size=1):
    """Losses of our steps, the engine, and the weights after them."""
    model = make_model()
    engine = PatrickStarEngine(model, config, adamw(model.parameters()))
    losses = []
    for step in range(STEPS):
        loss = model(**make_batch(step, size)).loss
        loss.backward()
        losses.append(loss.item())
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return losses, engine, model.state_dict()


def train_plainly():
    reference = Reference(make_model(), torch.bfloat16, adamw)
    losses = [reference.step([make_batch(step)])[0][0] for step in range(STEPS)]
    return losses, reference.masters


def test_model_data_of_97_percent_of_both_tiers_trains_bit_for_bit():
    config = budgets(0.97, dtype="bf16")
    expected, weights = train_plainly()
    losses, engine, state_dict = train(config)
    assert losses == expected
    assert all(torch.equal(state_dict[name], weight) for name, weight in weights.items())
    stats = engine.stats()
    assert stats["device_total_peak_nbytes"] <= config["device_budget"]
    assert stats["host_peak_nbytes"] <= config["host_budget"]
    assert stats["chunk_evictions"] > 0


def test_model_data_of_101_percent_is_refused_before_anything_is_allocated_and_what_is_advised_trains(monkeypatch):
    config = budgets(1.01, dtype="bf16")
    model, before = make_model(), make_model().state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(Payloads, "allocate", lambda self: 1 / 0)
        with pytest.raises(BudgetError, match=r"together too small for the model data") as caught:
            PatrickStarEngine(model, config, adamw(model.parameters()))
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert "patrickstar_engine" not in model.__dict__
    message = str(caught.value)
    expected, _ = train_plainly()
    (enough,) = re.findall(r"a host_budget of at least ([\d.]+MiB), the host has room", message)
    assert train({**config, "host_budget": enough})[0] == expected
