"""Which memory an operator of torch touches: for modes that watch operators."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class OperatorMode(TorchDispatchMode):
    """A mode that is there before training and after it; the meter's own mode may come and go inside of it.

    Attributes:
        sees_all: Whether it also sees what the engine does ``without_modes``.
    """

    supports_higher_order_operators = True
    sees_all = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Whether torch lets other modes be taken off while this one stays."""
        return True


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Takes all dispatch modes off but those that see everything."""
    with _disable_current_modes() as modes, contextlib.ExitStack() as stack:
        for mode in reversed(modes):
            if isinstance(mode, OperatorMode) and mode.sees_all:
                stack.enter_context(mode)
        yield


def written_operands(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The operands that an operator writes to.

    Args:
        schema: The schema of the operator.
        args: Its positional arguments.
        kwargs: Its named arguments.
    """
    found: list[Any] = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tree_leaves(args[place] if place < len(args) else kwargs.get(argument.name))
    return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]


def read_operands(written: Sequence[torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The operands that an operator only reads.

    Args:
        written: Those that it writes to.
        args: Its positional arguments.
        kwargs: Its named arguments.
    """
    ids = {id(tensor) for tensor in written}
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and id(leaf) not in ids]


def touches_nothing(schema: Any) -> bool:
    """Whether an operator touches no memory: it looks at it in another way, or asks what is known without it."""
    is_view = any(argument.alias_info is not None and not argument.alias_info.is_write for argument in schema.arguments)
    return is_view or schema.name.startswith("prim::")


def storage_key(tensor: torch.Tensor) -> int:
    """A number of the storage that a tensor is in, as long as the storage lives."""
    return int(tensor.untyped_storage()._cdata)
