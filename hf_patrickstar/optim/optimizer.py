"""The optimizer that users, schedulers and Accelerate see: torch's interface over chunks."""

import copy
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hf_patrickstar.common.interrupts import held_back
from hf_patrickstar.layout.specs import MASTER
from hf_patrickstar.memory.operators import unseen, with_modes_of_users
from hf_patrickstar.model.lock import locked
from hf_patrickstar.optim.kernel import Kernel, place_state
from hf_patrickstar.optim.state import SAVED_MASTER, StateView, call_hooks, check_shapes, pack_state, pair_up, read
from hf_patrickstar.optim.torch_kernel import TorchKernel
from hf_patrickstar.optim.total_norm import total_norm
from hf_patrickstar.runtime.chunk import Chunk
from hf_patrickstar.runtime.manager import ChunkManager
from hf_patrickstar.runtime.parameter import GradientPlace, ManagedParameter, ValuePlace
from hf_patrickstar.runtime.ranges import named

logger = logging.getLogger(__name__)

_NO_PARAMETER = -1
"""The position in the groups of what an optimizer keeps under keys that are no parameters."""


class ChunkedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose parameters, gradients and states live in chunks.

    ``param_groups``, ``defaults`` and the hooks are those of the optimizer that it was made from, so schedulers made on
    either one work; its other methods and attributes are reachable through this one. That optimizer itself updates the
    parameters in its groups that are in no chunk, for example those of a module that the engine does not know.

    Args:
        optimizer: The user's optimizer; its class and groups say what a step does.
        kernel: Updates chunks.
        manager: The manager of the chunks.
        index: Its number among the optimizers of the engine.
        follow_model: Lets the engine follow changes of the model, or of param groups, before a step; returns whether
            there may have been any.
        peers: All optimizers of the engine; the list may grow.

    Attributes:
        group_numbers: The param group of each parameter that it updates in a chunk, by tensor index.
    """

    _step_supports_amp_scaling = False
    """False whatever the user's optimizer says, so that a ``torch.amp.GradScaler`` calls ``unscale_`` before a step."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kernel: Kernel,
        manager: ChunkManager,
        index: int = 0,
        follow_model: Callable[[], bool] = lambda: False,
        peers: Sequence["ChunkedOptimizer"] = (),
    ) -> None:
        self.inner = optimizer
        self.index = index
        self._manager = manager
        self._follow_model = follow_model
        self._peers = peers
        # The shape and the state that a parameter had in a chunk when somebody gave it another shape.
        self._before: dict[int, tuple[tuple[int, ...], list[weakref.ref[torch.Tensor]]]] = {}
        # Copies of the groups, since torch's constructor replaces their lists, to which some optimizers (LBFGS) refer.
        super().__init__([{**group, "params": [*group["params"]]} for group in optimizer.param_groups], {})
        self.kernel = kernel  # not earlier: torch's constructor assigns an empty state
        self.param_groups = optimizer.param_groups
        self.defaults = optimizer.defaults
        for name in [name for name in vars(self) if name.endswith("_hooks") and hasattr(optimizer, name)]:
            setattr(self, name, getattr(optimizer, name))
        self.follow_groups()

    def follow_groups(self) -> None:
        """Notes which parameters are in which group now, and whether users have added some that need another chunk."""
        groups: dict[int, int] = {}
        known = self._manager.parameters.by_parameter
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                tensor = known.get(id(parameter))
                if tensor is None or tensor.place is ValuePlace.GIVEN_UP:
                    continue
                if tensor.chunk.is_updated and tensor.chunk.spec.optimizer_index == self.index:
                    groups[tensor.spec.index] = number
                elif tensor.spec.trainable:
                    self._manager.has_new_groups = True
        self.group_numbers = groups

    def _updates(self, item: ManagedParameter | Chunk) -> bool:
        """Whether this optimizer updates a chunk, or that of a parameter."""
        chunk = item if isinstance(item, Chunk) else item.chunk
        return chunk.is_updated and chunk.spec.optimizer_index == self.index

    @property
    def _tensors(self) -> list[ManagedParameter]:
        """The parameters in its groups that are in chunks of its own, in model order."""
        return [tensor for tensor in self._manager.tensors if tensor.spec.index in self.group_numbers]

    @property
    def _others(self) -> list[torch.Tensor]:
        """The parameters in its groups that are in no chunk of its own: in none, or in those of another optimizer."""
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        found = ((parameter, self._manager.find(parameter)) for parameter in parameters)
        return [p for p, tensor in found if tensor is None or (tensor.spec.trainable and not self._updates(tensor))]

    @property
    def _is_beside_others(self) -> bool:
        """Whether there are gradients in chunks that this optimizer does not update."""
        others = (chunk.tensors for chunk in self._manager.chunks if not self._updates(chunk))
        return any(tensor.has_gradient for tensors in others for tensor in tensors)

    @property
    def _is_wanted_by_peers(self) -> bool:
        """Whether another optimizer holds one of its parameters too, and may still need the gradient."""
        theirs = (p for peer in self._peers if peer is not self for group in peer.param_groups for p in group["params"])
        found = (self._manager.find(parameter) for parameter in theirs)
        return any(tensor is not None and tensor.spec.index in self.group_numbers for tensor in found)

    # Other attributes and methods of the user's optimizer

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets the attribute of the user's optimizer, unless this class has an attribute of that name."""
        if "group_numbers" not in self.__dict__ or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.inner, name, value)

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("inner")
        if inner is None or name.startswith("__"):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        found = getattr(inner, name)
        if not callable(found) or getattr(found, "__self__", None) is not inner:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            """Calls a method of the user's optimizer, which finds fp32 masters in its groups."""
            self._manager.writes.sync()
            for tensor in self._tensors:  # it may write to masters and states
                tensor.chunk.wait_for_reader()
            with self._manager.lock.held(f"optimizer.{name}()"), self.kernel.lent(self._tensors) as changed:
                result = found(*args, **kwargs)
            for tensor in changed:
                self._manager.writes.follow_master(tensor)
            return result

        return call

    def __repr__(self) -> str:
        return repr(self.inner)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Every protocol accepts the result of protocol 1, which alone allows the class of another object.
        return self._as_ordinary().__reduce_ex__(1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._as_ordinary(), memo)

    @unseen()
    def _as_ordinary(self) -> torch.optim.Optimizer:
        """The user's optimizer with copies of its states, over the model's own parameters."""
        ordinary, states = object.__new__(type(self.inner)), self._all_states()
        ordinary.__dict__.update(self.inner.__dict__, state=copy.copy(self.inner.state))
        ordinary.state.clear()
        for parameter, state in self._by_parameter(states):
            ordinary.state[parameter] = {key: value for key, value in state.items() if key != SAVED_MASTER}
        return ordinary

    # A step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates every parameter that has a gradient.

        Gradients are kept or consumed; see [Note: gradients after the step].

        Args:
            closure: Evaluates the model again and returns the loss, with gradients enabled.

        Returns:
            What ``closure`` returned, or ``None``.

        Raises:
            EngineError: If a gradient is incomplete, because torch would have added it to one that a step has consumed.
        """
        return self._step(None if closure is None else with_modes_of_users(closure))

    @locked
    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None and not self.kernel.updates_at_once:
            with torch.enable_grad():
                loss = closure()
            closure = None
        manager = self._manager
        manager.settle_failures()
        manager.take_gradients()
        self.follow_groups()
        if self._follow_model():
            self.follow_groups()
        manager.parameters.release_held_outside_forward()
        manager.writes.sync()
        manager.writes.take_over_all(self._tensors)
        for tensor in self._tensors:
            if closure is None and tensor.is_consumed:  # a closure computes new gradients
                manager.gradients.check_complete(tensor)
            if self.inner.state:
                self._begin_anew(tensor)
        if manager.gradients.has_factor and self._is_beside_others:
            manager.apply_factor()
        self.inner._opt_called = True  # type: ignore[attr-defined]  # read by schedulers made on the inner one
        if self.kernel.updates_at_once:
            assert isinstance(self.kernel, TorchKernel)
            loss = self.kernel.update_at_once(self._tensors, self._present, manager.writes.follow_master, closure)
        number, order = self.index, manager.in_order_of_use
        own = [chunk for chunk in order if chunk.is_updated and chunk.spec.optimizer_index == number]
        factor = manager.gradients.take_factor()
        try:
            self._update(own, factor)
        except BaseException:
            manager.gradients.coefficient = factor  # gradients that are left are still to be multiplied
            raise
        num_held = sum([len(group["params"]) for group in self.param_groups])
        if not self.kernel.updates_at_once and len(self.group_numbers) < num_held:
            self.kernel.update_others(self._others)
        manager.counts.steps += 1
        self._note_step()
        self.kernel.end_step()
        return loss

    def _update(self, chunks: Sequence[Chunk], factor: torch.Tensor | None) -> None:
        phases, gradients, kernel = self._manager, self._manager.gradients, self.kernel
        phases.update_begin(chunks, self.index)
        keeps = (gradients.must_keep or self._is_wanted_by_peers) and gradients.try_to_keep(chunks)
        factors: dict[torch.device, torch.Tensor] = {}
        if factor is not None:  # chunks may leave for the host while their gradients are made ready
            homes = (chunk.device.torch_device if chunk.is_streamed else chunk.home_device for chunk in chunks)
            factors = {place: factor.to(place) for place in {torch.device("cpu"), *homes}}
        is_read_there = kernel.runs_beside and not keeps
        elsewhere = (GradientPlace.APART,) if is_read_there else (GradientPlace.APART, GradientPlace.LEFT)
        for batch in [chunks] if kernel.runs_beside else [[chunk] for chunk in chunks]:
            phases.before_update(batch)
            for chunk in batch:
                for tensor in chunk.tensors:
                    if tensor.deferred_gradient is not None or tensor.gradient in elsewhere:
                        gradients.make_ready(tensor)
                    if tensor.spec.index not in self.group_numbers:
                        phases.leave_alone(tensor, factors.get(chunk.home_device))
            lent = [chunk for chunk in batch if phases.overlaps_updates and chunk.is_lent(kernel.list_names)]
            with held_back(), named("update"), gradients.lock, phases.evictor.stays:
                updates = kernel.prepare(batch, self.group_numbers, factors, keeps=keeps)
                phases.update(updates, self.group_numbers, keeps=keeps, runs_beside=kernel.runs_beside)
                del updates  # they refer to lists, whose memory is to be free at once when chunks move
            for chunk in lent:  # somebody looks into its states
                chunk.wait_for_update()
        phases.update_end()

    def _present(self, is_all: bool) -> torch.Tensor | None:
        """Makes gradients ready for an optimizer that uses all at once; returns the factor to multiply them with."""
        self._manager.gradient_mirrors.sync()
        gradients = self._manager.gradients
        for tensor in self._tensors:
            if is_all:
                gradients.check_complete(tensor)
            gradients.make_ready(tensor)
            if tensor.chunk.is_mixed:
                gradients.move_to_list(tensor)
            tensor.chunk.wait()
            tensor.chunk.wait_for_reader()
        return gradients.take_factor()

    @locked
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of the parameters in its groups, and restores values that gradients had overwritten.

        Args:
            set_to_none: If false, existing gradients become zeros, and the next step still updates their parameters.
        """
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._manager.zero_gradients(parameters, set_to_none=set_to_none)

    @locked
    def skip_step(self) -> None:
        """Drops a step: gradients that overflowed are discarded, parameters keep their values."""
        self.follow_groups()
        self._manager.discard_gradients(self._tensors if self._is_beside_others else None)
        for parameter in self._others:
            parameter.grad = None
        self._manager.counts.skipped_steps += 1
        self._note_step()

    def _note_step(self) -> None:
        counts = self._manager.counts
        if counts.log is not None:
            counts.log.append(("step", counts.steps))
        if counts.steps + counts.skipped_steps == 1:
            seconds = time.perf_counter() - counts.begun_s
            logger.info("patrickstar: %.1f s from the engine to the end of the first step", seconds)

    # Norm, clipping and unscaling

    @locked
    def grad_norm(self, parameters: Iterable[torch.Tensor] | None = None, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of all gradients together, computed as ``torch.nn.utils.get_total_norm`` does.

        Args:
            parameters: The parameters whose gradients count; by default all of the model, and all others in the groups.
                Those without a gradient are skipped.
            norm_type: Order of the norm.

        Returns:
            A scalar fp32 tensor; unscaled if the gradients were scaled and ``unscale`` was called.
        """
        return total_norm(self._manager, self._find(parameters), norm_type)

    def _find(self, parameters: Iterable[torch.Tensor] | None) -> list[ManagedParameter | torch.Tensor]:
        """The ``ManagedParameter`` of each parameter in a chunk, other parameters themselves; each once."""
        if parameters is None:
            return [*self._manager.tensors, *(p for p in self._others if self._manager.find(p) is None)]
        return list({id(parameter): self._manager.find(parameter) or parameter for parameter in parameters}.values())

    @locked
    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | None, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clips by global norm, without a pass over the gradients: the next step multiplies them as it reads them.

        If some gradients are not to be clipped, or users hold mirrors of gradients, the gradients are multiplied at
        once instead, in fp32.

        Args:
            parameters: Parameters whose gradients are clipped together; all by default.
            max_norm: The largest norm that is not clipped.
            norm_type: Order of the norm.

        Returns:
            The norm before clipping, a scalar fp32 tensor.
        """
        items = self._find(parameters)
        total = total_norm(self._manager, items, norm_type)
        if float(max_norm) == float("inf"):
            return total
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        gradients, mirrors = self._manager.gradients, self._manager.gradient_mirrors
        chosen = {item.spec.index for item in items if isinstance(item, ManagedParameter)}
        left_out = any(tensor.has_gradient for tensor in self._manager.tensors if tensor.spec.index not in chosen)
        is_at_once = left_out or bool(mirrors.by_tensor)
        for item in items:
            if not isinstance(item, ManagedParameter):
                if item.grad is not None:
                    item.grad.mul_(coefficient.to(item.grad.device))
            elif is_at_once:
                gradients.multiply(item, coefficient)
                mirrors.refresh(item)
        if not is_at_once:
            gradients.coefficient = coefficient  # ``total_norm`` has applied any earlier one
        return total

    @locked
    def clip_grad_value_(self, clip_value: float, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Clips every element of gradients to ``[-clip_value, clip_value]``.

        Args:
            clip_value: The bound.
            parameters: Parameters whose gradients are clipped; all by default.
        """
        gradients, mirrors, limit = self._manager.gradients, self._manager.gradient_mirrors, float(clip_value)
        self._manager.take_gradients()
        if gradients.coefficient is not None:
            self._manager.apply_factor()
        mirrors.sync()
        scale = 1.0 if gradients.inverse_scale is None else float(gradients.inverse_scale)
        for item in self._find(parameters):
            if not isinstance(item, ManagedParameter):
                if item.grad is not None:
                    item.grad.clamp_(-limit, limit)
                continue
            gradient = gradients.of(item)
            if gradient is not None:
                gradient.clamp_(-limit / scale, limit / scale)
            item.gradient_norm = None
            mirrors.refresh(item)

    @locked
    def unscale(self, inverse_scale: torch.Tensor) -> torch.Tensor:
        """Removes a loss scale from the gradients: if possible only when the next step reads them, else at once.

        Args:
            inverse_scale: One over the scale, a scalar tensor.

        Returns:
            The norm of the unscaled gradients; not finite if one of them overflowed.
        """
        for parameter in self._others:
            if parameter.grad is not None:
                parameter.grad.mul_(inverse_scale.to(parameter.grad.device))
        manager = self._manager
        manager.take_gradients()
        self.follow_groups()
        manager.gradient_mirrors.sync()
        if not (self._is_beside_others or manager.gradient_mirrors.by_tensor):
            manager.gradients.inverse_scale = inverse_scale
            return self.grad_norm()
        for tensor in self._tensors:
            manager.gradients.multiply(tensor, inverse_scale)
            manager.gradient_mirrors.refresh(tensor)
        return self.grad_norm([parameter for group in self.param_groups for parameter in group["params"]])

    # State

    @property
    def state(self) -> Any:
        """The states by parameter, as in torch; writes to them take effect. Each process has only its own part."""
        if self._manager.sharing.is_alone:
            self._leave_given_up()
        return StateView(self.kernel, self._manager, self.inner.state, self._updates)

    @state.setter
    def state(self, states: Mapping[Any, Any]) -> None:
        """Replaces all states."""
        if "kernel" in self.__dict__ and not isinstance(states, StateView):
            view = self.state
            view.clear()
            view.update(states)

    def named_groups(self) -> list[list[str]]:
        """The names of the parameters in chunks of each param group, in order."""
        return [[tensor.spec.name for tensor in tensors if tensor is not None] for tensors in self._found()]

    def placed_groups(self) -> list[list[str | None]]:
        """The parameters of each param group, in order: names of those in chunks of its own, ``None`` for others."""
        return [[t.spec.name if t is not None and self._updates(t) else None for t in found] for found in self._found()]

    def _found(self) -> list[list[ManagedParameter | None]]:
        return [[self._manager.find(parameter) for parameter in group["params"]] for group in self.param_groups]

    def other_states(self) -> dict[int, dict[str, Any]]:
        """The states that the user's optimizer keeps itself, by the position of the parameter in its groups.

        They are empty before the first step. Position -1 has what is kept under keys that are no parameters.
        """
        ids = {id(parameter) for parameter in self._others}
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        found = {n: self.inner.state.get(p, {}) for n, p in enumerate(parameters) if id(p) in ids}
        return {**found, _NO_PARAMETER: self._entries}

    def load_other_states(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Replaces ``other_states``; a parameter without a given state begins anew."""
        self._replace_entries(states.get(_NO_PARAMETER, {}))
        parameters = [(p, group) for group in self.param_groups for p in group["params"]]
        for number in self.other_states().keys() - {_NO_PARAMETER}:
            parameter, group = parameters[number]
            self.inner.state.pop(parameter, None)
            if given := states.get(number):
                self.inner.state[parameter] = place_state(given, parameter.device, group)

    @property
    def _entries(self) -> dict[Any, Any]:
        """What the user's optimizer keeps under keys that are no parameters: a counter of steps, say."""
        return {key: value for key, value in self.inner.state.items() if not isinstance(key, torch.Tensor)}

    def _replace_entries(self, entries: Mapping[Any, Any]) -> None:
        for key in self._entries:
            del self.inner.state[key]
        self.inner.state.update(entries)

    @locked
    def state_dict(self) -> dict[str, Any]:
        """The state in torch's own format, with tensors in the parameters' shapes.

        If a parameter is saved in fewer bits than its master has, its state also has ``patrickstar_master``, so that a
        resumed run has every bit. Tensors are copies on the host. With several processes all of them must call it, and
        each gets the states of all.
        """
        return self.state_dict_of(None)

    @locked
    def state_dict_of(self, states: Mapping[int, Any] | None) -> dict[str, Any]:
        """Does what ``state_dict`` does, for states that are known.

        Args:
            states: The states of all ranks, by tensor index, whose tensors may be deferred; ``None`` for the present.
        """
        call_hooks(self._optimizer_state_dict_pre_hooks, self)
        self._leave_given_up()
        known = self._all_states() if states is None else states
        packed = pack_state(self.param_groups, self._by_parameter(known), self._entries)
        return call_hooks(self._optimizer_state_dict_post_hooks, self, packed)

    def _by_parameter(self, states: Mapping[int, Any]) -> Iterator[tuple[torch.Tensor, Any]]:
        """The parameters in the groups that have a state, in ``states`` or in the user's optimizer, with that state."""
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            tensor = self._manager.find(parameter)
            state = states.get(tensor.spec.index) if tensor is not None and self._updates(tensor) else None
            state = state or self.inner.state.get(parameter)
            if state:
                yield parameter, state

    def _all_states(self) -> dict[int, dict[str, Any]]:
        """The states of all ranks, by tensor index."""
        own = self._own_states(self._manager.tensors)
        for index, state in own.items():
            tensor = self._manager.by_index[index]
            if tensor.original_dtype is not tensor.chunk.state_dtype:
                state[SAVED_MASTER] = tensor.view(tensor.chunk.lists[MASTER]).to("cpu", copy=True)
        return self._manager.sharing.states(own, self._manager.place_of)

    def _own_states(self, tensors: Iterable[ManagedParameter]) -> dict[int, dict[str, Any]]:
        """Copies of the states that this rank has of parameters, by tensor index."""
        owned = [tensor for tensor in tensors if self._updates(tensor) and tensor.is_owned]
        states = {tensor.spec.index: self.kernel.tensor_state(tensor) for tensor in owned}
        return {index: state for index, state in states.items() if state}

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raises ``ValueError`` if a state in torch's format does not belong to this optimizer."""
        for parameter, state in pair_up(self.param_groups, state_dict):
            tensor = self._manager.find(parameter)
            if tensor is not None:
                check_shapes(tensor, state, self.kernel.list_names)
                if tensor.is_owned and self._updates(tensor):
                    self.kernel.check_own_state(tensor, state)

    @locked
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Takes over a state in torch's format, from this class or from a stock optimizer of the same kind.

        Args:
            state_dict: What ``state_dict`` returned.

        Raises:
            ValueError: If groups or shapes do not match; nothing has changed then.
        """
        state_dict = call_hooks(self._optimizer_load_state_dict_pre_hooks, self, {**state_dict})
        self.check_state_dict(state_dict)
        found = [(p, self._manager.find(p), state) for p, state in pair_up(self.param_groups, state_dict)]
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for parameter, tensor, state in found:
            if tensor is not None and self._updates(tensor):
                if tensor.is_owned:
                    places = self.kernel.state_places(tensor)
                    state = {k: v if k in places else read(v) for k, v in state.items() if k != SAVED_MASTER}
                    self.kernel.load_tensor_state(tensor, state)
            elif state and (tensor is None or tensor.spec.trainable):
                self.inner.state[parameter] = copy.deepcopy({key: read(value) for key, value in state.items()})
        for _, tensor, state in found:  # when no state can turn out to be damaged any more
            if SAVED_MASTER in state and tensor is not None and self._updates(tensor):
                self._manager.writes.apply(tensor, read(state[SAVED_MASTER]))  # also in copies on other ranks
        numbers = {number for group in state_dict["param_groups"] for number in group["params"]}
        entries = {key: value for key, value in state_dict["state"].items() if key not in numbers}
        self._replace_entries(copy.deepcopy(read(entries)))
        call_hooks(self._optimizer_load_state_dict_post_hooks, self)

    @locked
    def take_inner_state(self, tensor: ManagedParameter | None = None) -> None:
        """Moves the states that the user's optimizer has from earlier use into chunks.

        Args:
            tensor: The parameter; by default all.
        """
        if tensor is None:
            self.follow_groups()
        for item in self._tensors if tensor is None else [tensor]:
            state = self.inner.state.get(item.parameter)
            if state and self._updates(item) and item.is_owned and not self._is_outdated(item, state):
                self.inner.state.pop(item.parameter)
                self.kernel.load_tensor_state(item, state)

    def _begin_anew(self, tensor: ManagedParameter) -> None:
        """Drops a state of before the parameter got another shape, if this step updates the parameter."""
        state = self.inner.state.get(tensor.parameter)
        if state and tensor.has_gradient and self._is_outdated(tensor, state):
            text = "patrickstar: parameter '%s' has another shape than its optimizer state, which begins anew"
            logger.warning(text, tensor.spec.name)
            del self.inner.state[tensor.parameter]

    def _is_outdated(self, tensor: ManagedParameter, state: Mapping[str, Any]) -> bool:
        """Whether a state of the user's optimizer was made for another shape than the parameter has.

        Tensors in a state may have any shape, so only those with places in chunks show it. Of others it is known where
        the shape has changed while the parameter was in a chunk.
        """
        shape, kept = self._before.get(id(tensor.parameter), (tensor.spec.shape, []))
        if shape != tensor.spec.shape and any(value is old() for value in state.values() for old in kept):
            return True
        try:
            check_shapes(tensor, state, self.kernel.list_names)
        except ValueError:
            return True
        return False

    def _leave_given_up(self) -> None:
        """Gives the user's optimizer the states of parameters that were given another shape."""
        with self._manager.lock.held("a look at states"):  # the forward of another thread takes them in
            for tensor in [t for t in self._manager.tensors if t.place is ValuePlace.GIVEN_UP and self._updates(t)]:
                self.give_back_state(tensor)

    @locked
    def give_back_state(self, tensor: ManagedParameter | None = None) -> None:
        """Moves states from chunks to the user's optimizer, as ordinary tensors on the devices of the parameters.

        Args:
            tensor: The parameter; by default all.
        """
        chosen = [item for item in ([tensor] if tensor else self._manager.tensors) if self._updates(item)]
        own: dict[int, dict[str, Any]] = {}
        for item in chosen:
            own |= self._own_states([item])
            if item.is_owned:  # one after the other, so that never two copies of all are there
                self.kernel.load_tensor_state(item, {})
        states = self._manager.sharing.states(own, self._manager.place_of)
        for item in chosen:
            given = states.get(item.spec.index)
            if given:
                number = self.group_numbers.get(item.spec.index)
                group = self.param_groups[number] if number is not None else {}
                self.inner.state[item.parameter] = state = place_state(given, item.device, group)
                if item.place is ValuePlace.GIVEN_UP:
                    kept = [weakref.ref(value) for value in state.values() if isinstance(value, torch.Tensor)]
                    self._before[id(item.parameter)] = item.spec.shape, kept

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; the engine gives its parameters places with optimizer states before the next step."""
        if "group_numbers" not in self.__dict__:  # torch's own constructor
            super().add_param_group(param_group)
            return
        self.inner.add_param_group(param_group)
        self._manager.has_new_groups = True
