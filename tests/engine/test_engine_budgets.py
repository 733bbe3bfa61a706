"""Counted bytes and budgets: what moves in a step follows from the model, and nothing takes more than it may."""

import gc
import re
import weakref

import pytest
import torch
from support import inside
from support.pairs import Pair, config_of, engine_of
from support.same import assert_same, assert_same_values, values_of
from support.small import (
    CHUNK_NUMEL,
    DTYPES,
    LAYER_NUMEL,
    WIDTH,
    Stack,
    Tied,
    adamw,
    batch,
    loss_of,
    make,
    sgd,
    step_of,
    tokens,
    trainable,
)
from support.streams import streams_of
from torch import nn

from hf_patrickstar import BudgetError, DeviceMemoryError, PatrickStarEngine

COUNTED = ("chunk_loads", "chunk_evictions", "host_to_device_nbytes", "device_to_host_nbytes", "chunk_moves")


class Asking(Stack):
    """Its code asks for a value, so that no step is known before it ran."""

    def forward(self, x):
        return super().forward(x if x.sum().item() < 1e9 else x * 2)


def counted(pair, steps, first, **kwargs):
    """What each of so many steps adds to the statistics."""
    rows = []
    for step in range(first, first + steps):
        before = pair.engine.stats()
        pair.train(1, first=step, **kwargs)
        after = pair.engine.stats()
        rows.append({key: after[key] - before[key] for key in COUNTED})
    return rows


@pytest.mark.parametrize(("depth", "chunks", "dtype"), [(5, 3, "fp32"), (8, 3, "bf16"), (8, 5, "fp32"), (4, 6, "bf16")])
def test_a_step_moves_as_many_bytes_as_the_formula_says(depth, chunks, dtype):
    """Forward brings all; backward needs all but the first, whose input needs no gradient, and finds the last ones."""
    pair = Pair(lambda: Stack(depth), "moving", dtype=dtype, settings={"chunks": chunks})
    rows = counted(pair, 3, 0)
    itemsize = DTYPES[dtype].itemsize
    loads = depth + max(depth - 1 - chunks, 0)
    for row in rows:
        assert row["chunk_loads"] == loads
        assert row["host_to_device_nbytes"] == loads * CHUNK_NUMEL * itemsize
        assert row["device_to_host_nbytes"] == depth * LAYER_NUMEL * itemsize
        assert row["chunk_moves"] == 0
    assert pair.engine.stats()["device_peak_nbytes"] == min(chunks, depth) * CHUNK_NUMEL * itemsize


@pytest.mark.parametrize("micro", [1, 2, 3])
def test_sums_of_gradients_cross_as_often_as_there_are_micro_batches(micro):
    pair = Pair(Stack, "moving", gradient_accumulation_steps=micro)
    for row in counted(pair, 2, 0, micro=micro):
        assert row["device_to_host_nbytes"] == micro * 5 * LAYER_NUMEL * 4


def test_what_evicts_everything_loads_at_every_visit():
    pair = Pair(lambda: Stack(6), "evicting")
    for row in counted(pair, 3, 0):
        assert row["chunk_loads"] == 6 + 4  # the last one is in use when backward begins
    assert pair.engine.stats()["prefetches"] == 0


@pytest.mark.parametrize(
    ("dtype", "accumulation", "per_element"), [("fp32", 1, 16), ("fp32", 2, 20), ("bf16", 1, 14), ("bf16", 2, 18)]
)
def test_bytes_of_model_data(dtype, accumulation, per_element, budget):
    pair = Pair(Stack, budget, dtype=dtype, gradient_accumulation_steps=accumulation)
    pair.train(2, micro=accumulation)
    assert pair.engine.stats()["model_data_nbytes"] == per_element * 5 * LAYER_NUMEL


def test_frozen_parameters_take_their_values_alone():
    pair = Pair(Stack, "moving", prepare=lambda model: model.layers[1:].requires_grad_(False))
    pair.train(2)
    assert pair.engine.stats()["model_data_nbytes"] == (16 + 4 * 4) * LAYER_NUMEL
    assert pair.engine.stats()["device_to_host_nbytes"] == 2 * 4 * LAYER_NUMEL


def test_evaluations_load_every_chunk_once_and_store_nothing():
    pair = Pair(lambda: Stack(8), "moving")
    pair.train(2)
    before = pair.engine.stats()
    with torch.no_grad():
        pair.both(lambda model, _: model(batch()).clone())
    after = pair.engine.stats()
    assert after["chunk_loads"] - before["chunk_loads"] == 8
    assert after["device_to_host_nbytes"] == before["device_to_host_nbytes"]
    with torch.no_grad():
        pair.both(lambda model, _: model(batch(1)).clone())
    assert pair.engine.stats()["chunk_loads"] - after["chunk_loads"] <= 8


# The device margin


def test_chunks_with_a_home_in_the_margin_never_cross():
    layer_nbytes = 16 * CHUNK_NUMEL
    pair = Pair(lambda: Stack(10), "resident", settings={"device_budget": 26000})
    rows = counted(pair, 4, 0)
    stats = pair.engine.stats()
    margin = stats["chunks_in_margin"]
    assert 0 < margin < 10
    assert rows[0]["chunk_moves"] == margin
    assert stats["moved_home_to_device_nbytes"] >= margin * layer_nbytes
    assert rows[-1]["chunk_loads"] == 10 - margin
    assert rows[-1]["device_to_host_nbytes"] == (10 - margin) * LAYER_NUMEL * 4
    assert stats["device_total_peak_nbytes"] <= 26000


def test_host_placement_has_no_margin():
    pair = Pair(lambda: Stack(10), "resident", settings={"device_budget": 32000, "placement": "host"})
    pair.train(3)
    assert pair.engine.stats()["chunks_in_margin"] == 0


@pytest.mark.parametrize("factory", [Stack, Asking])
def test_the_margin_is_given_up_for_larger_inputs_and_filled_again(factory):
    pair = Pair(lambda: factory(8), "resident", settings={"device_budget": 30000})
    homes = []
    for step, size in enumerate((2, 2, 24, 24, 2, 2)):
        pair.check(step_of, step, size)
        homes.append(pair.engine.stats()["chunks_in_margin"])
    assert homes[1] > homes[3]
    assert pair.engine.stats()["device_total_peak_nbytes"] <= 30000


@pytest.mark.own_rest
@pytest.mark.parametrize("factory", [Stack, Asking])
def test_the_margin_stays_for_evaluations_that_need_no_more(factory):
    pair = Pair(lambda: factory(8), "resident", settings={"device_budget": 30000})
    pair.train(3)
    before = pair.engine.stats()
    with torch.no_grad():
        pair.both(lambda model, _: [model(batch(size=size)).clone() for size in (4, 2)])
    after = pair.engine.stats()
    assert after["chunks_in_margin"] >= before["chunks_in_margin"] > 0
    pair.train(1, first=3)


def test_a_model_whose_steps_have_changed_for_good_is_recorded_anew():
    """After two steps in a row that differ from the trace, later ones follow a new one, and evict as well as before."""

    class Turned(Asking):
        is_turned = False

        def forward(self, x):
            x = x if x.sum().item() < 1e9 else x * 2
            for layer in reversed(self.layers) if self.is_turned else self.layers:
                x = torch.tanh(layer(x))
            return x

    pair = Pair(lambda: Turned(8), "moving", settings={"chunks": 4})
    before = counted(pair, 3, 0)[-1]
    for model, _ in pair:
        model.is_turned = True
    rows = counted(pair, 6, 3)
    stats = pair.engine.stats()
    assert stats["diverged_steps"] == 2
    assert stats["recorded_steps"] == 2
    assert rows[-1] == rows[-2]
    assert rows[-1]["chunk_loads"] == before["chunk_loads"] == 8 + 3


# Steps that are known, and steps that are not


def test_a_larger_batch_is_recorded_anew_and_a_smaller_one_is_not():
    pair = Pair(lambda: Asking(6), "moving")
    recorded = []
    for step, size in enumerate((4, 4, 16, 16, 4, 64)):
        pair.both(step_of, step, size)
        recorded.append(pair.engine.stats()["recorded_steps"])
    pair.check()
    assert recorded == [1, 1, 2, 2, 2, 3]
    assert pair.engine.stats()["diverged_steps"] == 0


def test_a_step_that_differs_from_its_trace_is_counted_and_right(budget):
    class Fickle(Stack):
        order = range(5)

        def forward(self, x):
            for number in self.order:
                x = torch.tanh(self.layers[number](x))
            return x

    pair = Pair(Fickle, budget)
    for step, order in enumerate((range(5), range(5), [4, 2, 0, 1], range(5), [3], range(5))):
        for model, _ in pair:
            model.order = order
        pair.train(1, first=step)
    assert (pair.engine.stats()["diverged_steps"] > 0) is pair.moves


def test_zero_grad_before_or_after_backward_is_the_same():
    loads = []
    for between in (False, True):
        pair = Pair(lambda: Stack(7), "moving")

        def run(model, optimizer, between=between):
            for step in range(4):
                loss = loss_of(model, step)
                if between:
                    optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if not between:
                    optimizer.zero_grad()

        pair.check(run)
        assert pair.engine.stats()["diverged_steps"] == 0
        loads.append(pair.engine.stats()["chunk_loads"])
    assert loads[0] == loads[1]


# Forwards and backwards that do not end


class Layer(nn.Linear):
    error = None

    def forward(self, x):
        x = super().forward(x)
        if self.error is not None:
            raise self.error("while it has its parameters")
        return x


class Failing(Stack):
    """Raises before a layer computes."""

    fails_at, error = None, LookupError

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if number == self.fails_at:
                raise self.error("here")
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize(("error", "is_evaluation"), [(LookupError, False), (KeyboardInterrupt, True)])
def test_a_forward_that_raises_leaves_nothing_behind(is_evaluation, error, is_inside, budget):
    pair = Pair(Failing, budget)
    pair.train(1)
    for step, number in enumerate((0, 2, 4)):
        for model, _ in pair:
            if is_inside:
                model.layers[number].error = error
            else:
                model.fails_at, model.error = number, error
            with pytest.raises(error), torch.set_grad_enabled(not is_evaluation):
                model(batch())
            model.fails_at = model.layers[number].error = None
        pair.both(lambda model, _, number=number: model.layers[number].weight.detach().clone())
        pair.train(1, first=1 + step)
    assert pair.engine.stats()["diverged_steps"] == 0


AFTERWARDS = {
    "optimizer.zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "model.zero_grad": lambda model, optimizer: model.zero_grad(),
    "zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "each gradient": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()] and None,
    "nothing": lambda model, optimizer: None,
    "step": lambda model, optimizer: (optimizer.step(), optimizer.zero_grad()),
}


@pytest.mark.parametrize(("error", "streams"), [(LookupError, "threads"), (KeyboardInterrupt, "delayed")])
@pytest.mark.own_streams
def test_a_backward_that_raises_leaves_the_gradients_that_torch_has(error, streams, budget):
    fails = []

    def prepare(model):
        def hook(_):
            if fails:
                raise error("in backward")

        weight = model.layers[2].weight
        (weight.register_hook if error is LookupError else weight.register_post_accumulate_grad_hook)(hook)

    with streams_of(streams):
        pair = Pair(Stack, budget, prepare=prepare)
        pair.train(1)
        for step, (name, afterwards) in enumerate(AFTERWARDS.items()):
            fails.append(True)
            for model, _ in pair:
                with pytest.raises(error):
                    loss_of(model, 7).backward()
            fails.clear()
            if name == "step":
                pair.check_gradients()
            pair.both(afterwards)
            pair.train(1, first=2 + step)
        pair.engine.detach()


def test_graphs_that_are_dropped_free_everything(budget):
    model = make(Stack)
    engine = engine_of(model, budget)
    for seed in range(4):
        loss = loss_of(model, seed)
        del loss
    loss_of(model).backward()
    engine.optimizer.step()
    stats = engine.stats()
    assert stats["device_peak_nbytes"] <= stats["chunk_budget_nbytes"]
    reference = weakref.ref(model)
    engine.detach()
    del model, engine
    gc.collect()
    assert reference() is None


# Budgets that are too small


def advised(error):
    """The number of bytes that a message says would be enough."""
    text = str(error.value)
    return int(re.search(r"at least (\d+) bytes", text)[1])


def test_a_chunk_budget_that_no_module_fits_is_refused_with_what_is_enough():
    model = make(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)))
    before = values_of(model)
    config = {"chunk_numel": 4160, "chunk_budget": 8000, "dtype": "fp32"}
    with pytest.raises(
        BudgetError, match=r"chunk_budget is too small for module '0' \(Linear\).*at least \d+ bytes"
    ) as caught:
        PatrickStarEngine(model, config, adamw(trainable(model)), device="cpu")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not hasattr(model, "patrickstar_engine")
    config["chunk_budget"] = advised(caught)
    engine = PatrickStarEngine(model, config, adamw(trainable(model)), device="cpu")
    model(torch.randn(2, 64)).sum().backward()
    engine.optimizer.step()


def test_a_host_budget_that_is_too_small_is_refused_before_anything_is_allocated():
    model = make(Stack)
    config = config_of("moving", host_budget=20000)
    with pytest.raises(BudgetError, match=r"for the model data(.|\n)*host_budget of at least \d+ bytes") as caught:
        PatrickStarEngine(model, config, adamw(trainable(model)), device="cpu")
    engine = PatrickStarEngine(model, {**config, "host_budget": advised(caught)}, adamw(trainable(model)), device="cpu")
    for seed in range(2):
        loss_of(model, seed).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    stats = engine.stats()
    assert stats["host_peak_nbytes"] <= stats["host_budget_nbytes"] == advised(caught)


def test_activations_that_do_not_fit_are_an_error_with_the_table_and_lose_nothing():
    pair = Pair(Stack, "resident", settings={"device_budget": 12000})
    pair.train(2)
    before = values_of(pair.ours)
    with pytest.raises(
        DeviceMemoryError, match=r"device_budget is too small(.|\n)*non-model data(.|\n)*budget"
    ) as caught:
        loss_of(pair.ours, 0, 500)
    assert_same(before, values_of(pair.ours))
    del caught
    gc.collect()
    pair.optimizer.zero_grad()
    pair.train(2, first=2)
    assert pair.engine.stats()["chunk_loads"] > 0


def test_a_module_that_needs_more_chunks_than_fit_says_who_is_there():
    class Greedy(Stack):
        def forward(self, x):
            weights = [layer.weight for layer in self.layers]
            return torch.tanh(sum(x @ weight for weight in weights))

    class Using(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.first = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x):
            views = [part.weight.view(-1) for part in self.parts]
            return (x @ self.first).sum() + sum((view * view).sum() for view in views)

    pair = Pair(Greedy, "moving", settings={"chunks": 6})
    pair.train(2)
    model = make(Using)
    engine_of(model, "moving", settings={"chunks": 2})
    with pytest.raises(
        DeviceMemoryError, match=r"chunk_budget is too small for .* of 2\.50 KiB are needed.*are in use"
    ):
        model(batch()).backward()


def test_states_of_another_optimizer_over_the_host_budget_are_told_and_the_step_is_whole():
    pair = Pair(Stack, "moving", sgd, settings={"host_budget": 5 * CHUNK_NUMEL * 8 + 1000})
    loss_of(pair.plain).backward()
    pair.plain_optimizer.step()
    loss_of(pair.ours).backward()
    with pytest.raises(BudgetError, match="host_budget"):
        pair.optimizer.step()
    assert_same_values(pair.plain, pair.ours)


# Embeddings on the CPU


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.embedding = nn.Embedding(40, WIDTH)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def lookup_loss(model, seed):
    return model(tokens(seed, vocab=40)).float().square().sum()


LOOKUP = {"cpu_embedding": True, "chunks": 2}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_an_embedding_are_looked_up_at_home(dtype, accumulation):
    pair = Pair(Lookup, "moving", dtype=dtype, settings=LOOKUP, gradient_accumulation_steps=accumulation)
    pair.train(3, micro=accumulation, loss=lookup_loss)
    crossed = 3 * accumulation * 3 * LAYER_NUMEL * DTYPES[dtype].itemsize
    assert pair.engine.stats()["device_to_host_nbytes"] == crossed, "the embedding's gradient never crosses"
    # No step visits its chunk, and the next forward reads its rows first of all.
    assert [tensor.spec.name for tensor in inside.in_order_of_use(pair.engine)[0].tensors] == ["embedding.weight"]
    with torch.no_grad():
        pair.check(lambda model, _: model(tokens(9, vocab=40)).clone())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_tied_embedding_is_looked_up_at_home_and_multiplied_on_the_device(accumulation):
    pair = Pair(Tied, "moving", settings={"cpu_embedding": True, "chunks": 4}, gradient_accumulation_steps=accumulation)
    pair.train(3, micro=accumulation)
    pair.backward(5)
    pair.check_gradients()
    pair.step()
    if accumulation == 1:
        numel = sum(parameter.numel() for parameter in pair.plain.parameters())
        assert pair.engine.stats()["model_data_nbytes"] == 16 * numel, "what is tied is there once"


def test_an_embedding_with_hooks_of_users_is_looked_up_at_home():
    pair = Pair(Lookup, "moving", settings=LOOKUP)
    pair.both(lambda model, _: model.embedding.weight.register_hook(lambda gradient: gradient * 2) and None)
    pair.train(3, loss=lookup_loss)
