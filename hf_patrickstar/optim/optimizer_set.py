"""Several optimizers of one engine as if they were one."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_patrickstar.optim.optimizer import ChunkedOptimizer
from hf_patrickstar.runtime.chunk import ManagedTensor


class OptimizerSet:
    """The optimizers of one engine as if they were one, for checkpoints.

    Args:
        optimizers: The optimizers; the list may grow.
    """

    def __init__(self, optimizers: Sequence[ChunkedOptimizer]) -> None:
        self._optimizers = optimizers

    def __len__(self) -> int:
        """How many there are."""
        return len(self._optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of all."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def class_name(self) -> str:
        """The classes of the users' optimizers."""
        return "+".join(optimizer.class_name for optimizer in self._optimizers)

    def named_groups(self) -> list[list[str]]:
        """The names of the parameters of each param group."""
        return [names for optimizer in self._optimizers for names in optimizer.named_groups()]

    def own_state(self, tensor: ManagedTensor) -> dict[str, Any]:
        """See ``ChunkedOptimizer.own_state``."""
        return self._of(tensor).own_state(tensor)

    def state_places(self, tensor: ManagedTensor) -> dict[str, torch.Tensor]:
        """See ``ChunkedOptimizer.state_places``."""
        return self._of(tensor).state_places(tensor)

    def load_own_state(self, tensor: ManagedTensor, state: Mapping[str, Any]) -> None:
        """See ``ChunkedOptimizer.load_own_state``."""
        self._of(tensor).load_own_state(tensor, state)

    def placed_groups(self) -> list[list[list[str | None]]]:
        """Of each optimizer, and of each of its groups, the parameters: names, ``None`` where others update them.

        What has no name here has its state, if there is any, in ``other_states``.
        """
        return [optimizer.placed_groups() for optimizer in self._optimizers]

    def state_dicts(self, states: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
        """What ``state_dict`` of each optimizer returns.

        Args:
            states: The states of all ranks, by tensor index; their tensors may be read later.
        """
        found = []
        for optimizer in self._optimizers:
            with optimizer.collected(keep=True, states=states):
                found.append(optimizer.state_dict())
        return found

    def check_state_dict(self, number: int, state_dict: Mapping[str, Any]) -> None:
        """See ``ChunkedOptimizer.check_state_dict``; ``number`` says of which optimizer.

        A state that hooks of the optimizer will change is checked when they have done so.
        """
        optimizer = self._optimizers[number]
        if not optimizer._optimizer_load_state_dict_pre_hooks:
            optimizer.check_state_dict(state_dict)

    def load_state_dicts(self, state_dicts: Sequence[dict[str, Any]]) -> None:
        """Takes over what ``state_dict`` of each optimizer returned."""
        for optimizer, state_dict in zip(self._optimizers, state_dicts, strict=True):
            optimizer.load_state_dict(state_dict)

    def other_states(self) -> dict[str, dict[str, Any]]:
        """The states of what they update outside of chunks, by the optimizer's number and the place in its groups."""
        return {
            f"{number}.{place}": state
            for number, optimizer in enumerate(self._optimizers)
            for place, state in optimizer.other_states().items()
        }

    def other_places(self) -> set[str]:
        """The places that such states may have."""
        return set(self.other_states())

    def load_other_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """See ``ChunkedOptimizer.load_other_states``."""
        for number, optimizer in enumerate(self._optimizers):
            places = {place: states.get(f"{number}.{place}", {}) for place in optimizer.other_states()}
            optimizer.load_other_states(places)

    def _of(self, tensor: ManagedTensor) -> ChunkedOptimizer:
        return self._optimizers[tensor.chunk.spec.optimizer_index]
