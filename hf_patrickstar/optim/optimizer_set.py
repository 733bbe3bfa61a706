"""Several optimizers of one engine as if they were one."""

from collections.abc import Mapping, Sequence
from typing import Any

from hf_patrickstar.optim.kernel import Kernel
from hf_patrickstar.optim.optimizer import ChunkedOptimizer
from hf_patrickstar.runtime.chunk import ManagedParameter


class OptimizerSet:
    """The optimizers of one engine as if they were one, for checkpoints.

    Args:
        optimizers: The optimizers; the list may grow.
    """

    def __init__(self, optimizers: Sequence[ChunkedOptimizer]) -> None:
        self._optimizers = optimizers

    def __len__(self) -> int:
        """The number of optimizers."""
        return len(self._optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups of all optimizers."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def class_name(self) -> str:
        """The class names of the users' optimizers, joined by ``+``."""
        return "+".join(optimizer.class_name for optimizer in self._optimizers)

    def named_groups(self) -> list[list[str]]:
        """The names of the parameters of each param group."""
        return [names for optimizer in self._optimizers for names in optimizer.named_groups()]

    def own_state(self, tensor: ManagedParameter) -> dict[str, Any]:
        """See ``Kernel.own_state``."""
        return self.kernel_of(tensor).own_state(tensor)

    def placed_groups(self) -> list[list[list[str | None]]]:
        """For each optimizer and group the names of parameters in the optimizer's chunks, ``None`` for others.

        The state of a parameter without a name here is in ``other_states``, if it has a state.
        """
        return [optimizer.placed_groups() for optimizer in self._optimizers]

    def state_dicts(self, states: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
        """The ``state_dict`` of each optimizer.

        Args:
            states: The states of all ranks, by tensor index; their tensors may be deferred.
        """
        found = []
        for optimizer in self._optimizers:
            with optimizer.collected(keep=True, states=states):
                found.append(optimizer.state_dict())
        return found

    def check_state_dict(self, number: int, state_dict: Mapping[str, Any]) -> None:
        """See ``ChunkedOptimizer.check_state_dict``; ``number`` selects the optimizer.

        If the optimizer has hooks that may change the state, ``load_state_dict`` checks it after them.
        """
        optimizer = self._optimizers[number]
        if not optimizer._optimizer_load_state_dict_pre_hooks:
            optimizer.check_state_dict(state_dict)

    def load_state_dicts(self, state_dicts: Sequence[dict[str, Any]]) -> None:
        """Loads a ``state_dict`` into each optimizer."""
        for optimizer, state_dict in zip(self._optimizers, state_dicts, strict=True):
            optimizer.load_state_dict(state_dict)

    def other_states(self) -> dict[str, dict[str, Any]]:
        """The states of parameters that are updated outside of chunks, by place; see ``OtherStates``."""
        return {
            f"{number}.{place}": state
            for number, optimizer in enumerate(self._optimizers)
            for place, state in optimizer.other_states().items()
        }

    def load_other_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """See ``ChunkedOptimizer.load_other_states``."""
        for number, optimizer in enumerate(self._optimizers):
            places = {place: states.get(f"{number}.{place}", {}) for place in optimizer.other_states()}
            optimizer.load_other_states(places)

    def kernel_of(self, tensor: ManagedParameter) -> Kernel:
        """The kernel that updates a parameter."""
        return self._optimizers[tensor.chunk.spec.optimizer_index].kernel
