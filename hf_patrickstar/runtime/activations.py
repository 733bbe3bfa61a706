"""Activations that leave the device between forward and backward.

[Note: activations that leave]
Autograd keeps operands from forward to backward. One is known by its place: how many operands that are no parameters,
and have two dimensions or more, autograd has kept before it in the micro-batch. Smaller ones are not the same on all
devices: fused attention of CUDA keeps the state of its random numbers, too. The plan says of which places the memory
leaves (``schedule/trace.py`` ``Activation``). As autograd keeps one, its copy to the host begins in the lane of that
direction; its memory is held until autograd keeps the next one that leaves, or forward ends, and the compute stream
waits for the copy then. Backward needs them in the opposite order, about: when it needs one, the one before it begins
to come back.

The first activation that could leave and stays is followed, too: backward needs it before those that have left.

A micro-batch without a plan has no such places. If the setting asks for it, or one has run out of memory, all memory of
at least ``_EAGER_NBYTES`` that autograd keeps leaves.
"""

import contextlib
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.memory.streams import Copy
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.model.live_parameter import storage_key
from hf_patrickstar.model.operands import KeptOperand, check_version
from hf_patrickstar.runtime.chunk import Device
from hf_patrickstar.schedule.offload import Asked
from hf_patrickstar.schedule.trace import Trace
from hf_patrickstar.units import MIB

ACTIVATIONS = "activations"
"""Ledger owner of the buffers on the host that activations leave for."""
LEAST_DIM = 2
"""Dimensions of an operand that is counted; see [Note: activations that leave]."""
_EAGER_NBYTES = MIB
_STAYS = -1


class KeptActivation(KeptOperand):
    """What autograd keeps in place of an operand whose memory leaves: where it is there.

    Attributes:
        counter: Has the version of the operand, and no memory.
        version: The version that it had.
    """

    __slots__ = ("counter", "dtype", "memory", "offset", "size", "stride", "version")

    memory: "_Memory"
    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int]
    offset: int
    counter: torch.Tensor
    version: int


class _Memory:
    """Memory that autograd keeps, and the one that was kept before it.

    Attributes:
        values: All of its elements, if they are on the device.
        buffer: Has them, if they are on the host.
        arrival: The copy to the device, until it is waited for.
    """

    __slots__ = ("__weakref__", "arrival", "before", "buffer", "dtype", "numel", "values")

    def __init__(self, values: torch.Tensor, before: "weakref.ref[_Memory] | None") -> None:
        self.values: torch.Tensor | None = values
        self.dtype, self.numel = values.dtype, values.numel()
        self.buffer: _Buffer | None = None
        self.arrival: Copy | None = None
        self.before = before


class _Buffer:
    """A buffer on the host.

    Attributes:
        payload: Its bytes.
        user: The memory whose values are in it.
    """

    def __init__(self, payload: torch.Tensor) -> None:
        self.payload = payload
        self.user: weakref.ref[_Memory] | None = None
        self._last: Copy | None = None  # that has used it

    @property
    def is_free(self) -> bool:
        return self.user is None or self.user() is None

    @property
    def under_way(self) -> tuple[Copy, ...]:
        """What the next copy comes after."""
        return () if self._last is None else (self._last,)

    def note(self, copy: Copy | None) -> None:
        """Remembers a copy that may still be under way."""
        self._last = copy or self._last

    def of(self, memory: _Memory) -> torch.Tensor:
        return self.payload[: memory.numel * memory.dtype.itemsize].view(memory.dtype)


class Activations:
    """Moves activations to the host and back; see [Note: activations that leave].

    Args:
        device: The device.
        asked: The setting ``activation_offload``.

    Attributes:
        is_on: Whether any may leave in the forward that runs.
        has_begun: Whether any may have left in the micro-batch; else there is nothing to end.
    """

    def __init__(self, device: Device, asked: Asked) -> None:
        self._pool, self._streams, self._counts = device.pool, device.streams, device.counts
        self._asked = asked
        self._is_eager = self._is_eager_now = asked is True  # from now on, and in this micro-batch
        self.is_on = self.has_begun = False
        self._places: dict[int, int] | None = None  # numbers of activations by place; ``None`` without a plan
        self._num_kept = self._num_eager = 0
        self._by_storage: dict[tuple[int, int], tuple[weakref.ref[Any], weakref.ref[_Memory]]] = {}  # and by version
        self._last: weakref.ref[_Memory] | None = None
        self._buffers: dict[int, _Buffer] = {}
        self._leaving: tuple[Copy | None, torch.Tensor] | None = None  # a copy, and what is held until it is waited for
        self._coming: _Memory | None = None  # its copy to the device was started ahead
        self._lock = threading.Lock()  # the threads of a device and of the CPU run backward at once

    # A micro-batch

    def begin(self, trace: Trace | None, *, lacks_room: bool = False) -> None:
        """A micro-batch of training begins.

        Args:
            trace: What it follows; ``None`` if it has no plan.
            lacks_room: Whether that is because no plan has room: then all large activations of this one leave.
        """
        if self.has_begun:
            self.end_backward()
        self._num_kept = self._num_eager = 0
        self._last, self._places = None, None
        self.is_on = self._is_eager_now = self._is_eager or (lacks_room and self._asked is not False)
        if trace is not None and trace.activations:
            num = trace.num_offloaded
            with contextlib.suppress(BudgetError):  # what finds no room on the host stays
                for number, activation in enumerate(trace.offloaded):  # so that the steps of a plan allocate nothing
                    self._buffer(number, activation.nbytes)
            followed = trace.activations[: num + 1] if num else ()
            self._places = {known.place: n if n < num else _STAYS for n, known in enumerate(followed)}
            self.is_on = num > 0
        self.has_begun = self.is_on

    def end_forward(self) -> None:
        """Forward has ended: what left last is gone."""
        self.is_on = False
        self._let_go()
        self._by_storage.clear()

    def end_backward(self) -> None:
        """Backward has ended, or the micro-batch has failed: no copy is under way any more."""
        self.end_forward()
        self._join_coming()
        self.has_begun = False

    @property
    def may_be_eager(self) -> bool:
        """Whether more may leave than without ``be_eager``."""
        return self._asked is not False and not self._is_eager_now

    def be_eager(self) -> None:
        """The device has no room for a step: without a plan all large activations leave from now on, if they may."""
        self._is_eager = self._is_eager_now = self._asked is not False

    def close(self) -> None:
        """Gives back all buffers."""
        self.end_backward()
        for number in list(self._buffers):
            self._give_back(number)

    def trim(self) -> None:
        """Gives back buffers that are not in use."""
        for number in [number for number, buffer in self._buffers.items() if buffer.is_free]:
            self._give_back(number)

    @property
    def nbytes(self) -> int:
        """Bytes of the host that buffers take."""
        return self._pool.ledger.owners(Tier.HOST).get(ACTIVATIONS, 0)

    # Forward

    def keep(self, operand: torch.Tensor) -> KeptActivation | None:
        """Autograd keeps an operand that is no parameter.

        Returns:
            What it keeps instead; ``None`` if the operand stays.
        """
        if operand.dim() < LEAST_DIM:
            return None
        place, self._num_kept = self._num_kept, self._num_kept + 1
        key = storage_key(operand), operand._version
        storage, memory = (ref() for ref in self._by_storage.get(key, (_nothing, _nothing)))
        if storage is None or memory is None:
            memory = self._begin_to_keep(operand, place)
            if memory is None:
                return None
            self._by_storage[key] = weakref.ref(operand.untyped_storage()), weakref.ref(memory)
        elif not self._can_leave(operand):
            return None
        kept = KeptActivation()
        kept.memory, kept.dtype = memory, operand.dtype
        kept.size, kept.stride, kept.offset = operand.size(), operand.stride(), int(operand.storage_offset())
        kept.counter, kept.version = operand.detach(), operand._version
        kept.counter.data = kept.counter.new_empty(0)
        return kept

    def _begin_to_keep(self, operand: torch.Tensor, place: int) -> _Memory | None:
        nbytes = operand.untyped_storage().nbytes()
        number = self._number_of(place, nbytes)
        if number is None or not self._can_leave(operand):
            return None
        self._let_go()
        memory = _Memory(operand.detach().as_strided((nbytes // operand.dtype.itemsize,), (1,), 0), self._last)
        if number != _STAYS and not self._leave(memory, number):
            return None
        self._last = weakref.ref(memory)
        return memory

    def _number_of(self, place: int, nbytes: int) -> int | None:
        """The number of an activation, which has a buffer of its own; ``None`` if it stays and is not followed."""
        if self._places is not None:
            return self._places.get(place)
        if nbytes < _EAGER_NBYTES:
            return None
        self._num_eager += 1
        return self._num_eager - 1

    def _can_leave(self, operand: torch.Tensor) -> bool:
        return (
            operand.layout is torch.strided
            and not (operand.is_nested or operand.is_conj() or operand.is_neg())
            and operand.device == self._streams.device
            and operand.untyped_storage().nbytes() % operand.dtype.itemsize == 0
            and not (is_traceable_wrapper_subclass(operand) or self._pool.owns(storage_key(operand)))
        )

    def _leave(self, memory: _Memory, number: int) -> bool:
        values = memory.values
        assert values is not None
        try:
            buffer = self._buffer(number, values.nbytes)
        except BudgetError:
            return False
        if buffer is None:
            return False
        # The compute stream has joined what was copied out of the buffer.
        copy = self._streams.to_host(values, buffer.of(memory), holds=False)
        buffer.note(copy)
        self._leaving = copy, values
        buffer.user, memory.buffer, memory.values = weakref.ref(memory), buffer, None
        self._counts.device_to_host_nbytes += values.nbytes
        self._counts.offloaded_nbytes += values.nbytes
        return True

    def _let_go(self) -> None:
        """Lets the compute stream wait for the copy of what has left last, whose memory is free then."""
        if self._leaving is not None:
            copy, self._leaving = self._leaving[0], None
            if copy is not None:
                copy.join()

    def _buffer(self, number: int, nbytes: int) -> _Buffer | None:
        """A buffer of at least so many bytes; ``None`` if that of the number is in use, by another graph.

        Raises:
            BudgetError: If the host has no room.
        """
        buffer = self._buffers.get(number)
        if buffer is not None and not buffer.is_free:
            return None
        if buffer is None or buffer.payload.numel() < nbytes:
            self._give_back(number)
            payload = self._pool.allocate(Tier.HOST, nbytes, torch.uint8, ACTIVATIONS, pinned=True)
            buffer = self._buffers[number] = _Buffer(payload)
        return buffer

    def _give_back(self, number: int) -> None:
        buffer = self._buffers.pop(number, None)
        if buffer is not None:
            for copy in buffer.under_way:
                copy.wait()
            self._pool.release(Tier.HOST, buffer.payload, ACTIVATIONS)

    # Backward

    def bring(self, kept: KeptActivation) -> torch.Tensor:
        """The operand that backward needs; the memory that was kept before it begins to come back."""
        check_version(kept.counter, kept.version)
        memory = kept.memory
        with self._lock:
            if memory.values is None:
                self._begin_to_return(memory)
            if self._coming is memory:
                self._join_coming()
            before, memory.before = memory.before, None
            earlier = None if before is None else before()
            if earlier is not None and earlier.values is None:
                self._begin_to_return(earlier)
        values = memory.values
        assert values is not None
        values = values if values.dtype is kept.dtype else values.view(kept.dtype)
        return values.as_strided(kept.size, kept.stride, kept.offset)

    def _begin_to_return(self, memory: _Memory) -> None:
        self._join_coming()
        buffer = memory.buffer
        assert buffer is not None
        memory.values, memory.arrival = self._streams.fetch_anew(buffer.of(memory), buffer.under_way)
        buffer.note(memory.arrival)
        self._coming, self.has_begun = memory, True  # also of a second backward of the same graph
        self._counts.host_to_device_nbytes += memory.values.nbytes

    def _join_coming(self) -> None:
        coming, self._coming = self._coming, None
        if coming is not None and coming.arrival is not None:
            coming.arrival.join()
            coming.arrival = None


def _nothing() -> None:
    return None
