"""Copies of modules whose tensors have no bytes."""

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeCopyMode

from hf_patrickstar.tracing.twins import copy_without_bytes


def as_fake(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of a module whose tensors have no bytes; called under fake tensors.

    Args:
        module: The module; its parameters may be those of ``deferred_weights``, or on the meta device.
    """
    copied = copy_without_bytes(module, device=torch.device("cpu")).model
    for part in copied.modules():
        if "name_or_path" in vars(part):
            vars(part)["name_or_path"] = ""  # or the engine would compare frozen weights with files
    return copied


def copying() -> FakeCopyMode:
    """Inside of it ``deepcopy`` makes fake tensors of ordinary ones."""
    mode = detect_fake_mode()
    assert mode is not None
    return FakeCopyMode(mode)
