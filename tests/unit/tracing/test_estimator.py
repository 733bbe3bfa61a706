"""The first step of models whose code cannot run with tensors without bytes: it is recorded, and computes the same."""

import copy
import logging

import pytest
import torch
from torch import nn

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.tracing.attention import fused_attention
from hf_patrickstar.tracing.estimator import StepEstimator, as_on
from hf_patrickstar.tracing.kept_traces import keep_traces

CONFIG = {"device_budget": 2**20, "chunk_numel": 64}


class Peculiar(nn.Module):
    def __init__(self, ask=lambda hidden: hidden):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.ask = ask

    def forward(self, inputs):
        return self.second(self.ask(self.first(inputs)))


def engine_of(model, config=CONFIG, **settings):
    return PatrickStarEngine(model, config, torch.optim.AdamW(model.parameters()), device="cpu", **settings)


def train(model, optimizer):
    losses = []
    for step in range(3):
        loss = model(torch.full((2, 8), 1.0 + step)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# What code does with tensors without bytes


def raise_an_error_of_its_own(hidden):
    class OwnError(Exception):
        pass

    try:
        hidden.detach().numpy()
    except RuntimeError:
        raise OwnError("this needs numbers") from None
    return hidden


def branch_on_a_value(hidden):
    return hidden * 2 if hidden.sum() > 1e6 else hidden


def take_too_long(hidden):
    return hidden


ASKS = {
    raise_an_error_of_its_own: "",
    branch_on_a_value: "the model asks for the value of a tensor (line",
    take_too_long: "recording a micro-batch with tensors without bytes took longer",
}


@pytest.mark.parametrize("ask", ASKS, ids=lambda ask: ask.__name__)
def test_code_that_needs_bytes_has_its_first_step_recorded_and_computes_the_same(ask, caplog, monkeypatch):
    if ask is take_too_long:
        monkeypatch.setattr("hf_patrickstar.tracing.estimator._TIMEOUT_S", -1.0)
    model = Peculiar(ask)
    plain = copy.deepcopy(model)
    expected = train(plain, torch.optim.AdamW(plain.parameters()))
    engine = engine_of(model)
    with caplog.at_level(logging.INFO, "hf_patrickstar"):
        assert train(model, engine.optimizer) == expected
    (said,) = [record.message for record in caplog.records if "the first step is recorded" in record.message]
    assert ASKS[ask] in said
    assert (engine.stats()["recorded_steps"], engine.stats()["diverged_steps"]) == (1, 0)
    for parameter, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_code_of_a_library_that_asks_gets_an_answer_which_nobody_relies_on(request):
    """An attention mask is looked at, say, and both branches visit the same chunks; this one takes more memory."""
    namespace = {"__name__": "transformers.models.peculiar", "torch": torch}
    exec("def ask(hidden): return hidden if (hidden < 1e6).all() else hidden.repeat(64, 64)[:2, :8]", namespace)
    model, losses = Peculiar(namespace["ask"]), []
    for is_estimated in (True, False):
        if not is_estimated:
            request.getfixturevalue("recorded")
        copied = copy.deepcopy(model)
        engine = engine_of(copied, {"device_budget": 2500, "chunk_numel": 72, "placement": "host"})
        losses.append(train(copied, engine.optimizer))
        assert (engine.stats()["recorded_steps"] == 0) is is_estimated
        engine.detach()
    assert losses[0] == losses[1]


# How often it is tried


def test_what_could_not_be_estimated_is_not_tried_again(monkeypatch):
    """Neither for the other micro-batches of a step nor for other shapes."""
    tried, original = [], StepEstimator._trace
    monkeypatch.setattr(StepEstimator, "_trace", lambda *args: tried.append(args) or original(*args))
    model = Peculiar(branch_on_a_value)
    engine = engine_of(model, gradient_accumulation_steps=3)
    for micro_batch, num in enumerate((2, 2, 2, 9, 9, 9), 1):
        model(torch.ones(num, 8)).sum().backward()
        if micro_batch % 3 == 0:
            engine.optimizer.step()
    assert len(tried) == 1


# As on the device


@pytest.mark.parametrize(("device", "dtype"), [("cuda", torch.bfloat16), ("cpu", torch.float32)])
def test_the_cpu_computes_in_the_type_of_an_autocast_of_the_device(device, dtype):
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with as_on(torch.device(device)):
            assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is dtype
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


@pytest.mark.parametrize("call", [lambda x: ((x, x, x, None, 0.5), {}), lambda x: ((x, x, x), {"dropout_p": 0.5})])
def test_attention_of_an_accelerator_writes_no_scores(call):
    args, kwargs = call(torch.ones(1, 1, 4, 4))
    attend = nn.functional.scaled_dot_product_attention
    with fused_attention():
        assert torch.equal(nn.functional.scaled_dot_product_attention(*args, **kwargs), torch.ones(1, 1, 4, 4))
    assert nn.functional.scaled_dot_product_attention is attend


class Layers(nn.Module):
    """Returns what it computes in between, of which a loss may need nothing."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

    def forward(self, x):
        hidden = []
        for layer in self.layers:
            x = torch.relu(layer(x))
            hidden.append(x)
        return {"out": x, "hidden": hidden}


@pytest.mark.parametrize("is_estimated", [True, False])
def test_a_loss_that_is_not_known_yet_refuses_no_training(is_estimated, request):
    """What stands in for it takes memory for all outputs, and there is room for that of the loop's own."""
    if not is_estimated:
        request.getfixturevalue("recorded")
    model = Layers()
    states = 16 * sum(parameter.numel() for parameter in model.parameters())
    engine = engine_of(
        model, {"host_budget": int(0.8 * states), "device_budget": int(0.48 * states), "chunk_numel": 4160}
    )
    for _ in range(2):
        model(torch.ones(32, 64))["out"].square().mean().backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    assert engine.stats()["steps"] == 2


# Traces that are kept for the next run


@pytest.fixture
def kept(monkeypatch):
    """What engines of the test keep."""
    found = []
    monkeypatch.setattr(
        "hf_patrickstar.tracing.estimator.keep_traces", lambda known: (found.append(known), keep_traces(known))
    )
    return found


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def shapes_of(traces):
    return {trace.shapes[0][0] for trace in traces.values() if trace.kind.is_training}


def test_traces_of_all_lengths_are_kept_and_none_of_a_model_that_has_grown(kept):
    model = two_layers()
    engine = engine_of(model, {"device_budget": 2**20})
    for length in (4, 40, 400):
        model(torch.ones(2, length, 8)).sum().backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    assert {shape[1] for shape in shapes_of(kept[-1].traces)} == {4, 40, 400}
    engine.detach()
    kept.clear()
    model = two_layers()
    engine = engine_of(model)
    model.append(nn.Linear(8, 8))
    train(model, engine.optimizer)
    assert not kept
