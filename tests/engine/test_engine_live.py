"""Parameters answer as those of any model, before, between and inside of steps, and memory that was lent is given back.

``tests/live`` has what people do with parameters, one by one; these tests have the places where a value may be.
"""

import contextlib
import copy
import functools
import gc
import pickle
import weakref

import pytest
import torch
from support.pairs import Pair, alike, evict
from support.same import assert_same, copied, gradients_of, values_of
from support.small import WIDTH, Stack, Tied, batch, loss_of, sgd, step_of
from torch import nn

from hf_patrickstar import EngineError
from hf_patrickstar.runtime.rest import Rest

SITUATIONS = ("resident", "evicting")


WRITES = {
    "mul": lambda p: p.mul_(0.5),
    "data": lambda p: p.data.add_(0.25),
    "assign": lambda p: setattr(p, "data", p.data * 2 + 1),
    "copy": lambda p: p.copy_(torch.ones_like(p)),
    "item": lambda p: p.__setitem__((slice(None), 2), 7.0),
    "view": lambda p: p.view(-1)[4:9].zero_(),
    "numpy": lambda p: p.detach().numpy().fill(0.75),
    "init": nn.init.zeros_,
    "foreach": lambda p: torch._foreach_mul_([p], 3.0),
    "out": lambda p: torch.add(p, 1.0, out=p),
}


def test_writes_between_steps_and_between_backward_and_step(budget):
    pair = Pair(Stack, budget, sgd)

    def run(model, optimizer, write):
        for step in range(2):
            with torch.no_grad():
                write(model.layers[1].weight)
            loss_of(model, step).backward()
            with torch.no_grad():
                write(model.layers[2].weight)
            optimizer.step()
            with torch.no_grad():
                write(model.layers[3].weight)
            optimizer.zero_grad()

    for write in WRITES.values():
        pair.check(run, write)
    pair.train(1)


@alike(Stack, sgd)
def test_writes_to_views_that_outlive_their_use(model, optimizer):
    with torch.no_grad():
        row, flat = model.layers[1].weight[3], model.layers[2].weight.view(-1)
        array = model.layers[4].bias.detach().numpy()
    found = []
    for step in range(3):
        with torch.no_grad():
            row.mul_(2)
            flat[step] = 9.0
            array[step] = -3.0
        found.append(model(batch(step)).detach().clone())
        loss = loss_of(model, step)
        loss.backward()
        with torch.no_grad():
            flat[step + 1] = 5.0
            optimizer.step()
            row.sub_(1)
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("takes", ["data", "detach", "row"])
def test_writes_to_what_was_taken_while_a_module_computed(takes, budget):
    class Taking(nn.Linear):
        taken = None

        def forward(self, x):
            views = {"data": self.weight.data, "detach": self.weight.detach(), "row": self.weight.detach()[3]}
            self.taken = views[takes]
            return super().forward(x)

    pair = Pair(lambda: nn.Sequential(*(Taking(WIDTH, WIDTH) for _ in range(5))), budget, settings={"chunks": 7})

    def run(model, optimizer):
        found = []
        for step in range(3):
            with torch.no_grad():
                model(batch(step))
                model[1].taken.mul_(2)
                model[4].taken.fill_(0.25)
                found.append(model(batch(step)).clone())
                model[3].taken.sub_(0.5)
                model[3].taken = None
                evict(model)
            loss = model(batch(step)).square().sum()
            if takes == "data":
                model[2].taken[3] = 0.5  # autograd does not notice it
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return found

    pair.check(run)


def test_writes_in_hooks_of_a_module(budget):
    pair = Pair(Stack, budget)

    def prepare(model, _):
        def before(module, args):
            with torch.no_grad():
                module.weight.mul_(0.99)

        def after(module, args, output):
            module.bias.data.add_(0.01)

        model.layers[2].register_forward_pre_hook(before)
        model.layers[3].register_forward_hook(after)

    pair.both(prepare)
    pair.train(3)


def test_in_16_bits_copies_have_all_bits(budget):
    """Also those of a part, and also between backward and step."""
    pair = Pair(Tied, budget, dtype="bf16")
    pair.train(2)
    pair.backward(2)
    expected = values_of(pair.ours)
    for made in (copy.deepcopy(pair.ours), pickle.loads(pickle.dumps(pair.ours))):
        assert type(made.scale) is nn.Parameter
        assert_same(expected, dict(made.state_dict()))
    block = copy.deepcopy(pair.ours.blocks[1])
    assert torch.equal(block.linear.weight, expected["blocks.1.linear.weight"])
    pair.step()


def test_in_16_bits_a_state_dict_is_loaded_with_all_bits(budget):
    pair = Pair(Tied, budget, dtype="bf16")
    pair.train(1)
    values = {name: torch.randn_like(value) for name, value in values_of(pair.ours).items()}
    values["head.weight"] = values["embedding.weight"]
    pair.ours.load_state_dict(values)
    assert_same(values, dict(pair.ours.state_dict()))
    step_of(pair.ours, pair.optimizer, 1)


def test_full_parameters_are_ordinary_tensors_inside_of_the_block(budget):
    pair = Pair(Tied, budget)
    pair.train(1)
    pair.backward(1)

    def run(model, optimizer):
        found = []
        with torch.no_grad():
            for parameter in model.parameters():
                found.append(copied(parameter))
                parameter.mul_(0.5)
            model.scale.data = torch.full((WIDTH,), 2.0)
        return found

    with pair.engine.full_parameters():
        assert all(type(parameter) is nn.Parameter for parameter in pair.ours.parameters())
        pair.both(run)
    pair.check()
    with pair.engine.full_parameters([pair.ours.scale], writeback=False), torch.no_grad():
        pair.ours.scale.zero_()
    pair.check()
    pair.step()
    with pair.engine.full_parameters():
        with pytest.raises(EngineError, match=r"'scale' is open in full_parameters\(\)"):
            loss_of(pair.ours)
        with pytest.raises(EngineError, match="full_parameters"):
            pair.engine.detach()
    pair.train(1, first=2)


class Scale(nn.LayerNorm):
    """Calls ``before`` when it begins."""

    def __init__(self, width):
        super().__init__(width)
        self.before = lambda: None

    def forward(self, x):
        self.before()
        return super().forward(x)


class Changing(nn.Module):
    """A model that may change itself in a forward: before a module comes to its weight, or while it has it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = Scale(WIDTH)
        self.before = lambda _: None

    def forward(self, x):
        for layer in self.layers[:2]:
            x = layer(x).relu()
        self.before(self)
        return self.layers[3](self.layers[2](self.scale(x)).relu())


def opened(model):
    engine = getattr(model, "patrickstar_engine", None)
    return contextlib.nullcontext() if engine is None else engine.full_parameters()


def exchange(model):
    torch.utils.swap_tensors(model.scale.weight, nn.Parameter(torch.full((WIDTH,), 2.0)))


def give_another_shape(model):
    model.scale.weight.data = torch.full((1,), 2.0)
    model.scale.normalized_shape = ()
    model.scale.forward = lambda x: x * model.scale.weight + model.scale.bias


@pytest.mark.parametrize(
    ("change", "when"),
    [
        *(
            (change, when)
            for change in (exchange, give_another_shape)
            for when in ("before full_parameters", "forward")
        ),
        (exchange, "in full_parameters"),
        (exchange, "in its module"),
    ],
)
def test_a_parameter_that_was_given_up_keeps_its_value(change, when, budget):
    pair = Pair(Changing, budget, functools.partial(torch.optim.SGD, lr=0.1))  # it has no state of another shape
    pair.train(1)

    def run(model, optimizer):
        if when == "forward":
            model.before = change
        elif when == "in its module":
            model.scale.before = functools.partial(change, model)
        elif when == "in full_parameters":
            with opened(model):
                change(model)
        else:
            change(model)
            with opened(model):
                found = copied(model.scale.weight)
            assert_same(found, model.scale.weight.detach())
        losses = []
        for step in range(2):
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            model.before = lambda _: None
            model.scale.before = lambda: None
        return losses

    pair.check(run)


def keep_one(model):
    """Another shape in the memory of before."""
    weight = model.scale.weight.data
    give_another_shape(model)
    model.scale.weight.data = weight[:1]


@pytest.mark.own_rest
@pytest.mark.parametrize("change", [exchange, give_another_shape, keep_one])
def test_a_parameter_that_a_forward_changes_where_modules_have_no_hooks(monkeypatch, change):
    monkeypatch.setattr(Rest, "_has_room", lambda self, peaks: False)
    pair = Pair(Changing, "resident", functools.partial(torch.optim.SGD, lr=0.1))
    pair.train(3)
    device = pair.engine.manager.device
    assert device.resting
    assert not device.is_resting, "gradients have hooks"
    for model, _ in pair:
        model.before = change
    pair.train(1)
    for model, _ in pair:
        model.before = lambda _: None
    pair.train(2)


def test_an_embedding_that_is_looked_up_at_home_and_exchanged_inside_of_a_forward_is_refused():
    """Its rows would be read where the value of before is."""

    def make():
        model = nn.Sequential(nn.Identity(), nn.Embedding(64, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        new = nn.Parameter(torch.ones(64, WIDTH))
        model[0].register_forward_hook(lambda *_: torch.utils.swap_tensors(model[1].weight, new))
        return model

    pair = Pair(make, "evicting", sgd, settings={"cpu_embedding": True})
    with pytest.raises(EngineError, match=r"'1.weight' was exchanged, or given another shape, inside of a forward"):
        pair.ours(torch.arange(4))


def test_full_parameters_have_what_a_module_that_computes_has_written(budget):
    class Doubling(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.mul_(2)
                with opened(self.model()):
                    self.bias.add_(self.weight[0])
            return x + 1

    def make():
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), Doubling(WIDTH, WIDTH))
        model[4].model = weakref.ref(model)
        return model

    pair = Pair(make, budget, sgd)
    pair.train(2)


def test_gradients_in_full_parameters_are_written_back(budget):
    pair = Pair(Stack, budget)
    pair.backward(0)

    def run(model, _):
        found = gradients_of(model)
        model.layers[0].weight.grad.mul_(2)
        model.layers[1].weight.grad = None
        model.layers[2].bias.grad = torch.ones(WIDTH)
        return found

    with pair.engine.full_parameters(with_grads=True):
        pair.both(run)
    pair.check_gradients()
    pair.step()


def test_a_block_that_raises_writes_nothing_wrong_back(budget):
    pair = Pair(Stack, budget)
    with pytest.raises(LookupError), pair.engine.full_parameters():  # noqa: PT012
        with torch.no_grad():
            pair.ours.layers[0].bias.add_(0)
        raise LookupError
    pair.train(2)


def test_memory_that_was_handed_out_is_freed_when_nobody_has_it(budget):
    pair = Pair(Stack, budget)
    pair.train(1)
    references = []
    for parameter in pair.ours.parameters():
        view = parameter.data
        references.append(weakref.ref(view.untyped_storage()))
        view[0] = 1.0
        del view
    with torch.no_grad():
        for parameter in pair.plain.parameters():
            parameter[0] = 1.0
    pair.train(1, first=1)
    gc.collect()
    assert sum(reference() is not None for reference in references) == 0


def test_a_loop_over_all_values_holds_one_or_two_at_a_time():
    pair = Pair(lambda: Stack(12), "moving")
    pair.train(1)
    alive, most = [], 0
    for parameter in pair.ours.parameters():
        view = parameter.data
        alive.append(weakref.ref(view))
        most = max(most, sum(reference() is not None for reference in alive))
    assert most <= 3


def test_types_and_devices_that_chunks_cannot_have_are_refused():
    pair = Pair(Stack, "moving")
    before = values_of(pair.ours)
    for change in (pair.ours.half, lambda: pair.ours.to("meta"), pair.ours.share_memory):
        with pytest.raises(EngineError, match=r"deepcopy|detach"):
            change()
    assert pair.ours.to("cpu") is pair.ours
    assert pair.ours.float() is pair.ours
    after = pair.ours.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    pair.train(1)


def test_data_is_assigned_by_code_that_does_not_ask_the_parameter(budget):
    """As C++ does it: nothing answers, and the next use has to find it, that of a module or that of the optimizer."""
    pair = Pair(Stack, budget, sgd)

    def assign(weight, number):
        with torch._C.DisableTorchFunctionSubclass():
            torch._C.TensorBase.data.__set__(weight, torch.full(weight.shape, float(number), dtype=torch.float32))

    def run(model, optimizer):
        for step in range(2):
            assign(model.layers[1].weight, step + 0.25)
            loss_of(model, step).backward()
            assign(model.layers[2].weight, step + 0.5)
            optimizer.step()
            optimizer.zero_grad()

    pair.check(run)
    pair.train(1, first=2)


@pytest.mark.parametrize("view", ["data", "detach", "itself"])
def test_rows_are_cut_off_while_a_module_computes(view, budget):
    """What is assigned looks into the same memory, and no version says so: the shape does."""
    views = {"data": lambda p: p.data[:2], "detach": lambda p: p.detach()[:2], "itself": lambda p: p[:2]}

    class Cutting(nn.Linear):
        def forward(self, x):
            if not torch.is_grad_enabled() and len(self.weight) > 2:
                self.weight.data = views[view](self.weight)
            return (x @ self.weight.t()).sum()

    pair = Pair(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Cutting(WIDTH, 4, bias=False)), budget, sgd)

    def run(model, optimizer):
        with torch.no_grad():
            model(batch(1))
        return tuple(model[1].weight.shape), model.state_dict()["1.weight"].clone(), copied(model[1].weight)

    pair.both(run)


def test_bits_that_compare_equal_or_to_nothing_are_taken_over(budget):
    pair = Pair(Stack, budget)

    def run(model, _):
        view = model.layers[0].bias.data
        view.zero_()
        model.layers[0].bias.sum().item()
        view[3] = -0.0
        other = model.layers[1].bias.data
        other[2] = float("nan")
        model.layers[2].bias.data[1] = float("inf")

    pair.both(run)
    found, expected = pair.ours.state_dict(), pair.plain.state_dict()
    assert torch.equal(found["layers.0.bias"].signbit(), expected["layers.0.bias"].signbit())
    assert torch.equal(found["layers.1.bias"].isnan(), expected["layers.1.bias"].isnan())
    with torch.no_grad():
        pair.both(lambda model, _: model(batch()).clone())


def test_functions_applied_to_modules(budget):
    pair = Pair(Stack, budget)
    pair.train(1)
    pair.backward(1)

    def halve(module):
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.mul_(0.5)
            nn.init.constant_(module.bias, 0.25)

    def run(model, _):
        model.apply(halve)
        model._apply(lambda tensor: tensor * 2)

    pair.both(run)
    pair.check_gradients()
    pair.check()
    pair.step()


def test_a_write_to_one_parameter_of_a_chunk_is_none_to_its_neighbours(budget):
    """They share one memory, and so torch's count of writes to it."""
    pair = Pair(Stack, budget)

    def run(model, _):
        loss = loss_of(model)
        with torch.no_grad():
            model.layers[2].bias.add_(1)  # nothing needs it in backward
        loss.backward()
        return gradients_of(model)

    pair.both(run)
    pair.step()
