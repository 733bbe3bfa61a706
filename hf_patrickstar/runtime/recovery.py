"""Repeats a micro-batch that ran out of device memory, so that nothing of it is lost or counted twice."""

import gc
import logging
import random
import traceback
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy
import torch

from hf_patrickstar.errors import DeviceMemoryError, Later
from hf_patrickstar.memory.compute_device import (
    empty_cache,
    is_accelerator,
    is_device_full,
    is_fragmented,
    random_state,
    set_random_state,
)
from hf_patrickstar.memory.operators import unseen
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.manager import ChunkManager
from hf_patrickstar.units import format_nbytes

logger = logging.getLogger(__name__)

MAX_RETRIES = 3
_SHRINK = 0.9
_CALM_RUNS = 10
"""Micro-batches without a failure after which defragmentation counts as having helped."""
_IN_PIECES = (
    "with as much for chunks as before, because the memory was there in pieces; if this is often said, start with "
    "PYTORCH_ALLOC_CONF=expandable_segments:True"
)

_T = TypeVar("_T")


class Recovery:
    """Runs forward and backward of a micro-batch, and repeats them when the device has run out of memory.

    Before a repetition activations are freed, gradients, buffers and random number generators are set back, every chunk
    leaves the device margin, and all traces are dropped: the next attempt is as careful as the first step of a run. If
    an accelerator itself was full, the limit for chunks is lowered by a tenth, for the rest of the run. If a budget was
    too small, and nothing would be otherwise in the next attempt, there is none.

    If the memory was there, but in pieces, the limit stays as it is: with every chunk off the device, torch's allocator
    can give the pieces back. If that did not help, since the next attempt, or one of the nine micro-batches after it,
    fails for want of memory too, the limit is lowered after all.

    Args:
        manager: The manager of the chunks.
        device: The compute device.
        buffers: Gives the model's buffers; some modules write to them in forward.
    """

    def __init__(
        self, manager: ChunkManager, device: torch.device, buffers: Callable[[], Iterable[torch.Tensor]]
    ) -> None:
        self._num_calm_runs = _CALM_RUNS
        self._manager = manager
        self._device = device
        self._buffers = buffers
        self._is_running = False

    def run(self, function: Callable[[], _T], max_retries: int = MAX_RETRIES) -> _T:
        """Runs a function that does forward and backward once, and has no other effect.

        Args:
            function: The function.
            max_retries: How often to repeat it at most.

        Returns:
            What the function returned.

        Raises:
            DeviceMemoryError: If every attempt ran out of memory.
        """
        if self._is_running:  # an outer call of ``run`` repeats it
            return function()
        self._is_running = True
        self._manager.gradients.attempts.begin()
        try:
            return self._run(function, max_retries)
        finally:
            self._manager.gradients.attempts.end()  # also after an interrupt: what comes later is not a repetition
            self._is_running = False

    def _run(self, function: Callable[[], _T], max_retries: int) -> _T:
        state = _State(self._device, self._buffers)
        manager, changes = self._manager, ["anything"]
        for attempt in range(1, max_retries + 2):
            there = manager.ledger.measured_nbytes()
            try:
                result = function()
                self._num_calm_runs += 1
                return result
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                is_own, had_plan = isinstance(error, DeviceMemoryError), manager.steps.has_plan
                in_pieces, more = is_fragmented(error, self._device), manager.evictor.what_helps()
                said = str(error.args[0] if error.args else error).partition("\n")[0]
                # The frames of the failed attempt hold its activations.
                traceback.clear_frames(error.__traceback__)
                with manager.lock.held("to undo a micro-batch"):
                    self._reset()
                    state.restore()
                    freed = ["with memory that Python had not freed yet"] * (manager.ledger.measured_nbytes() < there)
                    may_change = had_plan or manager.activations.may_be_eager or manager.evictor.may_leave_device
                    if attempt > max_retries or (is_own and not (freed or (changes and may_change))):
                        raise self._given_up(error, attempt, more)  # noqa: B904, its cause is set
                    changes = [*self._make_careful(had_plan, in_pieces, is_own), *freed]
            manager.counts.retries += 1
            logger.warning(
                "patrickstar: out of memory on %s; the micro-batch is repeated (%d of %d) %s (%s)",
                *(self._device, attempt, max_retries, ", ".join(changes), said),
            )
        raise AssertionError("unreachable")

    @unseen()
    def _reset(self) -> None:
        self._manager.unwind()
        gc.collect()
        self._manager.undo_attempt()
        self._manager.abandon_step()

    @unseen()
    def _make_careful(self, had_plan: bool, is_in_pieces: bool, is_own: bool) -> list[str]:
        """Frees what can be freed; returns what will be otherwise in a repetition."""
        manager, ledger = self._manager, self._manager.ledger
        changes = ["without the plan that it followed"] if had_plan else []
        manager.steps.distrust()
        if manager.activations.may_be_eager:
            manager.activations.be_eager()
            changes.append("with activations that leave the device")
        if manager.evictor.leave_margin():
            changes.append("with chunks that have left the device")
        manager.device.evict_unused()
        if is_own:
            return changes
        if not is_accelerator(self._device):
            return [*changes, "with what could be freed"]
        empty_cache()
        is_calm, self._num_calm_runs = self._num_calm_runs >= _CALM_RUNS, 0
        if is_in_pieces and is_calm:
            return [_IN_PIECES]
        ledger.lower_limit(Tier.DEVICE, int(ledger.limit(Tier.DEVICE, cautious=False) * _SHRINK))
        limit = format_nbytes(ledger.limit(Tier.DEVICE, cautious=False))
        return [*changes, f"with chunks limited to what {limit} leave"]

    def _given_up(self, failure: BaseException, num_attempts: int, more: Later) -> DeviceMemoryError:
        """The error for the user; of an error of the engine, that itself, which says where the step failed."""
        gradients = "and gradients are as before it"
        if self._manager.gradients.attempts.has_leftovers:
            self._manager.discard_gradients()
            gradients = (
                "are as before it. Parts of it had been added to earlier micro-batches', so all gradients of this step "
                "are dropped"
            )
        times = "" if num_attempts == 1 else f" {num_attempts} times"
        said = f"{self._device}: out of memory. The micro-batch failed{times}. Parameters {gradients}. "
        if isinstance(failure, DeviceMemoryError):
            failure.args = (f"{said}{failure.args[0]}",)
            return failure
        error = DeviceMemoryError(f"{said}The device itself has no more, which no setting changes: {failure}")
        error.more, error.__cause__ = more, failure
        return error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the compute device has no memory left."""
    return isinstance(error, DeviceMemoryError) or is_device_full(error)


class _State:
    """What a forward may change beside gradients: random number generators and buffers."""

    @unseen()
    def __init__(self, device: torch.device, buffers: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._device = device
        self._python = random.getstate()
        self._numpy: Any = numpy.random.get_state()
        self._host = torch.get_rng_state()
        self._of_device = random_state(device)
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in buffers()]

    @unseen()
    @torch.no_grad()
    def restore(self) -> None:
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        torch.set_rng_state(self._host)
        set_random_state(self._device, self._of_device)
        for buffer, before in self._buffers:
            buffer.copy_(before)
