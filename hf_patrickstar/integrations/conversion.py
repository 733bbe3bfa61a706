"""What each key of a configuration of DeepSpeed, FSDP or Accelerate becomes, as one table; and their checkpoints."""

import difflib
import os
from pathlib import Path
from typing import Any, NamedTuple

from hf_patrickstar.checkpoint.weight_files import has_weights
from hf_patrickstar.errors import CheckpointError

NO, LOST = "not needed", "not supported"
_OFFLOAD = "Model data is on the device, and in host memory where the device has no room; never on NVMe."
_BUFFERS = "The engine chooses the sizes of its buffers and chunks, and what stays on the device."
_SAVED = "Saved models are whole Hugging Face checkpoints, and any number of processes can resume them."
_SCALE = "The loss scale of --fp16 is dynamic, as in torch.amp.GradScaler."
_DEFERRED = "In the script, hf_patrickstar.deferred_weights reads weights without a second copy."
_LAUNCHER = "The launcher reads it; it can stay."
_GROUPS = "All processes together divide the model data and the batches; there are no smaller groups."
_ACTIVATIONS = "Activations stay on the device, or backward computes them again."
_CHECKPOINTING = "The argument --gradient_checkpointing of the Trainer replaces the section."
_LOGS = "See hf-patrickstar report and --report_to."

_TABLE = (
    ("stage zero_stage", NO, "Model data is divided over all processes, as in stage 3."),
    ("offload_param.device offload_optimizer.device", "offload", _OFFLOAD),
    ("offload_param_device offload_optimizer_device", "offload", _OFFLOAD),
    ("offload_param.pin_memory offload_optimizer.pin_memory", "pin_memory", "The host memory is page-locked."),
    ("offload_param.nvme_path offload_optimizer.nvme_path offload_param_nvme_path aio", LOST, _OFFLOAD),
    ("offload_optimizer_nvme_path", LOST, _OFFLOAD),
    ("offload_param.buffer_count offload_param.buffer_size offload_param.max_in_cpu", NO, _BUFFERS),
    ("offload_optimizer.buffer_count offload_optimizer.ratio offload_optimizer.fast_init", NO, _BUFFERS),
    ("prefetch_bucket_size", "prefetch_depth", "0 turns prefetching off; otherwise the depth is automatic."),
    ("param_persistence_threshold model_persistence_threshold max_live_parameters max_reuse_distance", NO, _BUFFERS),
    ("reduce_bucket_size allgather_bucket_size sub_group_size contiguous_gradients overlap_comm", NO, _BUFFERS),
    ("allgather_partitions reduce_scatter round_robin_gradients memory_efficient_linear", NO, _BUFFERS),
    ("gather_16bit_weights_on_model_save gather_fp16_weights_on_model_save checkpoint", NO, _SAVED),
    ("zero3_save_16bit_model state_dict_type", NO, _SAVED),
    ("leaf_module deepspeed_moe_layer_cls_names ignore_unused_parameters", NO, "The model needs no marks."),
    ("zero_hpz_partition_size mics_shard_size sequence_parallel_size", "groups", _GROUPS),
    ("pipeline tensor_parallel expert_parallel moe megatron_lm_config parallelism_config", LOST, _GROUPS),
    ("zero_quantized_weights zero_quantized_gradients", LOST, "Values are sent in their own type."),
    ("zenflow", LOST, "Each step updates all parameters with their own gradients."),
    ("bf16.enabled", "--bf16", "Forward runs under autocast, as in the Trainer."),
    ("fp16.enabled", "--fp16", "Forward runs under autocast, as in the Trainer."),
    ("mixed_precision", "precision", "The Trainer has an argument for each type."),
    ("fp16.loss_scale", LOST, _SCALE),
    ("fp16.initial_scale_power fp16.loss_scale_window fp16.hysteresis fp16.min_loss_scale", NO, _SCALE),
    ("fp16.auto_cast torch_autocast mixed_precision_policy data_types", NO, "--bf16 and --fp16 choose the types."),
    ("fp16.fp16_master_weights_and_grads bf16.bf16_master_weights_and_grads", LOST, "Master weights are fp32."),
    ("bf16.bf16_optimizer_states", "state_dtype", "Adam keeps its states in bf16, and fp32 masters."),
    ("amp fp8_config", LOST, "Use --bf16 or --fp16."),
    ("communication_data_type", "reduce_dtype", "Only fp32 differs from the default."),
    ("train_batch_size", NO, "It follows from batch per device, accumulation and processes."),
    ("train_micro_batch_size_per_gpu", "--per_device_train_batch_size", "It is the batch of one device."),
    ("gradient_accumulation_steps", "--gradient_accumulation_steps", "The Trainer accumulates gradients."),
    ("gradient_clipping", "--max_grad_norm", "It is the global norm; 0 turns clipping off."),
    ("optimizer.type", "--optim", "For any other optimizer, pass a torch optimizer to the Trainer."),
    ("optimizer.params.lr scheduler.params.warmup_max_lr", "--learning_rate", "It is the largest learning rate."),
    ("optimizer.params.betas", "--adam_beta1", "The Trainer has an argument for each of the two."),
    ("optimizer.params.eps", "--adam_epsilon", "It is the epsilon of Adam."),
    ("optimizer.params.weight_decay", "--weight_decay", "It is decoupled, as in AdamW."),
    ("optimizer.params.adam_w_mode", "decoupled", "For false, pass a torch.optim.Adam to the Trainer."),
    ("optimizer.params.torch_adam zero_allow_untested_optimizer zero_force_ds_cpu_optimizer", NO, "Adam is torch's."),
    ("scheduler.type", "--lr_scheduler_type", "It is the Trainer's scheduler of the same kind."),
    ("scheduler.params.warmup_num_steps", "--warmup_steps", "These are the steps of the warm-up."),
    ("scheduler.params.total_num_steps", "--max_steps", "The Trainer's schedule ends with its last step."),
    ("scheduler.params.warmup_min_lr scheduler.params.warmup_type", NO, "The warm-up is linear and begins with 0."),
    ("steps_per_print", "--logging_steps", "The Trainer logs after so many steps."),
    ("activation_checkpointing", "--gradient_checkpointing", "Backward computes activations again."),
    ("activation_checkpointing.partition_activations activation_checkpointing.cpu_checkpointing", LOST, _ACTIVATIONS),
    ("activation_checkpointing_offload", LOST, _ACTIVATIONS),
    ("activation_checkpointing.number_checkpoints activation_checkpointing.profile", NO, _CHECKPOINTING),
    ("activation_checkpointing.contiguous_memory_optimization", NO, _CHECKPOINTING),
    ("activation_checkpointing.synchronize_checkpoint_boundary", NO, _CHECKPOINTING),
    ("sparse_attention sparse_gradients", LOST, "Gradients and attention are dense."),
    ("compile dynamo_config dynamo_backend", LOST, "torch.compile of the whole model is not supported."),
    ("compression_training data_efficiency curriculum_learning", LOST, "The Trainer has no such feature."),
    ("elasticity", LOST, "The number of processes of a run is fixed."),
    ("tensorboard wandb csv_monitor comet flops_profiler comms_logger wall_clock_breakdown dump_state", NO, _LOGS),
    ("autotuning", NO, "The command hf-patrickstar plan predicts memory and time."),
    ("zero3_init_flag cpu_ram_efficient_loading param_init_fn sync_module_states", NO, _DEFERRED),
    ("deepspeed_config_file", NO, "Convert that file with a command of its own."),
    ("version use_orig_params", NO, "The engine replaces both FSDP1 and FSDP2."),
    ("reshard_after_forward sharding_strategy", "reshard_after_forward", _GROUPS),
    ("cpu_offload offload_params", NO, _OFFLOAD),
    ("auto_wrap_policy transformer_layer_cls_to_wrap transformer_cls_names_to_wrap", NO, "Modules are not wrapped."),
    ("min_num_params", NO, "Modules are not wrapped."),
    ("ignored_modules", LOST, "Every parameter is in chunks."),
    ("state_dict_config optim_state_dict_config", NO, _SAVED),
    ("backward_prefetch forward_prefetch limit_all_gathers", NO, "device_budget limits what is loaded ahead."),
    ("xla xla_fsdp_v2 xla_fsdp_settings xla_fsdp_grad_ckpt", LOST, "TPUs are not supported."),
    ("distributed_type", NO, "Replace DEEPSPEED or FSDP by MULTI_GPU, as in recipes/accelerate."),
    ("compute_environment num_processes num_machines machine_rank main_process_ip main_process_port", NO, _LAUNCHER),
    ("gpu_ids rdzv_backend same_network main_training_function debug use_cpu downcast_bf16", NO, _LAUNCHER),
    ("enable_cpu_affinity ipex_config mpirun_config command_file commands", NO, _LAUNCHER),
    ("tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env", NO, _LAUNCHER),
)
"""Keys, what they become (a setting, an argument, a name of ``_VALUES``, or nothing), and why."""
_ADAMW = "adamw_torch"
_SCHEDULERS = {"warmuplr": "constant_with_warmup", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
_WHOLE, _KEPT = ("true", "full_shard", "1"), ("false", "shard_grad_op", "2", "no_shard", "3")
_VALUES: dict[str, dict[str, Any]] = {
    "offload": {"cpu": NO},
    "groups": {"1": NO},
    "decoupled": {"true": NO, "false": LOST},
    "precision": {"bf16": "--bf16", "fp16": "--fp16"},
    "pin_memory": {"true": True, "false": False},
    "prefetch_depth": {"0": 0, "": NO},
    "reduce_dtype": {"fp32": "fp32", "float32": "fp32", "": NO},
    "reshard_after_forward": {**dict.fromkeys(_WHOLE, True), **dict.fromkeys(_KEPT, False)},
    **{name: {"true": ""} for name in ("--bf16", "--fp16", "--gradient_checkpointing")},
    "state_dtype": {"true": "bf16", "false": NO},
    "--optim": {"adamw": _ADAMW, "adam": _ADAMW, "sgd": "sgd", "adagrad": "adagrad", "lion": "lion_32bit"},
    "--lr_scheduler_type": _SCHEDULERS,
}
"""What values become; ``""`` stands for all others. Without it, a value that is on and not here is not supported."""


class Row(NamedTuple):
    """What one key becomes, in words, and why."""

    key: str
    value: Any
    becomes: str
    why: str


def convert(values: dict[str, Any], section: str = "") -> tuple[dict[str, Any], dict[str, Any], list[Row]]:
    """Converts a configuration of DeepSpeed, of FSDP (``--fsdp_config``) or of Accelerate.

    Args:
        values: The configuration.
        section: What its keys begin with.

    Returns:
        Settings for ``--patrickstar_config``, arguments of the Trainer, and one row for each key.
    """
    table = {key: (target, why) for keys, target, why in _TABLE for key in keys.split()}
    settings: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    rows: list[Row] = []
    for name, value in values.items():
        key = f"{section}{name}"
        known = _known(key)
        if isinstance(value, dict) and (known not in table or any(other.startswith(f"{known}.") for other in table)):
            found = convert(value, f"{key}.")
            made = found[0] | found[1]
            rows += found[2]
        elif known not in table:
            near = difflib.get_close_matches(known, table, n=1, cutoff=0)[0]
            rows.append(Row(key, value, "unknown", f"Nothing is carried over; the most similar known key is '{near}'."))
            continue
        else:
            target, why = table[known]
            made, text = _make(target, value)
            rows.append(Row(key, value, text, why))
        for name, result in made.items():
            place = arguments if name.startswith("--") else settings
            place[name] = result or place.get(name, result)
    return settings, arguments, rows


def _known(key: str) -> str:
    """A key as the table has it."""
    for section in ("deepspeed_config.", "fsdp_config.", "zero_optimization."):
        key = key.removeprefix(section)
    section, dot, name = key.rpartition(".")
    return f"{section}{dot}{name.removeprefix('stage3_').removeprefix('fsdp_')}"


def _make(target: str, value: Any) -> tuple[dict[str, Any], str]:
    """Settings and arguments by name, and the same in words."""
    made: Any = _VALUES.get(target, {}).get(str(value).lower(), _VALUES.get(target, {}).get(""))
    if target == LOST or (target in _VALUES and made is None):
        made = LOST if _is_on(value) else NO
    elif target not in _VALUES:
        made = NO if value is None or target == NO else value
    if value == "auto" and target.startswith("--"):
        return {}, f"{target} as your command has it"
    if made in (NO, LOST):
        return {}, made
    found = {target: made}
    if target == "precision":
        found = {made: ""}
    elif isinstance(made, list):
        found = {"--adam_beta1": made[0], "--adam_beta2": made[1]}
    return found, ", ".join(f"{name} {result}".strip() for name, result in found.items())


def _is_on(value: Any) -> bool:
    """Whether a value asks for a feature."""
    if isinstance(value, dict):
        return _is_on(value["enabled"]) if "enabled" in value else any(map(_is_on, value.values()))
    return str(value).lower() not in ("", "[]", "auto", "none", "no", "false", "0", "0.0")


def check_origin(directory: str | os.PathLike[str]) -> str | None:
    """Looks whether a checkpoint was written by DeepSpeed or FSDP, whose optimizer states cannot be read.

    Args:
        directory: The checkpoint that a run is resumed from.

    Returns:
        A warning if the weights can be loaded and the optimizer's states cannot; ``None`` for an ordinary checkpoint.

    Raises:
        CheckpointError: If the weights cannot be read either.
    """
    signs = {"DeepSpeed": ("global_step*/", "zero_to_fp32.py"), "FSDP": ("pytorch_model_fsdp*", "optimizer_0/")}
    for name, tool in (("DeepSpeed", "its zero_to_fp32.py"), ("FSDP", "'accelerate merge-weights'")):
        if not any(any(Path(directory).glob(sign)) for sign in signs[name]):
            continue
        if not has_weights(directory):
            raise CheckpointError(
                f"'{directory}' is a checkpoint of {name}, with no weights to read; convert it with {tool}, and give "
                "the result as --model_name_or_path"
            )
        return (
            f"patrickstar: '{directory}' is a checkpoint of {name}: its weights are loaded, its optimizer states are "
            "not read, and training goes on with new ones"
        )
    return None
