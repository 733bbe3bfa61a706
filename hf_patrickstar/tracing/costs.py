"""What an operator costs: the operations of its matrix products, and the bytes that it reads and writes."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from hf_patrickstar.memory.operators import PACKED_PRODUCT, tensors_among
from hf_patrickstar.tracing.grouped import GROUPED, grouped_flops
from hf_patrickstar.tracing.operands import read_operands, touches_nothing, written_operands

_aten = torch.ops.aten
READS_ROWS = frozenset({_aten.embedding, _aten.index_select, _aten.gather, _aten.index})
"""Operators that read as many bytes of their first operand as they write."""
_READS_NOTHING = frozenset(
    {
        *(_aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like, _aten.randint_like),
        *(_aten.new_zeros, _aten.new_ones, _aten.new_full),
    }
)
"""Operators that ask their operand for its shape alone."""
_WRITES_OVER = frozenset({_aten.copy_, _aten.fill_, _aten.zero_, _aten._foreach_copy_})
"""Operators that do not read what they write to, beside those that write to their argument ``out``."""
ADAMS = frozenset({_aten._fused_adam_, _aten._fused_adamw_})
"""Operators that are given gradients beside what they write to, in one list after another."""
_IS_FREE = frozenset(
    {
        *(_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided),
        *(_aten._unsafe_view, _aten.lift_fresh, _aten.set_),
    }
)
"""Operators that only allocate, or look at memory in another way without saying so."""


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
    num_pairs = num_queries * num_keys
    if given.get("is_causal"):
        first = min(num_queries, num_keys)
        flops = flops * (first * (first + 1) // 2 + (num_queries - first) * num_keys) // num_pairs
    return int(flops)


def _layout(packet: Any, args: Any) -> str:
    """Which operands of a product are transposed, as in "NT"; empty where none is, or for other operators."""
    first = _MATRICES.get(packet)
    matrices = () if first is None else args[first : first + 2]
    found = "".join("NT"[matrix.stride(-1) != 1 and matrix.stride(-2) == 1] for matrix in matrices)
    return "" if found == "NN" else found


_FLOPS: dict[Any, Callable[..., Any]] = {**flop_registry, GROUPED: grouped_flops}


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
    is_out = any(argument.is_out for argument in operator._schema.arguments)
    return is_out or operator._overloadpacket in _WRITES_OVER


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors; what is expanded is read once."""
    total = 0
    for tensor in tensors:
        sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
        total += math.prod(sizes) * tensor.element_size()
    return total


def _dtype_of(tensors: Iterable[torch.Tensor]) -> str:
    for tensor in tensors:
        if tensor.is_floating_point():
            return str(tensor.dtype).removeprefix("torch.")
    return "float32"
