"""Dynamic loss scaling for fp16: torch's own ``GradScaler``, which finds overflows by the gradient norm."""

from typing import Any

import torch

from hf_patrickstar.optim.optimizer import ChunkedOptimizer


class ChunkedGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for a ``ChunkedOptimizer``.

    Scale, growth, backoff, ``update`` and ``state_dict`` are torch's. Gradients are in chunks, so ``unscale_`` checks
    their fp32 norm, which is not finite if one of them overflowed, and which clipping needs anyway. The optimizer
    removes the scale when it reads the gradients. A step that overflowed is dropped, and parameters keep their values.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        if not isinstance(optimizer, ChunkedOptimizer):  # its model is not prepared yet
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        norm = optimizer.unscale(inv_scale.float())
        overflow = (~torch.isfinite(norm)).to(device=found_inf.device, dtype=found_inf.dtype).reshape(found_inf.shape)
        return {found_inf.device: overflow}

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not isinstance(optimizer, ChunkedOptimizer):
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        if sum(found.item() for found in optimizer_state["found_inf_per_device"].values()):
            optimizer.skip_step()
            return None
        return optimizer.step(*args, **kwargs)
