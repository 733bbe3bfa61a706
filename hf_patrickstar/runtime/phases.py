"""What happens when, on one page: every phase of a step, in the order in which it reads.

``ModelHooks`` and ``Autograd`` translate what torch tells into these calls, the optimizer makes those of an update, and
nobody below calls back. A load goes from here to the step (what does the plan say now?), to the executor (evict, load,
gather) and to the copies. A gradient goes from here to the bucket of its group, where there are several processes, and
to its home.

[Note: where things live]
Every chunk has a home tier with all its lists. A chunk at home on the host is copied to the device to be computed
with, and keeps its host storage meanwhile. Gradients go straight to the home, tensor by tensor, as autograd finishes
them. So a device copy is never dirty: evicting one drops it and copies nothing, device -> host carries exactly the
gradients, and after the optimizer has changed a home its device copy is stale and is dropped.
"""

import contextlib
from collections.abc import Container, Iterable, Iterator, Sequence

import torch

from hf_patrickstar.dist.order import Phase
from hf_patrickstar.memory.streams import Copy, Streams
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import Chunk, ManagedTensor
from hf_patrickstar.runtime.cpu_embeddings import CpuEmbeddings
from hf_patrickstar.runtime.data import Data
from hf_patrickstar.runtime.executor import Services
from hf_patrickstar.runtime.frames import Frame, Frames, Lookup
from hf_patrickstar.runtime.operands import Operands, SavedView
from hf_patrickstar.runtime.parameters import Parameters
from hf_patrickstar.runtime.placement import Placement
from hf_patrickstar.runtime.ranges import named, phase
from hf_patrickstar.runtime.steps import Foreseen, Steps
from hf_patrickstar.runtime.turns import Turns, is_backward_elsewhere
from hf_patrickstar.runtime.update import Update
from hf_patrickstar.schedule.trace import Shapes, StepKind, Trace
from hf_patrickstar.states import Stage

_MOST_FORESEEN = 3
"""How often a step is foreseen, at most: where embeddings are looked up may change what it does."""


class Phases:
    """The phases of steps.

    Args:
        services: What loads and evicts.
        steps: Begins and ends steps.
        placement: Moves chunks to better homes.
        data: The places where values and gradients are.
        parameters: Finds parameters, and gives them their values.
        turns: Which thread runs a forward, a backward or an update.
        streams: How bytes cross.

    Attributes:
        turns: The same.
        frames: The forwards that run on this thread.
    """

    def __init__(
        self,
        services: Services,
        steps: Steps,
        placement: Placement,
        data: Data,
        parameters: Parameters,
        turns: Turns,
        streams: Streams,
    ) -> None:
        self.turns = turns
        self.frames = Frames()
        self._copies, self._reclaim, self._tracer = services.copies, services.reclaim, services.tracer
        self._steps = steps
        self._executor = steps.executor
        self._ledger = services.pool.ledger
        self._placement = placement
        self._values, self._writes, self._mirrors = data.values, data.writes, data.mirrors
        self._gradients, self._gradient_mirrors = data.gradients, data.gradient_mirrors
        self._buckets = data.buckets
        self._parameters = parameters
        self._operands = Operands(parameters, services.copies, steps)
        self._cpu_embeddings = CpuEmbeddings(parameters, data.gradients, data.writes)
        self._streams = streams
        self._overlaps_updates = services.policy.overlaps_updates
        self._last_update: Copy | None = None  # on the host, beside what comes next
        self._lock = data.gradients.lock

    # Forward

    @phase
    def before_forward(self, stage: Stage, name: str, shapes: Shapes, present: Iterable[torch.Tensor]) -> None:
        """An outermost forward begins: of training, which may go on with a step that runs, or an evaluation.

        Args:
            stage: ``FORWARD`` or ``EVALUATION``.
            name: The outermost module; empty for the model itself.
            shapes: Shapes of its inputs.
            present: Tensors on the device that are there already and are not chunks.

        Raises:
            Exception: See ``settle_failures``.
        """
        self.settle_failures()
        is_evaluation = stage is Stage.EVALUATION
        if is_evaluation:
            self._parameters.release_held_outside_forward()
        self._writes.sync()
        if is_evaluation:
            self._steps.stop_idle_meter()
            self._steps.begin_nested_evaluation(name, shapes, present, self._values.version, self._make_ready)
        elif self._tracer.step is None:
            self._steps.stop_idle_meter()
            self._gradients.completes_step = self._steps.is_last_micro_batch
            self._steps.begin_step(name, shapes, present, self._values.version, self._make_ready)

    def _make_ready(self, title: str, shapes: Shapes) -> bool:
        """No trace is known for a step that begins: finds out what it will do, or makes room for what it may need."""
        if self._foresee(title, shapes):
            return True
        with self._lock:
            return self._placement.prepare(shapes, is_training=StepKind.of(title).is_training)

    def _foresee(self, title: str, shapes: Shapes) -> bool:
        """Takes traces that are made before the step begins; chunks move to the homes that are best for it."""
        own: Sequence[Trace] = ()
        for _ in range(_MOST_FORESEEN):
            foreseen = self._steps.foresee(title, shapes)
            if foreseen is None:
                break
            self._learn(foreseen)
            if self._tracer.covers(title, shapes):
                own = foreseen.traces
                break
        agreed = self._steps.agree_on_foreseen(own, shapes)
        if agreed and agreed != own:
            self._learn(Foreseen(agreed, {}, is_exact=False))
        return bool(agreed)

    def _learn(self, foreseen: Foreseen) -> None:
        self._tracer.learn(foreseen.traces)
        if self._tracer.step is not None:
            return  # inside of a step no chunk moves home
        for index, nbytes in foreseen.lookup_nbytes.items():
            self._parameters.by_index[index].lookup_nbytes = nbytes * self._steps.num_micro_batches
        with self._lock:
            num = self._steps.num_micro_batches
            is_certain = foreseen.is_exact and self._steps.order.is_alone  # a rank that fails alone is waited for
            self._placement.update(self._reclaim, num, is_foreseen=True, is_certain=is_certain)
        for tensor in self._parameters.tensors:
            tensor.lookup_nbytes = 0

    @phase
    def after_forward(self, frame: Frame, *, has_failed: bool) -> None:
        """An outermost forward has ended; a step of training goes on with its backward."""
        try:
            if frame.stage is Stage.EVALUATION:
                self._steps.end_nested_evaluation(is_whole=not has_failed)
            elif frame.stage is Stage.FORWARD and has_failed:
                self._steps.abandon_step()
            elif frame.stage is Stage.FORWARD:
                self._steps.end_forward()
        finally:
            self._end_turn(frame)

    @phase
    def before_module(self, frame: Frame, own: Sequence[ManagedTensor], name: str) -> None:
        """A module is about to compute with its own parameters."""
        self._parameters.acquire_all(own, name, frame.acquired, is_recomputed=frame.stage is Stage.BACKWARD)

    @phase
    def after_module(self, frame: Frame) -> None:
        """A module has computed; its chunks may leave, unless somebody looks into them."""
        if frame.replaced:
            self.frames.end(frame)
        if frame.acquired:
            self._parameters.release_all(frame.acquired)

    @phase
    def lookup_begin(self, tensor: ManagedTensor) -> Lookup:
        """An embedding is about to read rows of its weight where that is at home, on the host."""
        return self._cpu_embeddings.begin(tensor)

    @phase
    def lookup_end(self, lookup: Lookup, nbytes: int) -> None:
        """It has read so many bytes."""
        self._cpu_embeddings.end(lookup, nbytes)

    def unwind(self) -> None:
        """Every forward that is open on this thread was interrupted, and ends."""
        self._steps.abandon_step()
        while self.frames.stack:
            frame = self.frames.stack.pop()
            self.after_module(frame)
            frame.leave_contexts()
            self._end_turn(frame)

    def _end_turn(self, frame: Frame) -> None:
        if frame.has_turn:
            frame.has_turn = False
            self.turns.give_up()

    # Backward

    @phase
    def operand_saved(self, operand: torch.Tensor) -> torch.Tensor | SavedView:
        """Autograd keeps an operand for backward: numbers, where it lives in a chunk."""
        return self._operands.pack(operand)

    @phase
    def operand_needed(self, saved: torch.Tensor | SavedView) -> torch.Tensor:
        """Backward needs an operand; its chunk is brought to the device, and stays while somebody looks into it."""
        return self._operands.unpack(saved)

    @phase
    def backward_begin(self) -> None:
        """A backward begins; called from within, by what it needs or finishes first."""
        self.turns.take_backward()
        self._executor.in_backward = True
        self._writes.sync()
        self.apply_factor()  # what this backward adds is not clipped, or unscaled, with what is there

    @phase
    def gradient_ready(self, tensor: ManagedTensor, gradient: torch.Tensor, *, is_at_home: bool = False) -> None:
        """Autograd has finished the gradient of a parameter; it goes to its home, or to the bucket of its group.

        Args:
            tensor: Whose gradient it is.
            gradient: The gradient of one backward, in the parameter's shape and type.
            is_at_home: Whether it was computed where the chunk is at home: then nothing crosses.

        Raises:
            EngineError: If the parameter is frozen, or was computed with while it had no value.
        """
        with self._lock:
            self._parameters.check_gradient(tensor)
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            self._gradient_mirrors.sync_one(tensor)
            self._buckets.store(tensor, gradient, is_at_home=is_at_home)
            self._executor.reduce_when_due(tensor.chunk)

    @phase
    def backward_end(self) -> None:
        """A backward has ended: what it left is reduced and settled, and the micro-batch is counted."""
        with self._end_of_backward():
            self._parameters.release_held_outside_forward()
            found = self._steps.end_phase(Phase.BACKWARD, self._buckets.unreduced, self._buckets.found)
            self._executor.take_home(self._buckets.finish(found))
            for tensor in map(self._parameters.by_index.__getitem__, found):  # with several processes
                if not tensor.is_owned:
                    self._gradients.note_remote(tensor)
                self._gradient_mirrors.drop(tensor)
            self._executor.in_backward = False
            self._place_deferred_gradients()
            self._streams.release_in_flight()
            self._steps.end_micro_batch()

    @contextlib.contextmanager
    def _end_of_backward(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        finally:
            self.turns.give_up_backward()

    def _place_deferred_gradients(self) -> None:
        """Finds a place for gradients that waited until the values in their places were not needed any more."""
        for tensor in self._parameters.tensors:
            if tensor.deferred_gradient is not None:
                self._gradients.place_deferred(tensor)

    def settle_failures(self) -> None:
        """A forward or a step begins: it reports an update that failed, and drops a step whose backward did.

        Raises:
            Exception: What the update of a chunk raised, if all updates have ended and nobody has got the error. What
                begins may use that chunk late, or not at all.
        """
        update = self._last_update
        if update is not None and update.is_done:
            self._last_update = None
            update.wait()
        self.abandon_failed_backward()

    def abandon_failed_backward(self) -> None:
        """Drops the step whose backward raised: one that has begun and neither runs nor has ended."""
        if self._executor.in_backward and torch._C._current_graph_task_id() == -1 and not is_backward_elsewhere():
            self._executor.in_backward = False
            self._executor.take_home(self._buckets.abandon())
            self._steps.abandon_step()
            for tensor in self._parameters.tensors:
                gradient = self._gradients.take_unstored(tensor)
                if gradient is not None and not tensor.chunk.is_group:
                    self._gradients.place(tensor, gradient)

    def apply_factor(self) -> None:
        """Multiplies gradients with what the optimizer's step would multiply them with: somebody looks at them."""
        factor = self._gradients.take_factor()
        if factor is not None:
            for tensor in self._parameters.tensors:
                self._gradients.multiply(tensor, factor)
                self._gradient_mirrors.refresh(tensor)

    # The optimizer's step

    @phase
    def update_begin(self, chunks: Sequence[Chunk], optimizer_index: int = 0) -> None:
        """An optimizer begins: copies of what it will change are dropped, which makes room for its work.

        Args:
            chunks: What it will change, in order.
            optimizer_index: Which optimizer.
        """
        self.unwind()
        with self._lock:
            with self._ledger.one_reading():
                for chunk in chunks:
                    self._copies.invalidate(chunk)
            self._steps.begin_update([chunk.spec.index for chunk in chunks], optimizer_index)

    @phase
    def before_update(self, chunk: Chunk) -> None:
        """The optimizer comes to a chunk; a checkpoint that is being written from it goes first."""
        self._steps.visit_for_update(chunk)
        chunk.wait_for_reader()

    def leave_alone(self, tensor: ManagedTensor, factor: torch.Tensor | None) -> None:
        """Keeps the gradient and the value of a parameter that the optimizer does not have.

        Args:
            tensor: The parameter.
            factor: What gradients are multiplied with, or ``None``.
        """
        if factor is not None:
            self._gradients.multiply(tensor, factor)
            self._gradient_mirrors.refresh(tensor)
        self._gradients.move_to_list(tensor)

    def update(self, chunks: Sequence[Chunk], update: Update, *, may_run_beside: bool) -> None:
        """The optimizer updates chunks that have the same home; see [Note: an update under way].

        Args:
            chunks: The chunks.
            update: What it does.
            may_run_beside: Whether it may run in another thread, beside what comes next.

        Raises:
            Exception: What the update of one of these chunks, or an earlier one, raised.
        """
        is_beside = self._overlaps_updates and may_run_beside and chunks[0].home is Tier.HOST
        try:
            if is_beside:
                after = [other for chunk in chunks for other in chunk.under_way]
                self._last_update = self._streams.on_host(update, after, update.give_up)
                for chunk in chunks:
                    chunk.update = self._last_update
            else:
                if chunks[0].home is Tier.HOST and self._last_update is not None:
                    self._last_update.wait()  # kernels have one workspace on a tier
                for chunk in chunks:
                    chunk.wait()
                update.run()
        except BaseException:  # it was not done, or not to its end, and can be done again
            update.take_back()
            raise

    @phase
    def chunk_updated(self, chunk: Chunk, updated: Container[int], *, keeps: bool) -> None:
        """The optimizer has written new values at the home of a chunk.

        Args:
            chunk: The chunk.
            updated: Indices of the parameters that the optimizer has; gradients of others stay.
            keeps: Whether gradients stay too, in the accumulation list.
        """
        with self._lock:
            for tensor in chunk.tensors:
                if tensor.spec.index in updated and self._gradients.has(tensor):
                    tensor.num_writes += 1
                    self._gradients.finish_update(tensor, self._gradient_mirrors.kept(tensor), keeps=keeps)
                    self._mirrors.refresh(tensor)

    @phase
    def update_end(self) -> None:
        """The optimizer has changed all values; chunks may move to better homes."""
        self._gradients.note_step()
        self._values.version += 1
        num_micro_batches = self._steps.end_update()
        with named("placement"), self._lock:
            self._placement.update(self._reclaim, num_micro_batches)
        for tensor in self._parameters.tensors:
            tensor.lookup_nbytes = 0
