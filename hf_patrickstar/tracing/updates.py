"""What an update by an optimizer of torch costs per element, found by one step on tensors without bytes."""

import dataclasses
from typing import Any

import torch

from hf_patrickstar.tracing.answers import AnsweringMode
from hf_patrickstar.tracing.costs import cost_of

_SHAPE = 1000, 1000
"""Of the parameter that is updated: a matrix, since some optimizers keep less of one than of a vector."""


@dataclasses.dataclass(frozen=True, slots=True)
class UpdateCost:
    """What an update costs: bytes per element of the parameters, and calls.

    Attributes:
        nbytes: Bytes read and written.
        state_nbytes: Bytes of states that the optimizer keeps itself.
        temporary_nbytes: The most bytes of memory that it takes for a moment.
        num_calls: Operators that it calls for each parameter.
    """

    nbytes: float
    state_nbytes: float
    temporary_nbytes: float
    num_calls: int


def cost_of_update(optimizer: torch.optim.Optimizer) -> UpdateCost:
    """Finds what an update costs; called under fake tensors.

    Args:
        optimizer: One like it, with the settings of its first group, updates a matrix of fp32.
    """
    parameter = torch.nn.Parameter(torch.zeros(_SHAPE, device="cpu"))
    settings = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    alike: Any = object.__new__(type(optimizer))
    alike.__dict__.update(optimizer.__dict__)
    alike.state = type(optimizer.state)(dict)  # type: ignore[call-arg]
    alike.param_groups = [{**settings, "params": [parameter]}]
    operators = _Operators()
    for _ in range(2):  # the first step makes states
        parameter.grad = torch.zeros(_SHAPE, device="cpu")
        operators.nbytes = operators.num_calls = 0
        with operators, torch.no_grad():
            type(optimizer).step(alike)
    states = [value for value in alike.state[parameter].values() if isinstance(value, torch.Tensor)]
    numel = parameter.numel()
    kept = sum(value.nbytes for value in states if value.dim())
    return UpdateCost(operators.nbytes / numel, kept / numel, operators.largest_nbytes / numel, operators.num_calls)


class _Operators(AnsweringMode):
    """Adds up what operators cost."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self.num_calls = 0
        self.largest_nbytes = 0

    def has_run(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """See ``AnsweringMode``."""
        cost = cost_of(func, args, kwargs, result)
        if cost is not None:
            self.nbytes += cost.nbytes
            self.num_calls += 1
        if isinstance(result, torch.Tensor) and not any(result is other for other in args):
            self.largest_nbytes = max(self.largest_nbytes, result.nbytes)
