"""Fills the caches of a CPU with other things, as a step of training does between two pieces of the host's work.

[Note: cold caches]
Where the device is the CPU, its cores compute for a millisecond between two modules, and go through more memory than
their caches hold. Python, the engine and torch's dispatch then run from memory that is far away, and take two to three
times as long as in a loop of their own. What they cost is measured between sweeps of a large buffer, therefore, whose
own time is left out. A host with an accelerator computes little itself, and needs no sweeps.
"""

import time
from collections.abc import Iterable
from typing import Any

import torch

from hf_patrickstar.memory.accelerator import is_accelerator
from hf_patrickstar.units import MIB

SWEPT_NBYTES = 32 * MIB
"""More than what the caches of a core hold."""


class Sweeps:
    """Sweeps of one buffer.

    Args:
        device: Where the model is that they are made in; on an accelerator there are none.
        nbytes: Bytes of the buffer.

    Attributes:
        seconds: What sweeps have taken since it was set to zero.
    """

    def __init__(self, device: torch.device, nbytes: int = SWEPT_NBYTES) -> None:
        self.seconds = 0.0
        self._others = None if is_accelerator(device) else torch.zeros(nbytes // torch.float32.itemsize, device=device)

    def sweep(self) -> None:
        """Reads and writes all of the buffer."""
        if self._others is not None:
            begin = time.perf_counter()
            self._others.add_(1.0)
            self.seconds += time.perf_counter() - begin

    def between(self, modules: Iterable[torch.nn.Module]) -> torch.nn.Sequential:
        """A model of modules with a sweep after each, in forward and in backward.

        Args:
            modules: The modules.
        """
        if self._others is None:
            return torch.nn.Sequential(*modules)
        return torch.nn.Sequential(*(part for module in modules for part in (module, _Interlude(self))))


class _Interlude(torch.nn.Module):
    """Returns its input after a sweep, and its gradient, too."""

    def __init__(self, sweeps: Sweeps) -> None:
        super().__init__()
        self._sweeps = sweeps

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Sweeps, and looks at the input in the same way.

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
