"""The first step of models whose code cannot run with tensors without bytes: it is recorded, and computes the same."""

import copy
import logging
import pathlib
import sys

import pytest
import torch
from models import make_model
from torch import nn

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.plan_cache import keep_traces
from hf_patrickstar.tracing.estimator import StepEstimator, as_on
from hf_patrickstar.tracing.fake import fused_attention


def read_numbers(hidden):
    return hidden * float(hidden.detach().numpy().sum() != 7)


def insist_on_plain_tensors(hidden):
    if type(hidden) is not torch.Tensor:
        raise TypeError("no other tensors")
    return hidden


def call_a_library(hidden):
    if hidden.detach().untyped_storage().data_ptr() == 0:
        raise ValueError("a tensor without bytes")
    return hidden


def raise_an_error_of_its_own(hidden):
    class OwnError(Exception):
        pass

    try:
        hidden.detach().numpy()
    except RuntimeError:
        raise OwnError("this needs numbers") from None
    return hidden


class Peculiar(nn.Module):
    def __init__(self, ask):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.ask = ask

    def forward(self, inputs):
        return self.second(self.ask(self.first(inputs)))


def train(model, optimizer):
    losses = []
    for step in range(3):
        loss = model(torch.full((2, 8), 1.0 + step)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "ask",
    [read_numbers, insist_on_plain_tensors, call_a_library, raise_an_error_of_its_own],
    ids=lambda ask: ask.__name__,
)
def test_what_code_raises_for_tensors_without_bytes_is_not_raised_for_the_user(ask, caplog):
    model = Peculiar(ask)
    plain = copy.deepcopy(model)
    expected = train(plain, torch.optim.AdamW(plain.parameters()))
    engine = PatrickStarEngine(model, {"device_budget": 2**20}, torch.optim.AdamW(model.parameters()), device="cpu")
    with caplog.at_level(logging.INFO, "hf_patrickstar"):
        assert train(model, engine.optimizer) == expected
    said = [record.message for record in caplog.records if "the first step is recorded" in record.message]
    assert len(said) == 1
    assert engine.stats()["recorded_steps"] > 0
    for parameter, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, other)


def branch_on_a_value(hidden):
    return hidden * 2 if hidden.sum() > 1e6 else hidden


def insist_on_finite_values(hidden):
    if not torch.isfinite(hidden).all():
        sys.exit("these are not finite")
    return hidden


def loop_until_a_value_is_small(hidden):
    while hidden.abs().max() > 0.1:
        hidden = hidden / 2
    return hidden


@pytest.mark.parametrize(
    "ask", [branch_on_a_value, insist_on_finite_values, loop_until_a_value_is_small], ids=lambda ask: ask.__name__
)
def test_where_the_users_code_asks_for_values_the_step_is_recorded(ask, caplog):
    model = Peculiar(ask)
    engine = PatrickStarEngine(model, {"device_budget": 2**20}, torch.optim.AdamW(model.parameters()), device="cpu")
    with caplog.at_level(logging.INFO, "hf_patrickstar"):
        train(model, engine.optimizer)
    assert "the first step is recorded: the model asks for the value of a tensor" in caplog.text
    assert pathlib.Path(__file__).name in caplog.text
    assert (engine.stats()["recorded_steps"], engine.stats()["diverged_steps"]) == (1, 0)


def of_library(text):
    """A function that looks like one of transformers."""
    namespace = {"__name__": "transformers.models.peculiar", "torch": torch}
    exec(text, namespace)
    return namespace["ask"]


def test_code_of_a_library_that_asks_gets_an_answer_which_nobody_relies_on(caplog):
    """An attention mask is looked at, say, and both branches visit the same chunks; this one takes more memory."""
    model = Peculiar(
        of_library("def ask(hidden): return hidden if (hidden < 1e6).all() else hidden.repeat(64, 64)[:2, :8]")
    )
    sizes = dict.fromkeys((True, False))
    for is_estimated in sizes:
        copied = copy.deepcopy(model)
        config = {"device_budget": 2500, "chunk_numel": 72, "placement": "host"}
        with pytest.MonkeyPatch.context() as monkeypatch:
            if not is_estimated:
                monkeypatch.setattr("hf_patrickstar.engine.make_estimator", lambda *_: None)
            engine = PatrickStarEngine(copied, config, torch.optim.AdamW(copied.parameters()), device="cpu")
            sizes[is_estimated] = train(copied, engine.optimizer)
        assert (engine.stats()["recorded_steps"] == 0) is is_estimated
        engine.detach()
    assert sizes[True] == sizes[False]


def test_what_could_not_be_estimated_is_not_tried_again(monkeypatch):
    """Neither for the other micro-batches of a step nor for other shapes."""
    tried = []
    original = StepEstimator._trace
    monkeypatch.setattr(StepEstimator, "_trace", lambda *args: tried.append(args) or original(*args))
    model = Peculiar(branch_on_a_value)
    made = torch.optim.AdamW(model.parameters())
    engine = PatrickStarEngine(model, {"device_budget": 2**20}, made, device="cpu", gradient_accumulation_steps=3)
    for num in (2, 2, 2, 9, 9, 9):
        model(torch.ones(num, 8)).sum().backward()
        if engine.manager.steps.micro_batch == 3:
            engine.optimizer.step()
    assert len(tried) == 1


def test_generated_text_is_not_estimated_token_by_token(monkeypatch):
    estimated = []
    original = StepEstimator.estimate
    monkeypatch.setattr(StepEstimator, "estimate", lambda *args: estimated.append(args) or original(*args))
    model = make_model("gpt2").eval()
    settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(torch.arange(5)[None], **settings)
    PatrickStarEngine(model, {"device_budget": 2**20}, torch.optim.AdamW(model.parameters()), device="cpu")
    assert torch.equal(model.generate(torch.arange(5)[None], **settings), expected)
    assert 0 < len(estimated) <= 6


def test_a_user_hook_on_the_weight_of_an_embedding_is_known(caplog):
    """Such an embedding is not looked up at home."""
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8))
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    config = {"placement": "host", "cpu_embedding": True, "device_budget": 2**20}
    engine = PatrickStarEngine(model, config, torch.optim.AdamW(model.parameters()), device="cpu")
    for _ in range(2):
        model(torch.arange(8)).square().mean().backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    assert (engine.stats()["recorded_steps"], engine.stats()["diverged_steps"]) == (0, 0)


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
    config = {"host_budget": int(0.8 * states), "device_budget": int(0.48 * states), "chunk_numel": 4160}
    engine = PatrickStarEngine(model, config, torch.optim.AdamW(model.parameters(), fused=True), device="cpu")
    for _ in range(2):
        model(torch.ones(32, 64))["out"].square().mean().backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    assert engine.stats()["steps"] == 2


def test_a_loop_with_two_forwards_records_its_first_step(caplog):
    model = Peculiar(lambda hidden: hidden)
    config = {"placement": "host", "chunk_numel": 72, "chunk_budget": 1024}
    engine = PatrickStarEngine(model, config, torch.optim.AdamW(model.parameters()), device="cpu")
    for _ in range(3):
        (model(torch.ones(2, 8)) * model(torch.ones(2, 8))).sum().backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    assert (engine.stats()["recorded_steps"], engine.stats()["diverged_steps"]) == (1, 1)


def test_the_cpu_computes_in_the_type_of_an_autocast_of_the_device():
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with as_on(torch.device("cuda")):
            assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.bfloat16
        with as_on(torch.device("cpu")):
            assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.float32
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def test_a_forward_that_takes_too_long_without_bytes_is_recorded_instead(caplog, monkeypatch):
    monkeypatch.setattr("hf_patrickstar.tracing.estimator._TIMEOUT_S", -1.0)
    model = Peculiar(lambda hidden: hidden)
    engine = PatrickStarEngine(model, {"device_budget": 2**20}, torch.optim.AdamW(model.parameters()), device="cpu")
    with caplog.at_level(logging.INFO, "hf_patrickstar"):
        train(model, engine.optimizer)
    assert "the first step is recorded: recording a micro-batch with tensors without bytes took longer" in caplog.text
    assert engine.stats()["recorded_steps"] > 0


def test_an_error_of_a_forward_is_raised_once_and_as_it_is():
    def fail(hidden):
        seen.append(hidden)
        raise ValueError("of the forward itself")

    seen, model = [], Peculiar(fail)
    engine = PatrickStarEngine(model, {"device_budget": 2**20}, torch.optim.AdamW(model.parameters()), device="cpu")
    with pytest.raises(ValueError, match="of the forward itself"):
        train(model, engine.optimizer)
    assert [type(hidden) for hidden in seen][-1] is torch.Tensor, "raised by the forward of the model"


@pytest.mark.parametrize("call", [lambda x: ((x, x, x, None, 0.5), {}), lambda x: ((x, x, x), {"dropout_p": 0.5})])
def test_attention_of_an_accelerator_writes_no_scores(call):
    args, kwargs = call(torch.ones(1, 1, 4, 4))
    attend = nn.functional.scaled_dot_product_attention
    with fused_attention():
        assert torch.equal(nn.functional.scaled_dot_product_attention(*args, **kwargs), torch.ones(1, 1, 4, 4))
    assert nn.functional.scaled_dot_product_attention is attend


@pytest.mark.usefixtures("keeping")
def test_a_later_run_begins_with_what_was_estimated(caplog):
    config = {"device_budget": 2**20, "chunk_numel": 64}
    for number in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        made = torch.optim.AdamW(model.parameters())
        with caplog.at_level(logging.INFO, logger="hf_patrickstar"):
            engine = PatrickStarEngine(model, config, made, device="cpu")
            train(model, engine.optimizer)
        assert ("first steps follow a plan" in caplog.text) is bool(number)
        assert engine.stats()["recorded_steps"] == engine.stats()["diverged_steps"] == 0
        engine.detach()


@pytest.mark.usefixtures("keeping")
def test_traces_of_a_model_that_has_grown_are_not_kept_for_the_one_before(monkeypatch):
    kept = []
    monkeypatch.setattr("hf_patrickstar.tracing.estimator.keep_traces", kept.append)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    engine = PatrickStarEngine(
        model, {"device_budget": 2**20, "chunk_numel": 64}, torch.optim.AdamW(model.parameters()), device="cpu"
    )
    model.append(nn.Linear(8, 8))
    train(model, engine.optimizer)
    assert not kept


@pytest.mark.usefixtures("keeping")
def test_batches_of_another_size_follow_no_kept_traces(monkeypatch):
    """A run plans with the activations of its own batches, and leaves no others."""
    kept = []
    monkeypatch.setattr(
        "hf_patrickstar.tracing.estimator.keep_traces", lambda known: (kept.append(known), keep_traces(known))
    )
    for num_rows in (4, 1, 1):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        made = torch.optim.AdamW(model.parameters())
        engine = PatrickStarEngine(model, {"device_budget": 2**20, "chunk_numel": 64}, made, device="cpu")
        model(torch.ones(num_rows, 8)).sum().backward()
        engine.optimizer.step()
        found = [trace.shapes for trace in engine.manager.tracer.traces.values() if trace.kind.is_training]
        assert found == [(((num_rows, 8),),)]
        assert [trace.shapes for trace in kept[-1].traces.values()] == found
        engine.detach()
    assert len(kept) == 2, "the third run follows what the second one has left"


@pytest.mark.usefixtures("keeping")
def test_traces_of_all_lengths_are_kept(monkeypatch):
    kept = []
    monkeypatch.setattr("hf_patrickstar.tracing.estimator.keep_traces", kept.append)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    engine = PatrickStarEngine(model, {"device_budget": 2**20}, torch.optim.AdamW(model.parameters()), device="cpu")
    for length in (4, 40, 400):
        model(torch.ones(2, length, 8)).sum().backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    assert {trace.shapes[0][0][1] for trace in kept[-1].traces.values()} == {4, 40, 400}
