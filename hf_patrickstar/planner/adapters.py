"""Adapters as people write them (``r=16,targets=q_proj+v_proj``, or a configuration of PEFT), over a frozen base.

bitsandbytes may have packed the base into 4 or 8 bits.
"""

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


def check_quantization(bits: int | None, has_adapters: bool) -> None:
    """Checks whether a model can be planned with so many bits.

    Args:
        bits: 4, 8, or ``None`` for a model that is not quantized.
        has_adapters: Whether adapters are trained over it.

    Raises:
        ConfigError: If it cannot be.
    """
    if bits is None:
        return
    option = f"--load-in-{bits}bit"
    if bits not in (4, 8):
        raise ConfigError(f"{option}: bitsandbytes packs into 4 or 8 bits; choose one of these")
    if not has_adapters:
        raise ConfigError(f"{option}: packed weights cannot be trained; add adapters (--lora r=16,targets=all-linear)")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(f"{option} needs bitsandbytes: pip install hf_patrickstar[bnb]")


def quantize(base: Any, bits: int) -> None:
    """Replaces the linear layers of a model on the meta device as transformers does when it loads a quantized model.

    Args:
        base: The model of transformers.
        bits: 4 (nf4, computed with in bf16) or 8.
    """
    from bitsandbytes import functional, nn
    from transformers import BitsAndBytesConfig
    from transformers.quantizers import AutoHfQuantizer

    how = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_quant_type="nf4")
    how.bnb_4bit_compute_dtype = torch.bfloat16
    quantizer = AutoHfQuantizer.from_config(how, pre_quantized=False)
    with unset_fake_temporarily(), torch.device("meta"):
        quantizer.preprocess_model(base, device_map=None)
        for module in base.modules():
            weight: Any = module._parameters.get("weight")
            if isinstance(weight, nn.Params4bit):
                packed, state = functional.quantize_4bit(weight.data, blocksize=weight.blocksize, quant_type="nf4")
                kept = {"quant_type": "nf4", "blocksize": weight.blocksize, "bnb_quantized": True, "module": module}
                module.weight = nn.Params4bit(packed, requires_grad=False, quant_state=state, **kept)
                module.quant_state = state
            elif isinstance(weight, nn.Int8Params):
                packed, scales, _ = functional.int8_vectorwise_quant(weight.data.half())
                module.weight = nn.Int8Params(packed, requires_grad=False, CB=packed, SCB=scales)
        quantizer.postprocess_model(base)
