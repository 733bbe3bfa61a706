"""Runs the stock Trainer and ours on the same data, and compares every loss and every weight."""

import functools

import torch
from support.models import make_batch, make_model, make_rows
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_patrickstar import (
    PatrickStarArgumentsMixin,
    PatrickStarEngine,
    PatrickStarTrainer,
    PatrickStarTrainingArguments,
)
from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.layout.chunk_size import ChunkSizeSearch
from hf_patrickstar.layout.packing import Packer
from hf_patrickstar.layout.specs import collect_specs
from hf_patrickstar.model.admission import is_recomputed
from hf_patrickstar.model.quantized import parameters_of
from hf_patrickstar.setup.precision import choose_precision


class LossRecorder(TrainerCallback):
    def __init__(self):
        self.losses, self.norms = [], []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.norms.append(float(logs["grad_norm"]))


class LogRecorder(TrainerCallback):
    """Keeps every log as a ``report_to`` backend gets it."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))

    def figures(self):
        """What each log with a training loss says of the engine."""
        prefix = "patrickstar/"
        return [
            {key.removeprefix(prefix): value for key, value in entry.items() if key.startswith(prefix)}
            for entry in self.logs
            if "loss" in entry
        ]


def smallest_budget(model, precision="no", checkpointing=False, **settings):
    """Bytes of the largest working set of a layout with chunks as small as its tensors allow."""
    if checkpointing:
        model.gradient_checkpointing_enable()
    tensors, modules, parameters = collect_specs(model, is_recomputed, parameters_of=parameters_of)
    types = choose_precision(model, PatrickStarConfig(**settings), precision, parameters)
    tensors = types.assign(model, tensors, parameters)
    search = ChunkSizeSearch(Packer(tensors), modules, None, (), lambda numel, dtype: 0)
    return min(found.need_nbytes for found in search.candidates())


def arguments(cls, tmp_path, **kwargs):
    defaults = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 5e-3,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 7,
    }
    if issubclass(cls, PatrickStarArgumentsMixin):
        defaults["patrickstar_report"] = False
    defaults.update(kwargs)
    return cls(**defaults)


def train(
    name,
    tmp_path,
    patrickstar_config=None,
    change=None,
    train_kwargs=None,
    rows=64,
    callbacks=(),
    model=None,
    **kwargs,
):
    """Trains a tiny model; ``patrickstar_config`` of ``None`` means the stock Trainer."""
    model = make_model(name) if model is None else model
    if change is not None:
        change(model)
    recorder = LossRecorder()
    if patrickstar_config is None:
        cls, args = Trainer, arguments(TrainingArguments, tmp_path, **kwargs)
    else:
        cls = PatrickStarTrainer
        args = arguments(
            PatrickStarTrainingArguments, tmp_path, patrickstar=True, patrickstar_config=patrickstar_config, **kwargs
        )
    data = make_rows(name, rows)
    trainer = cls(model=model, args=args, train_dataset=data, eval_dataset=data[:8], callbacks=[recorder, *callbacks])
    trainer.train(**(train_kwargs or {}))
    return trainer, recorder


def tight(name="gpt2", factor=1.0):
    """Settings with the least memory for chunks that the model can do with, or a multiple of it."""
    return {"chunk_budget": int(_smallest_budget_of(name) * factor)}


@functools.cache
def _smallest_budget_of(name):
    return smallest_budget(make_model(name))


def make_trainer(cls, args_cls, tmp_path, model=None, name="gpt2", trainer_kwargs=None, **kwargs):
    model = model or make_model(name)
    if args_cls is not TrainingArguments:
        kwargs = {"patrickstar": True, "patrickstar_config": tight(name), **kwargs}
    data = make_rows(name, 64)
    args = arguments(args_cls, tmp_path, **kwargs)
    return cls(model=model, args=args, train_dataset=data, eval_dataset=data[:8], **(trainer_kwargs or {}))


def pair(tmp_path, **kwargs):
    """The stock Trainer and ours, with the same arguments and models of the same weights."""
    stock = make_trainer(Trainer, TrainingArguments, tmp_path / "stock", **kwargs)
    ours = make_trainer(PatrickStarTrainer, PatrickStarTrainingArguments, tmp_path / "ours", **kwargs)
    return stock, ours


def run(trainer, **kwargs):
    """Trains from the same random state, whatever ran before."""
    torch.manual_seed(11)
    return trainer.train(**kwargs)


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def assert_same_weights(expected, actual):
    left, right = expected.state_dict(), actual.state_dict()
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert value.dtype == right[key].dtype, key
        assert torch.equal(value, right[key]), f"{key}: {(value - right[key]).abs().max()}"


def assert_same_run(expected, actual):
    """Losses, gradient norms and final weights, bit for bit."""
    (trainer, recorder), (ours, our_recorder) = expected, actual
    assert recorder.losses, "the run logged no loss"
    assert our_recorder.losses == recorder.losses
    assert our_recorder.norms == recorder.norms
    assert_same_weights(trainer.model, ours.model)


def train_with_engine(name, config):
    """Trains a model of ``models.py`` with an evaluation in each step; returns losses, weights and statistics."""
    model = make_model(name).train()
    engine = PatrickStarEngine(model, config, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    losses = []
    torch.manual_seed(3)
    for step in range(3):
        loss = model(**make_batch(name, seed=10 * step)).loss
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            losses.append(model(**make_batch(name, seed=99)).loss.item())
        engine.optimizer.clip_grad_norm_(None, 0.5)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return losses, {key: value.clone() for key, value in model.state_dict().items()}, engine.stats()
