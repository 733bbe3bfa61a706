"""Runs a micro-batch with an engine that is listened to; see [Note: micro-batches that are told again]."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.machine import Machine
from hf_patrickstar.runtime.assembly import Foundation, assemble
from hf_patrickstar.runtime.chunk import ManagedTensor
from hf_patrickstar.runtime.frames import Frame, Lookup
from hf_patrickstar.runtime.manager import ChunkManager
from hf_patrickstar.runtime.parameters import Parameters
from hf_patrickstar.runtime.phases import Phases
from hf_patrickstar.schedule.op_trace import (
    Acquire,
    EnterBackward,
    LeaveForward,
    LookedUp,
    LookUp,
    Need,
    Note,
    OpTrace,
    Release,
    Watched,
)
from hf_patrickstar.schedule.repeats import FEW_BLOCKS, IrregularError, Names, Stack, extend
from hf_patrickstar.schedule.script import Begin, Part
from hf_patrickstar.schedule.trace import Shapes
from hf_patrickstar.states import Stage
from hf_patrickstar.tracing.stacks import cut, find_stacks
from hf_patrickstar.units import ALIGNMENT_NUMEL
from hf_patrickstar.virtual.driver import VirtualDriver
from hf_patrickstar.virtual.note_taker import NoteTaker
from hf_patrickstar.virtual.playing import Playback
from hf_patrickstar.virtual.timing import OperatorTimes
from hf_patrickstar.virtual.training import Training, drop_gradients, tensors_in

logger = logging.getLogger(__name__)

_PLENTY_NBYTES = 2**50
_WITH_ROOM = {
    **{"device_budget": _PLENTY_NBYTES, "host_budget": _PLENTY_NBYTES, "chunk_budget": "auto", "placement": "host"},
    **{"chunk_numel": ALIGNMENT_NUMEL, "overlap_optimizer": False, "debug_evict_all": False},
}
"""A chunk for every parameter, with room for all of them and for everything else."""


class NotedParameters(Parameters):
    """Parameters of an engine whose calls are noted."""

    def __init__(self, taker: NoteTaker, *parts: Any) -> None:
        self._taker = taker
        super().__init__(*parts)

    def acquire(self, tensor: ManagedTensor, module_name: str, *, is_alias: bool = False) -> None:
        """See ``Parameters``."""
        with self._taker.inside() as is_called:
            if is_called:
                self._taker.note_call(Acquire(tensor.spec.index, module_name))
            super().acquire(tensor, module_name, is_alias=is_alias)

    def release(self, tensor: ManagedTensor) -> None:
        """See ``Parameters``."""
        with self._taker.inside() as is_called:
            if is_called and self._taker.watches(tensor.chunk):
                self._taker.note_call(Watched(tensor.spec.index))
            super().release(tensor)
            if is_called:
                is_seen = not tensor.users and tensor.chunk.is_aliased
                self._taker.note_call(Release(tensor.spec.index, is_seen))
                if is_seen:
                    self._taker.note_use(tensor)

    def check_usable(self, tensor: ManagedTensor) -> None:
        """See ``Parameters``: a value is read where it is at home, and what that waits for no notes can tell."""
        if self._taker.is_listening:
            self._taker.note_odd()
        super().check_usable(tensor)

    def ensure_on_device(self, tensor: ManagedTensor, who: str) -> torch.Tensor:
        """See ``Parameters``."""
        with self._taker.inside() as is_called:
            if is_called:
                self._taker.note_call(Need(tensor.spec.index, who))
                self._taker.note_use(tensor)
            return super().ensure_on_device(tensor, who)


class NotedPhases(Phases):
    """Phases of an engine whose calls are noted."""

    def __init__(self, taker: NoteTaker, *parts: Any) -> None:
        self._taker = taker
        super().__init__(*parts)

    def before_forward(self, stage: Stage, name: str, shapes: Shapes, present: Iterable[torch.Tensor]) -> None:
        """See ``Phases``."""
        tensors = list(present)
        with self._taker.inside() as is_called:
            if is_called:
                self._taker.note_forward(stage, name, shapes, tensors)
            super().before_forward(stage, name, shapes, tensors)

    def after_forward(self, frame: Frame, *, has_failed: bool) -> None:
        """See ``Phases``."""
        with self._taker.inside() as is_called:
            if is_called and frame.stage is not Stage.BACKWARD:  # which recomputes
                self._taker.note_call(LeaveForward())
            super().after_forward(frame, has_failed=has_failed)

    def lookup_begin(self, tensor: ManagedTensor) -> Lookup:
        """See ``Phases``."""
        with self._taker.inside() as is_called:
            if is_called:
                self._taker.note_call(LookUp(tensor.spec.index))
            return super().lookup_begin(tensor)

    def lookup_end(self, lookup: Lookup, nbytes: int) -> None:
        """See ``Phases``."""
        with self._taker.inside() as is_called:
            if is_called:
                self._taker.note_call(LookedUp(lookup.tensor.spec.index, nbytes))
            if lookup.leaf._version != lookup.version:  # an embedding with ``max_norm`` has changed its rows
                self._taker.note_odd()
            super().lookup_end(lookup, nbytes)

    def backward_begin(self) -> None:
        """See ``Phases``."""
        with self._taker.inside() as is_called:
            if is_called:
                self._taker.note_call(EnterBackward())
            super().backward_begin()

    def gradient_ready(self, tensor: ManagedTensor, gradient: torch.Tensor, *, is_at_home: bool = False) -> None:
        """See ``Phases``."""
        with self._taker.inside() as is_called:
            if is_called:
                self._taker.note_gradient(tensor, gradient, is_at_home=is_at_home)
            super().gradient_ready(tensor, gradient, is_at_home=is_at_home)

    def backward_end(self) -> None:
        """See ``Phases``."""
        with self._taker.inside() as is_called:
            if is_called:
                self._taker.note_backward_end(self._parameters.held_outside_forward)
            super().backward_end()


class NotedEngine(PatrickStarEngine):
    """An engine whose calls are noted.

    Args:
        taker: Notes them.
        *args: As for ``PatrickStarEngine``.
        **kwargs: As for ``PatrickStarEngine``.
    """

    def __init__(self, taker: NoteTaker, *args: Any, **kwargs: Any) -> None:
        self._taker = taker
        super().__init__(*args, **kwargs)

    def _assemble(self, foundation: Foundation) -> ChunkManager:
        parameters = functools.partial(NotedParameters, self._taker)
        manager = assemble(foundation, parameters, functools.partial(NotedPhases, self._taker))
        self._taker.watches = manager.watch.watches
        return manager


def listen(
    training: Training,
    machine: Machine,
    times: OperatorTimes | None = None,
    looked_up: Collection[str] = (),
) -> OpTrace | None:
    """Runs a micro-batch, and notes what torch tells the engine; see [Note: blocks that repeat], too.

    Args:
        training: What is trained.
        machine: Where.
        times: What operators take, if the machine is the one at hand; else its rates say it.
        looked_up: Names of the weights whose embeddings read their rows at home.

    Returns:
        The notes, or ``None`` if an engine that is told them does something else than it did with the model.
    """
    listening = functools.partial(_listening, machine, times, looked_up)
    with FakeTensorMode(), VirtualDriver(machine).watching():  # which answers what an initialisation asks of values
        stacks = find_stacks(training.make_model())
    if stacks:
        try:
            return _listen_to_few(training, stacks, listening)
        except Exception as error:  # code that counts on all blocks may raise anything
            logger.info("patrickstar: blocks repeat, but the model is run with all of them: %r", error)
    with listening(training) as listener:
        return listener.note_twice()


def _listen_to_few(
    training: Training, stacks: Sequence[Stack], listening: "Callable[[Training], AbstractContextManager[_Listener]]"
) -> OpTrace:
    """The notes, made of those of a few blocks.

    Raises:
        IrregularError: If they are not those of all blocks.
    """
    with listening(_with_blocks(training, stacks, FEW_BLOCKS)) as listener:
        found, names = listener.note_twice(), listener.names
    if found is None:
        raise IrregularError("a model with few blocks cannot be told again")
    few = [dataclasses.replace(stack, num_blocks=FEW_BLOCKS) for stack in stacks]
    more, more_names = extend(found.notes, names, few, [FEW_BLOCKS + 1] * len(few))
    with listening(_with_blocks(training, stacks, FEW_BLOCKS + 1)) as listener:
        noted = listener.note()
        if noted is None or noted.notes != more or listener.names != more_names:
            raise IrregularError(f"{FEW_BLOCKS + 1} blocks do something else than {FEW_BLOCKS}, extended by one")
    notes, names = extend(found.notes, names, few, [stack.num_blocks for stack in stacks])
    with listening(training) as listener:
        if listener.names != names or listener.note_forward() != notes[: notes.index(Begin(Part.BACKWARD))]:
            raise IrregularError("the forward of all blocks does something else than those of a few, extended")
    return OpTrace(notes)


def _with_blocks(training: Training, stacks: Sequence[Stack], num_blocks: int) -> Training:
    """A training of a model with so many blocks in each stack."""
    whole: list[torch.nn.Parameter] = []

    def make_model() -> torch.nn.Module:
        model = training.make_model()
        whole[:] = model.parameters()
        cut(model, stacks, num_blocks)
        return model

    def make_optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        left = set(map(id, parameters))
        optimizer = training.make_optimizer(iter(whole))  # that of a script knows its model's parameters by their order
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in left]
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        return optimizer

    return dataclasses.replace(training, make_model=make_model, make_optimizer=make_optimizer)


@contextlib.contextmanager
def _listening(
    machine: Machine, times: OperatorTimes | None, looked_up: Collection[str], training: Training
) -> Iterator["_Listener"]:
    """Inside of it an engine is listened to."""
    taker = NoteTaker()
    driver = VirtualDriver(machine, times, taker)
    with contextlib.ExitStack() as stack:
        stack.callback(taker.let_go)
        stack.enter_context(FakeTensorMode())
        stack.enter_context(driver.watching())
        settings = {**_WITH_ROOM, "cpu_embedding": bool(looked_up)}
        engine = training.make_engine(functools.partial(NotedEngine, taker), driver, settings=settings)
        for tensor in engine.manager.tensors:
            if tensor.spec.name not in looked_up:
                tensor.lookup = "device"
        try:
            _count_placeholders(engine)
            yield _Listener(training, engine, driver, taker)
        finally:
            engine.manager.phases.unwind()  # takes the meter's mode off before the modes around it


class _Listener:
    """Listens to an engine."""

    def __init__(self, training: Training, engine: PatrickStarEngine, driver: VirtualDriver, taker: NoteTaker) -> None:
        self._training = training
        self._engine = engine
        self._driver = driver
        self._taker = taker
        self._leaves: list[torch.Tensor] = []
        self.names: Names = {index: tensor.spec.name for index, tensor in engine.manager.by_index.items()}

    def note(self) -> OpTrace | None:
        """Notes a micro-batch."""
        inputs = self._begin()
        self._training.run_micro_batch(self._engine, self._driver, inputs)
        return self._taker.end()

    def note_forward(self) -> Sequence[Note] | None:
        """Notes a micro-batch up to its backward."""
        inputs = self._begin()
        self._driver.begin_part(Part.FORWARD)
        loss = self._training.compute_loss(self._engine.model, inputs)
        found = self._taker.end()
        del loss  # which lives until then, and so does what backward needs
        return None if found is None else found.notes

    def note_twice(self) -> OpTrace | None:
        """Notes a micro-batch; ``None`` if one is not like the other, or if notes are not all that it does."""
        first, found = self.note(), self.note()  # what a model does the first time alone cannot be told again
        if found is None or found != first:
            logger.info("patrickstar: the model does what cannot be told again, and is run each time")
            return None
        script, tracer = tuple(self._driver.script), self._engine.manager.tracer
        traces = dict(tracer.traces)
        self._clear()
        Playback(found, self._engine, self._driver, self._leaves).run()
        if tuple(self._driver.script) == script and tracer.traces == traces:
            return found
        logger.info("patrickstar: what was noted of the model is not all that it does, and it is run each time")
        return None

    def _begin(self) -> Mapping[str, Any]:
        """Begins to note a micro-batch, and makes it."""
        inputs = self._training.make_inputs()
        self._clear()
        self._leaves = tensors_in(inputs)
        engine = self._engine
        self._taker.begin(self._leaves, engine.model.buffers(), engine.manager.tensors, engine.resources.pool.owns)
        return inputs

    def _clear(self) -> None:
        self._engine.manager.tracer.discard()
        drop_gradients(self._engine)
        self._driver.begin(self._engine.manager.chunks)


def _count_placeholders(engine: PatrickStarEngine) -> None:
    """Counts the bytes of placeholders, which are seen once and stay; else they would count the second time alone."""
    meter = engine.resources.meter
    meter.start(tensor.placeholder for tensor in engine.manager.tensors)
    meter.stop()
