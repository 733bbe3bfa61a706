"""Finds blocks of a model that are alike, and cuts models to a few of them; see [Note: blocks that repeat]."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from hf_patrickstar.schedule.repeats import Stack
from hf_patrickstar.tracing.fake import HOOKS

LEAST_BLOCKS = 12
"""With fewer blocks a model runs in full as fast as it is cut and extended."""
_MOST_KINDS = 8
"""How many modules a block may be, at most."""
_Facts = tuple[Any, ...]
_Numbers = tuple[int, ...]


def find_stacks(model: torch.nn.Module) -> tuple[Stack, ...]:
    """Finds the stacks of a model that are worth being cut.

    Args:
        model: The model.

    Returns:
        Its stacks, in its order; none is inside of another one.
    """
    found: list[Stack] = []
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{stack.path}.") for stack in found)
        if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) and not is_inside:
            stack = _stack_of(path, list(module))
            found += [] if stack is None else [stack]
    return tuple(found)


def cut(model: torch.nn.Module, stacks: Iterable[Stack], num_blocks: int) -> torch.nn.Module:
    """Leaves so many blocks in each of the stacks of a model.

    Args:
        model: The model; changed in place.
        stacks: Its stacks.
        num_blocks: The blocks.

    Returns:
        The model.
    """
    for stack in stacks:
        modules: Any = model.get_submodule(stack.path)
        del modules[stack.first + num_blocks * stack.period :]
    return model


def _stack_of(path: str, modules: Sequence[torch.nn.Module]) -> Stack | None:
    """The stack that is the end of a list, with as few modules in a block as can be."""
    if len(modules) < LEAST_BLOCKS:
        return None
    looks = list(map(_look_at, modules))
    for period in range(1, min(_MOST_KINDS, len(modules) // LEAST_BLOCKS) + 1):
        first = len(modules) - period
        while first and _are_alike(looks[first - 1], looks[first - 1 + period], period):
            first -= 1
        num_blocks = (len(modules) - first) // period
        if num_blocks >= LEAST_BLOCKS:
            return Stack(path, len(modules) - num_blocks * period, period, num_blocks)
    return None


def _look_at(module: torch.nn.Module) -> tuple[_Facts, _Numbers]:
    """What decides what a block does, as far as it shows, and whole numbers that may be its number."""
    facts: list[Any] = []
    numbers: list[int] = []
    for name, part in module.named_modules():
        facts += [name, type(part), *(len(getattr(part, hooks)) for hooks in HOOKS)]
        facts += _shapes_of(part._parameters.items()), _shapes_of(part._buffers.items())
        for key, value in vars(part).items():
            if isinstance(value, int) and not isinstance(value, bool):
                facts.append(key)
                numbers.append(value)
            elif value is None or isinstance(value, (bool, float, str)):
                facts += key, value
    return tuple(facts), tuple(numbers)


def _shapes_of(tensors: Iterable[tuple[str, torch.Tensor | None]]) -> tuple[Any, ...]:
    return tuple(
        (name, tensor is not None and (tensor.shape, tensor.dtype, tensor.requires_grad)) for name, tensor in tensors
    )


def _are_alike(one: tuple[_Facts, _Numbers], other: tuple[_Facts, _Numbers], distance: int) -> bool:
    """Whether two blocks are alike; their own numbers differ by their distance."""
    steps: Iterator[int] = (after - before for before, after in zip(one[1], other[1], strict=False))
    return one[0] == other[0] and all(step in (0, distance) for step in steps)
