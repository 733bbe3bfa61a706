"""Modes of users around training: they see the operators of the model and nothing of the engine, and change neither."""

import collections
import contextlib
import copy

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoint_files import same_bits
from support.models import make_batch, make_model
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hf_patrickstar import PatrickStarEngine

CONFIG = {"chunk_numel": 2048, "chunk_budget": 90_000}


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Doubled(TorchDispatchMode):
    """Changes what copies write: where the engine's own copies are seen, values become others."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result.mul_(2) if func is torch.ops.aten.copy_.default else result


def made(is_chunked, change=lambda model: None):
    model = make_model("gpt2").train()
    change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if not is_chunked:
        return model, optimizer, None
    engine = PatrickStarEngine(model, CONFIG, optimizer, device="cpu")
    return model, engine.optimizer, engine


def both(use, change=lambda model: None):
    """What is found, and what modes see, in three steps in plain torch and in chunks.

    ``use(model, optimizer, under, found)`` makes a step of a loss; ``under(mode)`` is a context that notes what it saw.
    """
    ends = []
    for is_chunked in (False, True):
        model, optimizer, engine = made(is_chunked, change)
        found, seen = [], []

        @contextlib.contextmanager
        def under(mode, seen=seen):
            with mode() as around:
                yield
            seen.append(collections.Counter(name for name in getattr(around, "seen", ()) if name != DETACH))
            if isinstance(around, FlopCounterMode):
                seen.append(around.get_total_flops())

        for number in range(3):
            use(model, optimizer, under, found, make_batch("gpt2", 2, seed=number))
            optimizer.step()
            optimizer.zero_grad()
        if engine is not None:
            assert engine.stats()["chunk_loads"] > 10, "chunks move"
            engine.detach()
        ends.append((found, model.state_dict(), seen))
    (expected, weights, _), (actual, own, _) = ends
    assert same_bits(expected, actual)
    assert same_bits(dict(weights), dict(own))
    return [end[2] for end in ends]


DETACH = "aten.detach.default"
"""What torch itself does for saved-tensors hooks."""


def read_weights_of_others(model, name="attn.c_attn.weight"):
    """Each block reads a weight of the one before it, which may have left the device."""
    blocks = model.transformer.h
    for number, block in enumerate(blocks):

        def after(module, args, output, other=blocks[number - 1]):
            return output + other.get_parameter(name).abs().mean()

        block.mlp.register_forward_hook(after)


@pytest.mark.parametrize(
    ("forward", "backward", "change"),
    [
        (Operators, Doubled, read_weights_of_others),
        (Functions, Functions, read_weights_of_others),
        (lambda: FlopCounterMode(display=False), Operators, None),
    ],
)
def test_modes_around_the_parts_of_a_step(forward, backward, change):
    def use(model, optimizer, under, found, batch):
        with under(forward):
            loss = model(**batch, use_cache=False).loss
        with under(Doubled if backward is Doubled else Operators):
            loss = loss + 1e-3 * sum(parameter.square().sum() for parameter in model.parameters())
        with under(backward):
            loss.backward()
        found.append((loss.item(), float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))))

    expected, seen = both(use, change or (lambda model: None))
    assert seen == expected


def states_of(optimizer):
    return [state["exp_avg"].norm() for state in optimizer.state.values()]


@torch.no_grad()
def scale(model):
    for parameter in model.parameters():
        parameter.mul_(0.9)
        parameter.copy_(parameter * 2)
        parameter[0] = 1.0
        parameter.data = parameter.data + 1


CALLS = {
    "norms": lambda model, optimizer: [parameter.norm() for parameter in model.parameters()],
    "writes": lambda model, optimizer: scale(model),
    "gradients": lambda model, optimizer: [parameter.grad.norm() for parameter in model.parameters()],
    "writes to gradients": lambda model, optimizer: [parameter.grad.mul_(0.5) for parameter in model.parameters()],
    "new gradients": lambda model, optimizer: [setattr(p, "grad", p.grad * 2) for p in model.parameters()],
    "state dictionary": lambda model, optimizer: list(model.state_dict().values()),
    "loading": lambda model, optimizer: (
        model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}) and None
    ),
    "copy": lambda model, optimizer: list(copy.deepcopy(model).parameters()),
    "states": lambda model, optimizer: states_of(optimizer),
    "copy of the optimizer": lambda model, optimizer: states_of(copy.deepcopy(optimizer)),
}


def test_calls_between_backward_and_step():
    def use(model, optimizer, under, found, batch):
        model(**batch, use_cache=False).loss.backward()
        for number, call in enumerate(CALLS.values()):
            with under((Operators, Functions, Doubled)[number % 3]):
                values = call(model, optimizer) or []
            found += [value.detach().clone() for value in values if isinstance(value, torch.Tensor)]

    expected, seen = both(use)
    for number, (theirs, ours) in enumerate(zip(expected, seen, strict=True)):
        assert not ours - theirs
        if "copy" not in list(CALLS)[number % len(CALLS)]:  # the engine makes the copy
            assert ours == theirs


def test_saving_under_a_mode(tmp_path):
    model, _, engine = made(True)
    with Operators() as mode:
        model.save_pretrained(tmp_path)
    assert not any("copy" in name or "view.dtype" in name or "strided" in name for name in mode.seen)
    engine.detach()
    state = model.state_dict()
    for name, value in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(state[name], value), name
