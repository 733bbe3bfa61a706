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
