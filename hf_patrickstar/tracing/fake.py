"""Tensors that have no bytes, and copies of modules that have such tensors."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from hf_patrickstar.tracing.twins import copy_without_bytes, fake_mode


class FakeTensors(FakeTensorMode):
    """Inside of it new tensors have no bytes.

    ``deepcopy`` copies the attributes of a fake tensor, and its mode is one of them: the copies, of layers that a model
    makes of its first one for example, would be those of another mode, with which torch does not compute.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "FakeTensors":
        return self


def as_fake(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of a module whose tensors have no bytes; called under fake tensors.

    Args:
        module: The module; its parameters may be those of ``deferred_weights``, or on the meta device.
    """
    copied: torch.nn.Module = copy_without_bytes(module, device=torch.device("cpu"))
    for part in copied.modules():
        if "name_or_path" in vars(part):
            vars(part)["name_or_path"] = ""  # or the engine would compare frozen weights with files
    return copied


def copying() -> FakeCopyMode:
    """Inside of it ``deepcopy`` makes fake tensors of ordinary ones."""
    return FakeCopyMode(fake_mode())


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Inside, attention drops no scores: an accelerator drops them inside of its kernel, and writes none of them."""
    attend = torch.nn.functional.scaled_dot_product_attention

    def attend_to_all(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        return attend(query, key, value, attn_mask, 0.0, *args, **kwargs)

    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attend_to_all):
        yield
