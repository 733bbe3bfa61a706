"""Runs the same script over Accelerate, or over a Trainer, as it is and with chunks, and compares all that it notes."""

import copy
import dataclasses
import functools
import random

import numpy
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from support.live import ROOMY, TIGHT, Notes, assert_same_notes
from support.models import make_rows
from support.trainers import arguments as make_arguments
from support.trainers import smallest_budget
from transformers import Trainer, TrainingArguments

from hf_patrickstar import PatrickStarAccelerator, PatrickStarTrainer, PatrickStarTrainerMixin
from hf_patrickstar.integrations.training_args import PatrickStarArgumentsMixin

CONFIGS = {"tight": TIGHT, "roomy": ROOMY}


def states(optimizer):
    """The states of an optimizer's parameters by number, whatever the order in which they came to be."""
    return {number: dict(sorted(state.items())) for number, state in sorted(optimizer.state_dict()["state"].items())}


def _seed():
    random.seed(7)
    numpy.random.seed(7)
    torch.manual_seed(7)


class Accelerated:
    """Runs ``script(make_accelerator, note)`` with stock Accelerate and with ours.

    Args:
        config: Settings of the engines; ``None`` runs stock Accelerate twice, to try a script itself.
    """

    def __init__(self, config):
        self.config = config

    def __call__(self, script, **settings):
        notes = []
        for is_ours in (False, self.config is not None):
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
            _seed()
            notes.append(Notes())
            script(functools.partial(self._make, is_ours, settings), notes[-1])
        assert_same_notes(*(note.rows for note in notes))

    def _make(self, is_ours, settings, **kwargs):
        if not is_ours:
            return Accelerator(cpu=True, **kwargs)
        return PatrickStarAccelerator(cpu=True, patrickstar_config={**self.config, **settings}, **kwargs)


@functools.cache
def _our_arguments(cls):
    """A class of arguments with the mixin. Trainers pickle their arguments, so it has a name in this module."""
    ours = dataclasses.dataclass(type(f"Our{cls.__name__}", (PatrickStarArgumentsMixin, cls), {}))
    globals()[ours.__name__] = ours
    return ours


class Trainers:
    """Runs ``script(make, note)`` with a stock Trainer and with ours, of the same class otherwise.

    ``make(model, ...)`` makes the Trainer; see ``_make``.

    Args:
        kind: ``"tight"``; ``"plain"`` runs the stock one twice, to try a script itself.
        directory: Where output goes.
    """

    def __init__(self, kind, directory):
        self.kind = kind
        self.directory = directory

    def __call__(self, script):
        notes = []
        for is_ours in (False, self.kind != "plain"):
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
            _seed()
            notes.append(Notes())
            script(functools.partial(self._make, is_ours, self.directory / str(len(notes))), notes[-1])
        assert_same_notes(*(note.rows for note in notes))

    def _make(
        self,
        is_ours,
        directory,
        model,
        own=None,
        base=Trainer,
        arguments=TrainingArguments,
        name="gpt2",
        factor=1.0,
        trainer_kwargs=None,
        **kwargs,
    ):
        """Makes a Trainer.

        Args:
            is_ours: Whether it trains in chunks.
            directory: Where output goes.
            model: The model.
            own: A class with the user's overrides, which goes before the Trainer's.
            base: The Trainer's class.
            arguments: The class of its arguments.
            name: Which rows it trains on.
            factor: How many times the smallest budget that the model can do with chunks get.
            trainer_kwargs: Passed to the Trainer.
            kwargs: Passed to the arguments.
        """
        kwargs = {"max_steps": 3, "per_device_eval_batch_size": 4, **kwargs}
        if is_ours:
            is_recomputed = kwargs.get("gradient_checkpointing", False)
            budget = int(smallest_budget(copy.deepcopy(model), checkpointing=is_recomputed) * factor)
            kwargs["patrickstar"] = True
            kwargs["patrickstar_config"] = {"chunk_budget": budget}
            base = PatrickStarTrainer if base is Trainer else type("Ours", (PatrickStarTrainerMixin, base), {})
            arguments = _our_arguments(arguments)
        cls = base if own is None else type("Own", (own, base), {})
        trainer_kwargs = dict(trainer_kwargs or {})
        if "train_dataset" not in trainer_kwargs:
            rows = make_rows(name, 32)
            trainer_kwargs.update(train_dataset=rows, eval_dataset=rows[:8])
        return cls(model=model, args=make_arguments(arguments, directory, **kwargs), **trainer_kwargs)


def logged(trainer, *keys):
    """What the Trainer logged under these keys, in order; by default losses and norms of gradients."""
    keys = keys or ("loss", "grad_norm", "learning_rate", "eval_loss")
    return [{key: entry[key] for key in keys if key in entry} for entry in trainer.state.log_history]


def note_run(note, trainer):
    """Notes what was logged, and the model and the optimizer's state afterwards."""
    note("logged", logged(trainer))
    note("model", trainer.model.state_dict())
    if trainer.optimizer is not None:
        note("optimizer", states(trainer.optimizer))
