"""fp32 over two and four processes: bit for bit one process that accumulates the same micro-batches."""

import pytest
import torch
import torch.distributed as dist
from support.together import (
    alone,
    differences,
    engaged,
    hf_loss,
    on_one_rank,
    parts_of,
    prepared,
    tight,
    train_as_alone,
)

SETTINGS = {
    "all_resident": {},
    "evicting_everything": {"debug_evict_all": True},
    "no_prefetch": {"prefetch_depth": 0, "reshard_after_forward": True},
    "one_chunk": {"chunk_numel": 10**6},
    "large_tensors_spread": {"chunk_numel": 320},
}


def train_like_one(rank, name, config, is_tight, kwargs):
    world_size = dist.get_world_size()
    change = kwargs.pop("change", None)
    checkpointing = kwargs.pop("checkpointing", False)
    model = prepared(name, checkpointing, change)
    if is_tight:
        # OPT registers its last norm before its layers: the gradients of the first group wait for the whole backward.
        config = tight(model, config, extra_nbytes=2**15 if name == "opt" else 0)
    with engaged(model, config, accumulation=kwargs.get("accumulation", 1)) as engine:
        parts = parts_of(engine)
        expected = on_one_rank(
            lambda: alone(
                lambda: prepared(name, checkpointing, change), hf_loss(name), world_size, parts=parts, **kwargs
            )
        )
        norms = train_as_alone(engine, expected, hf_loss(name), **kwargs)
        stats = engine.stats()
        assert stats["device_peak_nbytes"] <= config.get("chunk_budget", stats["device_budget_nbytes"])
    assert differences(expected[0], model.state_dict()) == {}  # after detach
    return stats, norms


@pytest.mark.parametrize(("name", "checkpointing"), [("gpt2", True), ("mixtral", False), ("opt", True), ("t5", False)])
def test_two_train_like_one(pair, name, checkpointing):
    kwargs = {"checkpointing": checkpointing, "max_norm": 0.3}
    for stats, norms in pair.run(train_like_one, name, {"reshard_after_forward": True}, True, kwargs):
        assert min(norms) > 0.3, "clipping must bite"
        assert stats["steps"] == 3
        assert stats["reduce_scatters"] >= 3 * stats["num_chunks"] // 2
        assert stats["diverged_steps"] == 0 or name == "mixtral"


def test_four_train_like_one(four):
    how = {"max_norm": 0.3, "accumulation": 2}
    for stats, _ in four.run(train_like_one, "mixtral", {"debug_collectives": True}, True, how):
        assert stats["num_chunks"] % 4 == 0
        assert stats["steps"] == 3


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_large_tensors_are_spread(four, name):
    """Pieces that do not divide evenly, none at all for some ranks, and clipping by a norm that is made of parts."""
    config = {"chunk_numel": 640, "chunk_budget": 2**20, "debug_evict_all": name == "t5"}
    for stats, norms in four.run(train_like_one, name, config, False, {"max_norm": 0.3, "checkpointing": True}):
        assert min(norms) > 0.3
        assert stats["num_chunks"] > 4 * 8


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_change_nothing(pair, setting):
    config = SETTINGS[setting]
    results = pair.run(train_like_one, "gpt2", config, False, {})
    assert [stats["steps"] for stats, _ in results] == [3, 3]
    assert results[0][0]["all_gathers"] == results[1][0]["all_gathers"]


def freeze_half(model):
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)


def add_unused(model):
    model.unused = torch.nn.Linear(16, 16)


@pytest.mark.parametrize(("change", "checkpointing"), [(freeze_half, True), (add_unused, False)])
def test_frozen_and_unused_parameters(pair, change, checkpointing):
    kwargs = {"change": change, "checkpointing": checkpointing, "max_norm": 0.3}
    pair.run(train_like_one, "llama", {"reshard_after_forward": True}, False, kwargs)
