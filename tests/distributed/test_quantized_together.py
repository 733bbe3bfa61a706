"""Packed weights that processes share: what each computes, and what they save together, is what one process has."""

import pytest
import safetensors.torch
import torch.distributed as dist
from support import inside
from support.quantized import load, saved, with_adapter, without_packing
from support.together import alone, differences, engaged, hf_loss, on_one_rank, tight, train_as_alone

pytest.importorskip("bitsandbytes")


def make(kind, path, checkpointing):
    model = without_packing(with_adapter(load(kind, path))).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def train(rank, kind, path, folder, config, checkpointing):
    model = make(kind, path, checkpointing)
    places = {name: place for place, (name, _) in enumerate(model.named_parameters())}
    with engaged(model, tight(model, config)) as engine:
        parts = {places[t.spec.name]: t.parts for t in inside.tensors(engine) if t.is_split and t.spec.trainable}
        how = {"max_norm": 0.3, "parts": parts}
        expected = on_one_rank(lambda: alone(lambda: make(kind, path, checkpointing), hf_loss("llama"), **how))
        train_as_alone(engine, expected, hf_loss("llama"), max_norm=0.3)
        weights = [tensor for tensor in inside.tensors(engine) if tensor.spec.name.endswith("base_layer.weight")]
        stats = engine.stats()
        model.get_base_model().save_pretrained(folder)
        dist.barrier()
        found = safetensors.torch.load_file(f"{folder}/model.safetensors")
        wanted = {name.removeprefix("base_model.model."): value for name, value in expected[0].items()}
        assert differences({name: wanted[name] for name in found}, found) == {}
    assert differences(expected[0], model.state_dict()) == {}  # after detach
    assert {weight.chunk.spec.world_size for weight in weights} == {2}
    numel = sum(weight.spec.numel for weight in weights)
    assert 0.3 * numel < sum(weight.own_numel for weight in weights) < 0.7 * numel, "each process has a part of them"
    return stats


CASES = [
    ("nf4", {}, False),
    ("nf4, double", {"debug_evict_all": True}, True),
    ("fp4", {"reshard_after_forward": True}, True),
    ("int8", {"reshard_after_forward": True}, False),
]


@pytest.mark.parametrize(("kind", "config", "checkpointing"), CASES)
def test_two_train_like_one(pair, kind, config, checkpointing, tmp_path):
    for stats in pair.run(train, kind, saved(2).name, str(tmp_path), config, checkpointing):
        assert stats["steps"] == 3
        assert stats["diverged_steps"] == 0
        assert stats["all_gathers"] > stats["num_chunks"]
