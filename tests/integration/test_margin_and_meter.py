"""Steps in which the device margin, the meter or a CPU embedding meets what users do."""

import logging

import pytest
import torch
from support import inside
from support.checkpoint_files import same_bits
from support.models import make_batch, make_model
from support.trainers import smallest_budget, train_with_engine
from support.watch import non_model_peak
from torch import nn

from hf_patrickstar import PatrickStarEngine


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def make_layers():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())))


@pytest.mark.usefixtures("recorded")
def test_an_evaluation_that_fails_makes_no_trace():
    """Half of its visits would be taken for the whole, and the next evaluation would be lost."""
    model = make_layers()
    engine = PatrickStarEngine(model, {"chunk_budget": 3000, "chunk_numel": 320}, adamw(model))
    traces, x = inside.traces(engine), torch.randn(4, 16)

    def fail(*_):
        raise ValueError("in evaluation")

    def evaluations():
        return [key for key in traces if key.startswith("evaluation")]

    handle = model[4].register_forward_pre_hook(fail)
    with torch.no_grad(), pytest.raises(ValueError, match="in evaluation"):
        model(x)
    assert not evaluations()
    handle.remove()
    with torch.no_grad():
        model(x)
    (key,) = evaluations()
    visited = {visit.chunk_index for visit in traces[key].visits}
    assert visited == {chunk.spec.index for chunk in inside.chunks(engine)}
    with torch.no_grad():
        model(x)
    assert engine.stats()["diverged_steps"] == 0


@pytest.mark.usefixtures("recorded")
def test_forwards_that_never_meet_a_backward_are_forgotten(monkeypatch):
    """Somebody evaluates with gradients on: what is noted of it must not grow without end."""
    monkeypatch.setattr(*inside.MOST_VISITS, 20)
    model, plain = make_layers(), make_layers()
    optimizer = adamw(plain)
    engine = PatrickStarEngine(model, {"device_budget": 40000, "chunk_numel": 320}, adamw(model))
    traces, x = inside.traces(engine), torch.randn(4, 16)
    num_visits = []
    for _ in range(30):
        assert torch.equal(model(x), plain(x))
        num_visits.append(len(step.visits) if (step := inside.step(engine)) is not None else 0)
    assert max(num_visits) <= 20
    assert 0 in num_visits
    assert not traces
    for _ in range(3):
        for one, step in ((model, engine.optimizer), (plain, optimizer)):
            one(x).sum().backward()
            step.step()
            step.zero_grad()
    for key, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key


@pytest.mark.own_rest
def test_inputs_that_cannot_be_seen_are_measured_in_every_step():
    class Hidden:
        def __init__(self, value):
            self.value = value

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = make_layers()

        def forward(self, hidden):
            return self.layers(hidden.value).sum()

    model = Model()
    budget = 12 * 64 * 16 * 4 + 8000
    engine = PatrickStarEngine(model, {"device_budget": budget, "chunk_numel": 320}, adamw(model))
    for rows in (4, 4, 64, 4):
        model(Hidden(torch.randn(rows, 16))).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        assert engine.stats()["device_total_peak_nbytes"] <= budget
    assert engine.stats()["device_total_peak_nbytes"] > 6 * 64 * 16 * 4, "the large step was seen"


def test_a_larger_budget_never_fails_where_a_smaller_one_works():
    """Where all model data fits half of the budget it lives on the device, until activations turn out to need more."""
    own_nbytes = non_model_peak(make_model("gpt2").train(), lambda model: model(**make_batch("gpt2")).loss.backward())
    expected = train_with_engine("gpt2", {})[:2]
    for factor in (25, 36):
        budget = own_nbytes + factor * smallest_budget(make_model("gpt2"))
        *found, stats = train_with_engine("gpt2", {"device_budget": budget})
        assert same_bits(list(expected), found)
        assert 0 < stats["device_total_peak_nbytes"] <= budget


def test_evicting_all_warns_where_there_is_nothing_to_evict(caplog):
    with caplog.at_level(logging.WARNING, "hf_patrickstar"):
        model = make_model("gpt2")
        PatrickStarEngine(model, {"debug_evict_all": True, "chunk_numel": 2**20}, adamw(model))
    assert "debug_evict_all has nothing to evict" in caplog.text
