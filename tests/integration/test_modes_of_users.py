"""Modes of users around training: they see the operators of the model and nothing of the engine, and change neither."""

import collections
import contextlib
import functools

import pytest
import torch
from models import make_batch, make_model
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


def train(is_chunked, *, change=None, make=None, forward=None, backward=None, update=None, step=None):
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


@pytest.mark.parametrize("part", ["forward", "backward"])
@pytest.mark.parametrize("mode", [Operators, Functions])
def test_a_mode_sees_the_operators_of_the_model(mode, part):
    plain, chunked = assert_same(**{part: mode})
    assert seen_in(chunked) == seen_in(plain)
    assert mode is Functions or sum(seen_in(plain).values()) > 100


def test_a_mode_that_is_on_from_forward_to_zero_grad():
    assert_same(step=Operators)
    assert_same(step=Functions)
    plain, chunked = assert_same(step=lambda: FlopCounterMode(display=False))
    assert [mode.get_total_flops() for mode in chunked if isinstance(mode, FlopCounterMode)] == [
        mode.get_total_flops() for mode in plain if isinstance(mode, FlopCounterMode)
    ]


@pytest.mark.parametrize("part", ["backward", "update"])
def test_where_new_tensors_would_go_changes_nothing(part):
    assert_same(**{part: lambda: torch.device("meta")})


@contextlib.contextmanager
def default_device(name):
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


AROUND = {
    "device": lambda: torch.device("meta"),
    "default device": lambda: default_device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "float16": lambda: default_dtype(torch.float16),
    "inference": torch.inference_mode,
    "operators": Operators,
    "functions": Functions,
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_an_engine_that_is_made_inside(around):
    assert_same(make=around)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_the_default_type(dtype):
    assert_same(step=lambda: default_dtype(dtype))


@pytest.mark.parametrize("part", ["step", "forward"])
def test_activations_on_the_cpu(part):
    assert_same(**{part: torch.autograd.graph.save_on_cpu})


def wrap_blocks(model):
    """Each block puts the hooks on that it runs inside of."""
    for block in model.transformer.h:
        block.forward = with_activations_on_the_cpu(block.forward)


def with_activations_on_the_cpu(forward):
    @functools.wraps(forward)
    def call(*args, **kwargs):
        with torch.autograd.graph.save_on_cpu():
            return forward(*args, **kwargs)

    return call


class Halved(torch.autograd.graph.saved_tensors_hooks):
    """Keeps activations in another type, which changes bits, and none of the parameters' memory."""

    def __init__(self):
        super().__init__(lambda tensor: tensor.to(torch.bfloat16), lambda kept: kept.float())


def halve_inside(model):
    def before(module, args):
        module.hooks = Halved()
        module.hooks.__enter__()

    def after(module, args, output):
        module.hooks.__exit__(None, None, None)

    for block in model.transformer.h:
        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)


@pytest.mark.parametrize("change", [wrap_blocks, halve_inside])
def test_saved_tensors_hooks_inside_of_the_model(change):
    assert_same(change=change)


def save_products(context, operator, *args, **kwargs):
    is_saved = any(word in str(operator) for word in ("aten.mm", "aten.addmm", "scaled_dot_product"))
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_selectively(model):
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    for block in model.transformer.h:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


def test_selective_activation_checkpointing():
    assert_same(change=checkpoint_selectively)


def test_selective_activation_checkpointing_under_a_mode():
    plain, chunked = assert_same(change=checkpoint_selectively, step=Operators, update=lambda: torch.device("meta"))
    assert len(plain) == len(chunked)


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.LBFGS])
def test_a_closure_runs_under_the_modes_of_its_caller(optimizer_class):
    found = []
    for is_chunked in (False, True):
        model = make_model("gpt2").train()
        optimizer, engine, seen = optimizer_class(model.parameters(), lr=0.1), None, []
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


def test_hooks_that_are_methods_of_torch():
    def put_on(model):
        for block in model.transformer.h:
            block.forward = with_hooks(block.forward)

    def with_hooks(forward):
        @functools.wraps(forward)
        def call(*args, **kwargs):
            with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.bfloat16, torch.Tensor.float):
                return forward(*args, **kwargs)

        return call

    assert_same(change=put_on)
