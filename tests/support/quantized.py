"""Tiny models that bitsandbytes has quantized on the CPU, with adapters over them."""

import functools
import tempfile

import peft
import torch
from support.models import SIZES
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

KINDS = {
    "nf4": {"bnb_4bit_quant_type": "nf4"},
    "fp4": {"bnb_4bit_quant_type": "fp4"},
    "nf4, double": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4, double": {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "int8": None,
}
WIDTH = 64


@functools.cache
def saved(num_layers=12, cls=LlamaConfig):
    """A directory with a model of this many layers, whose weights are not quantized."""
    config = cls(**{**SIZES, "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": num_layers})
    directory = tempfile.TemporaryDirectory(prefix="hf_patrickstar_quantized_")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory.name)
    return directory


def load(kind, path=None, dtype=torch.float32, **quantization):
    """The model, quantized while it is loaded; of 12 layers unless another path is given."""
    how = KINDS[kind]
    bits = {"load_in_8bit": True} if how is None else {"load_in_4bit": True, "bnb_4bit_compute_dtype": dtype, **how}
    return AutoModelForCausalLM.from_pretrained(
        path or saved().name,
        quantization_config=BitsAndBytesConfig(**bits, **quantization),
        device_map={"": "cpu"},
        dtype=dtype,
    )


def with_adapter(model, seed=1, **kwargs):
    """LoRA over every linear layer of a model, with other weights than zeros."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", **kwargs))
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.05, generator=generator)
    return adapted


def without_packing(model):
    """Keeps bitsandbytes from packing weights once more in evaluations, which no later training could go on with."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def packed(model):
    """The packed weights of a model, by name."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if type(parameter).__name__ in ("Params4bit", "Int8Params")
    }


def packed_nbytes(model):
    return sum(parameter.nbytes for parameter in packed(model).values())
