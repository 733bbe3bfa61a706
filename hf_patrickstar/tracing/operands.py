"""Which tensors, and which memory, an operator reads and writes."""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from hf_patrickstar.memory.operators import tensors_among


def written_operands(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The operands that an operator writes to.

    Args:
        operator: The overload that is called.
        args: Its positional arguments.
        kwargs: Its named arguments.
    """
    found: list[torch.Tensor] = []
    for place, name in _written_places(operator):
        found += tensors_among(args[place] if place < len(args) else kwargs.get(name))
    return found


def read_operands(written: Sequence[torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The operands that an operator only reads.

    Args:
        written: Those that it writes to.
        args: Its positional arguments.
        kwargs: Its named arguments.
    """
    ids = {id(tensor) for tensor in written}
    found = tensors_among((args, kwargs))
    return [tensor for tensor in found if id(tensor) not in ids] if ids else found


@functools.cache
def _written_places(operator: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@functools.cache
def touches_nothing(operator: Any) -> bool:
    """Whether an operator touches no memory: it looks at it in another way, or asks what is known without it.

    Args:
        operator: The overload that is called.
    """
    infos = [argument.alias_info for argument in operator._schema.arguments]
    return operator._schema.name.startswith("prim::") or any(info is not None and not info.is_write for info in infos)


def storage_key(tensor: torch.Tensor) -> int:
    """A number of the storage that a tensor is in, as long as the storage lives."""
    return int(tensor.untyped_storage()._cdata)
