"""What autograd keeps of parameters until backward: changed meanwhile, kept for long, recomputed, transformed."""

import pytest
import torch
from support.pairs import Pair, alike, engine_of
from support.same import copied, gradients_of
from support.small import WIDTH, Block, Stack, batch, loss_of, make, sgd, step_of
from torch import nn
from torch._dynamo import convert_frame
from torch.utils.checkpoint import checkpoint

from hf_patrickstar import DeviceMemoryError, EngineError

SITUATIONS = ("resident", "evicting")


def no_decay(parameters):
    return torch.optim.SGD(parameters, lr=1e-2)


def test_a_parameter_changed_in_place_after_its_use_is_refused_as_in_torch(budget):
    pair = Pair(Stack, budget)
    for model, _ in pair:
        loss = loss_of(model)
        with torch.no_grad():
            model.layers[2].weight.mul_(2)
        match = "" if model is pair.plain else r"|'layers\.2\.weight' was changed in place"
        with pytest.raises(RuntimeError, match=f"modified by an inplace operation{match}"):
            loss.backward()
    for model, optimizer in pair:
        model.zero_grad()
        optimizer.zero_grad()
    pair.train(2)


@pytest.mark.parametrize("how", ["fill", "assign", "copy"])
def test_changes_through_data_are_not_noticed_and_used_as_in_torch(how, budget):
    pair = Pair(Stack, budget, no_decay)

    def run(model, optimizer):
        loss = loss_of(model)
        weight = model.layers[2].weight
        if how == "fill":
            weight.data.fill_(0.25)
        elif how == "copy":
            weight.data.copy_(torch.full((WIDTH, WIDTH), -0.5))
        else:
            weight.data = torch.full((WIDTH, WIDTH), 0.125)
        loss.backward()
        found = gradients_of(model)
        optimizer.step()
        optimizer.zero_grad()
        return found

    pair.check(run)
    pair.train(1)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x):
        return self.layer(x) * self.scale * self.shift[1]


@alike(Scaled)
def test_a_parameter_that_autograd_keeps_itself_has_the_data_that_was_assigned_since(model, optimizer):
    """A view of before keeps the memory of before, the parameter itself gets the new one, as in torch."""
    for step in range(2):
        loss = model(batch(step)).square().sum()
        model.scale.data = torch.full((WIDTH,), 3.0 + step)
        model.shift.data = torch.full((2, WIDTH), 2.0)
        loss.backward()
        found = gradients_of(model)
        optimizer.step()
        optimizer.zero_grad()
    return found


class Assigning(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        x = torch.tanh(nn.functional.linear(x, self.weight, self.bias))
        self.weight.data = self.weight.detach() * 0.5 + 0.125
        return nn.functional.linear(x, self.weight) + self.bias


@alike(lambda: nn.Sequential(*(Assigning() for _ in range(4))))
def test_data_that_is_assigned_while_a_module_computes(model, optimizer):
    """What was computed with it before needs the memory of before in backward, what comes later the new one."""
    found = []
    for step in range(3):
        loss = model(batch(step)).square().sum()
        loss.backward()
        found += [loss.detach().clone(), *(copied(parameter.grad) for parameter in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_a_graph_of_before_a_step_is_refused(budget):
    pair = Pair(Stack, budget)
    stale = [loss_of(model) for model, _ in pair]
    pair.train(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale[0].backward()
    match = r"'layers\.\d\.weight'.*changed by the optimizer between this forward"
    with pytest.raises(RuntimeError, match=f"{match}|modified by an inplace operation"):
        stale[1].backward()
    pair.both(lambda model, optimizer: (optimizer.zero_grad(), model.zero_grad())[0])
    pair.train(2, first=1)


def test_views_are_kept_as_their_places(budget):
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.log_scale = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.zeros(WIDTH))
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = x @ self.weight.t()
            x = torch.tanh(x[:, :8] @ self.weight[:8, :].contiguous() + self.weight[3])
            x = x * self.weight.flatten()[5 : 5 + WIDTH] + self.weight.diagonal()
            x = self.layer(x) * self.weight.view(4, 4, WIDTH)[1, 2]
            return x * torch.exp(self.log_scale) * torch.sigmoid(self.log_scale)  # which save their own output

    Pair(Views, budget, settings={"chunks": 4}).train(3)


def test_a_recomputed_segment_that_is_too_large_is_told_with_the_need():
    pair = Pair(Stack, "moving")
    x = batch()
    loss = checkpoint(pair.ours, x, use_reentrant=False).square().sum()
    with pytest.raises(DeviceMemoryError, match=r"too small for layers\.4.*5\.00 KiB of .*recomputed segment"):
        loss.backward()
    del loss
    pair.optimizer.zero_grad()
    pair.train(2)


@pytest.mark.parametrize(("dtype", "frozen"), [("fp32", ()), ("bf16", (1,)), ("fp32", (0, 1, 2)), ("bf16", (1, 2, 3))])
def test_recomputed_blocks_with_frozen_parameters(frozen, dtype, budget):
    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    def freeze(model):
        for number in frozen:
            model.blocks[number].requires_grad_(False)

    Pair(Recomputed, budget, dtype=dtype, prepare=freeze).train(3)


@pytest.mark.parametrize("has_compiled", [False, True])
def test_a_recomputed_module_that_writes_to_its_frozen_parameter(has_compiled, budget, monkeypatch):
    """It writes once in forward and once more in backward, as in torch, also where something has been compiled."""
    monkeypatch.setattr(convert_frame, "FRAME_COUNTER", int(has_compiled))

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

        def forward(self, x):
            with torch.no_grad():
                self.scale.add_(0.25)
            return self.inner(x) * self.scale.detach().clone()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Counting() for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    pair = Pair(Model, budget)
    pair.train(2)
    pair.check()


def test_recomputation_of_a_mostly_frozen_model_needs_no_more_than_one_block():
    """A frozen parameter gets no gradient that says that it is not needed any more."""

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(10))
            self.adapter = nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x):
            x = x + self.adapter
            return checkpoint(self.inner, x, use_reentrant=False)

        def inner(self, x):
            for block in self.blocks:
                x = checkpoint(lambda x, block=block: torch.tanh(block(x)), x, use_reentrant=False)
            return x

    pair = Pair(Adapted, "moving", prepare=lambda model: model.blocks.requires_grad_(False))
    pair.train(3)
    stats = pair.engine.stats()
    assert stats["device_peak_nbytes"] <= stats["chunk_budget_nbytes"] == 3 * 320 * 4


@pytest.mark.own_rest
@pytest.mark.parametrize("reads", [False, True])
def test_reentrant_checkpointing_is_refused_with_a_remedy(reads, budget):
    class Reentrant(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            if reads:
                return checkpoint(lambda x: x @ self.inner.weight, x, use_reentrant=True)
            return checkpoint(self.inner, x, use_reentrant=True)

    model = make(Reentrant)
    engine = engine_of(model, budget)
    with pytest.raises(EngineError, match="use_reentrant=False"):
        model(batch().requires_grad_()).sum().backward()
    engine.detach()
    assert not model.inner.weight.isnan().any()


def test_graphs_that_live_for_many_steps(budget):
    """A forward without a backward, of frozen layers alone: nothing changes, so its graph stays good."""

    def freeze(model):
        for layer in model.layers[:4]:
            layer.requires_grad_(False)

    pair = Pair(Stack, budget, prepare=freeze)

    def run(model, optimizer):
        x = batch(9).requires_grad_()
        kept = x
        for layer in model.layers[:4]:
            kept = torch.tanh(layer(kept))
        for step in range(2):
            step_of(model, optimizer, step)
        kept.sum().backward()
        return x.grad

    pair.check(run)


def test_forward_mode(budget):
    pair = Pair(Stack, budget)
    pair.both(lambda model, _: list(torch.func.jvp(model, (batch(),), (batch(1),))))
    pair.train(2)


def test_a_module_that_is_called_inside_of_a_backward(budget):
    class Calling(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, model):
            ctx.model = model
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            with torch.no_grad():
                return gradient + ctx.model.layers[0](gradient), None

    def loss(model, seed):
        x = batch(seed)
        for number, layer in enumerate(model.layers):
            x = torch.tanh(layer(x))
            x = Calling.apply(x, model) if number == 2 else x
        return x.square().sum()

    Pair(Stack, budget, sgd).train(3, loss=loss)
