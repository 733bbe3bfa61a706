"""Each key of DeepSpeed and FSDP has a rule, and what configurations become is accepted."""

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
from hf_patrickstar.integrations.conversion import accelerate, deepspeed, fsdp
from hf_patrickstar.integrations.conversion.checkpoints import check_origin
from hf_patrickstar.integrations.conversion.converted import convert

ZERO_KEYS = """
stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions
allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights elastic_checkpoint offload_param
offload_optimizer zenflow sub_group_size cpu_offload_param cpu_offload_use_pin_memory cpu_offload
stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold
stage3_max_live_parameters stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save
stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 round_robin_gradients
parameter_alignment zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights
zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint override_module_apply
log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module offload_param.device
offload_param.nvme_path offload_param.buffer_count offload_param.buffer_size offload_param.max_in_cpu
offload_param.pin_memory offload_optimizer.device offload_optimizer.nvme_path offload_optimizer.buffer_count
offload_optimizer.pin_memory offload_optimizer.pipeline_read offload_optimizer.pipeline_write
offload_optimizer.fast_init offload_optimizer.ratio offload_optimizer.super_offload
offload_optimizer.cpuadam_cores_perc
"""
"""Fields of ``DeepSpeedZeroConfig`` and of its two offload sections in DeepSpeed 0.19.8, with their aliases."""
PRECISION_KEYS = """
bf16.enabled bf16.immediate_grad_update bf16.check_grad_overflow bf16.bf16_master_weights_and_grads
bf16.bf16_optimizer_states fp16.enabled fp16.auto_cast fp16.loss_scale fp16.initial_scale_power fp16.loss_scale_window
fp16.hysteresis fp16.consecutive_hysteresis fp16.min_loss_scale fp16.fp16_master_weights_and_grads
"""
TOP_KEYS = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
steps_per_print dump_state disable_python_gc disable_allgather communication_data_type
seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor gradient_allreduce_op
gradient_clipping zero_allow_untested_optimizer zero_force_ds_cpu_optimizer wall_clock_breakdown memory_breakdown
use_data_before_expert_parallelism hybrid_engine pipeline data_efficiency checkpoint data_types aio dataloader_drop_last
log_level weight_quantization compile timers tensor_parallel expert_parallel vocabulary_size activation_checkpointing
tensorboard wandb csv_monitor comet flops_profiler autotuning elasticity comms_logger
"""
AUTO = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
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


def test_every_field_of_deepspeed_and_accelerate_has_a_rule():
    keys = {rule.key for rule in deepspeed.RULES}
    assert {*(f"zero_optimization.{key}" for key in ZERO_KEYS.split()), *PRECISION_KEYS.split()} <= keys
    assert set(TOP_KEYS.split()) <= {key.split(".")[0] for key in keys}
    names = {fsdp.normalized(field.name) for field in dataclasses.fields(FullyShardedDataParallelPlugin)}
    assert names <= {rule.key for rule in fsdp.RULES}
    names = {field.name for field in dataclasses.fields(ClusterConfig)}
    assert names <= {rule.key.split(".")[0] for rule in accelerate.RULES}


@pytest.mark.parametrize("rules", [deepspeed.RULES, fsdp.RULES, accelerate.RULES])
def test_rules_name_settings_and_arguments_that_exist_and_each_key_once(rules):
    fields = {field.name for field in dataclasses.fields(PatrickStarTrainingArguments)}
    settings = {field.name for field in dataclasses.fields(PatrickStarConfig)}
    names = {rule.name for rule in rules if rule.name}
    assert {name for name in names if name.removeprefix("--") not in fields and name not in settings} == set()
    assert len({rule.key for rule in rules}) == len(rules)


@pytest.mark.parametrize(
    ("zero", "settings"),
    [
        (ZERO_2, {"pin_memory": True}),
        (ZERO_3, {}),
        ({**ZERO_3, "offload_optimizer": ON_HOST, "offload_param": ON_HOST}, {"pin_memory": True}),
        ({**ZERO_3, "offload_param": {"device": "cpu", "pin_memory": "auto"}}, {}),
    ],
)
def test_the_configurations_of_hugging_faces_documentation_are_accepted(zero, settings):
    converted = convert({**AUTO, "zero_optimization": zero})
    assert (converted.settings, converted.lost) == (settings, ())
    assert PatrickStarConfig.from_any(converted.settings)
    assert converted.arguments == ("--optim adamw_torch", "--lr_scheduler_type constant_with_warmup")


ADAM = {"type": "Adam", "params": {"lr": 0.1, "betas": [0.8, 0.9], "eps": 1e-6}}
RESHARD = {"reshard_after_forward": True}
CONVERTED = {
    # A configuration -> settings, arguments, keys that have no counterpart.
    "values": (
        *({"gradient_clipping": 0.5, "bf16": {"enabled": True}, "optimizer": ADAM}, {}),
        "--max_grad_norm 0.5 --bf16 --optim adamw_torch --learning_rate 0.1 --adam_beta1 0.8 --adam_beta2 0.9 "
        "--adam_epsilon 1e-06",
        "",
    ),
    "flags as text": (
        {"zero_optimization": {"offload_param": {"pin_memory": "true"}}, "bf16": {"enabled": "true"}},
        *({"pin_memory": True}, "--bf16", ""),
    ),
    "empty": ({"zero_optimization": {}, "optimizer": {"params": {"betas": "auto"}}, "bf16": None}, {}, "", ""),
    "empty FSDP": ({"distributed_type": "FSDP", "fsdp_config": {}, "mixed_precision": "no", "tpu_env": []}, {}, "", ""),
    "off": ({"zero_optimization": {"offload_param": {"pin_memory": None}}, "fp16": {"enabled": "false"}}, {}, "", ""),
    "features that are off": (
        {"compile": {"deepcompile": False, "enabled": False}, "zero_optimization": {"zero_hpz_partition_size": 1}},
        *({}, "", ""),
    ),
    "NVMe": (
        {"zero_optimization": {"offload_param": {"device": "nvme"}}},
        {},
        "",
        "zero_optimization.offload_param.device",
    ),
    "an optimizer": ({"optimizer": {"type": "OneBitAdam"}}, {}, "", "optimizer.type"),
    "pipelines": ({"pipeline": {"stages": 2}, "moe": {"enabled": True}}, {}, "", "pipeline.stages moe.enabled"),
    "a misspelt key": ({"zero_optimization": {"stagee": 3}}, {}, "", "zero_optimization.stagee"),
    "fp8": ({"distributed_type": "FSDP", "mixed_precision": "fp8"}, {}, "", "mixed_precision"),
    **{
        f"resharding {value}": (
            {f"{prefix}reshard_after_forward": value, f"{prefix}offload_params": True},
            *({"reshard_after_forward": here}, "", ""),
        )
        for prefix, value, here in (("", "FULL_SHARD", True), ("fsdp_", True, True), ("fsdp_", "shard_grad_op", False))
    },
    "hybrid": ({"fsdp_sharding_strategy": "HYBRID_SHARD", "fsdp_version": 1}, RESHARD, "", "fsdp_sharding_strategy"),
    "full": ({"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_version": 1}, RESHARD, "", ""),
}


@pytest.mark.parametrize(("values", "settings", "arguments", "lost"), CONVERTED.values(), ids=CONVERTED)
def test_what_a_configuration_becomes_and_what_cannot_be_done(values, settings, arguments, lost):
    converted = convert(values)
    assert (converted.settings, " ".join(converted.arguments)) == (settings, arguments)
    assert [line.key for line in converted.lost] == lost.split()


# Checkpoints


@pytest.mark.parametrize(
    ("name", "sign"), [("DeepSpeed", "global_step5"), ("FSDP", "pytorch_model_fsdp_0"), ("FSDP", "optimizer_0")]
)
def test_checkpoints_of_other_systems_are_refused_or_warned_of_in_a_sentence(tmp_path, name, sign):
    assert check_origin(tmp_path) is None
    (tmp_path / sign).mkdir()
    with pytest.raises(CheckpointError, match=f"checkpoint of {name}, with no weights"):
        check_origin(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert f"checkpoint of {name}: its weights are loaded, its optimizer states are not" in check_origin(tmp_path)


def test_resuming_from_a_checkpoint_of_deepspeed_says_what_to_do(tmp_path):
    (tmp_path / "checkpoint-5" / "global_step5").mkdir(parents=True)
    trainer = make_trainer(PatrickStarTrainer, PatrickStarTrainingArguments, tmp_path, patrickstar=True)
    with pytest.raises(CheckpointError, match="zero_to_fp32"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))


def test_convert_prints_the_json_alone_and_explains_beside(tmp_path, capsys):
    file, output = tmp_path / "ds.json", tmp_path / "out.json"
    file.write_text(json.dumps({"zero_optimization": {"offload_param": {"device": "nvme", "pin_memory": True}}}))
    assert main(["convert", str(file)]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"pin_memory": True}
    assert "Not carried over" in printed.err
    assert "zero_to_fp32.py" in printed.err
    assert main(["convert", str(file), "--output", str(output)]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(output.read_text()) == {"pin_memory": True}


def test_convert_takes_a_file_of_accelerate(tmp_path, capsys):
    file = tmp_path / "accelerate.yaml"
    file.write_text(
        "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n"
        "  fsdp_reshard_after_forward: true\n"
    )
    assert main(["convert", str(file)]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"reshard_after_forward": True}
    assert "--patrickstar --bf16" in printed.err
    file.write_text("deepspeed_config:\n  zero_stage: 3\n  offload_param_nvme_path: /disk\n")
    assert main(["convert", str(file)]) == 0
    printed = capsys.readouterr()
    assert "deepspeed_config.offload_param_nvme_path: NVMe" in printed.err
    assert "global_step" in printed.err


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_wrong_file_is_one_sentence_and_status_2(tmp_path, capsys, text):
    file = tmp_path / "ds.json"
    if text is not None:
        file.write_text(text)
    assert main(["convert", str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
