"""Whatever begins and ends rest, in whatever order, a plain model is the same bit for bit; see [Note: rest]."""

import contextlib
import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.pairs import Pair, clip
from support.small import Stack, Tied, loss_of
from torch import nn
from torch.utils.checkpoint import checkpoint


class Recomputed(Stack):
    """Layers that are recomputed in backward."""

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def train(model, optimizer, seed, size=4, micro=1, max_norm=None):
    found = []
    for part in range(micro):
        loss = loss_of(model, seed + part, size)
        loss.backward()
        found.append(loss.detach())
    if max_norm is not None:
        found.append(clip(model, optimizer, max_norm))
    optimizer.step()
    optimizer.zero_grad()
    return found


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def evaluate(model, optimizer, seed):
    with torch.no_grad():
        return loss_of(model, seed)


def evaluate_inside(model, optimizer, seed):
    loss = loss_of(model, seed)
    found = evaluate(model, optimizer, seed + 1)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), found


def freeze(model, optimizer, seed):
    layer = layers_of(model)[seed % 2]
    layer.requires_grad_(not layer.weight.requires_grad)


def write(model, optimizer, seed):
    with torch.no_grad():
        layers_of(model)[seed % 2].weight.mul_(0.9)
        layers_of(model)[-1].weight.data.add_(0.01)


def assign(model, optimizer, seed):
    loss = loss_of(model, seed)
    weight = layers_of(model)[0].weight
    weight.data = weight.data * 0.5  # earlier graphs keep the memory of before
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def forget(model, optimizer, seed):
    return loss_of(model, seed).detach()  # no backward follows


def retain(model, optimizer, seed):
    loss = loss_of(model, seed)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def penalize(model, optimizer, seed):
    loss = loss_of(model, seed) + layers_of(model)[0].weight.float().square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def call_part(model, optimizer, seed):
    """A module of the model is called by itself."""
    layer = layers_of(model)[-1]
    x = torch.ones(2, layer.in_features, dtype=layer.weight.dtype)
    layer(x).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def drop(model, optimizer, seed):
    loss_of(model, seed).backward()
    optimizer.zero_grad()


def interrupt(model, optimizer, seed):
    layer = layers_of(model)[-1]
    handle = layer.register_forward_hook(lambda *_: (_ for _ in ()).throw(ValueError("interrupted")))
    with contextlib.suppress(ValueError):
        loss_of(model, seed)
    handle.remove()


ACTIONS = {
    "train": train,
    "clip": lambda m, o, seed: train(m, o, seed, max_norm=0.3),
    "larger": lambda m, o, seed: train(m, o, seed, size=5 + seed % 4),
    "several": lambda m, o, seed: train(m, o, seed, micro=2),
    **{f.__name__: f for f in (evaluate, evaluate_inside, freeze, write, assign, forget, retain, penalize)},
    **{f.__name__: f for f in (call_part, drop, interrupt)},
}


@pytest.mark.own_rest
@settings(
    max_examples=int(os.environ.get("REST_EXAMPLES", "25")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[phase for phase in Phase if phase is not Phase.shrink or "REST_EXAMPLES" not in os.environ],
)
@given(
    factory=st.sampled_from((Stack, Tied, Recomputed)),
    dtype=st.sampled_from(("fp32", "bf16")),
    micro=st.sampled_from((1, 2)),
    room=st.sampled_from((None, None, 40_000, 50_000, 60_000)),
    leaves=st.booleans(),
    actions=st.lists(st.tuples(st.sampled_from(sorted(ACTIONS)), st.integers(0, 9)), min_size=2, max_size=7),
)
def test_rest_begins_and_ends_unnoticed(factory, dtype, micro, room, leaves, actions):
    """With less room a part of the chunks rests, or none."""
    settings = {} if room is None else {"device_budget": room}
    pair = Pair(lambda: factory(8), "resident", dtype=dtype, settings=settings, gradient_accumulation_steps=micro)
    engine, device = pair.engine, pair.engine.manager.device
    pair.train(3, micro=micro)
    assert device.is_resting or room is not None, "nothing moves"
    for name, seed in actions:
        in_16_bits = dtype == "bf16"
        if in_16_bits and name in ("freeze", "write", "assign", "retain", "penalize", "call_part"):
            continue  # what they do to parameters, the masters of the plain twin do not see
        if room is not None and name in ("several", "retain", "penalize", "forget", "interrupt"):
            continue  # they need more than there is
        pair.check(ACTIONS[name], seed)
        hooked = [module for module in pair.ours.modules() if module._forward_hooks]
        assert (hooked == [pair.ours]) == device.is_resting or engine.manager.rest.misses_calls
        if leaves and seed == 0:
            engine.manager.evictor.leave_margin()  # as if memory had run out between two steps
    pair.train(2, first=50, micro=micro)
    engine.detach()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in pair.ours.modules())
