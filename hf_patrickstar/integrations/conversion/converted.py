"""What a configuration of another project becomes: settings, arguments, and an explanation of each key."""

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterator
from typing import Any

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.integrations.conversion import accelerate, deepspeed, fsdp
from hf_patrickstar.integrations.conversion.rules import Kind, Rule, if_asked

RESUME = {
    "deepspeed": "A DeepSpeed checkpoint (global_step*/) cannot be resumed. Weights: convert them with its "
    "zero_to_fp32.py and give the result as --model_name_or_path. Optimizer states are not read: training begins "
    "with new ones.",
    "fsdp": "An FSDP checkpoint (pytorch_model_fsdp*, optimizer_0/) cannot be resumed. Weights: convert them with "
    "'accelerate merge-weights' and give the result as --model_name_or_path. Optimizer states are not read: training "
    "begins with new ones.",
}
"""How to go on from checkpoints of each source."""


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """What one key becomes.

    Attributes:
        key: The path of the key, as the file has it.
        value: Its value there.
        becomes: A setting or an argument with its value; empty if there is nothing to set.
        why: The explanation.
        is_lost: Whether the key asks for a feature that this package does not have.
    """

    key: str
    value: Any
    becomes: str
    why: str
    is_lost: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Converted:
    """A configuration of another project as this package takes it.

    Attributes:
        source: ``"deepspeed"``, ``"fsdp"`` or ``"accelerate"``.
        settings: For ``--patrickstar_config``.
        arguments: Arguments of the Trainer with their values.
        lines: One for each key.
        resume: How to go on from checkpoints.
    """

    source: str
    settings: dict[str, Any]
    arguments: tuple[str, ...]
    lines: tuple[Line, ...]
    resume: tuple[str, ...]

    @property
    def lost(self) -> tuple[Line, ...]:
        """The lines of what is not carried over."""
        return tuple(line for line in self.lines if line.is_lost)


def convert(values: dict[str, Any]) -> Converted:
    """Converts a configuration of DeepSpeed, of FSDP (``--fsdp_config``) or of Accelerate.

    Args:
        values: The configuration.

    Returns:
        What it becomes. ``PatrickStarConfig`` accepts its settings.
    """
    source, rules, normalized = _find_source(values)
    settings: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    lines = []
    for key, value in _flat(values):
        line, found = _line(key, value, values, rules, normalized)
        lines.append(line)
        for name, made in found:
            if name.startswith("--"):
                arguments[name] = made
            else:
                settings[name] = bool(settings.get(name)) or made if isinstance(made, bool) else made
    PatrickStarConfig.from_any(settings)
    told = ("deepspeed", "fsdp") if source == "accelerate" else (source,)
    resume = tuple(RESUME[name] for name in told if source != "accelerate" or f"{name}_config" in values)
    return Converted(
        source, settings, tuple(f"{name} {made}".strip() for name, made in arguments.items()), tuple(lines), resume
    )


def _find_source(values: dict[str, Any]) -> tuple[str, dict[str, Rule], Callable[[str], str]]:
    """The project whose keys these are: the one that knows the most of them."""
    if {"distributed_type", "deepspeed_config", "fsdp_config", "compute_environment"} & values.keys():
        return "accelerate", {rule.key: rule for rule in accelerate.RULES}, accelerate.normalized
    of_fsdp = {rule.key: rule for rule in fsdp.RULES}
    of_deepspeed = {rule.key: rule for rule in deepspeed.RULES}
    sections = {key.split(".")[0] for key in of_deepspeed}
    num_of_fsdp = sum(fsdp.normalized(key) in of_fsdp for key in values)
    if num_of_fsdp > sum(key in sections and key not in of_fsdp for key in values):
        return "fsdp", of_fsdp, fsdp.normalized
    return "deepspeed", of_deepspeed, deepspeed.normalized


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _find_rule(key: str, rules: dict[str, Rule]) -> Rule | None:
    """The rule for a key, or for the nearest section around it."""
    while key not in rules:
        key, dot, _ = key.rpartition(".")
        if not dot:
            return None
    return rules[key]


def _line(
    key: str, value: Any, values: dict[str, Any], rules: dict[str, Rule], normalized: Callable[[str], str]
) -> tuple[Line, list[tuple[str, Any]]]:
    known = normalized(key)
    rule = _find_rule(known, rules)
    if rule is None and any(name.startswith(f"{known}.") for name in rules):
        return Line(key, value, "", "There is nothing in the section."), []
    if rule is None:
        near = difflib.get_close_matches(known, rules, n=1, cutoff=0.0)[0]
        return Line(
            key, value, "", f"Unknown key; the nearest known one is '{near}'. Nothing is carried over.", True
        ), []
    if rule.kind is Kind.GONE:
        return Line(key, value, "", rule.why), []
    if rule.kind is Kind.MISSING:
        section = value if rule.key == known else _section(values, rule.key)
        is_asked = section != "auto" and bool(rule.make(section))
        return Line(key, value, "", rule.why, is_asked), []
    if value == "auto":
        where = f"'{rule.name}' stays 'auto'" if rule.kind is Kind.SETTING else f"{rule.name}, as your command has it"
        return Line(key, value, where, rule.why), []
    return _made(key, value, rule)


def _made(key: str, value: Any, rule: Rule) -> tuple[Line, list[tuple[str, Any]]]:
    """The line of a key that becomes a setting or an argument."""
    made = rule.make(value)
    if rule.kind is Kind.SETTING:
        if made is None or made == "":
            return Line(key, value, "", rule.why, rule.cannot(value)), []
        becomes = f"{rule.name} = {json.dumps(made)}"
        return Line(key, value, becomes, rule.why, rule.cannot(value)), [(rule.name, made)]
    if made is False or (made is None and not if_asked(value)):
        return Line(key, value, "", f"{rule.why} Its value asks for nothing."), []
    if made is None:
        why = f"{rule.why} There is no counterpart of {json.dumps(value, default=str)}."
        return Line(key, value, "", why, True), []
    text, name = ("", rule.name) if made is True else (str(made), rule.name)
    found = [(name, text)] if name else [(text, "")]
    if rule.key == "optimizer.params.betas":
        found.append(("--adam_beta2", str(value[1])))
    return Line(key, value, ", ".join(f"{a} {b}".strip() for a, b in found), rule.why), found


def _section(values: dict[str, Any], path: str) -> Any:
    found: Any = values
    for key in path.split("."):
        found = found.get(key, {}) if isinstance(found, dict) else {}
    return found
