"""What one rank has at home and all want: values, gradients, norms, states. All processes call together."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_patrickstar.runtime.chunk import ManagedTensor
from hf_patrickstar.runtime.collectives import Collectives
from hf_patrickstar.runtime.lockstep import Lockstep, Subject


class Sharing:
    """Hands out copies on the host of what is at home on one rank.

    Args:
        collectives: How they travel.
        lockstep: Makes sure that all ranks ask for the same.
    """

    def __init__(self, collectives: Collectives, lockstep: Lockstep) -> None:
        self._collectives = collectives
        self._lockstep = lockstep

    @property
    def is_alone(self) -> bool:
        """Whether there is only one process."""
        return self._lockstep.is_alone

    @property
    def rank(self) -> int:
        """This process."""
        return self._collectives.rank

    def meet(self, what: str) -> None:
        """Waits for all processes.

        Args:
            what: Why, for errors.
        """
        self._lockstep.agree(Subject.READ, -2, what)

    def tensor(self, tensor: ManagedTensor, source: torch.Tensor | None, dtype: torch.dtype, name: str) -> torch.Tensor:
        """A copy of what the owner of a parameter has, in the parameter's shape.

        Args:
            tensor: The parameter.
            source: The owner's tensor; nobody looks at that of another rank.
            dtype: Type of the copy.
            name: What it is, for errors.
        """
        what = f"reads {name} of parameter '{tensor.spec.name}'"
        self._lockstep.agree(Subject.READ, tensor.spec.index, what)
        if self.is_alone or not tensor.is_split:
            whole = tensor.placeholder if source is None else source
            value = whole.to(device="cpu", dtype=dtype, copy=True).contiguous()
            self._collectives.broadcast(value, _owner(tensor), what)
            return value
        value = tensor.placeholder.to(device="cpu", dtype=dtype, copy=True).contiguous()
        if source is not None:
            tensor.own(value).copy_(source)
        self._spread(tensor, value, what)
        return value

    def _spread(self, tensor: ManagedTensor, value: torch.Tensor, what: str) -> None:
        """Fills in the parts of other ranks."""
        for rank, (start, stop) in enumerate(tensor.parts):
            if stop > start:
                self._collectives.broadcast(value.view(-1)[start:stop], rank, what)

    def scalars(self, found: Mapping[int, torch.Tensor], num: int) -> torch.Tensor:
        """A vector of scalars that are spread over the ranks, the same on all.

        Args:
            found: Those that this rank has, by their places.
            num: How many there are.

        Returns:
            All, in fp32, on the host.
        """
        what = f"computes the norm of {num} gradients"
        self._lockstep.agree(Subject.NORM, num, what)
        vector = torch.full((num,), 0.0)
        for place, scalar in found.items():
            vector[place] = scalar
        self._collectives.all_reduce(vector, what)
        return vector

    def states(
        self, own: Mapping[int, Mapping[str, Any]], tensors: Sequence[ManagedTensor], *, keep: bool = True
    ) -> dict[int, dict[str, Any]]:
        """The optimizer states of all ranks together.

        Args:
            own: Those of this rank, by tensor index.
            tensors: All tensors.
            keep: Whether this rank wants them; else it only takes part, and holds one tensor of others at a time.
        """
        if self.is_alone:
            return {index: dict(state) for index, state in own.items()}
        what = "reads the optimizer's state"
        self._lockstep.agree(Subject.READ, -1, what)
        outline = {index: {key: _outline(value) for key, value in state.items()} for index, state in own.items()}
        states: dict[int, dict[str, Any]] = {}
        for rank, outlines in enumerate(self._collectives.exchange_objects(outline, what)):
            for index, keys in outlines.items():
                state = states.setdefault(index, {}) if keep else {}
                for key, (shape, value) in keys.items():
                    if shape is None:
                        state[key] = value
                        continue
                    part = own[index][key] if rank == self.rank else torch.full(shape, 0, dtype=value)
                    self._collectives.broadcast(part, rank, what)
                    if keep:
                        _join(state, key, part, tensors[index], rank)
        return dict(sorted(states.items()))


def _owner(tensor: ManagedTensor) -> int:
    """The rank that has all of a tensor that is not split."""
    return next((rank for rank, (start, stop) in enumerate(tensor.parts) if stop > start), 0)


def _join(state: dict[str, Any], key: str, part: torch.Tensor, tensor: ManagedTensor, rank: int) -> None:
    """Puts what a rank has of a state into it: all of it, or a part, flat, where the parameter is split."""
    start, stop = tensor.parts[rank]
    if not tensor.is_split or part.shape != (stop - start,):
        state[key] = part
        return
    whole = state.setdefault(key, torch.full(tensor.spec.shape, 0, dtype=part.dtype))
    whole.view(-1)[start:stop].copy_(part)


def _outline(value: Any) -> tuple[tuple[int, ...] | None, Any]:
    """Shape and type of a tensor that is worth a broadcast of its own; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.dim():
        return tuple(value.shape), value.dtype
    return None, value
