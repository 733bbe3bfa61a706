"""The cross entropy of a language model in chunks of rows, so that its logits are never whole.

[Note: logits that are computed when they are used]
With ``chunked_loss`` the output embedding of a model returns ``Logits`` in a forward of training: a tensor of the right
shape and type without memory, which has the hidden states. Casts and views of it are such tensors, too. Its cross
entropy (``torch.nn.functional.cross_entropy``, which the ``loss_function`` of transformers calls) is computed in chunks
of rows, forward and backward, from hidden states and the weight. Any other function gets the logits as they would have
been: then results are right, and no memory is saved. So no code of a model is replaced, and a model that changes its
logits before the loss (a soft cap, say) computes as always.

``torch.nn.functional.linear_cross_entropy`` of torch 2.13 is not used: with bf16 it returns, and adds up, a loss in
bf16, and meters and traces do not see what it allocates.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._pytree import tree_map_only

from hf_patrickstar.errors import ConfigError, EngineError
from hf_patrickstar.model.live_parameter import RAW, WITHOUT_VALUE
from hf_patrickstar.model.model_set import roots_of

logger = logging.getLogger(__name__)


LOGIT_NBYTES = 10
"""What a loss takes for each token and word of the vocabulary: logits in 16 bits and in fp32, and their softmax."""


def rows_of_chunk(num_rows: int, num_classes: int, num_features: int) -> int:
    """Rows of a chunk, whose logits take about as much memory as all hidden states.

    Source: Liger Kernel (Hsu et al., 2024), ``fused_linear_cross_entropy``; torch's ``linear_cross_entropy`` has the
    same rule.

    Args:
        num_rows: Tokens of a micro-batch.
        num_classes: The size of the vocabulary.
        num_features: The hidden size.
    """
    rows = math.ceil(num_rows / math.ceil(num_classes / num_features))
    return 1 << max(rows - 1, 0).bit_length()


class _CrossEntropySum(torch.autograd.Function):
    """The sum of the cross entropies of rows; backward computes the logits of each chunk once more."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, target: Any) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias, target)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss = hidden.new_zeros((), dtype=wide)
        for part, labels in _chunks(hidden, target, weight):
            logits = functional.linear(part, weight, bias).to(wide)
            loss += functional.cross_entropy(logits, labels, ignore_index=_IGNORED, reduction="sum")
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, target = ctx.saved_tensors
        if torch.is_grad_enabled():  # a graph of this backward is asked for
            return _whole_gradients(ctx.saved_tensors, ctx.needs_input_grad, grad)
        of_inputs = zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        grads = [torch.zeros_like(tensor) if is_needed else None for tensor, is_needed in of_inputs]
        grad_hidden, grad_weight, grad_bias = grads
        begin = 0
        for part, labels in _chunks(hidden, target, weight):
            wide = torch.softmax(functional.linear(part, weight, bias), -1, dtype=grad.dtype)
            counts = labels != _IGNORED
            columns = torch.where(counts, labels, 0).unsqueeze(1)
            wide.scatter_add_(1, columns, wide.new_full(columns.shape, -1.0))
            # The gradient is infinite if no label counts and the loss is a mean: zero times it is not zero.
            of_logits = wide.mul_(torch.where(counts, grad, 0).unsqueeze(1)).to(hidden.dtype)
            del wide
            if grad_hidden is not None:
                torch.mm(of_logits, weight, out=grad_hidden[begin : begin + len(part)])
            if grad_weight is not None:
                grad_weight.addmm_(of_logits.t(), part)
            if grad_bias is not None:
                grad_bias += of_logits.sum(0)
            begin += len(part)
        return (*grads, None)


def _whole_gradients(saved: Sequence[Any], is_needed: Sequence[bool], grad: torch.Tensor) -> tuple[Any, ...]:
    """The gradients of ``_CrossEntropySum`` with a graph, for second derivatives."""
    _tell_whole("create_graph=True")
    *inputs, target = saved
    logits = functional.linear(*inputs).to(grad.dtype)
    loss = functional.cross_entropy(logits, target, ignore_index=_IGNORED, reduction="sum")
    asked = [tensor for tensor, needed in zip(inputs, is_needed, strict=False) if needed]
    found = iter(torch.autograd.grad(loss, asked, grad, create_graph=True))
    return tuple(next(found) if needed else None for needed in is_needed)


def _chunks(hidden: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> Iterable[tuple[Any, Any]]:
    rows = rows_of_chunk(len(hidden), *weight.shape)
    return zip(hidden.split(rows), target.split(rows), strict=True)


def _with_values(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Lets a released parameter answer for one call of a function; see [Note: a parameter that answers].

    The function gets its floating-point operands in the type of the call.
    """

    @functools.wraps(function)
    def call(dtype: torch.dtype, *operands: Any) -> torch.Tensor:
        if has_torch_function(operands):
            return handle_torch_function(call, operands, dtype, *operands)  # type: ignore[no-any-return]
        cast = [item.to(dtype) if item is not None and item.is_floating_point() else item for item in operands]
        return function(*cast)

    call.rounds_operands = True  # type: ignore[attr-defined]  # see ``needs_shown``
    return call


_whole_logits = _with_values(functional.linear)
_cross_entropy_sum = _with_values(_CrossEntropySum.apply)


_IGNORED = -100
"""Labels of rows that have no loss."""


class Logits(torch.Tensor):
    """Logits that are computed when they are used; see [Note: logits that are computed when they are used]."""

    _hidden: torch.Tensor
    _head: torch.nn.Linear
    _computed: torch.dtype
    _found: torch.Tensor | None
    _head_version: int

    @staticmethod
    def make(hidden: torch.Tensor, head: torch.nn.Linear, computed: torch.dtype, dtype: torch.dtype) -> "Logits":
        """Makes logits.

        Args:
            hidden: What the output embedding was given.
            head: The output embedding.
            computed: The type that it computes in.
            dtype: The type of the logits.
        """
        shape = (*hidden.shape[:-1], head.out_features)
        made: Any = _InGraph.apply(hidden, shape, dtype)  # type: ignore[no-untyped-call]
        made._hidden, made._head, made._computed, made._found = hidden, head, computed, None
        made._head_version = _version_of(head)
        return made  # type: ignore[no-any-return]

    def whole(self) -> torch.Tensor:
        """The logits as a tensor with memory.

        Raises:
            EngineError: If the output embedding has changed since.
        """
        if self._found is not None:
            return self._found
        if _version_of(self._head) != self._head_version:
            raise EngineError(
                "chunked_loss: the logits of training are used after the output embedding was updated; use them before "
                "optimizer.step(), compute them in evaluation, or set chunked_loss to false"
            )
        found = _whole_logits(self._computed, self._hidden, self._head.weight, self._head.bias).to(self.dtype)
        if torch.is_grad_enabled():  # else another use would find no graph
            self._found = found
        return found

    def cast(self, dtype: torch.dtype) -> "Logits":
        """The same logits in a type."""
        return self if dtype is self.dtype else Logits.make(self._hidden, self._head, self._computed, dtype)

    def moved(self, *targets: Any, **named: Any) -> Any:
        """``logits.to(target)``, for one type or device."""
        if len(targets) + len(named) != 1 or not named.keys() <= {"dtype", "device"}:
            return NotImplemented
        (target,) = (*targets, *named.values())
        if isinstance(target, torch.dtype):
            return self.cast(target)
        is_here = isinstance(target, torch.device | str) and torch.device(target) == self.device
        return self if is_here else NotImplemented

    def in_shape(self, *sizes: Any, **named: Any) -> Any:
        """``logits.view(*sizes)``, where rows stay rows."""
        if named or not sizes or isinstance(sizes[0], torch.dtype):
            return NotImplemented
        shape = tuple(sizes[0]) if isinstance(sizes[0], Sequence) else sizes
        if shape[-1] != self._head.out_features:
            return NotImplemented
        hidden = self._hidden.reshape(*shape[:-1], self._head.in_features)
        return Logits.make(hidden, self._head, self._computed, self.dtype)

    def cross_entropy(
        self,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = _IGNORED,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        """``torch.nn.functional.cross_entropy(logits, target, ...)`` in chunks of rows."""
        is_usual = weight is size_average is reduce is None and not label_smoothing and target.dtype is torch.long
        if not is_usual or self.dim() != 2 or reduction not in ("mean", "sum"):
            return NotImplemented
        head, counts = self._head, target != ignore_index
        labels = target if ignore_index == _IGNORED else torch.where(counts, target, _IGNORED)
        loss = _cross_entropy_sum(self._computed, self._hidden, head.weight, head.bias, labels)
        # Autocast computes losses in fp32, whatever logits it is given.
        least = torch.float32 if torch.is_autocast_enabled(self.device.type) else self.dtype
        return (loss / counts.sum() if reduction == "mean" else loss).to(torch.promote_types(self.dtype, least))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in WITHOUT_VALUE and func.__name__ != "detach_":  # which cuts the loss off, too
            with RAW():
                return func(*args, **kwargs)
        is_known = func in _IN_CHUNKS and isinstance(args[0], Logits) and args[0]._found is None
        if is_known and (result := _IN_CHUNKS[func](*args, **kwargs)) is not NotImplemented:
            return result
        _tell_whole(getattr(func, "__name__", str(func)))
        args, kwargs = tree_map_only(Logits, Logits.whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch.no_grad():  # below autograd there is no graph to keep
            args, kwargs = tree_map_only(Logits, Logits.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


def _version_of(head: torch.nn.Linear) -> int:
    """Counts the changes of the weight of an output embedding, also of one in chunks."""
    managed = getattr(head.weight.__dict__.get("_live"), "tensor", None)
    return head.weight._version if managed is None else managed.num_writes


_IN_CHUNKS: dict[Any, Callable[..., Any]] = {
    functional.cross_entropy: Logits.cross_entropy,
    torch.Tensor.float: lambda logits, **named: NotImplemented if named else logits.cast(torch.float32),
    torch.Tensor.to: Logits.moved,
    torch.Tensor.contiguous: lambda logits, **named: NotImplemented if named else logits,
    torch.Tensor.view: Logits.in_shape,
    torch.Tensor.reshape: Logits.in_shape,
}


class _InGraph(torch.autograd.Function):
    """Makes logits part of the graph of the hidden states, so that no gradient is lost without a word."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        return torch.Tensor._make_wrapper_subclass(Logits, shape, dtype=dtype, device=hidden.device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise EngineError(
            "chunked_loss: the loss uses logits in a torch.autograd.Function, whose gradient would be lost; set "
            "chunked_loss to false"
        )


@functools.cache
def _tell_whole(name: str) -> None:
    logger.warning("patrickstar: chunked_loss saves no memory where '%s' uses the logits of training", name)


class ChunkedHead(torch.nn.Linear):
    """An output embedding whose logits are computed when they are used; copies and pickles are ordinary."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Computes logits, in training only where they are used."""
        is_captured = torch.compiler.is_compiling() or torch.jit.is_tracing() or peek_interpreter_stack() is not None
        if is_captured or not self.training or not torch.is_grad_enabled():
            return super().forward(input)
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        return Logits.make(input, self, dtype, dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(1)  # later protocols insist on the object's own class
        make, (_, *arguments), *state = reduced
        return (make, (torch.nn.Linear, *arguments), *state)


def find_heads(model: torch.nn.Module) -> list[torch.nn.Linear]:
    """The output embeddings of a model whose loss can be computed in chunks; of several models, of each.

    Args:
        model: The model.

    Raises:
        ConfigError: If one has none, or one of another class.
    """
    heads = []
    for root in roots_of(model):
        find: Any = getattr(root, "get_output_embeddings", lambda: None)
        head = find()
        if type(head) not in (torch.nn.Linear, ChunkedHead):
            found = "no output embedding" if head is None else f"an output embedding of class {type(head).__name__}"
            raise ConfigError(
                f"chunked_loss: {type(root).__name__} has {found}, and torch.nn.Linear is needed; set chunked_loss to "
                "false"
            )
        heads.append(head)
    return heads


def has_chunked_loss(model: torch.nn.Module) -> bool:
    """Whether losses of a model are computed in chunks.

    Args:
        model: The model.
    """
    return any(isinstance(module, ChunkedHead) for module in model.modules())


def chunk_losses(heads: Iterable[torch.nn.Linear], *, is_chunked: bool = True) -> None:
    """Lets losses of models be computed in chunks, or as a whole again.

    Args:
        heads: Their output embeddings.
        is_chunked: Whether in chunks.
    """
    for head in heads:
        head.__class__ = ChunkedHead if is_chunked else torch.nn.Linear
