"""Which kernel updates the chunks of an optimizer."""

import logging

import torch

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.optim.adam_kernel import AdamKernel, is_plain_adam
from hf_patrickstar.optim.threads import HostThreads
from hf_patrickstar.optim.torch_kernel import TorchKernel
from hf_patrickstar.optim.workers import HostWorkers

logger = logging.getLogger(__name__)

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
    is_alone: bool = True,
) -> "AdamKernel | TorchKernel":
    """The kernel for a user's optimizer.

    Args:
        optimizer: The optimizer.
        pool: Where scratch space comes from.
        prefer_fused: Whether to use torch's fused kernel where the optimizer leaves the choice open.
        threads: The threads that torch computes updates on the host with; by default those that it has.
        workers: The threads that compute the updates of Adam on the host; by default as many as torch has.
        has_lanes: Whether a device computes beside the host.
        is_alone: Whether there is one process, which updates all parameters.

    Raises:
        ConfigError: If the optimizer needs all parameters, and other processes have some of them.
    """
    if is_plain_adam(optimizer):
        return AdamKernel(optimizer, pool, prefer_fused, workers, has_lanes)
    is_at_once = not is_one_by_one(optimizer)
    if is_at_once and not is_alone:
        _check_parts(optimizer)
    return TorchKernel(optimizer, pool, is_at_once, threads)


def _check_parts(optimizer: torch.optim.Optimizer) -> None:
    """Checks an optimizer that may look at all parameters together, where each process has only some of them."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            f"optimizer: {name} computes with all parameters together, and with several processes each of them updates "
            "only its own part; train with one process, or use another optimizer"
        )
    logger.warning(
        "patrickstar: %s is not known to update every parameter independently. With several processes each of them "
        "updates its own parameters: if the optimizer combines parameters, by a norm of all gradients for example, the "
        "weights are not those of one process",
        name,
    )
