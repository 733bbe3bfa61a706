"""Norms of gradients, by the kernels of ``torch.nn.utils.get_total_norm``."""

from typing import Any

import torch

_BLOCK_NUMEL = 2**16
_PART_BLOCKS = 64
"""Blocks that are widened together: their scratch space is small enough for malloc to use it again."""
_AT_ONCE = 64
"""Gradients of one call: their scratch space is 1/256 byte per element of the largest."""


class Norms:
    """Norms that are computed together: when one is read, or when the memory of its gradient is to be used again.

    It is the event of their tickets. Without an accelerator norms have the bits of ``torch.nn.utils.get_total_norm``,
    and with one, those of gradients on it. Plain torch would compute the others there, too, with other bits.

    Args:
        device: The compute device; by default the one of each gradient.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._is_beside = device is not None and device.type != "cpu"
        self._waiting: dict[tuple[Any, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def add(self, gradient: torch.Tensor, dtype: torch.dtype, norm_type: float = 2.0) -> torch.Tensor:
        """Takes a gradient whose norm is to be computed.

        Args:
            gradient: The gradient; not changed until then.
            dtype: The type of the norm: that of the optimizer's states.
            norm_type: Order of the norm.

        Returns:
            The norm, which has no elements until ``fill``.
        """
        norm = torch.zeros(0, dtype=dtype, device=gradient.device)
        # Beside a gradient that is not dense, torch would compute others with another kernel.
        kind = gradient.device, gradient.dtype, gradient.is_contiguous() or id(gradient), dtype, norm_type
        self._waiting.setdefault(kind, []).append((norm, gradient))
        return norm

    def query(self) -> bool:
        """Whether none is to be computed."""
        return not self._waiting

    @torch.no_grad()
    def synchronize(self) -> None:
        """Computes the norms: each becomes a scalar, on the device of its gradient."""
        for (device, _, _, dtype, norm_type), waiting in self._waiting.items():
            for start in range(0, len(waiting), _AT_ONCE):
                norms, gradients = zip(*waiting[start : start + _AT_ONCE], strict=True)
                if device.type != "cpu":
                    computed = list(torch._foreach_norm(gradients, norm_type, dtype=dtype))
                elif self._is_beside and norm_type == 2.0:
                    computed = [norm_in_blocks(gradient, dtype) for gradient in gradients]
                else:
                    computed = [torch.linalg.vector_norm(gradient, norm_type, dtype=dtype) for gradient in gradients]
                for norm, found in zip(norms, computed, strict=True):
                    norm.set_(found)
        self._waiting.clear()

    fill = synchronize

    def need(self, norm: torch.Tensor) -> None:
        """Makes sure that a norm is computed."""
        if not norm.numel():
            self.fill()


def norm_in_blocks(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The 2-norm of a gradient on the host, on all cores if it is large.

    torch's own norm takes one core: on 16 cores 0.48 s for 525 M elements in bf16, which it widens in new memory first.
    It also adds up all squares in a few numbers; of 67 M values in fp32 its result was 0.5 % too small.

    Args:
        gradient: The gradient.
        dtype: The type of the norm.
    """
    if gradient.numel() <= _BLOCK_NUMEL:
        return torch.linalg.vector_norm(gradient, dtype=dtype)
    norms = []
    for part in gradient.reshape(-1).split(_PART_BLOCKS * _BLOCK_NUMEL):
        numel = part.numel() // _BLOCK_NUMEL * _BLOCK_NUMEL
        norms.append(torch.linalg.vector_norm(part[:numel].view(-1, _BLOCK_NUMEL), dim=1, dtype=dtype))
        if numel < part.numel():
            norms.append(torch.linalg.vector_norm(part[numel:], dtype=dtype).view(1))
    return torch.linalg.vector_norm(torch.cat(norms))
