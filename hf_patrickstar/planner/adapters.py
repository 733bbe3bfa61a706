"""Adapters of PEFT that are trained in place of a model, by what a person writes."""

import difflib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import torch

from hf_patrickstar.errors import ConfigError


def parse_lora(text: str) -> Any:
    """A configuration of LoRA from ``r=16,targets=q_proj+v_proj,alpha=32,dropout=0.1``.

    Args:
        text: What was written. All is optional; targets are all linear layers by default.

    Raises:
        ConfigError: If it makes no sense, or PEFT is not installed.
    """
    peft = _import_peft()
    keys: dict[str, Callable[[str], Any]] = {
        "r": int,
        "alpha": float,
        "dropout": float,
        "targets": lambda names: names.split("+"),
    }
    given: dict[str, Any] = {"r": 16, "targets": "all-linear"}
    for part in filter(None, text.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in keys or not equals:
            near = difflib.get_close_matches(key, keys, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else f"; known are {', '.join(keys)}"
            raise ConfigError(f"--lora: '{part}' is no setting of LoRA{hint}")
        try:
            given[key] = keys[key](value)
        except ValueError:
            raise ConfigError(f"--lora: '{key}' must be a number, got '{value}'") from None
    if given["r"] < 1:
        raise ConfigError(f"--lora: r must be at least 1, got {given['r']}")
    return peft.LoraConfig(
        r=given["r"],
        target_modules=given["targets"],
        lora_alpha=given.get("alpha", 2 * given["r"]),
        lora_dropout=given.get("dropout", 0.0),
    )


def read_adapter(name: str) -> Any:
    """The configuration of an adapter from a file, or from the ``adapter_config.json`` of a directory.

    Args:
        name: The path.

    Raises:
        ConfigError: If it cannot be read, or PEFT is not installed.
    """
    peft = _import_peft()
    path = pathlib.Path(name)
    path = path / "adapter_config.json" if path.is_dir() else path
    try:
        return peft.PeftConfig.from_peft_type(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).strip().splitlines()[0]
        raise ConfigError(f"--peft: '{path}' cannot be read as the configuration of an adapter: {reason}") from error


def with_adapter(model: torch.nn.Module, adapter: Any) -> torch.nn.Module:
    """The model with an adapter, which alone is trained; called under fake tensors.

    Args:
        model: The model.
        adapter: What ``parse_lora`` or ``read_adapter`` returned.

    Raises:
        ConfigError: If the adapter does not suit the model.
    """
    try:
        wrapped: torch.nn.Module = _import_peft().get_peft_model(model, adapter)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"the adapter does not suit the model: {str(error).strip().splitlines()[0]}") from error
    return wrapped


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError("adapters are those of PEFT, which is not installed; run pip install peft") from error
    return peft
