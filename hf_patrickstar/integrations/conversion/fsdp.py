"""Every key of ``--fsdp_config`` and of Accelerate's FSDP section, without ``fsdp_``, and what it becomes."""

from typing import Any

from hf_patrickstar.integrations.conversion.rules import Rule, argument, gone, missing, setting

_WRAP = "Modules are not wrapped; chunks hold parameters in the order of the model, whatever its modules are."
_FULL = "What is saved is always a whole Hugging Face checkpoint; optimizer states are written by each process."
_OFFLOAD = "Model data is at home on the host where the device has no room; nothing has to be switched on."
_PREFETCH = "A plan loads chunks ahead in forward and backward; prefetch_depth says how many, automatically."
_XLA = "TPUs are not supported."
_ALWAYS = ("true", "full_shard", "1", "hybrid_shard", "4")
_NEVER = ("false", "shard_grad_op", "2", "no_shard", "3", "hybrid_shard_zero2", "5")


def _reshard(value: Any) -> bool | None:
    """Whether a name of a strategy, its number in FSDP1, or a flag gathers again for backward."""
    text = str(value).strip().lower()
    if text in _ALWAYS:
        return True
    return False if text in _NEVER else None


def _is_hybrid(value: Any) -> bool:
    return str(value).strip().lower() in ("hybrid_shard", "4", "hybrid_shard_zero2", "5")


def _is_on(value: Any) -> bool:
    return str(value).strip().lower() == "true"


_STRATEGY = (
    "After forward a group of chunks leaves the device (true, FULL_SHARD), or stays as long as nothing else needs the "
    "room (false, SHARD_GRAD_OP). Model data is always divided over all processes, never as NO_SHARD or HYBRID_SHARD."
)

RULES: tuple[Rule, ...] = (
    gone("version", "FSDP1 and FSDP2 are replaced alike."),
    setting("reshard_after_forward", "reshard_after_forward", _STRATEGY, _reshard, _is_hybrid),
    setting("sharding_strategy", "reshard_after_forward", _STRATEGY, _reshard, _is_hybrid),
    gone("cpu_offload", _OFFLOAD),
    gone("offload_params", _OFFLOAD),
    gone("auto_wrap_policy", _WRAP),
    gone("transformer_layer_cls_to_wrap", _WRAP),
    gone("transformer_cls_names_to_wrap", _WRAP),
    gone("min_num_params", _WRAP),
    gone("use_orig_params", "Parameters are always the model's own."),
    missing("ignored_modules", "Every parameter is in chunks; a module cannot be left out."),
    gone("state_dict_type", _FULL),
    gone("state_dict_config", _FULL),
    gone("optim_state_dict_config", _FULL),
    gone("backward_prefetch", _PREFETCH),
    gone("forward_prefetch", _PREFETCH),
    gone("limit_all_gathers", "The device budget limits what is gathered."),
    gone("sync_module_states", "Each process reads its part of the weights; buffers are those that the script made."),
    gone("param_init_fn", "hf_patrickstar.deferred_weights in the script reads weights straight into chunks."),
    gone(
        "cpu_ram_efficient_loading", "hf_patrickstar.deferred_weights in the script reads weights straight into chunks."
    ),
    argument(
        "activation_checkpointing", "--gradient_checkpointing", "Activations are computed again in backward.", _is_on
    ),
    missing(
        "activation_checkpointing_offload", "Activations are not moved to the host; they are computed again.", _is_on
    ),
    gone("mixed_precision_policy", "--bf16 or --fp16 says the type; reduce_dtype fp32 adds gradients in fp32."),
    missing("xla", _XLA),
    missing("xla_fsdp_v2", _XLA),
    missing("xla_fsdp_settings", _XLA),
    missing("xla_fsdp_grad_ckpt", _XLA),
)
"""The rules; see ``Rule``."""


def normalized(key: str) -> str:
    """A key as the rules name it."""
    return key.removeprefix("fsdp_")
