"""What updates a chunk, and what all such kernels share."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import Chunk, GradientPlace, ManagedTensor

WORKSPACE = "workspace"

AT_HOME = frozenset({GradientPlace.PARAM, GradientPlace.LIST})
"""Where a kernel finds gradients."""


class Kernel(Protocol):
    """Updates chunks."""

    @property
    def list_names(self) -> tuple[str, ...]:
        """The fp32 lists that it needs beside ``param``."""
        ...

    @property
    def follows_homes(self) -> bool:
        """Whether a chunk may move its home between two steps."""
        ...

    @property
    def splits_tensors(self) -> bool:
        """Whether it can update a part of a tensor without the rest."""
        ...

    def workspace_numel(self, capacity_numel: int) -> int:
        """Elements of fp32 scratch space that a chunk needs to widen its 16-bit gradients."""
        ...

    def reserve(self, chunks: Sequence[Chunk], *also: Tier) -> None:
        """Allocates the scratch space for chunks with 16-bit gradients, on every tier where it is needed.

        Args:
            chunks: Those that this kernel updates; their homes need some.
            *also: More tiers that will. One that has some keeps it.
        """
        ...

    def release(self) -> None:
        """Gives the scratch space back."""
        ...

    @property
    def updates_at_once(self) -> bool:
        """Whether a step must see all parameters and gradients together."""
        ...

    def lent(self, tensors: Sequence[ManagedTensor]) -> "contextlib.AbstractContextManager[list[ManagedTensor]]":
        """Inside, the user's optimizer has fp32 masters in its groups, and states under them.

        Args:
            tensors: The parameters that it updates in chunks.

        Returns:
            Gives a list that has, when the block has ended, the parameters whose masters were changed.
        """
        ...

    def update_at_once(
        self,
        tensors: Sequence[ManagedTensor],
        present: Callable[[bool], torch.Tensor | None],
        follow: Callable[[ManagedTensor], None],
        closure: Callable[[], Any] | None,
    ) -> Any:
        """Runs the user's optimizer on all masters, if it must see them together; ``update`` ends it, chunk by chunk.

        Args:
            tensors: The parameters that it updates in chunks.
            present: Makes gradients ready at home, in fp32, and gives what they are to be multiplied with. Its
                argument: whether one that a step has consumed is missed.
            follow: Called for a parameter whose master has changed before its model is used again.
            closure: As for ``torch.optim.Optimizer.step``.

        Returns:
            What the optimizer's step returned.
        """
        ...

    def update_others(self, parameters: Sequence[torch.Tensor]) -> None:
        """Lets the user's optimizer update parameters that are in no chunk."""
        ...

    def begin_step(self) -> None:
        """Called once before the chunks of a step."""
        ...

    def end_step(self) -> None:
        """Called once when every chunk of a step is updated.

        Raises:
            BudgetError: If the optimizer's own state went over a budget.
        """
        ...

    @property
    def batch_numel(self) -> int:
        """Small chunks are updated together as long as they have at most so many elements; 0 for one by one."""
        ...

    def update(self, chunks: Sequence[Chunk], groups: Mapping[int, int], coefficient: torch.Tensor | None) -> None:
        """Updates chunks from their gradients, at their home.

        Args:
            chunks: The chunks; all have the same home.
            groups: Param group of each tensor index; tensors that are not in it are left alone.
            coefficient: What gradients are multiplied with (clipping, unscaling), or ``None``.
        """
        ...

    def tensor_state(self, tensor: ManagedTensor) -> dict[str, Any]:
        """The optimizer state of one parameter as torch would name it; copies on the host."""
        ...

    def load_tensor_state(self, tensor: ManagedTensor, state: dict[str, Any]) -> None:
        """Takes over a state as ``tensor_state`` or a torch optimizer gives it."""
        ...

    def own_state(self, tensor: ManagedTensor) -> dict[str, Any]:
        """What this rank has of the state of one parameter, in place; empty before its first step."""
        ...

    def state_places(self, tensor: ManagedTensor) -> dict[str, torch.Tensor]:
        """The tensors of a state that exist whether there is a state or not; what this rank has of them."""
        ...

    def load_own_state(self, tensor: ManagedTensor, state: dict[str, Any]) -> None:
        """Takes over what this rank has of a state, beside what was written to ``state_places`` already."""
        ...


def in_batches(chunks: Iterable[Chunk], batch_numel: int) -> Iterator[list[Chunk]]:
    """Chunks that are updated in one call: a large one alone, small ones with those after them on the same tier.

    Args:
        chunks: What is to be updated, in order.
        batch_numel: The most elements that several chunks may have together.
    """
    batch: list[Chunk] = []
    numel = 0
    for chunk in chunks:
        numel += chunk.param.numel()
        if batch and (chunk.home is not batch[0].home or numel > batch_numel):
            yield batch
            batch, numel = [], chunk.param.numel()
        batch.append(chunk)
    if batch:
        yield batch


def raw_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """An optimizer's step without the hooks that are called around it, which belong to the whole step."""
    step = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    return functools.partial(step, optimizer)


def update_others(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    """Runs an optimizer's own step on a part of the parameters in its groups."""
    if not any(parameter.grad is not None for parameter in parameters):
        return
    chosen = {id(parameter) for parameter in parameters}
    lists = [group["params"] for group in optimizer.param_groups]
    kept = [list(params) for params in lists]
    try:
        for params in lists:
            params[:] = [parameter for parameter in params if id(parameter) in chosen]
        raw_step(optimizer)()
    finally:
        for params, before in zip(lists, kept, strict=True):
            params[:] = before


def place_state(key: str, value: Any, device: torch.device, group: Mapping[str, Any]) -> Any:
    """Puts a value of an optimizer's state where torch expects it: ``step`` is on the host unless a kernel reads it."""
    if not isinstance(value, torch.Tensor):
        return value
    if key == "step":
        is_read_by_kernel = group.get("fused") or group.get("capturable")
        return value.to(device if is_read_by_kernel else "cpu", copy=True)
    return value.to(device, copy=True) if value.dim() else value


def reserve_workspace(
    kernel: Kernel, scratch: dict[Tier, torch.Tensor], pool: PayloadPool, chunks: Sequence[Chunk], also: Iterable[Tier]
) -> None:
    """Scratch space on every tier where one of the chunks is at home, and on some others."""
    trainable = [chunk for chunk in chunks if chunk.spec.is_updated]
    if not trainable:
        return
    largest = max((chunk.spec.chunk_numel for chunk in trainable), default=0)
    for tier in {chunk.home for chunk in trainable} | set(also):
        if tier not in scratch:
            scratch[tier] = pool.allocate(tier, kernel.workspace_numel(largest), torch.float32, WORKSPACE)


def release_workspace(scratch: dict[Tier, torch.Tensor], pool: PayloadPool) -> None:
    """Gives it back."""
    for tier, buffer in scratch.items():
        pool.release(tier, buffer, WORKSPACE, keep=False)
    scratch.clear()
