"""How ``TrainingArguments`` say that a model is trained, in the words of ``plan``."""

import contextlib
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.errors import ConfigError

OF_THE_MACHINE = ("device_budget", "host_budget", "pin_memory", "machine")
"""Settings that say what there is, which the planned machine does."""


def settings_of(args: Any) -> dict[str, Any]:
    """The settings of the engine that differ from their defaults, with the precision that the arguments ask for.

    Args:
        args: ``TrainingArguments`` of any class.
    """
    defaults = PatrickStarConfig().to_dict()
    config = PatrickStarConfig.from_any(getattr(args, "patrickstar_config", None)).to_dict()
    settings = {key: value for key, value in config.items() if value != defaults[key]}
    precision = str(getattr(args, "patrickstar_precision", None) or args.mixed_precision or "no")
    if config["dtype"] == "auto" and precision != "no":
        settings["dtype"] = precision
    return settings


def is_checkpointing(args: Any) -> bool:
    """Whether activations are computed again in backward; transformers has two names for it.

    Args:
        args: ``TrainingArguments`` of any class.
    """
    return bool(getattr(args, "activation_checkpointing", None) or getattr(args, "gradient_checkpointing", None))


def asked_by(arguments: Any, *, has_optimizer: bool = False) -> dict[str, Any]:
    """What ``plan`` is to be asked for a training with these arguments.

    A batch has as many sequences as ``per_device_train_batch_size``, and a step as many processes as the arguments
    were made in. What the arguments do not say, as the length of sequences, is left out.

    Args:
        arguments: ``TrainingArguments``, or a subclass such as ``PatrickStarTrainingArguments``.
        has_optimizer: Whether the optimizer is known already, so that ``--optim`` is not asked for.

    Raises:
        ConfigError: If they are of another type, or their optimizer is none that a plan can make.
    """
    if not isinstance(arguments, TrainingArguments):
        raise ConfigError(
            f"arguments of type {type(arguments).__name__} are not TrainingArguments of transformers; pass their "
            "values by name instead (batch_size=4, ...)"
        )
    given: Any = arguments
    settings = settings_of(given)
    found = {
        "batch_size": given.per_device_train_batch_size,
        "num_micro_batches": given.gradient_accumulation_steps,
        "world_size": given.world_size,
        "checkpointing": is_checkpointing(given),
        "dtype": settings.pop("dtype", "auto"),
        "max_norm": given.max_grad_norm or float("inf"),  # the Trainer computes the norm all the same
        "device_memory": settings.get("device_budget"),
        "host_memory": settings.get("host_budget"),
    }
    if not has_optimizer:
        found["optimizer"] = _optimizer_of(given)
    return found | {"settings": {key: value for key, value in settings.items() if key not in OF_THE_MACHINE}}


def _optimizer_of(args: Any) -> str:
    kind: Any = None
    with contextlib.suppress(ImportError, ValueError):  # of a library that is not installed here
        kind = Trainer.get_optimizer_cls_and_kwargs(args)[0]
    name = getattr(kind, "__name__", "")
    if kind is None or getattr(torch.optim, name, None) is not kind:
        raise ConfigError(
            f"--optim {getattr(args.optim, 'value', args.optim)} is not in torch.optim, and a plan makes "
            "those alone; plan the script that makes it (hf-patrickstar plan ... -- SCRIPT), or pass optimizer='adamw' "
            "for one with two states of each parameter"
        )
    return str(name)
