"""The optimizer that users, schedulers and Accelerate see: torch's interface over chunks."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from hf_patrickstar.errors import EngineError
from hf_patrickstar.events import Listener, StepFinished
from hf_patrickstar.optim.kernels import Kernel, place_state
from hf_patrickstar.runtime.chunk import MASTER, ManagedTensor
from hf_patrickstar.runtime.gradients import gradient_norm
from hf_patrickstar.runtime.manager import ChunkManager


class ChunkedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose parameters, gradients and states live in chunks.

    ``param_groups`` is the very list of the optimizer that it was made from, so schedulers made on either one work.

    Args:
        optimizer: The user's optimizer; its class and groups say what a step does.
        kernel: How a chunk is updated.
        manager: The manager of the chunks.
        emit: Told of every step.

    Raises:
        EngineError: If a parameter of the optimizer is not one of the model's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, kernel: Kernel, manager: ChunkManager, emit: Listener) -> None:
        self.inner = optimizer
        self._kernel = kernel
        self._manager = manager
        self._emit = emit
        self._by_parameter = {id(tensor.parameter): tensor for tensor in manager.tensors}
        self._num_steps = 0
        self._collected: dict[int, dict[str, Any]] | None = None
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        self.param_groups = optimizer.param_groups
        self._groups = self._index_groups()

    def _index_groups(self) -> dict[int, int]:
        groups = {}
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                tensor = self._by_parameter.get(id(parameter))
                if tensor is None:
                    raise EngineError(
                        f"the optimizer's param group {number} holds a parameter of shape {tuple(parameter.shape)} "
                        "that is not one of the model's; make the optimizer from model.parameters()"
                    )
                if tensor.spec.trainable:
                    groups[tensor.spec.index] = number
        return groups

    # A step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates every parameter that has a gradient, and consumes the gradients.

        Args:
            closure: Evaluates the model again and returns the loss; called first, with gradients enabled.

        Returns:
            What ``closure`` returned, or ``None``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._groups = self._index_groups()
        manager, gradients = self._manager, self._manager.gradients
        manager.release_borrowed()
        manager.sync()
        for tensor in manager.tensors:
            manager.take_over(tensor)
            if tensor.spec.index in self._groups:
                gradients.check_complete(tensor)
        factor = gradients.take_factor()
        on_device: dict[torch.device, torch.Tensor] = {}  # one copy per tier, not one per chunk
        self.inner._opt_called = True  # type: ignore[attr-defined]  # a scheduler made on the inner one asks for it
        self._kernel.begin_step()
        manager.begin_update()
        trained = [chunk for chunk in manager.chunks if chunk.spec.trainable]
        keeps = gradients.must_keep and gradients.try_to_keep(trained)
        for chunk in trained:
            manager.steps.visit_for_update(chunk)
            chunk.wait_for_reader()
            place = chunk.param.device
            if factor is not None and place not in on_device:
                on_device[place] = factor.to(place)
            for tensor in chunk.tensors:
                gradients.make_ready(tensor)
                if tensor.spec.index not in self._groups:
                    self._leave_alone(tensor, on_device.get(place))
            chunk.wait()
            with gradients.lock:
                self._kernel.update(chunk, self._groups, on_device.get(place))
                manager.finish_update(chunk, self._groups, keeps=keeps)
        manager.steps.finish_update()
        manager.finish_step()
        self._num_steps += 1
        self._emit(StepFinished(self._num_steps, skipped=False))
        self._kernel.end_step()
        return loss

    def _leave_alone(self, tensor: ManagedTensor, factor: torch.Tensor | None) -> None:
        """A gradient that no group holds stays, and so does the value of its parameter."""
        if factor is not None:
            self._manager.gradients.multiply(tensor, factor)
            self._manager.mirrors.refresh_gradient(tensor)
        self._manager.gradients.move_to_list(tensor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of the parameters in its groups; one whose place held a gradient has its value again.

        Args:
            set_to_none: If false, gradients that were there are zeros from now on, and move parameters as zeros do.
        """
        self._groups = self._index_groups()
        tensors = [tensor for tensor in self._manager.tensors if tensor.spec.index in self._groups]
        self._manager.zero_gradients(tensors, set_to_none=set_to_none)

    def skip_step(self) -> None:
        """Drops a step: gradients that overflowed are discarded, parameters keep their values."""
        self._manager.discard_gradients()
        self._emit(StepFinished(self._num_steps, skipped=True))

    # Norm, clipping and unscaling

    @torch.no_grad()
    def grad_norm(self, parameters: Iterable[torch.Tensor] | None = None, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of all gradients together, computed as ``torch.nn.utils.get_total_norm`` does.

        Args:
            parameters: Parameters to look at; all by default. Those without a gradient are passed over.
            norm_type: Order of the norm.

        Returns:
            A scalar fp32 tensor; unscaled if the gradients were scaled and ``unscale`` was called.
        """
        return self._norm(self._manager.tensors if parameters is None else self._find(parameters), norm_type)

    def _norm(self, tensors: Iterable[ManagedTensor], norm_type: float) -> torch.Tensor:
        if norm_type == 2.0:
            self._manager.gradients.records_norms = True
        norms: dict[int, torch.Tensor] = {}
        num_places = 0
        self._manager.mirrors.sync_gradients()
        for tensor in tensors:
            self._manager.gradients.check_complete(tensor)
            if not self._manager.gradients.has(tensor):
                continue
            place = num_places + (tensor.chunk.rank if tensor.is_split else 0)
            num_places += len(tensor.parts) if tensor.is_split else 1  # parts of a norm make up its norm
            gradient = self._manager.gradients.of(tensor)
            if gradient is None:
                continue
            norm = tensor.gradient_norm
            if norm is None or norm_type != 2.0:
                norm = gradient_norm(gradient, norm_type)
                if norm_type == 2.0:
                    tensor.gradient_norm = norm
            norms[place] = norm
        sharing = self._manager.sharing
        if not sharing.is_alone:
            together = sharing.scalars(norms, num_places)
        elif norms:
            together = _stack(list(norms.values()))
        else:
            return torch.tensor(0.0)
        total = torch.linalg.vector_norm(together, norm_type)
        inverse_scale = self._manager.gradients.inverse_scale
        return total if inverse_scale is None else total * inverse_scale.to(total.device)

    @torch.no_grad()
    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | None, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clips by global norm, without a pass over the gradients: the next step multiplies them as it reads them.

        If some gradients are left out, those that are not are multiplied at once instead, in fp32.

        Args:
            parameters: Parameters whose gradients are clipped together; all by default.
            max_norm: The largest norm that is left alone.
            norm_type: Order of the norm.

        Returns:
            The norm before clipping, a scalar fp32 tensor.
        """
        tensors = self._manager.tensors if parameters is None else self._find(parameters)
        total = self._norm(tensors, norm_type)
        if float(max_norm) == float("inf"):
            return total
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        chosen = {tensor.spec.index for tensor in tensors}
        gradients = self._manager.gradients
        left_out = any(gradients.has(tensor) for tensor in self._manager.tensors if tensor.spec.index not in chosen)
        if left_out or self._manager.mirrors.has_gradients:
            for tensor in tensors:
                gradients.multiply(tensor, coefficient)
                self._manager.mirrors.refresh_gradient(tensor)
        else:
            before = gradients.coefficient
            gradients.coefficient = coefficient if before is None else before * coefficient
        return total

    @torch.no_grad()
    def clip_grad_value_(self, clip_value: float, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Clips every element of gradients to ``[-clip_value, clip_value]``.

        Args:
            clip_value: The bound.
            parameters: Parameters whose gradients are clipped; all by default.
        """
        limit = float(clip_value)
        inverse_scale = self._manager.gradients.inverse_scale
        if inverse_scale is not None:
            limit /= float(inverse_scale)
        self._manager.mirrors.sync_gradients()
        for tensor in self._manager.tensors if parameters is None else self._find(parameters):
            gradient = self._manager.gradients.of(tensor)
            if gradient is not None:
                gradient.clamp_(-limit, limit)
                tensor.gradient_norm = None
                self._manager.mirrors.refresh_gradient(tensor)

    def unscale(self, inverse_scale: torch.Tensor) -> torch.Tensor:
        """Tells that gradients carry a loss scale; the next step removes it as it reads them.

        Args:
            inverse_scale: One over the scale, a scalar tensor.

        Returns:
            The norm of the unscaled gradients; not finite if one of them overflowed.
        """
        self._manager.gradients.inverse_scale = inverse_scale
        return self.grad_norm()

    def owns(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether any of these is a parameter of the model."""
        return any(id(parameter) in self._by_parameter for parameter in parameters)

    def _find(self, parameters: Iterable[torch.Tensor]) -> list[ManagedTensor]:
        found = (self._by_parameter.get(id(parameter)) for parameter in parameters)
        return [tensor for tensor in found if tensor is not None]

    # State

    @property
    def class_name(self) -> str:
        """The class of the user's optimizer."""
        return type(self.inner).__name__

    def named_groups(self) -> list[list[str]]:
        """The names of the parameters of each param group, in order."""
        return [[self._by_parameter[id(p)].spec.name for p in group["params"]] for group in self.param_groups]

    def own_state(self, tensor: ManagedTensor) -> dict[str, Any]:
        """What this rank has of a parameter's state, in place; empty before its first step."""
        return self._kernel.own_state(tensor)

    def state_places(self, tensor: ManagedTensor) -> dict[str, torch.Tensor]:
        """The tensors of a parameter's state that exist whether there is a state or not."""
        return self._kernel.state_places(tensor)

    def load_own_state(self, tensor: ManagedTensor, state: Mapping[str, Any]) -> None:
        """Takes over what this rank has of a parameter's state, beside what was written to ``state_places``."""
        self._kernel.load_own_state(tensor, dict(state))

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The state in torch's own format, with tensors in the parameters' shapes: ``optimizer.pt`` as always.

        Where the model is saved in less than fp32, every state also has ``master``, so that a resumed run has every
        bit. Tensors are copies on the host. With several processes all of them must call it, and all get all of it;
        see ``collected``.
        """
        states = self._all_states() if self._collected is None else self._collected
        numbers: dict[int, int] = {}
        state: dict[int, dict[str, Any]] = {}
        groups = []
        for group in self.param_groups:
            for parameter in group["params"]:
                numbers.setdefault(id(parameter), len(numbers))
            packed = {key: value for key, value in group.items() if key != "params"}
            packed["params"] = [numbers[id(parameter)] for parameter in group["params"]]
            groups.append(packed)
        for key, number in numbers.items():
            tensor_state = states.get(self._by_parameter[key].spec.index)
            if tensor_state:
                state[number] = tensor_state
        return {"state": state, "param_groups": groups}

    def _all_states(self, *, keep: bool = True) -> dict[int, dict[str, Any]]:
        """The state of every parameter, from all ranks, by tensor index; only taken part in without ``keep``."""
        states = {}
        for tensor in self._by_parameter.values():
            state = self._kernel.tensor_state(tensor) if tensor.spec.trainable and tensor.is_owned else {}
            if state and tensor.original_dtype is not torch.float32:
                state[MASTER] = tensor.view(tensor.chunk.lists[MASTER]).to("cpu", copy=True)
            states[tensor.spec.index] = state
        own = {index: state for index, state in states.items() if state}
        return self._manager.sharing.states(own, self._manager.tensors, keep=keep)

    @contextlib.contextmanager
    def collected(self, *, keep: bool) -> Iterator[None]:
        """Collects the states of all ranks, so that one of them may call ``state_dict`` alone inside the block.

        All processes must enter it together.

        Args:
            keep: Whether this process will call it.
        """
        self._collected = self._all_states(keep=keep)
        try:
            yield
        finally:
            self._collected = None

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Takes over a state in torch's format, from this class or from a stock optimizer of the same kind.

        Args:
            state_dict: What ``state_dict`` returned.

        Raises:
            ValueError: If groups or shapes do not match; nothing has changed then.
        """
        saved = state_dict["param_groups"]
        ours = [len(group["params"]) for group in self.param_groups]
        theirs = [len(group["params"]) for group in saved]
        if ours != theirs:
            raise ValueError(
                f"optimizer state has param groups of {theirs} parameters, this optimizer of {ours}; "
                "it was saved for another model or other groups"
            )
        numbers = [number for group in saved for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        pairs = []
        for number, parameter in zip(numbers, parameters, strict=True):
            tensor = self._by_parameter[id(parameter)]
            tensor_state = dict(state_dict["state"].get(number, {}))
            for key, value in tensor_state.items():
                shaped = isinstance(value, torch.Tensor) and key in (MASTER, "exp_avg", "exp_avg_sq")
                if shaped and tuple(value.shape) != tensor.spec.shape:
                    raise ValueError(
                        f"optimizer state '{key}' of parameter '{tensor.spec.name}' has shape {tuple(value.shape)}, "
                        f"the parameter has {tensor.spec.shape}"
                    )
            pairs.append((tensor, tensor_state))
        for group, saved_group in zip(self.param_groups, saved, strict=True):
            group.update({key: value for key, value in saved_group.items() if key != "params"})
        for tensor, tensor_state in pairs:
            if not tensor.spec.trainable:
                continue
            tensor.chunk.wait_for_reader()
            master = tensor_state.pop(MASTER, None)
            if master is not None and not self._manager.sharing.is_alone:
                self._manager.write(tensor, master)  # in the copies of all ranks too
            if not tensor.is_owned:
                continue
            if master is not None and self._manager.sharing.is_alone:
                self._manager.write(tensor, master)
            self._kernel.load_tensor_state(tensor, tensor_state)

    @torch.no_grad()
    def take_inner_state(self) -> None:
        """Moves the state that the user's optimizer has, if it was used before, into chunks."""
        for parameter in [parameter for group in self.param_groups for parameter in group["params"]]:
            tensor = self._by_parameter[id(parameter)]
            if parameter in self.inner.state and tensor.spec.trainable:
                state = self.inner.state.pop(parameter)
                if tensor.is_owned:
                    self._kernel.load_tensor_state(tensor, state)

    @torch.no_grad()
    def give_back_state(self) -> None:
        """Gives the user's optimizer its state, as ordinary tensors beside the parameters, to go on without us."""
        own = {}
        for tensor in self._by_parameter.values():
            if tensor.spec.trainable and tensor.is_owned:
                tensor.chunk.wait_for_reader()
                own[tensor.spec.index] = self._kernel.tensor_state(tensor)
                self._kernel.load_tensor_state(tensor, {})
        states = self._manager.sharing.states(
            {index: state for index, state in own.items() if state}, self._manager.tensors
        )
        for parameter in [parameter for group in self.param_groups for parameter in group["params"]]:
            tensor = self._by_parameter[id(parameter)]
            state = states.get(tensor.spec.index)
            if state:
                group = self.param_groups[self._groups[tensor.spec.index]]
                self.inner.state[parameter] = {
                    key: place_state(key, value, tensor.device, group) for key, value in state.items()
                }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters that the model already has.

        Raises:
            EngineError: If a parameter is not one of the model's.
        """
        super().add_param_group(param_group)
        if hasattr(self, "_groups"):
            self._groups = self._index_groups()


def _stack(norms: list[torch.Tensor]) -> torch.Tensor:
    """Scalars of several devices as one vector, in order; one copy per device, not one per scalar."""
    places: dict[torch.device, list[int]] = {}
    for place, norm in enumerate(norms):
        places.setdefault(norm.device, []).append(place)
    if len(places) == 1:
        return torch.stack(norms)
    parts = [torch.stack([norms[place] for place in group]).to(norms[0].device) for group in places.values()]
    order = [place for group in places.values() for place in group]
    return torch.cat(parts)[torch.tensor(order, device=norms[0].device).argsort()]
