"""Which models can be managed; everything that is refused is refused before anything changes."""

from collections.abc import Sequence
from typing import Any

import torch

from hf_patrickstar.errors import ConfigError, EngineError
from hf_patrickstar.model.compiled import is_compiled
from hf_patrickstar.model.model_set import roots_of
from hf_patrickstar.model.quantized import is_packed


def check_model(model: torch.nn.Module) -> None:
    """Refuses a model that cannot work in chunks.

    Args:
        model: The model, not yet managed or managed already.

    Raises:
        ConfigError: If it is wrapped, compiled to C++ code, quantized, sharded, or uses reentrant checkpointing.
    """
    check_modules(model)
    for name, parameter in model.named_parameters():
        if is_left_out(parameter):
            continue
        if is_packed(parameter):
            _check_packed(name, parameter, model.get_submodule(name.rpartition(".")[0]))
        elif not parameter.dtype.is_floating_point:
            raise ConfigError(
                f"parameter '{name}' has type {parameter.dtype}, only floating types are managed; make it a buffer"
            )
        if type(parameter.data).__name__ == "DTensor":
            raise ConfigError(f"parameter '{name}' is a DTensor; load the model without tensor parallelism")


def check_modules(model: torch.nn.Module) -> None:
    """Refuses a model with modules that the engine cannot give values to; see ``check_model``.

    Args:
        model: The model.

    Raises:
        ConfigError: If there is such a module.
    """
    if isinstance(model, torch.nn.DataParallel):
        raise ConfigError("the model is wrapped in nn.DataParallel; pass the model itself (model.module)")
    if any(hasattr(root, "_orig_mod") for root in roots_of(model)):
        raise ConfigError(
            "the model is what torch.compile() has returned; pass the model itself, and compile it in place: "
            "model.compile() if all of it fits the device, else block.compile() for each of its blocks"
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise ConfigError(
                f"module '{name}' is compiled by torch.jit to C++ code, which finds no values in the parameters of "
                "the model; replace it with the module that it was scripted from"
            )
        if getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {}).get("use_reentrant"):
            kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
            raise ConfigError(
                f"module '{name}' uses reentrant checkpointing, which hides the backward of parameters; call "
                f"model.{kind}_checkpointing_enable({kind}_checkpointing_kwargs={{'use_reentrant': False}})"
            )


def check_compiled(model: torch.nn.Module, num_moving: int, num_chunks: int) -> None:
    """Refuses a model that is compiled as a whole, unless all of its chunks stay on the device.

    Args:
        model: The model.
        num_moving: How many chunks are not computed with where they are at home.
        num_chunks: How many there are.

    Raises:
        ConfigError: If it is.
    """
    if num_moving and any(is_compiled(root) for root in roots_of(model)):
        raise ConfigError(
            f"the model is compiled as a whole, so that all parameters are on the device at once, but {num_moving} of "
            f"its {num_chunks} chunks come and go; compile its blocks (block.compile() for each, without "
            "--torch_compile), or give it a device with room for everything, and one process"
        )


def _check_packed(name: str, parameter: Any, module: torch.nn.Module) -> None:
    subject = f"parameter '{name}' is quantized by bitsandbytes ({type(parameter).__name__})"
    state = getattr(parameter, "quant_state", None)
    if parameter.requires_grad or getattr(parameter, "has_fp16_weights", False):
        raise ConfigError(
            f"{subject} and trained; chunks hold such weights packed and frozen: freeze the model "
            "(model.requires_grad_(False)) and train an adapter over it (PEFT), or load it without quantization"
        )
    if not isinstance(module, torch.nn.Linear):
        raise ConfigError(
            f"{subject} and belongs to a module of class {type(module).__name__}; such weights are managed in linear "
            "layers alone: leave this module out of the quantization (llm_int8_skip_modules of BitsAndBytesConfig)"
        )
    if getattr(state, "packing_format_for_cpu", False):
        raise ConfigError(
            f"{subject}, and an evaluation has packed it once more, for the CPU; nothing can be trained with that: "
            "load the model again, and prepare it before it is evaluated"
        )
    if parameter.is_floating_point() and state is None:
        raise ConfigError(f"{subject}, but not packed yet; move the model to a device first (model.to('cpu'))")


def check_shapes(model: torch.nn.Module) -> None:
    """Refuses a model with a parameter that has no shape yet; the Trainer counts elements before the first forward.

    Args:
        model: The model.

    Raises:
        ConfigError: If there is such a parameter.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise ConfigError(
                f"parameter '{name}' is lazy and has no shape yet; run one forward (under torch.no_grad()) before the "
                "Trainer is made"
            )


def check_values(names: Sequence[str], parameters: Sequence[torch.nn.Parameter]) -> None:
    """Refuses parameters whose values cannot be moved into chunks.

    Raises:
        EngineError: If a parameter is on the meta device.
        ConfigError: If two parameters share memory.
    """
    places: dict[tuple[int, int], str] = {}
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.device.type == "meta":
            raise EngineError(f"parameter '{name}' is on the meta device and has no value; load weights first")
        if not parameter.numel() or parameter.untyped_storage().device.type == "meta":
            continue  # nothing there, or values that are still to be read
        other = places.setdefault((parameter.untyped_storage()._cdata, int(parameter.storage_offset())), name)
        if other != name:
            raise ConfigError(
                f"parameters '{other}' and '{name}' are two parameters over the same memory; tie them by assigning one "
                "parameter to both modules (model.tie_weights() does)"
            )


def is_left_out(parameter: Any) -> bool:
    """Whether a parameter has no place in a chunk yet: a lazy parameter has no shape before its first forward."""
    return torch.nn.parameter.is_lazy(parameter)


def is_checkpointing(model: torch.nn.Module) -> bool:
    """Whether a part of a model recomputes activations in backward, as transformers has it."""
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def is_recomputed(module: torch.nn.Module) -> bool:
    """Whether transformers recomputes this layer in backward; known by name, since only integrations import it."""
    kinds = {kind.__name__ for kind in type(module).__mro__}
    return "GradientCheckpointingLayer" in kinds and bool(getattr(module, "gradient_checkpointing", False))
