"""Times operators on the machine at hand, each once for the shapes with which a model calls it.

[Note: operators that are timed]
Rates say how long a large product takes. Small ones, and operators that a library has not written well, take longer
than any rate of the machine says. Where the planned machine is the one at hand, each operator that a step calls is
called once more, on tensors with bytes of the same shapes, strides and types, and the clock charges what that took. A
model calls few operators that differ; each is timed once. As in a step, caches are full of other things then, and
results take memory that was not used before. What cannot be called so (it would take too much memory, or fails on such
values) is charged by the rates.
"""

import logging
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from hf_patrickstar.memory.compute_device import find_device, is_accelerator
from hf_patrickstar.memory.streams import seconds_of
from hf_patrickstar.memory.tiers import available_host_nbytes
from hf_patrickstar.optim.threads import in_threads
from hf_patrickstar.report.measure import SWEPT_NBYTES, median_of
from hf_patrickstar.tracing.calls import Operand, OperatorCall, as_they_are
from hf_patrickstar.tracing.contention import CompetingProcesses

logger = logging.getLogger(__name__)

_PART_OF_MEMORY = 8
_REPETITIONS = 5
_MOST_SECONDS = 0.5
"""An operator that has taken as long is not timed once more."""
_NS = 1_000_000_000


class OperatorTimes:
    """What operators take; see [Note: operators that are timed].

    Args:
        most_nbytes: Bytes of the operands of one operator at most; by default an eighth of the free memory, which
            competing processes share.
        num_threads: Threads of torch while an operator is timed, where the planned process has as many; by default
            those of this process.
        num_competing: Processes that call an operator while it is timed; see [Note: contention]. On an accelerator
            none do: each process has a device of its own.
    """

    def __init__(self, most_nbytes: int | None = None, num_threads: int | None = None, num_competing: int = 0) -> None:
        self._device = find_device(None)
        self._num_threads = num_threads
        num = 0 if is_accelerator(self._device) else num_competing
        self._competing = CompetingProcesses(num, num_threads or torch.get_num_threads())
        part = _PART_OF_MEMORY * (num + 1)
        self._most_nbytes = available_host_nbytes() // part if most_nbytes is None else most_nbytes
        self._known: dict[str, int | None] = {}
        with _disable_current_modes():
            others = torch.zeros(SWEPT_NBYTES // torch.float32.itemsize, device=self._device)
            self._forget = lambda: others.add_(1.0)
            nothing = torch.zeros(0, device=self._device)
            self._call_s = self._median(lambda: nothing.add_(1.0))

    def find_ns(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> int | None:
        """Nanoseconds of an operator, without those of calling it.

        Args:
            operator: The overload.
            args: Its positional arguments; the tensors need no bytes.
            kwargs: Its named arguments.

        Returns:
            The nanoseconds, or ``None`` if it cannot be timed.
        """
        call = OperatorCall.of(operator, args, kwargs)
        key = repr(call)
        if key not in self._known:
            operands = (leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Operand))
            fits = sum(operand.nbytes for operand in operands) <= self._most_nbytes
            self._known[key] = self._time(call, operator) if fits else None
        return self._known[key]

    def _time(self, call: OperatorCall, operator: Any) -> int | None:
        try:
            with as_they_are(self._device):
                work = call.make(self._device, operator)
                made: list[Any] = []  # results stay until backward
                with self._competing.calling(call):
                    seconds = self._median(lambda: made.append(work()))
        except Exception as error:  # an operator may refuse any values
            logger.debug("patrickstar: operator '%s' is charged by the rates of the machine: %s", operator, error)
            return None
        return max(round((seconds - self._call_s) * _NS), 0)

    def _median(self, work: Any) -> float:
        """Seconds of work, after it was done once."""
        with in_threads(self._num_threads):
            work()
            return median_of(lambda: seconds_of(self._device, work, self._forget), _REPETITIONS, _MOST_SECONDS)
