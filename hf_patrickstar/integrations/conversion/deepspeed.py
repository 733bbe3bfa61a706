"""Every key of a DeepSpeed configuration, as DeepSpeed 0.19 reads it, and what it becomes."""

from typing import Any

from hf_patrickstar.integrations.conversion.rules import Rule, argument, gone, missing, setting

_OPTIMIZERS = (("adamw", "adamw_torch"), ("adam", "adamw_torch"), ("sgd", "sgd"), ("adagrad", "adagrad"))
_SCHEDULERS = (("warmuplr", "constant_with_warmup"), ("warmupdecaylr", "linear"), ("warmupcosinelr", "cosine"))
_BUCKET = "The engine sizes its buffers itself: a communication group of chunks is gathered and reduced at a time."
_LIVE = "Which parameters stay on the device follows from the budget and the plan of a step."
_DEVICE_RESIDENT = (
    "There is no list of small parameters that never leave; chunks of the first layers live in the device margin."
)
_NVME = "NVMe offload is not supported: model data lives on the device and in host memory."
_SCALE = "The loss scale of --fp16 is dynamic, with the semantics and defaults of torch.amp.GradScaler."
_QUANTIZED = "Quantized communication (ZeRO++) is not supported: values are sent in their own type."
_OFFLOAD = "Model data is at home on the host where the device has no room; nothing has to be switched on."
_PINNED = "Page-locked host memory; if parameters and optimizer states differ, true holds for both."
_LOGS = "The Trainer reports; the figures of the engine go where --report_to says (docs/report.md)."
_PROFILE = "torch.profiler shows every load, eviction and update by name (docs/report.md)."
_DATA = "The data of the Trainer stays as it is."


def _is_nvme(value: Any) -> bool:
    return str(value).strip().lower() == "nvme"


def _flag(value: Any) -> bool | None:
    """A flag, which some files have as text."""
    return {"true": True, "false": False}.get(str(value).strip().lower())


def _on(value: Any) -> bool:
    return _flag(value) is True


def _zero_if_zero(value: Any) -> int | None:
    return 0 if value == 0 and not isinstance(value, bool) else None


def _fp32_only(value: Any) -> str | None:
    return "fp32" if str(value).lower() in ("fp32", "float32", "torch.float32") else None


def _optimizer(value: Any) -> str | None:
    return dict(_OPTIMIZERS).get(str(value).lower())


def _scheduler(value: Any) -> str | None:
    return dict(_SCHEDULERS).get(str(value).lower())


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 2 else None


def _above_one(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 1


def _not_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and value != 0


def _autocast(value: Any) -> bool | None:
    return True if value is True else None


def _steps(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


_ZERO = (
    gone("stage", "There is one way, near to stage 3: each process has 1/p of all model data, in chunks."),
    gone("contiguous_gradients", "Gradients always lie in chunks."),
    gone("reduce_scatter", "Gradients are always reduced to the process that owns their chunk."),
    gone("reduce_bucket_size", _BUCKET),
    gone("use_multi_rank_bucket_allreduce", _BUCKET),
    gone("allgather_partitions", _BUCKET),
    gone("allgather_bucket_size", _BUCKET),
    gone("overlap_comm", "Communication and copies always run beside computation where the device can do that."),
    gone("compute_grad_norm", "The norm is computed where --max_grad_norm clips, and for the log."),
    gone("load_from_fp32_weights", "Checkpoints hold the fp32 weights; they are always loaded."),
    gone("elastic_checkpoint", "Every checkpoint is resumed with any number of processes."),
    missing("offload_param.device", f"{_OFFLOAD} {_NVME}", _is_nvme),
    missing("offload_param.nvme_path", _NVME),
    missing("offload_param.buffer_count", _NVME, lambda value: False),
    missing("offload_param.buffer_size", _NVME, lambda value: False),
    missing("offload_param.max_in_cpu", _NVME, lambda value: False),
    setting("offload_param.pin_memory", "pin_memory", _PINNED, _flag),
    gone("offload_param", _OFFLOAD),
    missing("offload_optimizer.device", f"{_OFFLOAD} {_NVME}", _is_nvme),
    missing("offload_optimizer.nvme_path", _NVME),
    missing("offload_optimizer.buffer_count", _NVME, lambda value: False),
    setting("offload_optimizer.pin_memory", "pin_memory", _PINNED, _flag),
    missing("offload_optimizer.pipeline_read", _NVME),
    missing("offload_optimizer.pipeline_write", _NVME),
    gone("offload_optimizer.fast_init", "Optimizer states are made when their chunks are made."),
    gone("offload_optimizer.ratio", "The plan decides how many chunks live on the device with their optimizer states."),
    gone("offload_optimizer.super_offload", "The optimizer already runs beside the next forward (overlap_optimizer)."),
    gone("offload_optimizer.cpuadam_cores_perc", "host_threads is automatic: the cores of this process."),
    gone("offload_optimizer", _OFFLOAD),
    missing("zenflow", "ZenFlow is not supported: each step updates all parameters with their own gradients."),
    gone("sub_group_size", "The update runs chunk by chunk; the size of chunks is searched (chunk_numel)."),
    gone("cpu_offload_param", _OFFLOAD),
    setting("cpu_offload_use_pin_memory", "pin_memory", _PINNED, _flag),
    gone("cpu_offload", _OFFLOAD),
    setting(
        "stage3_prefetch_bucket_size",
        "prefetch_depth",
        "0 loads each chunk when it is needed; otherwise the depth is automatic.",
        _zero_if_zero,
    ),
    gone("stage3_param_persistence_threshold", _DEVICE_RESIDENT),
    gone("stage3_model_persistence_threshold", _DEVICE_RESIDENT),
    gone("stage3_max_live_parameters", _LIVE),
    gone("stage3_max_reuse_distance", _LIVE),
    gone("stage3_gather_16bit_weights_on_model_save", "What is saved is always a whole Hugging Face checkpoint."),
    gone("stage3_gather_fp16_weights_on_model_save", "What is saved is always a whole Hugging Face checkpoint."),
    gone("stage3_module_granularity_threshold", "Modules are not fetched as such: chunks are."),
    gone("stage3_use_all_reduce_for_fetch_params", _BUCKET),
    gone("stage3_allgather_sequential", _BUCKET),
    gone("ignore_unused_parameters", "Parameters without a gradient are skipped by the update, as in torch."),
    gone("legacy_stage1", "There is one way for all stages."),
    gone("round_robin_gradients", "Gradients go to their chunks in the order of backward."),
    gone("parameter_alignment", "Parameters in chunks are always aligned."),
    missing(
        "zero_hpz_partition_size", "A second division within a machine (hpZ, ZeRO++) is not supported.", _above_one
    ),
    missing("zero_quantized_weights", _QUANTIZED),
    missing("zero_quantized_nontrainable_weights", _QUANTIZED),
    missing("zero_quantized_gradients", _QUANTIZED),
    missing("mics_shard_size", "MiCS is not supported: model data is divided over all processes.", _above_one),
    missing("mics_hierarchical_params_gather", "MiCS is not supported."),
    gone("memory_efficient_linear", "Linear layers are torch's; what backward needs is fetched again from chunks."),
    gone("pipeline_loading_checkpoint", "Weights are read from the file straight into chunks."),
    gone("override_module_apply", "Modules are not changed."),
    gone("log_trace_cache_warnings", "Steps with other shapes get traces of their own."),
    gone("enable_sanity_checks", "The checks are debug_evict_all and debug_collectives, both slow."),
    gone("save_muon_momentum_buffer_in_memory", "Optimizer states are always in chunks."),
    gone("leaf_module", "Modules need no marks: mixtures of experts work without."),
)

_PRECISION = (
    argument(
        "bf16.enabled",
        "--bf16",
        "Forward runs under autocast over 16-bit parameters, with the losses of the stock Trainer; "
        '{"autocast": false, "keep_fp32": []} computes all in 16 bits, which is nearer to DeepSpeed.',
        _on,
    ),
    argument("bfloat16.enabled", "--bf16", "The old name of the section bf16.", _on),
    gone("bf16.immediate_grad_update", "With one micro-batch per step a gradient takes its parameter's place at once."),
    gone("bf16.check_grad_overflow", "bf16 needs no loss scale."),
    missing("bf16.bf16_master_weights_and_grads", "Masters of 16-bit parameters are always fp32."),
    missing("bf16.bf16_optimizer_states", "Optimizer states of 16-bit parameters are always fp32."),
    argument("fp16.enabled", "--fp16", "As for bf16, with a dynamic loss scale.", _on),
    gone("fp16.auto_cast", "Forward always runs under autocast, unless the setting autocast is false."),
    missing("fp16.loss_scale", f"A fixed loss scale is not supported. {_SCALE}", _not_zero),
    gone("fp16.initial_scale_power", _SCALE),
    gone("fp16.loss_scale_window", _SCALE),
    gone("fp16.hysteresis", _SCALE),
    gone("fp16.consecutive_hysteresis", _SCALE),
    gone("fp16.min_loss_scale", _SCALE),
    missing("fp16.fp16_master_weights_and_grads", "Masters of 16-bit parameters are always fp32."),
    setting("torch_autocast.enabled", "autocast", "Autocast is on by default where 16-bit was asked for.", _autocast),
    gone("torch_autocast.dtype", "--bf16 or --fp16 says the type."),
    gone(
        "torch_autocast.lower_precision_safe_modules", "keep_fp32 names what stays fp32; by default as autocast has it."
    ),
    missing("amp", "Apex is not supported; use --bf16 or --fp16."),
    setting(
        "communication_data_type",
        "reduce_dtype",
        "The type in which gradients are added; only fp32 differs from the default.",
        _fp32_only,
    ),
    gone("seq_parallel_communication_data_type", "There is no sequence parallelism."),
    gone("data_types.grad_accum_dtype", "Gradients of several micro-batches are added in an fp32 list."),
    gone("data_types", "Types follow from --bf16 and --fp16."),
)

_TRAINING = (
    gone("train_batch_size", "It follows: batch per device, times accumulation steps, times processes."),
    argument("train_micro_batch_size_per_gpu", "--per_device_train_batch_size", "The batch of one device."),
    argument("gradient_accumulation_steps", "--gradient_accumulation_steps", "The Trainer accumulates."),
    gone("managed_gradient_accumulation", "The Trainer accumulates."),
    argument("gradient_clipping", "--max_grad_norm", "The global norm, exact over all processes; 0 does not clip."),
    argument("max_grad_norm", "--max_grad_norm", "The global norm, exact over all processes; 0 does not clip."),
    argument(
        "optimizer.type",
        "--optim",
        "Adam and AdamW of DeepSpeed decouple weight decay by default, as AdamW of torch does. For others hand a torch "
        "optimizer to the Trainer; 1-bit Adam and its kin are not supported.",
        _optimizer,
    ),
    argument("optimizer.params.lr", "--learning_rate", "The learning rate."),
    argument("optimizer.params.betas", "--adam_beta1", "The second one is --adam_beta2.", _first),
    argument("optimizer.params.eps", "--adam_epsilon", "The term that is added to the root."),
    argument("optimizer.params.weight_decay", "--weight_decay", "The weight decay."),
    gone("optimizer.params.torch_adam", "The arithmetic is always torch's."),
    missing(
        "optimizer.params.adam_w_mode",
        "False adds weight decay to the gradient: hand a torch.optim.Adam to the Trainer.",
        lambda value: value is False,
    ),
    gone("optimizer.legacy_fusion", "There is nothing to fuse."),
    argument("scheduler.type", "--lr_scheduler_type", "The Trainer's scheduler of the same kind.", _scheduler),
    gone("scheduler.params.warmup_min_lr", "The Trainer's warm-up begins with 0."),
    argument("scheduler.params.warmup_max_lr", "--learning_rate", "The rate at the end of the warm-up."),
    argument("scheduler.params.warmup_num_steps", "--warmup_steps", "The steps of the warm-up."),
    gone("scheduler.params.warmup_type", "The Trainer's warm-up is linear."),
    argument("scheduler.params.total_num_steps", "--max_steps", "The Trainer's schedule ends with its last step."),
    gone("zero_allow_untested_optimizer", "Any torch optimizer is accepted."),
    gone("zero_force_ds_cpu_optimizer", "The optimizer is torch's, wherever it runs."),
    argument("steps_per_print", "--logging_steps", "How often the Trainer logs.", _steps),
    gone("gradient_predivide_factor", "Averages over processes are exact in the order of ranks, or divided once."),
    gone("prescale_gradients", "Averages over processes are exact in the order of ranks, or divided once."),
    gone("gradient_allreduce_op", "Gradients of processes are averaged."),
    gone("disable_allgather", _BUCKET),
    missing("sparse_gradients", "Sparse gradients of embeddings are not supported."),
    gone("dataloader_drop_last", "--dataloader_drop_last of the Trainer says it."),
    gone(
        "activation_checkpointing",
        "DeepSpeed reads it for models that call deepspeed.checkpointing; --gradient_checkpointing of the Trainer "
        "computes activations again.",
    ),
    missing(
        "activation_checkpointing.cpu_checkpointing", "Activations are not moved to the host; they are computed again."
    ),
    missing("activation_checkpointing.partition_activations", "Activations are not divided over processes."),
)

_FEATURES = (
    missing("aio", _NVME),
    missing("pipeline", "Pipeline parallelism is not supported."),
    missing("tensor_parallel", "Tensor parallelism is not supported.", lambda value: True),
    missing("sequence_parallel_size", "Sequence parallelism is not supported.", _above_one),
    missing("expert_parallel", "Expert parallelism is not supported; experts live in chunks as all parameters do."),
    missing("moe", "Expert parallelism is not supported; experts live in chunks as all parameters do."),
    gone("use_data_before_expert_parallelism", "There is no expert parallelism."),
    missing("sparse_attention", "Sparse attention is not supported; choose --attn_implementation of the model."),
    missing("compression_training", "Compression is not supported."),
    missing("quantize_training", "Training with quantization is not supported."),
    missing("weight_quantization", "Quantization of weights is not supported."),
    missing("progressive_layer_drop", "Progressive layer drop is not supported."),
    missing("eigenvalue", "The eigenvalue of the Hessian is not computed."),
    missing("curriculum_learning", f"Curricula are not supported. {_DATA}"),
    missing("data_efficiency", f"Sampling by difficulty is not supported. {_DATA}"),
    missing("hybrid_engine", "There is no engine of its own for generation; generate works on the model as it is."),
    missing("compile", "torch.compile is not supported."),
    missing("elasticity", "The number of processes is fixed in a run; a checkpoint is resumed with any number."),
    gone("autotuning", "hf-patrickstar plan says what fits and what to change, without a run."),
    missing("datastates_ckpt", "DataStates is not supported; background_save writes checkpoints beside training."),
    gone("nebula", "Checkpoints are ordinary directories; background_save writes them beside training."),
    gone("checkpoint", "Checkpoints are whole or not at all, and resumed with any number of processes."),
    gone("checkpoint_writer", "background_save writes checkpoints beside training."),
    gone("tensorboard", _LOGS),
    gone("wandb", _LOGS),
    gone("csv_monitor", _LOGS),
    gone("comet", _LOGS),
    gone("flops_profiler", _PROFILE),
    gone("comms_logger", _PROFILE),
    gone("timers", _PROFILE),
    gone("wall_clock_breakdown", _PROFILE),
    gone("memory_breakdown", "The log has peaks per tier (docs/report.md)."),
    gone("dump_state", "hf-patrickstar report makes a page of a run."),
    gone("log_level", "--log_level of the Trainer says it."),
    gone("disable_python_gc", "The garbage collector of Python is left alone."),
    gone("vocabulary_size", "Sizes of the model are not checked."),
    gone("zero3_init_flag", "hf_patrickstar.deferred_weights in the script reads weights straight into chunks."),
)

RULES: tuple[Rule, ...] = (
    *(Rule(f"zero_optimization.{rule.key}", rule.kind, rule.why, rule.name, rule.make, rule.cannot) for rule in _ZERO),
    *_PRECISION,
    *_TRAINING,
    *_FEATURES,
)
"""The rules; see ``Rule``."""


def normalized(key: str) -> str:
    """A key as the rules name it: DeepSpeed also takes names of stage 3 without their prefix."""
    section, _, name = key.partition(".")
    known = {rule.key for rule in _ZERO}
    if section == "zero_optimization" and name not in known and f"stage3_{name}" in known:
        return f"{section}.stage3_{name}"
    return key
