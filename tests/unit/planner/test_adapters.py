"""Plans of adapters over a frozen model."""

import json

import peft
import pytest

from hf_patrickstar.cli.main import main
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.planner.adapters import parse_lora, read_adapter
from hf_patrickstar.planner.planning import plan
from hf_patrickstar.units import MIB

MODEL = "gpt2:n_layer=2,n_embd=64,n_head=2,vocab_size=256,n_positions=64"
NUM_LORA = 2 * 4 * (64 + 3 * 64)
"""Two layers, rank 4, ``c_attn`` from 64 to 192."""


def test_adapters_alone_are_trained():
    whole = plan(MODEL, "rtx4090", batch_size=2)
    adapted = plan(MODEL, "rtx4090", batch_size=2, adapter=parse_lora("r=4,targets=c_attn"))
    assert adapted.num_trainable == NUM_LORA
    assert adapted.num_parameters == whole.num_parameters + NUM_LORA
    kinds = adapted.tiers["device"].owners
    assert kinds["master"] == pytest.approx(4 * NUM_LORA, abs=4096)
    assert kinds["param"] == pytest.approx(2 * adapted.num_parameters, rel=0.2), "some stay in fp32"


def test_a_frozen_model_that_moves():
    adapted = plan(
        MODEL,
        "rtx4090",
        batch_size=2,
        device_memory=6 * MIB,
        adapter=parse_lora("r=4,targets=c_attn"),
        settings={"chunk_budget": "200KiB"},
    )
    assert adapted.fits
    assert adapted.speed.to_device_nbytes > adapted.num_parameters
    assert adapted.speed.to_host_nbytes < 16 * NUM_LORA, "no gradients of what is frozen"


def test_what_is_written():
    config = parse_lora("r=8, targets=q_proj+v_proj,alpha=4,dropout=0.1")
    assert (config.r, config.lora_alpha, config.lora_dropout) == (8, 4, 0.1)
    assert config.target_modules == {"q_proj", "v_proj"}
    config = parse_lora("")
    assert (config.r, config.lora_alpha, config.target_modules) == (16, 32, "all-linear")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank=4", "'rank=4' is no setting of LoRA"),
        ("r", "'r' is no setting of LoRA"),
        ("target=q", "did you mean 'targets'?"),
        ("r=four", "'r' must be a number, got 'four'"),
        ("r=0", "r must be at least 1, got 0"),
    ],
)
def test_what_makes_no_sense(text, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        parse_lora(text)


def test_a_configuration_of_peft(tmp_path):
    peft.LoraConfig(r=4, target_modules=["c_attn"]).save_pretrained(tmp_path)
    for name in (tmp_path, tmp_path / "adapter_config.json"):
        found = read_adapter(str(name))
        assert (type(found), found.r) == (peft.LoraConfig, 4)
    with pytest.raises(ConfigError, match=r"--peft: '.*none.json' cannot be read .*: No such file"):
        read_adapter(str(tmp_path / "none.json"))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4}))
    with pytest.raises(ConfigError, match="cannot be read as the configuration of an adapter"):
        read_adapter(str(tmp_path))


def test_the_command(capsys, tmp_path):
    peft.LoraConfig(r=4, target_modules=["c_attn"]).save_pretrained(tmp_path)
    for options in (["--lora", "r=4,targets=c_attn"], ["--peft", str(tmp_path)]):
        file = tmp_path / "plan.json"
        assert main(["plan", MODEL, "--no-advice", *options, "--json", str(file)]) == 0
        assert json.loads(file.read_text())["num_trainable"] == NUM_LORA
    assert main(["plan", MODEL, "--no-advice", "--lora", "targets=nothing"]) == 2
    assert "the adapter does not suit the model: Target modules" in capsys.readouterr().err
