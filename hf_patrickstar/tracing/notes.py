"""Writes down what a micro-batch of a model does; see [Note: micro-batches that are replayed]."""

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from hf_patrickstar.layout.specs import TensorSpec
from hf_patrickstar.memory.meters import storages_of
from hf_patrickstar.memory.operators import tensors_among
from hf_patrickstar.model.live_parameter import LiveMixin, raw_data, released_type, requires_grad, storage_key
from hf_patrickstar.model.operands import KeptOperand
from hf_patrickstar.runtime.chunk import torch_dtype
from hf_patrickstar.runtime.parameter import ValuePlace
from hf_patrickstar.schedule import op_trace
from hf_patrickstar.schedule.trace import Shapes

_use_count: Callable[[int], int] = torch._C._storage_Use_Count


class Watched:
    """A parameter whose uses are noted.

    Args:
        spec: The parameter as numbers.
        parameter: The parameter, in the type that it was loaded in. It gets memory in the type of its chunk.
        looked_up: Names of the weights whose embeddings read their rows at home.

    Attributes:
        typed: Its data of before; it shows their type while no module computes with it.
        placeholder: Its data from now on, in the type of its chunk.
        key: The address of its storage object.
        users: The thread of each module, or call, that computes with it now.
        num_saved: How many operands of it autograd keeps.
    """

    # As in ``ManagedParameter``: it has its value all the time, and nobody writes to it.
    is_bound, place = True, ValuePlace.PARAMETER
    num_writes = 0

    def __init__(self, spec: TensorSpec, parameter: torch.Tensor, looked_up: Collection[str]) -> None:
        self.spec = spec
        self.is_cpu_embedding = spec.name in looked_up
        self.typed = parameter.data
        self.placeholder = parameter.data = self.typed.new_empty(spec.shape, dtype=torch_dtype(spec.types.param))
        self.parameter: Any = parameter
        self.original_type = type(parameter)
        self.users: list[int] = []
        self.num_saved = 0
        self._storage = parameter.untyped_storage()
        self.key: int = self._storage._cdata
        self._base_use_count = _use_count(self.key)
        self._hooks_before = self.parameter._post_accumulate_grad_hooks

    @property
    def is_ours(self) -> bool:
        """Whether the parameter is of the class that it got here."""
        return isinstance(self.parameter, LiveMixin)

    def bind(self, live: Any) -> None:
        """Makes the parameter answer."""
        self.live = self.parameter._live = live
        self.parameter.__class__ = released_type(self.original_type)

    def unbind(self) -> None:
        """Makes it the parameter that it was."""
        self.parameter.__class__ = self.original_type
        self.parameter.__dict__.pop("_live", None)
        self.parameter._post_accumulate_grad_hooks = self._hooks_before
        self.parameter.data = self.typed

    @property
    def is_aliased(self) -> bool:
        """Whether any tensor beside the parameter looks into its memory; see ``Chunk.is_aliased``."""
        return _use_count(self.key) > self._base_use_count


class SavedOperand(KeptOperand):
    """What autograd keeps in place of a view of a parameter: where it is.

    Args:
        watched: The parameter.
        view: The view.
        is_exact: Whether it is one in the type that users see.
    """

    __slots__ = ("_offset", "_size", "_stride", "is_exact", "watched")

    def __init__(self, watched: Watched, view: torch.Tensor, *, is_exact: bool) -> None:
        self.watched, self.is_exact = watched, is_exact
        self._size, self._stride, self._offset = view.size(), view.stride(), view.storage_offset()
        watched.num_saved += 1

    def __del__(self) -> None:
        self.watched.num_saved -= 1

    def view(self) -> torch.Tensor:
        """The same view once more."""
        value = raw_data(self.watched.parameter)
        value = value.new_empty(value.shape, dtype=self.watched.typed.dtype) if self.is_exact else value
        return value.as_strided(self._size, self._stride, self._offset)


class SavedActivation(KeptOperand):
    """What autograd keeps in place of an operand that is no parameter.

    Args:
        number: See ``Kept.kept``.
        tensor: A tensor like the operand, in memory of its own: when that is free, autograd has let go.
    """

    __slots__ = ("number", "tensor")

    def __init__(self, number: int, tensor: torch.Tensor) -> None:
        self.number, self.tensor = number, tensor


class Notes:
    """What a micro-batch has done so far.

    Args:
        inputs: The tensors of the batch.
        buffers: Those of the model.
        tensors: Its parameters.

    Attributes:
        is_odd: Whether something was done that the notes have no word for.
        by_storage: Parameters by the address of their storage.
        by_parameter: See ``ParameterValues``.
        exact: See ``ParameterValues``.
        held_outside_forward: See ``ParameterValues``; the notes have no word for these.
        needs_frames: See there.
    """

    def __init__(
        self, inputs: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor], tensors: Iterable[Watched]
    ) -> None:
        self.is_odd = False
        self.by_parameter = {id(watched.parameter): watched for watched in tensors}
        self.by_storage = {watched.key: watched for watched in self.by_parameter.values()}
        self.exact: dict[int, Watched] = {}
        self.held_outside_forward: list[Watched] = []
        self.needs_frames = False
        self._notes: list[op_trace.Note] = []
        self._inputs, self._buffers = set(map(storage_key, inputs)), set(map(storage_key, buffers))
        self._owned = set(self.by_storage)  # storages with values of parameters
        self._live: dict[int, tuple[int, Any]] = {}  # storages -> their number, and who tells that they are free
        self._num_storages = 0
        self._seen: list[Watched] = []  # tensors may look into their memory

    def end(self) -> op_trace.OpTrace | None:
        """Ends it.

        Returns:
            All notes; ``None`` if something was done that the notes have no word for.
        """
        self._look()
        self._live.clear()
        return None if self.is_odd or self.held_outside_forward else op_trace.OpTrace(tuple(self._notes))

    def add(self, note: op_trace.Note) -> None:
        """Notes what was done just now."""
        self._look()
        self._notes.append(note)

    def add_results(self, results: Any) -> None:
        """An operator of the model has returned something, which may be new memory."""
        made = []
        for result in tensors_among(results):
            for owner, key, nbytes in storages_of(result):
                is_known = key in self._live or key in self._owned or key in self._inputs or key in self._buffers
                if nbytes and not is_known:
                    made.append((self._take(owner, key), nbytes))
        if made:
            self._notes.append(op_trace.Allocate(tuple(made)))

    def _take(self, owner: Any, key: int) -> int:
        """The number of a new storage, which is noted to be free when its owner is gone."""
        number = self._num_storages
        self._num_storages += 1
        live, notes = self._live, weakref.ref(self)

        def forget(_: Any) -> None:
            this = notes()
            if live.pop(key, None) is not None and this is not None:
                this._notes.append(op_trace.Free(number))

        live[key] = number, weakref.ref(owner, forget)
        return number

    def keep(self, operand: torch.Tensor, stand_in: torch.Tensor | None) -> SavedActivation | None:
        """Autograd keeps an operand that is no parameter.

        Args:
            operand: The operand.
            stand_in: A tensor like it in memory of its own, or ``None`` if there can be none.

        Returns:
            What it keeps instead; ``None`` if that is the operand.
        """
        found = None if stand_in is None else self._live.get(storage_key(operand))
        if found is None or stand_in is None:
            self.add(op_trace.Kept(-1, -1))
            return None
        number = self._take(stand_in.untyped_storage(), storage_key(stand_in))
        self.add(op_trace.Kept(found[0], number))
        return SavedActivation(number, stand_in)

    def enter_forward(self, shapes: Shapes, present: Iterable[torch.Tensor], *, is_inner: bool) -> None:
        """An outermost forward begins; ``present`` is there already."""
        others = []
        batch: dict[int, int] = {}
        buffers: dict[int, int] = {}
        for tensor in present:
            for _, key, nbytes in storages_of(tensor):
                if key in self._buffers:
                    buffers[key] = nbytes
                elif key in self._inputs:
                    batch[key] = nbytes
                elif key in self._live:
                    others.append(self._live[key][0])
                elif nbytes:
                    self.is_odd = True
        self.add(op_trace.EnterForward(shapes, tuple(others), sum(batch.values()), sum(buffers.values()), is_inner))

    def own(self, leaf: torch.Tensor) -> None:
        """Takes note of a tensor that stands in for a parameter."""
        key = storage_key(leaf)
        self._owned.add(key)
        weakref.finalize(leaf.untyped_storage(), self._owned.discard, key)  # other memory may be at the same address

    # As ``ParameterValues``

    def find(self, parameter: torch.Tensor) -> Watched | None:
        """The parameter, if its uses are noted."""
        return self.by_parameter.get(id(parameter))

    def acquire_all(self, tensors: Sequence[Watched], caller: str, acquired: list[Any], *, is_recomputed: bool) -> None:
        """See ``ParameterValues``; an alias of a frozen parameter is no ordinary parameter to torch."""
        for watched in tensors:
            self.add(op_trace.Acquire(watched.spec.index))
            if not is_recomputed or requires_grad(watched.parameter):
                watched.parameter.__class__ = watched.original_type
            watched.users.append(threading.get_ident())
            acquired.append(watched)

    def release_all(self, tensors: Sequence[Watched]) -> None:
        """See ``ParameterValues``."""
        for watched in tensors:
            watched.users.pop()
            if not watched.users:
                watched.parameter.__class__ = released_type(watched.original_type)
            is_seen = not watched.users and watched.is_aliased
            self.add(op_trace.Release(watched.spec.index, is_seen))
            if is_seen:
                self.note_use(watched)

    def note_use(self, watched: Watched) -> None:
        """Tensors may look into the memory of a parameter from now on."""
        if watched not in self._seen:
            self._seen.append(watched)

    def add_gradient(self, watched: Watched, gradient: torch.Tensor, *, is_at_home: bool) -> None:
        """The gradient of a parameter is finished."""
        found = self._live.get(storage_key(gradient)) if gradient.layout is torch.strided else None
        if found is None:
            self.is_odd = True
            return
        self.add(op_trace.Gradient(watched.spec.index, found[0], gradient.nbytes, is_at_home, watched.num_saved > 0))

    def _look(self) -> None:
        """Looks which parameters nobody sees any more."""
        for watched in [watched for watched in self._seen if not watched.is_aliased]:
            self._seen.remove(watched)
            self._notes.append(op_trace.LetGo(watched.spec.index))
