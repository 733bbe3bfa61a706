"""Models that say in ``load_state_dict``, or in hooks before it, what a checkpoint's tensors are; and plain modules."""

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.trainers import arguments, assert_same_weights, logged, run
from transformers import Trainer, TrainingArguments

from hf_patrickstar import PatrickStarTrainer, PatrickStarTrainingArguments

ROWS = [
    {"x": torch.randn(6, generator=torch.Generator().manual_seed(seed)), "labels": torch.tensor(1.0)}
    for seed in range(32)
]


class Plain(torch.nn.Module):
    """No model of transformers: nothing of what the Trainer asks those for is there."""

    def __init__(self, width=5):
        super().__init__()
        self.body = torch.nn.Linear(6, width)
        self.head = torch.nn.Linear(width, 1, bias=False)

    def forward(self, x, labels):
        loss = (self.head(torch.tanh(self.body(x))).squeeze(-1) - labels).square().mean()
        return {"loss": loss}


class Growing(Plain):
    """A buffer gets a row with every forward in training, and another size before it is loaded."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, 6))
        self._register_load_state_dict_pre_hook(self._make_room)

    def _make_room(self, state_dict, prefix, *_):
        if prefix + "seen" in state_dict:
            self.seen = torch.zeros(state_dict[prefix + "seen"].shape)

    def forward(self, x, labels):
        if self.training:
            self.seen = torch.cat([self.seen, x.mean(0, keepdim=True)])
        return {"loss": super().forward(x, labels)["loss"] + self.seen.sum() / 10}


class Renaming(Plain):
    """Files have names of before, and one tensor for two."""

    def __init__(self):
        super().__init__()
        self._register_load_state_dict_pre_hook(self._rename)
        self._register_state_dict_hook(self._rename_back)

    @staticmethod
    def _rename_back(module, state_dict, prefix, _):
        weight, bias = (state_dict.pop(prefix + f"body.{name}") for name in ("weight", "bias"))
        state_dict[prefix + "old.body"] = torch.cat([weight, bias[:, None]], dim=1)

    @staticmethod
    def _rename(state_dict, prefix, *_):
        if prefix + "old.body" in state_dict:
            joined = state_dict.pop(prefix + "old.body")
            state_dict[prefix + "body.weight"], state_dict[prefix + "body.bias"] = joined[:, :-1], joined[:, -1]


class Overriding(Plain):
    """Its own ``load_state_dict``, which looks at values too."""

    def state_dict(self, *args, **kwargs):
        found = super().state_dict(*args, **kwargs)
        return {**{f"wrapped.{name}": value for name, value in found.items()}, "version": torch.tensor(3)}

    def load_state_dict(self, state_dict, *args, **kwargs):
        state_dict = dict(state_dict)
        assert state_dict.pop("version").item() == 3
        return super().load_state_dict({k.removeprefix("wrapped."): v for k, v in state_dict.items()}, *args, **kwargs)


class Normalised(Plain):
    """torch's own hook for names of before."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.utils.parametrizations.weight_norm(self.body)


KINDS = {kind.__name__: kind for kind in (Plain, Growing, Renaming, Overriding, Normalised)}


def make(name, seed=0):
    torch.manual_seed(seed)
    return KINDS[name]()


def trainer_of(cls, folder, model, **kwargs):
    args_cls = TrainingArguments
    kwargs = {"save_strategy": "steps", "save_steps": 2, **kwargs}
    if cls is PatrickStarTrainer:
        args_cls, kwargs = PatrickStarTrainingArguments, {"patrickstar": True, **kwargs}
    args = arguments(args_cls, folder, **kwargs)
    return cls(model=model, args=args, train_dataset=ROWS, eval_dataset=ROWS[:8])


BEST = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}


@pytest.mark.parametrize("name", KINDS)
def test_resuming(name, tmp_path):
    """As the stock Trainer does, to the last bit; at the end the first checkpoint is loaded, of the worst loss."""
    runs = []
    for cls in (Trainer, PatrickStarTrainer):
        trainer = trainer_of(cls, tmp_path / cls.__name__, make(name), **BEST)
        run(trainer)
        resumed = trainer_of(cls, tmp_path / f"{cls.__name__}2", make(name, seed=3), **BEST)
        run(resumed, resume_from_checkpoint=str(tmp_path / cls.__name__ / "checkpoint-2"))
        for found in (trainer, resumed):
            assert found.state.best_global_step in (2, 4)
            runs.append((logged(found, "loss"), logged(found, "eval_loss"), found.model))
    for losses, evaluated, model in runs[1:]:
        assert (losses, evaluated) == runs[0][:2]
        assert_same_weights(runs[0][2], model)


def test_what_is_missing_in_a_plain_module(tmp_path, caplog):
    """The Trainer looks at an attribute of transformers' models then; with ours it is a warning."""
    run(trainer_of(PatrickStarTrainer, tmp_path / "run", make("Plain")))
    place = tmp_path / "run/checkpoint-2"
    state = load_file(place / "model.safetensors")
    state["other"] = state.pop("head.weight")
    save_file(state, place / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        run(trainer_of(PatrickStarTrainer, tmp_path / "resumed", make("Plain")), resume_from_checkpoint=str(place))
    for keys in ("missing keys in the checkpoint model loaded: ['head.weight']", "unexpected keys in the checkpoint"):
        assert keys in caplog.text
