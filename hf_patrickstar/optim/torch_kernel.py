"""The kernel for any torch optimizer, which runs on the fp32 masters of chunks; and which optimizers have it."""

import collections
import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_patrickstar.errors import BudgetError, ConfigError
from hf_patrickstar.layout.specs import GRADIENT, MASTER
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.optim.adam_kernel import AdamKernel, is_plain_adam
from hf_patrickstar.optim.blockwise_kernel import BlockwiseKernel, is_blockwise, prepare
from hf_patrickstar.optim.kernel import Factors, Kernel, Means, place_state, raw_step
from hf_patrickstar.optim.threads import in_threads
from hf_patrickstar.runtime.chunk import Chunk
from hf_patrickstar.runtime.parameter import AT_HOME, GradientPlace, ManagedParameter, round_masters
from hf_patrickstar.runtime.update import Update

logger = logging.getLogger(__name__)

OWN_STATE = "optimizer_state"
"""The ledger's owner of state that optimizers allocate themselves."""
_ONE_BY_ONE = ("torch.optim", "transformers.optimization", "torchao.optim")
"""Packages whose optimizers update every parameter independently of the others."""


class TorchKernel(Kernel):
    """Runs the ``step`` of the user's own optimizer on fp32 masters, before the step of the engine returns.

    An optimizer that treats parameters one by one runs once per chunk, so that 16-bit gradients are widened one chunk
    at a time. Any other runs once on all masters, with all gradients, which takes 4 more bytes per parameter in 16-bit.
    Its states are in its own dictionary, under the model's parameters, as in torch.

    Args:
        optimizer: See ``Kernel``.
        means: See ``Kernel``. The ledger of the pool also books the optimizer's own state.
    """

    list_names = (MASTER,)
    runs_beside = False  # the optimizer keeps tensors of its own where the masters were
    splits_tensors = False  # it may look at rows and columns, or at norms

    def __init__(self, optimizer: torch.optim.Optimizer, means: Means) -> None:
        super().__init__(optimizer, means)
        self.updates_at_once = not is_one_by_one(optimizer)
        self._masters: dict[int, torch.nn.Parameter] = {}  # of an optimizer that may keep them
        self._booked: dict[int, int] = {}
        self._over_budget: dict[Tier, int] = {}

    def workspace_numel(self, tier: Tier, capacity_numel: int, *, widens: bool = True) -> int:
        """See ``Kernel``. The scratch space has a whole chunk if gradients are widened, else there is none."""
        return capacity_numel if widens and not self.updates_at_once else 0

    def prepare(
        self, chunks: Sequence[Chunk], groups: Mapping[int, int], factors: Factors, *, keeps: bool
    ) -> list[Update]:
        """See ``Kernel``."""
        return [Update(chunks, functools.partial(self._update_chunks, chunks, groups, factors))]

    @torch.no_grad()
    def _update_chunks(self, chunks: Sequence[Chunk], groups: Mapping[int, int], factors: Factors) -> None:
        for chunk in chunks:
            tensors = [tensor for tensor in chunk.owned if tensor.spec.index in groups]
            if self.updates_at_once:
                for tensor in tensors:
                    tensor.round_master()
                    self._book_state(tensor)
                continue
            tensors = [tensor for tensor in tensors if tensor.gradient in AT_HOME]
            if not tensors:
                continue
            try:
                self._update_chunk(chunk, tensors, groups, factors.get(chunk.home_device))
            except Exception as error:
                first, last = tensors[0].spec.name, tensors[-1].spec.name
                names = f"'{first}'" + (f" to '{last}'" if last != first else "")
                error.add_note(f"while the optimizer updated {names} (chunk {chunk.spec.index})")
                raise

    def _update_chunk(
        self,
        chunk: Chunk,
        tensors: Sequence[ManagedParameter],
        groups: Mapping[int, int],
        coefficient: torch.Tensor | None,
    ) -> None:
        """Runs the user's optimizer on the masters of some parameters of a chunk, with what it keeps of them."""
        known = self._optimizer.state
        states: dict[Any, Any] = collections.defaultdict(dict)
        lists: list[list[Any]] = [[] for _ in self._optimizer.param_groups]
        masters = [torch.nn.Parameter(tensor.view(chunk.lists[MASTER])) for tensor in tensors]
        for tensor, master in zip(tensors, masters, strict=True):
            gradient = self._gradient_of(tensor)
            master.grad = gradient if coefficient is None else gradient.mul_(coefficient)
            lists[groups[tensor.spec.index]].append(master)
            if tensor.parameter in known:
                states[master] = known[tensor.parameter]
        with in_threads(self._means.num_threads):
            self._step_over(lists, states)
        round_masters(masters, [tensor.view(chunk.param) for tensor in tensors])
        for tensor, master in zip(tensors, masters, strict=True):
            if master in states:
                known[tensor.parameter] = states[master]
            self._book_state(tensor)

    def _gradient_of(self, tensor: ManagedParameter) -> torch.Tensor:
        chunk = tensor.chunk
        if tensor.gradient is GradientPlace.LIST:
            return tensor.view(chunk.lists[GRADIENT])
        gradient = tensor.view(chunk.param)
        return tensor.view(self._scratch[chunk.home]).copy_(gradient) if chunk.is_mixed else gradient

    # All at once

    def update_at_once(
        self,
        tensors: Sequence[ManagedParameter],
        present: Callable[[bool], torch.Tensor | None],
        follow: Callable[[ManagedParameter], None],
        closure: Callable[[], Any] | None,
    ) -> Any:
        """Runs the user's optimizer on all masters, if it ``updates_at_once``; updates then finish each chunk.

        Args:
            tensors: The optimizer updates these parameters in chunks.
            present: It makes the gradients ready at home, in fp32, and returns the factor to multiply them with. Its
                argument says whether it must raise an error for a gradient that a step has consumed.
            follow: It is called for a parameter whose master has changed before its model is used again.
            closure: The closure of ``torch.optim.Optimizer.step``.

        Returns:
            What the optimizer's step returned.
        """

        def hand_gradients_over(is_all: bool) -> None:
            factor = present(is_all)
            for tensor in tensors:
                master = self._master(tensor)
                master.grad = self._gradient_of(tensor) if tensor.gradient in AT_HOME else None
                if master.grad is not None and factor is not None:
                    master.grad.mul_(factor.to(master.grad.device))

        def evaluate() -> Any:
            for tensor in tensors:
                self._master(tensor).grad = None
                follow(tensor)
            with self._swapped(tensors, is_back=True), torch.enable_grad():
                assert closure is not None
                loss = closure()
            hand_gradients_over(True)
            return loss

        with self._swapped(tensors):
            hand_gradients_over(closure is None)  # else the closure computes others
            try:
                return raw_step(self._optimizer)(*(() if closure is None else (evaluate,)))
            finally:
                for tensor in tensors:
                    self._master(tensor).grad = None

    @contextlib.contextmanager
    def lent(self, tensors: Sequence[ManagedParameter]) -> Iterator[list[ManagedParameter]]:
        """See ``Kernel``."""
        changed: list[ManagedParameter] = []
        versions = [self._master(tensor)._version for tensor in tensors]
        try:
            with self._swapped(tensors):
                yield changed
            pairs = zip(tensors, versions, strict=True)
            changed += [tensor for tensor, version in pairs if self._master(tensor)._version != version]
        finally:
            if not self.updates_at_once:
                self._masters.clear()  # they would look into the lists of chunks

    @contextlib.contextmanager
    def _swapped(self, tensors: Sequence[ManagedParameter], *, is_back: bool = False) -> Iterator[None]:
        """Puts masters in place of parameters, in groups and states, for a block; ``is_back`` undoes it inside one."""
        self._swap(tensors, is_back)
        try:
            yield
        finally:
            self._swap(tensors, not is_back)

    def _swap(self, tensors: Sequence[ManagedParameter], is_back: bool) -> None:
        pairs = [(tensor.parameter, self._master(tensor)) for tensor in tensors]
        others = {id(old): new for old, new in (((b, a) for a, b in pairs) if is_back else pairs)}
        for group in self._optimizer.param_groups:
            # In place: some optimizers keep the list.
            group["params"][:] = [others.get(id(parameter), parameter) for parameter in group["params"]]
        state = self._optimizer.state
        for key in [key for key in state if id(key) in others]:
            state[others[id(key)]] = state.pop(key)
        overrides = getattr(getattr(self._optimizer, "mng", None), "pid2config", {})  # bitsandbytes' own
        for key in [key for key in overrides if key in others]:
            overrides[id(others[key])] = overrides.pop(key)

    def _master(self, tensor: ManagedParameter) -> torch.nn.Parameter:
        index = tensor.spec.index
        if index not in self._masters and not tensor.is_owned:
            # It stands for what another process updates: it has a shape, no memory, and never a gradient.
            stand_in = torch.zeros(tensor.spec.shape, dtype=tensor.chunk.state_dtype, device="meta")
            self._masters[index] = torch.nn.Parameter(stand_in)
        elif index not in self._masters:
            # Not as a view, whose version all parameters of the chunk share.
            self._masters[index] = torch.nn.Parameter(tensor.view(tensor.chunk.lists[MASTER]).data)
        return self._masters[index]

    # States

    def own_state(self, tensor: ManagedParameter) -> dict[str, Any]:
        """See ``Kernel``."""
        return dict(self._optimizer.state.get(tensor.parameter) or {})

    def load_own_state(self, tensor: ManagedParameter, state: dict[str, Any]) -> None:
        """See ``Kernel``."""
        if state:
            device, group = tensor.chunk.lists[MASTER].device, self._optimizer.param_groups[0]
            self._optimizer.state[tensor.parameter] = place_state(state, device, group)
        else:
            self._optimizer.state.pop(tensor.parameter, None)
            self._masters.pop(tensor.spec.index, None)
        self._book_state(tensor)

    def _book_state(self, tensor: ManagedParameter) -> None:
        """Books the state that the optimizer has allocated for a parameter; its size is not known before."""
        nbytes = sum(map(_nbytes, (self._optimizer.state.get(tensor.parameter) or {}).values()))
        difference = nbytes - self._booked.get(tensor.spec.index, 0)
        if difference > 0:
            try:
                self._pool.ledger.book(tensor.chunk.home, OWN_STATE, difference, is_allocated=True)
            except BudgetError:
                tier = tensor.chunk.home
                self._over_budget[tier] = self._over_budget.get(tier, 0) + difference
                return
        self._booked[tensor.spec.index] = nbytes
        if difference < 0:
            self._pool.ledger.unbook(tensor.chunk.home, OWN_STATE, -difference)

    def end_step(self) -> None:
        """See ``Kernel``. Raises the budget errors of ``_book_state`` now that no chunk is half updated."""
        missing, self._over_budget = self._over_budget, {}
        ledger = self._pool.ledger
        for tier, nbytes in sorted(missing.items(), key=lambda item: item[0] is Tier.DEVICE):
            ahead = sum(missing.values()) - nbytes if tier is Tier.HOST else 0
            for other in Tier if tier is Tier.HOST else (tier,):  # gradients that stay after the step take room, too
                owners = ledger.owners(other)
                ahead += max(owners.get(MASTER, 0) - owners.get(GRADIENT, 0), 0)
            ledger.book(tier, OWN_STATE, nbytes, is_allocated=True, ahead_nbytes=ahead)  # it raises, with all of them
            ledger.unbook(tier, OWN_STATE, nbytes)


def _nbytes(value: Any) -> int:
    """Bytes of a tensor of a state; that of 8 bits of torchao wraps others."""
    if is_traceable_wrapper_subclass(value):
        return sum(_nbytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.numel() * value.dtype.itemsize if isinstance(value, torch.Tensor) else 0


def is_one_by_one(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is known to update every parameter independently; an optimizer of other libraries is not."""
    module = type(optimizer).__module__
    is_known = any(module == package or module.startswith(f"{package}.") for package in _ONE_BY_ONE)
    return is_known and not isinstance(optimizer, torch.optim.LBFGS)


def make_kernel(optimizer: torch.optim.Optimizer, means: Means) -> Kernel:
    """The kernel for a user's optimizer.

    Args:
        optimizer: The optimizer.
        means: What it computes with.

    Raises:
        ConfigError: If the optimizer needs all parameters, and other processes have some of them; if it keeps states in
            its own type alone, and another one is asked for; or if its library is too old.
    """
    prepare(optimizer)
    if is_plain_adam(optimizer):
        return AdamKernel(optimizer, means)
    if means.state_dtype != "auto":
        raise ConfigError(
            f"state_dtype: '{means.state_dtype}' is for Adam and AdamW of torch without amsgrad, capturable and "
            f"differentiable, and the optimizer ({type(optimizer).__name__}) is not; use --optim adamw_torch, or "
            "leave state_dtype at 'auto'"
        )
    if is_blockwise(optimizer):
        return BlockwiseKernel(optimizer, means)
    kernel = TorchKernel(optimizer, means)
    if kernel.updates_at_once and not means.is_alone:  # each process has only some of the parameters
        name = type(optimizer).__name__
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                f"optimizer: {name} computes with all parameters together, and with several processes each of them "
                "updates only its own part; train with one process, or use another optimizer"
            )
        logger.warning(
            "patrickstar: %s is not known to update every parameter independently. With several processes each of them "
            "updates its own parameters: if the optimizer combines parameters, by a norm of all gradients for example, "
            "the weights are not those of one process",
            name,
        )
    return kernel
