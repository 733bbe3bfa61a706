"""What answers for a parameter whose value is in a chunk: how one call gets at its value, and its gradient."""

import contextlib
import sys
import threading
import traceback
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch._C._functorch import peek_interpreter_stack

from hf_patrickstar.common.stage import Stage
from hf_patrickstar.errors import EngineError
from hf_patrickstar.memory.operators import as_it_is, unseen
from hf_patrickstar.model.compiled import stand_in
from hf_patrickstar.model.live_parameter import (
    GET_GRAD,
    RAW,
    WITHOUT_VALUE,
    Access,
    Live,
    ReleasedMixin,
    named,
    raw_data,
    raw_grad,
    requires_grad,
    set_raw_grad,
    storage_key,
)
from hf_patrickstar.model.quantized import is_packed
from hf_patrickstar.runtime.autograd import Autograd, may_keep, refuse_reentrant
from hf_patrickstar.runtime.gradients import consumed
from hf_patrickstar.runtime.listener import ModelListener
from hf_patrickstar.runtime.manager import ChunkManager
from hf_patrickstar.runtime.parameter import GradientPlace, ManagedParameter, ValuePlace

_Tensor: Any = torch.Tensor
_DATA = _Tensor.data.__get__
_ADDRESSES = frozenset({torch.Tensor.data_ptr, torch.Tensor.__cuda_array_interface__.__get__})
_EXPORTS = _ADDRESSES | {
    *(torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.untyped_storage, torch.Tensor.storage),
    *(torch.Tensor._typed_storage, torch.Tensor.__dlpack__, torch.Tensor.is_set_to),
}
"""Functions that give away memory itself."""

_WITHOUT_GRAPH = _EXPORTS | {
    *(
        _DATA,
        torch.Tensor.detach,
        torch.Tensor.tolist,
        torch.Tensor.item,
        torch.Tensor.__bool__,
        torch.Tensor.__float__,
    ),
    *(torch.Tensor.__int__, torch.Tensor.__index__, torch.equal, torch.Tensor.equal, torch.Tensor.__repr__),
}
"""Functions that autograd does not record, whatever their operands."""

_CHANGES_OF_SHAPE = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        *("t_", "transpose_", "squeeze_", "unsqueeze_", "swapaxes_", "swapdims_"),
        *("as_strided_", "resize_", "resize_as_", "set_"),
    )
)
_SHARING = frozenset({torch.Tensor.share_memory_})
_PRODUCT_NAMES = "matmul __matmul__ __rmatmul__ mm bmm mv addmm addmv addbmm baddbmm einsum conv1d conv2d conv3d linear"
_PRODUCTS = frozenset(f for owner in (torch, torch.Tensor, torch.nn.functional) for f in named(owner, _PRODUCT_NAMES))
"""Functions whose operands autocast rounds to 16 bits on every device."""


class LiveWeights(Protocol):
    """Reads and writes full parameters; what makes ``state_dict`` and ``load_state_dict`` truthful."""

    def read(self, tensor: ManagedParameter) -> torch.Tensor:
        """The parameter's value, on the host, in the type that the model was loaded in."""

    @property
    def needs_all(self) -> bool:
        """Whether all processes must read together."""

    def hand_out(self, tensor: ManagedParameter) -> torch.Tensor:
        """The parameter's value, on the host, that stays the same as the value."""

    def streamed(self, *, is_reader: bool) -> contextlib.AbstractContextManager[None]:
        """Saves the model piece by piece, the other processes following the one that reads."""

    def deferred(self, tensor: ManagedParameter) -> torch.Tensor | None:
        """A parameter as it is read while the model is saved piece by piece, or ``None``."""


def managers_of(parameters: Iterable[torch.Tensor]) -> list[ChunkManager]:
    """The managers that have any of some parameters, each once.

    Args:
        parameters: Of a model, maybe of several engines or of none.
    """
    lives = (parameter.__dict__.get("_live") for parameter in parameters)
    return list(dict.fromkeys(live.manager for live in lives if isinstance(live, LiveManaged)))


def _needs_shown(func: Any, shown: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a call must get the value in the type that a parameter shows, and not in that of modules.

    Args:
        func: What is called.
        shown: A tensor in the type that the parameter shows.
        dtype: The type that modules compute with.
    """
    if shown.dtype is dtype or peek_interpreter_stack() is not None or getattr(func, "rounds_operands", False):
        return False
    return func not in _PRODUCTS or not torch.is_autocast_enabled(shown.device.type)


class LiveTensor(Live):
    """Answers for one parameter of a model that is listened to: decides how a call gets at its value.

    Args:
        tensor: What stands for the parameter.
        listener: Gives and takes its value.
        autograd: What autograd keeps.
        is_narrow: Whether forwards run without autocast, so that all types must be one in there.
    """

    __slots__ = ("autograd", "frames", "is_narrow", "listener", "tensor")

    def __init__(self, tensor: Any, listener: ModelListener, autograd: Autograd, is_narrow: bool) -> None:
        self.tensor, self.listener, self.autograd = tensor, listener, autograd
        self.frames, self.is_narrow = listener.frames, is_narrow

    @property
    def typed(self) -> torch.Tensor:
        """What shows the type that users see; not to its own module, nor where all types must be one."""
        tensor = self.tensor
        is_own = threading.get_ident() in tensor.users or (self.is_narrow and self.frames.is_inside)
        return tensor.placeholder if is_own else tensor.typed  # type: ignore[no-any-return]

    def access(self, func: Any, *, is_graph: bool, writes: bool = False) -> Access:
        """See ``Live.access``."""
        tensor, frames = self.tensor, self.frames
        is_graph = is_graph and func not in _WITHOUT_GRAPH
        is_inside = frames.is_inside
        if is_inside and frames.stage is Stage.BACKWARD:
            self.autograd.notice_backward()
        leaf = frames.find_lookup(tensor.parameter) if is_inside else None
        if leaf is not None:
            return Access(leaf)
        is_together = is_inside and self.has_one_type
        is_exact = not (writes or (is_together and func in _WITHOUT_GRAPH))
        is_exact = is_exact and _needs_shown(func, self.typed, tensor.placeholder.dtype)
        if is_together or (is_inside and (is_graph or (not writes and self._computes(func)))):
            inner: Access = _InsideAccess(self, func)
            return _ExactAccess(inner, self, is_graph=is_graph, is_rounded=is_together) if is_exact else inner
        if is_graph and not is_inside:
            inner = _GraphAccess(self)
            return _ExactAccess(inner, self, is_graph=True) if is_exact else inner
        return self.access_at_home(func, writes=writes)

    def _computes(self, func: Any) -> bool:
        """Whether a call inside of a forward or backward computes with the parameter, though autograd records nothing.

        A backward without a forward in it computes with frozen parameters, which a function of autograd has kept. What
        the library that has packed a weight does with its bytes is computing, too.
        """
        is_running = self.frames.stack or not self.tensor.spec.trainable
        return bool(is_running) and (func not in _WITHOUT_GRAPH or is_packed(self.tensor.parameter))

    # What differs between a parameter in a chunk and one whose uses are noted

    @property
    def has_one_type(self) -> bool:
        """Whether all types must be one inside of a forward, or others may do something else meanwhile."""
        return self.is_narrow

    def access_at_home(self, func: Any, *, writes: bool) -> Access:
        """Access to the value where it is, for a call that autograd does not record."""
        raise NotImplementedError

    def alias(self) -> torch.Tensor:
        """Another tensor over the value, which the parameter does not have itself while it is acquired."""
        raise NotImplementedError

    def graph_copy(self) -> torch.Tensor:
        """A copy of the value, as a function of the parameter: results may alias it."""
        raise NotImplementedError

    def exact_copy(self, value: torch.Tensor, *, is_graph: bool) -> torch.Tensor:
        """The value as users see it, which autograd keeps as such.

        Args:
            value: What modules compute with.
            is_graph: Whether it must be a function of the parameter.
        """
        raise NotImplementedError

    def stand_in(self) -> torch.Tensor | None:
        """What stands in for a frozen parameter while its module is recomputed; ``None`` if it has its value itself."""
        return None

    def take_over_stand_in(self, value: torch.Tensor) -> None:
        """The module has written a value to it."""

    def note_views(self, results: list[torch.Tensor]) -> None:
        """A call inside of a forward or backward has returned results, which may look into the value."""

    def note_exact(self, value: torch.Tensor) -> None:
        """Results of a call look into a value that ``exact_copy`` has made."""


class LiveManaged(LiveTensor):
    """Answers for one parameter in a chunk.

    Args:
        tensor: The parameter.
        manager: Gives and takes its value.
        weights: Reads it as a whole.
        autograd: What autograd keeps.
        is_narrow: See ``LiveTensor``.
    """

    __slots__ = ("_given", "kept", "manager", "weights")

    def __init__(
        self, tensor: ManagedParameter, manager: ChunkManager, weights: LiveWeights, autograd: Autograd, is_narrow: bool
    ) -> None:
        super().__init__(tensor, manager, autograd, is_narrow)
        self.manager, self.weights = manager, weights
        self._given: tuple[int, Any] = -1, None  # to ``state_dict``: the version of all values, and the tensor
        self.kept: torch.Tensor | None = None  # the value, for what the parameter was exchanged for

    def value_for(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """See ``Live.value_for``."""
        if parameter is self.tensor.parameter:
            return None
        self.manager.writes.give_up_swapped(self.tensor)
        return self.kept

    def access(self, func: Any, *, is_graph: bool, writes: bool = False) -> Access:
        """See ``Live.access``.

        Raises:
            EngineError: If the function needs memory that other processes share.
        """
        deferred = self.weights.deferred(self.tensor)
        if deferred is not None:
            return Access(deferred)
        if func in _SHARING:
            raise EngineError(cannot_share(self.tensor))
        manager = self.manager
        if manager.rest.misses_calls and not manager.lock.is_mine and _is_in_module(manager.engine.model):
            manager.take_gradients()
            manager.rest.refuse("a module of the model is called by itself")
            manager.engine.hooks.follow_rest()
        try:
            return super().access(func, is_graph=is_graph, writes=writes)
        except _HasLeftError:
            return Access(self.tensor.parameter)  # which answers for itself now

    @property
    def has_one_type(self) -> bool:
        """See ``LiveTensor``."""
        return self.is_narrow or not self.manager.sharing.is_alone

    def access_at_home(self, func: Any, *, writes: bool) -> Access:
        """See ``LiveTensor``."""
        return _ValueAccess(self.tensor, self.manager, func, writes=writes)

    def alias(self) -> torch.Tensor:
        """See ``LiveTensor``."""
        return self.tensor.view_copy(self.tensor.chunk.compute)  # type: ignore[no-any-return]

    def stand_in(self) -> torch.Tensor | None:
        """See ``LiveTensor``."""
        tensor = self.tensor
        if tensor.place is ValuePlace.PARAMETER or tensor.chunk.compute is None:
            return None
        # ``.data`` has a version of its own, which tells whether the module writes to it.
        return stand_in(tensor.parameter, self.alias().data, self.manager.parameters.type_of(tensor.original_type))

    def take_over_stand_in(self, value: torch.Tensor) -> None:
        """See ``LiveTensor``."""
        self.manager.writes.apply(self.tensor, value, voids_graphs=False)

    def graph_copy(self) -> torch.Tensor:
        """See ``LiveTensor``; a mirror."""
        return _aliased(self.tensor, self.manager.mirrors.hand_out(self.tensor))

    def exact_copy(self, value: torch.Tensor, *, is_graph: bool) -> torch.Tensor:
        """See ``LiveTensor``."""
        manager, tensor = self.manager, self.tensor
        with manager.gradients.lock, as_it_is(), torch.no_grad():
            exact = tensor.look().clone()
        made = _aliased(tensor, exact) if is_graph and requires_grad(tensor.parameter) else exact
        if manager.sharing.is_alone:  # else it cannot be read again in the middle of a backward
            manager.parameters.exact[storage_key(exact)] = tensor
        return made

    def note_views(self, results: list[torch.Tensor]) -> None:
        """See ``LiveTensor``; what is written through views is looked for later."""
        storage = self.tensor.chunk.storage
        if storage is not None and any(_is_over(result, storage._cdata) for result in results):
            self.manager.writes.watch(self.tensor)

    def note_exact(self, value: torch.Tensor) -> None:
        """See ``LiveTensor``; it becomes a mirror."""
        self.manager.mirrors.add(self.tensor, value.detach())

    def assign(self, value: torch.Tensor) -> None:
        """Takes a value over, and follows the tensor that it came in: in torch both are the same memory from now on.

        Raises:
            EngineError: If the shape is another one.
        """
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"Variable data has to be a tensor, but got {type(value).__name__}")
        if value is self.tensor.parameter:
            return
        manager = self.manager
        if tuple(value.shape) == self.tensor.spec.shape:
            manager.writes.assign(self.tensor, value.data)
            return
        with manager.lock.held("an assignment that gives a parameter another shape"):
            manager.writes.assign(self.tensor, value.data)

    def note_data_is_out(self) -> None:
        """Remembers to compare: what is written to ``.data`` leaves no trace."""
        self.manager.writes.watch(self.tensor)

    def value_for_state_dict(self) -> torch.Tensor:
        """The value for ``state_dict``; tied names of one ``state_dict`` share one tensor, as they do in torch."""
        tensor, device = self.tensor, self.manager.device
        with self.manager.gradients.lock:  # another thread takes it out of its chunk before this, or after
            now = self._has_left()
            if now is not None:
                return raw_data(tensor.parameter) if now is self else now.value_for_state_dict()
            deferred = self.weights.deferred(tensor)
            if deferred is not None:
                return deferred
            self.manager.rest.take_written()
            version, reference = self._given
            value = reference() if len(tensor.spec.aliases) and version == device.version else None
            if value is None:
                value = self.weights.hand_out(tensor)
                self._given = device.version, weakref.ref(value)
            elif self.weights.needs_all:
                self.weights.read(tensor)  # others may not have kept theirs
            return value

    def host_value(self) -> torch.Tensor:
        """The value on the host, in the type that the model was loaded in; it may alias the chunk."""
        manager, tensor = self.manager, self.tensor
        manager.writes.take_over(tensor)
        return tensor.host_alias()

    def copied_value(self) -> torch.Tensor:
        """A copy of it, also while another thread takes the parameter out of its chunk."""
        tensor = self.tensor
        with self.manager.gradients.lock:
            now = self._has_left()
            if now is not None and now is not self:
                return now.copied_value()
            return (self.host_value() if now is None else raw_data(tensor.parameter)).clone()

    def _has_left(self) -> Live | None:
        """What answers for the parameter since it has left its chunk: itself for nobody, and ``None`` if it is here."""
        tensor = self.tensor
        return tensor.parameter.__dict__.get("_live", self) if _is_ordinary(tensor) else None

    def view_whole(self, func: Any) -> torch.Tensor:
        """A mirror, as a function of the parameter."""
        manager, tensor = self.manager, self.tensor
        with manager.gradients.lock:
            manager.writes.take_over(tensor, keeps_unused=True)
            return self.graph_copy()

    # The gradient

    def pass_on(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Stores a gradient that has more bits than those of modules: autograd may add one to the other in 16 bits.

        Returns:
            The gradient if autograd must go on with it, since a hook, or a call that returns it, waits for the sum.
        """
        manager, tensor, parameter = self.manager, self.tensor, self.tensor.parameter
        is_resting = manager.device.is_resting  # then it has its value all the time, and no hook of ours
        is_usual = tensor.is_cast and tensor.spec.trainable and (is_resting or isinstance(parameter, ReleasedMixin))
        is_usual = is_usual and not tensor.chunk.is_group and not torch.is_grad_enabled()
        num_hooks = len(parameter._post_accumulate_grad_hooks or ())
        if not is_usual or parameter._backward_hooks or num_hooks > int(not is_resting):
            return gradient
        self.autograd.notice_backward()
        manager.gradient_ready(tensor, gradient)
        return None

    def get_grad(self) -> torch.Tensor | None:
        """The gradient: autograd's own in the middle of a backward, otherwise what is at home.

        Raises:
            EngineError: If it was consumed by a step.
        """
        manager, tensor = self.manager, self.tensor
        with RAW():
            own: torch.Tensor | None = GET_GRAD(tensor.parameter)
        if own is not None and manager.device.is_resting and torch._C._current_graph_task_id() == -1:
            manager.abandon_failed_backward()
            manager.take_gradients()
            own = raw_grad(tensor.parameter)
        if own is not None or not tensor.spec.trainable:
            return own
        gradients, mirrors = manager.gradients, manager.gradient_mirrors
        with gradients.lock:
            if tensor.is_consumed:
                return ConsumedGradient.make(tensor)
            if tensor.gradient is GradientPlace.NONE and tensor.deferred_gradient is None:
                return None
            if gradients.coefficient is not None or gradients.inverse_scale is not None:
                manager.apply_factor()
            if gradients.is_after_step:
                gradients.was_read_late = True
            found = mirrors.by_tensor.get(tensor.spec.index)
            return found[0].value if found and mirrors.follows else mirrors.hand_out(tensor)

    def set_grad(self, gradient: torch.Tensor | None) -> None:
        """Replaces the gradient, or drops it.

        Raises:
            EngineError: If the shape or the type is another one.
        """
        manager, tensor = self.manager, self.tensor
        if raw_grad(tensor.parameter) is not None or not tensor.spec.trainable:
            set_raw_grad(tensor.parameter, gradient)
            return
        if gradient is None:
            manager.gradient_mirrors.forget(tensor)
            manager.gradients.drop(tensor)
            return
        if isinstance(gradient, ConsumedGradient):
            return  # what was read is written back
        if not isinstance(gradient, torch.Tensor):
            raise TypeError(
                f"the gradient of parameter '{tensor.spec.name}' must be a tensor or None, got a "
                f"{type(gradient).__name__}"
            )
        if gradient is tensor.parameter:
            raise EngineError(
                f"parameter '{tensor.spec.name}' cannot be its own gradient; assign a copy (p.detach().clone())"
            )
        if tuple(gradient.shape) != tensor.spec.shape or gradient.dtype is not tensor.original_dtype:
            raise EngineError(
                f"the gradient of parameter '{tensor.spec.name}' must have shape {tensor.spec.shape} and type "
                f"{tensor.original_dtype}, got {tuple(gradient.shape)} and {gradient.dtype}; convert it first"
            )
        manager.apply_factor()
        manager.gradient_mirrors.assign(tensor, gradient)


class ConsumedGradient(torch.Tensor):
    """Stands where a gradient was before the optimizer's step consumed it: there, but not to be read."""

    _tensor: ManagedParameter

    @staticmethod
    def make(tensor: ManagedParameter) -> "ConsumedGradient":
        """The one of a parameter."""
        gradient = torch.Tensor._make_subclass(ConsumedGradient, tensor.typed)
        gradient._tensor = tensor
        return gradient

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = args[0] if args and isinstance(args[0], cls) else None
        if func in WITHOUT_VALUE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found = own if own is not None else next(a for a in args if isinstance(a, cls))
        if own is not None and func is torch.Tensor.zero_:
            with unseen():
                own._tensor.make_gradient_zero()
            return own
        raise EngineError(consumed(found._tensor, f"'{getattr(func, '__name__', func)}' was called on it"))


class _InsideAccess(Access):
    """Inside of a forward or backward: the chunk comes to the device, as for a module's own parameters.

    Checkpointing keeps a frozen operand of a recomputation as the very object that it was given, which would be
    released again when backward comes to use it. So there functions get an alias of the chunk instead of the parameter.
    """

    def __init__(self, live: LiveTensor, func: Any) -> None:
        tensor, frames = live.tensor, live.frames
        self._live, self._tensor, self._stack = live, tensor, frames.stack
        self._parameters = live.listener.parameters
        self._is_held, self._is_kept = True, func in _EXPORTS
        is_recomputed = frames.stage is Stage.BACKWARD
        if is_recomputed:
            refuse_reentrant(f"code that reads parameter '{tensor.spec.name}'")
        caller = "code that reads a parameter of another module"
        self._parameters.acquire_all((tensor,), caller, [], is_recomputed=is_recomputed)
        super().__init__(live.alias() if is_recomputed and not requires_grad(tensor.parameter) else tensor.parameter)

    def needs_copy(self, results: list[torch.Tensor]) -> bool:
        """No copy: what aliases the chunk keeps it on the device."""
        if self._is_held:
            self._live.note_views(results)
        return False

    def make_room(self) -> None:
        """A copy: the chunks of all parameters of a call may be more than fit."""
        if self._is_held:
            self.value = self.value.clone()
            self.end()

    def note_returned(self) -> None:
        self._is_kept = True

    def end(self) -> None:
        if not self._is_held:
            return
        self._is_held = False
        if not self._is_kept:
            self._parameters.release_all((self._tensor,))
        elif self._stack:
            self._parameters.needs_frames = True
            self._stack[-1].acquired.append(self._tensor)
        else:
            self._parameters.held_outside_forward.append(self._tensor)


def _is_ordinary(tensor: Any) -> bool:
    """Whether a parameter is an ordinary one, for a while or for good."""
    return tensor.place is ValuePlace.OPEN or not tensor.is_bound


def _is_in_module(model: torch.nn.Module) -> bool:
    """Whether the code that runs is the forward of a module of a model."""
    code, frames = torch.nn.Module._call_impl.__code__, traceback.walk_stack(sys._getframe(1))
    running = [frame.f_locals["self"] for frame, _ in frames if frame.f_code is code]
    return bool(running) and any(module in running for module in model.modules())


class _HasLeftError(Exception):
    """The parameter has left its chunk while this thread waited."""

    @staticmethod
    def check(tensor: Any) -> None:
        """Raises it if so."""
        if _is_ordinary(tensor):
            raise _HasLeftError


class _GraphAccess(Access):
    """Between forward and backward, recorded by autograd: the parameter itself, and its operand kept as numbers.

    A view of it would pin its chunk for as long as the graph lives. So what aliases the parameter is made from a copy,
    which is a part of the graph.
    """

    def __init__(self, live: LiveTensor) -> None:
        self._live, self._listener, tensor = live, live.listener, live.tensor
        may_keep(f"code that computes with parameter '{tensor.spec.name}'")
        self._listener.lock.acquire("code that computes with a parameter")
        try:
            _HasLeftError.check(tensor)
            caller = "code outside of every forward that computes with a parameter"
            self._listener.parameters.acquire_all((tensor,), caller, [], is_recomputed=False)
        except BaseException:
            self._listener.lock.release()
            raise
        self._kept = live.autograd.kept_as_numbers()
        self._kept.__enter__()
        self._is_held, self._is_copy = True, False
        super().__init__(tensor.parameter)

    def needs_copy(self, results: list[torch.Tensor]) -> bool:
        key = storage_key(self.value)
        if self._is_copy or not any(_is_over(result, key) for result in results):
            return False
        self._use_copy()
        return True

    def _use_copy(self) -> None:
        self._is_copy = True
        self.value = self._live.graph_copy()

    def make_room(self) -> None:
        """A copy, which is a part of the graph: the chunks of all parameters of a call may be more than fit."""
        self._use_copy()
        self._release()

    def end(self) -> None:
        self._kept.__exit__(None, None, None)
        self._release()
        self._listener.lock.release()

    def _release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._listener.parameters.release_all((self._live.tensor,))


class _ExactAccess(Access):
    """Lets a call that autograd may record have the value as users see it, which modules compute with in 16 bits.

    Args:
        inner: Lets it have what modules compute with; it keeps the chunk there, as plans have it.
        live: Answers for the parameter.
        is_graph: Whether autograd records the call.
        is_rounded: Whether the value has the type alone, and not more bits.
    """

    def __init__(self, inner: Access, live: LiveTensor, *, is_graph: bool, is_rounded: bool = False) -> None:
        self._inner, self._live, self._key = inner, live, 0
        try:
            if is_rounded:
                super().__init__(inner.value.to(live.tensor.original_dtype))
                return
            super().__init__(live.exact_copy(inner.value, is_graph=is_graph))
            self._key = storage_key(self.value)
        except BaseException:
            inner.end()
            raise

    def needs_copy(self, results: list[torch.Tensor]) -> bool:
        """No copy of the value, which is one already."""
        if self._key and any(_is_over(result, self._key) for result in results):
            self._live.note_exact(self.value)
        return False

    def make_room(self) -> None:
        self._inner.make_room()

    def end(self) -> None:
        self._live.listener.parameters.exact.pop(self._key, None)
        self._inner.end()


class _Alias(torch.autograd.Function):
    """A tensor with the values of a parameter, as a function of the parameter: what a copy of it is, without a copy."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, value: torch.Tensor, live: LiveManaged) -> torch.Tensor:
        ctx.live = live
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.live.pass_on(gradients[0]), None, None


def _aliased(tensor: ManagedParameter, value: torch.Tensor) -> torch.Tensor:
    if tensor.is_cast:
        with RAW():
            tensor.parameter.grad_dtype = None  # its gradient may have another type than what modules compute with
    return _Alias.apply(tensor.parameter, value, tensor.live)  # type: ignore[no-any-return, no-untyped-call]


class _ValueAccess(Access):
    """Between forward and backward, not recorded: the value where it is, or a mirror of it; see [Note: mirrors]."""

    def __init__(self, tensor: ManagedParameter, manager: ChunkManager, func: Any, *, writes: bool) -> None:
        self._tensor = tensor
        self._writes = writes
        self._manager = manager
        self._lock = manager.gradients.lock
        self._lock.acquire()
        try:
            _HasLeftError.check(tensor)
            manager.parameters.check_usable(tensor)  # also tells plans that it is read at home
            manager.mirrors.sync_unused(but=tensor)
            manager.gradient_mirrors.sync_unused(but=tensor)
            manager.writes.take_over(tensor, keeps_unused=True)
            tensor.read_at = tensor.num_writes
            self._is_private = func in _EXPORTS
            self._changes_shape = func in _CHANGES_OF_SHAPE
            if self._is_private:
                self._use(manager.mirrors.hand_out(tensor, is_held=func in _ADDRESSES))
            else:
                value = tensor.look()
                self._use(value.clone() if self._changes_shape else value)
        except BaseException:
            self._lock.release()
            raise

    def _use(self, value: torch.Tensor) -> None:
        """Lets the call have a value: a leaf that requires a gradient if the parameter does; views of it say so."""
        with as_it_is():
            # Not detach(): all parameters of a chunk share the version of its payload.
            self.value = value.data.requires_grad_(requires_grad(self._tensor.parameter))
        self._version = self.value._version

    def needs_copy(self, results: list[torch.Tensor]) -> bool:
        key = storage_key(self.value)
        if self._is_private or not any(_is_over(result, key) for result in results):
            return False
        self._is_private = True
        mirrors = self._manager.mirrors
        if key not in _places(self._tensor) and not mirrors.has_reusable(self._tensor):
            mirrors.add(self._tensor, self.value.detach())
            return False
        self._use(mirrors.hand_out(self._tensor))
        return True

    def finish(self) -> None:
        if self._changes_shape:
            self._manager.writes.assign(self._tensor, self.value.detach())
        elif self._writes or self.value._version != self._version:
            self._manager.writes.apply(self._tensor, self.value.detach())

    def end(self) -> None:
        del self.value  # before another thread counts who looks into the chunk
        self._lock.release()


def cannot_share(tensor: ManagedParameter) -> str:
    """The message where a parameter should go to memory that other processes share."""
    return (
        f"parameter '{tensor.spec.name}' is in a chunk and cannot be moved to shared memory; share a copy of the model "
        "(copy.deepcopy), or call model.patrickstar_engine.detach() first"
    )


def _places(tensor: ManagedParameter) -> set[int]:
    """The storages of the chunk that a parameter is in."""
    chunk = tensor.chunk
    payloads = [*chunk.held.values(), *([chunk.compute] if chunk.compute is not None else [])]
    return {storage_key(payload) for payload in payloads}


def _is_over(result: torch.Tensor, key: int) -> bool:
    """Whether a tensor looks into a storage; some kinds of tensors have none."""
    try:
        return storage_key(result) == key
    except NotImplementedError:
        return False
