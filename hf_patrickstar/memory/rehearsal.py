"""Counts the bytes that a call of a model takes beside its parameters, without allocating them.

The call is run with fake tensors, which have shapes and types but no memory. The meter of the CPU tier counts the bytes
that the operators would have allocated.
"""

import copy
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from hf_patrickstar.memory.meters import StorageMeter

logger = logging.getLogger(__name__)

_PLAIN = (bool, int, float, str, torch.dtype, torch.device)
_OPAQUE = "an object that is not kept"


class Casting(Protocol):
    """Changes types where a call begins and ends."""

    inputs: torch.dtype | None

    def narrow(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gives inputs the type to compute in; called where ``inputs`` is not ``None``."""
        ...

    def widen(self, output: Any) -> Any:
        """Gives the output of a call under autocast its type."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class _Like:
    """A tensor without its values."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Like":
        return cls(tensor.shape, tensor.dtype, tensor.requires_grad)

    def make(self, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = dtype if dtype is not None and self.dtype.is_floating_point else self.dtype
        return torch.empty(self.shape, dtype=dtype, device=device, requires_grad=self.requires_grad)


def _without_values(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _Like.of(leaf)
    return leaf if leaf is None or isinstance(leaf, _PLAIN) else _OPAQUE


@dataclasses.dataclass(frozen=True, slots=True)
class Rehearsal:
    """A call of a module; of its inputs only shapes and types are kept.

    Attributes:
        module: The module that is called. Its parameters and buffers need no values.
        inputs: Positional and named arguments, without values.
        device: The compute device.
        casting: Changes types where the call begins and ends.
        autocast: The type that autocast computes in, if it is on.
        with_backward: Whether a backward follows.
    """

    module: torch.nn.Module
    inputs: Any
    device: torch.device
    casting: Casting
    autocast: torch.dtype | None
    with_backward: bool

    @classmethod
    def of(
        cls, module: torch.nn.Module, inputs: Any, device: torch.device, casting: Casting, *, with_backward: bool
    ) -> "Rehearsal":
        """Notes a call that begins now, with the autocast that is on.

        Args:
            module: The module that is called.
            inputs: Positional and named arguments.
            device: The compute device.
            casting: Changes types where the call begins and ends.
            with_backward: Whether a backward follows.
        """
        is_autocast = torch.is_autocast_enabled(device.type)
        autocast = torch.get_autocast_dtype(device.type) if is_autocast else None
        return cls(module, tree_map(_without_values, inputs), device, casting, autocast, with_backward)

    @property
    def key(self) -> Any:
        """The same for calls that take the same memory."""
        return id(self.module), tuple(tree_leaves(self.inputs)), self.autocast, self.with_backward, self.module.training

    def run(self) -> int | None:
        """The most bytes that the call, and its backward, take beside inputs and parameters.

        ``None`` if the call cannot be run with fake tensors: a model that reads values cannot, nor a call with an
        object that may hold tensors (a cache, for example), which the call would change.
        """
        if any(leaf is _OPAQUE for leaf in tree_leaves(self.inputs)):
            return None

        def attempt() -> int:
            try:
                return self._count(None)
            except RuntimeError:  # some operators can tell shapes for 16 bits alone
                return 2 * self._count(torch.bfloat16)

        return _in_a_thread(attempt)

    def _count(self, dtype: torch.dtype | None) -> int:
        kind, is_autocast = self.device.type, self.autocast is not None
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            torch.set_grad_enabled(self.with_backward),
            torch.autocast(kind, self.autocast, is_autocast, cache_enabled=False),
        ):
            twin = _twin(self.module, self.device, dtype)
            meter = _Counter(list(twin.parameters()))
            args, kwargs = tree_map_only(_Like, lambda like: like.make(self.device, dtype), self.inputs)
            present = (*tree_leaves((args, kwargs)), *twin.buffers())
            meter.start([leaf for leaf in present if isinstance(leaf, torch.Tensor)])
            begin = meter.live(0)
            meter.restart()
            try:
                if self.casting.inputs is not None:
                    args, kwargs = self.casting.narrow(args, kwargs)
                output = twin(*args, **kwargs)
                if is_autocast:
                    output = self.casting.widen(output)
                if self.with_backward:
                    _loss(output).backward()
                return meter.peak(0) - begin
            finally:
                meter.stop()


class _Counter(StorageMeter):
    """Counts all but parameters; gradients leave as they arrive, as the engine takes them to their chunks."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        own = {parameter.untyped_storage()._cdata for parameter in parameters}
        super().__init__(lambda key: key in own, lambda: None)
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]

    def record(self, results: Any) -> None:
        """Takes the results of an operator."""
        for parameter in self._parameters:
            parameter.grad = None
        super().record(results)


def _in_a_thread(function: Callable[[], int]) -> int | None:
    """Runs a function in a thread of its own, without the modes, hooks and graph of this thread.

    Returns what the function returns, or ``None`` if it fails: not every model can be run with fake tensors.
    """
    found: list[int] = []

    def run() -> None:
        try:
            found.append(function())
        except Exception as error:
            logger.debug("patrickstar: what a step needs cannot be foreseen: %s", error)

    # torch 2.11 with CUDA but without a device makes a guard in the first thread that enters such a mode, and uses it
    # even after that thread has ended.
    with FakeTensorMode():
        pass
    noise = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, noise.disabled = noise.disabled, True
    thread = threading.Thread(target=run, name="hf_patrickstar forecast")
    thread.start()
    thread.join()
    noise.disabled = was_disabled
    return found[0] if found else None


def _twin(module: torch.nn.Module, device: torch.device, dtype: torch.dtype | None) -> torch.nn.Module:
    """The same module with fake parameters, and without the engine's hooks."""
    memo: dict[int, Any] = {}
    for old in module.parameters():
        value = _Like(old.shape, old.dtype, False).make(device, dtype)
        memo[id(old)] = torch.nn.Parameter(value, old.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = _Like(buffer.shape, buffer.dtype, False).make(device, dtype)
    return copy.deepcopy(module, memo)


def _loss(output: Any) -> torch.Tensor:
    """The tensor where backward begins: the loss among the outputs, or one computed from them as users may do."""
    loss = output.get("loss") if hasattr(output, "get") else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss.sum()
    tensors: Iterable[Any] = tree_leaves(dict(output) if hasattr(output, "keys") else output)
    found = [leaf for leaf in tensors if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if len(found) == 1 and not found[0].dim():
        return found[0]
    return torch.stack([leaf.float().log_softmax(-1).pow(2).mean() for leaf in found]).sum()
