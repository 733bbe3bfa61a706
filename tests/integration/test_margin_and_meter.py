"""Steps in which the device margin, the meter or a CPU embedding meets what users do."""

import pytest
import torch
from models import make_batch, make_model
from torch import nn
from trainers import smallest_budget
from watch import non_model_peak

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.runtime import tracer as tracer_module


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def make_layers():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())))


def budget_for(factor, length=16):
    step = lambda model: model(**make_batch("gpt2", length=length)).loss.backward()  # noqa: E731
    return non_model_peak(make_model("gpt2").train(), step) + int(factor * smallest_budget(make_model("gpt2")))


def train_step(model, optimizer, seed=0, length=16):
    loss = model(**make_batch("gpt2", seed=seed, length=length)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def assert_same_steps(plain, optimizer, managed, engine, steps, length=16):
    """Trains both models from the same random numbers and compares every loss."""
    for step in steps:
        torch.manual_seed(step)
        expected = train_step(plain, optimizer, step, length)
        torch.manual_seed(step)
        assert train_step(managed, engine.optimizer, step, length) == expected, step


@pytest.mark.usefixtures("recorded")
def test_an_evaluation_that_gives_up_the_margin():
    plain, managed = make_model("gpt2").train(), make_model("gpt2").train()
    optimizer = adamw(plain)
    engine = PatrickStarEngine(managed, {"device_budget": budget_for(12)}, adamw(managed))
    assert_same_steps(plain, optimizer, managed, engine, range(2), 8)
    assert engine.stats()["chunks_in_margin"] > 0
    with torch.inference_mode():
        managed(**make_batch("gpt2", length=24))
    assert engine.stats()["chunks_in_margin"] == 0
    assert_same_steps(plain, optimizer, managed, engine, range(2, 5), 8)
    assert engine.stats()["chunks_in_margin"] > 0


@pytest.mark.parametrize(("accumulation", "mode"), [(1, torch.no_grad), (2, torch.inference_mode)])
def test_an_evaluation_with_lookups_at_home_between_two_backwards(accumulation, mode):
    """Without the hint the evaluation makes the accumulation list, in which training then goes on."""
    plain, managed = make_model("gpt2").eval(), make_model("gpt2").eval()
    optimizer = adamw(plain)
    config = {"cpu_embedding": True, "chunk_budget": 2 * smallest_budget(make_model("gpt2"))}
    engine = PatrickStarEngine(managed, config, adamw(managed), gradient_accumulation_steps=accumulation)
    lists = [set(chunk.lists) for chunk in engine.manager.chunks]
    assert all(("grad" in names) == (accumulation == 2) for names in lists)
    for step in range(3):
        for micro in range(2):
            for model in (plain, managed):
                model(**make_batch("gpt2", seed=10 * step + micro)).loss.backward()
            with mode():
                outputs = [model(**make_batch("gpt2", seed=9)).logits for model in (plain, managed)]
            assert torch.equal(*outputs)
        for one in (optimizer, engine.optimizer):
            one.step()
            one.zero_grad()
    for key, value in plain.state_dict().items():
        assert torch.equal(value, managed.state_dict()[key]), key


@pytest.mark.usefixtures("recorded")
def test_an_evaluation_that_fails_makes_no_trace():
    """Half of its visits would be taken for the whole, and the next evaluation would be lost."""
    model = make_layers()
    engine = PatrickStarEngine(model, {"chunk_budget": 3000, "chunk_numel": 320}, adamw(model))
    tracer, x = engine.manager.tracer, torch.randn(4, 16)

    def fail(*_):
        raise ValueError("in evaluation")

    def evaluations():
        return [key for key in tracer.traces if key.startswith("evaluation")]

    handle = model[4].register_forward_pre_hook(fail)
    with torch.no_grad(), pytest.raises(ValueError, match="in evaluation"):
        model(x)
    assert not evaluations()
    handle.remove()
    with torch.no_grad():
        model(x)
    (key,) = evaluations()
    visited = {visit.chunk_index for visit in tracer.traces[key].visits}
    assert visited == {chunk.spec.index for chunk in engine.manager.chunks}
    with torch.no_grad():
        model(x)
    assert engine.stats()["diverged_steps"] == 0


@pytest.mark.usefixtures("recorded")
def test_forwards_that_never_meet_a_backward_are_forgotten(monkeypatch):
    """Somebody evaluates with gradients on: what is noted of it must not grow without end."""
    monkeypatch.setattr(tracer_module, "MOST_VISITS", 20)
    model, plain = make_layers(), make_layers()
    optimizer = adamw(plain)
    engine = PatrickStarEngine(model, {"device_budget": 40000, "chunk_numel": 320}, adamw(model))
    tracer, x = engine.manager.tracer, torch.randn(4, 16)
    num_visits = []
    for _ in range(30):
        assert torch.equal(model(x), plain(x))
        num_visits.append(len(tracer.step.visits) if tracer.step is not None else 0)
    assert max(num_visits) <= 20
    assert 0 in num_visits
    assert not tracer.traces
    for _ in range(3):
        for one, step in ((model, engine.optimizer), (plain, optimizer)):
            one(x).sum().backward()
            step.step()
            step.zero_grad()
    for key, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key


@pytest.mark.skipif(torch.__version__ < "2.13", reason="fake tensors refuse any class of parameters there but torch's")
def test_fake_tensors_around_a_call_do_not_touch_real_chunks():
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = make_model("gpt2").train()
    engine = PatrickStarEngine(model, {"device_budget": budget_for(12)}, adamw(model))
    for step in range(2):
        train_step(model, engine.optimizer, step, 8)
    assert engine.stats()["chunks_in_margin"] > 0
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model(**{key: torch.zeros(4, 24, dtype=torch.long) for key in ("input_ids", "labels")})
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key]), key
    train_step(model, engine.optimizer, 3, 8)


def test_more_micro_batches_than_the_hint_when_the_margin_is_full():
    plain, managed = make_model("gpt2").train(), make_model("gpt2").train()
    optimizer = adamw(plain)
    engine = PatrickStarEngine(managed, {"device_budget": budget_for(14)}, adamw(managed))
    in_margin = []
    for step, count in enumerate((1, 1, 2, 1, 3, 2)):
        for micro in range(count):
            for model in (plain, managed):
                torch.manual_seed(micro)
                model(**make_batch("gpt2", seed=10 * step + micro)).loss.backward()
        optimizer.step()
        engine.optimizer.step()
        optimizer.zero_grad()
        engine.optimizer.zero_grad()
        in_margin.append(engine.stats()["chunks_in_margin"])
    assert max(in_margin) > 0
    assert engine.stats()["device_total_peak_nbytes"] <= budget_for(14)
    for key, value in plain.state_dict().items():
        assert torch.equal(value, managed.state_dict()[key]), key


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


@pytest.mark.parametrize("factor", [25, 36])
def test_a_larger_budget_never_fails_where_a_smaller_one_works(factor):
    """Where all model data fits half of the budget it lives on the device, until activations turn out to need more."""
    plain, managed = make_model("gpt2").train(), make_model("gpt2").train()
    optimizer = adamw(plain)
    engine = PatrickStarEngine(managed, {"device_budget": budget_for(factor)}, adamw(managed))
    assert_same_steps(plain, optimizer, managed, engine, range(4))
    assert engine.stats()["device_total_peak_nbytes"] > 0
    for key, value in plain.state_dict().items():
        assert torch.equal(value, managed.state_dict()[key]), key
