"""The chunk manager: brings chunks to where they are computed with, and gradients to where they are needed.

[Note: where things live]
Every chunk has a home tier with all its lists. A chunk at home on the host is copied to the device to be computed
with, and keeps its host storage meanwhile. Gradients go straight to the home, tensor by tensor, as autograd finishes
them. So a device copy is never dirty: evicting one drops it and copies nothing, device -> host carries exactly the
gradients, and after the optimizer has changed a home its device copy is stale and is dropped.
"""

import dataclasses
import time
from collections.abc import Container, Iterable, Sequence

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from hf_patrickstar.errors import DeviceMemoryError, EngineError
from hf_patrickstar.events import Listener
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.memory.transfers import Transfers
from hf_patrickstar.runtime.buckets import Buckets
from hf_patrickstar.runtime.chunk import MASTER, Chunk, GradientPlace, ManagedTensor
from hf_patrickstar.runtime.executor import Services
from hf_patrickstar.runtime.frames import Frame, Frames
from hf_patrickstar.runtime.gradient_mirrors import GradientMirrors
from hf_patrickstar.runtime.gradients import Gradients
from hf_patrickstar.runtime.live_parameter import requires_grad, set_raw_grad
from hf_patrickstar.runtime.mirrors import ValueMirrors
from hf_patrickstar.runtime.order import Phase
from hf_patrickstar.runtime.originals import Originals
from hf_patrickstar.runtime.placement import Placement
from hf_patrickstar.runtime.ranges import named
from hf_patrickstar.runtime.sharing import Held
from hf_patrickstar.runtime.steps import Steps
from hf_patrickstar.runtime.turns import Turns, is_backward_elsewhere, pauses_s
from hf_patrickstar.runtime.values import Values
from hf_patrickstar.runtime.watch import Watch
from hf_patrickstar.runtime.writes import Writes
from hf_patrickstar.schedule.placement import ChunkBytes
from hf_patrickstar.schedule.trace import Shapes
from hf_patrickstar.states import Stage, TensorState


@dataclasses.dataclass(frozen=True, slots=True)
class Data:
    """The places where values and gradients are.

    Attributes:
        originals: Values of frozen parameters, with bits that chunks do not hold.
        values: Reads and writes values.
        mirrors: What was handed out of values.
        gradient_mirrors: What was handed out of gradients.
        watch: Finds what was written to copies on the device.
        gradients: Where gradients are at home.
        writes: Takes what is written to parameters to every place where they are.
        buckets: Where gradients wait until their group is complete.
    """

    originals: Originals
    values: Values
    mirrors: ValueMirrors
    gradient_mirrors: GradientMirrors
    watch: Watch
    gradients: Gradients
    writes: Writes
    buckets: Buckets


class ChunkManager:
    """Gives parameters their values and takes their gradients.

    Args:
        services: What it works with.
        steps: Begins and ends steps.
        placement: Moves chunks to better homes.
        data: The places where values and gradients are.
        transfers: How bytes cross.
        emit: Told of every event.
    """

    def __init__(
        self,
        services: Services,
        steps: Steps,
        placement: Placement,
        data: Data,
        transfers: Transfers,
        emit: Listener,
    ) -> None:
        self.chunks = chunks = services.chunks
        self.steps = steps
        self.copies, self.reclaim, self.tracer = services.copies, services.reclaim, services.tracer
        self.executor = steps.executor
        self.placement = placement
        self.ledger = services.pool.ledger
        self.tensors: list[ManagedTensor] = sorted(
            (tensor for chunk in chunks for tensor in chunk.tensors), key=lambda tensor: tensor.spec.index
        )
        self.by_index: dict[int, ManagedTensor] = {}
        self._by_parameter: dict[int, ManagedTensor] = {}
        self.index_tensors(self.tensors)
        self.held_outside_forward: list[ManagedTensor] = []  # acquired by code in backward that no forward is around
        self.has_new_groups = False  # param groups were changed: parameters may need other lists
        self.num_steps = 0  # of all optimizers
        self.step_peaks = (0, 0, 0)  # bytes in the last step: chunks on the device, all on the device, on the host
        self._pool = services.pool
        self._meter = services.meter
        self._transfers = transfers
        self._emit = emit
        self.turns = Turns()
        self.frames = Frames()
        self.originals, self.values, self.sharing = data.originals, data.values, data.values.sharing
        self.mirrors, self.gradient_mirrors = data.mirrors, data.gradient_mirrors
        self.gradients, self.writes = data.gradients, data.writes
        self.watch = data.watch
        self._buckets = data.buckets
        self._lock = self.values.lock
        self._list_names = {name for chunk in chunks for name in chunk.lists}
        self._is_alone = steps.order.is_alone
        self._order = steps.order

    def index_tensors(self, tensors: Sequence[ManagedTensor]) -> None:
        """Takes note of which parameters there are.

        Args:
            tensors: All, in model order.
        """
        self.tensors[:] = tensors
        self.by_index = {tensor.spec.index: tensor for tensor in tensors}
        self._by_parameter = {id(tensor.parameter): tensor for tensor in tensors}

    # Changes of the model

    def begin_change(self) -> None:
        """Begins to add and remove parameters: no step runs, and nothing that was written is missed."""
        self.unwind()
        self.writes.sync()
        self.steps.forget_step()

    def add_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Adds chunks at the end of the chunk list."""
        self.chunks.extend(chunks)
        self.copies.note_chunks()

    def remove(self, tensor: ManagedTensor) -> None:
        """Removes a parameter, which is an ordinary one again; its chunk is freed if no other is in it."""
        with self._lock:
            self.writes.forget(tensor)
            self.originals.drop(tensor)
            tensor.num_writes += 1  # a graph of before cannot find its operands any more
            chunk = tensor.chunk
            chunk.remove(tensor)
            self._by_parameter.pop(id(tensor.parameter), None)
            if not chunk.tensors:
                self.retire(chunk)

    def retire(self, chunk: Chunk) -> None:
        """Frees a chunk that has become empty; its number is not used again."""
        chunk.wait()
        chunk.wait_for_reader()
        self.copies.forget(chunk)
        chunk.give_back(self._pool)
        chunk.retire()

    def end_change(self, nbytes: Sequence[ChunkBytes]) -> None:
        """Ends it: whatever was recorded is of no use any more.

        Args:
            nbytes: The bytes of every chunk over all lists.
        """
        self._list_names = {name for chunk in self.chunks for name in chunk.lists}
        self.tracer.forget_chunks([chunk.copy_nbytes for chunk in self.chunks])
        self.copies.note_chunks()
        self._buckets.note_chunks()
        self._order.note_tensors(max(self.by_index, default=-1) + 1)
        self.placement.note_chunks(nbytes)
        self.values.version += 1

    def find(self, parameter: torch.Tensor) -> ManagedTensor | None:
        """The managed parameter that a parameter is, or ``None``."""
        tensor = self._by_parameter.get(id(parameter))
        return None if tensor is None or tensor.is_given_up else tensor

    # Steps

    def begin_forward(self, name: str, shapes: Shapes, present: Iterable[torch.Tensor]) -> None:
        """Begins a training step, or goes on with the one that runs.

        Args:
            name: The outermost module whose forward begins; empty for the model itself.
            shapes: Shapes of its inputs.
            present: Tensors on the device that are there already and are not chunks.
        """
        self._forget_failed_backward()
        self.writes.sync()
        if self.tracer.step is None:
            self.steps.settle()
            kind = f"{self.steps.kind}:{name}" if name else self.steps.kind
            is_last = self.steps.is_last
            self.placement.prepare("training", shapes)
            updated = frozenset(chunk.spec.index for chunk in self.chunks if chunk.spec.is_updated and is_last)
            self.steps.begin_step(kind, shapes, present, updated, self.version)

    def begin_evaluation(self, name: str, shapes: Shapes, present: Iterable[torch.Tensor]) -> None:
        """Begins a forward without gradients, between steps or inside of one; see ``begin_forward``."""
        self._forget_failed_backward()
        self.release_held_outside_forward()
        self.writes.sync()
        self.steps.settle()
        self.placement.prepare("", shapes)
        kind = f"evaluation:{name}" if name else "evaluation"
        self.steps.begin_nested_evaluation(kind, shapes, present, self.version)

    def _forget_failed_backward(self) -> None:
        """Drops the step whose backward raised: one that has begun and neither runs nor has ended."""
        if self.in_backward and torch._C._current_graph_task_id() == -1 and not is_backward_elsewhere():
            self.in_backward = False
            self.executor.take_home(self._buckets.forget())
            self.steps.forget_step()

    def unwind(self) -> None:
        """Ends every forward that is open on this thread, because it was interrupted."""
        stack = self.frames.stack
        self.steps.forget_step()
        while stack:
            frame = stack.pop()
            self.frames.end(frame)
            for tensor in frame.acquired:
                self.release(tensor, frame.stage)
            frame.leave_contexts()
            self.end_turn(frame)

    def end_turn(self, frame: Frame) -> None:
        """Ends the turn of a thread that an outermost forward has."""
        if frame.has_turn:
            frame.has_turn = False
            self.turns.give_up()

    # Access and release of parameters

    def acquire(self, tensor: ManagedTensor, module_name: str, *, is_alias: bool = False) -> None:
        """Gives a parameter its value, on the compute device, until it is released as often as it was acquired.

        Args:
            tensor: The parameter.
            module_name: Who asks, for errors.
            is_alias: Only keep its chunk on the device: whoever asks looks into that, and the parameter stays released.

        Raises:
            BudgetError: If its chunk cannot be brought to the device.
            EngineError: If the parameter is open (``full_parameters``), or was unfrozen since the engine was made.
        """
        if torch.is_inference_mode_enabled() or peek_interpreter_stack() is not None:
            # A payload made there could never be trained with, or would be a wrapper without storage.
            is_graph = torch.is_grad_enabled()
            with torch.inference_mode(False), torch.set_grad_enabled(is_graph), temporarily_clear_interpreter_stack():
                return self.acquire(tensor, module_name, is_alias=is_alias)
        pauses = None
        while True:
            try:
                with self._lock:
                    return self._acquire(tensor, module_name, is_alias)
            except DeviceMemoryError as error:
                pauses = iter(pauses_s()) if pauses is None else pauses
                pause_s = next(pauses)
                if not pause_s or error.__cause__ is not None:  # the system refused memory: no thread will let go of it
                    self.steps.give_up()
                    raise
                time.sleep(pause_s)

    def _acquire(self, tensor: ManagedTensor, module_name: str, is_alias: bool) -> None:
        if tensor.users == 0:
            if tensor.is_open:
                self.check_usable(tensor)
            if not tensor.spec.trainable:
                self._check_unfrozen(tensor)
            self.writes.take_over(tensor)
        payload = self._reach(tensor, module_name)
        tensor.read_at = tensor.num_writes
        if not is_alias and not tensor.is_materialized:
            tensor.materialize(payload)
        if tensor.users == 0:
            tensor.go(TensorState.COMPUTE)
            tensor.chunk.num_computing += 1
        tensor.users += 1

    def release(self, tensor: ManagedTensor, stage: Stage) -> None:
        """Ends one acquisition; after the last, the parameter is a placeholder again."""
        if peek_interpreter_stack() is not None:
            with temporarily_clear_interpreter_stack():
                return self.release(tensor, stage)
        with self._lock:
            tensor.users -= 1
            if tensor.users == 0:
                tensor.chunk.num_computing -= 1
                tensor.go(stage.to_released())
                if tensor.is_materialized:
                    self.writes.take_back(tensor)
        return None

    def release_held_outside_forward(self) -> None:
        """Takes back parameters that were read outside of every forward."""
        with self._lock:
            while self.held_outside_forward:
                self.release(self.held_outside_forward.pop(), Stage.FORWARD)

    def reach(self, tensor: ManagedTensor, who: str) -> torch.Tensor:
        """The payload to compute with, with this parameter's value; while it is aliased its chunk cannot leave.

        Args:
            tensor: The parameter.
            who: Who asks, for errors.
        """
        try:
            with self._lock:
                return self._reach(tensor, who)
        except DeviceMemoryError:
            self.steps.give_up()
            raise

    # Gradients

    def store_gradient(self, tensor: ManagedTensor, gradient: torch.Tensor, *, is_at_home: bool = False) -> None:
        """Takes a finished gradient to its place.

        Args:
            tensor: Whose gradient it is.
            gradient: The gradient of one backward, in the parameter's shape and type.
            is_at_home: Whether it was computed where the chunk is at home: then nothing crosses.
        """
        with self._lock:
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            if not tensor.spec.trainable:
                raise EngineError(_unfrozen(tensor))
            if tensor.read_at < tensor.num_writes - 1:
                raise EngineError(
                    f"a gradient arrived for parameter '{tensor.spec.name}', whose value was not read in this step nor "
                    "in the one before: what computed with it went around torch's functions and found NaN in its "
                    "place; let it read the parameter inside of the forward of the module that owns it, or in "
                    "full_parameters()"
                )
            self.gradient_mirrors.sync_one(tensor)
            if not self._is_alone:
                self._buckets.store(tensor, gradient)
            elif not self.gradients.attempts.is_counted(tensor.spec.index):
                if not (is_at_home or tensor.chunk.is_static):
                    tensor.crossing_nbytes += gradient.nbytes
                self.gradients.place(tensor, gradient)
                self.gradient_mirrors.refresh(tensor)
            if tensor.users == 0 and tensor.state is not TensorState.HOLD_AFTER_BWD:
                tensor.go(TensorState.HOLD_AFTER_BWD)
            if not self._is_alone:
                self.executor.reduce_when_due(tensor.chunk)

    def begin_backward(self) -> None:
        """Begins a backward; called from within, by whatever comes first."""
        self.turns.take_backward()
        self.in_backward = True
        self.writes.sync()
        self.apply_factor()  # what this backward adds is not clipped, or unscaled, with what is there

    def end_backward(self) -> None:
        """Settles what backward left: gradients put aside, and tensors that got none."""
        try:
            with named("end of backward"), self._lock:
                self._end_backward()
        finally:
            self.turns.give_up_backward()

    def _end_backward(self) -> None:
        self.release_held_outside_forward()
        if not self._is_alone:
            found = self.steps.end_phase(Phase.BACKWARD, self._buckets.unreduced, self._buckets.found)
            self.executor.take_home(self._buckets.settle(found))
            for index in found:
                if not self.by_index[index].is_owned:
                    self.gradients.note_remote(self.by_index[index])
                self.gradient_mirrors.drop(self.by_index[index])
        self.in_backward = False
        for tensor in self.tensors:
            if tensor.deferred_gradient is not None:
                self.gradients.settle(tensor)
            if tensor.state is TensorState.HOLD_AFTER_FWD or (
                tensor.state is TensorState.HOLD_AFTER_BWD and tensor.gradient is not GradientPlace.PARAM
            ):
                tensor.go(TensorState.HOLD)
        self._transfers.settle()
        self.steps.micro_batch += 1
        self.steps.finish_step()

    def undo_attempt(self) -> None:
        """Takes back what a failed attempt at a micro-batch left, and begins the next; see ``Attempts``."""
        with self._lock:
            self.in_backward = False
            self._transfers.settle()
            dropped = self.gradients.attempts.undo()
            for tensor in self.tensors:
                set_raw_grad(tensor.parameter, None)
                tensor.deferred_gradient, tensor.crossing_nbytes = None, 0
                if tensor.spec.index in dropped:
                    self.gradients.drop(tensor)

    def read_gradient(self, tensor: ManagedTensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy of a parameter's gradient on the host; with several processes all call it together."""
        self.gradient_mirrors.sync_one(tensor)
        return self.sharing.tensor(Held(tensor, self.gradients.of(tensor), dtype), "the gradient")

    def apply_factor(self) -> None:
        """Multiplies gradients with what the optimizer's step would multiply them with: somebody looks at them."""
        factor = self.gradients.take_factor()
        if factor is not None:
            for tensor in self.tensors:
                self.gradients.multiply(tensor, factor)
                self.gradient_mirrors.refresh(tensor)

    def begin_loading(self) -> None:
        """Begins to change values at home: gradients, and copies elsewhere, are dropped.

        Raises:
            EngineError: If a parameter is open.
        """
        self.unwind()
        for tensor in self.tensors:
            if tensor.is_open:
                self.check_usable(tensor)
        self.writes.sync()
        self.discard_gradients()
        with self._lock:
            for chunk in self.chunks:
                self.copies.invalidate(chunk)

    def end_loading(self) -> None:
        """Ends ``begin_loading``: graphs of before are void."""
        self.values.version += 1
        for tensor in self.tensors:
            tensor.num_writes += 1
            self.mirrors.refresh(tensor)

    def zero_gradients(self, tensors: Iterable[ManagedTensor], *, set_to_none: bool) -> None:
        """What ``zero_grad`` means for some parameters; see [Note: gradients after the step]."""
        self.discard_gradients(tensors, to_zero=not set_to_none)
        self.gradients.note_zeroed(self.chunks)

    def discard_gradients(self, tensors: Iterable[ManagedTensor] | None = None, *, to_zero: bool = False) -> None:
        """Drops gradients; parameters that were overwritten get their value back from ``master``.

        Args:
            tensors: Whose; all by default.
            to_zero: Whether those that were there are zero from now on.
        """
        with self._lock:
            self._forget_failed_backward()
            self.release_held_outside_forward()
            self.steps.settle()
            chosen = None if tensors is None else list(tensors)
            if chosen is not None and self.gradients.has_factor:
                dropped = {tensor.spec.index for tensor in chosen}
                if any(self.gradients.has(tensor) for tensor in self.tensors if tensor.spec.index not in dropped):
                    self.apply_factor()  # those of another optimizer, say, are clipped all the same
            self.gradients.coefficient = self.gradients.inverse_scale = None
            if self.tracer.step is None:
                self.steps.micro_batch = 0
            for tensor in self.tensors if chosen is None else chosen:
                if self.gradients.is_absent(tensor):
                    continue
                self.gradient_mirrors.sync_one(tensor)
                if not (to_zero and self.gradient_mirrors.zero(tensor)):
                    self.gradient_mirrors.drop(tensor)
                self.gradients.drop(tensor, to_zero=to_zero)

    # What the optimizer and the checkpoints do at the chunk's home

    def begin_update(self, chunks: Iterable[Chunk]) -> None:
        """Begins an optimizer's step: copies of what it will change are dropped, which makes room for its work.

        Args:
            chunks: What it will change.
        """
        self.unwind()
        with self._lock:
            for chunk in chunks:
                self.copies.invalidate(chunk)
            self.steps.begin_update()

    def finish_update(self, chunk: Chunk, updated: Container[int], *, keeps: bool) -> None:
        """Ends the optimizer's work on a chunk: new values at home.

        Args:
            chunk: The chunk.
            updated: Indices of the parameters that the optimizer has; gradients of others stay.
            keeps: Whether gradients stay too, in the accumulation list.
        """
        with self._lock:
            for tensor in chunk.tensors:
                if tensor.spec.index in updated and self.gradients.has(tensor):
                    tensor.num_writes += 1
                    self.gradients.finish_update(tensor, self.gradient_mirrors.kept(tensor), keeps=keeps)
                    self.mirrors.refresh(tensor)

    @property
    def in_backward(self) -> bool:
        """Whether a backward has begun that has not ended."""
        return self.executor.in_backward

    @in_backward.setter
    def in_backward(self, value: bool) -> None:
        """Sets it."""
        self.executor.in_backward = value

    @property
    def version(self) -> int:
        """Counts the changes of values: the same on all processes."""
        return self.values.version

    def finish_step(self) -> None:
        """Tells that the optimizer has changed the values, and lets chunks move to better homes."""
        self.values.version += 1
        self.num_steps += 1
        num_micro_batches, self.steps.micro_batch = self.steps.micro_batch, 0
        ledger = self.ledger
        self.step_peaks = (ledger.step_peak(Tier.DEVICE), ledger.total_step_peak, ledger.step_peak(Tier.HOST))
        ledger.begin_step()
        self.steps.forget_step()
        with named("placement"):
            self.placement.update(self.reclaim, num_micro_batches)
        for tensor in self.tensors:
            tensor.lookup_nbytes = 0

    def close(self) -> None:
        """Gives every payload back. Parameters must have their own storage again by then."""
        with self._lock:
            self.mirrors.close()
            self.gradient_mirrors.close()
            for tensor in self.tensors:
                self.originals.drop(tensor)
            self._transfers.settle()
            self._buckets.close()
            self.copies.close()
            self._meter.stop()
            for chunk in (chunk for chunk in self.chunks if not chunk.is_retired):
                chunk.wait()
                chunk.wait_for_reader()
                chunk.give_back(self._pool)
                chunk.lists.clear()
                chunk.compute = None
            self._pool.trim()
            self._transfers.close()

    # Inside

    def check_usable(self, tensor: ManagedTensor) -> None:
        """Refuses to use a parameter that is open.

        Raises:
            EngineError: If so.
        """
        if tensor.is_open:
            raise EngineError(
                f"parameter '{tensor.spec.name}' is open in full_parameters(); run the model after the block has ended"
            )

    def _check_unfrozen(self, tensor: ManagedTensor) -> None:
        """Refuses to compute with a frozen parameter whose gradient would stay on this process, and not be averaged.

        One that is unfrozen between forwards is adopted by then. Alone, autograd keeps the gradient of any other.

        Raises:
            EngineError: If so.
        """
        is_unfrozen = torch.is_grad_enabled() and requires_grad(tensor.parameter)
        if is_unfrozen and not self._is_alone and MASTER in self._list_names:
            raise EngineError(_unfrozen(tensor))

    def _reach(self, tensor: ManagedTensor, who: str) -> torch.Tensor:
        """The payload to compute with, holding this tensor's value."""
        if tensor.gradient is GradientPlace.PARAM and self._is_alone:
            self.gradients.move_to_list(tensor)
        return self.executor.ensure_on_device(tensor.chunk, who)


def _unfrozen(tensor: ManagedTensor) -> str:
    return (
        f"parameter '{tensor.spec.name}' was unfrozen inside of a forward, where the processes cannot agree on a place "
        "for its gradient; set requires_grad between two steps: before the model is called, or in a TrainerCallback "
        "(on_step_begin, on_epoch_begin)"
    )
