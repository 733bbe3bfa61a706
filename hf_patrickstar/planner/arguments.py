"""What people give to ``plan`` from Python: values of types that it cannot take get a sentence."""

import copy
import numbers
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.machine import Machine


def check_types(*, model: Any, machine: Any, optimizer: Any, max_norm: Any, **others: Any) -> str | PretrainedConfig:
    """Checks types of the arguments of ``plan``.

    Args:
        model: The model.
        machine: The machine.
        optimizer: The name of an optimizer.
        max_norm: A number, or ``None``.
        others: Whole numbers, and mappings under the names ``settings`` and ``adapters``; ``None`` where none is given.

    Returns:
        The model, as a name or a configuration.

    Raises:
        ConfigError: If an argument has a type that makes no sense.
    """
    if not isinstance(machine, (str, Machine)):
        raise ConfigError(f"machine: it must be the name of a machine, a file or a Machine, got {_said(machine)}")
    if not isinstance(optimizer, str):
        raise ConfigError(f"optimizer: it must be the name of a class of torch.optim, got {_said(optimizer)}")
    if max_norm is not None and not _is_number(max_norm, numbers.Real):
        raise ConfigError(f"max_norm: it must be a number, or None for no clipping, got {_said(max_norm)}")
    for name, value in others.items():
        is_mapping = name in ("settings", "adapters")
        is_right = isinstance(value, Mapping) if is_mapping else _is_number(value, numbers.Integral)
        if value is not None and not is_right:
            what = "a dictionary" if is_mapping else "a whole number"
            raise ConfigError(f"{name}: it must be {what}, got {_said(value)}")
    return _model_of(model)


def _model_of(model: Any) -> str | PretrainedConfig:
    if isinstance(model, (str, PretrainedConfig)):
        return model
    if not isinstance(model, torch.nn.Module) or not isinstance(getattr(model, "config", None), PretrainedConfig):
        raise ConfigError(
            "model: it must be a model id, a directory, a config.json, TYPE:KEY=VALUE,..., a configuration of "
            f"transformers or a model that has one, got {_said(model)}"
        )
    if hasattr(model, "peft_config"):
        raise ConfigError(
            "model: it has adapters of PEFT already; give the configuration of its base, and those of the adapters as "
            "adapters={'r': 8, ...}"
        )
    config: Any = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]  # says what the model is trained for
    return config  # type: ignore[no-any-return]


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _said(value: Any) -> str:
    """A value in a sentence; large ones by their type."""
    text = repr(value)
    return text if len(text) <= 40 and "\n" not in text else f"an object of type {type(value).__name__}"
