"""Gradients of a live model: read, logged, clipped, replaced and used, as code for plain torch does it."""

import collections
import math

import pytest
import torch
from support.live import WIDTH, live, loss_of, make_ids, make_tower, make_with_list, raises_in_both, train
from torch import nn


def gradients_of(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def backward(model, step=0, loss=loss_of):
    value = loss(model, step)
    value.backward()
    return value.detach()


def generator(seed=3):
    return torch.Generator().manual_seed(seed)


# Between backward and step: each function reads or changes gradients, and gives what it found.


def facts(model):
    found = []
    for parameter in model.parameters():
        g = parameter.grad
        found += [g.shape, g.dtype, str(g.device), g.stride(), g.layout, g.is_leaf, g.requires_grad, g.grad_fn is None]
        found += [g.is_contiguous(), g.numel(), g.element_size(), g.ndim, type(g) is torch.Tensor, g.grad is None]
        found += [isinstance(g, nn.Parameter), g.is_sparse, g is parameter.grad]
    return found


def by_attribute(model):
    found = [model.blocks[3].linear.weight.grad, model.scale.grad, model.embedding.weight.grad, model.head.weight.grad]
    found += [model.get_parameter("blocks.7.norm.weight").grad, getattr(model.blocks[0].norm, "bias").grad]  # noqa: B009
    found += [model.norm._parameters["weight"].grad, model.norm.bias._grad, [p.grad for p in model.kept]]
    gradients = [parameter.grad for parameter in model.parameters()]
    found += [torch._foreach_norm(gradients), nn.utils.parameters_to_vector(gradients), gradients[0].numpy().copy()]
    return [*found, repr(model.scale.grad), f"{model.blocks[2].norm.bias.grad}", model.norm.weight.grad.tolist()]


def changed_in_place(model):
    changes = [
        lambda g: g.mul_(2),
        lambda g: g.data.mul_(0.5),
        lambda g: g.zero_(),
        lambda g: g.data.zero_(),
        lambda g: g.fill_(0.25),
        lambda g: g.copy_(torch.ones_like(g)),
        lambda g: g.detach().add_(0.5),
        lambda g: g.view(-1)[:3].fill_(1.0),
        lambda g: g.flatten()[0].neg_(),
        lambda g: torch.neg(g, out=g),
        lambda g: nn.init.constant_(g, 0.125),
        lambda g: g.numpy().__imul__(3),
        lambda g: torch._foreach_mul_([g], 0.5),
        lambda g: g.__setitem__(..., 0.5),
        lambda g: g.__setitem__(2, 0),
        lambda g: g.__setitem__(g < 0, 0.0),
    ]
    for place, parameter in enumerate(model.parameters()):
        changes[place % len(changes)](parameter.grad)


def assigned(model):
    given = [torch.randn(parameter.shape, generator=generator()) for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), given, strict=True):
        parameter.grad = gradient
    given[0].mul_(2)
    given[1][0] = 1
    model.scale.grad.neg_()
    return given, [p.grad is gradient for p, gradient in zip(model.parameters(), given, strict=True)]


def dropped(model):
    model.blocks[4].linear.weight.grad = None
    del model.blocks[6].linear.weight.grad
    return [model.blocks[4].linear.weight.grad is None, model.blocks[6].linear.weight.grad is None]


def turned_and_shared(model):
    weight, other = model.blocks[0].linear.weight, model.blocks[7].linear.weight
    weight.grad = weight.grad.t()
    model.scale.grad = torch.full((1,), 0.25).expand(WIDTH)
    model.embedding.weight.grad = torch.randn(WIDTH, 24, generator=generator()).t()
    other.grad = model.blocks[5].linear.weight.grad = torch.randn(WIDTH, WIDTH, generator=generator())
    other.grad.mul_(2)


def clipped_by_torch(model):
    groups = [model.blocks.parameters(), [p for name, p in model.named_parameters() if "norm" in name], model.scale]
    found = [nn.utils.clip_grad_norm_(group, 0.1) for group in groups]
    found += [nn.utils.clip_grad_norm_(model.parameters(), limit) for limit in (1e6, 0.25, 0.1)]
    nn.utils.clip_grad_value_(model.parameters(), 0.005, foreach=False)
    total = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, total)
    return [*found, total, nn.utils.clip_grad_norm_(model.parameters(), math.inf, norm_type=math.inf)]


def not_finite(model):
    model.blocks[5].linear.weight.grad[0, 0] = math.nan
    model.scale.grad[1] = math.inf
    with raises_in_both(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    found = [all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())]
    for parameter in model.parameters():
        parameter.grad.nan_to_num_(nan=0.0, posinf=1.0, neginf=-1.0)
    return found


def refused(model):
    weight = model.blocks[0].linear.weight
    for gradient in (
        torch.zeros(3),
        torch.zeros(weight.shape, dtype=torch.float64),
        0.0,
        weight.detach().numpy(),
        weight,
    ):
        with raises_in_both(RuntimeError, TypeError):
            weight.grad = gradient


BETWEEN = [
    *(facts, by_attribute, changed_in_place, assigned, dropped, turned_and_shared, clipped_by_torch, not_finite),
    refused,
]


@live(make=make_with_list, everywhere=True)
def test_between_backward_and_step(model, optimizer, note):
    note("none", [parameter.grad is None for parameter in model.parameters()])
    for step, act in enumerate(BETWEEN):
        optimizer.zero_grad()
        note(act.__name__, backward(model, step))
        note(act.__name__, [act(model), gradients_of(model)])
        optimizer.step()
    optimizer.zero_grad()
    note("none", [parameter.grad is None for parameter in model.parameters()])


@live(everywhere=True)
def test_gradients_that_are_held(model, optimizer, note):
    """They are no copies: backward adds to them, writes to them count, ``zero_grad`` lets them go."""
    history = []
    for step in range(2):
        for micro in range(2):
            (loss_of(model, 2 * step + micro) / 2).backward()
            history.append([parameter.grad for parameter in model.parameters()])
            note("so far", history)
        history[-1][3].mul_(3)
        model.blocks[5].linear.weight.grad.add_(1)
        note("same", model.scale.grad is model.scale.grad)
        optimizer.step()
        note("after the step", history)
        optimizer.zero_grad()
        note("after zero_grad", history)
    given = torch.full((WIDTH,), 0.01)
    model.scale.grad = given
    backward(model, 4)
    note("added to what was given", [given, model.scale.grad is given])
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    note("zeros", [given, gradients_of(model)])
    optimizer.zero_grad()
    note("later", [train(model, optimizer), history])


# Loss scaling


def with_clipping(scaler, optimizer, model, step, note):
    scaler.scale(loss_of(model, step)).backward()
    scaler.unscale_(optimizer)
    note("unscaled", gradients_of(model))
    note("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.2))


def with_an_overflow(scaler, optimizer, model, step, note):
    scaler.scale(loss_of(model, step)).backward()
    note("scaled", gradients_of(model))
    if step == 1:
        model.blocks[5].linear.weight.grad[0, 0] = math.inf


def with_a_loss_that_overflows(scaler, optimizer, model, step, note):
    loss = loss_of(model, step)
    scaler.scale(loss * 1e38 * 1e38 if step == 1 else loss).backward()


def with_autocast_and_several_backwards(scaler, optimizer, model, step, note):
    for micro in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, 2 * step + micro) / 2
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    note("gradients", gradients_of(model))


SCALED = [with_clipping, with_an_overflow, with_a_loss_that_overflows, with_autocast_and_several_backwards]


@pytest.mark.parametrize(("act", "own"), [(act, n % 2 == 0) for n, act in enumerate(SCALED)])
def test_grad_scaler(both, act, own):
    def pattern(model, optimizer, note):
        used = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True) if own else optimizer
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(3):
            used.zero_grad()
            act(scaler, used, model, step, note)
            scaler.step(used)
            if step == 2:
                with raises_in_both(RuntimeError, match="already been called"):
                    scaler.step(used)
            scaler.update()
            note("scale", [scaler.get_scale(), model.blocks[0].linear.weight])
        used.zero_grad()

    both(pattern)


# Optimizers of one's own instead of the one that was given, or with it


OWN_OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "adam_loop": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
}


@pytest.mark.parametrize("name", OWN_OPTIMIZERS)
def test_another_optimizer_instead(both, name):
    def pattern(model, optimizer, note):
        own = OWN_OPTIMIZERS[name](model.parameters())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(own, 4)
        for step in range(3):
            own.zero_grad(set_to_none=step % 2 == 0)
            note("loss", backward(model, step))
            note("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.3))
            own.step()
            scheduler.step()
        note("states", [dict(own.state[p]) for p in model.parameters()])
        again = OWN_OPTIMIZERS[name](model.parameters())
        again.load_state_dict(own.state_dict())
        note("losses", train(model, again, first=3))

    both(pattern)


# Hooks


def watch(model):
    """Hooks of every kind: they read weights, and log, change, replace and drop gradients. Returns their handles."""
    seen, counts = model.seen, model.counts = [], collections.Counter()
    first, leaf = model.blocks[0].linear, model.blocks[5].linear

    def look(module, *_):
        seen.append([module.linear.weight.norm().item(), first.weight.detach().sum(), model.scale.mean()])

    def look_back(module, *_):
        seen.append([module.weight.norm().item(), module.bias.data.sum(), model.head.weight.detach()[0]])

    def look_at_an_output(module, args, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: seen.append((gradient @ module.linear.weight.detach()).norm()))

    def log(name):
        def hook(parameter):
            seen.append([parameter.grad.norm(), parameter.detach().norm(), (parameter * 2).sum().item()])
            counts[name] += 1

        return hook

    def triple(parameter):
        parameter.grad.mul_(3)

    def replace(parameter):
        parameter.grad = torch.sign(parameter.grad) * 0.01

    def drop(parameter):
        parameter.grad = None

    handles = []
    for block in model.blocks[:4]:
        handles += [block.register_forward_pre_hook(look), block.register_forward_pre_hook(look, prepend=True)]
        handles += [block.register_forward_hook(look), block.register_forward_hook(look_at_an_output)]
        handles += [block.linear.register_full_backward_hook(look_back)]
        handles += [block.norm.register_full_backward_pre_hook(look_back)]
    handles += [p.register_post_accumulate_grad_hook(log(name)) for name, p in model.named_parameters()]
    mask = torch.zeros(24, 1)
    mask[20:] = 1
    watched = [model.norm.weight, leaf.weight]
    return [
        *handles,
        leaf.register_forward_pre_hook(lambda module, args: seen.append(module.weight.data.norm())),
        leaf.register_forward_hook(lambda module, args, output: seen.append(module.weight.detach().clone())),
        leaf.register_forward_hook(lambda module, args, output: output + module.weight.mean()),
        model.norm.register_forward_hook(lambda module, args, output: output * (1 + first.weight.pow(2).mean())),
        model.blocks[2].linear.weight.register_hook(lambda gradient: gradient * 2),
        model.norm.bias.register_hook(torch.zeros_like),
        model.embedding.weight.register_hook(lambda gradient: gradient * mask),
        first.weight.register_post_accumulate_grad_hook(triple),
        model.blocks[1].linear.weight.register_post_accumulate_grad_hook(replace),
        model.scale.register_post_accumulate_grad_hook(drop),
        torch.autograd.graph.register_multi_grad_hook(watched, lambda found: seen.extend(g.clone() for g in found)),
        model.blocks[1].register_full_backward_hook(lambda module, _, outputs: seen.append(outputs[0].norm())),
    ]


@pytest.mark.parametrize("before", [True, False])
def test_hooks(both, before):
    def make():
        model = make_tower()
        if before:
            model.handles = watch(model)
        return model

    def pattern(model, optimizer, note):
        handles = model.handles if before else watch(model)
        for step in range(2):
            optimizer.zero_grad()
            note("losses", backward(model, step))
            note("gradients", gradients_of(model))
            optimizer.step()
        for handle in handles:
            handle.remove()
        every = nn.modules.module.register_module_forward_hook(
            lambda module, *_: model.seen.extend(p.abs().max().item() for p in module.parameters(recurse=False))
        )
        try:
            train(model, optimizer)
            with torch.no_grad():
                note("inference", model(make_ids()))
        finally:
            every.remove()
        note("seen", [model.seen, dict(sorted(model.counts.items()))])

    both(pattern, make=make)


@live
def test_updates_in_backward(model, optimizer, note):
    """As torch's tutorial does it, with one optimizer for a parameter, and as LOMO does it."""
    optimizers = {p: torch.optim.Adam([p], lr=1e-2, foreach=False) for p in list(model.parameters())[::2]}

    def hook(parameter):
        if parameter in optimizers:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()
            return
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.05)
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
    for step in range(3):
        note("loss", backward(model, step))
        note("none left", [parameter.grad is None for parameter in model.parameters()])
    for handle in handles:
        handle.remove()
    note("weights", list(model.parameters()))
