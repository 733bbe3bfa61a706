"""Modes, compilers, captures, autocast and profilers of users around a model in chunks."""

import collections
import contextlib
import dataclasses

import pytest
import torch
from support.pairs import Pair, engine_of
from support.same import assert_same_values
from support.small import DTYPES, WIDTH, Block, Stack, adamw, batch, loss_of, make, step_of
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from hf_patrickstar import ConfigError, EngineError

SITUATIONS = ("resident", "evicting")


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen[getattr(func, "__name__", str(func))] += 1
        return func(*args, **(kwargs or {}))


class Doubling(TorchDispatchMode):
    """Where it saw copies of the engine, values would become others."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result.mul_(2) if func is torch.ops.aten.copy_.default else result


def known_steps(pair):
    """Steps after which no step is new, so that nobody measures."""
    pair.train(2)
    return pair


@pytest.mark.parametrize("mode", [Operators, Functions])
def test_a_mode_sees_what_the_model_does_and_nothing_of_the_engine(mode, budget):
    pair = known_steps(Pair(Stack, budget))
    seen = []

    def run(model, optimizer):
        with mode() as found:
            loss = loss_of(model, 3)
            loss.backward()
        seen.append({name: num for name, num in found.seen.items() if name not in ("aten.detach.default", "detach")})
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    pair.both(run)
    assert seen[0] == seen[1]
    pair.check()


@pytest.mark.parametrize("mode", [Operators, Functions, Doubling, lambda: torch.device("meta")])
def test_a_mode_around_backward_and_step_changes_nothing(mode, budget):
    pair = Pair(Stack, budget)
    for step in range(3):
        losses = []
        for model, optimizer in pair:
            loss = loss_of(model, step)
            with mode() if model is pair.ours else contextlib.nullcontext():
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        assert torch.equal(*losses)
    pair.check()


def test_an_engine_that_is_made_and_detached_inside_of_a_mode(budget):
    plain, model = make(Stack), make(Stack)
    theirs = adamw(plain.parameters())
    with Operators(), Functions():
        engine = engine_of(model, budget)
    assert_same_values(plain, model)
    for each, optimizer in ((plain, theirs), (model, engine.optimizer)):
        step_of(each, optimizer)
    with Doubling():
        engine.detach()
    assert_same_values(plain, model)
    assert not _get_current_dispatch_mode_stack()


def test_the_default_type_and_device_change_nothing(budget):
    pair = Pair(Stack, budget)

    def run(model, optimizer):
        for step in range(3):
            loss = loss_of(model, step)
            torch.set_default_dtype(torch.float64)
            try:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            finally:
                torch.set_default_dtype(torch.float32)

    pair.both(run)
    assert_same_values(pair.plain, pair.ours)


def test_saved_tensors_hooks_that_are_disabled_are_refused_where_a_graph_is_made(budget):
    pair = Pair(Stack, budget)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        with pytest.raises(EngineError, match=r"disable_saved_tensors_hooks\(.?not here"):
            pair.ours(batch())
        with torch.no_grad():
            pair.both(lambda model, _: model(batch()).clone())
    pair.train(2)


# Autocast


@pytest.mark.parametrize("cache", [True, False])
def test_autocast_of_the_user(cache, budget):
    pair = Pair(Stack, budget)

    def loss(model, seed):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            out = model(batch(seed))
        return out.float().square().sum()

    pair.train(3, loss=loss)


def test_batch_norm_in_16_bits_without_autocast_is_refused():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    with pytest.raises(ConfigError, match="BatchNorm"):
        engine_of(model, dtype="bf16")


# Compilers and captures


@pytest.mark.parametrize(
    ("how", "checkpointed", "budget"),
    [("in place", True, "moving"), ("wrapped", False, "evicting"), ("forward", True, "evicting")],
)
def test_compiled_blocks(how, checkpointed, budget):
    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            if how == "wrapped":
                self.blocks = nn.ModuleList(torch.compile(block, backend="eager") for block in self.blocks)
            for block in self.blocks:
                if how == "in place":
                    block.compile(backend="eager")
                elif how == "forward":
                    block.forward = torch.compile(block.forward, backend="eager")

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                if checkpointed and torch.is_grad_enabled():
                    x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
                else:
                    x = block(x)
            return x

    torch._dynamo.reset()
    pair = Pair(Compiled, budget)
    pair.train(2)
    with torch.no_grad():
        pair.both(lambda model, _: model(batch()).clone())
    pair.check()


def test_a_model_that_is_compiled_as_a_whole_is_refused():
    with pytest.raises(ConfigError, match="compile"):
        engine_of(torch.compile(make(Stack), backend="eager"))
    model = make(Stack)
    model.compile(backend="eager")
    with pytest.raises(ConfigError, match="compile"):
        engine_of(model)


# Profiles

PREFIX = "patrickstar: "


@pytest.mark.own_streams
def test_loads_evictions_and_updates_have_names_in_a_profile():
    pair = Pair(lambda: Stack(8), "moving")
    pair.train(2)
    before = pair.engine.stats()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        loss_of(pair.ours, 2).backward()
        pair.optimizer.step()
        pair.optimizer.zero_grad()
    after = pair.engine.stats()
    names = [event.name.removeprefix(PREFIX) for event in found.events() if event.name.startswith(PREFIX)]
    loads = sum(name.startswith(("load ", "bring in ahead")) for name in names)
    assert loads == after["chunk_loads"] - before["chunk_loads"] == 8 + 4
    assert sum(name.startswith("evict") for name in names) == after["chunk_evictions"] - before["chunk_evictions"]
    assert any(name.startswith("update") for name in names)


# What goes around torch's functions


def test_code_that_goes_around_torchs_functions_finds_nan_and_its_gradient_is_refused():
    pair = Pair(Stack, "moving")
    pair.train(2)
    with torch._C.DisableTorchFunctionSubclass():
        assert pair.ours.layers[0].weight.isnan().all()
    assert not pair.ours.layers[0].weight.isnan().any()
    pair.train(1, first=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_without_rows(dtype, budget):
    pair = Pair(Stack, budget, dtype=dtype)
    pair.train(1)
    pair.both(lambda model, _: loss_of(model, 0, 0).backward())
    pair.step()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x):
        found, _ = self.cell(x[None])
        return self.layer(found[0])[0]


def test_modules_that_read_parameters_by_lists_of_their_own(budget):
    Pair(Recurrent, budget, settings={"chunks": 12}).train(3)


class Recursive(Stack):
    """Calls itself, reads its inputs from a dictionary or a dataclass, and is called while an error is handled."""

    def forward(self, x, depth=1):
        if isinstance(x, dict):
            x = x["x"]
        elif dataclasses.is_dataclass(x):
            x = x.x
        x = super().forward(x)
        return self(x, depth=depth - 1) if depth else x


@dataclasses.dataclass
class Inputs:
    x: torch.Tensor


def test_odd_calls_of_the_model(budget):
    def loss(model, seed):
        x = batch(seed)
        try:
            raise LookupError
        except LookupError:
            out = model(({"x": x}, Inputs(x), x)[seed % 3])
        return out.square().sum()

    pair = Pair(Recursive, budget)
    pair.train(6, loss=loss)


@pytest.mark.own_streams
def test_nothing_watches_the_operators_of_the_user_between_steps():
    pair = Pair(Stack, "resident", settings={"device_budget": 14000})
    for step in range(3):
        pair.backward(step)
        pair.both(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad()))
        assert not _get_current_dispatch_mode_stack()
        with torch.no_grad():
            pair.both(lambda model, _: model(batch()).clone())
        assert not _get_current_dispatch_mode_stack()
    pair.check()
