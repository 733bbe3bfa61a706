"""Which kernel updates the chunks of an optimizer."""

import torch

from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.optim.adam_kernel import AdamKernel, is_plain_adam
from hf_patrickstar.optim.threads import HostThreads
from hf_patrickstar.optim.torch_kernel import TorchKernel
from hf_patrickstar.optim.workers import HostWorkers

_ONE_BY_ONE = ("torch.optim", "transformers.optimization")
"""Packages whose optimizers update every parameter independently of the others."""


def is_one_by_one(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is known to update every parameter independently; an optimizer of other libraries is not."""
    module = type(optimizer).__module__
    is_known = any(module == package or module.startswith(f"{package}.") for package in _ONE_BY_ONE)
    return is_known and not isinstance(optimizer, torch.optim.LBFGS)


def make_kernel(
    optimizer: torch.optim.Optimizer,
    pool: PayloadPool,
    prefer_fused: bool,
    threads: HostThreads | None = None,
    workers: HostWorkers | None = None,
    has_lanes: bool = False,
    overlaps: bool = False,
) -> "AdamKernel | TorchKernel":
    """The kernel for a user's optimizer.

    Args:
        optimizer: The optimizer.
        pool: Where scratch space comes from.
        prefer_fused: Whether to use torch's fused kernel where the optimizer leaves the choice open.
        threads: The threads that torch computes updates on the host with; by default those that it has.
        workers: The threads that compute the updates of Adam on the host; by default as many as torch has.
        has_lanes: Whether a device computes beside the host.
        overlaps: Whether updates on the host may go on while the program does.
    """
    if is_plain_adam(optimizer):
        return AdamKernel(optimizer, pool, prefer_fused, workers, has_lanes)
    return TorchKernel(optimizer, pool, not is_one_by_one(optimizer), threads, overlaps)
