"""Modes of users around training: they see the operators of the model and nothing of the engine, and change neither."""

import collections
import contextlib
import copy
import functools

import pytest
import torch
from models import make_batch, make_model
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
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


def made(is_chunked, change=None, around=contextlib.nullcontext):
    model = make_model("gpt2").train()
    if change is not None:
        change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if not is_chunked:
        return model, optimizer, None
    with around():
        engine = PatrickStarEngine(model, CONFIG, optimizer, device="cpu")
    return model, engine.optimizer, engine


def train(is_chunked, *, change=None, make=None, forward=None, penalty=None, backward=None, update=None, step=None):
    """Three steps, with contexts around their parts; returns losses, norms and weights, and what the contexts were."""
    model, optimizer, engine = made(is_chunked, change, make or contextlib.nullcontext)
    found, modes = [], []

    def enter(around):
        mode = contextlib.nullcontext() if around is None else around()
        modes.append(mode)
        return mode

    for number in range(3):
        batch = make_batch("gpt2", 2, seed=number)
        with enter(step):
            with enter(forward):
                loss = model(**batch, use_cache=False).loss
            if penalty is not None:
                with enter(penalty):
                    loss = loss + 1e-3 * sum(parameter.square().sum() for parameter in model.parameters())
            with enter(backward):
                loss.backward()
            with enter(update):
                found.append((loss.item(), float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))))
                optimizer.step()
            optimizer.zero_grad()
    if engine is not None:
        assert engine.stats()["chunk_loads"] > 10, "chunks move"
        engine.detach()
    return found, model.state_dict(), modes


def assert_same(**kwargs):
    """Trains both; returns what the modes of both are."""
    plain, chunked = train(False, **{**kwargs, "make": None}), train(True, **kwargs)
    assert chunked[0] == plain[0]
    for name, value in plain[1].items():
        assert torch.equal(chunked[1][name], value), name
    return plain[2], chunked[2]


def seen_in(modes):
    """What modes have seen, without what torch itself does for saved-tensors hooks."""
    found = collections.Counter(name for mode in modes for name in getattr(mode, "seen", ()))
    return {name: num for name, num in found.items() if name != "aten.detach.default"}


def test_a_mode_that_is_on_from_forward_to_zero_grad():
    assert_same(step=Operators)
    assert_same(step=Functions)
    plain, chunked = assert_same(step=lambda: FlopCounterMode(display=False))
    assert [mode.get_total_flops() for mode in chunked if isinstance(mode, FlopCounterMode)] == [
        mode.get_total_flops() for mode in plain if isinstance(mode, FlopCounterMode)
    ]


def save_products(context, operator, *args, **kwargs):
    is_saved = any(word in str(operator) for word in ("aten.mm", "aten.addmm", "scaled_dot_product"))
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_selectively(model):
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    for block in model.transformer.h:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


def test_selective_activation_checkpointing_under_a_mode():
    plain, chunked = assert_same(change=checkpoint_selectively, step=Operators, update=lambda: torch.device("meta"))
    assert len(plain) == len(chunked)


def test_a_closure_runs_under_the_modes_of_its_caller():
    found = []
    for is_chunked in (False, True):
        model = make_model("gpt2").train()
        optimizer, engine, seen = torch.optim.LBFGS(model.parameters(), lr=0.1), None, []
        if is_chunked:
            engine = PatrickStarEngine(model, {"chunk_numel": 2048}, optimizer, device="cpu")
            optimizer = engine.optimizer
        torch.manual_seed(0)

        def closure(model=model, optimizer=optimizer, seen=seen):
            seen.append(torch.empty(1).device.type)
            with torch.device("cpu"):
                optimizer.zero_grad()
                loss = model(**make_batch("gpt2", 2), use_cache=False).loss
                loss.backward()
            return loss

        with torch.device("meta"), Operators() as mode:
            loss = optimizer.step(closure)
        products = sum(name == "aten.addmm.default" for name in mode.seen)
        found.append((loss.item(), seen, products, {k: v.clone() for k, v in model.state_dict().items()}))
        if engine is not None:
            engine.detach()
    (expected, places, num_products, weights), (loss, own_places, own_num_products, own_weights) = found
    assert (loss, own_places, own_num_products) == (expected, places, num_products)
    assert set(places) == {"meta"}
    assert num_products > 0
    for name, value in weights.items():
        assert torch.equal(own_weights[name], value), name


def read_weights_of_others(model, name="attn.c_attn.weight"):
    """Each block reads a weight of the one before it, which may have left the device."""
    blocks = model.transformer.h
    for number, block in enumerate(blocks):

        def after(module, args, output, other=blocks[number - 1]):
            return output + other.get_parameter(name).abs().mean()

        block.mlp.register_forward_hook(after)


@pytest.mark.parametrize(("mode", "part"), [(Operators, "forward"), (Functions, "backward"), (Doubled, "backward")])
def test_a_forward_that_reads_parameters_of_other_modules(mode, part):
    plain, chunked = assert_same(change=read_weights_of_others, **{part: mode})
    assert seen_in(chunked) == seen_in(plain)


@pytest.mark.parametrize("mode", [Operators, Doubled])
def test_a_penalty_on_parameters(mode):
    plain, chunked = assert_same(penalty=mode)
    assert seen_in(chunked) == seen_in(plain)


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


def call_between(is_chunked, call, around):
    model, optimizer, engine = made(is_chunked)
    for number in range(3):
        model(**make_batch("gpt2", 2, seed=number), use_cache=False).loss.backward()
        if number < 2:
            optimizer.step()
            optimizer.zero_grad()
    with around() as mode:
        found = call(model, optimizer)
    found = [found] if isinstance(found, torch.Tensor) or not isinstance(found, list) else found
    found = [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in found]
    optimizer.step()
    if engine is not None:
        assert engine.stats()["chunk_loads"] > 10, "chunks move"
        engine.detach()
    return found + list(model.state_dict().values()), [mode]


@pytest.mark.parametrize(
    ("name", "mode"), [(name, (Operators, Functions, Doubled)[number % 3]) for number, name in enumerate(CALLS)]
)
def test_a_call_between_backward_and_step(name, mode):
    (expected, plain), (found, chunked) = [call_between(is_chunked, CALLS[name], mode) for is_chunked in (False, True)]
    for own, value in zip(found, expected, strict=True):
        assert torch.equal(own, value) if isinstance(value, torch.Tensor) else own == value
    seen, expected = (collections.Counter(seen_in(modes)) for modes in (chunked, plain))
    assert not seen - expected
    if name not in ("copy", "copy of the optimizer"):  # the engine makes the copy
        assert seen == expected


def test_full_parameters_and_detaching_under_a_mode():
    found = []
    for is_chunked in (False, True):
        model, optimizer, engine = made(is_chunked)
        for _ in range(2):
            model(**make_batch("gpt2", 2), use_cache=False).loss.backward()
            with Doubled(), torch.no_grad(), Operators() as mode:
                with contextlib.nullcontext() if engine is None else engine.full_parameters(with_grads=True):
                    for parameter in model.parameters():
                        parameter.mul_(0.5)
                        parameter.grad.mul_(0.5)
                optimizer.step()
        if engine is not None:
            with Doubled(), Operators() as later:
                engine.detach()
            assert {name for name in mode.seen if "profiler" not in name} == {"aten.mul_.Tensor"}
            assert not later.seen
        found.append(model.state_dict())
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


def test_saving_under_a_mode(tmp_path):
    model, _, engine = made(True)
    with Operators() as mode:
        model.save_pretrained(tmp_path)
    assert not any("copy" in name or "view.dtype" in name or "strided" in name for name in mode.seen)
    engine.detach()
    state = model.state_dict()
    for name, value in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(state[name], value), name
