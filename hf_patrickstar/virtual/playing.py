"""Tells an engine what torch tells in a micro-batch; see [Note: micro-batches that are told again]."""

import itertools
import math
import operator
from collections.abc import Iterable, Sequence

import torch

from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import ManagedTensor
from hf_patrickstar.runtime.frames import Frame, Lookup
from hf_patrickstar.runtime.operands import SavedView
from hf_patrickstar.runtime.tracer import Step
from hf_patrickstar.schedule.op_trace import (
    Acquire,
    Allocate,
    EnterBackward,
    EnterForward,
    Free,
    Gradient,
    Keep,
    LeaveBackward,
    LeaveForward,
    LetGo,
    LookedUp,
    LookUp,
    Need,
    Note,
    OpTrace,
    Release,
)
from hf_patrickstar.schedule.script import Begin, Kernel, Part
from hf_patrickstar.states import Stage
from hf_patrickstar.virtual.driver import VirtualDriver


class Playback:
    """Tells one engine one micro-batch, once.

    Args:
        micro_batch: What torch tells.
        engine: The engine.
        driver: Below its streams.
        inputs: The tensors of the batch.
    """

    def __init__(
        self,
        micro_batch: OpTrace,
        engine: PatrickStarEngine,
        driver: VirtualDriver,
        inputs: Sequence[torch.Tensor],
    ) -> None:
        self._notes = micro_batch.notes
        self._engine = engine
        self._driver = driver
        self._inputs = inputs
        manager = engine.manager
        self._phases, self._parameters, self._tracer = manager.phases, manager.parameters, manager.tracer
        self._meter = engine.resources.meter
        self._tensors = manager.by_index
        self._as_seen = _as_seen(micro_batch.notes)
        self._some_memory = manager.chunks[0].payloads["param"]
        self._counted: dict[int, int] = {}  # storages that the meter counts -> their bytes
        self._made: dict[int, torch.Tensor] = {}  # storages that the engine gets to see
        self._views: dict[int, torch.Tensor] = {}  # of chunks that somebody looks into
        self._kept: dict[int, list[SavedView]] = {}
        self._acquired: list[ManagedTensor] = []
        self._lookups: dict[int, Lookup] = {}
        self._frame: Frame | None = None

    def run(self) -> Step | None:
        """Tells everything.

        Returns:
            What the engine knows of the step, as its forward ends.

        Raises:
            DeviceMemoryError: If the device has no room.
        """
        step = None
        try:
            for note in self._notes:
                if isinstance(note, Begin):
                    self._driver.begin_part(note.part)
                    step = self._tracer.step if note.part is Part.BACKWARD else step
                else:
                    self._tell(note)
        except BaseException:
            self._fail()
            raise
        finally:
            for nbytes in self._counted.values():
                self._meter.remove(nbytes)
            self._counted.clear()
            self._made.clear()
            self._views.clear()
        return step

    def _tell(self, note: Note) -> None:
        match note:  # the most frequent first
            case Kernel():
                self._driver.play(note)
            case Allocate(storages):
                for storage, nbytes in storages:
                    self._allocate(storage, nbytes)
            case Free(storage):
                self._made.pop(storage, None)
                self._meter.remove(self._counted.pop(storage, 0))
            case Acquire(index, who):
                # Nobody computes with the parameter: its chunk is in use all the same.
                self._parameters.acquire(self._tensors[index], who, is_alias=True)
                self._acquired.append(self._tensors[index])
            case Release(index, is_seen):
                if is_seen:
                    self._look_into(index)
                self._release(self._tensors[index])
            case Need(index, who):
                self._parameters.ensure_on_device(self._tensors[index], who)
                self._look_into(index)
            case LookUp(index):
                self._lookups[index] = self._phases.lookup_begin(self._tensors[index])
            case LookedUp(index, nbytes):
                self._phases.lookup_end(self._lookups.pop(index), nbytes)
            case LetGo(index):
                self._views.pop(index, None)
            case Keep(index, num):
                tensor = self._tensors[index]
                args = tensor.spec.shape, tensor.strides, tensor.offset_numel, 0
                self._kept[index] = [SavedView(tensor, *args) for _ in range(num)]
            case Gradient():
                self._store(note)
            case EnterForward() | LeaveForward() | EnterBackward() | LeaveBackward():
                self._change_phase(note)
            case Begin():
                pass
            case _:
                self._driver.play(note)

    def _change_phase(self, note: EnterForward | LeaveForward | EnterBackward | LeaveBackward) -> None:
        phases, model = self._phases, self._engine.model
        match note:
            case EnterForward(name, shapes, inputs, others):
                phases.turns.take(f"the forward of {name or type(model).__name__}")
                self._frame = Frame(model, Stage.FORWARD, has_turn=True)
                present = [*(self._inputs[number] for number in inputs), *(self._made[other] for other in others)]
                phases.before_forward(Stage.FORWARD, name, shapes, itertools.chain(present, model.buffers()))
                phases.frames.stack.append(self._frame)
            case LeaveForward():
                assert self._frame is not None
                phases.frames.stack.remove(self._frame)
                frame, self._frame = self._frame, None
                phases.after_forward(frame, has_failed=False)
            case EnterBackward():
                phases.backward_begin()
                self._frame = Frame(model, Stage.BACKWARD)  # memory that is made in backward is made inside of a step
                phases.frames.stack.append(self._frame)
            case LeaveBackward():
                assert self._frame is not None
                phases.frames.stack.remove(self._frame)
                self._frame = None
                phases.backward_end()

    def _allocate(self, storage: int, nbytes: int) -> None:
        if storage in self._as_seen:
            gradient = self._as_seen[storage]
            if gradient is not None and _fills(gradient, nbytes):
                made = self._some_memory.new_empty(gradient.size, dtype=getattr(torch, gradient.dtype))
            else:
                made = self._some_memory.new_empty(nbytes, dtype=torch.uint8)
            self._made[storage] = made
        elif self._meter.add(nbytes):
            self._counted[storage] = nbytes

    def _release(self, tensor: ManagedTensor) -> None:
        self._acquired.remove(tensor)
        self._parameters.release(tensor)

    def _look_into(self, index: int) -> None:
        tensor = self._tensors[index]
        assert tensor.chunk.compute is not None
        self._views[index] = tensor.view_copy(tensor.chunk.compute)

    @torch.no_grad()
    def _store(self, note: Gradient) -> None:
        made = self._made[note.storage]
        if made.dtype is torch.uint8:  # a part of a storage
            made = made.view(getattr(torch, note.dtype)).as_strided(note.size, note.stride, note.offset)
        tensor = self._tensors[note.index]
        if note.is_at_home:
            self._driver.take(made, Tier.HOST, "")
            self._phases.gradient_ready(tensor, made, is_at_home=True)
        else:
            self._engine.hooks.store(tensor, made)

    def _fail(self) -> None:
        """Ends what is open, as modules do whose forward raises."""
        for tensor in reversed(self._acquired):
            self._parameters.release(tensor)
        self._acquired.clear()
        frame, self._frame = self._frame, None
        if frame is None:
            return
        if frame in self._phases.frames.stack:
            self._phases.frames.stack.remove(frame)
        if frame.stage is Stage.FORWARD:
            self._phases.after_forward(frame, has_failed=True)


def _as_seen(notes: Iterable[Note]) -> dict[int, Gradient | None]:
    """Storages that the engine gets to see, with the gradient that is in them if it is one."""
    seen: dict[int, Gradient | None] = {}
    for note in notes:
        if isinstance(note, Gradient):
            seen[note.storage] = None if note.storage in seen else note
        elif isinstance(note, EnterForward):
            seen.update(dict.fromkeys(note.others))
    return seen


def _fills(gradient: Gradient, nbytes: int) -> bool:
    """Whether a gradient is a whole storage of so many bytes, in the order of its shape."""
    itemsize = getattr(torch, gradient.dtype).itemsize
    numel = math.prod(gradient.size)
    strides = tuple(itertools.accumulate(gradient.size[:0:-1], operator.mul, initial=1))[::-1]
    return numel * itemsize == nbytes and gradient.stride == strides[: len(gradient.size)]
