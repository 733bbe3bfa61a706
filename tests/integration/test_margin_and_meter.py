"""Steps in which the device margin, the meter or a CPU embedding meets what users do."""

import gc
import weakref

import pytest
import torch
from models import make_batch, make_model
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from trainers import smallest_budget
from watch import non_model_peak

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.memory.meters import StorageMeter
from hf_patrickstar.memory.streams import Streams
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


def test_forwards_without_backward_leave_nothing_behind():
    """What an operator saves of its own output must not keep the graph alive."""
    model = make_layers()
    engine = PatrickStarEngine(model, {"chunk_budget": 3000, "chunk_numel": 320}, adamw(model))
    for _ in range(5):
        loss = model(torch.randn(4, 16)).sum()
        del loss
    assert all(not tensor.is_saved for tensor in engine.manager.tensors)
    reference = weakref.ref(model)
    engine.detach()
    del model, engine
    gc.collect()
    assert reference() is None


@pytest.mark.own_streams  # which modes of operators there are
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_between_backward_and_step_of_a_recorded_step(mode):
    plain, managed = make_model("gpt2"), make_model("gpt2")
    optimizer = adamw(plain)
    engine = PatrickStarEngine(managed, {"device_budget": budget_for(2)}, adamw(managed))
    for step in range(3):
        torch.manual_seed(step)
        plain(**make_batch("gpt2", seed=step)).loss.backward()
        torch.manual_seed(step)
        managed(**make_batch("gpt2", seed=step)).loss.backward()
        with mode():
            managed.eval()(**make_batch("gpt2", seed=9))
        assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))
        managed.train()
        optimizer.step()
        engine.optimizer.step()
        optimizer.zero_grad()
        engine.optimizer.zero_grad()
    for key, value in plain.state_dict().items():
        assert torch.equal(value, managed.state_dict()[key]), key
    assert not _get_current_dispatch_mode_stack()


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_that_gives_up_the_margin(mode):
    plain, managed = make_model("gpt2").train(), make_model("gpt2").train()
    optimizer = adamw(plain)
    engine = PatrickStarEngine(managed, {"device_budget": budget_for(12)}, adamw(managed))
    assert_same_steps(plain, optimizer, managed, engine, range(2), 8)
    assert engine.stats()["chunks_in_margin"] > 0
    with mode():
        managed(**make_batch("gpt2", length=24))
    assert engine.stats()["chunks_in_margin"] == 0
    assert_same_steps(plain, optimizer, managed, engine, range(2, 5), 8)
    assert engine.stats()["chunks_in_margin"] > 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("accumulation", [1, 2])
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
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_that_fails_makes_no_trace(mode):
    """Half of its visits would be taken for the whole, and the next evaluation would be lost."""
    model = make_layers()
    engine = PatrickStarEngine(model, {"chunk_budget": 3000, "chunk_numel": 320}, adamw(model))
    tracer, x = engine.manager.tracer, torch.randn(4, 16)

    def fail(*_):
        raise ValueError("in evaluation")

    def evaluations():
        return [key for key in tracer.traces if key.startswith("evaluation")]

    handle = model[4].register_forward_pre_hook(fail)
    with mode(), pytest.raises(ValueError, match="in evaluation"):
        model(x)
    assert not evaluations()
    handle.remove()
    with mode():
        model(x)
    (key,) = evaluations()
    visited = {visit.chunk_index for visit in tracer.traces[key].visits}
    assert visited == {chunk.spec.index for chunk in engine.manager.chunks}
    with mode():
        model(x)
    assert engine.stats()["diverged_steps"] == 0


def test_steps_of_somebody_who_handles_an_error_are_recorded():
    """Training that goes on in an ``except`` block, or an evaluation there, has not failed itself."""
    model = make_layers()
    engine = PatrickStarEngine(model, {"chunk_budget": 3000, "chunk_numel": 320}, adamw(model))
    try:
        raise ValueError("before")
    except ValueError:
        for _ in range(2):
            with torch.no_grad():
                model(torch.randn(4, 16))
            model(torch.randn(4, 16)).sum().backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    kinds = sorted(key.split("/")[0] for key in engine.manager.tracer.traces)
    assert kinds == ["evaluation", "optimizer", "training"]
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


@pytest.mark.parametrize("budget", ["tight", "roomy"])
def test_steps_that_are_not_measured_have_total_peaks(budget):
    """Nobody measures a step that follows its trace: what was recorded is what others take then."""
    model = make_model("gpt2").train()
    device_budget = budget_for(3) if budget == "tight" else 2**30
    engine = PatrickStarEngine(model, {"device_budget": device_budget}, adamw(model))
    for step in range(3):
        train_step(model, engine.optimizer, step)
    stats, traces = engine.stats(), engine.manager.tracer.traces
    (trace,) = (trace for key, trace in traces.items() if key.startswith("training"))
    total = stats["device_total_step_peak_nbytes"]
    assert trace.non_model_peak_nbytes < total <= stats["device_step_peak_nbytes"] + trace.non_model_peak_nbytes
    assert total <= stats["device_total_peak_nbytes"] <= device_budget
    if budget == "roomy":
        assert total == stats["device_step_peak_nbytes"] + trace.non_model_peak_nbytes


@pytest.mark.parametrize("budget", ["tight", "roomy"])
def test_a_step_of_a_plan_measures_others_only_where_copies_move(budget, monkeypatch):
    """An allocator takes longer for its statistics than a visit for all else."""
    num_readings, live = [0], StorageMeter.live

    def counting(meter, booked):
        num_readings[0] += 1
        return live(meter, booked)

    monkeypatch.setattr(StorageMeter, "live", counting)
    model = make_model("gpt2").train()
    device_budget = budget_for(3 if budget == "tight" else 12)
    engine = PatrickStarEngine(model, {"device_budget": device_budget, "placement": "host"}, adamw(model))
    for step in range(3):
        num_readings[0] = 0
        train_step(model, engine.optimizer, step)
    ((trace, plan, _),) = engine.manager.steps.followed
    num_moving = sum(actions.moves for actions in plan.moments)
    assert num_moving < len(trace.visits) / (1 if budget == "tight" else 2)
    assert num_readings[0] <= num_moving + 2, "and one each when the forward begins and when the update drops copies"


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


@pytest.mark.parametrize("rows", [20, 4200])
def test_hooks_on_an_embedding_weight_are_called(rows):
    """A mask on the gradient of some rows, say; also where CPU embeddings are the default."""

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(rows, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        model[0].weight.register_hook(lambda gradient: gradient * 0.5)
        return model

    plain, managed = make(), make()
    optimizer = adamw(plain)
    setting = True if rows == 20 else "auto"
    config = {"cpu_embedding": setting, "chunk_budget": rows * 8 * 4 + 8000, "chunk_numel": 128}
    engine = PatrickStarEngine(managed, config, adamw(managed))
    for step in range(3):
        ids = torch.randint(0, rows, (6,), generator=torch.Generator().manual_seed(step))
        for model, one in ((plain, optimizer), (managed, engine.optimizer)):
            model(ids).square().sum().backward()
            one.step()
            model.zero_grad()
    for key, value in plain.state_dict().items():
        assert torch.equal(value, managed.state_dict()[key]), key


def test_detaching_between_forward_and_backward_with_lookups_at_home():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8))
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    engine = PatrickStarEngine(model, {"cpu_embedding": True, "chunk_budget": 600, "chunk_numel": 64}, adamw(model))
    loss = model(torch.tensor([1, 2])).square().sum()
    engine.detach()
    loss.backward()
    plain = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8))
    plain.load_state_dict(weights)
    plain(torch.tensor([1, 2])).square().sum().backward()
    assert torch.equal(model[0].weight.grad, plain[0].weight.grad)


@pytest.mark.own_streams  # the copy that is interrupted is made at once
def test_an_interrupt_while_a_chunk_is_copied_leaves_no_garbage(monkeypatch):
    model, plain = make_layers(), make_layers()
    engine = PatrickStarEngine(model, {"chunk_budget": 3000, "chunk_numel": 320}, adamw(model))
    x = torch.randn(4, 16)

    def interrupted(streams, source, target, after=()):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Streams, "to_device", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(x)
    assert torch.equal(model(x), plain(x))
    assert engine.stats()["chunk_loads"] > 0


def test_an_interrupt_inside_a_module_and_then_a_step():
    model = make_layers()
    engine = PatrickStarEngine(model, {"chunk_budget": 3000, "chunk_numel": 320}, adamw(model))
    x = torch.randn(4, 16)
    model(x).sum().backward()

    def stop(*_):
        raise KeyboardInterrupt

    handle = model[4].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    handle.remove()
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    model(x).sum().backward()
    engine.optimizer.step()
    assert engine.stats()["steps"] == 2


def test_function_transforms_in_a_recorded_step():
    model, plain = make_layers(), make_layers()
    engine = PatrickStarEngine(model, {"device_budget": 40000, "chunk_numel": 320}, adamw(model))
    x = torch.randn(4, 16)
    gradient = torch.func.grad(lambda value: model(value).sum())(x)
    assert torch.equal(gradient, torch.func.grad(lambda value: plain(value).sum())(x))
    model(x).sum().backward()
    engine.optimizer.step()


def test_after_a_failed_backward_other_code_may_allocate():
    """The meter may still be on, but only a step can fail for what it sees."""
    model = make_layers()
    engine = PatrickStarEngine(model, {"device_budget": 40000, "chunk_numel": 320}, adamw(model))

    def fail(gradient):
        raise ValueError("in backward")

    out = model(torch.randn(4, 16))
    out.register_hook(fail)
    with pytest.raises(ValueError, match="in backward"):
        out.sum().backward()
    model.zero_grad()
    torch.zeros(100000)
    model(torch.randn(4, 16)).sum().backward()
    engine.optimizer.step()


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


@pytest.mark.parametrize("factor", [25, 28, 30, 32, 36])
def test_a_larger_budget_never_fails_where_a_smaller_one_works(factor):
    """Where all model data fits half of the budget it lives on the device, until activations turn out to need more."""
    plain, managed = make_model("gpt2").train(), make_model("gpt2").train()
    optimizer = adamw(plain)
    engine = PatrickStarEngine(managed, {"device_budget": budget_for(factor)}, adamw(managed))
    assert_same_steps(plain, optimizer, managed, engine, range(4))
    assert engine.stats()["device_total_peak_nbytes"] > 0
    for key, value in plain.state_dict().items():
        assert torch.equal(value, managed.state_dict()[key]), key
