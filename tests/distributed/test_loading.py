"""Processes that load one checkpoint share its pages: none of them ever has the whole model in memory of its own."""

import gc

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.units import KIB, MIB


def private_nbytes():
    """Memory that only this process has: what it wrote, not what it read from a file."""
    with open("/proc/self/smaps_rollup") as file:
        (line,) = (line for line in file if line.startswith("Anonymous:"))
    return int(line.split()[1]) * KIB


def load(rank, directory, num_steps):
    gc.collect()
    before = private_nbytes()
    model = GPT2LMHeadModel.from_pretrained(directory)
    numel = sum(parameter.numel() for parameter in model.parameters())
    loaded = private_nbytes() - before
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine = PatrickStarEngine(model, {"placement": "host"}, optimizer)
    kept = private_nbytes() - before
    booked = engine.ledger.used(Tier.HOST) + engine.ledger.used(Tier.DEVICE)
    model_data = engine.model_data_nbytes()
    x = torch.arange(16).reshape(1, 16)
    for _ in range(num_steps):
        model(x, labels=x).loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    total = sum(float(value.double().sum()) for value in model.state_dict().values())
    engine.detach()
    return {"numel": numel, "loaded": loaded, "kept": kept, "booked": booked, "model_data": model_data, "total": total}


def test_no_process_has_the_whole_model(pair, tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=6, n_embd=512, n_head=4, vocab_size=2000, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    found = pair.run(load, str(tmp_path), 1, timeout=120)
    whole = 4 * found[0]["numel"]  # bytes of the file
    assert whole > 60 * MIB
    for values in found:
        assert values["loaded"] < whole // 10, "from_pretrained maps the file"
        # param, master, exp_avg, exp_avg_sq of its own chunks
        assert values["model_data"] == pytest.approx(2 * whole, rel=0.1)
        assert values["kept"] < values["booked"] + whole // 5
    assert sum(values["model_data"] for values in found) == 4 * whole
    assert found[0]["total"] == found[1]["total"]
