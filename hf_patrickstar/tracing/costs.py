"""What operators, and updates by optimizers, cost: the operations of matrix products, and the bytes that they move.

``Charges`` tells by the tier of their operands what is work of the device, of the host, and copies. A tensor is on the
device if nothing else is known of it. It is on the host if it was put there, or if it was computed from such tensors
alone. Where an operator has operands on both, those of the host are copied first; if it writes to the host, those of
the device.
"""

import dataclasses
import functools
import math
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from hf_patrickstar.memory.operators import PACKED_PRODUCT, tensors_among
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.model.live_parameter import storage_key
from hf_patrickstar.schedule.placement import NEW_MEMORY
from hf_patrickstar.schedule.script import BlockingCopy, DeviceOp, HostWork
from hf_patrickstar.tracing.answers import GROUPED, AnsweringMode
from hf_patrickstar.tracing.timing import OperatorTimes

_aten = torch.ops.aten
READS_ROWS = frozenset({_aten.embedding, _aten.index_select, _aten.gather, _aten.index})
"""Operators that read as many bytes of their first operand as they write."""
_READS_NOTHING = {
    *(_aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like, _aten.randint_like),
    *(_aten.new_zeros, _aten.new_ones, _aten.new_full),
}
"""Operators that ask their operand for its shape alone."""
_WRITES_OVER = frozenset({_aten.copy_, _aten.fill_, _aten.zero_, _aten._foreach_copy_})
"""Operators that do not read what they write to, beside those that write to their argument ``out``."""
ADAMS = frozenset({_aten._fused_adam_, _aten._fused_adamw_})
"""Operators that are given gradients beside what they write to, in one list after another."""
_IS_FREE = {
    *(_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided),
    *(_aten._unsafe_view, _aten.lift_fresh, _aten.set_),
}
"""Operators that only allocate, or look at memory in another way without saying so."""
_COPIES = frozenset({_aten.copy_, _aten._to_copy, _aten.clone, _aten._foreach_copy_})
_ASKS = frozenset({_aten._local_scalar_dense, _aten.item, _aten.nonzero, _aten.is_nonzero})
"""Operators that give the host a value."""
_HERE = {
    *(__name__, "hf_patrickstar.tracing.answers", "hf_patrickstar.tracing.recorder"),
    *("hf_patrickstar.memory.streams", "hf_patrickstar.memory.driver", "hf_patrickstar.memory.meters"),
    "hf_patrickstar.runtime.chunk",
}
"""Modules through which others ask."""


class Cost(NamedTuple):
    """What an operator costs.

    Attributes:
        flops: Floating-point operations of matrix products.
        nbytes: Bytes read and written.
        dtype: The type that it computes in, without ``torch.``.
        kind: The kind of its products; see ``Machine.kernel_ns``.
    """

    flops: int
    nbytes: int
    dtype: str
    kind: str = ""


_ATTENTION = "aten::_scaled_dot_product_"
_MATRICES = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}
"""Products of two matrices, and the place of the first one among their arguments."""


def _attention(operator: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Operations of attention; where it is causal, no kernel computes with the keys that come after a query."""
    given = dict(zip((argument.name for argument in operator._schema.arguments), args, strict=False)) | kwargs
    query, key, value = (given[name].shape for name in ("query", "key", "value"))
    # Keys and values with as many heads as the query has: torch 2.11 counts no others.
    shapes = query, *(shape[:1] + query[1:2] + shape[2:] for shape in (key, value))
    is_backward = operator._schema.name.endswith("_backward")
    flops = sdpa_backward_flop_count(args[0].shape, *shapes) if is_backward else sdpa_flop_count(*shapes)
    num_queries, num_keys = query[-2], key[-2]
    if given.get("is_causal"):
        first = min(num_queries, num_keys)
        flops = flops * (first * (first + 1) // 2 + (num_queries - first) * num_keys) // (num_queries * num_keys)
    return int(flops)


def _layout(packet: Any, args: Any) -> str:
    """Which operands of a product are transposed, as in "NT"; empty where none is, or for other operators."""
    first = _MATRICES.get(packet)
    matrices = () if first is None else args[first : first + 2]
    found = "".join("NT"[matrix.stride(-1) != 1 and matrix.stride(-2) == 1] for matrix in matrices)
    return "" if found == "NN" else found


def _grouped(first: torch.Tensor, second: torch.Tensor, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Floating-point operations of ``aten._grouped_mm``.

    Args:
        first: The first operand.
        second: The second operand.
        args: What else it is called with.
        out_val: What it returned.
        kwargs: What else it is called with, by name.
    """
    groups = first.shape[0] if first.dim() == second.dim() == 3 else 1
    return 2 * groups * first.shape[-2] * first.shape[-1] * second.shape[-1]


_FLOPS: dict[Any, Callable[..., Any]] = {**flop_registry, GROUPED: _grouped}


def _products(left: Any, right: Any, shape: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Those of a product with a packed weight, which has its true shape beside it."""
    return int(2 * left.numel() * shape[0])


def cost_of(operator: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Cost | None:
    """The cost of one call of an operator; ``None`` if it touches no memory.

    Args:
        operator: The overload that was called.
        args: Its positional arguments.
        kwargs: Its named arguments.
        result: What it returned.
    """
    if getattr(operator, "_schema", None) is None or _costs_nothing(operator):  # of higher order
        return None
    packet = operator._overloadpacket
    written = written_operands(operator, args, kwargs)
    read = [] if packet in _READS_NOTHING else read_operands(written, args, kwargs)
    given = {id(tensor) for tensor in (*written, *read)}
    made = [tensor for tensor in tensors_among(result) if id(tensor) not in given]
    made_nbytes = _nbytes(made)
    read_nbytes = made_nbytes + _nbytes(read[1:]) if packet in READS_ROWS else _nbytes(read)
    if operator._schema.name.startswith(_ATTENTION):
        flops, kind = _attention(operator, args, kwargs), "attention"
    else:
        count = _products if operator._schema.name == PACKED_PRODUCT else _FLOPS.get(packet)
        flops = int(count(*args, **kwargs, out_val=result)) if count is not None else 0
        kind = _layout(packet, args)
    written_nbytes = _nbytes(written) * (1 if writes_over(operator) else 2)
    if packet in ADAMS:
        written_nbytes -= _nbytes(args[1])  # gradients, which change only where the kernel unscales them
    return Cost(flops, read_nbytes + written_nbytes + made_nbytes, _dtype_of((*read, *written, *made)), kind)


@functools.cache
def _costs_nothing(operator: Any) -> bool:
    is_known = operator._schema.name.startswith(("aten::", "bitsandbytes::"))
    return touches_nothing(operator) or operator._overloadpacket in _IS_FREE or not is_known


@functools.cache
def writes_over(operator: Any) -> bool:
    """Whether an operator does not read what it writes to."""
    return operator._overloadpacket in _WRITES_OVER or any(each.is_out for each in operator._schema.arguments)


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors; what is expanded is read once."""
    total = 0
    for tensor in tensors:
        sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
        total += math.prod(sizes) * tensor.element_size()
    return total


def _dtype_of(tensors: Iterable[torch.Tensor]) -> str:
    found = (tensor.dtype for tensor in tensors if tensor.is_floating_point())
    return str(next(found, torch.float32)).removeprefix("torch.")


# Operands


def written_operands(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The operands that an operator writes to.

    Args:
        operator: The overload that is called.
        args: Its positional arguments.
        kwargs: Its named arguments.
    """
    places = _written_places(operator)
    return tensors_among([args[place] if place < len(args) else kwargs.get(name) for place, name in places])


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


# Updates

_UPDATED_SHAPE = 1000, 1000
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
    parameter = torch.nn.Parameter(torch.zeros(_UPDATED_SHAPE, device="cpu"))
    settings = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    alike: Any = object.__new__(type(optimizer))
    alike.__dict__.update(optimizer.__dict__)
    alike.state = type(optimizer.state)(dict)  # type: ignore[call-arg]
    alike.param_groups = [{**settings, "params": [parameter]}]
    operators = _Operators()
    for _ in range(2):  # the first step makes states
        parameter.grad = torch.zeros(_UPDATED_SHAPE, device="cpu")
        operators.nbytes = operators.num_calls = 0
        with operators, torch.no_grad():
            type(optimizer).step(alike)
    states = [value for value in alike.state[parameter].values() if isinstance(value, torch.Tensor)]
    numel = parameter.numel()
    kept = sum(value.nbytes for value in states if value.dim())
    return UpdateCost(operators.nbytes / numel, kept / numel, operators.largest_nbytes / numel, operators.num_calls)


class _Operators(AnsweringMode):
    """Adds up what operators cost."""

    nbytes = num_calls = largest_nbytes = 0

    def has_run(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """See ``AnsweringMode``."""
        cost = cost_of(func, args, kwargs, result)
        if cost is not None:
            self.nbytes += cost.nbytes
            self.num_calls += 1
        if isinstance(result, torch.Tensor) and not any(result is other for other in args):
            self.largest_nbytes = max(self.largest_nbytes, result.nbytes)


# Charges


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
            measured = None if self._times is None else self._times.find_ns(operator, args, kwargs)
            yield DeviceOp(name, *cost, caller() if packet in _ASKS else "", measured)

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
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        name = frame.f_globals.get("__name__", "")
        if name not in _HERE and not name.startswith(("torch.", "contextlib")):
            return f"{name}.{frame.f_code.co_name}"
    return "?"
