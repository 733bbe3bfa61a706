"""Training with the optimizers of bitsandbytes: models with tensors of all kinds, runs apart, flat states."""

import torch
from support import models
from support.models import make_rows
from support.trainers import arguments, run
from transformers import Trainer, TrainingArguments

from hf_patrickstar import PatrickStarTrainer, PatrickStarTrainingArguments

LEAST_NUMEL = 4096
"""Smaller tensors have fp32 states, as the library decides."""
BLOCK_NUMEL = 256
"""Elements of a state with one scale."""
WRAPPED = "__bnb_optimizer_quant_state__"
"""The name under which the library has what it keeps of a parameter, in its state dictionaries."""


def llama():
    """No tied embedding; of its large tensors some end in the middle of a block, and one has exactly 4096 elements."""
    return models.llama(hidden_size=64, intermediate_size=131)


def gpt2():
    """A tied embedding, and large tensors with odd numbers of elements."""
    return models.gpt2(n_embd=65, n_layer=2, n_head=5)


MODELS = {"llama": llama, "gpt2": gpt2}


def make(name, dtype=torch.float32, seed=0):
    """The same weights for the same seed."""
    torch.manual_seed(seed)
    return MODELS[name]().to(dtype)


def begin_apart():
    """Makes the library forget what it was told of parameters.

    It keeps that for the whole process, by identity and by place in the groups, so a run would train with what another
    model was given before.
    """
    from bitsandbytes.optim import GlobalOptimManager

    GlobalOptimManager.get_instance().initialize()


def flat(state_dict):
    """The states of a state dictionary, by parameter, without the library's wrapping."""
    found = {}
    for number, state in state_dict["state"].items():
        found[number] = {key: value for key, value in state.items() if key != WRAPPED}
        assert found[number].keys().isdisjoint(state.get(WRAPPED, {}))
        found[number] |= state.get(WRAPPED, {})
    return found


def trained(tmp_path, model, config=None, *, rows=64, train_kwargs=None, trainer_kwargs=None, callbacks=(), **kwargs):
    """A trainer that has trained a model, apart from what was trained before.

    Args:
        config: The settings; ``None`` means the stock Trainer.
    """
    begin_apart()
    cls, args_cls = Trainer, TrainingArguments
    if config is not None:
        cls, args_cls = PatrickStarTrainer, PatrickStarTrainingArguments
        kwargs |= {"patrickstar": True, "patrickstar_config": config}
    trainer = cls(
        model=model,
        args=arguments(args_cls, tmp_path, **kwargs),
        train_dataset=make_rows("llama", rows),
        callbacks=[*callbacks],
        **(trainer_kwargs or {}),
    )
    run(trainer, **(train_kwargs or {}))
    return trainer
