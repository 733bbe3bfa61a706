"""Fills the caches of a CPU with other things, as a step of training does between two pieces of the host's work.

[Note: cold caches]
Where the device is the CPU, its cores compute for a millisecond between two modules, and go through more memory than
the caches of a core hold. Python, the engine and torch's dispatch then run from memory that is far away, and take two
to three times as long as in a loop of their own. Therefore what they cost is measured between sweeps of a large buffer,
whose own time is left out. The thread that runs Python sweeps all of it, without those of torch: it is the caches of
its core that count. A host with an accelerator computes little itself, and needs no sweeps.
"""

import time
from collections.abc import Iterable
from typing import Any

import numpy
import torch

from hf_patrickstar.memory.accelerator import is_accelerator
from hf_patrickstar.units import MIB

SWEPT_NBYTES = 32 * MIB
"""More than what the private caches of a core hold, and as much as many cores share."""


class Sweeps:
    """Sweeps of one buffer.

    Args:
        device: The device of the model. There are no sweeps on an accelerator.
        nbytes: Bytes of the buffer.

    Attributes:
        seconds: What sweeps have taken since it was set to zero.
    """

    def __init__(self, device: torch.device, nbytes: int = SWEPT_NBYTES) -> None:
        self.seconds = 0.0
        numel = nbytes // torch.float32.itemsize
        self._buffer = None if is_accelerator(device) else numpy.zeros(numel, numpy.float32)

    def sweep(self) -> None:
        """Reads and writes all of the buffer."""
        if self._buffer is not None:
            begin = time.perf_counter()
            self._buffer += 1.0
            self.seconds += time.perf_counter() - begin

    def between(self, modules: Iterable[torch.nn.Module]) -> torch.nn.Sequential:
        """A model of modules with a sweep after each, in forward and in backward.

        Args:
            modules: The modules.
        """
        if self._buffer is None:
            return torch.nn.Sequential(*modules)
        return torch.nn.Sequential(*(part for module in modules for part in (module, _Interlude(self))))


class _Interlude(torch.nn.Module):
    """Returns its input after a sweep; in backward, its gradient after another one."""

    def __init__(self, sweeps: Sweeps) -> None:
        super().__init__()
        self._sweeps = sweeps

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Sweeps, and returns a view of the input.

        Args:
            inputs: Any tensor.
        """
        found: torch.Tensor = _Swept.apply(inputs, self._sweeps)
        return found


class _Swept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, sweeps: Sweeps) -> torch.Tensor:
        ctx.sweeps = sweeps
        sweeps.sweep()
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.sweeps.sweep()
        return gradients[0], None
