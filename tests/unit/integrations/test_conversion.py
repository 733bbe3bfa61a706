"""No key of DeepSpeed, FSDP or Accelerate is lost silently, and what configurations become is accepted."""

import dataclasses
import json

import pytest
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from trainers import make_trainer

from hf_patrickstar import PatrickStarTrainer, PatrickStarTrainingArguments
from hf_patrickstar.cli.main import main
from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.integrations.conversion import check_origin, convert

AUTO = {
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {"type": "WarmupLR", "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr"), "auto")},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000},
}
ON_HOST = {"device": "cpu", "pin_memory": True}
ZERO_2 = {"stage": 2, "offload_optimizer": ON_HOST, "allgather_partitions": True, "overlap_comm": True}
ZERO_3 = {"stage": 3, "sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}


def lost(values):
    """What is not carried over, with the reason."""
    return {row.key: row.becomes for row in convert(values)[2] if row.becomes in ("not supported", "unknown")}


def arguments_of(values):
    return " ".join(f"{name} {value}".strip() for name, value in convert(values)[1].items())


def test_every_key_of_accelerate_is_known():
    fields = {
        f"fsdp_{field.name.removeprefix('fsdp_')}" for field in dataclasses.fields(FullyShardedDataParallelPlugin)
    }
    values = {field.name: "x" for field in dataclasses.fields(ClusterConfig)} | {"deepspeed_config": {}}
    rows = convert({**values, "fsdp_config": dict.fromkeys(fields, "x")})[2]
    assert len(rows) == len(values) - 2 + len(fields)
    assert [row.key for row in rows if row.becomes == "unknown"] == []


@pytest.mark.parametrize(
    ("zero", "settings"),
    [
        (ZERO_2, {"pin_memory": True}),
        (ZERO_3, {}),
        ({**ZERO_3, "offload_optimizer": ON_HOST, "offload_param": {"pin_memory": False}}, {"pin_memory": True}),
        ({**ZERO_3, "offload_param": {"device": "cpu", "pin_memory": "auto"}}, {}),
    ],
)
def test_the_configurations_of_hugging_faces_documentation_are_accepted(zero, settings):
    values = {**AUTO, "zero_optimization": zero}
    assert convert(values)[0] == settings
    assert lost(values) == {}
    assert arguments_of(values) == "--optim adamw_torch --lr_scheduler_type constant_with_warmup"


def test_values_become_arguments_and_settings_that_exist():
    optimizer = {"type": "Adam", "params": {"lr": 0.1, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1}}
    values = {
        **{"gradient_clipping": 0.5, "bf16": {"enabled": "true"}, "optimizer": optimizer, "steps_per_print": 7},
        **{"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 3, "activation_checkpointing": True},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5, "total_num_steps": 9}},
        "zero_optimization": {"stage3_prefetch_bucket_size": 0, "offload_param": {"pin_memory": "true"}},
        **{"communication_data_type": "fp32", "reshard_after_forward": False},
    }
    settings, arguments, _ = convert(values)
    assert settings == {"prefetch_depth": 0, "pin_memory": True, "reduce_dtype": "fp32", "reshard_after_forward": False}
    assert PatrickStarConfig.from_any(settings)
    assert arguments_of(values) == (
        "--max_grad_norm 0.5 --bf16 --optim adamw_torch --learning_rate 0.1 --adam_beta1 0.8 --adam_beta2 0.9 "
        "--adam_epsilon 1e-06 --weight_decay 0.1 --logging_steps 7 --gradient_accumulation_steps 2 "
        "--per_device_train_batch_size 3 --gradient_checkpointing --lr_scheduler_type linear --warmup_steps 5 "
        "--max_steps 9"
    )
    fields = {f"--{field.name}" for field in dataclasses.fields(PatrickStarTrainingArguments)}
    assert set(arguments) <= fields


@pytest.mark.parametrize(("is_on", "settings"), [(True, {"state_dtype": "bf16"}), (False, {})])
def test_states_in_bf16_stay_so(is_on, settings):
    values = {"bf16": {"enabled": True, "bf16_optimizer_states": is_on}, "optimizer": {"type": "AdamW"}}
    assert convert(values)[0] == settings
    assert lost(values) == {}
    assert PatrickStarConfig.from_any(settings).state_dtype == settings.get("state_dtype", "auto")


def test_lion_is_that_of_bitsandbytes():
    assert arguments_of({"optimizer": {"type": "Lion"}}) == "--optim lion_32bit"


@pytest.mark.parametrize(
    ("values", "key", "becomes"),
    [
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, *("offload_param.device", "not supported")),
        ({"optimizer": {"type": "OneBitAdam"}}, "type", "not supported"),
        ({"optimizer": {"params": {"adam_w_mode": False}}}, "adam_w_mode", "not supported"),
        ({"moe": {"enabled": True, "size": 0}}, "moe", "not supported"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "zero_hpz_partition_size", "not supported"),
        ({"fp16": {"loss_scale": 128}}, "loss_scale", "not supported"),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, "fsdp_sharding_strategy", "not supported"),
        ({"distributed_type": "FSDP", "mixed_precision": "fp8"}, "mixed_precision", "not supported"),
        ({"zero_optimization": {"offload_param": {"pin_memry": True}}}, "pin_memry", "unknown"),
    ],
)
def test_what_is_not_carried_over_is_named(values, key, becomes):
    ((name, found),) = lost(values).items()
    assert name.endswith(key)
    assert found == becomes


def test_features_that_are_off_are_not_named():
    values = {
        "compile": {"deepcompile": True, "enabled": False},
        "zero_optimization": {"zero_hpz_partition_size": 1, "offload_param": {"device": "none"}},
        **{"distributed_type": "FSDP", "fsdp_config": {}, "mixed_precision": "no", "tpu_env": [], "amp": None},
        **{"optimizer": {"params": {"betas": "auto", "adam_w_mode": True}}, "fp16": {"enabled": "false"}},
    }
    assert (lost(values), *convert(values)[:2]) == ({}, {}, {})


@pytest.mark.parametrize(("value", "here"), [("FULL_SHARD", True), (True, True), ("shard_grad_op", False), (2, False)])
def test_fsdp_keys_are_taken_with_and_without_their_prefix(value, here):
    for prefix in ("", "fsdp_"):
        values = {f"{prefix}reshard_after_forward": value, f"{prefix}offload_params": True}
        assert (convert(values)[0], lost(values)) == ({"reshard_after_forward": here}, {})


@pytest.mark.parametrize(
    ("name", "sign"), [("DeepSpeed", "global_step5"), ("FSDP", "pytorch_model_fsdp_0"), ("FSDP", "optimizer_0")]
)
def test_checkpoints_of_others_are_refused_or_warned_of_in_a_sentence(tmp_path, name, sign):
    assert check_origin(tmp_path) is None
    (tmp_path / sign).mkdir()
    with pytest.raises(CheckpointError, match=f"checkpoint of {name}, .*--model_name_or_path"):
        check_origin(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert f"checkpoint of {name}: its weights are loaded, its optimizer states are not" in check_origin(tmp_path)


def test_resuming_from_a_checkpoint_of_deepspeed_says_what_to_do(tmp_path):
    (tmp_path / "checkpoint-5" / "global_step5").mkdir(parents=True)
    trainer = make_trainer(PatrickStarTrainer, PatrickStarTrainingArguments, tmp_path, patrickstar=True)
    with pytest.raises(CheckpointError, match="zero_to_fp32"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))


def test_convert_prints_the_json_alone_and_explains_every_key(tmp_path, capsys):
    file, output = tmp_path / "ds.json", tmp_path / "out.json"
    zero = {"stage": 3, "offload_param": {"device": "nvme", "pin_memory": True}}
    file.write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": True}}))
    assert main(["convert", str(file)]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"pin_memory": True}
    assert "zero_optimization.stage = 3\n    not needed: " in printed.err
    assert "--patrickstar --bf16 --patrickstar_config FILE\n" in printed.err
    assert printed.err.endswith("\nNot carried over: zero_optimization.offload_param.device\n")
    assert main(["convert", str(file), "--output", str(output)]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(output.read_text()) == {"pin_memory": True}


def test_convert_takes_a_file_of_accelerate(tmp_path, capsys):
    file = tmp_path / "accelerate.yaml"
    fsdp = "fsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: true\n"
    file.write_text(f"distributed_type: FSDP\nmixed_precision: bf16\n{fsdp}deepspeed_config:\n  zero_stage: 3\n")
    assert main(["convert", str(file)]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"reshard_after_forward": True}
    assert "--patrickstar --bf16" in printed.err
    assert "Not carried over" not in printed.err


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_wrong_file_is_one_sentence_and_status_2(tmp_path, capsys, text):
    file = tmp_path / "ds.json"
    if text is not None:
        file.write_text(text)
    assert main(["convert", str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
