"""Settings of the engine on a command line: ``--set KEY=VALUE``."""

import contextlib
import json
from typing import Any

from hf_patrickstar.errors import ConfigError

_WORDS = ("true", "false", "null")


def settings_of(texts: list[str]) -> dict[str, Any]:
    """Reads what ``--set`` was given.

    Raises:
        ConfigError: If one is no setting.
    """
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set: '{text}' is no setting; write KEY=VALUE")
        settings[key] = _value(value)
    return settings


def _value(text: str) -> Any:
    """A value as in JSON, with any case of true, false and null; everything else is text."""
    with contextlib.suppress(ValueError):
        return json.loads(text.lower() if text.lower() in _WORDS else text)
    return text
