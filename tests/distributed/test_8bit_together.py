"""Optimizers of bitsandbytes in two processes: the bits of one process, and checkpoints for any number of them."""

import pytest
import torch
import torch.distributed as dist
from support.checkpoint_files import same_bits
from support.models import make_batch
from support.quantized_states import LEAST_NUMEL, flat, make
from support.together import copy_state, differences, engaged, hf_loss, on_one_rank, train_alone, train_together

from hf_patrickstar import PatrickStarEngine

pytest.importorskip("bitsandbytes")

CONFIGS = ({"placement": "host", "chunk_budget": 400_000}, {"placement": "host", "chunk_numel": 8448})


def adamw(model):
    """Some parameters have settings of their own."""
    from bitsandbytes.optim import AdamW8bit

    named = list(model.named_parameters())
    decay = [parameter for _, parameter in named if parameter.dim() > 1]
    rest = [parameter for _, parameter in named if parameter.dim() <= 1]
    return AdamW8bit([{"params": decay, "weight_decay": 0.1}, {"params": rest, "betas": (0.8, 0.95)}], lr=5e-3)


def lion(model):
    from bitsandbytes.optim import Lion8bit

    return Lion8bit(model.parameters(), lr=1e-3)


MAKERS = {"adamw": adamw, "lion": lion}


def reference(name, kind, dtype, steps, first=0, begin=None):
    """Weights, states and losses of plain torch with the batches of two ranks."""
    model = make(name, dtype)
    optimizer = MAKERS[kind](model)
    if begin is not None:
        model.load_state_dict(begin[0])
        optimizer.load_state_dict(begin[1])
    _, losses, _ = train_alone(model, hf_loss("gpt2"), 2, steps, optimizer=optimizer, first=first)
    return copy_state(model), optimizer.state_dict(), losses


def assert_as(expected, engine, losses):
    values, states, all_losses = expected
    assert losses == all_losses[dist.get_rank() :: 2]
    assert differences(values, engine.model.state_dict()) == {}
    found = flat(engine.optimizer.state_dict())
    assert any(state["state1"].dtype is torch.uint8 for state in found.values())
    assert same_bits(flat(states), found)


def train_with(rank, name, kind, dtype, config):
    assert dist.get_world_size() == 2
    expected = on_one_rank(reference, name, kind, dtype, 4)
    model = make(name, dtype)
    with engaged(model, config, MAKERS[kind](model)) as engine:
        losses, _ = train_together(engine, hf_loss("gpt2"), 4)
        assert_as(expected, engine, losses)


@pytest.mark.parametrize(
    ("name", "kind", "dtype", "config"),
    [
        ("llama", "adamw", torch.float32, CONFIGS[0]),
        ("gpt2", "adamw", torch.bfloat16, {}),
        ("gpt2", "lion", torch.float32, CONFIGS[1]),
        ("gpt2", "adamw", torch.bfloat16, {"updates": "device", "placement": "host", "chunk_budget": 2_000_000}),
    ],
)
def test_the_bits_are_those_of_one_process(pair, name, kind, dtype, config):
    """Each parameter is cut, if at all, where the library's blocks end."""
    with pair.over("simulated:1"):
        pair.run(train_with, name, kind, dtype, config)


# Checkpoints


def step(engine, number):
    engine.model(**make_batch("gpt2", seed=number)).loss.backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def go_on(rank, folder, saved):
    """Two processes go on from what one has saved, as plain torch does from the same values."""
    begin, states = saved
    model = make("llama", seed=1)
    with engaged(model, CONFIGS[1], adamw(model)) as engine:
        engine.load_checkpoint(f"{folder}/one")
        assert differences(begin, model.state_dict()) == {}
        assert same_bits(flat(states), flat(engine.optimizer.state_dict()))
        expected = on_one_rank(reference, "llama", "adamw", torch.float32, 1, 2, (begin, states))
        losses, _ = train_together(engine, hf_loss("gpt2"), 1, first=2)
        assert_as(expected, engine, losses)
        engine.save_checkpoint(f"{folder}/two")
        return copy_state(model), engine.optimizer.state_dict()


@pytest.mark.parametrize("kept", ["sharded", "torch"])
def test_one_then_two_then_one(pair, tmp_path, kept):
    """States are not cut in the same places in these; none is lost, and the bits of the next step are right."""
    model = make("llama")
    assert {True, False} == {parameter.numel() < LEAST_NUMEL for parameter in model.parameters()}
    engine = PatrickStarEngine(model, {**CONFIGS[0], "optimizer_format": kept}, adamw(model), device="cpu")
    for number in range(2):
        step(engine, number)
    engine.save_checkpoint(tmp_path / "one")
    saved = copy_state(model), engine.optimizer.state_dict()
    engine.detach()
    values, states = pair.run(go_on, str(tmp_path), saved)[0]
    model = make("llama", seed=3)
    engine = PatrickStarEngine(model, {"chunk_numel": 30_000}, adamw(model), device="cpu")
    engine.load_checkpoint(tmp_path / "two")
    assert differences(values, model.state_dict()) == {}
    assert same_bits(flat(states), flat(engine.optimizer.state_dict()))
    plain = make("llama", seed=4)
    plain.load_state_dict(values)
    optimizer = adamw(plain)
    optimizer.load_state_dict(states)
    plain(**make_batch("gpt2", seed=9)).loss.backward()
    optimizer.step()
    step(engine, 9)
    assert differences(plain.state_dict(), model.state_dict()) == {}
    assert same_bits(flat(optimizer.state_dict()), flat(engine.optimizer.state_dict()))
    engine.detach()
