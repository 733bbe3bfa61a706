"""The base class of kernels, which update chunks, and functions that handle optimizers."""

import abc
import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from hf_patrickstar.layout.packing import ChunkSpec
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.optim.workers import HostWorkers
from hf_patrickstar.runtime.chunk import Chunk
from hf_patrickstar.runtime.parameter import ManagedParameter
from hf_patrickstar.runtime.update import Update

WORKSPACE = "workspace"
Factors = Mapping[torch.device, torch.Tensor]
"""What gradients are multiplied with (clipping, unscaling), by the device of a chunk's home; empty if they are not."""
SAVED_MASTER = "patrickstar_master"
"""The name of the fp32 master in a ``state_dict``: an optimizer may keep something of its own under ``master``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Means:
    """What the kernels of one engine compute with.

    Attributes:
        pool: It gives the scratch space.
        has_lanes: Whether a device computes beside the host.
        is_alone: Whether there is one process, which updates all parameters.
        state_dtype: The setting of this name.
        prefer_fused: Whether to use torch's fused kernel where the optimizer leaves the choice open.
        workers: The threads that compute the updates of elementwise kernels on the host.
        num_threads: How many threads torch computes the updates of other optimizers with; ``None`` for those that it
            has.
    """

    pool: PayloadPool
    has_lanes: bool
    is_alone: bool
    state_dtype: str
    prefer_fused: bool = False
    workers: HostWorkers = dataclasses.field(default_factory=HostWorkers)
    num_threads: int | None = None


class Kernel(abc.ABC):
    """A kernel updates chunks with the user's optimizer.

    Args:
        optimizer: The user's optimizer.
        means: What it computes with.
    """

    list_names: tuple[str, ...]
    """The kernel needs these fp32 lists beside ``param``."""

    splits_tensors: bool
    """Whether the kernel can update a part of a tensor without the rest."""

    updates_at_once: bool
    """Whether a step must see all parameters and gradients together."""

    runs_beside: bool
    """Whether the kernel has all states in chunk lists.

    Then updates of all chunks are prepared together, which read everything that may change, and may run in another
    thread while the program goes on; between two steps chunks may move their homes. Gradients in no list are read where
    autograd has left them ([Note: rest]). Else the optimizer keeps tensors of its own, and a chunk is updated before
    the update of the next one is prepared.
    """

    can_stream = False
    """Whether it can update chunks over the bus; see [Note: updates over the bus]."""

    def __init__(self, optimizer: torch.optim.Optimizer, means: Means) -> None:
        self._optimizer = optimizer
        self._means = means
        self._pool = means.pool
        self._scratch: dict[Tier, torch.Tensor] = {}

    def state_type(self, parameter: torch.Tensor, numel: int) -> str:
        """Returns the type of a parameter's states beside the master; by default it is empty: that of the master.

        Args:
            parameter: The parameter.
            numel: Its elements.
        """
        return ""

    @abc.abstractmethod
    def workspace_numel(self, tier: Tier, capacity_numel: int, *, widens: bool = True) -> int:
        """Returns how many fp32 elements of scratch space a chunk with 16-bit parameters needs.

        Args:
            tier: The chunk's home.
            capacity_numel: The elements of the chunk.
            widens: Whether its gradients are widened to fp32. Those of an accumulation list are wide.
        """

    def slots_nbytes(self, specs: Iterable[ChunkSpec], tile_part: int) -> int:
        """Returns the bytes of the device that updates over the bus need; 0 if the kernel has none.

        Args:
            specs: The chunks that it updates.
            tile_part: See ``Homes``.
        """
        return 0

    def ring_nbytes(self, specs: Iterable[ChunkSpec]) -> int:
        """Returns the bytes of the host that updates of chunks need whose states are on the disk."""
        return 0

    def reserve(self, chunks: Sequence[Chunk], *also: Tier, widens: bool = True) -> None:
        """Allocates the scratch space for chunks with 16-bit parameters, on every tier that needs it and has none.

        Args:
            chunks: This kernel updates them. The tiers of their homes need scratch space.
            *also: These tiers need scratch space, too.
            widens: See ``workspace_numel``.
        """
        updated = [chunk for chunk in chunks if chunk.spec.types.widens]
        if self.updates_at_once or not updated:
            return
        capacity_numel = max(chunk.spec.chunk_numel for chunk in updated)
        for tier in {*also, *(chunk.home for chunk in updated)} - self._scratch.keys():
            numel = self.workspace_numel(tier, capacity_numel, widens=widens)
            if numel:
                self._scratch[tier] = self._pool.allocate(tier, numel, torch.float32, WORKSPACE)

    def release(self) -> set[Tier]:
        """Gives the scratch space back, and returns the tiers where it was."""
        tiers = set(self._scratch)
        for tier, buffer in self._scratch.items():
            self._pool.release(tier, buffer, WORKSPACE, keep=False)
        self._scratch.clear()
        return tiers

    @contextlib.contextmanager
    def lent(self, tensors: Sequence[ManagedParameter]) -> Iterator[list[ManagedParameter]]:
        """Puts fp32 masters into the groups and states of the user's optimizer for a block; by default, does nothing.

        Args:
            tensors: The optimizer updates these parameters in chunks.

        Yields:
            A list. After the block it has the parameters whose masters the block changed.
        """
        yield []

    def update_others(self, parameters: Sequence[torch.Tensor]) -> None:
        """Runs the step of the user's optimizer on parameters that are in no chunk."""
        if not any(parameter.grad is not None for parameter in parameters):
            return
        chosen = {id(parameter) for parameter in parameters}
        groups = self._optimizer.param_groups
        left_out = torch.nn.Parameter(torch.zeros(0, device="cpu"))  # bitsandbytes knows settings by places in groups
        lists = [[p if id(p) in chosen else left_out for p in group["params"]] for group in groups]
        self._step_over(lists, self._optimizer.state)

    def _step_over(self, lists: Sequence[list[Any]], states: Any) -> None:
        """Runs the step of the user's optimizer over other parameters.

        Args:
            lists: The parameters of each of its param groups.
            states: What it keeps of them, by parameter.
        """
        optimizer = self._optimizer
        before = optimizer.param_groups, optimizer.state
        optimizer.param_groups = [{**group, "params": own} for group, own in zip(before[0], lists, strict=True)]
        optimizer.state = states
        try:
            raw_step(optimizer)()
        finally:
            optimizer.param_groups, optimizer.state = before

    def end_step(self) -> None:  # noqa: B027
        """Ends a step after every chunk is updated; by default, does nothing.

        Raises:
            BudgetError: If the optimizer's own state went over a budget.
        """

    @abc.abstractmethod
    def prepare(
        self, chunks: Sequence[Chunk], groups: Mapping[int, int], factors: Factors, *, keeps: bool
    ) -> list[Update]:
        """Prepares updates of chunks from their gradients, at their homes.

        Args:
            chunks: The chunks, in the order in which they are needed next. Their gradients have places there.
            groups: The param group of each tensor index. The kernel leaves other tensors alone.
            factors: The kernel multiplies gradients with them.
            keeps: Whether gradients in the accumulation list stay there, multiplied. If not, nobody reads them again,
                and the kernel may leave anything there.

        Returns:
            The updates, of some chunks each, in an order in which they may be made. If ``runs_beside``, settings and
            places may change before they run.
        """

    def tensor_state(self, tensor: ManagedParameter) -> dict[str, Any]:
        """Returns a copy of ``own_state`` on the host, with the names that torch uses."""
        return {
            key: value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
            for key, value in self.own_state(tensor).items()
        }

    def load_tensor_state(self, tensor: ManagedParameter, state: dict[str, Any]) -> None:
        """Takes over a state from ``tensor_state`` or a torch optimizer; an empty state resets the parameter.

        Raises:
            ValueError: If a value has no scale here, or needs one; nothing has changed then.
        """
        tensor.chunk.wait_for_reader()
        places = self.state_places(tensor) if state else {}
        for key, place in places.items():
            found = getattr(state.get(key), "dtype", None)
            if found is None or (found is torch.uint8) != (place.dtype is torch.uint8):
                raise ValueError(
                    f"optimizer state '{key}' of parameter '{tensor.spec.name}' must be {place.dtype}, got {found}: a "
                    "state keeps its number of bits while its parameter is in a chunk"
                )
        for key, place in places.items():
            place.copy_(tensor.own(state[key]))
        self.load_own_state(tensor, state)

    def check_own_state(self, tensor: ManagedParameter, state: Mapping[str, Any]) -> None:
        """Makes sure that a state has all that the kernel needs; an empty one is allowed.

        Raises:
            ValueError: If something is missing.
        """
        missing = sorted(key for key in self.state_places(tensor) if not isinstance(state.get(key), torch.Tensor))
        if missing and state.keys() - {SAVED_MASTER}:
            raise ValueError(
                f"optimizer state of parameter '{tensor.spec.name}' has no '{missing[0]}': it was saved by another "
                "optimizer, or with other options"
            )

    @abc.abstractmethod
    def own_state(self, tensor: ManagedParameter) -> dict[str, Any]:
        """Returns this rank's part of a parameter's state, not a copy; it is empty before the first step."""

    def state_places(self, tensor: ManagedParameter) -> dict[str, torch.Tensor]:
        """Returns this rank's part of the state tensors that always exist; by default, there are none."""
        return {}

    @abc.abstractmethod
    def load_own_state(self, tensor: ManagedParameter, state: dict[str, Any]) -> None:
        """Takes over this rank's part of a state except ``state_places``; an empty state resets the parameter."""


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of the settings of a param group; schedulers also write to tensors that are settings."""
    plain = (int, float, str, type(None))
    return {k: v if isinstance(v, plain) else _copied(v) for k, v in group.items() if k != "params"}


_copied = functools.partial(tree_map_only, torch.Tensor, lambda tensor: tensor.detach().clone())


def raw_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Returns an optimizer's step without its hooks, which are called once around the whole step."""
    step = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    return functools.partial(step, optimizer)


def place_state(state: Mapping[Any, Any], device: torch.device, group: Mapping[str, Any]) -> dict[Any, Any]:
    """Copies an optimizer's state to where torch expects it: ``step`` is on the host unless a kernel reads it."""
    is_read_by_kernel = group.get("fused") or group.get("capturable")
    placed = dict(state)
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and (value.dim() or key == "step"):
            placed[key] = value.to(device if is_read_by_kernel or key != "step" else "cpu", copy=True)
        elif isinstance(value, torch.Tensor):
            placed[key] = value.clone()
    return placed
