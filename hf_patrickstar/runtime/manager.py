"""What happens when, on one page: every phase of a step, in the order in which it reads, and what is done between.

``ModelHooks`` and ``Autograd`` translate what torch tells into these calls (``ModelListener``), the optimizer makes
those of an update, and nobody below calls back. The constructor makes the parts, each of those before it: its lines
are the layers.

[Note: where things live]
Every chunk has a home tier with all its lists. A chunk at home on the host is copied to the device to be computed
with, and keeps its host storage meanwhile. Gradients go straight to the home, tensor by tensor, as autograd finishes
them. So a device copy is never dirty: evicting one drops it and copies nothing, device -> host carries exactly the
gradients, and after the optimizer has changed a home its device copy is stale and is dropped.
"""

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch

from hf_patrickstar.common.stage import Stage
from hf_patrickstar.counts import Counts
from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.dist.order import Beginning, Order
from hf_patrickstar.dist.sharing import Held, Sharing
from hf_patrickstar.errors import BudgetError
from hf_patrickstar.layout.specs import TensorSpec
from hf_patrickstar.memory.driver import Pending
from hf_patrickstar.memory.meters import Meter
from hf_patrickstar.memory.operators import unseen
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.streams import Copy, DeviceStreams, Streams
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.model.live_parameter import GET_GRAD, RAW, SET_GRAD, set_raw_grad, take_raw_grad
from hf_patrickstar.model.lock import EngineLock
from hf_patrickstar.runtime.activations import Activations, KeptActivation
from hf_patrickstar.runtime.autograd import drop_failed_graph
from hf_patrickstar.runtime.chunk import Chunk, Device
from hf_patrickstar.runtime.executor import Executor
from hf_patrickstar.runtime.frames import Call, Frame, Frames, Lookup
from hf_patrickstar.runtime.gradients import Gradients
from hf_patrickstar.runtime.groups import Groups
from hf_patrickstar.runtime.home_mover import HomeMover
from hf_patrickstar.runtime.mirrors import GradientMirrors, ValueMirrors, Writes
from hf_patrickstar.runtime.parameter import GradientPlace, ManagedParameter
from hf_patrickstar.runtime.parameters import Parameters, SavedView
from hf_patrickstar.runtime.ranges import named, phase
from hf_patrickstar.runtime.rest import Rest
from hf_patrickstar.runtime.steps import Estimated, MovePolicy, Steps
from hf_patrickstar.runtime.update import Update
from hf_patrickstar.schedule.estimate import Estimate
from hf_patrickstar.schedule.placement import ChunkBytes
from hf_patrickstar.schedule.trace import KnownTraces, Shapes, StepKind, Trace

_MOST_ESTIMATES = 3
"""How often a step is estimated, at most: where embeddings are looked up may change what it does."""


class ChunkManager:
    """The parts of the runtime of one engine, and the phases in which they work together.

    Args:
        chunks: All chunks, with their payloads allocated; the list may grow.
        pool: Gives buffers, and has the ledger.
        meter: Measures non-model bytes on the device.
        streams: How bytes cross.
        collectives: The processes.
        counts: What is counted.
        policy: How copies come and go.
        estimate: What decides where chunks live.
        margin: Chunks at home on the device because the host has no room for them.
        reserve: Makes the optimizer allocate its workspace on a tier where it will update chunks.
        advise: Says what helps where the device has no room.
        num_micro_batches: How many make a step of the optimizer.
        keeps_gradients: Whether gradients stay after a step; see ``keep_gradients`` of the configuration.
        checks_all: Agree on every collective of a plan before it is done (debugging).
        known: Traces of a plan, if there is one.

    Attributes:
        engine: The engine, for those who find its parameters in a model.
        lock: Held by the thread that runs a forward, a backward or an update.
        frames: The forwards that run on this thread.
        has_new_groups: Whether param groups were changed, so that parameters may need other lists.
        overlaps_updates: Whether chunks at home on the host are updated beside what comes next.
    """

    def __init__(
        self,
        *,
        chunks: list[Chunk],
        pool: PayloadPool,
        meter: Meter,
        streams: Streams,
        collectives: Collectives,
        counts: Counts,
        policy: MovePolicy,
        estimate: Estimate,
        margin: Sequence[int],
        reserve: Callable[[Sequence[Chunk], Tier], None],
        advise: Callable[[], str],
        num_micro_batches: int,
        keeps_gradients: bool | Literal["auto"],
        checks_all: bool,
        known: KnownTraces,
    ) -> None:
        self.engine: Any = None
        self.chunks, self.counts, self.ledger = chunks, counts, pool.ledger
        self._pool, self._meter, self._streams = pool, meter, streams
        order = Order(collectives, checks_all=checks_all)
        self.sharing = Sharing(collectives)
        self.device = device = Device(chunks, pool, meter, streams, self.sharing, counts)
        self._lock = device.lock
        self.mirrors = ValueMirrors(device)
        # Where chunks are, and how they move.
        self.steps = steps = Steps(device, order, policy, num_micro_batches, known)
        self.activations = activations = Activations(device, estimate.offload)
        self.evictor = evictor = HomeMover(device, steps, estimate, margin, activations, reserve, advise)
        evictor.settle_lookups(known.lookups)
        # Where gradients are.
        self.gradients = Gradients(device, evictor, num_micro_batches > 1, keeps_gradients)
        self.gradient_mirrors = GradientMirrors(device, self.gradients)
        self.writes = Writes(self.gradients, self.mirrors, self.gradient_mirrors)
        self._groups: Groups | None = None
        if collectives.world_size > 1:
            self._groups = Groups(device, collectives, steps, evictor, self.gradients, self.gradient_mirrors)
        self.executor = executor = self._groups or Executor(device, steps, evictor)
        # What happens when.
        self.lock, self.frames = EngineLock(), Frames()
        self.parameters = Parameters(device, executor, self.gradients, self.writes, self.lock, activations)
        self.rest = Rest(
            device, steps, activations, self.parameters, self.writes, self.gradients, self.gradient_mirrors
        )
        self.tensors, self.by_index = self.parameters.tensors, self.parameters.by_index
        self.pack = self.parameters.pack
        self.has_new_groups = False
        self.overlaps_updates = policy.overlaps_updates and isinstance(streams, DeviceStreams)
        self._last_updates: list[Copy] = []  # on the host, beside what comes next

    @property
    def resting(self) -> tuple[frozenset[int], bool]:
        """See ``ModelListener``."""
        return self.device.resting, self.device.is_resting

    def find(self, parameter: torch.Tensor) -> ManagedParameter | None:
        """See ``Parameters.find``."""
        return self.parameters.find(parameter)

    @property
    def in_order_of_use(self) -> list[Chunk]:
        """The chunks in the order in which the next forward comes to them; those that no step has visited come last.

        Embeddings that are looked up at home come first: steps do not visit their chunks.
        """
        order, num = self.steps.chunk_order, len(self.chunks)
        first = {
            place
            for place, chunk in enumerate(self.chunks)
            for tensor in chunk.tensors
            if tensor.lookup != "device" and chunk.home is Tier.HOST
        }
        ranks = [order.get(chunk.spec.index, num) for chunk in self.chunks]
        places = sorted([(-1 if place in first else rank, place) for place, rank in enumerate(ranks)])
        return [self.chunks[place] for _, place in places]

    # Forward

    @phase
    def before_forward(self, call: Call, shapes: Shapes, present: Iterable[torch.Tensor]) -> None:
        """An outermost forward begins: of training, which may go on with a step that runs, or an evaluation.

        Args:
            call: The call of its outermost module.
            shapes: Shapes of its inputs.
            present: Tensors on the device that are there already and are not chunks.

        Raises:
            Exception: See ``settle_failures``.
        """
        self.settle_failures()
        self.take_gradients()
        self.rest.follow(call, is_new=self._begin_step(call, shapes, present))
        if self.device.resting:
            self.rest.give_values()

    def _begin_step(self, call: Call, shapes: Shapes, present: Iterable[torch.Tensor]) -> bool:
        """Begins a step, unless a step of training goes on; returns whether one of training has begun."""
        if self.steps.asks_padding and call.is_training:
            self.steps.note_padding(call.has_padding)
        if not call.is_training:
            self.parameters.release_held_outside_forward()
        self.writes.sync()
        if call.is_training and self.steps.step is not None:
            return False
        self.steps.stop_idle_meter()
        if call.is_training:
            self.gradients.completes_step = self.steps.is_last_micro_batch
        title = self.steps.title_of(call.name, is_training=call.is_training)
        agreed = self._agree(call, title, shapes)
        if not call.is_training:
            self.steps.begin_nested_evaluation(title, agreed, present)
            return False
        step = self.steps.begin_micro_batch(title, agreed, present)
        trace = None if step.cursor is None else step.cursor.trace
        lacks_room = trace is not None and self.steps.policy.has_plans and step.plan is None
        self.activations.begin(None if step.plan is None else trace, lacks_room=lacks_room)
        return True

    def _agree(self, call: Call, title: str, shapes: Shapes) -> Beginning:
        """What a step that begins has to work with; if its trace is not known, what it will do is found out first."""
        steps, version = self.steps, self.device.version
        agreed = steps.agree(title, shapes, version)
        if steps.covers(title, agreed.shapes):
            return agreed
        has_changed = self._make_ready(call, title, agreed.shapes)
        if not steps.order.is_alone:  # all ask again, or none; for a step that is recorded there is nothing to ask
            has_changed = steps.estimator is not None and bool(agreed.shapes)
        return steps.agree(title, agreed.shapes, version) if has_changed else agreed

    def _make_ready(self, call: Call, title: str, shapes: Shapes) -> bool:
        """No trace is known for a step that begins: finds out what it will do, or makes room for what it may need."""
        if self._estimate(call, title, shapes):
            return True
        with self._lock:
            return self.evictor.prepare(shapes, is_training=StepKind.of(title).is_training)

    def _estimate(self, call: Call, title: str, shapes: Shapes) -> bool:
        """Takes traces that are made before the step begins; chunks move to the homes that are best for it."""
        own: Sequence[Trace] = ()
        for _ in range(_MOST_ESTIMATES):
            estimated = self.steps.estimate(call, title, shapes)
            if estimated is None:
                break
            self._learn(estimated)
            if self.steps.covers(title, shapes):
                own = estimated.traces
                break
        agreed = self.steps.agree_on_estimated(own, shapes)
        if agreed and agreed != own:
            self._learn(Estimated(agreed, {}, is_exact=False))
        if agreed and not self.steps.order.is_alone and self.steps.step is None:  # the same on all processes
            with self._lock:
                self.evictor.choose_offload(self.steps.order.agree_on_offload)
                self.evictor.update_homes(self.steps.num_micro_batches, is_estimated=True)
        return bool(agreed)

    def _learn(self, estimated: Estimated) -> None:
        self.steps.learn(estimated.traces)
        self.steps.least = estimated.least or self.steps.least
        if self.steps.step is not None:
            return  # inside of a step no chunk moves home
        for index, nbytes in estimated.lookup_nbytes.items():
            self.by_index[index].lookup_nbytes = nbytes * self.steps.num_micro_batches
        with self._lock:
            num = self.steps.num_micro_batches
            is_certain = estimated.is_exact and self.steps.order.is_alone  # a rank that fails alone is waited for
            try:
                self.evictor.update_homes(num, is_estimated=True, is_certain=is_certain)
            except BudgetError as error:
                error.more = self.evictor.what_helps()
                raise
        for tensor in self.tensors:
            tensor.lookup_nbytes = 0

    @phase
    def after_forward(self, frame: Frame, *, has_failed: bool) -> None:
        """An outermost forward has ended; a step of training goes on with its backward."""
        try:
            if self.device.resting and frame.has_lock:
                self.rest.take_values()
            if self._groups is not None and frame.stage is not Stage.BACKWARD and not has_failed:
                self._groups.end_phase(frame.stage)
            if frame.stage is Stage.EVALUATION:
                self.steps.end_nested_evaluation(is_whole=not has_failed)
            elif frame.stage is Stage.FORWARD and has_failed:
                self.abandon_step()
            elif frame.stage is Stage.FORWARD:
                self.steps.end_forward()
                if self.activations.has_begun:
                    self.activations.end_forward()
        finally:
            self._release_lock(frame)

    @phase
    def before_module(self, frame: Frame, own: Sequence[ManagedParameter], name: str) -> None:
        """A module is about to compute with its own parameters."""
        if torch._C._len_torch_dispatch_stack():  # the meter's mode may be among them
            self._meter.note_autocast()
        self.parameters.acquire_all(own, name, frame.acquired, is_recomputed=frame.stage is Stage.BACKWARD)

    @phase
    def after_module(self, frame: Frame) -> None:
        """A module has computed; its chunks may leave, unless somebody looks into them."""
        if frame.replaced:
            self.frames.end(frame)
        if frame.acquired:
            self.parameters.release_all(frame.acquired)

    @phase
    def lookup_begin(self, tensor: ManagedParameter) -> Lookup:
        """An embedding is about to read rows of its weight where that is at home, on the host."""
        return self.parameters.begin_lookup(tensor)

    @phase
    def lookup_end(self, lookup: Lookup, nbytes: int) -> None:
        """It has read so many bytes."""
        self.parameters.end_lookup(lookup, nbytes)

    def unwind(self) -> None:
        """Every forward that is open on this thread was interrupted, and ends."""
        self.abandon_step()
        self.rest.take_values(is_last=True)
        while self.frames.stack:
            frame = self.frames.stack.pop()
            self.after_module(frame)
            frame.leave_contexts()
            self._release_lock(frame)

    def abandon_step(self) -> None:
        """Drops a step that came to nothing."""
        if self.activations.has_begun:
            self.activations.end_backward()
        self.steps.abandon()

    def _release_lock(self, frame: Frame) -> None:
        if frame.has_lock:
            frame.has_lock = False
            self.lock.release()

    # Backward

    def is_parameter(self, key: int) -> bool:
        """Whether the value of a parameter is in the storage with this address."""
        return key in self.device.by_storage

    @phase
    def operand_needed(self, saved: SavedView | KeptActivation) -> torch.Tensor:
        """Backward needs an operand; its chunk is brought to the device, and stays while somebody looks into it."""
        return self.activations.bring(saved) if isinstance(saved, KeptActivation) else self.parameters.unpack(saved)

    @phase
    def backward_begin(self, end: Callable[[], None]) -> None:
        """A backward begins; called from within, by what it needs or finishes first.

        Args:
            end: What autograd calls when it has ended.
        """
        self.lock.acquire_backward(end)
        self.executor.in_backward = True
        self.writes.sync()
        if self.device.resting:
            self.rest.give_values(in_backward=True)
        self.apply_factor()  # what this backward adds is not clipped, or unscaled, with what is there

    def store_gradient(self, tensor: ManagedParameter, gradient: torch.Tensor, *, is_at_home: bool = False) -> None:
        """Autograd has finished the gradient of a parameter; it goes to its home, or to the bucket of its group.

        Args:
            tensor: Whose gradient it is.
            gradient: The gradient of one backward, in the parameter's shape and type.
            is_at_home: Whether it was computed where the chunk is at home: then nothing crosses.

        Raises:
            EngineError: If the parameter is frozen, or was computed with while it had no value.
        """
        with self._lock:
            if not tensor.spec.trainable or tensor.read_at < tensor.num_writes - 1:
                self.parameters.check_gradient(tensor)
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            is_mirrored = tensor.spec.index in self.gradient_mirrors.by_tensor
            if is_mirrored:
                self.gradient_mirrors.sync_one(tensor)
            if self._groups is not None:
                self._groups.store(tensor, gradient)
            else:
                self.gradients.store(tensor, gradient, is_at_home=is_at_home)
                if is_mirrored:
                    self.gradient_mirrors.refresh(tensor)

    gradient_ready = phase(store_gradient)

    def recorded_gradient_ready(self, tensor: ManagedParameter, gradient: torch.Tensor) -> None:
        """Autograd has finished a gradient that has a graph itself, as in ``backward(create_graph=True)``."""
        if tensor.chunk.is_group:
            self.gradient_ready(tensor, gradient)
            return
        parameter: Any = tensor.parameter
        before = parameter.grad
        total = gradient.to(tensor.original_dtype) if before is None else before + gradient
        with unseen():
            self.gradient_ready(tensor, gradient.detach())
            self.gradient_mirrors.follow_recorded(tensor, total)

    @phase
    def backward_end(self) -> None:
        """A backward has ended: what it left is reduced and settled, and the micro-batch is counted."""
        with self._end_of_backward():
            if self.device.resting:
                self.rest.take_values()
            self.parameters.release_held_outside_forward()
            for index in self._groups.end_backward() if self._groups is not None else ():
                tensor = self.by_index[index]
                if not tensor.is_owned:
                    self.gradients.note_remote(tensor)
                self.gradient_mirrors.forget(tensor)
            self.executor.in_backward = False
            self.gradients.settle_deferred(self.tensors)
            self._streams.release_in_flight()
            if self.activations.has_begun:
                self.activations.end_backward()
            self.steps.end_micro_batch()
            self.take_gradients()  # from now on chunks may make room for lists

    def take_gradients(self) -> None:
        """Takes the gradients that backwards have left with autograd, while the engine rests."""
        for tensor, gradient in self.rest.take_gradients() if self.device.is_resting else ():
            if gradient.requires_grad:
                self.recorded_gradient_ready(tensor, gradient)
            else:
                self.store_gradient(tensor, gradient)

    @contextlib.contextmanager
    def _end_of_backward(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        finally:
            self.lock.release_backward()

    def settle_failures(self) -> None:
        """A forward or a step begins: it reports an update that failed, and drops a step whose backward did.

        Raises:
            Exception: What the update of a chunk raised, if all updates have ended and nobody has got the error. What
                begins may use that chunk late, or not at all.
        """
        updates = self._last_updates
        if updates and all(update.is_done for update in updates):
            self._last_updates = []
            for update in updates:
                update.wait()
        self.abandon_failed_backward()

    def abandon_failed_backward(self) -> None:
        """Drops the step whose backward raised: one that has begun and neither runs nor has ended."""
        if self.executor.in_backward and torch._C._current_graph_task_id() == -1 and not self.lock.has_backward:
            self.executor.in_backward = False
            drop_failed_graph()
            self.rest.take_values(is_last=True)
            if self._groups is not None:
                self._groups.abandon_backward()
            self.abandon_step()
            for tensor in self.tensors:
                # What the backward has left with autograd. A parameter that was frozen when chunks were made keeps its
                # gradient there until it is adopted.
                gradient = take_raw_grad(tensor.parameter) if tensor.spec.trainable else None
                if gradient is not None and not tensor.chunk.is_group:
                    self.gradients.store(tensor, gradient)

    def apply_factor(self) -> None:
        """Multiplies gradients with what the optimizer's step would multiply them with: somebody looks at them."""
        factor = self.gradients.take_factor()
        if factor is not None:
            for tensor in self.tensors:
                self.gradients.multiply(tensor, factor)
                self.gradient_mirrors.refresh(tensor)

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
            with self.ledger.one_reading():
                for chunk in chunks:
                    if chunk.compute is not None and not chunk.is_static:
                        chunk.invalidate()
            self.steps.begin_update([chunk.spec.index for chunk in chunks], optimizer_index)

    @phase
    def before_update(self, chunks: Sequence[Chunk]) -> None:
        """The optimizer comes to chunks; a checkpoint that is being written from them goes first."""
        self.steps.visit_for_update(chunks)
        for chunk in chunks:
            if chunk.reader is not None:
                chunk.wait_for_reader()

    def leave_alone(self, tensor: ManagedParameter, factor: torch.Tensor | None) -> None:
        """Keeps the gradient and the value of a parameter that the optimizer does not have.

        Args:
            tensor: The parameter.
            factor: What gradients are multiplied with, or ``None``.
        """
        if factor is not None:
            self.gradients.multiply(tensor, factor)
            self.gradient_mirrors.refresh(tensor)
        self.gradients.move_to_list(tensor)

    def update(self, updates: Sequence[Update], updated: Container[int], *, keeps: bool, runs_beside: bool) -> None:
        """The optimizer updates chunks; see [Note: an update under way].

        Args:
            updates: What it does, in the order in which chunks are needed next.
            updated: Indices of the parameters that the optimizer has.
            keeps: Whether their gradients stay, in the accumulation list.
            runs_beside: Whether updates on the host may run in other threads, beside what comes next.

        Raises:
            Exception: What the update of one of the chunks raised, or an earlier one of theirs.
        """
        pending: dict[int, Pending | None] = {}
        left = dict(enumerate(updates))
        try:
            for number, update in enumerate(updates):
                is_on_host = runs_beside and self.overlaps_updates and update.chunks[0].home is Tier.HOST
                if is_on_host or update.stream is not None:
                    for chunk in [chunk for chunk in update.chunks if chunk.update is not None]:
                        chunk.wait_for_update()  # an earlier one may have begun, or not
                    ticket: Copy | None = update.stream
                    if ticket is None:
                        after = [other for chunk in update.chunks for other in chunk.under_way]
                        ticket = self._streams.on_host(update.run, after, update.give_up)
                        if ticket is not None:
                            self._last_updates.append(ticket)
                    for chunk in update.chunks:
                        chunk.update = ticket
                    del left[number]
                    if ticket is not None and not self.overlaps_updates:
                        ticket.wait()
                    continue
                for chunk in update.chunks:
                    if chunk.update is not None or chunk.tickets:
                        chunk.wait()
                pending[number] = update.run()
            for number, found in pending.items():
                if found is not None:
                    found.wait()
                del left[number]
        except Exception:
            for found in filter(None, pending.values()):
                found.future.exception()  # what has been begun is done to its end, unless it fails, too
            raise
        finally:
            for number, update in list(left.items()):
                found = pending.get(number)
                if number not in pending or (found is not None and not found.cancel()):
                    update.take_back()
                    if found is None or not found.is_begun:
                        continue  # it can be done again
                    update.restore()
                del left[number]
            done = [chunk for number, update in enumerate(updates) if number not in left for chunk in update.chunks]
            self.chunks_updated(done, updated, keeps=keeps)

    @phase
    def chunks_updated(self, chunks: Sequence[Chunk], updated: Container[int], *, keeps: bool) -> None:
        """The optimizer has written new values at the homes of chunks.

        Args:
            chunks: The chunks.
            updated: Indices of the parameters that the optimizer has; gradients of others stay.
            keeps: Whether gradients stay too, in the accumulation list.
        """
        had, handed_out, none = [], {}, GradientPlace.NONE
        read, mirrored = self.gradient_mirrors.by_tensor, self.mirrors.by_tensor
        with self._lock:
            for chunk in chunks:
                for tensor in chunk.tensors:
                    index = tensor.spec.index
                    if index in updated and (tensor.gradient is not none or tensor.deferred_gradient is not None):
                        tensor.num_writes += 1
                        had.append(tensor)
                        if index in read:
                            handed_out[index] = self.gradient_mirrors.kept(tensor)
            if self.device.keeps_values:  # graphs keep parameters themselves
                torch.autograd.graph.increment_version([tensor.parameter for tensor in had])
            self.gradients.finish_update(had, handed_out, keeps=keeps)
            for tensor in had if mirrored else ():
                self.mirrors.refresh(tensor)

    @phase
    def update_end(self) -> None:
        """The optimizer has changed all values; chunks may move to better homes."""
        self.gradients.note_step()
        self.device.version += 1
        if self.activations.has_begun:
            self.activations.end_backward()
        num_micro_batches = self.steps.end_update()
        with named("placement"), self._lock:
            self.evictor.update_homes(num_micro_batches)
        for tensor in self.tensors:
            tensor.lookup_nbytes = 0

    def place_of(self, index: int) -> tuple[TensorSpec, Sequence[tuple[int, int]]]:
        """A parameter by its index, and the elements of it that each rank has at home."""
        tensor = self.by_index[index]
        return tensor.spec, tensor.parts

    # Changes of the model

    def begin_change(self) -> None:
        """Begins to add and remove parameters: no step runs, and nothing that was written is missed."""
        self.unwind()
        self.take_gradients()
        self.rest.end()
        self.writes.sync()
        self.abandon_step()

    def add_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Adds chunks at the end of the chunk list."""
        self.chunks.extend(chunks)
        self.device.note_chunks()

    def remove(self, tensor: ManagedParameter) -> None:
        """Removes a parameter, which is an ordinary one again; its chunk is freed if no other is in it."""
        with self._lock:
            self.writes.forget(tensor)
            tensor.drop_original()
            tensor.num_writes += 1  # a graph of before cannot find its operands any more
            chunk = tensor.chunk
            chunk.remove(tensor)
            self.parameters.forget(tensor)
            if not chunk.tensors:
                chunk.retire(self._pool)

    def end_change(self, nbytes: Sequence[ChunkBytes]) -> None:
        """Ends it: whatever was recorded is of no use any more.

        Args:
            nbytes: The bytes of every chunk over all lists.
        """
        self.steps.note_chunks([chunk.copy_nbytes for chunk in self.chunks])
        self.device.note_chunks()
        if self._groups is not None:
            self._groups.note_chunks()
        self.evictor.note_chunks(nbytes)
        self.device.version += 1

    # Gradients between steps

    def read_gradient(self, tensor: ManagedParameter, dtype: torch.dtype) -> torch.Tensor:
        """A copy of a parameter's gradient on the host; with several processes all call it together."""
        self.gradient_mirrors.sync_one(tensor)
        return self.sharing.tensor(Held(tensor.spec, tensor.parts, self.gradients.of(tensor), dtype), "the gradient")

    def zero_gradients(self, parameters: Iterable[torch.Tensor], *, set_to_none: bool) -> None:
        """What ``zero_grad`` means for parameters, in chunks or not; see [Note: gradients after the step]."""
        tensors, others = self.parameters.find_all(parameters)
        self.discard_gradients(tensors, to_zero=not set_to_none)
        self.gradients.note_zeroed(self.chunks)
        for parameter in others:
            if parameter.grad is not None and set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    @unseen()
    def discard_gradients(self, tensors: Iterable[ManagedParameter] | None = None, *, to_zero: bool = False) -> None:
        """Drops gradients; parameters that were overwritten get their value back from ``master``.

        Args:
            tensors: Whose; all by default.
            to_zero: Whether those that were there are zero from now on.
        """
        with self._lock:
            self.abandon_failed_backward()
            self.parameters.release_held_outside_forward()
            self.steps.stop_idle_meter()
            chosen = None if tensors is None else list(tensors)
            if chosen is not None and self.gradients.has_factor:
                dropped = {tensor.spec.index for tensor in chosen}
                if any(tensor.has_gradient for tensor in self.tensors if tensor.spec.index not in dropped):
                    self.apply_factor()  # those of another optimizer, say, are clipped all the same
            self.gradients.coefficient = self.gradients.inverse_scale = None
            if self.steps.step is None:
                self.steps.micro_batch = 0
            mirrored = self.gradient_mirrors.by_tensor
            for tensor in self.tensors if chosen is None else chosen:
                if tensor.spec.trainable:
                    with RAW():
                        if GET_GRAD(tensor.parameter) is not None:  # a backward that failed has left it there
                            SET_GRAD(tensor.parameter, None)
                if tensor.gradient is GradientPlace.NONE and tensor.deferred_gradient is None:
                    if not tensor.is_consumed:
                        continue
                    if not (to_zero or tensor.spec.index in mirrored):
                        tensor.is_consumed = tensor.is_incomplete = False
                        continue
                self.gradient_mirrors.sync_one(tensor)
                if not (to_zero and self.gradient_mirrors.zero(tensor)):
                    self.gradient_mirrors.forget(tensor)
                self.gradients.drop(tensor, to_zero=to_zero)

    def undo_attempt(self) -> None:
        """Takes back what a failed attempt at a micro-batch left, and begins the next; see ``Attempts``."""
        with self._lock:
            self.executor.in_backward = False
            drop_failed_graph()
            self._streams.release_in_flight()
            dropped = self.gradients.attempts.undo()
            for tensor in self.tensors:
                set_raw_grad(tensor.parameter, None)
                tensor.deferred_gradient, tensor.crossing_nbytes = None, 0
                if tensor.spec.index in dropped:
                    self.gradients.drop(tensor)

    # Loading, and the end

    def begin_loading(self) -> None:
        """Begins to change values at home: gradients, and copies elsewhere, are dropped.

        Raises:
            EngineError: If a parameter is open.
        """
        self.unwind()
        for tensor in self.tensors:
            self.parameters.check_usable(tensor)
        self.writes.sync()
        self.discard_gradients()
        with self._lock:
            for chunk in self.chunks:
                chunk.invalidate()
                chunk.wait_for_reader()

    def load(self, tensor: ManagedParameter, fill: Callable[[torch.Tensor], None]) -> None:
        """See ``ManagedParameter.load``; what another thread has been handed out meanwhile follows at once."""
        with self._lock:
            tensor.load(fill)
            self.mirrors.refresh(tensor)

    def end_loading(self) -> None:
        """Ends ``begin_loading``: graphs of before are void."""
        self.device.version += 1
        for tensor in self.tensors:
            tensor.num_writes += 1
            self.mirrors.refresh(tensor)

    def close(self) -> None:
        """Gives every payload back. Parameters must have their own storage again by then."""
        with self._lock:
            self.mirrors.close()
            self.gradient_mirrors.close()
            for tensor in self.tensors:
                tensor.drop_original()
            self._streams.release_in_flight()
            if self._groups is not None:
                self._groups.close()
            self.gradients.close()
            self.activations.close()
            for chunk in self.device.copies:
                chunk.drop_copy()
            self.device.by_storage.clear()
            self._meter.stop()
            for chunk in (chunk for chunk in self.chunks if not chunk.is_retired):
                chunk.wait()
                chunk.wait_for_reader()
                chunk.give_back(self._pool)
                chunk.lists.clear()
                chunk.compute, chunk.is_updated = None, False
            if self._pool.disk is not None:
                self._pool.disk.close()
            self.parameters.index([])  # optimizers go on with parameters like any others
            self._pool.trim()
            self._streams.close()
