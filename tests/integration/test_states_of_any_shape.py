"""Optimizers that keep what they like: states of any shape under Adam's names, objects, and a counter under a name."""

from pathlib import Path

import pytest
import torch
from models import make_model
from trainers import assert_same_weights, logged, make_trainer, run, tight
from transformers import Trainer, TrainingArguments

from hf_patrickstar import CheckpointError, PatrickStarTrainer, PatrickStarTrainingArguments

SAVING = {"save_strategy": "steps", "save_steps": 2}


class Rotation:
    """As the projectors of GaLore are: an object with a tensor."""

    def __init__(self, matrix):
        self.matrix = matrix


class Frugal(torch.optim.Optimizer):
    """Adam of a projection of the gradient, with one scale per row.

    Its ``exp_avg`` is smaller than the parameter, its ``exp_avg_sq`` has one dimension, and the count of steps is under
    a name. Each parameter has an object if ``projects``.
    """

    def __init__(self, params, lr=1e-2, projects=False):
        super().__init__(params, {"lr": lr})
        self.projects = projects
        self.state["total"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.state["total"] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad.flatten(1) if parameter.dim() > 1 else parameter.grad[None])

    def update(self, parameter, gradient):
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = gradient.new_zeros(gradient.shape[0], 2)
            state["exp_avg_sq"] = gradient.new_zeros(gradient.shape[0])
            if self.projects:
                generator = torch.Generator().manual_seed(gradient.shape[1])
                state["rotation"] = Rotation(torch.randn(gradient.shape[1], 2, generator=generator))
        matrix = state["rotation"].matrix if self.projects else torch.ones(gradient.shape[1], 2)
        state["exp_avg"].lerp_(gradient @ matrix, 0.1)
        state["exp_avg_sq"].lerp_(gradient.square().mean(1), 1 - 0.9 ** self.state["total"])
        change = (state["exp_avg"] @ matrix.T) / (state["exp_avg_sq"].sqrt()[:, None] + 1e-3)
        parameter.sub_(change.view_as(parameter), alpha=self.param_groups[0]["lr"])


def trainer_of(is_chunked, tmp_path, seed=0, projects=False, **kwargs):
    given = {"optimizer_cls_and_kwargs": (Frugal, {"lr": 1e-3, "projects": projects})}
    classes = (PatrickStarTrainer, PatrickStarTrainingArguments) if is_chunked else (Trainer, TrainingArguments)
    return make_trainer(*classes, tmp_path, model=make_model("gpt2", seed), trainer_kwargs=given, **kwargs)


@pytest.mark.parametrize("projects", [False, True], ids=["rows", "objects"])
def test_the_same_as_in_the_stock_trainer(projects, tmp_path):
    expected = trainer_of(False, tmp_path / "stock", projects=projects)
    found = trainer_of(True, tmp_path / "ours", projects=projects)
    run(expected)
    run(found)
    assert logged(found, "loss") == logged(expected, "loss")
    assert_same_weights(expected.model, found.model)


@pytest.mark.parametrize("format_name", ["sharded", "torch"])
def test_resuming_with_such_states(format_name, tmp_path):
    whole = trainer_of(False, tmp_path / "stock")
    run(whole)
    settings = {**SAVING, "patrickstar_config": {**tight(), "optimizer_format": format_name}}
    first = trainer_of(True, tmp_path / "ours", **settings)
    run(first)
    second = trainer_of(True, tmp_path / "ours", seed=3, **settings)
    run(second, resume_from_checkpoint=str(Path(first.args.output_dir) / "checkpoint-2"))
    assert_same_weights(whole.model, second.model)


def test_resuming_with_objects(tmp_path):
    """Torch does not load an object of a type that nobody has called safe; plain torch refuses with other words."""
    first = trainer_of(True, tmp_path, projects=True, **SAVING)
    run(first)
    folder = str(Path(first.args.output_dir) / "checkpoint-2")
    second = trainer_of(True, tmp_path, seed=3, projects=True, **SAVING)
    with pytest.raises(CheckpointError, match=r"'rotation' is an object of .*Rotation.*add_safe_globals"):
        run(second, resume_from_checkpoint=folder)
    third = trainer_of(True, tmp_path, seed=3, projects=True, **SAVING)
    with torch.serialization.safe_globals([Rotation]):
        run(third, resume_from_checkpoint=folder)
    assert_same_weights(first.model, third.model)
