"""Repeats a micro-batch that ran out of device memory, so that nothing of it is lost or counted twice."""

import gc
import logging
import random
import traceback
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy
import torch

from hf_patrickstar.errors import DeviceMemoryError
from hf_patrickstar.events import Listener, MicroBatchRepeated
from hf_patrickstar.memory.accelerator import (
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
_AS_BEFORE = (
    " as before, because the memory was there in pieces; if this is often said, start with "
    "PYTORCH_ALLOC_CONF=expandable_segments:True"
)

_T = TypeVar("_T")


class Recovery:
    """Runs forward and backward of a micro-batch, and repeats them when the device has run out of memory.

    Before a repetition activations are freed, gradients, buffers and random number generators are set back, every chunk
    leaves the device margin, and all traces are dropped: the next attempt is as careful as the first step of a run. On
    an accelerator the limit for chunks is lowered by a tenth, for the rest of the run.

    If the memory was there, but in pieces, the limit stays as it is: with every chunk off the device, torch's allocator
    can give the pieces back. If that did not help, since the next attempt, or one of the nine micro-batches after it,
    fails for want of memory too, the limit is lowered after all.

    Args:
        manager: The manager of the chunks.
        device: The compute device.
        buffers: Gives the model's buffers; some modules write to them in forward.
        emit: Called with every repetition.
    """

    def __init__(
        self,
        manager: ChunkManager,
        device: torch.device,
        buffers: Callable[[], Iterable[torch.Tensor]],
        emit: Listener,
    ) -> None:
        self._num_calm_runs = _CALM_RUNS
        self._manager = manager
        self._device = device
        self._buffers = buffers
        self._emit = emit
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
        for attempt in range(max_retries + 1):
            try:
                result = function()
                self._num_calm_runs += 1
                return result
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                cause = self._describe(error)
                in_pieces = is_fragmented(error, self._device)
                # The frames of the failed attempt hold its activations.
                traceback.clear_frames(error.__traceback__)
                if attempt == max_retries:
                    with self._manager.model_lock.held("to undo a micro-batch"):
                        self._reset()
                        state.restore()
                        raise DeviceMemoryError(self._give_up(cause, max_retries)) from error
            with self._manager.model_lock.held("to repeat a micro-batch"):
                self._reset()
                in_pieces = self._make_careful(in_pieces)
            self._emit(MicroBatchRepeated(attempt + 1, is_defragmented=in_pieces))
            logger.warning(
                "patrickstar: out of memory on %s, retry %d of %d with chunks limited to what %s leave%s (%s)",
                self._device,
                attempt + 1,
                max_retries,
                format_nbytes(self._manager.ledger.limit(Tier.DEVICE, cautious=False)),
                _AS_BEFORE if in_pieces else "",
                cause.splitlines()[0],
            )
            state.restore()
        raise AssertionError("unreachable")

    @unseen()
    def _reset(self) -> None:
        self._manager.unwind()
        gc.collect()
        self._manager.undo_attempt()
        self._manager.steps.abandon_step()

    @unseen()
    def _make_careful(self, in_pieces: bool) -> bool:
        """Frees what can be freed; returns whether that is all, because the memory was there in pieces."""
        manager = self._manager
        manager.tracer.distrust()
        manager.activations.be_eager()
        manager.placement.leave_margin()
        manager.executor.evict_unused()
        ledger = manager.ledger
        if is_accelerator(self._device):
            empty_cache()
            is_calm, self._num_calm_runs = self._num_calm_runs >= _CALM_RUNS, 0
            if in_pieces and is_calm:
                return True
            ledger.lower_limit(Tier.DEVICE, int(ledger.limit(Tier.DEVICE, cautious=False) * _SHRINK))
        return False

    def _give_up(self, cause: str, num_retries: int) -> str:
        times = "and was not to be repeated"
        if num_retries:
            times = f"{num_retries + 1} times, at last with every chunk that was not in use off the device"
        gradients = "Gradients are as they were before it"
        if self._manager.gradients.attempts.has_leftovers:
            self._manager.discard_gradients()
            gradients = (
                "Parts of it had been added to earlier micro-batches', so all gradients of this step are dropped"
            )
        return (
            f"{self._device}: out of memory. The micro-batch failed {times}. Parameters are as they were before it. "
            f"{gradients}. Use a smaller batch (--per_device_train_batch_size, with --gradient_accumulation_steps for "
            "the same total), shorter inputs, --gradient_checkpointing, or what the last failure says: "
            f"{cause}"
        )

    def _describe(self, error: BaseException) -> str:
        """What failed, and the ledger as it was then."""
        text = str(error) or type(error).__name__
        if not isinstance(error, DeviceMemoryError):
            text = f"{self._device} itself has no more memory, which no setting changes: {text}"
        return text if "\ntier " in text else f"{text}\n{self._manager.ledger.table()}"


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
