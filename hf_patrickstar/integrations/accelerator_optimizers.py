"""Accelerate's wrapper around an optimizer in chunks, and which models and optimizers belong together."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer, patch_optimizer_step

from hf_patrickstar.optim.optimizer import ChunkedOptimizer


class PreparedOptimizer(AcceleratedOptimizer):
    """Accelerate's wrapper around an optimizer whose chunked form may come later, when its model is prepared.

    Other methods and attributes of the user's optimizer are reachable through this wrapper.

    Args:
        optimizer: The optimizer to wrap: one over chunks, or the user's own.
        scaler: The loss scaler, with fp16.
    """

    optimizer: Any

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the ``step`` that a scheduler has set: a copy would call that of this object and not its own."""
        return {name: value for name, value in super().__getstate__().items() if name not in ("step", "_opt_called")}

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Wraps another form of the same optimizer from now on.

        Args:
            optimizer: The other form: over chunks, or the user's own.
        """
        if optimizer is self.optimizer:
            return
        self.optimizer = optimizer
        if self.scaler is not None:
            self._optimizer_original_step_method = optimizer.step
            self._optimizer_patched_step_method = patch_optimizer_step(self, optimizer.step)

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("optimizer")
        if inner is None or name.startswith("__"):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(inner, name)


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside Accelerate's wrappers."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer that the user made."""
    optimizer = unwrapped(optimizer)
    return optimizer.inner if isinstance(optimizer, ChunkedOptimizer) else optimizer


def held_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """Identities of the parameters in an optimizer's groups."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def families(
    models: Sequence[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]]:
    """Finds models and optimizers that belong together: an optimizer with every model that has one of its parameters.

    Args:
        models: The models, each once.
        optimizers: The users' optimizers, each once.

    Yields:
        Models in the order given, and the optimizers over them; optimizers of none of the models are left out.
    """
    own = [{id(parameter) for parameter in model.parameters()} for model in models]
    family = list(range(len(models)))
    of_optimizers = []
    for optimizer in optimizers:
        held = held_by(optimizer)
        if not (places := [place for place, parameters in enumerate(own) if not parameters.isdisjoint(held)]):
            continue
        of_optimizers.append((optimizer, places[0]))
        joined = {family[place] for place in places}
        family = [min(joined) if number in joined else number for number in family]
    for number in dict.fromkeys(family):
        members = [model for model, found in zip(models, family, strict=True) if found == number]
        yield members, [optimizer for optimizer, place in of_optimizers if family[place] == number]
