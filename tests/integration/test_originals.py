"""Frozen fp32 weights of a 16-bit run: whoever reads, saves or merges them gets the bits of the file they came from."""

import copy
import logging
import os

import peft
import pytest
import torch
from safetensors.torch import load_file
from support import inside
from support.models import make_batch, make_model, make_rows
from support.trainers import arguments, smallest_budget
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

from hf_patrickstar import PatrickStarEngine, PatrickStarTrainer, PatrickStarTrainingArguments, deferred_weights
from hf_patrickstar.errors import BudgetError
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.tiers import Tier

WEIGHT = "transformer.h.0.mlp.c_fc.weight"
TRAINED = "ln_"


@pytest.fixture
def saved(tmp_path):
    """A directory with a model in fp32, and its values."""
    model = make_model("gpt2")
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base", {name: value.clone() for name, value in model.state_dict().items()}


@pytest.fixture(params=[True, False], ids=["deferred", "in_memory"])
def load(request, saved):
    def load(cls=GPT2LMHeadModel):
        with deferred_weights(request.param):
            return cls.from_pretrained(saved[0])

    return load


def freeze(model):
    """All but the norms; returns an optimizer of these."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(TRAINED in name)
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)


def engage(model, **config):
    config = {"dtype": "bf16", "chunk_budget": smallest_budget(make_model("gpt2"), "bf16"), **config}
    return PatrickStarEngine(model, config, freeze(model))


def train(engine):
    engine.model(**make_batch("gpt2")).loss.backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def tensors_in(directory):
    return load_file(directory / "model.safetensors")


def assert_frozen(found, expected, but=()):
    for name, value in expected.items():
        if TRAINED not in name and name not in but:
            assert found[name].dtype is value.dtype, name
            assert torch.equal(found[name], value), name


def lost(caplog):
    return [record.getMessage() for record in caplog.records if "rounded to" in record.getMessage()]


def test_reads(load, saved, tmp_path, caplog):
    model = load()
    engine = engage(model)
    frozen = [tensor for tensor in inside.tensors(engine) if tensor.is_rounded]
    assert frozen
    assert all("master" not in tensor.chunk.lists for tensor in frozen)
    train(engine)
    assert_frozen(dict(model.named_parameters()), saved[1], but=["lm_head.weight"])
    assert_frozen(model.state_dict(), saved[1])
    assert_frozen(copy.deepcopy(model).state_dict(), saved[1])
    with engine.full_parameters():
        assert_frozen(dict(model.named_parameters()), saved[1], but=["lm_head.weight"])
    model.save_pretrained(tmp_path / "out")
    assert_frozen(tensors_in(tmp_path / "out"), saved[1], but=["lm_head.weight"])
    model.save_pretrained(saved[0])  # over the file that it is read from
    assert_frozen(tensors_in(saved[0]), saved[1], but=["lm_head.weight"])
    train(engine)
    assert_frozen(model.state_dict(), saved[1])
    engine.detach()
    assert_frozen(model.state_dict(), saved[1])
    assert not lost(caplog)


@pytest.mark.parametrize("how", ["values", "shorter"])
def test_a_file_that_is_written_to_is_not_read(load, saved, caplog, how):
    """What is there then is neither the old value nor anything to train on: what was rounded is the truth."""
    model = load()
    engine = engage(model)
    path = saved[0] / "model.safetensors"
    if how == "shorter":
        os.truncate(path, 1000)
    else:
        path.write_bytes(path.read_bytes()[:-64] + b"\x42" * 64)
    found = model.state_dict()
    train(engine)
    for name, value in saved[1].items():
        if TRAINED not in name and inside.find(engine, model.get_parameter(name)).is_rounded:
            assert torch.equal(found[name], value.bfloat16().float()), name
    (message,) = lost(caplog)
    assert str(path) in message
    assert "frozen_master" in message


def test_unfreezing_begins_with_all_bits(load, saved):
    model = load()
    engine = engage(model)
    train(engine)
    model.get_parameter(WEIGHT).requires_grad_(True)
    model(**make_batch("gpt2"))
    assert inside.find(engine, model.get_parameter(WEIGHT)).chunk.spec.trainable
    assert torch.equal(model.state_dict()[WEIGHT], saved[1][WEIGHT])


@pytest.mark.parametrize("budget", [{"chunk_budget": "auto"}, {}], ids=["resident", "moving"])
def test_what_is_written_counts(load, saved, budget):
    model = load()
    engine = engage(model, **budget)
    expected = saved[1][WEIGHT]
    weight = model.get_parameter(WEIGHT)
    with torch.no_grad():
        weight[0] = 1.0
        expected[0] = 1.0
        weight.data[1, :3] = 2.0
        expected[1, :3] = 2.0
    assert torch.equal(model.state_dict()[WEIGHT], expected)
    kept = model.state_dict()
    kept[WEIGHT][2] = torch.tensor(1e-3)
    expected[2] = torch.tensor(1e-3)
    train(engine)
    assert torch.equal(weight, expected)
    with engine.full_parameters():
        weight[3:5] += 1e-6
    expected[3:5] += 1e-6
    assert torch.equal(model.state_dict()[WEIGHT], expected)
    assert torch.equal(kept[WEIGHT], expected)
    model.load_state_dict({**saved[1], WEIGHT: expected + 1e-6})
    assert torch.equal(model.state_dict()[WEIGHT], expected + 1e-6)
    assert_frozen(model.state_dict(), saved[1], but=[WEIGHT])
    engine.detach()
    assert torch.equal(model.state_dict()[WEIGHT], expected + 1e-6)


def test_the_same_values_keep_the_file(load, saved):
    model = load()
    engine = engage(model)
    model.load_state_dict(saved[1])
    assert "original" not in engine.ledger.owners(Tier.HOST)
    assert_frozen(model.state_dict(), saved[1])
    model.load_state_dict({name: value + 1e-6 for name, value in saved[1].items()})
    rounded = [tensor for tensor in inside.tensors(engine) if tensor.is_rounded]
    assert engine.ledger.owners(Tier.HOST)["original"] == sum(4 * tensor.spec.numel for tensor in rounded)
    engine.detach()
    assert "original" not in engine.ledger.owners(Tier.HOST)


def test_a_checkpoint_is_read_again(saved, tmp_path):
    """A resumed run reads frozen weights from the checkpoint, whatever the model was made from."""
    model = GPT2LMHeadModel.from_pretrained(saved[0])
    engage(model).save_checkpoint(tmp_path / "checkpoint")
    resumed = make_model("gpt2", seed=1)
    engine = engage(resumed)
    assert not torch.equal(resumed.state_dict()[WEIGHT], saved[1][WEIGHT])
    engine.load_checkpoint(tmp_path / "checkpoint")
    assert_frozen(resumed.state_dict(), saved[1])


def test_what_the_model_does_not_have_is_not_read(saved):
    """Values that were changed by less than 16 bits can hold, before the engine was made, are kept."""
    model = GPT2LMHeadModel.from_pretrained(saved[0])
    changed = saved[1][WEIGHT].clone()
    changed[-1, -1] += 1e-7
    with torch.no_grad():
        model.get_parameter(WEIGHT).copy_(changed)
    engine = engage(model)
    assert engine.ledger.owners(Tier.HOST)["original"] == changed.nbytes
    assert torch.equal(model.state_dict()[WEIGHT], changed)
    assert_frozen(model.state_dict(), saved[1], but=[WEIGHT])


def make_lora(model):
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, lora_dropout=0.0)
    return peft.get_peft_model(model, config)


def train_lora(model, tmp_path, is_ours, **kwargs):
    cls, args = (PatrickStarTrainer, PatrickStarTrainingArguments) if is_ours else (Trainer, TrainingArguments)
    args = arguments(args, tmp_path, bf16=True, max_steps=2, **kwargs)
    trainer = cls(model=make_lora(model), args=args, train_dataset=make_rows("gpt2", 16))
    trainer.train()
    return trainer


@pytest.mark.parametrize("frozen_master", [False, True])
def test_merging_is_the_stock_trainers(load, saved, tmp_path, frozen_master):
    """Bit for bit: base, adapter and what is merged of both."""
    stock = train_lora(GPT2LMHeadModel.from_pretrained(saved[0]), tmp_path, False).model
    config = {"chunk_budget": smallest_budget(make_model("gpt2"), "bf16"), "frozen_master": frozen_master}
    trainer = train_lora(load(), tmp_path, True, patrickstar=True, patrickstar_config=config)
    assert trainer.patrickstar_stats()["chunk_evictions"] > 0
    expected, merged = stock, trainer.model
    for (name, value), (_, found) in zip(expected.named_parameters(), merged.named_parameters(), strict=True):
        assert torch.equal(value, found), name
    for change in (None, "merge_adapter", "unmerge_adapter", "merge_and_unload"):
        if change is not None:
            expected, merged = (getattr(model, change)() or model for model in (expected, merged))
        found = merged.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.state_dict().items()), change
    for model, name in ((expected, "stock"), (merged, "ours")):
        model.eval().save_pretrained(tmp_path / name)
    found = tensors_in(tmp_path / "ours")
    for name, value in tensors_in(tmp_path / "stock").items():
        assert torch.equal(found[name], value), name
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(merged(**make_batch("gpt2")).logits, expected(**make_batch("gpt2")).logits.float())


def test_a_model_of_the_hub(saved, tmp_path, monkeypatch):
    """Its files are looked for in the cache, under the name that it was loaded by."""
    from huggingface_hub import constants

    snapshot = tmp_path / "cache" / "models--owner--name" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    saved[0].rename(snapshot)
    (tmp_path / "cache" / "models--owner--name" / "refs").mkdir()
    (tmp_path / "cache" / "models--owner--name" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    model = GPT2LMHeadModel.from_pretrained(snapshot)
    model.name_or_path = "owner/name"
    engage(model)
    assert_frozen(model.state_dict(), saved[1])


def test_weights_that_came_from_no_file_are_kept_if_the_host_has_room(caplog, monkeypatch):
    """Else they are read as they were rounded, which nobody should find out later."""
    model = make_model("gpt2")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with caplog.at_level(logging.WARNING, "hf_patrickstar"):
        engage(model)
    assert not caplog.records
    assert_frozen(model.state_dict(), expected)
    allocate = PayloadPool.allocate

    def full(self, tier, numel, dtype, owner, **kwargs):
        if owner == "original":
            raise BudgetError("full")
        return allocate(self, tier, numel, dtype, owner, **kwargs)

    monkeypatch.setattr(PayloadPool, "allocate", full)
    with caplog.at_level(logging.WARNING, "hf_patrickstar"):
        engage(make_model("gpt2"))
    (text,) = [record.getMessage() for record in caplog.records]
    assert "too little for all bits of frozen parameters that no file has" in text
    assert "frozen parameters ('transformer.h." in text
