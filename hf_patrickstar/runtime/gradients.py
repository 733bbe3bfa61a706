"""A gradient's way, top to bottom: stored as autograd finishes it, used by a step, kept or consumed, dropped.

[Note: gradient reuse]
With one micro-batch per step the gradient overwrites the parameter's place in the ``param`` list (PatrickStar section
6.2). The value is not lost: it is ``master`` rounded to the parameter's type. Whenever somebody needs the value while
the gradient is there (a second forward before the optimizer's step, say) the gradient moves to an accumulation list and
the value is written again. So no way of calling forward and backward can lose a gradient or compute with one.

With several processes what is stored is the average that the owner of a parameter gets. A copy on the device never
holds a gradient, so only a gather, which sends values, has to bring them back.

[Note: gradients after the step]
In torch a gradient stays until ``zero_grad``. A step that leaves gradients where they are needs room for them beside
the values; nearly everybody calls ``zero_grad`` next, and then it is for nothing. So gradients are kept, in the
accumulation list, until ``zero_grad`` was called for the first time; from then on the step consumes them, unless
somebody has read one after that first step, as AdaLoRA does. What is asked for all the same, by ``parameter.grad`` or
by a backward that would add to it, is an error and not a wrong number.
"""

import collections
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from hf_patrickstar.common.interrupts import held_back
from hf_patrickstar.errors import BudgetError, EngineError
from hf_patrickstar.layout.specs import GRADIENT, MASTER
from hf_patrickstar.memory.streams import Copy, Hold
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import Chunk, Device
from hf_patrickstar.runtime.evictor import Evictor
from hf_patrickstar.runtime.gradient_ring import GradientRing, most_nbytes
from hf_patrickstar.runtime.norms import Norms
from hf_patrickstar.runtime.parameter import GradientPlace, ManagedParameter
from hf_patrickstar.schedule.clock import Lane

# A name of the module is found faster than a member of an enum.
_NONE, _PARAM, _LIST = GradientPlace.NONE, GradientPlace.PARAM, GradientPlace.LIST
_REMOTE, _APART, _LEFT = GradientPlace.REMOTE, GradientPlace.APART, GradientPlace.LEFT

_ELSEWHERE = frozenset({_APART, _LEFT})


class Gradients:
    """Stores gradients, and finds and drops them.

    Args:
        device: The device.
        evictor: Makes room for lists that nobody has planned for.
        accumulate: Whether gradients go to the accumulation list at once: several micro-batches make a step.
        keeps: Whether gradients stay after a step: see ``keep_gradients`` of the configuration.

    Attributes:
        accumulate: See above.
        attempts: Knows which gradients a repeated micro-batch must not count again.
        lock: Held while places change.
        coefficient: What all gradients are to be multiplied with (clipping), if that has not been done yet.
        inverse_scale: The same for the loss scale.
        is_watched: Whether somebody is known to look at them between the step and ``zero_grad``.
        norms: Norms of gradients that have arrived, and are not computed yet.
        records_norms: Whether norms are computed as gradients arrive: somebody has asked for one.
        completes_step: Whether the micro-batch that runs is the last one of its step.
        is_after_step: Whether a step has left the gradients that there are.
        was_read_late: Whether somebody has read one of these.
    """

    def __init__(self, device: Device, evictor: Evictor, accumulate: bool, keeps: bool | Literal["auto"]) -> None:
        self.accumulate = accumulate
        self.records_norms = False
        self.completes_step = True
        self.attempts = Attempts()
        self.lock = device.lock
        self.coefficient: torch.Tensor | None = None
        self.inverse_scale: torch.Tensor | None = None
        self.is_watched = False
        self.norms = Norms(device.streams.device)
        self._pool, self._streams, self._counts = device.pool, device.streams, device.counts
        self._chunks = device.chunks
        self._evictor = evictor
        self._keeps = keeps
        self._was_zeroed = False
        self._ring = GradientRing(self._pool, self._streams, most_nbytes(_lists_nbytes(self._chunks)))
        self._has_all_lists = False
        self.is_after_step = self.was_read_late = False

    # Storing them

    def store(self, tensor: ManagedParameter, gradient: torch.Tensor, *, is_at_home: bool = False) -> None:
        """Takes a gradient that autograd has finished, unless a failed attempt at this micro-batch has done so.

        While the value in its place is still needed it is deferred, until backward ends.

        Args:
            tensor: Whose gradient it is.
            gradient: The gradient of one backward, in the parameter's shape; in the type of its chunk, or of its master
                where code outside of modules has computed with it.
            is_at_home: Whether it was computed on the host, where the chunk is at home: then nothing crosses.
        """
        chunk = tensor.chunk
        if self.attempts.is_running and self.attempts.is_counted(tensor.spec.index):
            return
        if not (is_at_home or chunk.is_static):
            tensor.crossing_nbytes += gradient.nbytes
        is_new = tensor.gradient is _NONE and not (tensor.is_consumed or self.accumulate)
        if tensor.deferred_gradient is not None:
            tensor.deferred_gradient = tensor.deferred_gradient + gradient.to(tensor.deferred_gradient.device)
        elif tensor.is_looked_up:
            # What its uses on either device contribute is added up in the parameter's type, as autograd does.
            tensor.deferred_gradient = gradient.to(chunk.home_device)
        elif is_new and not chunk.is_group and (tensor.users or (tensor.epoch is not None and tensor.epoch())):
            tensor.deferred_gradient = gradient  # ``is_needed_at_home``
        elif (
            is_new
            and MASTER in chunk.home_lists
            and gradient.dtype is chunk.dtype
            and not self.attempts.is_running
            # Not ``is_resting``, since each call of Python counts.
            and (tensor.released is tensor.placeholder or not chunk.device.keeps_values)
        ):
            self.is_after_step = False
            self._write_over_value(tensor, chunk, gradient)
        else:
            self.add(tensor, gradient)

    def add(self, tensor: ManagedParameter, gradient: torch.Tensor) -> None:
        """Adds a gradient to what is there; an attempt that fails before it is there has not counted it.

        A gradient that torch would add to one that a step has consumed is dropped: the sum is not known any more.
        """
        self.is_after_step = False
        chunk = tensor.chunk
        if tensor.is_consumed:
            tensor.is_consumed, tensor.is_incomplete = self._keeps is not False, self._keeps is not False
        if tensor.is_incomplete:
            return
        if tensor.gradient is _LEFT:
            self.make_ready(tensor)
        before = tensor.gradient
        if before is _APART:
            if tensor.kept is None:
                before = tensor.gradient = _NONE  # zero plus a gradient is that gradient
            else:
                self.make_ready(tensor)
        # Code that computes with all bits of a value gives gradients with more bits than its place has.
        is_apart = tensor.is_needed_at_home or gradient.dtype.itemsize > chunk.dtype.itemsize
        if tensor.gradient is _PARAM:
            self.move_to_list(tensor)
        if self.accumulate or is_apart or tensor.gradient is _LIST or not chunk.has_list(MASTER):
            self._add_to_list(tensor, gradient)
        else:
            self._write_over_value(tensor, chunk, gradient)
        if self.attempts.is_running:
            self.attempts.note_placed(tensor.spec.index, before)

    def _write_over_value(self, tensor: ManagedParameter, chunk: Chunk, gradient: torch.Tensor) -> None:
        """See [Note: gradient reuse]."""
        is_on_device, is_held = chunk.home is Tier.DEVICE, True
        if chunk.is_static:
            view = tensor.view_on_device
            place = chunk.view_of(tensor) if view is None else view
        elif is_on_device:
            for copy in chunk.under_way:  # of a group, from a home on the device
                copy.join()
            place = tensor.view(chunk.param)
        else:
            place = tensor.view(chunk.home_param)
            is_held = self._crosses_beside(chunk, gradient)
            if not is_held:
                chunk.wait()  # the host writes to the home, which a copy may be reading
        norm: torch.Tensor | None = None
        holds: Hold = True
        if self.records_norms:  # may fail: before anything is written
            norm = self.norms.add(place if is_on_device else gradient, chunk.state_dtype)
            if not is_held:
                self.norms.fill()
            holds = functools.partial(self.norms.need, norm)
        if is_on_device:
            place.copy_(gradient)
            ticket = None if norm is None else Copy(self.norms, Lane.HOST_WORK)
        else:
            ticket = self._streams.to_host(gradient, place, chunk.under_way, holds=holds, is_beside=is_held)
        if ticket is not None:
            chunk.note(ticket)
        tensor.gradient_norm = norm
        tensor.gradient = _PARAM
        self._note_stored(tensor)

    def _add_to_list(self, tensor: ManagedParameter, gradient: torch.Tensor) -> None:
        chunk, is_first, norm = tensor.chunk, tensor.gradient is _NONE, None
        place = tensor.view(self._list(chunk))
        if self._leaves_beside(chunk, gradient) and gradient.stride() == place.stride():
            norms = Norms(self._streams.device)
            if self.records_norms and self.completes_step:
                norm = norms.add(place, chunk.state_dtype)
            for ticket in self._ring.add(gradient, place, is_first=is_first):
                chunk.note(ticket)
            if norm is not None:
                chunk.note(self._streams.on_host(norms.fill))  # when it has added the last gradient
        else:
            chunk.wait()
            if is_first:
                place.copy_(gradient)
            else:
                place.add_(self._streams.on_tier_of(gradient, place))
        tensor.gradient = _LIST
        tensor.gradient_norm = norm
        self._note_stored(tensor)

    def _note_stored(self, tensor: ManagedParameter) -> None:
        self._counts.device_to_host_nbytes += tensor.crossing_nbytes
        tensor.crossing_nbytes = 0
        if self._counts.log is not None:
            self._counts.log.append(("gradient", tensor.chunk.spec.index))

    def _crosses_beside(self, chunk: Chunk, gradient: torch.Tensor) -> bool:
        """Whether a copy of a gradient to the chunk's home on the host runs beside the host."""
        if chunk.is_pinned is None:
            chunk.is_pinned = self._streams.is_pinned(chunk.home_param)
        return chunk.is_pinned and self._streams.is_on_device(gradient)

    def _leaves_beside(self, chunk: Chunk, gradient: torch.Tensor) -> bool:
        """Whether a gradient goes to its list through the ring, which comes after all lists."""
        if chunk.home is Tier.DEVICE or not self._crosses_beside(chunk, gradient):
            return False
        self._has_all_lists |= all(other.has_list(GRADIENT) for other in self._chunks if other.spec.trainable)
        return self._has_all_lists and self._ring.open()

    def _list(self, chunk: Chunk) -> torch.Tensor:
        if not chunk.has_list(GRADIENT):
            numel = chunk.spec.chunk_numel
            if chunk.home is Tier.DEVICE:  # no plan knows of it: copies make room, or chunks leave the margin
                self._evictor.make_room(numel * chunk.state_dtype.itemsize)
            others = (other for other in self._chunks if other is not chunk and chunk.home in (other.home, Tier.HOST))
            ahead = _lists_nbytes(other for other in others if not other.has_list(GRADIENT))
            chunk.lists[GRADIENT] = self._pool.allocate(
                chunk.home, numel, chunk.state_dtype, GRADIENT, pinned=chunk.is_streamed, ahead_nbytes=ahead
            )
        return chunk.lists[GRADIENT]

    def reserve(self, chunk: Chunk) -> None:
        """Allocates what gradients that are given need, if the chunk itself has no place for them.

        Raises:
            BudgetError: If there is no room.
        """
        if self.accumulate or not chunk.has_list(MASTER) or chunk.is_mixed:
            self._list(chunk)

    def take_left(self, left: Sequence[tuple[ManagedParameter, torch.Tensor]]) -> None:
        """Takes gradients that autograd has left: they stay as they are, or go to the list all at once.

        Args:
            left: Each parameter with its gradient; it has none yet, or one in the list. See [Note: rest].
        """
        self.is_after_step = False
        attempts = self.attempts
        placed: dict[bool, tuple[list[Any], list[Any]]] = {True: ([], []), False: ([], [])}
        for tensor, _ in left if self.accumulate else ():
            self._list(tensor.chunk)  # may fail: before any gradient has another place
        for tensor, gradient in left:
            before, index = tensor.gradient, tensor.spec.index
            if attempts.is_running and attempts.is_counted(index):
                continue
            if self.accumulate:
                places, gradients = placed[before is _NONE]
                places.append(tensor.view(self._list(tensor.chunk)))
                gradients.append(gradient)
                tensor.gradient, tensor.gradient_norm = _LIST, None
            else:
                tensor.gradient, tensor.kept = _LEFT, gradient
            if attempts.is_running:
                attempts.note_placed(index, before)
        for is_first, (places, gradients) in placed.items():
            if places:
                (torch._foreach_copy_ if is_first else torch._foreach_add_)(places, gradients)

    def note_remote(self, tensor: ManagedParameter) -> None:
        """Notes that a gradient was added on the rank that owns the parameter."""
        if tensor.is_consumed and self._keeps is not False:
            tensor.is_incomplete = True
        else:
            tensor.gradient, tensor.is_consumed = _REMOTE, False

    def put(self, tensor: ManagedParameter, own: torch.Tensor) -> None:
        """Replaces a gradient by one that is given; what this rank has of it.

        Args:
            tensor: The parameter.
            own: The values, in the shape that ``ManagedParameter.view`` gives; not changed.
        """
        with self.lock:
            tensor.gradient_norm = None
            tensor.is_consumed = tensor.is_incomplete = False
            if not tensor.is_owned:
                tensor.gradient = _REMOTE
                return
            home = self.of(tensor)
            is_wider = own.dtype.itemsize > tensor.chunk.dtype.itemsize
            if home is None and not is_wider:
                tensor.gradient = _NONE
                self.add(tensor, own)
                self._streams.release_in_flight()  # code that has the tensor may write to it next
            elif home is None or (is_wider and tensor.gradient is not _LIST):
                if home is None:
                    tensor.gradient = _NONE
                else:
                    self.make_ready(tensor)
                    self.move_to_list(tensor)
                tensor.view(self._list(tensor.chunk)).copy_(own)
                tensor.gradient = _LIST
            else:
                home.copy_(own)

    def settle_deferred(self, tensors: Iterable[ManagedParameter]) -> None:
        """Backward has ended: finds places for gradients that waited until nobody needed the values there."""
        for tensor in tensors:
            if tensor.deferred_gradient is not None:
                self.place_deferred(tensor)
        if self.records_norms:
            self.norms.fill()

    def place_deferred(self, tensor: ManagedParameter) -> None:
        """Finds a place for a deferred gradient; if there is no room the gradient stays deferred."""
        assert tensor.deferred_gradient is not None
        self.add(tensor, tensor.deferred_gradient)
        tensor.deferred_gradient = None

    # Finding them

    def of(self, tensor: ManagedParameter) -> torch.Tensor | None:
        """The gradient of a parameter that this rank owns, in the parameter's shape, or ``None``.

        fp32 in the accumulation list, the parameter's type otherwise. It aliases its place: writing changes it.
        """
        with self.lock:
            chunk = tensor.chunk
            if tensor.gradient is _LEFT and tensor.deferred_gradient is None:
                return tensor.kept
            if tensor.deferred_gradient is not None or tensor.gradient in _ELSEWHERE:
                self.make_ready(tensor)
            if chunk.update is not None or chunk.tickets:
                chunk.wait()
            if tensor.gradient is _PARAM:
                return tensor.view(chunk.home_param)
            if tensor.gradient is _LIST:
                return tensor.view(chunk.home_lists[GRADIENT])
            return None

    def make_ready(self, tensor: ManagedParameter) -> None:
        """Brings a gradient that is elsewhere to a place in the chunk, where the optimizer finds it."""
        if tensor.deferred_gradient is not None:
            self.place_deferred(tensor)
        before = tensor.gradient
        if before not in _ELSEWHERE:
            return
        if tensor.kept is not None:
            self.attempts.note_before(tensor.spec.index, before)
            kept, tensor.kept, tensor.gradient = tensor.kept, None, _NONE
            self.put(tensor, tensor.own(kept))
            return
        chunk = tensor.chunk
        chunk.wait()
        in_list = self.accumulate or tensor.is_resting or not chunk.has_list(MASTER)
        tensor.view(self._list(chunk) if in_list else chunk.param).zero_()
        tensor.gradient = _LIST if in_list else _PARAM

    def check_complete(self, tensor: ManagedParameter) -> None:
        """Makes sure that a gradient that is about to be used is all of it.

        Raises:
            EngineError: If a step has consumed it, or torch would have added it to one that a step has consumed.
        """
        if tensor.is_incomplete:
            raise EngineError(
                consumed(tensor, "zero_grad was not called since: torch would have added the next one to it")
            )
        if tensor.is_consumed and self._keeps is not False:
            raise EngineError(consumed(tensor, "it is used again: torch would still have it"))

    def move_to_list(self, tensor: ManagedParameter) -> None:
        """Brings the value back to its place, keeping the gradient in the accumulation list; [Note: gradient reuse]."""
        with self.lock:
            if tensor.gradient is not _PARAM:
                return
            chunk = tensor.chunk
            chunk.wait()
            place, gradient = tensor.view(self._list(chunk)), tensor.view(chunk.param)
            with held_back():  # else a gradient may be added twice, or computed with as the value
                place.copy_(gradient)
                tensor.gradient = _LIST
                tensor.gradient_norm = None
                tensor.restore()

    def bring_values_back(self, chunk: Chunk) -> None:
        """Makes a chunk at home hold values: others are about to get it."""
        for tensor in chunk.owned:
            self.move_to_list(tensor)

    # Scaling them

    @property
    def has_factor(self) -> bool:
        """Whether there is something that they are still to be multiplied with."""
        return self.coefficient is not None or self.inverse_scale is not None

    def take_factor(self) -> torch.Tensor | None:
        """What gradients are still to be multiplied with; the caller multiplies them."""
        coefficient, scale = self.coefficient, self.inverse_scale
        self.coefficient = self.inverse_scale = None
        if coefficient is None or scale is None:
            return scale if coefficient is None else coefficient
        return coefficient * scale.to(coefficient.device)

    def multiply(self, tensor: ManagedParameter, factor: torch.Tensor) -> None:
        """Multiplies a gradient, in fp32."""
        if not tensor.has_gradient:
            return
        if tensor.gradient is not _LEFT or tensor.chunk.is_mixed:
            self.make_ready(tensor)
        if tensor.chunk.is_mixed:
            self.move_to_list(tensor)
        gradient = self.of(tensor)
        if gradient is not None:
            gradient.mul_(factor.to(gradient.device))
            tensor.gradient_norm = None

    # Keeping and dropping them

    @property
    def must_keep(self) -> bool:
        """Whether the optimizer's step leaves gradients as they are; see [Note: gradients after the step]."""
        wanted = self.is_watched or self.was_read_late or not self._was_zeroed
        return self._keeps is True or (self._keeps == "auto" and wanted)

    def note_step(self) -> None:
        """Learns that the gradients that there are were used by a step."""
        self.is_after_step = True

    def try_to_keep(self, chunks: Iterable[Chunk]) -> bool:
        """Moves the gradients of chunks to the accumulation list, where a step leaves them; whether there was room.

        Raises:
            BudgetError: If there is none and they were asked for.
        """
        try:
            for chunk in chunks:
                for tensor in chunk.owned:
                    self.make_ready(tensor)
                    self.move_to_list(tensor)
        except BudgetError:
            if self._keeps is True:
                raise
            return False
        return True

    def note_zeroed(self, chunks: Iterable[Chunk]) -> None:
        """Learns that gradients are zeroed after, or before, each step: from now on a step consumes them."""
        if self._was_zeroed:
            return
        self._was_zeroed = True
        if not (self.must_keep or self.accumulate):
            for chunk in chunks:
                if chunk.has_list(GRADIENT) and not any(t.gradient is _LIST for t in chunk.tensors):
                    self._pool.release(chunk.home, chunk.lists.pop(GRADIENT), GRADIENT, keep=False)

    def drop(self, tensor: ManagedParameter, *, to_zero: bool = False) -> None:
        """Drops the gradient of one parameter; its value is in its place again.

        Args:
            tensor: The parameter.
            to_zero: Whether a gradient that was there, also before the last step, is zero from now on.
        """
        with self.lock:
            was_there = tensor.has_gradient or tensor.is_consumed
            if tensor.gradient is _PARAM:
                tensor.restore()
            tensor.clear_gradient()
            if to_zero and was_there:
                tensor.make_gradient_zero()

    @staticmethod
    def finish_update(
        tensors: Iterable[ManagedParameter], handed_out: Mapping[int, torch.Tensor | None], *, keeps: bool
    ) -> None:
        """Ends the optimizer's step for parameters that had a gradient.

        Args:
            tensors: The parameters.
            handed_out: By index the gradients of which somebody still refers to what was handed out.
            keeps: Whether gradients were left in the accumulation list.
        """
        for tensor in tensors:
            tensor.gradient_norm = None  # of before it was multiplied
            if keeps and tensor.gradient is not _PARAM:
                continue
            kept = handed_out.get(tensor.spec.index)
            tensor.gradient, tensor.kept = (_NONE if kept is None else _APART), kept
            tensor.is_consumed, tensor.is_incomplete = kept is None, False
            tensor.deferred_gradient, tensor.crossing_nbytes = None, 0

    def close(self) -> None:
        """Gives back what gradients leave through."""
        self._ring.close()


class Attempts:
    """Counts the contributions to gradients over attempts at one micro-batch.

    A gradient that a failed attempt was the first to store is dropped. A contribution that was added to the gradient of
    earlier micro-batches cannot be subtracted without rounding, so it stays. The next attempt computes the same
    contributions in the same order, and skips those that are there already.

    Attributes:
        is_running: Whether a micro-batch runs that may be repeated; else nothing is counted.
    """

    def __init__(self) -> None:
        self.is_running = False
        self._before: dict[int, GradientPlace] = {}
        self._num_stored: collections.Counter[int] = collections.Counter()
        self._num_placed: dict[int, int] = {}
        self._num_counted: dict[int, int] = {}

    def begin(self) -> None:
        """Begins the first attempt."""
        self.is_running = True
        self._before.clear()
        self._num_stored.clear()
        self._num_placed.clear()
        self._num_counted.clear()

    def end(self) -> None:
        """Ends the last attempt; nothing is counted until ``begin``."""
        self.begin()
        self.is_running = False

    def is_counted(self, tensor_index: int) -> bool:
        """Notes a contribution; returns whether a failed attempt has added it already."""
        if not self.is_running:
            return False
        self._num_stored[tensor_index] += 1
        return self._num_stored[tensor_index] <= self._num_counted.get(tensor_index, 0)

    def note_before(self, tensor_index: int, before: GradientPlace) -> None:
        """Notes where a gradient was before an attempt moved it to the place to which contributions are added."""
        if self.is_running:
            self._before.setdefault(tensor_index, before)

    def note_placed(self, tensor_index: int, before: GradientPlace) -> None:
        """Notes that all contributions so far are stored, and where the gradient was before the first one."""
        if self.is_running:
            self._before.setdefault(tensor_index, before)
            self._num_placed[tensor_index] = self._num_stored[tensor_index]

    @property
    def has_leftovers(self) -> bool:
        """Whether failed attempts have left contributions, so that only a repetition completes the gradients."""
        return bool(self._num_counted)

    def undo(self) -> set[int]:
        """Begins the next attempt after a failed one.

        Returns:
            Indices of the tensors whose gradients the failed attempt was the first to store; the caller drops these.
        """
        dropped = {index for index, before in self._before.items() if before is GradientPlace.NONE}
        for index in self._before.keys() - dropped:
            self._num_counted[index] = self._num_placed.get(index, 0)
        self._before.clear()
        self._num_stored.clear()
        return dropped


def _lists_nbytes(chunks: Iterable[Chunk]) -> int:
    """Bytes of the accumulation lists that chunks may need."""
    return sum(chunk.spec.chunk_numel * chunk.state_dtype.itemsize for chunk in chunks if chunk.spec.trainable)


def consumed(tensor: ManagedParameter, why: str) -> str:
    """The message where a gradient is missed that a step has consumed."""
    return (
        f"the gradient of parameter '{tensor.spec.name}' was consumed by optimizer.step(), and {why}. Call "
        "optimizer.zero_grad() after the step, read gradients before it, or set keep_gradients=true, which takes 4 "
        "bytes per trainable parameter"
    )
