"""The optimizer over chunks: every bit of torch's, its interface, its states in torch's format both ways."""

import copy
import io
import pickle

import pytest
import torch
from support.pairs import Pair, alike, config_of
from support.same import assert_same, assert_same_states, assert_same_values, copied, values_of
from support.small import DTYPES, WIDTH, Stack, Tied, adamw, batch, loss_of, make, sgd, step_of, tokens
from torch import nn

from hf_patrickstar import PatrickStarEngine

SITUATIONS = ("resident", "moving")

ADAMS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.95), eps=1e-6),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "maximize": lambda p: torch.optim.AdamW(p, lr=1e-3, maximize=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), fused=True),
    "capturable": lambda p: torch.optim.Adam(p, lr=1e-2, capturable=False, differentiable=False, foreach=False),
}
OTHERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
}


@pytest.mark.parametrize(("number", "name"), enumerate([*ADAMS, *OTHERS]), ids=[*ADAMS, *OTHERS])
def test_every_optimizer_has_the_bits_of_torch(number, name):
    make_optimizer, dtype = {**ADAMS, **OTHERS}[name], list(DTYPES)[number % 2]
    Pair(Tied, "moving", make_optimizer, dtype=dtype, settings={"chunks": 4}).train(3)


@pytest.mark.parametrize("name", ["adamw", "amsgrad", "tensor rate"])
def test_where_torchs_adam_is_called_for_each_tile_no_bit_is_another(name, monkeypatch):
    monkeypatch.setattr("hf_patrickstar.optim.adam_kernel.adam_script", lambda: None)
    Pair(Tied, "moving", ADAMS[name], dtype="bf16", settings={"chunks": 4}).train(3)


@pytest.mark.parametrize(
    ("dtype", "threads", "micro"), [("fp32", 1, 2), ("fp32", 3, 1), ("bf16", 1, 1), ("bf16", 3, 2)]
)
def test_threads_change_no_bit(dtype, threads, micro):
    class Large(nn.Module):
        """More elements than a worker takes at once, and a length that no vector divides."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1021, 531))
            self.bias = nn.Parameter(torch.randn(7))

        def forward(self, x):
            return x[:1, :1] * self.weight.square().mean() * 1e3 + self.bias.sum()

    settings = {"host_threads": threads, "chunks": 2, "numel": 600_000}
    pair = Pair(Large, "moving", dtype=dtype, settings=settings, gradient_accumulation_steps=micro)
    pair.train(3, micro=micro)
    pair.engine.detach()


def test_groups_with_settings_of_their_own_which_change(budget):
    def make_optimizer(parameters):
        parameters = list(parameters)
        groups = [{"params": parameters[::2], "lr": 1e-2}, {"params": parameters[1::2], "weight_decay": 0.5}]
        return torch.optim.AdamW(groups, lr=1e-3)

    pair = Pair(Tied, budget, make_optimizer)

    def run(model, optimizer):
        for step in range(4):
            step_of(model, optimizer, step)
            optimizer.param_groups[step % 2]["lr"] *= 2
            optimizer.param_groups[0]["betas"] = (0.9 - step / 10, 0.99)
        optimizer.param_groups[1]["params"], optimizer.param_groups[0]["params"] = (
            optimizer.param_groups[0]["params"],
            optimizer.param_groups[1]["params"],
        )
        step_of(model, optimizer, 5)

    pair.both(run)
    assert_same_values(pair.plain, pair.ours)


def test_a_parameter_that_leaves_all_groups_keeps_value_and_gradient(budget):
    pair = Pair(Stack, budget)
    pair.train(1)

    def run(model, optimizer):
        group = optimizer.param_groups[0]
        kept = group["params"].pop(3)
        for step in range(2):
            step_of(model, optimizer, step)
        found = copied(kept), copied(kept.grad)
        group["params"].insert(3, kept)
        optimizer.step()
        return found

    pair.check(run)


@alike
def test_closures(model, optimizer):
    losses = []
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        with torch.no_grad():
            losses.append(optimizer.step(closure).detach().clone())
    return losses


@pytest.mark.parametrize(("line_search", "accumulation"), [(None, 1), ("strong_wolfe", 1), (None, 2)])
def test_lbfgs(line_search, accumulation, budget):
    def make_optimizer(parameters):
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=4, history_size=3, line_search_fn=line_search)

    pair = Pair(Stack, budget, make_optimizer, gradient_accumulation_steps=accumulation)

    def run(model, optimizer):
        losses = []
        for step in range(2):

            def closure(step=step):
                optimizer.zero_grad()
                for part in range(accumulation):
                    loss = loss_of(model, step + part)
                    loss.backward()
                return loss

            losses.append(optimizer.step(closure).detach().clone())
        return losses

    pair.both(run)
    assert_same_values(pair.plain, pair.ours)


def test_hooks_around_steps_and_states(budget):
    pair = Pair(Stack, budget)
    notes = []

    def run(model, optimizer):
        seen = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before") or None)
        optimizer.register_step_post_hook(lambda *_: seen.append("after") or None)
        optimizer.register_state_dict_post_hook(lambda _, state: seen.append("saved") or None)
        optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append("loading") or None)
        for step in range(2):
            step_of(model, optimizer, step)
        optimizer.load_state_dict(optimizer.state_dict())
        notes.append(seen)
        return seen

    pair.both(run)
    assert notes[0] == notes[1] == ["before", "after"] * 2 + ["saved", "loading"]
    pair.check()


class Own(torch.optim.Optimizer):
    """An optimizer of a user: a rule of its own, a counter in its groups, a state of another shape."""

    def __init__(self, parameters, rate=0.1):
        super().__init__(parameters, {"rate": rate, "count": 0})
        self.fails = False

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["norms"] = [*state.get("norms", []), parameter.grad.norm()]
                state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
                parameter.sub_(group["rate"] * state["mean"].sign() / group["count"])
                if self.fails:
                    raise RuntimeError("in the middle")


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_optimizer_of_a_user(dtype, budget):
    pair = Pair(Stack, budget, Own, dtype=dtype)

    def run(model, optimizer):
        for step in range(3):
            step_of(model, optimizer, step)
        return optimizer.param_groups[0]["count"], optimizer.defaults, type(optimizer.param_groups).__name__

    pair.both(run)
    for name, value in values_of(pair.ours).items():
        if dtype == "fp32":
            assert torch.equal(value, pair.plain.state_dict()[name])
    if dtype == "fp32":
        state, theirs = (optimizer.state[model.layers[0].weight] for model, optimizer in pair)
        assert torch.equal(torch.stack(state["norms"]), torch.stack(theirs["norms"]))


def test_a_step_that_fails_in_the_middle_leaves_groups_and_can_be_made_again(budget):
    pair = Pair(Stack, budget, lambda parameters: Own(parameters))
    loss_of(pair.ours).backward()
    pair.optimizer.fails = True
    held = [parameter for group in pair.optimizer.param_groups for parameter in group["params"]]
    with pytest.raises(RuntimeError, match="in the middle"):
        pair.optimizer.step()
    pair.optimizer.fails = False
    found = [parameter for group in pair.optimizer.param_groups for parameter in group["params"]]
    assert all(one is other for one, other in zip(held, found, strict=True))
    pair.optimizer.zero_grad()
    loss_of(pair.ours, 1).backward()
    pair.optimizer.step()


def test_parameters_of_no_module_are_updated_too(budget):
    temperatures = [nn.Parameter(torch.tensor(1.5)) for _ in range(2)]
    left = list(temperatures)

    def make_optimizer(parameters):
        return adamw([*parameters, left.pop()])

    pair = Pair(Stack, budget, make_optimizer)

    def run(model, optimizer):
        own = optimizer.param_groups[0]["params"][-1]
        norms = []
        for step in range(3):
            (loss_of(model, step) * own).backward()
            norms.append(nn.utils.clip_grad_norm_([*model.parameters(), own], 0.5))
            optimizer.step()
            optimizer.zero_grad()
        return norms, own.detach().clone(), own.grad

    pair.check(run)


# States


def test_the_state_is_a_view_of_what_the_optimizer_uses(budget):
    pair = Pair(Stack, budget, sgd)
    pair.train(2)
    name = "momentum_buffer"

    def change(model, optimizer):
        state = optimizer.state
        weight, bias, other = model.layers[0].weight, model.layers[1].bias, model.layers[2].weight
        found = [sorted(state[weight]), copied(state[weight][name]), len(state), weight in state]
        state[weight][name].mul_(2)
        state[bias][name] = torch.ones(WIDTH)
        del state[other]
        return [*found, other in state, len(state)]

    pair.both(change)
    pair.train(2, first=2)


def test_a_state_of_another_shape_is_refused(budget):
    pair = Pair(Stack, budget)
    pair.train(1)
    with pytest.raises((ValueError, RuntimeError), match=r"shape|size"):
        pair.optimizer.state[pair.ours.layers[0].weight]["exp_avg"] = torch.ones(3)
    pair.check()
    pair.train(1, first=1)


@pytest.mark.parametrize("make_optimizer", [adamw, OTHERS["adagrad"]])
def test_state_dicts_go_from_torch_to_chunks_and_back(make_optimizer, budget):
    pair = Pair(Stack, budget, make_optimizer)
    pair.train(2)
    buffer = io.BytesIO()
    torch.save(pair.optimizer.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    fresh = make(Stack)
    fresh.load_state_dict(pair.ours.state_dict())
    theirs = make_optimizer(fresh.parameters())
    theirs.load_state_dict(saved)
    other = Pair(Stack, budget, make_optimizer)
    other.ours.load_state_dict(pair.plain.state_dict())
    other.optimizer.load_state_dict(pair.plain_optimizer.state_dict())
    for step in range(2, 4):
        for model, optimizer in (*pair, (fresh, theirs), (other.ours, other.optimizer)):
            step_of(model, optimizer, step)
    pair.check()
    assert_same_values(pair.plain, fresh)
    assert_same_values(pair.plain, other.ours)
    assert_same_states(pair.plain_optimizer, other.optimizer)


def test_a_state_dict_is_a_copy_and_one_that_does_not_fit_changes_nothing(budget):
    pair = Pair(Stack, budget)
    pair.train(1)
    saved = pair.optimizer.state_dict()
    saved["state"][0]["exp_avg"].zero_()
    pair.check()
    wrong = copy.deepcopy(pair.optimizer.state_dict())
    wrong["state"][3]["exp_avg"] = torch.ones(5)
    for state in (wrong, {**wrong, "param_groups": wrong["param_groups"] * 2}):
        with pytest.raises(ValueError, match=r"shape|group"):
            pair.optimizer.load_state_dict(state)
    pair.check()
    pair.train(1, first=1)


@pytest.mark.parametrize("make_optimizer", [adamw, sgd])
def test_copies_of_the_optimizer_are_ordinary(make_optimizer, budget):
    pair = Pair(Stack, budget, make_optimizer)
    pair.train(2)
    model, optimizer = copy.deepcopy((pair.ours, pair.optimizer))
    assert isinstance(pair.optimizer, torch.optim.Optimizer)
    assert type(optimizer) is type(pair.plain_optimizer)
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())
    assert_same(pair.plain_optimizer.state_dict(), optimizer.state_dict())
    for each, its_optimizer in ((pair.plain, pair.plain_optimizer), (model, optimizer)):
        loss_of(each, 2).backward()
        its_optimizer.step()
    assert_same_values(pair.plain, model)
    assert type(pickle.loads(pickle.dumps(pair.optimizer))) is type(pair.plain_optimizer)


def test_states_of_earlier_use_are_taken_over_and_the_users_own_object_shows_states_and_groups(budget):
    """Code that kept the optimizer that it made reads the states of the steps there too."""
    plain, model = make(Stack), make(Stack)
    theirs, inner = adamw(plain.parameters()), adamw(model.parameters())
    step_of(plain, theirs)
    step_of(model, inner)
    engine = PatrickStarEngine(model, config_of(budget), inner, device="cpu")
    for step in range(1, 4):
        if step == 3:
            inner.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 0.5
        step_of(plain, theirs, step)
        step_of(model, engine.optimizer, step)
    assert_same_values(plain, model)
    assert_same_states(theirs, engine.optimizer)


def test_a_method_of_the_users_optimizer_works_on_masters(budget):
    class Shrinking(torch.optim.SGD):
        @torch.no_grad()
        def shrink(self, factor):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(factor)
            return factor

    pair = Pair(Stack, budget, lambda parameters: Shrinking(parameters, lr=0.01, momentum=0.9), dtype="bf16")
    pair.train(1)
    assert pair.optimizer.shrink(0.7) == 0.7
    with torch.no_grad():
        for parameter, master in zip(pair.plain.parameters(), pair.plain_optimizer.masters, strict=True):
            master.mul_(0.7)
            parameter.copy_(master)
    pair.train(2, first=1)


def test_steps_without_gradients_count_as_in_torch(budget):
    pair = Pair(Tied, budget)

    def run(model, optimizer):
        optimizer.step()
        with torch.no_grad():
            model(tokens())
        optimizer.step()
        step_of(model, optimizer)
        optimizer.step()

    pair.check(run)
    assert pair.engine.stats()["steps"] == 4


def test_threads_of_torch_are_as_before_after_an_error_in_an_update(monkeypatch):
    """An optimizer that computes in torch's threads gets the number that the user has named for its step alone."""
    before, seen = torch.get_num_threads(), []

    def fail(optimizer, closure=None):
        seen.append(torch.get_num_threads())
        raise LookupError("in an update")

    settings = {"chunks": 4, "host_threads": before + 1}
    pair = Pair(Stack, "moving", lambda p: torch.optim.SGD(p, lr=0.1), settings=settings)
    loss_of(pair.ours, 0).backward()
    monkeypatch.setattr(torch.optim.SGD, "step", fail)
    with pytest.raises(LookupError):
        pair.optimizer.step()
    assert set(seen) == {before + 1}
    assert torch.get_num_threads() == before


def test_the_step_counts_of_parameters_that_are_updated_in_turn(budget):
    pair = Pair(Stack, budget)

    def loss(model, seed):
        x = batch(seed)
        for number, layer in enumerate(model.layers):
            if number != seed // 10 % 5:
                x = torch.tanh(layer(x))
        return x.square().sum()

    pair.train(7, loss=loss)
    steps = {int(state["step"]) for state in pair.optimizer.state_dict()["state"].values()}
    assert len(steps) > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_small_parameters_of_odd_lengths(dtype, budget):
    """Places begin at multiples of 64 elements, and vectors of the processor end elsewhere."""

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ParameterList(nn.Parameter(torch.randn(n)) for n in (1, 2, 3, 63, 64, 65, 7, 128, 31))

        def forward(self, x):
            return x.sum() * sum(part.square().sum() for part in self.parts)

    pair = Pair(Small, budget, dtype=dtype, settings={"numel": 256, "chunks": 6})
    pair.train(4, loss=lambda model, seed: model(batch(seed).to(next(model.parameters()).dtype)).float())
