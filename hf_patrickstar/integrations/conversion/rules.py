"""One rule for each key of another project's configuration: what the key becomes here."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any


class Kind(enum.Enum):
    """What a key becomes."""

    SETTING = "setting"
    """A key of ``--patrickstar_config``."""
    ARGUMENT = "argument"
    """A command line argument of the Trainer."""
    GONE = "gone"
    """Nothing: the engine decides it, or there is nothing to decide."""
    MISSING = "missing"
    """A feature that this package does not have."""


def as_given(value: Any) -> Any:
    """The value as it is."""
    return value


def never(value: Any) -> bool:
    """Whether a value cannot be carried over: each can."""
    return False


def if_asked(value: Any) -> bool:
    """Whether a value switches a feature on; a section does unless it says ``enabled: false``."""
    if isinstance(value, dict):
        return if_asked(value["enabled"]) if "enabled" in value else True
    if isinstance(value, str):
        return value.strip().lower() not in ("", "auto", "none", "no", "off", "false")
    return bool(value)


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """What one key becomes.

    Attributes:
        key: The path of the key, with dots; a rule for a section holds for every key in it that has no rule.
        kind: What the key becomes.
        why: The explanation, one sentence or two.
        name: The key of ``--patrickstar_config``, or the argument with its dashes.
        make: Makes the value here from the value there, or ``None`` where there is nothing to set. Of a feature that
            this package does not have: whether the value asks for it.
        cannot: Whether a value of a setting asks for something that this package does not have.
    """

    key: str
    kind: Kind
    why: str
    name: str = ""
    make: Callable[[Any], Any] = as_given
    cannot: Callable[[Any], bool] = never


def setting(
    key: str, name: str, why: str, make: Callable[[Any], Any] = as_given, cannot: Callable[[Any], bool] = never
) -> Rule:
    """A rule for a key that becomes a key of ``--patrickstar_config``."""
    return Rule(key, Kind.SETTING, why, name, make, cannot)


def argument(key: str, name: str, why: str, make: Callable[[Any], Any] = as_given) -> Rule:
    """A rule for a key that becomes an argument of the Trainer."""
    return Rule(key, Kind.ARGUMENT, why, name, make)


def gone(key: str, why: str) -> Rule:
    """A rule for a key that is not needed."""
    return Rule(key, Kind.GONE, why)


def missing(key: str, why: str, asks: Callable[[Any], Any] = if_asked) -> Rule:
    """A rule for a feature that this package does not have."""
    return Rule(key, Kind.MISSING, why, make=asks)
