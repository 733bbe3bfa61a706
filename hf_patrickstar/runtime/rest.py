"""What the engine does where nothing has to move: nothing, between the begin and the end of a forward or backward.

[Note: rest]
If every chunk of a step is at home on the device, and gradients have room beside them (``Trace.at_rest``; the simulator
knows it, too), the engine is at rest: each parameter is a view of its place in its chunk for good, only the outermost
modules have hooks, and autograd keeps operands and gradients itself. A forward and a backward begin by giving all
parameters the class that torch treats as ``nn.Parameter``, and end by giving them the one that answers. When a backward
has ended its gradients are taken as they are (``GradientPlace.LEFT``), and the optimizer's step reads them there; they
never go over values, which graphs may need. If several micro-batches make a step, they are added to the list.

Rest begins and ends between steps. While one runs no chunk moves home, since its graph has values that nothing tells
of. What needs a hook ends rest: inputs larger than any before, a chunk that has left the device, a change of the model.
A parameter keeps its place as ``data`` until its chunk moves, or the next step begins, for the graphs that there are.

What the hooks of other modules would notice is noticed otherwise: a backward begins with the gradients of what the
model returned. A module that is called by itself, and not by the model, finds parameters that answer. It computes the
right thing slowly, and the engine does not rest any more.
"""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch._C._functorch import peek_interpreter_stack

from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.model.live_parameter import GET_GRAD, RAW, SET_GRAD, LiveMixin, released_type, storage_key
from hf_patrickstar.runtime.activations import Activations
from hf_patrickstar.runtime.chunk import Device
from hf_patrickstar.runtime.frames import Call
from hf_patrickstar.runtime.gradients import Gradients
from hf_patrickstar.runtime.mirrors import GradientMirrors, Writes
from hf_patrickstar.runtime.parameter import GradientPlace, ManagedParameter, ValuePlace
from hf_patrickstar.runtime.steps import Step, Steps
from hf_patrickstar.schedule.trace import Trace

if TYPE_CHECKING:
    from hf_patrickstar.runtime.parameters import Parameters

logger = logging.getLogger(__name__)

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_NONE, _PARAM, _LIST, _LEFT = GradientPlace.NONE, GradientPlace.PARAM, GradientPlace.LIST, GradientPlace.LEFT
_HOME = ValuePlace.HOME
_version_of = torch._C.TensorBase._version.__get__  # type: ignore[attr-defined]


class Rest:
    """Decides whether the engine rests, and gives and takes all values at once while it does; see [Note: rest].

    Args:
        device: The device.
        steps: Has the step that runs.
        activations: Some may leave the device.
        parameters: All parameters.
        writes: Takes over what users wrote to them.
        gradients: Has gradients that are not in their parameters.
        gradient_mirrors: Copies of gradients that users have.

    Attributes:
        misses_calls: Whether inner modules may have no hooks, so that calls of theirs go unnoticed.
    """

    waits_for_plans = True
    """Whether only a step begins rest that follows a plan, and has been measured."""

    def __init__(
        self,
        device: Device,
        steps: Steps,
        activations: Activations,
        parameters: "Parameters",
        writes: Writes,
        gradients: Gradients,
        gradient_mirrors: GradientMirrors,
    ) -> None:
        self.misses_calls = False
        self._refused = ""  # why the engine does not rest any more
        self._device, self._steps, self._activations = device, steps, activations
        self._parameters, self._writes = parameters, writes
        self._gradients, self._gradient_mirrors = gradients, gradient_mirrors
        self._tensors: list[ManagedParameter] = []  # those that rest, or rested when the last step began
        self._all: list[torch.Tensor] = []  # the parameters, with the versions that they had when they got their values
        self._versions: list[int] = []
        self._depth = 0  # forwards and backwards that run: one may call the other
        self._peaks: dict[str, tuple[Trace, int]] = {}  # what steps take beside chunks, with all gradients

    # Deciding

    def follow(self, call: Call, *, is_new: bool) -> None:
        """Decides for a forward that begins.

        Args:
            call: The call of its outermost module.
            is_new: Whether a step begins with it.
        """
        step, device = self._steps.step, self._device
        was_resting = device.is_resting
        if peek_interpreter_stack() is not None and device.resting and not device.has_woken:
            return  # nothing begins or ends inside of a transform
        if not call.is_usual:
            self.refuse("a part of the model is called by itself, or returns nothing that a backward begins with")
        elif device.resting and not self._may_go_on(step, is_training=call.is_training):
            self.end()
        if is_new and not device.resting:
            self._wake()
            if not (was_resting or device.keeps_values):
                self._begin(*self._chunks_to_rest(step))
        if is_new and device.is_resting and step is not None and step.cursor is not None:
            device.ledger.note_total(self._peak_nbytes(step.cursor.trace))

    def as_taken(self, trace: Trace) -> Trace:
        """A trace with the gradients that stay on the device while the engine rests."""
        return trace.at_rest(self._gradient_nbytes()) if self._device.is_resting else trace

    def _peak_nbytes(self, trace: Trace) -> int:
        known = self._peaks.get(trace.key)
        if known is None or known[0] is not trace:
            known = self._peaks[trace.key] = trace, trace.at_rest(self._gradient_nbytes()).peak_nbytes
        # Gradients of backwards before may be there, which users add up themselves.
        return known[1] + sum([t.kept.nbytes for t in self._tensors if t.gradient is _LEFT and t.kept is not None])

    def _has_room(self, peaks: Iterable[int]) -> bool:
        """Whether the device has room for what steps take beside chunks."""
        ledger = self._device.ledger
        return ledger.used(Tier.DEVICE) + max(peaks) <= ledger.limit(Tier.DEVICE, cautious=False)

    def _gradient_nbytes(self) -> list[int]:
        """Bytes of the gradients of each chunk."""
        return [
            sum([tensor.own_numel for tensor in chunk.owned if tensor.spec.trainable]) * chunk.dtype.itemsize
            for chunk in self._device.chunks
        ]

    def _may_go_on(self, step: Step | None, *, is_training: bool) -> bool:
        device = self._device
        if device.has_woken or self._activations.is_on or step is None:
            return False
        if device.is_resting and (device.moves or self._has_hooks_of_users(0)):
            return False
        if not self.waits_for_plans and device.is_resting:
            return True
        if device.is_resting and not is_training:
            return step.cursor is not None
        if step.plan is None or step.cursor is None or (is_training and step.is_metered):
            return False
        if device.is_resting:
            return self._has_room([self._peak_nbytes(step.cursor.trace)])
        return device.resting <= step.plan.quiet

    def _has_hooks_of_users(self, num_own: int) -> bool:
        """Whether users see gradients when they have been added: then they are to see the sum of several backwards."""
        with RAW():
            hooks = [tensor.parameter._post_accumulate_grad_hooks for tensor in self._parameters.tensors]
        return any(len(found) > num_own for found in hooks if found)

    def _chunks_to_rest(self, step: Step | None) -> tuple[frozenset[int], bool]:
        """The chunks that plans of training leave alone; whether none moves, and gradients have room beside them."""
        device, none = self._device, (frozenset[int](), False)
        is_asked = not (self._refused or self._steps.policy.evict_all) and device.sharing.is_alone
        if not is_asked or step is None or self._activations.is_on:
            return none
        if self.waits_for_plans and (step.plan is None or step.is_metered):
            return none
        if torch._C._get_dispatch_mode(_FAKE) is not None or peek_interpreter_stack() is not None:
            return none
        tensors = self._parameters.tensors
        if not tensors or not all(tensor.is_bound and tensor.place is _HOME for tensor in tensors):
            return none
        if not (device.moves or self._has_hooks_of_users(1)):
            known = [trace for trace, *_ in self._steps.followed] + ([] if step.cursor is None else [step.cursor.trace])
            if self._has_room([self._peak_nbytes(trace) for trace in known] or [sum(self._gradient_nbytes())]):
                return frozenset(chunk.spec.index for chunk in device.chunks if not chunk.is_retired), True
        if step.plan is None or not step.plan.quiet or self._parameters.needs_frames:
            return none
        return step.plan.quiet.intersection(*(plan.quiet for _, plan, _ in self._steps.followed)), False

    def _begin(self, chunks: frozenset[int], is_whole: bool) -> None:
        device = self._device
        if not chunks:
            return
        with device.lock:
            for index in chunks:
                device.chunks[index].rest()
            self._tensors = [t for t in self._parameters.tensors if t.chunk.spec.index in chunks]
            self._all = [tensor.parameter for tensor in self._tensors]
            self._depth, self._peaks = 0, {}
            device.resting, device.has_woken = chunks, False
            device.is_resting = device.keeps_values = is_whole
        if not self.misses_calls:
            self.misses_calls = True
            which = "nothing has to move" if device.is_resting else f"{len(chunks)} chunks never move"
            logger.info("patrickstar: %s, so their parameters stay in place and their modules need no hooks", which)

    def refuse(self, why: str) -> None:
        """Ends rest for good.

        Args:
            why: What happens that only hooks of all modules notice.
        """
        if not self._refused and self.misses_calls:
            logger.info("patrickstar: %s, so all modules have hooks from now on", why)
        self._refused, self.misses_calls = why, False
        self.end()

    def end(self) -> None:
        """Ends rest; modules get their hooks before the next forward computes."""
        if self._device.resting:
            with self._device.lock:
                self.take_values(is_last=True)
                self._device.is_resting, self._device.resting = False, frozenset()

    def _wake(self) -> None:
        """A step begins that does not go on resting; a chunk stays as it is into which a graph of before looks."""
        kept = {tensor.chunk for tensor in self._tensors if tensor.is_resting and tensor.chunk.is_aliased}
        for tensor in self._tensors:
            if tensor.chunk not in kept:
                tensor.chunk.wake(tensor)
        self._all = []
        self._tensors = [tensor for tensor in self._tensors if tensor.chunk in kept]
        self._device.keeps_values = bool(kept)

    # Values

    def give_values(self, *, in_backward: bool = False) -> None:
        """A forward or a backward begins: torch treats parameters that rest as it treats any.

        Args:
            in_backward: Whether it is a backward: values under gradients are needed no more, or asked for one by one.
        """
        with self._device.lock:
            for tensor in [tensor for tensor in self._tensors if tensor.place is not _HOME]:
                self._parameters.check_usable(tensor)
            self._depth += 1
            if self._depth > 1:
                return
            type_of = self._parameters.type_of
            for tensor in self._tensors:
                if tensor.gradient is _PARAM and not in_backward:
                    self._gradients.move_to_list(tensor)
                if (
                    tensor.place is _HOME
                    and tensor.gradient is not _PARAM
                    and tensor.released is not tensor.placeholder
                ):
                    tensor.parameter.__class__ = type_of(tensor.original_type)
                    tensor.read_at = tensor.num_writes
            self._versions = list(map(_version_of, self._all))

    def take_values(self, *, is_last: bool = False) -> None:
        """It ends: parameters answer by themselves, and what it has written to them counts.

        Args:
            is_last: Whether none runs any more, since all were interrupted.
        """
        with self._device.lock:
            if not self._depth:
                return
            self._depth = 0 if is_last else self._depth - 1
            if self._depth:
                return
            written = self._find_written()
            for tensor in self._tensors:
                if tensor.place is _HOME and isinstance(tensor.parameter, LiveMixin):  # else it was exchanged
                    tensor.parameter.__class__ = released_type(tensor.original_type)
            for tensor in written:
                self._writes.take_back(tensor)

    def take_written(self) -> None:
        """Takes over what the forward that runs has written so far, since somebody else reads or opens values."""
        with self._device.lock:
            for tensor in self._find_written() if self._depth else ():
                self._writes.take_back(tensor)

    def _find_written(self) -> list[ManagedParameter]:
        """The parameters that were written to, or assigned, since they got their values, or may have been."""
        written, watched, versions = [], self._writes.watched, map(_version_of, self._all)
        for tensor, before, version, key in zip(
            self._tensors, self._versions, versions, map(storage_key, self._all), strict=True
        ):
            is_other = version != before or key != tensor.released_key or tensor in watched
            if is_other and tensor.place is _HOME and tensor.released is not tensor.placeholder:
                tensor.version = before
                written.append(tensor)
        return written

    # Gradients

    def take_gradients(self) -> list[tuple[ManagedParameter, torch.Tensor]]:
        """Takes what backwards have left in parameters.

        Returns:
            The parameters whose gradients are to be stored otherwise, with these, since a place of theirs is in use.
        """
        gradients, others, found = self._gradients, [], []
        is_usual = not self._gradient_mirrors.by_tensor
        places = (_NONE, _LIST) if gradients.accumulate else (_NONE,)
        with self._device.lock:
            with RAW():
                for tensor, parameter in zip(self._tensors, self._all, strict=True):
                    gradient = GET_GRAD(parameter)
                    if gradient is None or not (isinstance(parameter, LiveMixin) and tensor.spec.trainable):
                        continue  # it has none, or was exchanged
                    SET_GRAD(parameter, None)
                    is_fit = gradient.dtype is tensor.chunk.dtype and not (gradient.requires_grad or gradient.is_sparse)
                    if (
                        is_usual
                        and is_fit
                        and tensor.gradient in places
                        and not (tensor.is_consumed or tensor.is_incomplete)
                        and tensor.deferred_gradient is None
                        and gradient.is_contiguous()
                    ):
                        found.append((tensor, gradient))
                    else:
                        others.append((tensor, gradient))
            if found:
                gradients.take_left(found)
        return others
