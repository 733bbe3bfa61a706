"""Every key of a configuration file of Accelerate that is about DeepSpeed or FSDP, and what it becomes."""

from typing import Any

from hf_patrickstar.integrations.conversion import fsdp
from hf_patrickstar.integrations.conversion.rules import Rule, argument, gone, missing

_LAUNCH = "Accelerate's launcher stays as it is."
_NVME = "NVMe offload is not supported: model data lives on the device and in host memory."
_OFFLOAD = "Model data is at home on the host where the device has no room; nothing has to be switched on."
_FILTER = "It is of DeepSpeed's launcher; Accelerate's own launcher starts the processes."
_LAUNCHED = (
    "num_processes num_machines machine_rank main_process_ip main_process_port gpu_ids "
    "rdzv_backend same_network main_training_function debug use_cpu downcast_bf16 enable_cpu_affinity "
    "ipex_config mpirun_config tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env command_file commands"
)


def _flag(value: Any) -> str | None:
    return {"bf16": "--bf16", "fp16": "--fp16"}.get(str(value).lower())


RULES: tuple[Rule, ...] = (
    gone("distributed_type", "Write MULTI_GPU in place of DEEPSPEED or FSDP, as recipes/accelerate has it."),
    argument("mixed_precision", "", "The Trainer's switch for the type.", _flag),
    gone("compute_environment", _LAUNCH),
    *(gone(name, _LAUNCH) for name in _LAUNCHED.split()),
    argument(
        "deepspeed_config.gradient_accumulation_steps", "--gradient_accumulation_steps", "The Trainer accumulates."
    ),
    argument("deepspeed_config.gradient_clipping", "--max_grad_norm", "The global norm; 0 does not clip."),
    gone("deepspeed_config.zero_stage", "There is one way, near to stage 3: each process has 1/p of all model data."),
    gone("deepspeed_config.offload_optimizer_device", _OFFLOAD),
    gone("deepspeed_config.offload_param_device", _OFFLOAD),
    missing("deepspeed_config.offload_optimizer_nvme_path", _NVME),
    missing("deepspeed_config.offload_param_nvme_path", _NVME),
    gone("deepspeed_config.zero3_init_flag", "hf_patrickstar.deferred_weights in the script reads into chunks."),
    gone("deepspeed_config.zero3_save_16bit_model", "What is saved is always a whole Hugging Face checkpoint."),
    gone("deepspeed_config.deepspeed_config_file", "Convert this file by a command of its own."),
    gone("deepspeed_config.deepspeed_hostfile", _FILTER),
    gone("deepspeed_config.deepspeed_multinode_launcher", _FILTER),
    gone("deepspeed_config.deepspeed_inclusion_filter", _FILTER),
    gone("deepspeed_config.deepspeed_exclusion_filter", _FILTER),
    gone("deepspeed_config.deepspeed_moe_layer_cls_names", "Modules need no marks: mixtures of experts work without."),
    *(Rule(f"fsdp_config.{rule.key}", rule.kind, rule.why, rule.name, rule.make, rule.cannot) for rule in fsdp.RULES),
    missing("megatron_lm_config", "Tensor and pipeline parallelism of Megatron-LM are not supported."),
    missing("parallelism_config", "Tensor, context and sequence parallelism are not supported."),
    missing("dynamo_config", "torch.compile is not supported."),
    missing("dynamo_backend", "torch.compile is not supported."),
    missing("fp8_config", "fp8 is not supported."),
)
"""The rules; see ``Rule``."""


def normalized(key: str) -> str:
    """A key as the rules name it."""
    section, dot, name = key.partition(".")
    return f"{section}.{fsdp.normalized(name)}" if dot and section == "fsdp_config" else key
