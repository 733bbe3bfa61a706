"""The norm of all gradients together."""

from collections.abc import Iterable, Sequence

import torch

from hf_patrickstar.runtime.manager import ChunkManager
from hf_patrickstar.runtime.norms import Norms
from hf_patrickstar.runtime.parameter import ManagedParameter


def total_norm(
    manager: ChunkManager, items: Iterable[ManagedParameter | torch.Tensor], norm_type: float
) -> torch.Tensor:
    """The total norm of gradients; with several processes all call it together.

    Args:
        manager: The manager of the chunks.
        items: The ``ManagedParameter`` of each parameter in a chunk, other parameters themselves. Those without a
            gradient are skipped.
        norm_type: Order of the norm.

    Returns:
        A scalar tensor: the norm of the unscaled gradients, if a loss scale is still to be removed.
    """
    gradients = manager.gradients
    manager.take_gradients()
    if gradients.coefficient is not None:
        manager.apply_factor()
    if norm_type == 2.0:
        gradients.records_norms = True
    norms: list[torch.Tensor] = []
    shared: dict[int, torch.Tensor] = {}  # by their places among those of all ranks
    others: dict[int, int] = {}  # where they are in ``norms``; only this rank knows whether there is one
    num_shared = 0
    manager.gradient_mirrors.sync()
    inverse_scale = gradients.inverse_scale
    norms_of_others = Norms()
    with gradients.lock:  # another thread may read a gradient, which can move it
        for item in items:
            if not isinstance(item, ManagedParameter):
                if item.grad is not None:
                    others[num_shared + len(others)] = len(norms)
                    norms.append(norms_of_others.add(item.grad, item.grad.dtype, norm_type))
                continue
            gradients.check_complete(item)
            if not item.has_gradient:
                continue
            place = num_shared + (item.chunk.rank if item.is_split else 0)
            num_shared += len(item.parts) if item.is_split else 1  # its norm follows from the norms of its parts
            found = _norm_of(manager, item, norm_type)
            if found is not None:
                norms.append(found)
                shared[place] = found
        gradients.norms.fill()
        norms_of_others.fill()
    if inverse_scale is not None:
        for index in others.values():
            norms[index] = norms[index] / inverse_scale.to(norms[index].device)
    if not manager.sharing.is_alone:
        together = torch.zeros(num_shared + len(others), dtype=torch.float32, device="cpu")
        is_shared = torch.tensor([place not in others for place in range(len(together))], device="cpu")
        together[is_shared] = manager.sharing.scalars(shared, num_shared)
        for place, index in others.items():
            together[place] = norms[index]
    elif norms:
        together = _stack(norms)
    else:
        return torch.tensor(0.0, dtype=torch.float32, device="cpu")
    total = torch.linalg.vector_norm(together, norm_type)
    return total if inverse_scale is None else total * inverse_scale.to(total.device)


def _norm_of(manager: ChunkManager, tensor: ManagedParameter, norm_type: float) -> torch.Tensor | None:
    """The norm of this rank's part of a gradient, for ``Norms.fill``; the 2-norm is kept until the gradient changes."""
    if norm_type == 2.0 and tensor.gradient_norm is not None and tensor.deferred_gradient is None:
        tensor.chunk.wait_for_host_work()
        return tensor.gradient_norm
    gradient = manager.gradients.of(tensor)
    if gradient is None:
        return None
    norm = manager.gradients.norms.add(gradient, tensor.chunk.state_dtype, norm_type)
    if norm_type == 2.0:
        tensor.gradient_norm = norm
    return norm


def _stack(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Scalars of several devices as one vector on the first one's, in order; one copy per other device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for norm in norms:
        by_device.setdefault(norm.device, []).append(norm)
    moved = {device: iter(torch.stack(some).to(norms[0].device).unbind()) for device, some in by_device.items()}
    return torch.stack([next(moved[norm.device]) for norm in norms])
