"""Finds how much device memory a step needs, for the advice of the error when the step has run out of memory.

A step that fails has not come to its largest moment: its trace says what that takes.
"""

from collections.abc import Callable, Sequence

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.layout.packing import branches_nbytes
from hf_patrickstar.memory.meters import Meter
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import GRADIENTS, STAGING, Chunk
from hf_patrickstar.runtime.tracer import Tracer
from hf_patrickstar.shortage import Shortage

_UNKNOWN = 2
"""How many times the measured bytes are advised for a step that follows no trace."""
_MOST_ROUNDS = 32


class Forecast:
    """Finds which budget is too small when the device has no room, and which would be large enough.

    Args:
        chunks: All chunks.
        pool: Has the bytes taken on the device.
        meter: Measures non-model data.
        tracer: Has the step that runs, and its trace.
        need_at: For a device budget and a chunk budget, the bytes that chunks need at once in the layout for these.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        pool: PayloadPool,
        meter: Meter,
        tracer: Tracer,
        need_at: Callable[[int, int | None], int],
    ) -> None:
        self._chunk_need_at = need_at
        self._chunks = chunks
        self._pool = pool
        self._meter = meter
        self._tracer = tracer
        self._known: dict[tuple[int, int | None], int | None] = {}
        self._estimated: dict[str, int] = {}  # the most non-model bytes of each step that followed a trace

    def shortage(self, in_use_nbytes: int) -> Shortage:
        """The budgets that are too small, and values that are large enough.

        Args:
            in_use_nbytes: Bytes of copies that are in use or needed now, and cannot leave.
        """
        ledger = self._pool.ledger
        copies = sum(chunk.copy_nbytes for chunk in self._chunks if chunk.compute is not None and not chunk.is_static)
        fixed = self._pool.in_use(Tier.DEVICE) - copies
        static = sum(
            payload.nbytes for chunk in self._chunks if chunk.home is Tier.DEVICE for payload in chunk.held.values()
        )
        static = max(static - ledger.spilled_nbytes, 0)  # the host has no room for those, whatever the device has
        # What is held of gradients is a part of the need, unless more groups wait than it has room for.
        owners = ledger.owners(Tier.DEVICE)
        waiting = branches_nbytes(chunk.spec for chunk in self._chunks)
        counted = min(owners.get(GRADIENTS, 0), waiting) + owners.get(STAGING, 0)
        non_model = self._non_model_nbytes()
        explained = self._need_at(ledger.budget(Tier.DEVICE), ledger.chunk_budget)
        if explained is not None and in_use_nbytes > explained:
            in_use_nbytes += self._unvisited_nbytes()
        booked = fixed + in_use_nbytes
        limits = ledger.limits(Tier.DEVICE)
        device_nbytes, chunk_nbytes = max(ledger.budget(Tier.DEVICE), booked + non_model), ledger.chunk_budget
        for _ in range(_MOST_ROUNDS):  # a larger budget may have larger chunks
            chunk_nbytes = None if chunk_nbytes is None else max(chunk_nbytes, booked)
            need = self._need_at(device_nbytes, chunk_nbytes)
            if need is None:
                device_nbytes += device_nbytes // 8
                continue
            booked = max(booked, fixed - static - counted + need)
            if booked + non_model <= device_nbytes and (chunk_nbytes is None or booked <= chunk_nbytes):
                break
            device_nbytes = max(device_nbytes, booked + non_model)
        return Shortage.of(zip(limits, (booked + non_model, booked), strict=False))

    def names_in_use(self) -> set[str]:
        """Names of the parameters that modules compute with now."""
        return {tensor.spec.name for chunk in self._chunks for tensor in chunk.tensors if tensor.users}

    def _unvisited_nbytes(self) -> int:
        """Bytes of chunks not visited yet: the step holds more than its modules need, and may hold these too."""
        step = self._tracer.step
        visited = {index for index, _ in step.visits} if step is not None and step.is_recorded else set()
        coming = (chunk for chunk in self._chunks if chunk.compute is None and chunk.spec.index not in visited)
        return sum(chunk.copy_nbytes for chunk in coming)

    def _need_at(self, device_nbytes: int, chunk_nbytes: int | None) -> int | None:
        key = (device_nbytes, chunk_nbytes)
        if key not in self._known:
            try:
                self._known[key] = self._chunk_need_at(device_nbytes, chunk_nbytes)
            except BudgetError:
                self._known[key] = None
        return self._known[key]

    def _non_model_nbytes(self) -> int:
        """The most non-model bytes of the whole step, as far as that can be told."""
        if not self._meter.measures:
            return 0
        ledger, step = self._pool.ledger, self._tracer.step
        seen = max(ledger.non_model_nbytes(), self._meter.peak(ledger.used(Tier.DEVICE)))
        if step is None:
            return _UNKNOWN * seen
        if step.cursor is not None:  # attempts that repeat the step have no trace
            self._estimated[step.key] = step.cursor.trace.non_model_peak_nbytes
        seen, estimated = max([seen, *step.non_model_nbytes]), self._estimated.get(step.key, 0)
        return estimated if estimated >= seen else _UNKNOWN * seen
