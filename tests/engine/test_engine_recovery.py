"""Out of memory in a step: the micro-batch is repeated, and nothing is lost, doubled or drawn anew."""

import gc
import random

import pytest
import torch
from support.pairs import Pair
from support.same import assert_same, copied, values_of
from support.small import WIDTH, Stack, adamw, batch, loss_of, make
from support.streams import simulated_streams
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_patrickstar import BudgetError, DeviceMemoryError, PatrickStarEngine

SITUATIONS = ("moving",)


class Failing(TorchDispatchMode):
    """Raises what an accelerator raises, at some operators that allocate, counted from the beginning of the block."""

    def __init__(self, *at):
        super().__init__()
        self.at, self.count = set(at), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        allocates = all(result.alias_info is None for result in func._schema.returns)
        self.count += allocates
        if allocates and self.count in self.at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return func(*args, **(kwargs or {}))


class Noisy(nn.Module):
    """Draws random numbers and has a buffer that every forward changes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)))
        return x


def run(dtype, accumulation, failures, budget, make_optimizer=adamw, clips=True):
    """Losses, values and statistics of three steps; ``failures`` has operators that fail by step and micro-batch."""
    pair = Pair(Noisy, budget, make_optimizer, dtype=dtype, gradient_accumulation_steps=accumulation)
    torch.manual_seed(5)
    losses = []
    for step in range(3):
        for micro in range(accumulation):

            def once(seed=10 * step + micro):
                loss = loss_of(pair.ours, seed)
                loss.backward()
                return loss.item()

            with Failing(*failures.get((step, micro), ())):
                losses.append(pair.engine.attempt(once))
        if clips:
            pair.optimizer.clip_grad_norm_(None, 0.5)
        pair.optimizer.step()
        pair.optimizer.zero_grad()
    return losses, values_of(pair.ours), pair.optimizer.state_dict()["state"], pair.engine.stats()


def operators(dtype, budget):
    pair = Pair(Noisy, budget, dtype=dtype)
    with Failing() as mode:
        loss_of(pair.ours).backward()
    return mode.count


@pytest.mark.parametrize(
    ("budget", "dtype", "accumulation", "shares"),
    [
        ("moving", "fp32", 1, (0.4, 0.97)),
        ("moving", "bf16", 2, (0.05, 0.7)),
        ("resident", "fp32", 1, (0.8,)),
        ("evicting", "bf16", 1, (0.5,)),
    ],
)
def test_a_failure_anywhere_changes_nothing(budget, dtype, accumulation, shares):
    total = operators(dtype, budget)
    expected = run(dtype, accumulation, {}, budget)
    assert expected[3]["retries"] == 0
    for share in shares:
        operator = max(int(share * total), 1)
        failures = {(0, 0): [operator], (1, accumulation - 1): [operator, total + operator // 2], (2, 0): [operator]}
        found = run(dtype, accumulation, failures, budget)
        assert found[0] == expected[0]
        assert_same(found[1], expected[1])
        assert_same(found[2], expected[2])
        assert found[3]["retries"] >= 3
        assert found[3]["steps"] == 3


@pytest.mark.parametrize("held_nbytes", [0, 3 * WIDTH * WIDTH * 4, 10**6])
def test_a_norm_that_has_no_memory_is_computed_anew(held_nbytes, monkeypatch):
    """Whether it is computed as the gradient comes, when that can be held no longer, or at the end of backward."""
    compute, failures = torch.linalg.vector_norm, []

    def fail(*args, **kwargs):
        if failures:
            raise failures.pop()
        return compute(*args, **kwargs)

    monkeypatch.setattr(torch.linalg, "vector_norm", fail)
    found = []
    for is_failing in (False, True):
        with simulated_streams():
            pair = Pair(Noisy, "moving")
            pair.engine.resources.streams.hold_at_most(held_nbytes)
            for seed in range(3):
                if is_failing and seed:
                    failures.append(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"))
                pair.engine.attempt(lambda seed=seed, pair=pair: loss_of(pair.ours, seed).backward())
                assert not failures, "no norm was asked for"
                pair.optimizer.clip_grad_norm_(None, 0.5)
                pair.optimizer.step()
                pair.optimizer.zero_grad()
            assert pair.engine.stats()["retries"] == 2 * is_failing
            found.append(values_of(pair.ours))
    assert_same(*found)


@pytest.mark.parametrize(("accumulation", "where"), [(2, "forward"), (2, "backward"), (1, "after")])
def test_who_fails_every_time_is_given_up_and_told_what_became_of_gradients(accumulation, where, budget):
    pair = Pair(Stack, budget, gradient_accumulation_steps=accumulation)
    pair.train(1, micro=accumulation)
    if accumulation == 2:
        pair.backward(5)
    before, gradients = values_of(pair.ours), [copied(parameter.grad) for parameter in pair.ours.parameters()]
    calls = []

    def hopeless():
        calls.append(1)
        with Failing(*([5] if where == "forward" else [])):
            loss = loss_of(pair.ours, 6)
        with Failing(*([12] if where == "backward" else [])):
            loss.backward()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    with pytest.raises(DeviceMemoryError, match=r"out of memory\..*failed 4 times(.|\n)*helps: smaller or") as caught:
        pair.engine.attempt(hopeless)
    assert len(calls) == 4
    assert isinstance(caught.value, BudgetError)
    text = str(caught.value)
    assert "The micro-batch failed 4 times. Parameters " in text
    is_dropped = accumulation == 2 and where != "forward"
    assert ("all gradients of this step are dropped" in text) is is_dropped
    assert_same(before, values_of(pair.ours))
    for parameter, gradient in zip(pair.ours.parameters(), gradients, strict=True):
        expected = None if is_dropped else gradient
        assert (parameter.grad is None) is (expected is None)
        assert expected is None or torch.equal(parameter.grad, expected)
    pair.optimizer.zero_grad()
    pair.plain_optimizer.zero_grad()
    pair.train(2, first=8, micro=accumulation)


def test_fewer_repetitions_if_that_is_wanted():
    pair = Pair(Stack)
    calls = []

    def hopeless():
        calls.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    with pytest.raises(DeviceMemoryError, match=r"The micro-batch failed\."):
        pair.engine.attempt(hopeless, max_retries=0)
    with pytest.raises(DeviceMemoryError, match="failed 2 times"):
        pair.engine.attempt(hopeless, max_retries=1)
    assert len(calls) == 1 + 2
    pair.train(2)


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt, RuntimeError])
def test_other_errors_pass_through_at_once(error, budget):
    pair = Pair(Stack, budget)
    calls = []

    def once():
        calls.append(1)
        loss_of(pair.ours, 3)
        raise error("of the user")

    with pytest.raises(error, match="of the user"):
        pair.engine.attempt(once)
    assert len(calls) == 1
    pair.train(2)


def test_an_attempt_after_one_that_was_given_up_counts_its_gradients(budget):
    """What the next micro-batch computes is no repetition of the one that failed."""
    pair = Pair(Stack, budget)

    def hopeless():
        loss_of(pair.ours, 3).backward()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    with pytest.raises(DeviceMemoryError):
        pair.engine.attempt(hopeless)
    assert all(parameter.grad is None for parameter in pair.ours.parameters())
    for step in range(2):
        for part in range(2):
            loss_of(pair.plain, 10 * step + part).backward()
            pair.engine.attempt(lambda seed=10 * step + part: loss_of(pair.ours, seed).backward())
        pair.both(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad()))
    pair.check()


def test_an_attempt_inside_of_another_leaves_repeating_to_it(budget):
    pair = Pair(Stack, budget)
    calls = []

    def inner():
        calls.append("inner")
        loss = loss_of(pair.ours, 0)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB")
        loss.backward()

    def outer():
        calls.append("outer")
        pair.engine.attempt(inner)

    pair.engine.attempt(outer)
    assert calls == ["outer", "inner"] * 2
    loss_of(pair.plain, 0).backward()
    pair.check_gradients()


def test_a_gradient_that_somebody_holds_is_as_before_a_failed_attempt(budget):
    pair = Pair(Stack, budget)
    pair.backward(0)
    held = [(model.layers[0].weight, model.layers[0].weight.grad) for model, _ in pair]
    loss_of(pair.plain, 1).backward()
    failures = [1]

    def once():
        loss_of(pair.ours, 1).backward()
        if failures:
            failures.pop()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB")

    pair.engine.attempt(once)
    assert torch.equal(held[0][1], held[1][1])
    pair.check_gradients()


def test_a_budget_of_the_engine_that_was_too_tight_once_is_made_do_with():
    """A batch that is larger than all before fits when every chunk that is not in use has left."""
    pair = Pair(lambda: Stack(8), "resident", settings={"device_budget": 30000})
    pair.train(3)
    plain = loss_of(pair.plain, 0, 36)
    plain.backward()

    def once():
        loss = loss_of(pair.ours, 0, 36)
        loss.backward()
        return loss.detach()

    assert torch.equal(pair.engine.attempt(once), plain.detach())
    del plain
    pair.step()
    assert pair.engine.stats()["device_total_peak_nbytes"] <= 30000
    assert torch.isfinite(pair.ours(batch())).all()


def test_memory_that_python_has_not_freed_yet_is_a_reason_to_repeat():
    """Tensors in reference cycles of earlier steps: without them the micro-batch has room, with no other change."""

    class Changing(nn.Module):
        """Takes its blocks in another order, and not all of them, so that no step has a plan."""

        def __init__(self):
            super().__init__()
            self.num = 0
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(6)
            )

        def forward(self, x):
            self.num += 1
            order = random.Random(self.num).sample(range(6), 4 + self.num % 3)
            for place in order:
                x = x + self.blocks[place](x)
            return x

    class Cycle:
        def __init__(self, nbytes):
            self.own, self.memory = self, torch.zeros(nbytes // 4)

    def learn():
        loss = model(torch.randn(128, 64)).square().mean()
        Cycle(400 * 2**10)
        engine.backward(loss)

    gc.disable()
    try:
        model = make(Changing)
        config = {"device_budget": 1700 * 2**10, "host_budget": "1GiB"}
        engine = PatrickStarEngine(model, config, adamw(model.parameters()), device="cpu")
        for _ in range(8):
            engine.attempt(learn)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        assert engine.stats()["retries"]
    finally:
        gc.enable()
