"""Times operators on the machine at hand, each once for the shapes with which a model calls it.

[Note: operators that are timed]
Rates say how long a large product takes. Small ones, and operators that a library has not written well, take longer
than any rate of the machine says. Where the planned machine is the one at hand, each operator that a step calls is
called once more, on tensors with bytes of the same shapes, strides and types, and the clock charges what that took. A
model calls few operators that differ; each is timed once. As in a step, caches are full of other things then, and
results take memory that was not used before. What cannot be called so (it would take too much memory, or fails on such
values) is charged by the rates.
"""

import contextlib
import logging
import statistics
import time
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

from hf_patrickstar.memory.accelerator import find_device
from hf_patrickstar.memory.streams import seconds_of
from hf_patrickstar.memory.tiers import available_host_nbytes

logger = logging.getLogger(__name__)

_aten = torch.ops.aten
_PART_OF_MEMORY = 8
_REPETITIONS = 5
_OTHERS_NUMEL = 2**23
_MOST_SECONDS = 0.5
"""An operator that has taken as long is not timed once more."""
_NS = 1_000_000_000


class OperatorTimes:
    """What operators take; see [Note: operators that are timed].

    Args:
        most_nbytes: Bytes of the operands of one operator at most; by default an eighth of the free memory.
        num_threads: Threads of torch while an operator is timed, where the planned process has as many; by default
            those of this process.
    """

    def __init__(self, most_nbytes: int | None = None, num_threads: int | None = None) -> None:
        self._device = find_device(None)
        self._num_threads = num_threads
        self._most_nbytes = available_host_nbytes() // _PART_OF_MEMORY if most_nbytes is None else most_nbytes
        self._known: dict[Hashable, int | None] = {}
        with _disable_current_modes():
            others = torch.zeros(_OTHERS_NUMEL, device=self._device)
            self._forget = lambda: others.add_(1.0)
            nothing = torch.zeros(0, device=self._device)
            self._call_s = self._median(lambda: nothing.add_(1.0))

    @property
    def num_timed(self) -> int:
        """How many operators were timed."""
        return sum(found is not None for found in self._known.values())

    def find_ns(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> int | None:
        """Nanoseconds of an operator, without those of calling it.

        Args:
            operator: The overload.
            args: Its positional arguments; the tensors need no bytes.
            kwargs: Its named arguments.

        Returns:
            The nanoseconds, or ``None`` if it cannot be timed.
        """
        leaves, shape = tree_flatten((args, kwargs))
        key = (operator, shape, tuple(_signature(leaf) for leaf in leaves))
        if key not in self._known:
            self._known[key] = self._time(operator, args, kwargs, leaves)
        return self._known[key]

    def _time(self, operator: Any, args: Any, kwargs: dict[str, Any], leaves: list[Any]) -> int | None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if sum(_span(tensor) * tensor.element_size() for tensor in tensors) > self._most_nbytes:
            return None
        try:
            with _for_itself(self._device):
                args, kwargs = tree_map_only(torch.Tensor, self._filled, (args, kwargs))
                _prepare(operator, args)
                made: list[Any] = []  # results stay until backward
                seconds = self._median(lambda: made.append(operator(*args, **kwargs)))
        except Exception as error:  # an operator may refuse any values
            logger.debug("patrickstar: operator '%s' is charged by the rates of the machine: %s", operator, error)
            return None
        return max(round((seconds - self._call_s) * _NS), 0)

    def _median(self, work: Any) -> float:
        """Seconds of work, after it was done once."""
        num_threads = torch.get_num_threads()
        torch.set_num_threads(self._num_threads or num_threads)
        try:
            return _median(self._device, work, self._forget)
        finally:
            torch.set_num_threads(num_threads)

    def _filled(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor with bytes: numbers between 0 and 1, or zeros that are valid as places."""
        make = torch.rand if tensor.is_floating_point() else torch.zeros
        flat = make(_span(tensor), dtype=tensor.dtype, device=self._device)
        return flat.as_strided(tensor.shape, tensor.stride())


def _span(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _signature(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, tuple(leaf.shape), leaf.stride()
    return repr(leaf)


def _prepare(operator: Any, args: Any) -> None:
    """Gives operands values that make an operator do its work."""
    if operator._overloadpacket is _aten._grouped_mm:  # its groups end at these rows
        rows, ends = args[0].shape[0], args[2]
        ends.copy_(torch.linspace(rows / len(ends), rows, len(ends)).round())


@contextlib.contextmanager
def _for_itself(device: torch.device) -> Iterator[None]:
    """Inside the block operators are called as they are: nobody watches them, and no type is changed."""
    with _disable_current_modes(), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def _median(device: torch.device, work: Any, before: Any) -> float:
    """Seconds of work, after it was done once."""
    work()
    since, found = time.perf_counter(), list[float]()
    while len(found) < _REPETITIONS and (not found or time.perf_counter() - since < _MOST_SECONDS):
        found.append(seconds_of(device, work, before))
    return statistics.median(found)
