"""The first step of models whose code cannot run with tensors without bytes: it is recorded, and computes the same."""

import copy
import logging

import pytest
import torch
from torch import nn

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.plan_cache import keep_traces
from hf_patrickstar.tracing.foresight import fused_attention


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


def test_a_forward_that_takes_too_long_without_bytes_is_recorded_instead(caplog, monkeypatch):
    monkeypatch.setattr("hf_patrickstar.tracing.foresight._PATIENCE_S", -1.0)
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
def test_a_later_run_begins_with_what_was_foreseen(caplog):
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
    monkeypatch.setattr("hf_patrickstar.tracing.foresight.keep_traces", kept.append)
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
        "hf_patrickstar.tracing.foresight.keep_traces", lambda known: (kept.append(known), keep_traces(known))
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
