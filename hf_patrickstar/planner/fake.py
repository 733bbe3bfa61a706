"""Copies of modules whose tensors have no bytes."""

import copy
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeCopyMode


def as_fake(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of a module whose tensors have no bytes; called under fake tensors.

    Args:
        module: The module; its parameters may be those of ``deferred_weights``, or on the meta device.
    """
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        value = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(value, tensor.requires_grad) if is_parameter else value
    with copying():
        copied = copy.deepcopy(module, memo)
    for part in copied.modules():
        if "name_or_path" in vars(part):
            vars(part)["name_or_path"] = ""  # or the engine would compare frozen weights with files
    return copied


def copying() -> FakeCopyMode:
    """Inside of it ``deepcopy`` makes fake tensors of ordinary ones."""
    mode = detect_fake_mode()
    assert mode is not None
    return FakeCopyMode(mode)
