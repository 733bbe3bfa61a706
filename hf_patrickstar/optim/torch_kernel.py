"""The kernel for any torch optimizer, which runs on the fp32 masters of chunks."""

import collections
import contextlib
import dataclasses
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.memory.operators import unseen
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.optim.kernel import Kernel, place_state, raw_step, settings_of
from hf_patrickstar.optim.live_states import make_live, make_ordinary, peek, put, without_states
from hf_patrickstar.optim.threads import HostThreads
from hf_patrickstar.runtime.chunk import GRADIENT, MASTER, Chunk, ManagedTensor, round_masters
from hf_patrickstar.runtime.gradient_place import AT_HOME, GradientPlace
from hf_patrickstar.runtime.update import Update

logger = logging.getLogger(__name__)

OWN_STATE = "optimizer_state"
"""The ledger's owner of state that optimizers allocate themselves."""
_READS_DEFAULTS = (torch.optim.ASGD,)
"""Optimizers whose numbers depend on ``torch.set_default_dtype`` at the moment of the update."""


_Kinds = tuple[tuple[tuple[str, bool], ...], ...]


def _kinds_of(groups: Sequence[Mapping[str, Any]]) -> _Kinds:
    """Which settings of param groups are something, and which are nothing: that decides what an optimizer keeps.

    SGD keeps a buffer if its momentum is not zero, for example. Rates change in every step and decide nothing.

    Args:
        groups: The param groups; their parameters do not count.
    """
    return tuple(tuple((k, not _is_nothing(v)) for k, v in group.items() if k != "params") for group in groups)


def _is_nothing(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.device.type == "cpu" and not value.any()
    return value is None or (isinstance(value, (int, float)) and value == 0)


@dataclasses.dataclass(frozen=True, slots=True)
class _Work:
    """What an update does to one parameter.

    Attributes:
        tensor: The parameter.
        payloads: The payloads of its chunk at home.
        group: The number of its param group.
        is_listed: Whether its gradient is in the accumulation list.
        state: What the optimizer keeps of it; ``None`` if that is still to be made.
    """

    tensor: ManagedTensor
    payloads: Mapping[str, torch.Tensor]
    group: int
    is_listed: bool
    state: dict[str, Any] | None

    def of(self, name: str) -> torch.Tensor:
        """Its place in one of the lists."""
        return self.tensor.view(self.payloads[name])


def _round(works: Sequence[_Work]) -> None:
    """Writes values from their masters."""
    round_masters([work.of(MASTER) for work in works], [work.of("param") for work in works])


class TorchKernel(Kernel):
    """This kernel runs the ``step`` of any ``torch.optim.Optimizer`` on fp32 masters.

    An optimizer that treats parameters one by one runs once per chunk, and may do so in another thread, beside the
    program: see ``_make_twin``. Any other optimizer runs once on all masters, with all gradients, which takes 4
    more bytes per parameter in 16-bit.

    Between steps the optimizer's states are under the model's own parameters, as in torch. Whoever reads them waits for
    an update that is under way (``optim/live_states.py``).

    Args:
        optimizer: See ``Kernel``.
        pool: See ``Kernel``. Its ledger also books the optimizer's own state.
        updates_at_once: Whether the optimizer must see all parameters together.
        threads: The threads that torch computes an update with; by default those that it has.
        overlaps: Whether updates on the host may go on while the program does, if nobody sees it.
    """

    list_names = (MASTER,)
    follows_homes = False  # the optimizer keeps tensors of its own where the masters were
    batch_numel = 0  # one by one: an optimizer's step launches what it launches for each parameter anyway
    makes_states = True
    splits_tensors = False  # it may look at rows and columns, or at norms

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        pool: PayloadPool,
        updates_at_once: bool,
        threads: HostThreads | None = None,
        overlaps: bool = False,
    ) -> None:
        super().__init__(optimizer, pool)
        self._threads = threads or HostThreads()
        self.updates_at_once = updates_at_once
        self._overlaps = overlaps
        made = make_live(optimizer, self._before_use) if overlaps and not updates_at_once else None
        self._states = None if made is None else weakref.ref(made)  # else a failed engine would hold them
        self._masters: dict[int, torch.nn.Parameter] = {}
        self._looked_into: set[int] = set()  # parameters whose state somebody has got
        self._changed: list[dict[str, Any]] = []  # what an optimizer keeps in its groups (a counter, say), by group
        self._goes_beyond = False  # an update has done more than change masters and states that there were
        self._num_threads: int | None = None  # of the program
        self._num_threads_beside: int | None = None
        self._said = ""
        self._made_with: dict[int, _Kinds] = {}  # the settings with which updates have made the states of parameters
        self._booked: dict[int, int] = {}
        self._over_budget: dict[Tier, int] = {}

    @property
    def waits_because(self) -> str:
        """See ``Kernel``."""
        name = type(self._optimizer).__name__
        if not self._overlaps:
            return "overlap_optimizer is off, or no device computes beside the host"
        if self.updates_at_once:
            return f"{name} may look at all parameters together"
        if isinstance(self._optimizer, _READS_DEFAULTS):
            return f"{name} makes numbers of torch's default type, which the program may change"
        if self._states is None or self._optimizer.state is not self._states():
            return f"somebody holds the dictionary of states of {name}, or has replaced it"
        if self._goes_beyond:
            return f"{name} writes to its param groups, or makes states when nobody expects it"
        if not self._threads.are_those_of_torch:
            return f"host_threads is {self._threads.num}, and torch computes with {torch.get_num_threads()}"
        if self._num_threads_beside not in (None, self._num_threads):
            return f"torch computes with {self._num_threads} threads now, and with {self._num_threads_beside} before"
        return ""

    def workspace_numel(self, capacity_numel: int, *, widens: bool = True) -> int:
        """See ``Kernel``. The scratch space has a whole chunk if gradients are widened, else there is none."""
        return capacity_numel if widens and not self.updates_at_once else 0

    @contextlib.contextmanager
    def lent(self, tensors: Sequence[ManagedTensor]) -> Iterator[list[ManagedTensor]]:
        """See ``Kernel``."""
        changed: list[ManagedTensor] = []
        for tensor in tensors:
            self._before_use(tensor.parameter)
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
    def _swapped(self, tensors: Sequence[ManagedTensor], *, is_back: bool = False) -> Iterator[None]:
        """Puts masters in place of parameters, in groups and states, for a block; ``is_back`` undoes it inside one."""
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
        present: Callable[[bool], torch.Tensor | None],
        follow: Callable[[ManagedTensor], None],
        closure: Callable[[], Any] | None,
    ) -> Any:
        """See ``Kernel``."""

        def hand_gradients_over(is_all: bool) -> None:
            factor = present(is_all)
            for tensor in tensors:
                master = self._master(tensor)
                master.grad = _gradient_at_home(tensor)
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

    def begin_step(self) -> None:
        """See ``Kernel``. Says why updates are waited for, if they might go on beside the program."""
        self._changed = []
        self._num_threads = torch.get_num_threads()
        why = self.waits_because
        if why and why != self._said and self._overlaps:
            logger.info("patrickstar: chunks are updated before step() returns, because %s", why)
        self._said = why

    def end_step(self) -> None:
        """See ``Kernel``. Raises the budget errors of ``_book_state`` now that no chunk is half updated."""
        for group, changed in zip(self._optimizer.param_groups, self._changed, strict=False):
            group.update(changed)  # not earlier: every chunk sees what was there before the step
        self._changed = []
        missing, self._over_budget = self._over_budget, {}
        ledger = self._pool.ledger
        for tier, nbytes in sorted(missing.items(), key=lambda item: item[0] is Tier.DEVICE):
            ahead = sum(missing.values()) - nbytes if tier is Tier.HOST else 0
            for other in Tier if tier is Tier.HOST else (tier,):  # gradients that stay after the step take room, too
                owners = ledger.owners(other)
                ahead += max(owners.get(MASTER, 0) - owners.get(GRADIENT, 0), 0)
            ledger.book(tier, OWN_STATE, nbytes, is_allocated=True, ahead_nbytes=ahead)  # it raises, with all of them
            ledger.unbook(tier, OWN_STATE, nbytes)

    def prepare(
        self,
        chunks: Sequence[Chunk],
        groups: Mapping[int, int],
        coefficient: torch.Tensor | None,
        *,
        keeps: bool = True,
    ) -> Update:
        """See ``Kernel``."""
        if self.updates_at_once:
            return Update(functools.partial(self._finish_chunks, chunks, groups))
        twin = self._make_twin()
        by_chunk: dict[int, list[_Work]] = {}
        for chunk in chunks:
            works = self._works_on(chunk, groups)
            if works:
                by_chunk[chunk.spec.index] = works
        coefficient = None if coefficient is None else coefficient.clone()
        program = threading.get_ident(), self._num_threads or torch.get_num_threads()
        run = functools.partial(self._update_chunks, by_chunk, twin, coefficient, program)
        return Update(run, restore=functools.partial(_round, [work for works in by_chunk.values() for work in works]))

    def may_run_beside(self, chunks: Sequence[Chunk]) -> bool:
        """See ``Kernel``.

        The first update of a parameter, and one with settings of another kind, may make states: somebody may go through
        those that there are, and there may be no room. Where a state was given to somebody, the step waits, too.
        """
        if not self.runs_beside:
            return False
        updated = [tensor.spec.index for chunk in chunks for tensor in chunk.owned if tensor.gradient in AT_HOME]
        kinds = _kinds_of(self._optimizer.param_groups)
        is_known = all(self._made_with.get(index) == kinds and index not in self._looked_into for index in updated)
        return is_known and super().may_run_beside(chunks)

    def let_go(self) -> None:
        """See ``Kernel``. The user's optimizer gets an ordinary dictionary of states."""
        if self._states is not None and self._optimizer.state is self._states():
            make_ordinary(self._optimizer)

    @unseen()
    def _before_use(self, parameter: Any) -> None:
        """Somebody gets the state of a parameter, and may keep it: it is never changed beside the program again."""
        tensor = self.find(parameter) if isinstance(parameter, torch.Tensor) else None
        if tensor is not None:
            tensor.chunk.wait_for_update()
            self._looked_into.add(tensor.spec.index)

    def _works_on(self, chunk: Chunk, groups: Mapping[int, int]) -> list[_Work]:
        works, payloads = [], chunk.payloads
        for tensor in chunk.owned:
            if tensor.spec.index in groups and tensor.gradient in AT_HOME:
                state = peek(self._optimizer, tensor.parameter)
                is_listed = tensor.gradient is GradientPlace.LIST
                works.append(_Work(tensor, payloads, groups[tensor.spec.index], is_listed, state))
        return works

    def _make_twin(self) -> torch.optim.Optimizer:
        """Another object with the same attributes, and with settings of its own.

        Everybody may look into the user's optimizer, and change it, while an update runs in another thread.
        """
        twin = without_states(self._optimizer)
        twin.param_groups = [settings_of(group) for group in self._optimizer.param_groups]
        return twin  # type: ignore[no-any-return]

    @torch.no_grad()
    def _update_chunks(
        self,
        by_chunk: Mapping[int, Sequence[_Work]],
        twin: torch.optim.Optimizer,
        coefficient: torch.Tensor | None,
        program: tuple[int, int],
    ) -> None:
        """Updates chunks.

        Args:
            by_chunk: What is to be done, by chunk.
            twin: The user's optimizer as it was when the step began, without parameters.
            coefficient: See ``prepare``.
            program: The program's thread, and with how many threads torch computes there.
        """
        settings, kinds = twin.param_groups, _kinds_of(twin.param_groups)
        thread, num_threads = program
        is_beside = thread != threading.get_ident()
        if is_beside and torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)  # reductions have other bits with another number
        if is_beside:
            self._num_threads_beside = num_threads
        with self._threads.inside():
            for index, works in by_chunk.items():
                try:
                    self._update_chunk(works, twin, settings, coefficient, is_beside=is_beside)
                except Exception as error:
                    first, last = works[0].tensor.spec.name, works[-1].tensor.spec.name
                    names = f"'{first}'" + (f" to '{last}'" if last != first else "")
                    error.add_note(f"while the optimizer updated {names} (chunk {index})")
                    raise
                for work in () if is_beside else works:
                    self._book_state(work.tensor)
                    self._made_with[work.tensor.spec.index] = kinds

    def _update_chunk(
        self,
        works: Sequence[_Work],
        twin: torch.optim.Optimizer,
        settings: Sequence[Mapping[str, Any]],
        coefficient: torch.Tensor | None,
        *,
        is_beside: bool,
    ) -> None:
        """Runs the step of the user's optimizer on the masters of some parameters of a chunk."""
        groups: list[dict[str, Any]] = [{**group, "params": []} for group in settings]
        states: dict[Any, Any] = collections.defaultdict(dict)
        masters = [torch.nn.Parameter(work.of(MASTER)) for work in works]
        for work, master in zip(works, masters, strict=True):
            gradient = self._gradient_of(work)
            master.grad = gradient if coefficient is None else gradient.mul_(coefficient)
            groups[work.group]["params"].append(master)
            if work.state is not None:
                states[master] = work.state
        twin.param_groups, twin.state = groups, states  # type: ignore[assignment]
        try:
            raw_step(twin)()
        finally:
            twin.param_groups, twin.state = [], {}  # type: ignore[assignment]  # they look into the lists of the chunk
        _round(works)
        pairs = zip(groups, settings, strict=True)
        changed = [{k: v for k, v in group.items() if k != "params" and v is not old.get(k)} for group, old in pairs]
        if any(changed):
            self._changed, self._goes_beyond = changed, True
        for work, master in zip(works, masters, strict=True):
            if work.state is None and master in states:
                put(self._optimizer, work.tensor.parameter, states[master])
                self._goes_beyond |= is_beside

    def _gradient_of(self, work: _Work) -> torch.Tensor:
        if work.is_listed:
            return work.of(GRADIENT)
        gradient, chunk = work.of("param"), work.tensor.chunk
        return work.tensor.view(self._scratch[chunk.home]).copy_(gradient) if chunk.is_mixed else gradient

    def _finish_chunks(self, chunks: Sequence[Chunk], groups: Mapping[int, int]) -> None:
        """Rounds the masters that ``update_at_once`` has changed."""
        for tensor in (tensor for chunk in chunks for tensor in chunk.owned if tensor.spec.index in groups):
            tensor.round_master()
            self._book_state(tensor)

    def own_state(self, tensor: ManagedTensor) -> dict[str, Any]:
        """See ``Kernel``."""
        tensor.chunk.wait_for_update()
        return dict(peek(self._optimizer, tensor.parameter) or {})

    def load_own_state(self, tensor: ManagedTensor, state: dict[str, Any]) -> None:
        """See ``Kernel``."""
        if state:
            device = tensor.chunk.lists[MASTER].device
            group = self._optimizer.param_groups[0]
            self._optimizer.state[tensor.parameter] = {
                key: place_state(key, value, device, group) for key, value in state.items()
            }
        else:
            self._optimizer.state.pop(tensor.parameter, None)
            self._masters.pop(tensor.spec.index, None)
        self._looked_into.discard(tensor.spec.index)
        self._made_with.pop(tensor.spec.index, None)
        self._book_state(tensor)

    def _master(self, tensor: ManagedTensor) -> torch.nn.Parameter:
        index = tensor.spec.index
        if index not in self._masters and not tensor.is_owned:
            # It stands for what another process updates: it has a shape, no memory, and never a gradient.
            stand_in = torch.zeros(tensor.spec.shape, dtype=tensor.chunk.state_dtype, device="meta")
            self._masters[index] = torch.nn.Parameter(stand_in)
        elif index not in self._masters:
            # Not as a view, whose version all parameters of the chunk share.
            self._masters[index] = torch.nn.Parameter(tensor.view(tensor.chunk.lists[MASTER]).data)
        return self._masters[index]

    def _book_state(self, tensor: ManagedTensor) -> None:
        """Books the state that the optimizer has allocated for a parameter; its size is not known before."""
        state = peek(self._optimizer, tensor.parameter) or {}
        nbytes = sum(v.numel() * v.dtype.itemsize for v in state.values() if isinstance(v, torch.Tensor))
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


def _gradient_at_home(tensor: ManagedTensor) -> torch.Tensor | None:
    """The gradient of a parameter that is in a list of its own, or in fp32 over the value."""
    if tensor.gradient not in AT_HOME:
        return None
    chunk = tensor.chunk
    return tensor.view(chunk.lists[GRADIENT] if tensor.gradient is GradientPlace.LIST else chunk.param)
