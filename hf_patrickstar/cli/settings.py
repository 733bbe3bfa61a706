"""Settings of the engine on a command line: ``--set KEY=VALUE``."""

from typing import Any

from hf_patrickstar.errors import ConfigError


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
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.isdecimal() else text
