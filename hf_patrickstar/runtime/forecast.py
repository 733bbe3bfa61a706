"""Finds how much device memory a step needs, for the advice of the error when the step has run out of memory.

A step that fails has not come to its largest moment: its forwards are run with fake tensors (``memory/rehearsal.py``).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.layout.packing import branches_nbytes
from hf_patrickstar.memory.meters import Meter, UnmeteredTier
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.rehearsal import Rehearsal
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.casting import Casting
from hf_patrickstar.runtime.chunk import GRADIENTS, STAGING, Chunk
from hf_patrickstar.runtime.tracer import Tracer
from hf_patrickstar.shortage import Shortage

_ROUNDING = 0.05
"""Share added on an accelerator, where the allocator rounds up and libraries take workspaces."""
_UNKNOWN = 2
"""How many times the measured bytes are advised where a forward cannot be run with fake tensors."""
_MOST_ROUNDS = 32
_MOST_CALLS = 32
"""The most forwards of a step that are remembered; forwards without a backward do not end the step."""


class Forecast:
    """Finds which budget is too small when the device has no room, and which would be large enough.

    Args:
        chunks: All chunks.
        pool: Has the bytes taken on the device.
        meter: Measures non-model data.
        tracer: Has the step that runs.
        device: The compute device.
        need_at: For a device budget and a chunk budget, the bytes that chunks need at once in the layout for these.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        pool: PayloadPool,
        meter: Meter,
        tracer: Tracer,
        device: torch.device,
        need_at: Callable[[int, int | None], int],
    ) -> None:
        self._chunk_need_at = need_at
        self._chunks = chunks
        self._pool = pool
        self._meter = meter
        self._tracer = tracer
        self._device = device
        self._calls: list[Rehearsal] = []
        self._before_nbytes = 0
        self._known: dict[Any, int | None] = {}

    def note(self, module: torch.nn.Module, inputs: Any, casting: Casting, *, is_training: bool) -> None:
        """Notes that an outermost forward begins; keeps only shapes and types of its tensors.

        Args:
            module: The module that is called.
            inputs: Positional and named arguments.
            casting: Changes the types of inputs and output.
            is_training: Whether a backward will follow.
        """
        if isinstance(self._meter, UnmeteredTier):
            return
        if not self._calls:
            self._before_nbytes = self._meter.live(self._pool.ledger.used(Tier.DEVICE))
        del self._calls[: max(len(self._calls) + 1 - _MOST_CALLS, 0)]
        self._calls.append(Rehearsal.of(module, inputs, self._device, casting, with_backward=is_training))

    def clear(self, *, is_evaluation: bool = False) -> None:
        """Forgets the forwards of a step that has ended, or only those of evaluations."""
        self._calls = [call for call in self._calls if is_evaluation and call.with_backward]

    def shortage(self, in_use_nbytes: int) -> Shortage:
        """The budgets that are too small, and values that are large enough.

        Args:
            in_use_nbytes: Bytes of copies that are in use or needed now, and cannot leave.
        """
        ledger = self._pool.ledger
        copies = sum(chunk.copy_nbytes for chunk in self._chunks if chunk.compute is not None and not chunk.is_static)
        fixed = self._pool.in_use(Tier.DEVICE) - copies
        static = sum(
            payload.nbytes for chunk in self._chunks if chunk.home is Tier.DEVICE for payload in chunk.payloads.values()
        )
        static = max(static - ledger.spilled_nbytes, 0)  # the host has no room for those, whatever the device has
        # What is held of gradients is a part of the need, unless more groups wait than it has room for.
        owners = ledger.owners(Tier.DEVICE)
        waiting = branches_nbytes(chunk.spec for chunk in self._chunks)
        counted = min(owners.get(GRADIENTS, 0), waiting) + owners.get(STAGING, 0)
        others = self._non_model_nbytes()
        explained = self._need_at(ledger.budget(Tier.DEVICE), ledger.chunk_budget)
        if explained is not None and in_use_nbytes > explained:
            in_use_nbytes += self._unvisited_nbytes()
        booked = fixed + in_use_nbytes
        limits = ledger.limits(Tier.DEVICE)
        device_nbytes, chunk_nbytes = max(ledger.budget(Tier.DEVICE), booked + others), ledger.chunk_budget
        for _ in range(_MOST_ROUNDS):  # a larger budget may have larger chunks
            chunk_nbytes = None if chunk_nbytes is None else max(chunk_nbytes, booked)
            need = self._need_at(device_nbytes, chunk_nbytes)
            if need is None:
                device_nbytes += device_nbytes // 8
                continue
            booked = max(booked, fixed - static - counted + need)
            if booked + others <= device_nbytes and (chunk_nbytes is None or booked <= chunk_nbytes):
                break
            device_nbytes = max(device_nbytes, booked + others)
        return Shortage.of(zip(limits, (booked + others, booked), strict=False))

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
        key = ("need", device_nbytes, chunk_nbytes)
        if key not in self._known:
            try:
                self._known[key] = self._chunk_need_at(device_nbytes, chunk_nbytes)
            except BudgetError:
                self._known[key] = None
        return self._known[key]

    def _non_model_nbytes(self) -> int:
        """The most non-model bytes of the whole step, as far as that can be told."""
        ledger, step = self._pool.ledger, self._tracer.step
        if isinstance(self._meter, UnmeteredTier):
            return 0
        seen = max(ledger.non_model_nbytes(), self._meter.peak(ledger.used(Tier.DEVICE)))
        if step is not None:
            trace = self._tracer.traces.get(step.key)
            seen = max(seen, *step.non_model_nbytes, 0 if trace is None else trace.non_model_peak_nbytes)
        grown = [self._growth(call) for call in self._calls]
        known = [nbytes for nbytes in grown if nbytes is not None]
        if len(known) < len(grown) or not grown:
            nbytes = max(seen * _UNKNOWN, self._before_nbytes + sum(known))
        else:
            nbytes = max(seen, self._before_nbytes + sum(known))
        return nbytes if self._device.type == "cpu" else int(nbytes * (1 + _ROUNDING))

    def _growth(self, call: Rehearsal) -> int | None:
        if call.key not in self._known:
            self._known[call.key] = call.run()
        return self._known[call.key]
