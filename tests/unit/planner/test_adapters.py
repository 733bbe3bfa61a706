"""Adapters over a frozen base: what the options say, and what of a plan changes."""

import json

import pytest

from hf_patrickstar import plan
from hf_patrickstar.cli.main import main
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.planner.adapters import parse_lora, read_peft

MODEL = (
    "llama:num_hidden_layers=2,hidden_size=64,num_attention_heads=2,num_key_value_heads=2,intermediate_size=128,"
    "vocab_size=256,max_position_embeddings=64"
)
LORA = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "v_proj"]}


def test_settings_of_adapters_become_fields_of_peft():
    text = "r=16, alpha=32,targets=q_proj+v_proj,layers=0+1"
    fields = {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 1]}
    assert parse_lora(text) == {"peft_type": "LORA", **fields}
    assert parse_lora("targets=all-linear")["target_modules"] == "all-linear"
    assert parse_lora("") == {"peft_type": "LORA"}


@pytest.mark.parametrize("text", ["r", "rank_of=3", "r=", "r=0", "r=1+2", "layers=a"])
def test_settings_that_make_no_sense_get_a_sentence(text):
    with pytest.raises(ConfigError, match="--lora: "):
        parse_lora(text)


def test_only_adapters_have_optimizer_states():
    found = plan(MODEL, "rtx4090", batch_size=2, checkpointing=True, adapters=LORA)
    whole = plan(MODEL, "rtx4090", batch_size=2, checkpointing=True)
    num = 2 * 2 * 2 * 64 * 4  # layers, modules, factors
    assert (found.num_trainable, found.num_parameters) == (num, whole.num_parameters + num)
    owners = found.tier(Tier.DEVICE).owners
    assert owners["exp_avg"] < whole.tier(Tier.DEVICE).owners["exp_avg"] / 10
    assert owners["param"] >= 2 * whole.num_parameters


@pytest.mark.parametrize("kib", [4360, 4440])
def test_a_device_that_is_a_little_too_small_is_what_a_plan_blames(kib):
    """A recorded step takes a little more than it may; those that follow it would run out of memory each time."""
    model = "gpt2:n_layer=3,n_embd=128,n_head=4,vocab_size=512,n_positions=64"
    given = {"batch_size": 2, "length": 64, "adapters": {**LORA, "target_modules": "all-linear"}}
    given["settings"] = {"activation_offload": False}  # which would make them fit
    found = plan(model, "rtx4090", **given, device_memory=kib * 1024)
    use = found.tier(Tier.DEVICE)
    assert not found.fits
    assert kib * 1024 < use.need_nbytes < 1.1 * kib * 1024
    assert plan(model, "rtx4090", **given, device_memory=use.need_nbytes).fits


def test_a_directory_and_a_file_of_peft(tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text(json.dumps({**LORA, "inference_mode": True}))
    assert read_peft(str(tmp_path)) == read_peft(str(tmp_path / "adapter_config.json"))
    assert main(["plan", MODEL, "--peft", str(tmp_path), "--no-advice"]) == 0
    by_file = capsys.readouterr().out
    assert main(["plan", MODEL, "--lora", "r=4,targets=q_proj+v_proj", "--no-advice"]) == 0
    assert capsys.readouterr().out == by_file
    assert " K of them trained" in by_file


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot be read"), ("[]", "has no 'peft_type'"), ('{"peft_type": "LORE"}', "PEFT has no type 'LORE'")],
)
def test_a_file_that_is_no_configuration_gets_a_sentence(text, message, tmp_path, capsys):
    path = tmp_path / "adapter_config.json"
    path.write_text(text)
    assert main(["plan", MODEL, "--peft", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_modules_that_are_not_there_get_a_sentence(capsys):
    assert main(["plan", MODEL, "--lora", "r=4,targets=c_attn"]) == 2
    assert "PEFT cannot add these adapters to 'LlamaForCausalLM': " in capsys.readouterr().err
