"""What the operators of a model cost, by the tier of their operands: work of the device, of the host, and copies.

A tensor is on the device if nothing else is known of it. It is on the host if it was put there, or if it was computed
from such tensors alone. Where an operator has operands on both, those of the host are copied first; if it writes to the
host, those of the device.
"""

import dataclasses
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from hf_patrickstar.memory.operators import tensors_among
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.model.live_parameter import storage_key
from hf_patrickstar.schedule.placement import NEW_MEMORY
from hf_patrickstar.schedule.script import BlockingCopy, DeviceOp, HostWork
from hf_patrickstar.tracing.costs import Cost, read_operands, written_operands
from hf_patrickstar.tracing.timing import OperatorTimes

_aten = torch.ops.aten
_COPIES = frozenset({_aten.copy_, _aten._to_copy, _aten.clone, _aten._foreach_copy_})
_ASKS = frozenset({_aten._local_scalar_dense, _aten.item, _aten.nonzero, _aten.is_nonzero})
"""Operators that give the host a value."""
_HERE = frozenset(
    {
        *(__name__, "hf_patrickstar.tracing.answers", "hf_patrickstar.tracing.recorder"),
        *("hf_patrickstar.memory.streams", "hf_patrickstar.memory.driver", "hf_patrickstar.memory.meters"),
        "hf_patrickstar.runtime.chunk",
    }
)
"""Modules through which others ask."""


class Charges:
    """Tells what operators cost; see the module.

    Args:
        has_accelerator: Whether the device has memory of its own.
        times: What operators take, if the machine is the one at hand; else its rates say it.
    """

    def __init__(self, *, has_accelerator: bool, times: OperatorTimes | None = None) -> None:
        self._has_accelerator = has_accelerator
        self._times = times
        self._tiers: dict[int, Tier] = {}
        self._looked_up: set[tuple[int, int]] = set()  # storages of indices, and the number of rows at home

    # Where tensors are

    def tier_of(self, tensor: torch.Tensor) -> Tier:
        """Where a tensor is; what is not known is on the device."""
        return self._tiers.get(storage_key(tensor), Tier.DEVICE)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether copies of a tensor go beside computation: all memory of the host that is known counts as pinned."""
        return self._has_accelerator and self._tiers.get(storage_key(tensor)) is Tier.HOST

    def put(self, tensor: torch.Tensor, tier: Tier) -> None:
        """Says where a tensor is, until its memory is free."""
        key = storage_key(tensor)
        if key not in self._tiers:
            weakref.finalize(tensor.untyped_storage(), self._tiers.pop, key, None)
        self._tiers[key] = tier

    # What operators cost

    def charge(
        self, operator: Any, args: Any, kwargs: dict[str, Any], result: Any, cost: Cost
    ) -> Iterator[DeviceOp | HostWork | BlockingCopy]:
        """What an operator costs that has run, in the order in which it takes time.

        Args:
            operator: The overload that was called.
            args: Its positional arguments.
            kwargs: Its named arguments.
            result: What it returned.
            cost: What it computes and moves.
        """
        packet, name = operator._overloadpacket, str(operator._overloadpacket)
        written = written_operands(operator, args, kwargs)
        tensors = [*written, *read_operands(written, args, kwargs)]
        tiers = {self.tier_of(tensor) for tensor in tensors if tensor.numel()}
        if len(tiers) > 1:  # single numbers are arguments of a kernel, wherever they are
            tiers = {self.tier_of(tensor) for tensor in tensors if tensor.dim()} or {Tier.HOST}
        on_host = HostWork(name, cost.flops, cost.nbytes)
        if self._is_lookup(packet, args):
            yield from self._look_up(on_host, packet, args, result)
        elif len(tiers) > 1 and packet in _COPIES:
            targets = written or tensors_among(result)
            is_pinned = all(self.tier_of(tensor) is Tier.DEVICE or self.is_pinned(tensor) for tensor in tensors)
            yield _copy(targets, self.tier_of(targets[0]), is_pinned)
        elif len(tiers) > 1:  # on a device somebody would have copied these first
            target = self.tier_of(written[0]) if written else Tier.DEVICE
            yield self._copy_over(tensors, target)
            yield on_host if target is Tier.HOST else DeviceOp(name, *cost)
        elif tiers == {Tier.HOST}:
            yield on_host
            for tensor in tensors_among(result):
                self.put(tensor, Tier.HOST)
        else:
            place = caller() if packet in _ASKS else ""
            measured = None if self._times is None else self._times.find_ns(operator, args, kwargs)
            yield DeviceOp(name, *cost, place, measured)

    def _is_lookup(self, packet: Any, args: Any) -> bool:
        """Whether an embedding reads rows, or adds to them, where its weight is at home; see ``hooks``."""
        if packet is _aten.embedding:
            return self.tier_of(args[0]) is Tier.HOST
        return packet is _aten.embedding_dense_backward and (storage_key(args[1]), args[2]) in self._looked_up

    def _look_up(
        self, work: HostWork, packet: Any, args: Any, result: torch.Tensor
    ) -> Iterator[HostWork | BlockingCopy]:
        """Only indices and rows cross, to an accelerator if there is one, and the gradient stays at home."""
        if self._has_accelerator and any(self.tier_of(tensor) is Tier.DEVICE for tensor in args[:2]):
            yield self._copy_over(args[:2], Tier.HOST)
        if packet is _aten.embedding_dense_backward:
            yield dataclasses.replace(work, nbytes=work.nbytes + (NEW_MEMORY - 1) * result.nbytes)
            self.put(result, Tier.HOST)
            return
        yield work
        key = storage_key(args[1]), len(args[0])
        if key not in self._looked_up:
            self._looked_up.add(key)
            weakref.finalize(args[1].untyped_storage(), self._looked_up.discard, key)
        if self._has_accelerator:
            yield _copy([result], Tier.DEVICE, False)

    def _copy_over(self, operands: Sequence[torch.Tensor], target: Tier) -> BlockingCopy:
        """A copy of operands of the other tier; what is made on the host for this is not pinned."""
        found = [tensor for tensor in operands if self.tier_of(tensor) is not target]
        return _copy(found, target, all(self.is_pinned(tensor) for tensor in found))


def _copy(tensors: Iterable[torch.Tensor], target: Tier, is_pinned: bool) -> BlockingCopy:
    return BlockingCopy(sum(tensor.nbytes for tensor in tensors), target is Tier.DEVICE, is_pinned, caller())


def caller() -> str:
    """Where in the program the host stops: the function of the package, or of the user, that asked."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name not in _HERE and not name.startswith(("torch.", "contextlib")):
            return f"{name}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "?"
