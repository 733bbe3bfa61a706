"""The way of a gradient: over its value, beside it, later, dropped, kept, clipped, scaled; always that of torch."""

import gc
import weakref

import pytest
import torch
from support.pairs import Pair, alike, clip, config_of
from support.same import assert_same, assert_same_values, copied, gradients_of, values_of
from support.small import DTYPES, WIDTH, Stack, Tied, adamw, batch, loss_of, make, sgd, step_of, steps
from torch import nn

from hf_patrickstar import BudgetError, EngineError, PatrickStarEngine

SITUATIONS = ("resident", "moving")


@pytest.mark.parametrize("accumulation", [1, 2])
def test_sums_of_several_backwards_are_read_and_stepped_with(accumulation, budget):
    pair = Pair(Tied, budget, gradient_accumulation_steps=accumulation)
    for step in range(2):
        for part in range(3):
            pair.backward(3 * step + part)
            pair.check_gradients()
        pair.check()
        pair.check_gradients()
        pair.step()


@pytest.mark.parametrize("make_optimizer", [adamw, sgd])
def test_parameters_without_a_gradient_are_left_alone(make_optimizer, budget):
    pair = Pair(Tied, budget, make_optimizer)
    before = values_of(pair.ours)
    pair.train(3)
    after = values_of(pair.ours)
    assert pair.ours.unused.weight.grad is None
    for name in ("unused.weight", "unused.bias"):
        assert torch.equal(before[name], after[name])
    numbers = {id(parameter): number for number, parameter in enumerate(pair.ours.parameters())}
    assert numbers[id(pair.ours.unused.weight)] not in pair.optimizer.state_dict()["state"]


@pytest.mark.own_rest
def test_a_value_that_backward_still_needs_when_its_gradient_is_complete(budget):
    """A second use of the weight, through a detached alias, whose backward comes after that of the first."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.randn(WIDTH))
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

        def forward(self, x):
            x = torch.tanh(nn.functional.linear(x, self.weight.detach())) + self.shift
            return nn.functional.linear(x, self.weight)

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = nn.Linear(WIDTH, WIDTH), Twice(), Twice()

        def forward(self, x):
            return self.third(self.second(self.first(x)))

    pair = Pair(Late, budget)
    for step in range(4):
        pair.backward(step)
        pair.check_gradients()
        pair.step()
    assert pair.engine.stats()["model_data_nbytes"] == 3 * (WIDTH * WIDTH + WIDTH) * 16, "no list of gradients"
    Pair(Late, budget).train(4)
    Pair(Late, budget, dtype="bf16").train(3)


def test_sparse_gradients_of_an_embedding(budget):
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(20, WIDTH, sparse=True)

        def forward(self, x):
            return self.embedding(x[0].argsort())  # each row once

    pair = Pair(Sparse, budget, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    pair.train(3)


# After a step


@alike
def test_without_zero_grad_a_loop_accumulates_as_in_torch(model, optimizer):
    """Gradients stay until they are zeroed for the first time."""
    found = []
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        found += gradients_of(model)
    return found


def test_a_consumed_gradient_is_an_error_and_never_a_wrong_number(budget):
    pair = Pair(Stack, budget)
    pair.train(2)
    loss_of(pair.ours, 2).backward()
    pair.optimizer.step()
    before = values_of(pair.ours)
    match = r"gradient of parameter 'layers\.0\.weight' was consumed by optimizer\.step\(\).*zero_grad.*keep_gradients"
    with pytest.raises(EngineError, match=match):
        copied(pair.ours.layers[0].weight.grad)
    loss_of(pair.ours, 3).backward()
    with pytest.raises(EngineError, match="consumed"):
        pair.optimizer.step()
    with pytest.raises(EngineError, match="consumed"):
        pair.optimizer.clip_grad_norm_(None, 1.0)
    assert_same(before, values_of(pair.ours))
    pair.optimizer.zero_grad()
    assert pair.ours.layers[0].weight.grad is None
    step_of(pair.plain, pair.plain_optimizer, 2)
    pair.train(2, first=3)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_gradients_stay_for_readers_and_for_the_next_backward(dtype, accumulation, budget):
    settings = {"keep_gradients": True}
    pair = Pair(Stack, budget, dtype=dtype, settings=settings, gradient_accumulation_steps=accumulation)
    pair.train(2, micro=accumulation)

    def run(model, optimizer):
        for step in range(2):
            loss_of(model, step).backward()
            optimizer.step()

    pair.check(run)
    pair.check_gradients()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_without_keeping_every_step_begins_with_new_gradients(accumulation, budget):
    settings = {"keep_gradients": False}
    pair = Pair(Stack, budget, settings=settings, gradient_accumulation_steps=accumulation)
    for step in range(3):
        for part in range(accumulation):
            pair.backward(10 * step + part)
        pair.both(lambda model, optimizer: optimizer.step())
        pair.plain_optimizer.zero_grad()
        pair.check()


@alike
def test_whoever_reads_gradients_after_a_step_finds_them_from_then_on(model, optimizer):
    """What somebody has read after the first step is kept, though ``zero_grad`` is called."""
    found = []
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        found += gradients_of(model)
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("what", ["read", "value", "drop", "more", "evaluation"])
def test_the_last_of_several_gradients_waits_for_the_step_or_for_whoever_comes_first(what, budget):
    """In 16 bits the update may add it to the sum; whatever comes before finds the sum, and the value."""
    pair = Pair(Stack, budget, dtype="bf16", gradient_accumulation_steps=2)
    pair.train(2, micro=2)
    for part in range(2):
        pair.backward(20 + part)
    if what == "read":
        pair.check_gradients()
    elif what == "value":
        pair.check()
    elif what == "drop":
        pair.check(lambda model, optimizer: optimizer.zero_grad())
    elif what == "more":
        pair.backward(22)
    else:
        with torch.no_grad():
            pair.both(lambda model, _: model(batch().bfloat16()).clone())
    pair.step()
    pair.train(1, first=3, micro=2)


# What users do with them


def test_gradients_given_up_by_everybody_are_freed(budget):
    pair = Pair(Stack, budget)
    pair.train(2)
    loss_of(pair.ours, 2).backward()
    held = pair.ours.layers[0].weight.grad
    assert held.numel() == WIDTH * WIDTH
    reference = weakref.ref(held)
    del held
    pair.optimizer.step()
    gc.collect()
    assert reference() is None


@alike
def test_penalties_on_gradients_and_double_backward(model, optimizer):
    for step in range(2):
        x = batch(step).requires_grad_()
        out = model(x).square().sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (out + slope.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        out = model(batch(step)).square().sum()
        gradients = torch.autograd.grad(out, list(model.parameters()), create_graph=True)
        sum(gradient.square().sum() for gradient in gradients).backward()
        optimizer.step()
        optimizer.zero_grad()


@alike(then=2)
def test_backward_with_create_graph_leaves_recorded_gradients(model, optimizer):
    loss_of(model, 0).backward(create_graph=True)
    penalty = sum(parameter.grad.square().sum() for parameter in model.parameters())
    penalty.backward()
    found = gradients_of(model)
    for parameter in model.parameters():
        parameter.grad = None
    return found


@alike
def test_backward_into_some_inputs_alone(model, optimizer):
    chosen = [model.layers[1].weight, model.layers[3].bias]
    loss_of(model, 0).backward(inputs=chosen)
    found = gradients_of(model)
    optimizer.step()
    optimizer.zero_grad()
    return found


# Bytes


def test_without_room_for_sums_a_gradient_is_not_lost():
    pair = Pair(Stack, "moving", settings={"host_budget": 5 * 320 * 16 + 64})
    loss_of(pair.plain, 0).backward()
    loss_of(pair.ours, 0).backward()
    with pytest.raises(BudgetError, match="'grad'"):
        loss_of(pair.ours, 1)
    pair.step()
    pair.train(2, first=1)


@alike
def test_zeros_that_are_read_between_forward_and_backward(model, optimizer):
    """They get a place in the chunk then, where the value is that backward needs."""
    for step in range(3):
        loss = loss_of(model, step)
        found = gradients_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return found


def test_gradients_that_are_zeroed_in_a_loop_by_hand(budget):
    """As old code does it: consumed gradients may be zeroed, detached and assigned, but not read."""
    pair = Pair(Stack, budget)
    pair.train(1)

    def run(model, optimizer):
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        return gradients_of(model)

    pair.both(run)
    pair.both(lambda model, optimizer: optimizer.zero_grad())
    pair.train(1, first=4)


def test_a_consumed_gradient_that_is_written_back_changes_nothing(budget):
    pair = Pair(Stack, budget)
    pair.train(2)
    pair.backward(2)
    pair.both(lambda model, optimizer: optimizer.step())
    for parameter in pair.ours.parameters():
        parameter.grad = parameter.grad
    with pytest.raises(EngineError, match="consumed"):
        pair.ours.layers[1].bias.grad.sum()
    pair.both(lambda model, optimizer: optimizer.zero_grad())
    pair.train(1, first=3)


@pytest.mark.parametrize(("wide", "has_one"), [(False, False), (True, False), (True, True)])
def test_gradients_put_in_16_bits_or_in_32(wide, has_one, budget):
    pair = Pair(Stack, budget, dtype="bf16")
    if has_one:
        pair.backward()
    gradients = [(torch.randn_like(parameter) * 1.01).float() for parameter in pair.plain.parameters()]
    gradients = [gradient * (1 + 2**-10) if wide else gradient for gradient in gradients]
    for parameter, master, gradient in zip(
        pair.ours.parameters(), pair.plain_optimizer.masters, gradients, strict=True
    ):
        master.grad = gradient
        parameter.grad = gradient.clone()
        assert torch.equal(parameter.grad, gradient)
    pair.step()


@alike(prepare=lambda model: model.layers[0].requires_grad_(False))
def test_a_gradient_of_a_frozen_parameter_is_the_users_own(model, optimizer):
    model.layers[0].bias.grad = torch.ones(WIDTH)
    loss_of(model).backward()
    optimizer.step()
    found = copied(model.layers[0].bias.grad)
    model.layers[0].bias.grad = None
    return found


# Norms and clipping


@pytest.mark.parametrize(("dtype", "accumulation"), [("fp32", 1), ("bf16", 2)])
def test_clipping_by_the_norm_of_all(dtype, accumulation, budget):
    pair = Pair(Stack, budget, dtype=dtype, gradient_accumulation_steps=accumulation)
    found = pair.train(4, micro=accumulation, max_norms=(0.5, 1e-3, 1e6, 0.1))
    assert all(norm > 0.5 for norm in found[accumulation :: accumulation + 1])


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_norms_of_any_order(norm_type, budget):
    Pair(Tied, budget).train(2, max_norms=(1e-2,), norm_type=norm_type)


@alike(Tied)
def test_torchs_own_functions(model, optimizer):
    norms = []
    for _ in steps(model, optimizer, 2):
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        nn.utils.clip_grad_value_(model.parameters(), 1e-2)
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    return norms


def test_clipped_gradients_are_what_is_read_and_added_to(budget):
    pair = Pair(Stack, budget)

    def read(model, optimizer):
        loss_of(model, 0).backward()
        return clip(model, optimizer, 0.1), gradients_of(model), clip(model, optimizer, 0.05)

    def add(model, optimizer):
        for part in range(3):
            loss_of(model, part).backward()
            clip(model, optimizer, 0.1)
        return gradients_of(model)

    def clip_a_part(model, optimizer):
        loss_of(model, 0).backward()
        return clip(model, optimizer, 0.01, part=model.layers[1]), gradients_of(model)

    for run in (read, add, clip_a_part):
        pair.both(run)
        pair.step()


def test_clipping_twice_and_by_different_limits(budget):
    pair = Pair(Stack, budget, sgd)

    def run(model, optimizer):
        norms = []
        for _ in steps(model, optimizer, 2):
            norms += [clip(model, optimizer, limit) for limit in (1.0, 0.25, 5.0)]
        return norms

    norms = [run(*each) for each in pair]
    assert torch.allclose(torch.stack(norms[0]), torch.stack(norms[1]), rtol=1e-6)
    for plain, ours in zip(pair.plain.parameters(), pair.ours.parameters(), strict=True):
        assert torch.allclose(plain, ours.detach(), rtol=1e-5, atol=1e-7)


def clip_values(model, optimizer, limit):
    if hasattr(model, "patrickstar_engine"):
        optimizer.clip_grad_value_(limit)
    else:
        nn.utils.clip_grad_value_(model.parameters(), limit)


def norm_of(model, optimizer):
    if hasattr(model, "patrickstar_engine"):
        return optimizer.grad_norm().clone()
    return nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])


def test_a_norm_is_of_what_gradients_are_now(budget):
    pair = Pair(Stack, budget)
    changes = (
        lambda model, optimizer: loss_of(model, 0).backward(),
        lambda model, optimizer: loss_of(model, 1).backward(),
        lambda model, optimizer: model.layers[0].weight.grad.mul_(7),
        lambda model, optimizer: setattr(model.layers[1].weight, "grad", torch.ones(WIDTH, WIDTH)),
        lambda model, optimizer: (optimizer.step(), optimizer.zero_grad(), loss_of(model, 2).backward()),
        lambda model, optimizer: (loss_of(model, 0) * float("inf")).backward(),
    )
    norms = [pair.both(lambda *each, change=change: (change(*each), norm_of(*each))[1]) for change in changes]
    assert len({norm.item() for norm in norms}) == len(norms)
    assert not torch.isfinite(pair.both(lambda model, optimizer: clip(model, optimizer, 1.0)))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_norm_after_a_step_is_that_of_what_the_step_has_left(accumulation, budget):
    settings = {"keep_gradients": True}
    pair = Pair(Stack, budget, settings=settings, gradient_accumulation_steps=accumulation)

    def run(model, optimizer):
        norms = []
        for step in range(2):
            for part in range(accumulation):
                loss_of(model, 10 * step + part).backward()
            norms.append(clip(model, optimizer, 0.1))
            optimizer.step()
            norms.append(clip(model, optimizer, 1e6))
            optimizer.zero_grad()
        return norms

    pair.check(run)


def test_without_gradients_the_norm_is_zero(budget):
    pair = Pair(Stack, budget)
    assert pair.optimizer.grad_norm() == 0
    assert pair.optimizer.clip_grad_norm_(None, 1.0) == 0
    pair.step()
    pair.train(2)


# Loss scales

SCALE = 1024.0


def backward_scaled(pair, seed=0):
    """A power of two: without the scale the bits are the same."""
    loss_of(pair.plain, seed).backward()
    (loss_of(pair.ours, seed) * SCALE).backward()


@pytest.mark.parametrize("scaled", [False, True])
def test_a_gradient_that_no_group_has_is_clipped_and_unscaled_too(scaled, budget):
    """The step that multiplies gradients leaves this one, which the next reader finds multiplied all the same."""
    pair = Pair(Stack, budget)

    def run(model, optimizer):
        left = optimizer.param_groups[0]["params"].pop(2)
        is_ours = hasattr(model, "patrickstar_engine")
        (loss_of(model) * (SCALE if scaled and is_ours else 1.0)).backward()
        if scaled and is_ours:
            optimizer.unscale(torch.tensor(1 / SCALE))
        norm = clip(model, optimizer, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        found = copied(left.grad), copied(left)
        optimizer.param_groups[0]["params"].insert(2, left)
        return norm, found

    pair.both(run)
    assert_same_values(pair.plain, pair.ours)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_scale_is_removed_by_the_step(accumulation, clips, budget):
    pair = Pair(Stack, budget, gradient_accumulation_steps=accumulation)
    for step in range(3):
        for part in range(accumulation):
            backward_scaled(pair, 10 * step + part)
        assert torch.isfinite(pair.optimizer.unscale(torch.tensor(1 / SCALE))).all()
        pair.both(lambda *each: clip(*each, 0.1) if clips else norm_of(*each))
        pair.both(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad()))
    for plain, ours in zip(pair.plain.parameters(), pair.ours.parameters(), strict=True):
        assert torch.allclose(plain, ours.detach(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("limit", [None, 0.0625])
def test_unscaled_gradients_are_what_is_read_and_limited(limit, budget):
    pair = Pair(Stack, budget)
    backward_scaled(pair)
    pair.optimizer.unscale(torch.tensor(1 / SCALE))
    if limit is not None:
        pair.both(clip_values, limit)
    pair.check_gradients()
    pair.backward(1)
    pair.check_gradients()
    pair.step()


def test_clipping_for_one_optimizer_leaves_the_gradients_of_the_other():
    model, plain = make(Stack), make(Stack)

    def optimizers(model):
        return [adamw(model.layers[:2].parameters()), sgd(model.layers[2:].parameters())]

    engine = PatrickStarEngine(model, config_of("moving"), optimizers(model), device="cpu")
    theirs = optimizers(plain)
    for step in range(3):
        loss_of(plain, step).backward()
        loss_of(model, step).backward()
        parts = [list((m.layers[:2] if step else m).parameters()) for m in (plain, model)]
        expected = nn.utils.clip_grad_norm_(parts[0], 0.01)
        assert torch.equal(engine.optimizers[0].clip_grad_norm_(parts[1], 0.01), expected)
        if step:
            assert_same(gradients_of(plain), gradients_of(model))
        for optimizer in (*theirs, *engine.optimizers):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(plain, model)
    assert torch.equal(plain(batch()), model(batch()))
