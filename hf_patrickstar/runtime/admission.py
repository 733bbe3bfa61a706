"""Which models can be managed, and in which type; everything that is refused is refused before anything changes."""

from collections.abc import Sequence
from typing import Any

import torch

from hf_patrickstar.errors import ConfigError, EngineError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_model(model: torch.nn.Module) -> None:
    """Refuses a model that cannot work in chunks.

    Args:
        model: The model, not yet managed or managed already.

    Raises:
        ConfigError: If it is wrapped, compiled, quantized, sharded, or uses reentrant checkpointing.
    """
    if isinstance(model, torch.nn.DataParallel):
        raise ConfigError("the model is wrapped in nn.DataParallel; pass the model itself (model.module)")
    if hasattr(model, "_orig_mod"):
        raise ConfigError("the model is compiled, which traces the engine's hooks away; pass the model itself")
    for name, module in model.named_modules():
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if getattr(checkpoint, "keywords", {}).get("use_reentrant"):
            kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
            raise ConfigError(
                f"module '{name}' uses reentrant checkpointing, which hides the backward of parameters; call "
                f"model.{kind}_checkpointing_enable({kind}_checkpointing_kwargs={{'use_reentrant': False}})"
            )
    for name, parameter in model.named_parameters():
        if is_left_out(parameter):
            continue
        if type(parameter).__name__ in ("Params4bit", "Int8Params"):
            raise ConfigError(
                f"parameter '{name}' is quantized by bitsandbytes ({type(parameter).__name__}), which the engine does "
                "not manage; load the model without quantization"
            )
        if not parameter.dtype.is_floating_point:
            raise ConfigError(
                f"parameter '{name}' has type {parameter.dtype}, only floating types are managed; make it a buffer"
            )
        if type(parameter.data).__name__ == "DTensor":
            raise ConfigError(f"parameter '{name}' is a DTensor; load the model without tensor parallelism")


def check_values(names: Sequence[str], parameters: Sequence[torch.nn.Parameter]) -> None:
    """Refuses parameters whose values cannot be moved into chunks.

    Raises:
        EngineError: If one is on the meta device.
        ConfigError: If two are over the same memory.
    """
    places: dict[tuple[int, int], str] = {}
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.device.type == "meta":
            raise EngineError(f"parameter '{name}' is on the meta device and has no value; load weights first")
        if not parameter.numel() or parameter.untyped_storage().device.type == "meta":
            continue  # nothing there, or values that are still to be read
        place = (parameter.untyped_storage()._cdata, int(parameter.storage_offset()))
        other = places.setdefault(place, name)
        if other != name:
            raise ConfigError(
                f"parameters '{other}' and '{name}' are two parameters over the same memory; tie them by assigning one "
                "parameter to both modules (model.tie_weights() does)"
            )


def choose_dtype(
    model: torch.nn.Module, setting: str, precision: str, parameters: Sequence[torch.nn.Parameter]
) -> tuple[torch.dtype, str]:
    """Decides the type of parameters on the compute device.

    Args:
        model: The model.
        setting: ``dtype`` of the configuration.
        precision: ``"no"``, ``"bf16"`` or ``"fp16"``: what the Trainer or Accelerate was told.
        parameters: The model's parameters.

    Returns:
        The type, and the reason in a few words.

    Raises:
        ConfigError: If the precision is not known, or the model cannot compute in the type.
    """
    if setting != "auto":
        dtype, reason = DTYPES[setting], f"dtype={setting}"
    elif precision in DTYPES:
        dtype, reason = DTYPES[precision], f"dtype=auto: --{precision}"
    elif precision != "no":
        raise ConfigError(f"precision '{precision}' is not supported; use bf16, fp16 or no")
    else:
        numel: dict[torch.dtype, int] = {}
        for parameter in parameters:
            numel[parameter.dtype] = numel.get(parameter.dtype, 0) + parameter.numel()
        largest = max(numel, key=lambda kind: numel[kind], default=torch.float32)
        dtype = largest if largest in DTYPES.values() else torch.float32
        reason = "dtype=auto: most of the model was loaded in it"
    for name, module in model.named_modules():
        if dtype is not torch.float32 and isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            raise ConfigError(
                f"module '{name}' ({type(module).__name__}) keeps running statistics in fp32 and cannot compute with "
                "16-bit parameters; train in fp32 (dtype='fp32', without --bf16 and --fp16)"
            )
    return dtype, reason


def is_left_out(parameter: Any) -> bool:
    """Whether a parameter has no place in a chunk yet: a lazy one, whose shape its first forward tells."""
    return torch.nn.parameter.is_lazy(parameter)


def is_recomputed(module: torch.nn.Module) -> bool:
    """Whether transformers recomputes this layer in backward; known by name, since only integrations import it."""
    kinds = {kind.__name__ for kind in type(module).__mro__}
    return "GradientCheckpointingLayer" in kinds and bool(getattr(module, "gradient_checkpointing", False))
