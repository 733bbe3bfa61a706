"""Which kernel updates the chunks of an optimizer."""

import torch

from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.optim.adam_kernel import AdamKernel, is_plain_adam
from hf_patrickstar.optim.torch_kernel import TorchKernel

_ONE_BY_ONE = ("torch.optim.", "transformers.optimization")
"""Modules whose optimizers update every parameter independently of the others."""


def is_one_by_one(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is known to update every parameter independently; an optimizer of other libraries is not."""
    return type(optimizer).__module__.startswith(_ONE_BY_ONE) and not isinstance(optimizer, torch.optim.LBFGS)


def make_kernel(optimizer: torch.optim.Optimizer, pool: PayloadPool, prefer_fused: bool) -> "AdamKernel | TorchKernel":
    """The kernel for a user's optimizer."""
    if is_plain_adam(optimizer):
        return AdamKernel(optimizer, pool, prefer_fused)
    return TorchKernel(optimizer, pool, updates_at_once=not is_one_by_one(optimizer))
