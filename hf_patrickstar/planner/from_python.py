"""``hf_patrickstar.plan``: what ``hf-patrickstar plan`` does, from Python."""

import dataclasses
from typing import Any, Unpack

import torch
from transformers import PretrainedConfig, TrainingArguments

from hf_patrickstar.machine import Machine
from hf_patrickstar.planner.advice import advise, largest_that_fit
from hf_patrickstar.planner.arguments import Asked, asked_by, check_types
from hf_patrickstar.planner.planning import arrange, plan_for_runs
from hf_patrickstar.planner.training_plan import Plan


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
