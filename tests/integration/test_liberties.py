"""What users do with models in scripts: it works as in torch, or is refused with a sentence; see also tests/engine."""

import pytest
import torch
from models import make_model, make_rows
from torch import nn
from trainers import LossRecorder, arguments, assert_same_weights, smallest_budget
from transformers import Trainer, TrainingArguments

from hf_patrickstar import (
    BudgetError,
    ConfigError,
    PatrickStarAccelerator,
    PatrickStarEngine,
    PatrickStarTrainer,
    PatrickStarTrainingArguments,
)

MOVING = {"chunk_budget": 4096, "chunk_numel": 320}
WIDTH = 16


def make_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def adamw(model, **kwargs):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True, **kwargs)


def twins(make=make_layers, config=MOVING, make_optimizer=adamw):
    plain, managed = make(), make()
    engine = PatrickStarEngine(managed, config, make_optimizer(managed))
    return [(plain, make_optimizer(plain)), (managed, engine.optimizer)]


def batch():
    return torch.randn(4, WIDTH)


def assert_equal(pair):
    (plain, _), (managed, _) = pair
    state_dict = managed.state_dict()
    for key, value in plain.state_dict().items():
        assert torch.equal(value, state_dict[key]), key


def step_all(pair, x, loss=lambda model, x: model(x).square().sum()):
    for model, optimizer in pair:
        loss(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()


def fused_loss(model, inputs):
    hidden = model.transformer(input_ids=inputs["input_ids"]).last_hidden_state
    logits = nn.functional.linear(hidden[:, :-1], model.lm_head.weight)
    return nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"][:, 1:].flatten())


def test_a_loss_outside_the_model_that_reads_a_weight(tmp_path):
    """The parts of a model called one by one, and a parameter used outside of every forward."""

    def own(base):
        class Own(base):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                return fused_loss(model, inputs)

        return Own

    runs = []
    data = make_rows("gpt2", 32)
    budget = {"chunk_budget": 2 * smallest_budget(make_model("gpt2"))}
    for base, args_class, extra in (
        (Trainer, TrainingArguments, {}),
        (PatrickStarTrainer, PatrickStarTrainingArguments, {"patrickstar": True, "patrickstar_config": budget}),
    ):
        recorder = LossRecorder()
        args = arguments(args_class, tmp_path, remove_unused_columns=False, **extra)
        trainer = own(base)(model=make_model("gpt2"), args=args, train_dataset=data, callbacks=[recorder])
        trainer.train()
        runs.append((trainer, recorder))
    assert runs[0][1].losses == runs[1][1].losses
    assert runs[0][1].losses[0] > 1
    assert_same_weights(runs[0][0].model, runs[1][0].model)


class Queries(nn.Module):
    """Modules that return parameters."""

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Parameter(torch.ones(WIDTH))

        def forward(self):
            return self.q

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.holder = self.Holder()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.layer(x) * self.holder(), self.temperature


def test_modules_that_return_parameters():
    pair = twins(Queries)
    for _ in range(3):
        step_all(pair, batch(), lambda model, x: (lambda out: (out[0].square() / out[1]).sum())(model(x)))
        assert_equal(pair)


def test_two_models_on_one_accelerator():
    accelerator = PatrickStarAccelerator(cpu=True, patrickstar_config=MOVING)
    pairs = [twins() for _ in range(2)]
    prepared = []
    for _ in range(2):
        model = make_layers()
        prepared.append(accelerator.prepare(model, adamw(model)))
    teacher = make_layers().requires_grad_(False)
    student = make_layers()
    prepared_student, prepared_teacher, _ = accelerator.prepare(student, teacher, adamw(student))
    assert prepared_teacher is teacher
    assert not teacher[0].weight.isnan().any()
    assert hasattr(prepared_student, "patrickstar_engine")
    x = 10 * batch()
    for (model, optimizer), pair in zip(prepared, pairs, strict=True):
        plain, plain_optimizer = pair[0]
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
        assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
        optimizer.step()
        plain_optimizer.step()
        assert_equal([(plain, None), (model, None)])
    assert accelerator.clip_grad_norm_(teacher.parameters(), 1.0) == 0.0
    norms = []
    for models in ([model for model, _ in prepared], [pair[0][0] for pair in pairs]):
        for model in models:
            model(x).square().sum().backward()
        parameters = [parameter for model in models for parameter in model.parameters()]
        clip = torch.nn.utils.clip_grad_norm_ if norms else accelerator.clip_grad_norm_
        norms.append(clip(parameters, 0.1))
    assert torch.equal(*norms)


def test_working_sets_of_modules_that_call_others():
    """What construction accepts, training can do: a module that holds its own parameters while it calls others."""

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.scale = nn.Parameter(torch.ones(WIDTH, WIDTH))
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.table = nn.ParameterList([torch.randn(WIDTH, WIDTH) for _ in range(2)])

        def forward(self, x):
            x = x @ self.scale @ self.table[0] @ self.table[1]
            return self.attention(x[None], x[None], x[None])[0]

    budget = smallest_budget(Nested())
    pair = twins(Nested, {"chunk_budget": budget})
    for _ in range(2):
        step_all(pair, batch())
    assert_equal(pair)
    with pytest.raises(BudgetError, match="too small for module"):
        twins(Nested, {"chunk_budget": budget - 1})


def test_compilers_of_accelerate_are_refused():
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    try:
        with pytest.raises(ConfigError, match="remove the dynamo backend"):
            PatrickStarAccelerator(cpu=True, dynamo_backend="eager")
    finally:
        AcceleratorState._reset_state(True)


def test_reading_one_parameter_at_a_time_costs_one_parameter():
    model = make_layers()
    engine = PatrickStarEngine(model, MOVING, adamw(model))
    model(batch()).sum().backward()
    manager, most = engine.manager, 0

    def nbytes():
        return manager.mirrors.nbytes + manager.gradient_mirrors.nbytes

    for parameter in model.parameters():
        parameter.data.norm()
        parameter.grad.norm()
        parameter.detach().numpy().sum()
        most = max(most, nbytes())
    largest = max(parameter.numel() for parameter in model.parameters())
    assert 0 < most <= 2 * 4 * largest  # a value and a gradient
    kept = [parameter.data for parameter in model.parameters()]
    assert nbytes() >= sum(value.nbytes for value in kept)
    del kept
    model(batch())
    assert nbytes() == 0


def test_a_lazy_module_in_the_trainer_gets_a_sentence(tmp_path):
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.lazy = nn.Linear(WIDTH, WIDTH), nn.LazyLinear(2)

    args = arguments(PatrickStarTrainingArguments, tmp_path, patrickstar=True)
    with pytest.raises(ConfigError, match=r"parameter 'lazy.weight' is lazy and has no shape yet; run one forward"):
        PatrickStarTrainer(model=Lazy(), args=args, train_dataset=make_rows("gpt2", 8))
