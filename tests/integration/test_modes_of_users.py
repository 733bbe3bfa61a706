"""Modes of users around calls of a live model: they see nothing of the engine, and change nothing."""

import collections
import copy

import torch
from safetensors.torch import load_file
from support.checkpoint_files import same_bits
from support.models import make_batch, make_model
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_patrickstar import PatrickStarEngine

CONFIG = {"chunk_numel": 2048, "chunk_budget": 90_000}
DETACH = "aten.detach.default"


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


def made(is_chunked):
    model = make_model("gpt2").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if not is_chunked:
        return model, optimizer, None
    engine = PatrickStarEngine(model, CONFIG, optimizer, device="cpu")
    return model, engine.optimizer, engine


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
    """What is found, and what modes see, is in chunks what it is in plain torch."""
    ends = []
    for is_chunked in (False, True):
        model, optimizer, engine = made(is_chunked)
        found, seen = [], []
        for step in range(3):
            model(**make_batch("gpt2", 2, seed=step), use_cache=False).loss.backward()
            for number, call in enumerate(CALLS.values()):
                with (Operators, Functions, Doubled)[number % 3]() as mode:
                    values = call(model, optimizer) or []
                # torch itself detaches for saved-tensors hooks
                seen.append(collections.Counter(getattr(mode, "seen", ())) - collections.Counter({DETACH: 10**6}))
                found += [value.detach().clone() for value in values if isinstance(value, torch.Tensor)]
            optimizer.step()
            optimizer.zero_grad()
        ends.append((found, dict(model.state_dict()), seen))
    assert engine.stats()["chunk_loads"] > 10, "chunks move"
    (expected, weights, theirs), (actual, own, ours) = ends
    assert same_bits([expected, weights], [actual, own])
    for number, (plain, chunked) in enumerate(zip(theirs, ours, strict=True)):
        assert not chunked - plain
        if "copy" not in list(CALLS)[number % len(CALLS)]:  # the engine makes the copy
            assert chunked == plain


def test_saving_under_a_mode(tmp_path):
    model, _, engine = made(True)
    with Operators() as mode:
        model.save_pretrained(tmp_path)
    assert not any("copy" in name or "view.dtype" in name or "strided" in name for name in mode.seen)
    engine.detach()
    state = model.state_dict()
    for name, value in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(state[name], value), name
