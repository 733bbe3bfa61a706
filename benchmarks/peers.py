"""Steps of training under other systems that keep model data on the host: FSDP2 and DeepSpeed ZeRO-3, one process.

Each is set up as its users set it up, without a launcher: the benchmark makes a group of one process itself.
"""

import contextlib
import os

import torch

from hf_patrickstar.units import format_nbytes

ADAMW = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
"""Settings of AdamW for every system; beside the rate they are the defaults of torch."""
NO_DEEPSPEED = "deepspeed is not installed"
HOST_NBYTES = {"fsdp2": 16, "zero3": 18}
"""Bytes of the host per parameter; ``bench_paper_scale`` says where they come from."""


def has_deepspeed(device):
    """Whether DeepSpeed can be imported; an installation that is broken is an error, not a missing one.

    Args:
        device: Where it is to compute; it decides when it is imported.
    """
    os.environ["DS_ACCELERATOR"] = device.type
    try:
        import deepspeed  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        return False
    return True


def shortage_of_host(kind, num_parameters, available_nbytes):
    """Why the host is too small, or an empty text: Linux would kill this process without a word about memory.

    Args:
        kind: A key of ``HOST_NBYTES``, or another, of which nothing is known.
        num_parameters: Parameters of the model.
        available_nbytes: What the host has left.
    """
    needed = HOST_NBYTES.get(kind, 0) * num_parameters
    if needed <= available_nbytes:
        return ""
    return (
        f"{HOST_NBYTES[kind]} bytes per parameter are {format_nbytes(needed)} of the host, and "
        f"{format_nbytes(available_nbytes)} are left"
    )


@contextlib.contextmanager
def process_group(device):
    """A group of one process, over gloo for tensors on the host and nccl for those on a GPU."""
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})  # for DeepSpeed
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # a device without an index is refused
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def make_fsdp2_step(model, device, max_norm):
    """The step of FSDP2: fp32 values, gradients and states on the host, blocks in bf16 on the device one by one.

    Args:
        model: A Llama with fp32 values on the host.
        device: Where it computes.
        max_norm: For clipping.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

    settings = {
        "mesh": torch.distributed.init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
    }
    for block in model.model.layers:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(batch):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    more = {
        "sharded_modules": sum(isinstance(module, FSDPModule) for module in model.modules()),
        "parameters_on": " ".join(sorted({parameter.device.type for parameter in model.parameters()})),
    }
    return step, more


def make_zero3_step(model, device, max_norm, batch_size):
    """The step of DeepSpeed ZeRO-3 with parameters and optimizer on the host, by its own CPU Adam.

    Args:
        model: A model with values on the host.
        device: Where it computes.
        max_norm: For clipping.
        batch_size: Samples of a step.
    """
    import deepspeed

    adamw = {**ADAMW, "betas": list(ADAMW["betas"])}
    config = zero3_config(True, batch_size, max_norm, adamw, is_pinned=device.type == "cuda")
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    if engine.zero_optimization_stage() != 3 or engine.zero_offload_optimizer() is None:
        raise RuntimeError(
            f"ZeRO-3 with offload was asked for, DeepSpeed made stage {engine.zero_optimization_stage()}"
        )

    def step(batch):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, {"optimizer": type(engine.basic_optimizer).__name__}


def zero3_config(is_bf16, batch_size, max_norm, adamw, is_pinned=False):
    """DeepSpeed's configuration of ZeRO-3 with everything offloaded; its AdamW is then the CPU Adam that it compiles.

    Args:
        is_bf16: Whether it computes in bf16.
        batch_size: Samples of a step of one process, or ``"auto"`` for the Trainer's.
        max_norm: For clipping, likewise.
        adamw: Settings of the optimizer, likewise.
        is_pinned: Whether host memory is page-locked.
    """
    offload = {"device": "cpu", **({"pin_memory": True} if is_pinned else {})}
    return {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_clipping": max_norm,
        "bf16": {"enabled": is_bf16},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "optimizer": {"type": "AdamW", "params": adamw},
    }
