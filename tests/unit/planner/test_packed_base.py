"""Plans of adapters over frozen bases of 4 and 8 bits: what bitsandbytes makes of a model."""

import importlib.util

import peft
import pytest
import torch
from support.quantized import saved
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_patrickstar import plan
from hf_patrickstar.cli.main import main
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.planner.planning import arrange
from hf_patrickstar.tracing.fake import FakeTensors

pytest.importorskip("bitsandbytes")
LORA = {"r": 2, "target_modules": "all-linear"}
BITS = (4, 8)


def loaded(bits):
    """The same model as transformers loads it, with real values."""
    how = BitsAndBytesConfig(
        load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    base = AutoModelForCausalLM.from_pretrained(
        saved(3).name, quantization_config=how, device_map={"": "cpu"}, dtype=torch.float32
    )
    base.config.use_cache = False
    return peft.get_peft_model(base, peft.LoraConfig(**LORA)).train()


@pytest.mark.parametrize("bits", BITS)
def test_the_planned_model_is_what_transformers_loads(bits):
    def seen(model):
        tensors = [*model.named_parameters(), *model.named_buffers()]
        tensors += [
            (f"{name}.{kind}", getattr(owner, kind))
            for name, weight in model.named_parameters()
            for owner, kind in ((getattr(weight, "quant_state", None), "absmax"), (weight, "SCB"))
            if getattr(owner, kind, None) is not None
        ]
        return {name: (value.dtype, value.shape, value.requires_grad) for name, value in tensors}, {
            name: type(module).__name__ for name, module in model.named_modules()
        }

    subject, _ = arrange(saved(3).name, "rtx4090", batch_size=2, length=16, adapters=LORA, bits=bits)
    with FakeTensors():
        told = seen(subject.make_model())
    assert told == seen(loaded(bits))
    assert any(name.endswith(("absmax", "SCB")) for name in told[0])


@pytest.mark.parametrize(
    ("bits", "adapters", "said"),
    [
        *((bits, None, f"{bits}bit: packed weights cannot be trained; add adapters") for bits in BITS),
        (3, LORA, "3bit: bitsandbytes packs into 4 or 8 bits"),
    ],
)
def test_what_cannot_be_packed_or_trained_gets_a_sentence(bits, adapters, said):
    with pytest.raises(ConfigError, match=f"--load-in-{said}"):
        plan(saved(3).name, "rtx4090", bits=bits, adapters=adapters)


def test_a_plan_without_bitsandbytes_says_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    with pytest.raises(ConfigError, match=r"--load-in-4bit needs bitsandbytes: pip install hf_patrickstar\[bnb\]"):
        plan(saved(3).name, "rtx4090", bits=4, adapters=LORA)


def test_both_options_together_get_a_sentence(capsys):
    command = ["plan", saved(3).name, "--lora", "r=2,targets=all-linear", "--load-in-4bit", "--load-in-8bit"]
    assert main(command) == 2
    assert "--load-in-4bit and --load-in-8bit are both given; keep one of them" in capsys.readouterr().err
