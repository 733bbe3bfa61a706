"""What optimizers of bitsandbytes are told while they are over chunks has the effect that it has in plain torch."""

import functools

import pytest
import torch
from support.quantized_states import begin_apart, flat
from support.streams import streams_of
from torch import nn

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.errors import EngineError
from hf_patrickstar.machine import MACHINES

bnb = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.own_streams
MAKE = functools.partial(bnb.optim.AdamW8bit, lr=1e-2)
NUMELS = (255, 4096, 4097, 9001, 5000)


class Sums(nn.Module):
    """Parameters of odd sizes, large and small ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(Part(numel) for numel in NUMELS)

    def forward(self, seed):
        return sum(part(seed) for part in self.parts)


class Part(nn.Module):
    def __init__(self, numel):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numel))

    def forward(self, seed):
        x = torch.randn(self.weight.shape, generator=torch.Generator().manual_seed(seed))
        return (self.weight * x).sum() + 0.1 * self.weight.square().sum()


@pytest.fixture(autouse=True)
def _apart():
    begin_apart()
    yield
    begin_apart()


def step(model, optimizer, seed, *, extra=None):
    loss = model(seed)
    (loss if extra is None else loss + extra.square().sum()).backward()
    optimizer.step()
    optimizer.zero_grad()


def compare(train, make=MAKE, config=None, before=lambda *_: None):
    """Trains in plain torch and over chunks; values and states are the same, bit for bit."""
    found = []
    for is_ours in (False, True):
        begin_apart()
        model = Sums().train()
        optimizer = make(model.parameters())
        before(model, optimizer)
        if is_ours:
            config = {"placement": "host", "chunk_budget": 600_000, **(config or {})}
            optimizer = PatrickStarEngine(model, config, optimizer, device="cpu").optimizer
        train(model, optimizer)
        found.append((model.state_dict(), flat(optimizer.state_dict())))
    (values, states), (our_values, our_states) = found
    for name, value in values.items():
        assert torch.equal(value, our_values[name]), name
    assert states.keys() == our_states.keys()
    for number, state in states.items():
        assert state.keys() == our_states[number].keys(), number
        for key, value in state.items():
            theirs = our_states[number][key]
            assert torch.equal(value, theirs) if isinstance(value, torch.Tensor) else value == theirs, (number, key)


def test_a_group_that_is_gone():
    """Its parameters are in another group now."""

    def make(parameters):
        first, *others = parameters
        return bnb.optim.AdamW8bit([{"params": [first]}, {"params": others, "lr": 0.1}], lr=1e-2)

    def train(model, optimizer):
        step(model, optimizer, 0)
        optimizer.param_groups[0]["params"] += optimizer.param_groups[1]["params"]
        del optimizer.param_groups[1]
        step(model, optimizer, 1)

    compare(train, make)


@pytest.mark.parametrize("streams", ["delayed:1", "pooled"])
def test_settings_that_change_in_place_when_the_step_has_returned(streams):
    """The update that goes on beside has those of its step."""
    machine = {"machine": MACHINES["rtx4090"], "pin_memory": False, "device_budget": 350_000, "chunk_numel": 9216}

    def train(model, optimizer):
        (group,) = optimizer.param_groups
        group["lr"], group["betas"] = torch.tensor(1e-2), [0.9, 0.99]
        for seed in range(3):
            step(model, optimizer, seed)
            group["lr"].mul_(0.5)
            group["betas"][0] -= 0.1

    with streams_of(streams):
        compare(train, config={**machine, "chunk_budget": "auto"})


class Warmed(bnb.optim.AdamW8bit):
    """A step that does more than the library's."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] *= 1.5
        return super().step(closure)


def test_a_step_of_a_user_is_called():
    def train(model, optimizer):
        for seed in range(3):
            step(model, optimizer, seed)

    compare(train, functools.partial(Warmed, lr=1e-2))


def test_states_keep_their_bits():
    """As in the library, where an override is for states that are made later."""

    def before(model, optimizer):
        step(model, optimizer, 0)
        bnb.optim.GlobalOptimManager.get_instance().override_config(model.parts[2].weight, "optim_bits", 32)

    def train(model, optimizer):
        step(model, optimizer, 1)

    compare(train, before=before)


@pytest.mark.parametrize("kind", [bnb.optim.AdamW8bit, bnb.optim.AdEMAMix8bit], ids=["blocks", "at once"])
def test_a_parameter_outside_of_chunks_has_no_override_of_another(kind):
    """The library knows overrides by the places of parameters in the groups."""
    outside = []

    def make(parameters):
        outside.append(nn.Parameter(torch.linspace(-1, 1, 5000)))
        return kind([*parameters, outside[-1]], lr=1e-2)

    def before(model, optimizer):
        manager = bnb.optim.GlobalOptimManager.get_instance()
        for part in model.parts[:2]:
            manager.register_module_override(part, "weight", {"optim_bits": 32, "lr": 1.0})

    def train(model, optimizer):
        for seed in range(2):
            step(model, optimizer, seed, extra=outside[-1])

    compare(train, make, before=before)
    assert torch.equal(*outside)


def test_states_of_other_bits_change_nothing():
    model = Sums().train()
    engine = PatrickStarEngine(model, {}, MAKE(model.parameters()), device="cpu")
    optimizer, parameter = engine.optimizer, model.parts[3].weight
    step(model, optimizer, 0)
    before = {key: torch.as_tensor(value).clone() for key, value in optimizer.state[parameter].items()}
    wide = torch.full_like(parameter, 0.5)
    with pytest.raises(
        ValueError, match=r"'state1' of parameter 'parts\.3\.weight' must be torch\.uint8, got torch\.float32"
    ):
        optimizer.state[parameter] = {"step": 7, "state1": wide, "state2": wide}
    with pytest.raises(ValueError, match=r"'absmax1' of parameter 'parts\.3\.weight' must be torch\.float32, got None"):
        optimizer.state[parameter] = {"step": 7, "state1": before["state1"] * 0, "state2": before["state2"]}
    with pytest.raises(ValueError, match="'state2'"):
        optimizer.state[parameter]["state2"] = wide
    after = optimizer.state[parameter]
    assert all(torch.equal(value, torch.as_tensor(after[key])) for key, value in before.items())


def test_a_parameter_that_goes_to_another_optimizer():
    """The library assigns to ``data`` of what it updates itself, so its new optimizer must have it in a chunk."""
    found = []
    for is_ours in (False, True):
        model = Sums().train()
        parameters = list(model.parameters())
        optimizers = [MAKE(parameters[:3]), MAKE(parameters[3:])]
        if is_ours:
            optimizers = PatrickStarEngine(model, {}, optimizers, device="cpu").optimizers
        for seed in range(3):
            model(seed).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if seed == 0:
                moved = optimizers[0].param_groups[0]["params"].pop()
                optimizers[1].param_groups[0]["params"].append(moved)
        found.append(model.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_bits_that_the_library_is_told_of_too_late_get_a_sentence():
    model = torch.nn.Linear(64, 128)
    optimizer = bnb.optim.AdamW8bit(model.parameters(), lr=1e-2)
    engine = PatrickStarEngine(model, {}, optimizer)
    optimizer.mng.override_config(model.weight, "optim_bits", 32)
    try:
        model(torch.ones(2, 64)).sum().backward()
        with pytest.raises(
            EngineError, match=r"'weight' has a place for states of type uint8, .* call override_config"
        ):
            engine.optimizer.step()
    finally:
        optimizer.mng.initialize()
