"""Norms, clipping, loss scales and skipped steps."""

import pytest
import torch
from engine.small import (
    DTYPES,
    WIDTH,
    Masters,
    Pair,
    Stack,
    Tied,
    adamw,
    assert_same_values,
    batch,
    config_of,
    copied,
    loss_of,
    make,
    sgd,
    values_of,
)
from simulated import delayed_streams, simulated_streams
from torch import nn

from hf_patrickstar import PatrickStarEngine

SITUATIONS = ("resident", "moving")


def clip(model, optimizer, max_norm=0.5, norm_type=2.0):
    """The engine's clipping for ours, that of torch for the twin."""
    if hasattr(model, "patrickstar_engine"):
        return optimizer.clip_grad_norm_(list(model.parameters()), max_norm, norm_type)
    if isinstance(optimizer, Masters):
        return nn.utils.clip_grad_norm_(optimizer.masters, max_norm, norm_type)
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)


@pytest.mark.parametrize(("dtype", "accumulation"), [("fp32", 1), ("bf16", 2)])
def test_clipping_by_the_norm_of_all(dtype, accumulation, budget):
    pair = Pair(Stack, budget, dtype=dtype, gradient_accumulation_steps=accumulation)

    def run(model, optimizer):
        norms = []
        for step in range(4):
            for part in range(accumulation):
                loss_of(model, 10 * step + part).backward()
            norms.append(clip(model, optimizer, (0.5, 1e-3, 1e6, 0.1)[step]))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    norms = pair.both(run)
    assert all(norm > 0.5 for norm in norms)
    pair.check()


@pytest.mark.parametrize(
    ("streams", "dtype", "accumulation"),
    [(simulated_streams, "fp32", 1), (delayed_streams, "bf16", 1), (simulated_streams, "bf16", 2)],
)
@pytest.mark.own_streams
def test_clipping_beside_copies_and_updates(streams, dtype, accumulation):
    with streams():
        pair = Pair(Stack, "moving", dtype=dtype, gradient_accumulation_steps=accumulation)

        def run(model, optimizer):
            norms = []
            for step in range(4):
                for part in range(accumulation):
                    loss_of(model, 10 * step + part).backward()
                norms.append(clip(model, optimizer).item())
                optimizer.step()
                optimizer.zero_grad()
            return norms

        pair.both(run)
        pair.check()
        pair.engine.detach()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_norms_of_any_order(norm_type, budget):
    pair = Pair(Tied, budget)

    def run(model, optimizer):
        norms = []
        for step in range(2):
            loss_of(model, step).backward()
            norms.append(clip(model, optimizer, 1e-2, norm_type))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    pair.both(run)
    pair.check()


def test_torchs_own_functions(budget):
    pair = Pair(Tied, budget)

    def run(model, optimizer):
        norms = []
        for step in range(2):
            loss_of(model, step).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            nn.utils.clip_grad_value_(model.parameters(), 1e-2)
            norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    pair.both(run)
    pair.check()


def test_clipped_gradients_are_what_is_read(budget):
    pair = Pair(Stack, budget)

    def run(model, optimizer):
        loss_of(model, 0).backward()
        norm = clip(model, optimizer, 0.1)
        found = [copied(parameter.grad) for parameter in model.parameters()]
        again = clip(model, optimizer, 0.05)
        optimizer.step()
        optimizer.zero_grad()
        return norm, again, found

    pair.both(run)
    pair.check()


def test_a_backward_after_clipping_adds_to_clipped_gradients(budget):
    pair = Pair(Stack, budget)

    def run(model, optimizer):
        for part in range(3):
            loss_of(model, part).backward()
            clip(model, optimizer, 0.1)
        found = [copied(parameter.grad) for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        return found

    pair.both(run)
    pair.check()


def test_clipping_twice_and_by_different_limits(budget):
    pair = Pair(Stack, budget, sgd)

    def run(model, optimizer):
        norms = []
        for step in range(2):
            loss_of(model, step).backward()
            norms += [clip(model, optimizer, limit) for limit in (1.0, 0.25, 5.0)]
            optimizer.step()
            optimizer.zero_grad()
        return norms

    norms = [run(*each) for each in pair]
    assert torch.allclose(torch.stack(norms[0]), torch.stack(norms[1]), rtol=1e-6)
    for plain, ours in zip(pair.plain.parameters(), pair.ours.parameters(), strict=True):
        assert torch.allclose(plain, ours.detach(), rtol=1e-5, atol=1e-7)


def test_clipping_a_part(budget):
    pair = Pair(Stack, budget)

    def run(model, optimizer):
        loss_of(model, 0).backward()
        part = list(model.layers[1].parameters())
        if hasattr(model, "patrickstar_engine"):
            norm = optimizer.clip_grad_norm_(part, 0.01)
        else:
            norm = nn.utils.clip_grad_norm_(part, 0.01)
        found = [copied(parameter.grad) for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        return norm, found

    pair.both(run)
    pair.check()


def test_clipping_by_value(budget):
    pair = Pair(Stack, budget)

    def run(model, optimizer):
        for step in range(2):
            loss_of(model, step).backward()
            if hasattr(model, "patrickstar_engine"):
                optimizer.clip_grad_value_(0.05)
            else:
                nn.utils.clip_grad_value_(model.parameters(), 0.05)
            norm = clip(model, optimizer, 0.2)
            found = [copied(parameter.grad) for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        return norm, found

    pair.both(run)
    pair.check()


def test_a_norm_is_of_what_gradients_are_now(budget):
    pair = Pair(Stack, budget)

    def norm_of(model, optimizer):
        if hasattr(model, "patrickstar_engine"):
            return optimizer.grad_norm()
        return nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])

    def run(model, optimizer):
        loss_of(model, 0).backward()
        norms = [norm_of(model, optimizer)]
        loss_of(model, 1).backward()
        norms.append(norm_of(model, optimizer))
        model.layers[0].weight.grad.mul_(7)
        norms.append(norm_of(model, optimizer))
        model.layers[1].weight.grad = torch.ones(WIDTH, WIDTH)
        norms.append(norm_of(model, optimizer))
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        norms.append(norm_of(model, optimizer))
        return norms

    norms = pair.both(run)
    assert len({norm.item() for norm in norms}) == len(norms)


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

    pair.both(run)
    pair.check()


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


def test_without_gradients_the_norm_is_zero(budget):
    pair = Pair(Stack, budget)
    assert pair.optimizer.grad_norm() == 0
    assert pair.optimizer.clip_grad_norm_(None, 1.0) == 0
    pair.optimizer.step()
    pair.plain_optimizer.step()
    pair.train(2)


def test_a_norm_that_is_not_finite_shows(budget):
    pair = Pair(Stack, budget)

    def run(model, optimizer):
        (loss_of(model, 0) * float("inf")).backward()
        return clip(model, optimizer, 1.0)

    assert not torch.isfinite(pair.both(run))


# Loss scales

SCALE = 1024.0


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_scale_is_removed_by_the_step(accumulation, clips, budget):
    """A power of two: without the scale the bits are the same."""
    pair = Pair(Stack, budget, gradient_accumulation_steps=accumulation)
    for step in range(3):
        for part in range(accumulation):
            loss_of(pair.plain, 10 * step + part).backward()
            (loss_of(pair.ours, 10 * step + part) * SCALE).backward()
        found = pair.optimizer.unscale(torch.tensor(1 / SCALE))
        expected = nn.utils.get_total_norm([parameter.grad for parameter in pair.plain.parameters()])
        assert torch.isfinite(found).all()
        if clips:
            assert torch.equal(clip(pair.ours, pair.optimizer, 0.1), clip(pair.plain, pair.plain_optimizer, 0.1))
        else:
            assert torch.equal(pair.optimizer.grad_norm(), expected)
        pair.both(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad()))
    for plain, ours in zip(pair.plain.parameters(), pair.ours.parameters(), strict=True):
        assert torch.allclose(plain, ours.detach(), rtol=1e-6, atol=1e-8)


def test_unscaled_gradients_are_what_is_read(budget):
    pair = Pair(Stack, budget)
    loss_of(pair.plain, 0).backward()
    (loss_of(pair.ours, 0) * SCALE).backward()
    pair.optimizer.unscale(torch.tensor(1 / SCALE))
    pair.check_gradients()
    loss_of(pair.plain, 1).backward()
    loss_of(pair.ours, 1).backward()
    pair.check_gradients()
    pair.both(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad()))
    pair.check()


def test_a_limit_for_elements_is_for_unscaled_gradients(budget):
    pair = Pair(Stack, budget)
    loss_of(pair.plain, 0).backward()
    (loss_of(pair.ours, 0) * SCALE).backward()
    pair.optimizer.unscale(torch.tensor(1 / SCALE))
    nn.utils.clip_grad_value_(pair.plain.parameters(), 0.0625)
    pair.optimizer.clip_grad_value_(0.0625)
    pair.check_gradients()
    pair.both(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad()))
    pair.check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_skipped_step_drops_gradients_and_keeps_values_and_states(dtype, budget):
    pair = Pair(Stack, budget, dtype=dtype)
    pair.train(2)
    before = values_of(pair.ours)
    (loss_of(pair.ours, 5) * float("inf")).backward()
    assert not torch.isfinite(pair.optimizer.unscale(torch.tensor(1 / SCALE))).all()
    pair.optimizer.skip_step()
    after = values_of(pair.ours)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert pair.ours.layers[0].weight.grad is None
    stats = pair.engine.stats()
    assert (stats["steps"], stats["skipped_steps"]) == (2, 1)
    pair.train(2, first=2)


def test_clipping_for_one_optimizer_leaves_the_gradients_of_the_other():
    model, plain = make(Stack), make(Stack)

    def optimizers(model):
        return [adamw(model.layers[:2].parameters()), sgd(model.layers[2:].parameters())]

    engine = PatrickStarEngine(model, config_of("moving"), optimizers(model), device="cpu")
    theirs = optimizers(plain)
    for step in range(3):
        loss_of(plain, step).backward()
        loss_of(model, step).backward()
        parts = [list(m.layers[:2].parameters()) for m in (plain, model)]
        expected = nn.utils.clip_grad_norm_(parts[0], 0.01)
        assert torch.equal(engine.optimizers[0].clip_grad_norm_(parts[1], 0.01), expected)
        for left, right in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(left.grad, right.grad)
        for optimizer in (*theirs, *engine.optimizers):
            optimizer.step()
            optimizer.zero_grad()
    for left, right in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(left, right)
    assert torch.equal(plain(batch()), model(batch()))
