"""Reads a configuration file of another project."""

import json
import pathlib
from typing import Any

import yaml

from hf_patrickstar.errors import ConfigError


def read_configuration(name: str) -> dict[str, Any]:
    """Reads JSON, or YAML where the name ends with ``.yaml`` or ``.yml``.

    Args:
        name: The path of the file.

    Raises:
        ConfigError: If it cannot be read, or holds no object.
    """
    path = pathlib.Path(name)
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    try:
        text = path.read_text(encoding="utf-8")
        values = yaml.safe_load(text) if is_yaml else json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read '{name}': {reason}; name a configuration of DeepSpeed or FSDP") from error
    except (json.JSONDecodeError, yaml.YAMLError, RecursionError) as error:
        kind = "YAML" if is_yaml else "JSON"
        raise ConfigError(
            f"'{name}' is not {kind}: {' '.join(str(error).split())}; give a configuration of DeepSpeed, FSDP or "
            "Accelerate"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(f"'{name}' holds {type(values).__name__}, expected an object with keys")
    return _with_text_keys(values)


def _with_text_keys(values: Any) -> Any:
    """YAML has keys of other types, such as numbers and ``on``."""
    if not isinstance(values, dict):
        return values
    return {str(key): _with_text_keys(value) for key, value in values.items()}
