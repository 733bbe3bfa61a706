"""Frozen bases that bitsandbytes packs into 4 or 8 bits, as shapes."""

import importlib.util
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hf_patrickstar.errors import ConfigError


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
