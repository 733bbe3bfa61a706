"""fp32: bit for bit the stock Trainer, with clipping that bites, two param groups and a cosine schedule."""

import pytest
from models import MODELS, make_model
from trainers import assert_same_run, smallest_budget, train

from hf_patrickstar.optim import adam_kernel, adam_script

HARSH = {"debug_evict_all": True}


def tight(name, checkpointing=False):
    return {"chunk_budget": smallest_budget(make_model(name), checkpointing=checkpointing)}


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_same_run(name, accumulation, checkpointing, tmp_path):
    kwargs = {"gradient_accumulation_steps": accumulation, "gradient_checkpointing": checkpointing}
    if accumulation > 1:
        kwargs["per_device_train_batch_size"] = 2
    expected = train(name, tmp_path, **kwargs)
    assert all(norm > 0.5 for norm in expected[1].norms), "clipping must bite"
    config = tight(name, checkpointing)
    actual = train(name, tmp_path, config, **kwargs)
    assert_same_run(expected, actual)
    stats = actual[0].patrickstar_stats()
    assert stats["chunk_evictions"] > 0
    assert stats["device_peak_nbytes"] <= config["chunk_budget"]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_same_run_evicting_everything_at_every_access(name, checkpointing, tmp_path):
    kwargs = {"gradient_checkpointing": checkpointing, "max_steps": 3}
    expected = train(name, tmp_path, **kwargs)
    actual = train(name, tmp_path, {**tight(name, checkpointing), **HARSH}, **kwargs)
    assert_same_run(expected, actual)


@pytest.mark.parametrize("eviction", ["lru", "list_order"])
@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0, None])
def test_budgets(eviction, fraction, tmp_path):
    model = make_model("gpt2")
    config = {"eviction": eviction}
    if fraction is not None:
        config["chunk_budget"] = int(4 * fraction * sum(p.numel() for p in model.parameters()))
    actual = train("gpt2", tmp_path, config)
    assert_same_run(train("gpt2", tmp_path), actual)
    stats = actual[0].patrickstar_stats()
    if fraction is None:
        assert stats["chunk_loads"] == 0
    else:
        assert stats["host_to_device_nbytes"] > 0


@pytest.mark.parametrize("chunk_numel", [64, 5000, 10**7])
def test_chunk_sizes(chunk_numel, tmp_path):
    config = {"chunk_numel": chunk_numel, "chunk_budget": "1MiB"}
    assert_same_run(train("gpt2", tmp_path), train("gpt2", tmp_path, config))


@pytest.mark.parametrize("tile_numel", [64, 1024])
def test_tiles(tile_numel, tmp_path, monkeypatch):
    monkeypatch.setattr(adam_kernel, "SHARE_NUMEL", 2 * tile_numel)
    monkeypatch.setattr(adam_script, "TILE_NUMEL", tile_numel)
    assert_same_run(train("bert", tmp_path), train("bert", tmp_path, {}))


def test_dropout_and_no_clipping(tmp_path):
    kwargs = {"max_grad_norm": 0.0, "max_steps": 6}
    assert_same_run(train("gpt2", tmp_path, **kwargs), train("gpt2", tmp_path, tight("gpt2"), **kwargs))


def test_several_epochs_with_uneven_batches(tmp_path):
    kwargs = {"rows": 22, "max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 4}
    assert_same_run(train("gpt2", tmp_path, **kwargs), train("gpt2", tmp_path, tight("gpt2"), **kwargs))


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor", "rmsprop", "adagrad"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_optimizers(optim, accumulation, tmp_path):
    kwargs = {"optim": optim, "gradient_accumulation_steps": accumulation}
    assert_same_run(train("gpt2", tmp_path, **kwargs), train("gpt2", tmp_path, tight("gpt2"), **kwargs))


def freeze_embeddings(model):
    model.get_input_embeddings().weight.requires_grad_(False)
    for parameter in list(model.parameters())[3:9]:
        parameter.requires_grad_(False)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_frozen_parameters(name, checkpointing, tmp_path):
    kwargs = {"change": freeze_embeddings, "gradient_checkpointing": checkpointing}
    config = {**tight(name, checkpointing), **HARSH}
    assert_same_run(train(name, tmp_path, **kwargs), train(name, tmp_path, config, **kwargs))


def add_unused(model):
    import torch

    model.unused = torch.nn.Linear(16, 16)


def test_unused_parameters_keep_their_value(tmp_path):
    actual = train("gpt2", tmp_path, tight("gpt2"), change=add_unused)
    assert_same_run(train("gpt2", tmp_path, change=add_unused), actual)
