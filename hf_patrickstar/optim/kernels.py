"""How one chunk is updated: Adam in tiles over the chunk lists, or any torch optimizer on the chunk's masters.

[Note: same bits as torch]
An element-wise kernel treats the last few elements of a tensor, those that do not fill a vector register, by other
instructions than the rest, and may round them differently. So tensors may be joined, and cut, only where a multiple
of ``ALIGNMENT_NUMEL`` elements meets the boundary: then every element is computed by the same instructions as in an
optimizer that sees the parameters one by one, and results are the same bit for bit.
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim.adam import adam

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.layout.packing import ALIGNMENT_NUMEL
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import GRADIENT, MASTER, Chunk, GradientPlace, ManagedTensor

EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
WORKSPACE = "workspace"
_DEVICE_TILE_NUMEL = 2**24
_AT_HOME = frozenset({GradientPlace.PARAM, GradientPlace.LIST})


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
        present: Callable[[], torch.Tensor | None],
        follow: Callable[[ManagedTensor], None],
        closure: Callable[[], Any] | None,
    ) -> Any:
        """Runs the user's optimizer on all masters, if it must see them together; ``update`` ends it, chunk by chunk.

        Args:
            tensors: The parameters that it updates in chunks.
            present: Makes gradients ready at home, in fp32, and gives what they are to be multiplied with.
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

    def update(self, chunk: Chunk, groups: Mapping[int, int], coefficient: torch.Tensor | None) -> None:
        """Updates one chunk from its gradients, at its home.

        Args:
            chunk: The chunk.
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


@dataclasses.dataclass(slots=True)
class _Segment:
    """A range of a chunk whose elements are updated alike."""

    start: int
    stop: int
    group: int
    step: int
    place: GradientPlace


def is_plain_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is torch's Adam or AdamW with options that the chunk lists can hold."""
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not any(
        group.get("amsgrad") or group.get("capturable") or group.get("differentiable")
        for group in optimizer.param_groups
    )


class AdamKernel:
    """Adam and AdamW over the lists ``master``, ``exp_avg`` and ``exp_avg_sq``, tile by tile.

    A tile's gradient is widened to fp32 in scratch space, multiplied with the coefficient, used by torch's own Adam,
    and the new master is rounded into ``param``, all while the tile is in the cache.

    Args:
        optimizer: The optimizer that says what to do; its ``param_groups`` are read at every step.
        pool: Where scratch space comes from.
        tile_numel: Elements per tile, a multiple of the alignment.
        prefer_fused: Use torch's fused kernel where the optimizer leaves the choice open.
    """

    list_names = (MASTER, EXP_AVG, EXP_AVG_SQ)
    follows_homes = True
    splits_tensors = True
    updates_at_once = False

    def __init__(
        self, optimizer: torch.optim.Optimizer, pool: PayloadPool, tile_numel: int, prefer_fused: bool
    ) -> None:
        self._optimizer = optimizer
        self._pool = pool
        self._tile_numel = tile_numel
        self._prefer_fused = prefer_fused
        self._steps: dict[int, int | torch.Tensor] = {}  # tensors once somebody has seen them, and may write to them
        self._scratch: dict[Tier, torch.Tensor] = {}

    def workspace_numel(self, capacity_numel: int) -> int:
        """One tile, the larger one of a GPU's if the compute device is one."""
        tile_numel = max(self._tile_numel, _DEVICE_TILE_NUMEL) if self._prefer_fused else self._tile_numel
        return min(tile_numel, capacity_numel)

    def reserve(self, chunks: Sequence[Chunk], *also: Tier) -> None:
        """Allocates one tile per tier; see ``Kernel.reserve``."""
        _reserve(self, self._scratch, self._pool, chunks, also)

    def release(self) -> None:
        """Gives the tiles back."""
        _release(self._scratch, self._pool)

    @contextlib.contextmanager
    def lent(self, tensors: Sequence[ManagedTensor]) -> Iterator[list[ManagedTensor]]:
        """Nothing to do: torch's Adam has no methods that work on parameters beside ``step``."""
        yield []

    def update_at_once(self, *args: Any) -> Any:
        """Nothing to do: chunks are updated one by one."""

    def update_others(self, parameters: Sequence[torch.Tensor]) -> None:
        """Runs torch's own step on them."""
        _update_others(self._optimizer, parameters)

    def begin_step(self) -> None:
        """Nothing to do: every update reads the param groups."""

    def end_step(self) -> None:
        """Nothing to do: all state was allocated beforehand."""

    def update(self, chunk: Chunk, groups: Mapping[int, int], coefficient: torch.Tensor | None) -> None:
        """Updates one chunk; see ``Kernel.update``."""
        param, master = chunk.param, chunk.lists[MASTER]
        for segment in self._tiles(chunk, groups):
            part = slice(segment.start, segment.stop)
            gradient = self._gradient(chunk, segment)
            if coefficient is not None:
                gradient.mul_(coefficient)
            self._adam(master[part], gradient, chunk.lists[EXP_AVG][part], chunk.lists[EXP_AVG_SQ][part], segment)
            param[part].copy_(master[part])
        for tensor in chunk.owned:
            if tensor.gradient in _AT_HOME and tensor.spec.index in groups:
                steps = self._steps.get(tensor.spec.index, 0)
                self._steps[tensor.spec.index] = steps.add_(1) if isinstance(steps, torch.Tensor) else steps + 1

    def tensor_state(self, tensor: ManagedTensor) -> dict[str, Any]:
        """``step``, ``exp_avg`` and ``exp_avg_sq`` of one parameter; empty before its first step."""
        return {key: value.to("cpu", copy=True) for key, value in self.own_state(tensor).items()}

    def own_state(self, tensor: ManagedTensor) -> dict[str, Any]:
        """The same in place."""
        step = self._steps.get(tensor.spec.index)
        if step is None:
            return {}
        if not isinstance(step, torch.Tensor):
            step = self._steps[tensor.spec.index] = torch.tensor(float(step))
        return {"step": step, **self.state_places(tensor)}

    def state_places(self, tensor: ManagedTensor) -> dict[str, torch.Tensor]:
        """``exp_avg`` and ``exp_avg_sq``, in the chunk lists."""
        lists = tensor.chunk.lists
        return {EXP_AVG: tensor.view(lists[EXP_AVG]), EXP_AVG_SQ: tensor.view(lists[EXP_AVG_SQ])}

    def load_tensor_state(self, tensor: ManagedTensor, state: dict[str, Any]) -> None:
        """Takes over the state of one parameter; an empty state resets it."""
        for key, place in self.state_places(tensor).items() if state else ():
            place.copy_(tensor.own(state[key]))
        self.load_own_state(tensor, state)

    def load_own_state(self, tensor: ManagedTensor, state: dict[str, Any]) -> None:
        """Takes over the step of one parameter, whose averages are there already; an empty state resets all."""
        if state:
            self._steps[tensor.spec.index] = int(state["step"])
            return
        self._steps.pop(tensor.spec.index, None)
        for place in self.state_places(tensor).values():
            place.zero_()

    def _tiles(self, chunk: Chunk, groups: Mapping[int, int]) -> Iterator[_Segment]:
        """Ranges to update, joined and cut as [Note: same bits as torch] allows."""
        joined: list[_Segment] = []
        for tensor in chunk.owned:
            group = groups.get(tensor.spec.index)
            if group is None or tensor.gradient not in _AT_HOME or not tensor.own_numel:
                continue
            step = int(self._steps.get(tensor.spec.index, 0))
            start = tensor.home_offset_numel
            last = joined[-1] if joined else None
            if (
                last is not None
                and last.stop == start
                and last.stop % ALIGNMENT_NUMEL == 0
                and (last.group, last.step, last.place) == (group, step, tensor.gradient)
            ):
                last.stop = start + tensor.own_numel
            else:
                joined.append(_Segment(start, start + tensor.own_numel, group, step, tensor.gradient))
        for segment in joined:
            # Tiles are for the caches of CPUs; a GPU only pays for launching them.
            on_host = chunk.param.device.type == "cpu"
            numel = self._tile_numel if on_host else max(_DEVICE_TILE_NUMEL, self._tile_numel)
            if not on_host and chunk.home in self._scratch:
                numel = self._scratch[chunk.home].numel() // ALIGNMENT_NUMEL * ALIGNMENT_NUMEL
            for start in range(segment.start, segment.stop, numel):
                yield dataclasses.replace(segment, start=start, stop=min(start + numel, segment.stop))

    def _gradient(self, chunk: Chunk, segment: _Segment) -> torch.Tensor:
        part = slice(segment.start, segment.stop)
        if segment.place is GradientPlace.LIST:
            return chunk.lists[GRADIENT][part]
        if chunk.param.dtype is torch.float32:
            return chunk.param[part]
        return self._scratch[chunk.home][: segment.stop - segment.start].copy_(chunk.param[part])

    def _adam(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        segment: _Segment,
    ) -> None:
        group = self._optimizer.param_groups[segment.group]
        foreach, fused = group.get("foreach"), group.get("fused")
        if fused is None and foreach is None and self._prefer_fused:
            fused = True
        beta1, beta2 = group["betas"]
        # Made by a kernel: torch.tensor would copy from the host, and wait for it, once per tile.
        step = torch.full((), float(segment.step), device=master.device if fused else "cpu")
        adam(
            [master],
            [gradient],
            [exp_avg],
            [exp_avg_sq],
            [],
            [step],
            foreach=foreach,
            fused=fused,
            decoupled_weight_decay=group.get("decoupled_weight_decay", isinstance(self._optimizer, torch.optim.AdamW)),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )


class TorchKernel:
    """Any ``torch.optim.Optimizer``: its own ``step`` runs on fp32 masters.

    An optimizer that treats parameters one by one runs once per chunk. Values that it keeps in a group (a counter, say)
    are seen by every chunk as they were before the step, so that they advance once per step. Any other runs once on all
    masters, with all gradients, which takes 4 bytes per parameter more in 16-bit.

    Between steps its states are under the model's own parameters, as in torch.

    Args:
        optimizer: The user's optimizer.
        pool: Where scratch space comes from, and where the optimizer's own state is booked.
        updates_at_once: Whether it must see all parameters together.
    """

    list_names = (MASTER,)
    follows_homes = False  # the optimizer keeps tensors of its own where the masters were
    splits_tensors = False  # it may look at rows and columns, or at norms

    def __init__(self, optimizer: torch.optim.Optimizer, pool: PayloadPool, updates_at_once: bool) -> None:
        self.updates_at_once = updates_at_once
        self._optimizer = optimizer
        self._pool = pool
        self._masters: dict[int, torch.nn.Parameter] = {}
        self._scratch: dict[Tier, torch.Tensor] = {}
        self._before: list[dict[str, Any]] = []
        self._booked: dict[int, int] = {}
        self._over_budget: BudgetError | None = None

    def workspace_numel(self, capacity_numel: int) -> int:
        """A whole chunk."""
        return 0 if self.updates_at_once else capacity_numel

    def reserve(self, chunks: Sequence[Chunk], *also: Tier) -> None:
        """Allocates space for the largest chunk of each tier; see ``Kernel.reserve``."""
        if not self.updates_at_once:
            _reserve(self, self._scratch, self._pool, chunks, also)

    def release(self) -> None:
        """Gives the scratch space back."""
        _release(self._scratch, self._pool)

    @contextlib.contextmanager
    def lent(self, tensors: Sequence[ManagedTensor]) -> Iterator[list[ManagedTensor]]:
        """Puts masters into the groups; see ``Kernel.lent``."""
        changed: list[ManagedTensor] = []
        versions = [self._master(tensor)._version for tensor in tensors]
        with self._swapped(tensors):
            yield changed
        pairs = zip(tensors, versions, strict=True)
        changed += [tensor for tensor, version in pairs if self._master(tensor)._version != version]

    @contextlib.contextmanager
    def _swapped(self, tensors: Sequence[ManagedTensor], *, is_back: bool = False) -> Iterator[None]:
        """Masters in place of parameters, in groups and states, or the other way round for a part of such a block."""
        self._swap(tensors, is_back)
        try:
            yield
        finally:
            self._swap(tensors, not is_back)

    def _swap(self, tensors: Sequence[ManagedTensor], is_back: bool) -> None:
        pairs = [(tensor.parameter, self._master(tensor)) for tensor in tensors]
        twins = {id(old): new for old, new in (((b, a) for a, b in pairs) if is_back else pairs)}
        for group in self._optimizer.param_groups:
            # In place: some optimizers keep the list.
            group["params"][:] = [twins.get(id(parameter), parameter) for parameter in group["params"]]
        state = self._optimizer.state
        for key in [key for key in state if id(key) in twins]:
            state[twins[id(key)]] = state.pop(key)

    def update_at_once(
        self,
        tensors: Sequence[ManagedTensor],
        present: Callable[[], torch.Tensor | None],
        follow: Callable[[ManagedTensor], None],
        closure: Callable[[], Any] | None,
    ) -> Any:
        """Runs one step on all masters; see ``Kernel.update_at_once``."""

        def offer() -> None:
            factor = present()
            for tensor in tensors:
                master = self._master(tensor)
                master.grad = self._gradient(tensor) if tensor.gradient in _AT_HOME else None
                if master.grad is not None and factor is not None:
                    master.grad.mul_(factor.to(master.grad.device))

        def evaluate() -> Any:
            for tensor in tensors:
                self._master(tensor).grad = None
                follow(tensor)
            with self._swapped(tensors, is_back=True), torch.enable_grad():
                assert closure is not None
                loss = closure()
            offer()
            return loss

        with self._swapped(tensors):
            offer()
            try:
                return _raw_step(self._optimizer)(*(() if closure is None else (evaluate,)))
            finally:
                for tensor in tensors:
                    self._master(tensor).grad = None

    def update_others(self, parameters: Sequence[torch.Tensor]) -> None:
        """Runs the optimizer's step on them."""
        _update_others(self._optimizer, parameters)

    def begin_step(self) -> None:
        """Remembers what the groups hold before the step."""
        self._before = [_without_params(group) for group in self._optimizer.param_groups]

    def end_step(self) -> None:
        """Raises what booking the optimizer's state met, now that no chunk is left half updated."""
        error, self._over_budget = self._over_budget, None
        if error is not None:
            raise error

    def update(self, chunk: Chunk, groups: Mapping[int, int], coefficient: torch.Tensor | None) -> None:
        """Updates one chunk; see ``Kernel.update``."""
        work = [t for t in chunk.owned if t.spec.index in groups and t.gradient in _AT_HOME]
        if work and not self.updates_at_once:
            self._step_on(work, groups, coefficient)
        for tensor in [t for t in chunk.owned if t.spec.index in groups] if self.updates_at_once else work:
            if not (self.updates_at_once and tensor.gradient is GradientPlace.PARAM and tensor not in work):
                tensor.view(chunk.param).copy_(tensor.view(chunk.lists[MASTER]))
            self._book_state(tensor)

    def _step_on(
        self, work: Sequence[ManagedTensor], groups: Mapping[int, int], coefficient: torch.Tensor | None
    ) -> None:
        """Runs the optimizer's step on the masters of a part of the parameters."""
        param_groups = self._optimizer.param_groups
        with self._swapped(work):
            own_params = [group["params"] for group in param_groups]
            masters: list[list[torch.nn.Parameter]] = [[] for _ in param_groups]
            try:
                for tensor in work:
                    master = self._master(tensor)
                    gradient = self._gradient(tensor)
                    master.grad = gradient if coefficient is None else gradient.mul_(coefficient)
                    masters[groups[tensor.spec.index]].append(master)
                for group, params, before in zip(param_groups, masters, self._before, strict=True):
                    group.clear()
                    group.update(before, params=params)
                _raw_step(self._optimizer)()
            finally:
                for group, params in zip(param_groups, own_params, strict=True):
                    group["params"] = params
                for tensor in work:
                    self._master(tensor).grad = None

    def tensor_state(self, tensor: ManagedTensor) -> dict[str, Any]:
        """The optimizer's own state of one parameter, tensors copied to the host."""
        return {
            key: value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
            for key, value in self.own_state(tensor).items()
        }

    def own_state(self, tensor: ManagedTensor) -> dict[str, Any]:
        """The same in place."""
        return dict(self._optimizer.state.get(tensor.parameter, {}))

    def state_places(self, tensor: ManagedTensor) -> dict[str, torch.Tensor]:
        """None: the optimizer allocates its state."""
        return {}

    def load_own_state(self, tensor: ManagedTensor, state: dict[str, Any]) -> None:
        """Takes over the state of one parameter; tensors are never spread here."""
        self.load_tensor_state(tensor, state)

    def load_tensor_state(self, tensor: ManagedTensor, state: dict[str, Any]) -> None:
        """Takes over the state of one parameter; an empty state resets it."""
        if state:
            device = tensor.chunk.lists[MASTER].device
            group = self._optimizer.param_groups[0]
            self._optimizer.state[tensor.parameter] = {
                key: place_state(key, value, device, group) for key, value in state.items()
            }
        else:
            self._optimizer.state.pop(tensor.parameter, None)
            self._masters.pop(tensor.spec.index, None)
        self._book_state(tensor)

    def _master(self, tensor: ManagedTensor) -> torch.nn.Parameter:
        index = tensor.spec.index
        if index not in self._masters:
            # Not as a view, whose version all parameters of the chunk share.
            self._masters[index] = torch.nn.Parameter(tensor.view(tensor.chunk.lists[MASTER]).data)
        return self._masters[index]

    def _gradient(self, tensor: ManagedTensor) -> torch.Tensor:
        chunk = tensor.chunk
        if tensor.gradient is GradientPlace.LIST:
            return tensor.view(chunk.lists[GRADIENT])
        if chunk.param.dtype is torch.float32:
            return tensor.view(chunk.param)
        return tensor.view(self._scratch[chunk.home]).copy_(tensor.view(chunk.param))

    def _book_state(self, tensor: ManagedTensor) -> None:
        """Books what the optimizer allocated for a parameter; its size is known only afterwards."""
        state = self._optimizer.state.get(tensor.parameter, {})
        nbytes = sum(v.numel() * v.dtype.itemsize for v in state.values() if isinstance(v, torch.Tensor))
        difference = nbytes - self._booked.get(tensor.spec.index, 0)
        if difference > 0:
            try:
                self._pool.ledger.book(tensor.chunk.home, "optimizer_state", difference, is_allocated=True)
            except BudgetError as error:
                self._over_budget = self._over_budget or error
                return
        self._booked[tensor.spec.index] = nbytes
        if difference < 0:
            self._pool.ledger.unbook(tensor.chunk.home, "optimizer_state", -difference)


def _raw_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """An optimizer's step without the hooks that are called around it, which belong to the whole step."""
    step = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    return functools.partial(step, optimizer)


def _update_others(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    if not any(parameter.grad is not None for parameter in parameters):
        return
    chosen = {id(parameter) for parameter in parameters}
    lists = [group["params"] for group in optimizer.param_groups]
    kept = [list(params) for params in lists]
    try:
        for params in lists:
            params[:] = [parameter for parameter in params if id(parameter) in chosen]
        _raw_step(optimizer)()
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


def _reserve(
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


def _release(scratch: dict[Tier, torch.Tensor], pool: PayloadPool) -> None:
    for tier, buffer in scratch.items():
        pool.release(tier, buffer, WORKSPACE, keep=False)
    scratch.clear()


def _without_params(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


_ONE_BY_ONE = ("torch.optim.", "transformers.optimization")
"""Where optimizers come from that treat every parameter by itself."""


def is_one_by_one(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is known to treat every parameter by itself; one of somebody else may not."""
    return type(optimizer).__module__.startswith(_ONE_BY_ONE) and not isinstance(optimizer, torch.optim.LBFGS)


def make_kernel(
    optimizer: torch.optim.Optimizer, pool: PayloadPool, tile_numel: int, prefer_fused: bool
) -> "AdamKernel | TorchKernel":
    """The kernel for a user's optimizer."""
    if is_plain_adam(optimizer):
        return AdamKernel(optimizer, pool, tile_numel, prefer_fused)
    return TorchKernel(optimizer, pool, updates_at_once=not is_one_by_one(optimizer))
