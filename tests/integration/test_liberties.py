"""What users do with models in scripts: it works as in torch, or is refused with a sentence; see also tests/engine."""

import pytest
import torch
from models import make_rows
from torch import nn
from trainers import arguments, smallest_budget

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


def test_a_lazy_module_in_the_trainer_gets_a_sentence(tmp_path):
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.lazy = nn.Linear(WIDTH, WIDTH), nn.LazyLinear(2)

    args = arguments(PatrickStarTrainingArguments, tmp_path, patrickstar=True)
    with pytest.raises(ConfigError, match=r"parameter 'lazy.weight' is lazy and has no shape yet; run one forward"):
        PatrickStarTrainer(model=Lazy(), args=args, train_dataset=make_rows("gpt2", 8))
