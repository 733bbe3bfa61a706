"""The parameters under management: how each gets its value, for a module or for autograd, and loses it again.

A parameter's life, top to bottom (PatrickStar section 6.2). ``acquire_all`` gives the parameters of a module their
values, when the module begins, and ``release_all`` takes them away, when it ends. What autograd keeps of a value
meanwhile is replaced by an address (``pack``), and backward gets a view of the chunk for it (``unpack``). An embedding
that reads rows where its weight is at home gets a leaf instead (``begin_lookup``).
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from hf_patrickstar.errors import DeviceMemoryError, EngineError
from hf_patrickstar.layout.specs import MASTER
from hf_patrickstar.memory.operators import has_modes_of_users, unseen
from hf_patrickstar.model.live_parameter import (
    RAW,
    SET_DATA,
    Guard,
    LiveMixin,
    acquired_type,
    released_type,
    requires_grad,
    set_data_inside,
    storage_key,
)
from hf_patrickstar.model.lock import EngineLock, pauses_s
from hf_patrickstar.model.operands import KeptOperand
from hf_patrickstar.runtime.activations import Activations
from hf_patrickstar.runtime.chunk import Device
from hf_patrickstar.runtime.executor import Executor
from hf_patrickstar.runtime.frames import Lookup
from hf_patrickstar.runtime.gradients import Gradients
from hf_patrickstar.runtime.mirrors import Writes
from hf_patrickstar.runtime.parameter import Epoch, GradientPlace, ManagedParameter, ValuePlace

# A name of the module is found faster than a member of an enum.
_PARAM = GradientPlace.PARAM
_HOME, _PARAMETER = ValuePlace.HOME, ValuePlace.PARAMETER
_OPEN, _GIVEN_UP = ValuePlace.OPEN, ValuePlace.GIVEN_UP
_FAKE = torch._C._TorchDispatchModeKey.FAKE


class SavedView(KeptOperand):
    """The address of a parameter, or of a view of it, that autograd keeps in place of the tensor.

    After ``parameter.data = x`` an earlier graph that kept a view uses the old value, and one that kept the parameter
    itself uses ``x``, as in torch.
    """

    __slots__ = ("epoch", "is_exact", "is_whole", "num_updates", "num_writes", "offset", "size", "stride", "tensor")

    tensor: ManagedParameter
    is_exact: bool  # whether it is the value as users see it, and not what modules compute with
    is_whole: bool
    size: Sequence[int]
    stride: Sequence[int]
    offset: int
    epoch: Epoch
    num_writes: int
    num_updates: int


class Parameters:
    """Finds parameters, and gives them their values.

    Args:
        device: Finds the chunk that a storage belongs to.
        executor: Brings chunks to the device, if they move at all.
        gradients: Makes way for a value that is needed while a gradient is in its place.
        writes: Takes over what users wrote to a parameter.
        engine_lock: Knows whether other threads may read parameters.
        activations: Moves operands that are no parameters.

    Attributes:
        tensors: All, in model order.
        by_index: The same by their number.
        by_parameter: The same by the ``id`` of the parameter; also those that were given up.
        exact: Those of which calls have the value as users see it just now, by the address of its storage.
        held_outside_forward: Those that code in backward acquired with no forward around it.
        needs_frames: See ``ParameterValues``.
    """

    def __init__(
        self,
        device: Device,
        executor: Executor,
        gradients: Gradients,
        writes: Writes,
        engine_lock: EngineLock,
        activations: Activations,
    ) -> None:
        self._activations = activations
        self.tensors: list[ManagedParameter] = []
        self.by_index: dict[int, ManagedParameter] = {}
        self.exact: dict[int, ManagedParameter] = {}
        self.held_outside_forward: list[ManagedParameter] = []
        self.needs_frames = False
        self.by_parameter: dict[int, ManagedParameter] = {}
        self._find_chunk = device.by_storage.get
        self._device = device
        self._executor = executor
        self._visit = executor.visit
        self._gradients = gradients
        self._writes = writes
        self._lock = gradients.lock
        self._engine_lock = engine_lock
        self._guard = Guard(engine_lock)
        self._is_trained = False  # whether any chunk has masters, so that gradients are asked for
        tensors = (tensor for chunk in device.chunks for tensor in chunk.tensors)
        self.index(sorted(tensors, key=lambda tensor: tensor.spec.index))

    # Which there are

    def index(self, tensors: Sequence[ManagedParameter]) -> None:
        """Takes note of which parameters there are.

        Args:
            tensors: All, in model order.
        """
        self.tensors[:] = tensors
        self.by_index.clear()
        self.by_index.update((tensor.spec.index, tensor) for tensor in tensors)
        self.by_parameter = {id(tensor.parameter): tensor for tensor in tensors}
        self._is_trained = any(tensor.chunk.has_list(MASTER) for tensor in tensors)

    def find(self, parameter: torch.Tensor) -> ManagedParameter | None:
        """The managed parameter that a parameter is, or ``None``."""
        tensor = self.by_parameter.get(id(parameter))
        return None if tensor is None or tensor.place is _GIVEN_UP else tensor

    def find_all(self, parameters: Iterable[torch.Tensor]) -> tuple[list[ManagedParameter], list[torch.Tensor]]:
        """The managed parameters among some, each once, and those that are not managed."""
        found: dict[int, ManagedParameter] = {}
        others, known = [], self.by_parameter
        for parameter in parameters:
            tensor = known.get(id(parameter))
            if tensor is None or tensor.place is _GIVEN_UP:
                others.append(parameter)
            else:
                found[tensor.spec.index] = tensor
        return list(found.values()), others

    def forget(self, tensor: ManagedParameter) -> None:
        """Forgets a parameter that is removed; ``index`` follows when all that change have changed."""
        self.by_parameter.pop(id(tensor.parameter), None)

    # For a module

    @property
    def type_of(self) -> Callable[[type], type]:
        """Finds the class that a parameter has while it has its value, by the class that it had before the engine."""
        return self._guard.type_of if self._engine_lock.others_may_read() else acquired_type

    def acquire_all(
        self, tensors: Sequence[ManagedParameter], caller: str, acquired: list[ManagedParameter], *, is_recomputed: bool
    ) -> None:
        """Gives parameters their values on the compute device, until each is released as often as it was acquired.

        Args:
            tensors: The parameters of a module, or one parameter.
            caller: The module, or who asks, for errors.
            acquired: Each is added to it as soon as it has its value.
            is_recomputed: Whether a forward runs again inside of a backward. Of a frozen parameter checkpointing would
                keep the object, which has no value later: whoever asks looks into the chunk, which stays on the device.

        Raises:
            BudgetError: If a chunk cannot be brought to the device.
            EngineError: If a parameter is open (``full_parameters``), or was unfrozen since the engine was made.
        """
        if torch.is_inference_mode_enabled() or peek_interpreter_stack() is not None:
            # A payload made there could never be trained with, or would be a wrapper without storage.
            is_graph = torch.is_grad_enabled()
            with torch.inference_mode(False), torch.set_grad_enabled(is_graph), temporarily_clear_interpreter_stack():
                return self.acquire_all(tensors, caller, acquired, is_recomputed=is_recomputed)
        writes, executor, this = self._writes, self._executor, threading.get_ident()
        if writes.watched:
            writes.settle_watched()
        type_of: Callable[[type], type] = acquired_type
        if threading.active_count() != self._engine_lock.num_threads or self._engine_lock.others_read:
            type_of = self.type_of
        self.needs_frames |= is_recomputed
        mirrored, is_resident = writes.mirrors.by_tensor, executor.is_resident
        is_fake = torch._C._get_dispatch_mode(_FAKE) is not None
        left, pauses, pause_s = iter(tensors), None, 0.0
        tensor = next(left, None)
        while tensor is not None:
            with self._lock:
                try:
                    while tensor is not None:
                        parameter, chunk, users = tensor.parameter, tensor.chunk, tensor.users
                        if not users:
                            if (
                                (mirrored and tensor.spec.index in mirrored)
                                or storage_key(parameter) != tensor.released_key
                                or not (isinstance(parameter, LiveMixin) or not tensor.is_bound)
                            ):
                                writes.take_over(tensor)
                            if tensor.place is not _HOME or (chunk.is_group and not tensor.spec.trainable):
                                self._check_computable(tensor)
                        if tensor.gradient is _PARAM and not chunk.is_group:
                            self._gradients.move_to_list(tensor)
                        if not (is_resident or chunk.num_computing) or chunk.compute is None:
                            self._visit(chunk, caller)
                        tensor.read_at = tensor.num_writes
                        if tensor.place is _HOME and not (is_recomputed and not requires_grad(parameter)):
                            # Under fake tensors a view is a fake one, and no other must be beside it.
                            view = None if is_fake else tensor.view_on_device
                            if view is None:
                                view = chunk.view_of(tensor)
                            with RAW():
                                try:
                                    SET_DATA(parameter, view)
                                except RuntimeError:
                                    set_data_inside(parameter, view)
                                if tensor.is_bound:  # another thread may use its value from now on
                                    parameter.__class__ = type_of(tensor.original_type)
                                tensor.version = parameter._version
                            tensor.place = _PARAMETER
                        if not users:
                            chunk.num_computing += 1
                        tensor.users = (*users, this)
                        acquired.append(tensor)
                        tensor = next(left, None)
                except DeviceMemoryError as error:
                    pauses = iter(pauses_s()) if pauses is None else pauses
                    pause_s = next(pauses)
                    # Another thread may free a chunk; where the system refused memory, none will.
                    if not pause_s or error.__cause__ is not None or not self._is_held_elsewhere():
                        self._device.meter.pause()  # torch does not tell the end of a backward that raises
                        raise
            if tensor is not None:
                time.sleep(pause_s)
        return None

    def release_all(self, tensors: Sequence[ManagedParameter]) -> None:
        """Ends one acquisition of each parameter, in order; after its last one a parameter is ``released`` again."""
        if peek_interpreter_stack() is not None:
            with temporarily_clear_interpreter_stack():
                return self.release_all(tensors)
        this, watched, written = (threading.get_ident(),), self._writes.watched, []
        with self._lock:
            with RAW():
                for tensor in tensors:
                    parameter, chunk, users = tensor.parameter, tensor.chunk, tensor.users
                    if users != this:  # what code in backward holds, any thread may release
                        place = users.index(this[0]) if this[0] in users else len(users) - 1
                        tensor.users = users[:place] + users[place + 1 :]
                        if tensor.users:
                            continue
                    tensor.users = ()
                    chunk.num_computing -= 1
                    if tensor.place is not _PARAMETER:
                        continue
                    storage = chunk.storage
                    if (
                        not tensor.is_bound
                        or storage is None
                        or storage_key(parameter) != storage._cdata
                        or parameter._version != tensor.version
                        or parameter.shape != tensor.spec.shape  # of an assigned view no version is another one
                        or tensor in watched
                    ):
                        written.append(tensor)
                        continue
                    parameter.__class__ = released_type(tensor.original_type)  # it answers by itself from now on
                    try:
                        SET_DATA(parameter, tensor.released)
                    except RuntimeError:
                        set_data_inside(parameter, tensor.released)
                    tensor.place = _HOME
            for tensor in written:
                self._writes.take_back(tensor)
            for tensor in written:
                self._check_computable(tensor)
        return None

    def _is_held_elsewhere(self) -> bool:
        """Whether another thread holds a parameter, and may let go of it."""
        this = threading.get_ident()
        return any(ident != this for tensor in self.tensors for ident in tensor.users)

    def release_held_outside_forward(self) -> None:
        """Takes back parameters that were read outside of every forward."""
        if self.held_outside_forward:
            with self._lock:
                while self.held_outside_forward:
                    self.release_all((self.held_outside_forward.pop(),))

    def ensure_on_device(self, tensor: ManagedParameter, caller: str) -> torch.Tensor:
        """The payload to compute with, with this parameter's value; while it is aliased its chunk cannot leave.

        Args:
            tensor: The parameter.
            caller: Who asks, for errors.
        """
        try:
            with self._lock:
                return self._bring(tensor, caller)
        except DeviceMemoryError:
            self._device.meter.pause()  # torch does not tell the end of a backward that raises
            raise

    def _bring(self, tensor: ManagedParameter, caller: str) -> torch.Tensor:
        if self._writes.watched:
            self._writes.settle_watched()
        if tensor.gradient is _PARAM and not tensor.chunk.is_group:
            self._gradients.move_to_list(tensor)
        return self._visit(tensor.chunk, caller)

    # For autograd

    @unseen()
    def _pack_unseen(self, view: torch.Tensor) -> tuple[torch.Tensor, int] | KeptOperand:
        return self.pack(view)

    def pack(self, view: torch.Tensor) -> tuple[torch.Tensor, int] | KeptOperand:
        """Replaces an operand that autograd keeps by its address, if it lives in a chunk or leaves the device.

        Returns:
            The address, or the operand and its version.
        """
        if (_len_torch_function_stack() or _len_torch_dispatch_stack()) and has_modes_of_users():
            return self._pack_unseen(view)
        is_whole = isinstance(view, LiveMixin)
        if is_whole:
            tensor = self.by_parameter.get(id(view))
            storage = None if tensor is None or tensor.place is _GIVEN_UP else tensor.chunk.storage
            is_there = storage is not None and storage_key(view) == storage._cdata
            # ``ctx.save_for_backward(parameter)`` keeps a released one.
            if tensor is None or not (is_there or tensor.place is _HOME) or view.shape != tensor.spec.shape:
                with RAW():
                    return self.pack(view.detach())
            saved = SavedView()
            saved.size, saved.stride, saved.offset = tensor.spec.shape, tensor.strides, tensor.offset_numel
        else:
            chunk = self._find_chunk(storage_key(view))
            tensor = self.exact.get(storage_key(view)) if self.exact else None
            if tensor is None and (chunk is None or view.dtype is not chunk.dtype):
                kept = self._activations.keep(view) if self._activations.is_on else None
                if kept is not None:
                    return kept
                # An operator that saves its own output would make a reference cycle that nothing collects.
                return view.detach() if view.requires_grad else view, view._version
            saved = SavedView()
            saved.size, saved.stride, saved.offset = view.size(), view.stride(), int(view.storage_offset())
            if tensor is None:
                tensor = chunk.tensor_at(saved.offset)  # type: ignore[union-attr]
            else:
                saved.offset += tensor.offset_numel
        saved.is_whole = is_whole
        saved.is_exact = view.dtype is not tensor.chunk.dtype and self._device.sharing.is_alone
        epoch = None if tensor.epoch is None else tensor.epoch()
        if epoch is None:
            epoch = Epoch()
            tensor.epoch = weakref.ref(epoch)
        saved.tensor, saved.epoch = tensor, epoch
        saved.num_writes, saved.num_updates = tensor.num_writes, self._device.counts.steps
        return saved

    def unpack(self, saved: SavedView) -> torch.Tensor:
        """Brings back an operand of backward.

        The result aliases the chunk, and while it is alive the chunk cannot be evicted.

        Raises:
            EngineError: If the parameter was changed since forward.
        """
        tensor = saved.tensor
        value = saved.epoch.value
        if value is not None and not saved.is_whole:  # parameter.data was assigned since
            value = value.to(tensor.original_dtype if saved.is_exact else tensor.chunk.dtype)
            return value.as_strided(saved.size, saved.stride, saved.offset - tensor.offset_numel)
        if saved.num_writes != tensor.num_writes:
            by_whom = "in place" if saved.num_updates == self._device.counts.steps else "by the optimizer"
            raise EngineError(
                f"parameter '{tensor.spec.name}' was changed {by_whom} between this forward and its backward; call "
                "backward before the change"
            )
        payload, offset = tensor.chunk.compute, saved.offset
        if saved.is_exact:
            payload = tensor.look()
            offset += int(payload.storage_offset()) - tensor.offset_numel
        elif payload is None or tensor.gradient is _PARAM or not self._executor.is_resident:
            payload = self.ensure_on_device(tensor, f"the backward of a use of '{tensor.spec.name}'")
        view = payload.as_strided(saved.size, saved.stride, offset)
        # With create_graph autograd keeps the operands of this backward, without saved-tensors hooks: give it a copy.
        return view.clone() if torch.is_grad_enabled() else view

    # Embeddings that are looked up where their weight is at home: only rows cross the bus (PatrickStar section 8.2)

    def begin_lookup(self, tensor: ManagedParameter) -> Lookup:
        """An embedding begins to look rows up in its weight, whose chunk is at home on the host."""
        with self._lock:
            if not tensor.users:
                self._writes.take_over(tensor)
                self.check_usable(tensor)
                if tensor.place is _GIVEN_UP:  # its rows are no longer where they would be read
                    raise EngineError(_given_up(tensor))
            tensor.read_at = tensor.num_writes
            if tensor.gradient is _PARAM:
                self._gradients.move_to_list(tensor)
            tensor.chunk.wait()
            tensor.is_looked_up = True
            leaf = tensor.view(tensor.chunk.param).detach()
            leaf.requires_grad_(tensor.spec.trainable and torch.is_grad_enabled())
            return Lookup(tensor, leaf, leaf._version)

    def end_lookup(self, lookup: Lookup, nbytes: int) -> None:
        """Ends a lookup of so many bytes; an embedding with ``max_norm`` writes to the rows that it reads."""
        tensor, leaf, version = lookup
        tensor.lookup_nbytes += nbytes
        if leaf._version != version:
            self._writes.apply(tensor, leaf.detach(), voids_graphs=False)

    # Checks

    def check_usable(self, tensor: ManagedParameter) -> None:
        """Refuses to use a parameter that is open.

        Raises:
            EngineError: If so.
        """
        if tensor.place is _OPEN:
            raise EngineError(
                f"parameter '{tensor.spec.name}' is open in full_parameters(); run the model after the block has ended"
            )

    def check_gradient(self, tensor: ManagedParameter) -> None:
        """Refuses a gradient that the engine cannot store, or that was computed with something else than the value.

        Raises:
            EngineError: If so.
        """
        if not tensor.spec.trainable:
            raise EngineError(_unfrozen(tensor))
        if tensor.read_at < tensor.num_writes - 1:
            raise EngineError(
                f"a gradient arrived for parameter '{tensor.spec.name}', whose value was not read in this step nor "
                "in the one before: what computed with it went around torch's functions and found NaN in its "
                "place; let it read the parameter inside of the forward of the module that owns it, or in "
                "full_parameters()"
            )

    def _check_computable(self, tensor: ManagedParameter) -> None:
        """Refuses a parameter that is open, or whose gradient would stay on this process, and not be averaged.

        One that is unfrozen, or given up, between forwards is adopted by then. Alone, autograd keeps the gradient of
        any other.

        Raises:
            EngineError: If so.
        """
        self.check_usable(tensor)
        if tensor.chunk.is_group and torch.is_grad_enabled() and requires_grad(tensor.parameter):
            if tensor.place is _GIVEN_UP:
                raise EngineError(_given_up(tensor))
            if not tensor.spec.trainable and self._is_trained:
                raise EngineError(_unfrozen(tensor))


def _given_up(tensor: ManagedParameter) -> str:
    return (
        f"parameter '{tensor.spec.name}' was exchanged, or given another shape, inside of a forward, where it cannot "
        "get another place; change it between two steps, before the model is called"
    )


def _unfrozen(tensor: ManagedParameter) -> str:
    return (
        f"parameter '{tensor.spec.name}' was unfrozen inside of a forward, where the processes cannot agree on a place "
        "for its gradient; set requires_grad between two steps: before the model is called, or in a TrainerCallback "
        "(on_step_begin, on_epoch_begin)"
    )
