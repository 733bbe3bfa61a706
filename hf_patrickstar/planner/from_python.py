"""``hf_patrickstar.plan``: what ``hf-patrickstar plan`` does, from Python.

What people give comes by name or as ``TrainingArguments``; wrong types get a sentence.
"""

import contextlib
import copy
import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any, TypedDict, Unpack

import torch
from transformers import PretrainedConfig, Trainer, TrainingArguments

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.machine import Machine
from hf_patrickstar.memory.disk import resolve_disk_budget
from hf_patrickstar.planner.advice import advise, largest_that_fit
from hf_patrickstar.planner.planning import arrange, plan_for_runs
from hf_patrickstar.planner.training_plan import Plan

OF_THE_MACHINE = ("device_budget", "host_budget", "disk_budget", "disk_path", "pin_memory", "machine")
"""Settings that say what there is, which the planned machine does."""
_MAPPINGS = ("settings", "adapters")
_WHOLE_NUMBERS = ("batch_size", "length", "num_micro_batches", "world_size", "host_cores", "bits")


class Asked(TypedDict, total=False):
    """How a model is trained; see ``plan``."""

    task: str | None
    batch_size: int
    length: int | None
    num_micro_batches: int
    world_size: int
    checkpointing: bool
    dtype: str
    optimizer: str
    max_norm: float | None
    device_memory: int | str | None
    host_memory: int | str | None
    host_cores: int | None
    disk_memory: int | str | None
    settings: Mapping[str, Any] | None
    adapters: Mapping[str, Any] | None
    bits: int | None


def plan(
    model: str | PretrainedConfig | torch.nn.Module,
    machine: str | Machine,
    *,
    arguments: TrainingArguments | None = None,
    advice: bool = False,
    **asked: Unpack[Asked],
) -> Plan:
    """Plans a training without doing it: no weights are read, and no accelerator is needed.

    Args:
        model: A model id, a directory, a JSON file, ``TYPE:KEY=VALUE,...``, a configuration, or a model that has one.
        machine: A known machine, a JSON file of ``hf-patrickstar env --measure --json``, ``"this"`` (which is measured
            for some seconds, in as many processes), or a ``Machine``.
        arguments: ``TrainingArguments`` of the training, those of this package or of transformers: they say what is not
            given by name below, setting by setting, but for ``task``, ``length``, ``adapters`` and ``bits``.
        advice: Whether changes are planned, too, and the largest batch and length that fit: ``Plan.changes``,
            ``Plan.largest``. It takes several times as long.
        **asked: How it is trained.
            ``task``: what the model is trained for; by default what it was saved for.
            ``batch_size``: sequences of a micro-batch on each process; by default 1.
            ``length``: tokens of a sequence; by default as many as the model has positions, at most 4096.
            ``num_micro_batches``: micro-batches of a step; by default 1.
            ``world_size``: processes, each on a device of the machine; by default 1.
            ``checkpointing``: whether activations are computed again in backward; by default not.
            ``dtype``: ``dtype`` of the engine's settings; by default ``"bf16"``.
            ``optimizer``: the name of a class of ``torch.optim``, or of one of bitsandbytes as ``--optim`` has it
            (``"adamw_8bit"``); by default ``"adamw"``.
            ``max_norm``: gradients are clipped to this norm, by default 1; ``None`` for no clipping.
            ``device_memory``: bytes of the device that training may take; by default 95 % of what the machine has.
            ``disk_memory``: bytes of a drive that masters and optimizer states of each process may take, where neither
            the device nor the host has room; by default none.
            ``host_memory``: bytes of the host that each process may take; by default 90 % of what the machine has for
            it.
            ``host_cores``: cores of the host for each process; by default all that the machine has for it.
            ``settings``: further settings of the engine, as in ``patrickstar_config``.
            ``adapters``: fields of PEFT's ``adapter_config.json``: adapters, of LoRA by default, over a frozen model.
            ``bits``: 4 or 8, for a frozen model that bitsandbytes packs into so many bits.

    Raises:
        ConfigError: If an argument makes no sense.
    """
    said = {} if arguments is None else asked_by(arguments, has_optimizer="optimizer" in asked)
    given: dict[str, Any] = {**said, **asked}
    model = check_types(model, machine, given)
    if said and given["settings"] is not None:
        given["settings"] = {**said["settings"], **given["settings"]}
    subject, training = arrange(model, machine, **given)
    if getattr(arguments, "use_liger_kernel", False) and subject.task == "causal-lm":  # see [Note: planning a script]
        training = dataclasses.replace(training, settings={"chunked_loss": True, **training.settings})
    found, _ = plan_for_runs(subject, training)
    if not advice:
        return found
    return dataclasses.replace(advise(subject, training, found), largest=largest_that_fit(found, subject, training))


def check_types(model: Any, machine: Any, asked: Mapping[str, Any]) -> str | PretrainedConfig:
    """Checks types of the arguments of ``plan``.

    Args:
        model: The model.
        machine: The machine.
        asked: How it is trained, as far as it is said; see ``Asked``.

    Returns:
        The model, as a name or a configuration.

    Raises:
        ConfigError: If an argument has a type that makes no sense.
    """
    optimizer, max_norm = asked.get("optimizer", ""), asked.get("max_norm")
    if not isinstance(machine, (str, Machine)):
        raise ConfigError(f"machine: it must be the name of a machine, a file or a Machine, got {_said(machine)}")
    if not isinstance(optimizer, str):
        raise ConfigError(
            f"optimizer: it must be the name of a class of torch.optim, or of --optim, got {_said(optimizer)}"
        )
    if max_norm is not None and not _is_number(max_norm, numbers.Real):
        raise ConfigError(f"max_norm: it must be a number, or None for no clipping, got {_said(max_norm)}")
    for name, value in asked.items():
        if value is None:
            continue
        if name in _MAPPINGS and not isinstance(value, Mapping):
            raise ConfigError(f"{name}: it must be a dictionary, got {_said(value)}")
        if name in _WHOLE_NUMBERS and not _is_number(value, numbers.Integral):
            raise ConfigError(f"{name}: it must be a whole number, got {_said(value)}")
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


def disk_memory_of(settings: Mapping[str, Any], world_size: int) -> int | None:
    """What ``plan`` is to be asked for, of the disk, with these settings of the engine; ``None`` for no disk.

    Raises:
        ConfigError: If the directories of the settings are not here, which have to say how much is free.
    """
    given = PatrickStarConfig.from_any({name: settings[name] for name in settings if name.startswith("disk_")})
    return None if given.disk_path is None else resolve_disk_budget(given.disk_path, given.disk_budget, world_size)


def asks_for_checkpointing(args: Any) -> bool:
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
        "checkpointing": asks_for_checkpointing(given),
        "dtype": settings.pop("dtype", "auto"),
        "max_norm": given.max_grad_norm or float("inf"),  # the Trainer computes the norm all the same
        "device_memory": settings.get("device_budget"),
        "host_memory": settings.get("host_budget"),
        "disk_memory": disk_memory_of(settings, given.world_size),
    }
    if not has_optimizer:
        found["optimizer"] = _optimizer_of(given)
    return found | {"settings": {key: value for key, value in settings.items() if key not in OF_THE_MACHINE}}


def _optimizer_of(args: Any) -> str:
    kind: Any = None
    with contextlib.suppress(ImportError, ValueError):  # of a library that is not installed here
        kind = Trainer.get_optimizer_cls_and_kwargs(args)[0]
    name = getattr(kind, "__name__", "")
    if str(getattr(kind, "__module__", "")).startswith("bitsandbytes."):
        return str(getattr(args.optim, "value", args.optim))
    if kind is None or getattr(torch.optim, name, None) is not kind:
        raise ConfigError(
            f"--optim {getattr(args.optim, 'value', args.optim)} is not in torch.optim, and of other libraries a plan "
            "makes only those of bitsandbytes, where it is installed; plan the script that makes it (hf-patrickstar "
            "plan ... -- SCRIPT), or pass optimizer='adamw' for one with two states of each parameter"
        )
    return str(name)
