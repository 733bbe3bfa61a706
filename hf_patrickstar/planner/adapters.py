"""Adapters over a frozen base, as people write them: ``r=16,targets=q_proj+v_proj``, or a configuration of PEFT."""

import importlib.util
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hf_patrickstar.errors import ConfigError

_KEYS = {"r": "r", "alpha": "lora_alpha", "targets": "target_modules", "rank": "r", "layers": "layers_to_transform"}
_FILE = "adapter_config.json"


def has_peft() -> bool:
    """Whether PEFT is installed; it is imported only where adapters are planned."""
    return importlib.util.find_spec("peft") is not None


def parse_lora(text: str) -> dict[str, Any]:
    """Reads ``--lora``: ``r=16,alpha=32,targets=q_proj+v_proj``; what is missing is PEFT's default.

    Args:
        text: Settings. ``targets`` are names of modules, or ``all-linear``; by default those that PEFT knows for the
            type of the model.

    Returns:
        Fields of ``peft.LoraConfig``, as ``adapter_config.json`` has them.

    Raises:
        ConfigError: If a setting is unknown, or its value makes no sense.
    """
    values: dict[str, Any] = {"peft_type": "LORA"}
    for part in filter(None, text.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in _KEYS or not value:
            raise ConfigError(
                f"--lora: '{part}' is no setting of adapters; write r=16,alpha=32,targets=q_proj+v_proj, each of them "
                "optional, or give PEFT's own configuration with --peft"
            )
        values[_KEYS[key]] = _value(key, value)
    return values


def _value(key: str, value: str) -> Any:
    if key == "targets":
        return value if value == "all-linear" else value.split("+")
    numbers = [int(number) if number.isdecimal() else -1 for number in value.split("+")]
    if key == "layers" and min(numbers) >= 0:
        return numbers
    if len(numbers) != 1 or numbers[0] < 1:
        raise ConfigError(f"--lora: {key}={value} must be a whole number of at least 1")
    return numbers[0]


def read_peft(path: str) -> dict[str, Any]:
    """Reads ``--peft``: the fields of an ``adapter_config.json``.

    Args:
        path: The file, or the directory that has it.

    Raises:
        ConfigError: If there is none, or it is no configuration of PEFT.
    """
    file = pathlib.Path(path)
    file = file / _FILE if file.is_dir() else file
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--peft: '{file}' cannot be read as a configuration of PEFT: {error}; name an adapter_config.json or "
            "its directory"
        ) from error
    if not isinstance(values, dict) or "peft_type" not in values:
        raise ConfigError(
            f"--peft: '{file}' is no configuration of PEFT: it has no 'peft_type'; name an adapter_config.json or "
            "its directory"
        )
    return values


def with_adapters(base: Any, values: Mapping[str, Any]) -> torch.nn.Module:
    """Wraps a model on the meta device with adapters; everything else in it is frozen.

    Args:
        base: The model of transformers.
        values: Fields of a configuration of PEFT.

    Raises:
        ConfigError: If PEFT cannot wrap this model so.
    """
    config = config_of(values)
    import peft

    try:
        with unset_fake_temporarily(), torch.device("meta"):
            return peft.get_peft_model(base, config)  # type: ignore[no-any-return]
    except (ValueError, KeyError, TypeError) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"PEFT cannot add these adapters to '{type(base).__name__}': {said}; name other modules (--lora "
            "targets=...)"
        ) from error


def config_of(values: Mapping[str, Any]) -> Any:
    """The configuration of PEFT with these fields.

    Args:
        values: The fields.

    Raises:
        ConfigError: If PEFT is not installed, or does not understand them.
    """
    if not has_peft():
        raise ConfigError("adapters are planned with PEFT, which is not installed: pip install 'hf_patrickstar[peft]'")
    import peft

    given = dict(values)
    kind = str(given.pop("peft_type", "LORA"))
    given.pop("inference_mode", None)  # saved adapters say that they are not trained
    known: Mapping[str, Any] = peft.PEFT_TYPE_TO_CONFIG_MAPPING  # type: ignore[assignment]
    if kind not in known:
        names = ", ".join(sorted(getattr(key, "value", key) for key in known))
        raise ConfigError(f"adapters: PEFT has no type '{kind}'; known are {names}")
    try:
        return known[kind](**given)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"adapters: PEFT refuses this configuration: {str(error).splitlines()[0]}; change it in --lora or in the "
            "file of --peft"
        ) from error
