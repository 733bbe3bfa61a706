"""The chunk manager: brings chunks to where they are computed with, and gradients to where they are needed.

[Note: where things live]
Every chunk has a home tier with all its lists. A chunk at home on the host is copied to the device to be computed
with, and keeps its host storage meanwhile. Gradients go straight to the home, tensor by tensor, as autograd finishes
them. So a device copy is never dirty: evicting one drops it and copies nothing, device -> host carries exactly the
gradients, and after the optimizer has changed a home its device copy is stale and is dropped.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Literal

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from hf_patrickstar.errors import EngineError
from hf_patrickstar.events import Listener
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.memory.transfers import Transfers
from hf_patrickstar.runtime.chunk import MASTER, Chunk, GradientPlace, ManagedTensor
from hf_patrickstar.runtime.collectives import Collectives
from hf_patrickstar.runtime.gradients import Gradients
from hf_patrickstar.runtime.homes import Homes
from hf_patrickstar.runtime.live_parameter import raw_data, requires_grad, set_raw_grad
from hf_patrickstar.runtime.lockstep import Lockstep, Phase
from hf_patrickstar.runtime.mirrors import Mirrors, checksum_of
from hf_patrickstar.runtime.reducer import Reducer
from hf_patrickstar.runtime.sharing import Held, Sharing
from hf_patrickstar.runtime.steps import Steps
from hf_patrickstar.runtime.values import Values, same_bits
from hf_patrickstar.schedule.placement import ChunkBytes
from hf_patrickstar.schedule.trace import Shapes
from hf_patrickstar.states import Stage, TensorState


class ChunkManager:
    """Gives parameters their values and takes their gradients.

    Args:
        chunks: All chunks, with their payloads allocated.
        steps: Begins and ends steps, over what brings chunks to the compute device.
        pool: Where accumulation lists come from.
        transfers: How bytes cross.
        emit: Told of every event.
        num_micro_batches: Micro-batches per step; with more than one, gradients go to the accumulation list at once.
        collectives: Averages gradients over processes.
        lockstep: Keeps processes in the same order of collectives.
        keeps_gradients: Whether gradients stay after a step; see ``keep_gradients`` of the configuration.
    """

    def __init__(
        self,
        chunks: list[Chunk],
        steps: Steps,
        pool: PayloadPool,
        transfers: Transfers,
        emit: Listener,
        num_micro_batches: int,
        collectives: Collectives,
        lockstep: Lockstep,
        keeps_gradients: bool | Literal["auto"] = "auto",
    ) -> None:
        self.chunks = chunks
        self.steps = steps
        self.residency = residency = steps.residency
        self.tensors: list[ManagedTensor] = sorted(
            (tensor for chunk in chunks for tensor in chunk.tensors), key=lambda tensor: tensor.spec.index
        )
        self.by_index: dict[int, ManagedTensor] = {}
        self._by_parameter: dict[int, ManagedTensor] = {}
        self.index_tensors(self.tensors)
        self.borrowed: list[ManagedTensor] = []  # acquired by code in backward that no forward is around
        self.has_new_groups = False  # param groups were changed: parameters may need other lists
        self._watched: dict[ManagedTensor, int] = {}  # with a checksum, if there are several processes
        self.num_steps = 0  # of the optimizer
        self.step_peaks = (0, 0, 0)  # bytes in the last step: chunks on the device, all on the device, on the host
        self._num_micro_batches = num_micro_batches
        self._micro_batch = 0
        self._pool = pool
        self._transfers = transfers
        self._emit = emit
        self.homes: Homes | None = None
        self.unwind: Callable[[], None] = lambda: None  # ends forwards that were interrupted
        self.gradients = Gradients(
            pool, transfers, emit, residency.make_room, num_micro_batches > 1, lockstep.is_alone, keeps_gradients
        )
        self._lock = self.gradients.lock
        self._list_names = {name for chunk in chunks for name in chunk.lists}
        self.sharing = Sharing(collectives, lockstep)
        self.values = Values(self.gradients, self.sharing, transfers, residency.device)
        self.mirrors = Mirrors(self.values, self.gradients)
        self._is_alone = lockstep.is_alone
        self._lockstep = lockstep
        self._reducer = Reducer(chunks, pool, transfers, collectives, residency.make_room, self._deliver)
        residency.before_gather = self.gradients.bring_values_back
        residency.before_drop = self.look_for_writes
        residency.gradient_peak = self._reducer.take_peak
        lockstep.reduce = self._reduce

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
        self.sync()
        self.steps.forget_step()

    def add_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Adds chunks at the end of the chunk list."""
        self.chunks.extend(chunks)
        self.residency.note_chunks()

    def give_up(self, tensor: ManagedTensor, value: torch.Tensor) -> None:
        """Lets go of a parameter that somebody gave another shape; the engine takes it in again when it is used.

        Args:
            tensor: The parameter.
            value: What it has now.
        """
        self.mirrors.drop_values(tensor)
        self.mirrors.drop_gradient(tensor)
        self.gradients.drop(tensor)
        tensor.is_given_up = True
        tensor.unbind()
        tensor.parameter.data = value
        self._by_parameter.pop(id(tensor.parameter), None)

    def remove(self, tensor: ManagedTensor) -> None:
        """Removes a parameter, which is an ordinary one again; its chunk is freed if no other is in it."""
        with self._lock:
            self.mirrors.drop_values(tensor)
            self.mirrors.drop_gradient(tensor)
            self.gradients.drop(tensor)
            self._watched.pop(tensor, None)
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
        self.residency.forget(chunk)
        for name, payload in {"param": chunk.param, **chunk.lists}.items():
            self._pool.release(chunk.home, payload, name, keep=False)
        chunk.retire()

    def end_change(self, nbytes: Sequence[ChunkBytes]) -> None:
        """Ends it: whatever was recorded is of no use any more.

        Args:
            nbytes: The bytes of every chunk over all lists.
        """
        self._list_names = {name for chunk in self.chunks for name in chunk.lists}
        self.residency.tracer.forget_chunks([chunk.copy_nbytes for chunk in self.chunks])
        self.residency.note_chunks()
        self._reducer.note_chunks()
        self._lockstep.note_tensors(max(self.by_index, default=-1) + 1)
        if self.homes is not None:
            self.homes.note_chunks(nbytes)
        self.values.version += 1

    def find(self, parameter: torch.Tensor) -> ManagedTensor | None:
        """The managed parameter that a parameter is, or ``None``."""
        return self._by_parameter.get(id(parameter))

    # Steps

    def begin_forward(self, name: str, shapes: Shapes, present: Iterable[torch.Tensor]) -> None:
        """Begins a training step, or goes on with the one that runs.

        Args:
            name: The outermost module whose forward begins; empty for the model itself.
            shapes: Shapes of its inputs.
            present: Tensors on the device that are there already and are not chunks.
        """
        self._forget_failed_backward()
        self.sync()
        if self.residency.tracer.step is None:
            self.steps.settle()
            kind, is_last = self._kind_of_step()
            kind = f"{kind}:{name}" if name else kind
            if self.homes is not None:
                self.homes.prepare("training", shapes)
            updated = frozenset(chunk.spec.index for chunk in self.chunks if chunk.spec.is_updated and is_last)
            self.steps.begin_step(kind, shapes, present, updated, self.version)

    def begin_evaluation(self, name: str, shapes: Shapes, present: Iterable[torch.Tensor]) -> None:
        """Begins a forward without gradients, between steps or inside of one; see ``begin_forward``."""
        self._forget_failed_backward()
        self.release_borrowed()
        self.sync()
        self.steps.settle()
        if self.homes is not None:
            self.homes.prepare("", shapes)
        kind = f"evaluation:{name}" if name else "evaluation"
        self.steps.begin_interlude(kind, shapes, present, self.version)

    def _forget_failed_backward(self) -> None:
        """Drops the step whose backward raised: one that has begun and neither runs nor has ended."""
        if self.in_backward and torch._C._current_graph_task_id() == -1:
            self.in_backward = False
            self._reducer.forget()
            self.steps.forget_step()

    def _kind_of_step(self) -> tuple[str, bool]:
        """What the micro-batch that begins is, and whether the optimizer follows it."""
        if self._num_micro_batches == 1:
            return "training", True
        if self._micro_batch == 0:
            return "training first", False
        is_last = self._micro_batch == self._num_micro_batches - 1
        return ("training last" if is_last else "training middle"), is_last

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
        if torch.is_inference_mode_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
            # A payload made there could never be trained with, or would be a wrapper without storage.
            with torch.inference_mode(False), temporarily_clear_interpreter_stack():
                return self.acquire(tensor, module_name, is_alias=is_alias)
        with self._lock:
            if tensor.users == 0:
                self.check_usable(tensor)
                self.take_over(tensor)
            payload = self._reach(tensor, module_name)
            tensor.read_at = self.num_steps
            if not is_alias and not tensor.is_materialized:
                tensor.materialize(tensor.view_copy(payload))
                tensor.version = tensor.parameter._version
            if tensor.users == 0:
                tensor.go(TensorState.COMPUTE)
                tensor.chunk.num_computing += 1
            tensor.users += 1
        return None

    def release(self, tensor: ManagedTensor, stage: Stage) -> None:
        """Ends one acquisition; after the last, the parameter is a placeholder again."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            with temporarily_clear_interpreter_stack():
                return self.release(tensor, stage)
        with self._lock:
            tensor.users -= 1
            if tensor.users == 0:
                tensor.chunk.num_computing -= 1
                tensor.go(stage.to_released())
                if tensor.is_materialized:
                    self._take_back(tensor)
        return None

    def _take_back(self, tensor: ManagedTensor) -> None:
        """Ends a parameter's having a value, and takes over what was written to it meanwhile."""
        value, storage = raw_data(tensor.parameter), tensor.chunk.storage
        assert storage is not None
        if tuple(value.shape) != tensor.spec.shape:
            self.give_up(tensor, value)
            return
        version = tensor.parameter._version
        tensor.dematerialize()
        if value.untyped_storage()._cdata != storage._cdata or version != tensor.version:
            self.write(tensor, value, voids_graphs=False)
        elif tensor in self._watched:
            self._look_for_writes(tensor)

    def watch(self, tensor: ManagedTensor) -> None:
        """Looks for what is written to a device copy without a trace: by ``.data``, or a view that outlives its use."""
        if tensor not in self._watched:
            self._watched[tensor] = self._checksum_of_copy(tensor)

    def _checksum_of_copy(self, tensor: ManagedTensor) -> int:
        """With several processes all find out by it what was written, wherever the value is at home."""
        compute = tensor.chunk.compute
        return 0 if self._is_alone or compute is None else checksum_of(tensor.view_copy(compute))

    def _look_for_writes(self, tensor: ManagedTensor) -> None:
        chunk = tensor.chunk
        if chunk.compute is not None and (tensor.gradient is not GradientPlace.PARAM or not self._is_alone):
            value = tensor.view_copy(chunk.compute)
            if self._is_alone:
                home = self.values.own_part(tensor, value.dtype) if MASTER not in chunk.lists else self._master(tensor)
                is_written = not same_bits(value.to(home.device), home)
            else:
                before, self._watched[tensor] = self._watched[tensor], self._checksum_of_copy(tensor)
                is_written = before != self._watched[tensor]
            if is_written:
                self.write(tensor, value, voids_graphs=False)
        if not chunk.is_aliased:  # else it may still be written to
            self._watched.pop(tensor, None)

    def _master(self, tensor: ManagedTensor) -> torch.Tensor:
        """The value in the parameter's type, from ``master``: a static chunk has no other place to compare with."""
        return tensor.view(tensor.chunk.lists[MASTER]).to(tensor.chunk.param.dtype)

    def look_for_writes(self, chunk: Chunk | None = None) -> None:
        """Takes over what was written to device copies without a trace.

        Args:
            chunk: The chunk whose copy is about to be dropped; all by default.
        """
        if self._watched:
            with self._lock:
                for tensor in [t for t in self._watched if chunk is None or t.chunk is chunk]:
                    self._look_for_writes(tensor)
                    if chunk is not None:
                        self._watched.pop(tensor, None)

    def release_borrowed(self) -> None:
        """Takes back parameters that were read outside of every forward."""
        with self._lock:
            while self.borrowed:
                self.release(self.borrowed.pop(), Stage.FORWARD)

    def reach(self, tensor: ManagedTensor, who: str) -> torch.Tensor:
        """The payload to compute with, with this parameter's value; while it is aliased its chunk cannot leave.

        Args:
            tensor: The parameter.
            who: Who asks, for errors.
        """
        with self._lock:
            return self._reach(tensor, who)

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
            if tensor.read_at < self.num_steps - 1:
                raise EngineError(
                    f"a gradient arrived for parameter '{tensor.spec.name}', whose value was not read in this step nor in "
                    "the one before: what computed with it went around torch's functions and found NaN in its place; "
                    "let it read the parameter inside of the forward of the module that owns it, or in full_parameters()"
                )
            self.mirrors.sync_gradient(tensor)
            if not self._is_alone:
                self._reducer.store(tensor, gradient)
            elif not self.gradients.attempts.is_counted(tensor.spec.index):
                if not (is_at_home or tensor.chunk.is_static):
                    tensor.crossing_nbytes += gradient.numel() * gradient.dtype.itemsize
                self.gradients.place(tensor, gradient)
                self.mirrors.refresh_gradient(tensor)
            if tensor.users == 0 and tensor.state is not TensorState.HOLD_AFTER_BWD:
                tensor.go(TensorState.HOLD_AFTER_BWD)
            if not self._is_alone and self._reducer.is_complete(tensor.chunk):
                self.residency.offer(tensor.chunk, self._reducer.is_complete)

    def begin_backward(self) -> None:
        """Begins a backward; called from within, by whatever comes first."""
        self.in_backward = True
        self.sync()

    def end_backward(self) -> None:
        """Settles what backward left: gradients put aside, and tensors that got none."""
        with self._lock:
            self.release_borrowed()
            if not self._is_alone:
                found = self.steps.end_phase(Phase.BACKWARD, self._reducer.unreduced, self._reducer.found)
                self._reducer.settle(found)
                for index in found:
                    if not self.by_index[index].is_owned:
                        self.gradients.note_remote(self.by_index[index])
                    self.mirrors.drop_gradient(self.by_index[index])
            self.in_backward = False
            for tensor in self.tensors:
                if tensor.aside is not None:
                    self.gradients.settle(tensor)
                if tensor.state is TensorState.HOLD_AFTER_FWD or (
                    tensor.state is TensorState.HOLD_AFTER_BWD and tensor.gradient is not GradientPlace.PARAM
                ):
                    tensor.go(TensorState.HOLD)
            self._transfers.settle()
            self._micro_batch += 1
            self.steps.finish_step()

    def undo_attempt(self) -> None:
        """Takes back what a failed attempt at a micro-batch left, and begins the next; see ``Attempts``."""
        with self._lock:
            self.in_backward = False
            self._transfers.settle()
            dropped = self.gradients.attempts.undo()
            for tensor in self.tensors:
                set_raw_grad(tensor.parameter, None)
                tensor.aside, tensor.crossing_nbytes = None, 0
                if tensor.spec.index in dropped:
                    self.gradients.drop(tensor)

    def look_up(self, tensor: ManagedTensor) -> torch.Tensor:
        """The value of an embedding at its home, to look rows up there (PatrickStar section 8.2).

        Args:
            tensor: The parameter; its chunk is at home on the host.

        Returns:
            A leaf that aliases the home, in the parameter's shape; its gradient belongs to the parameter.
        """
        with self._lock:
            if tensor.users == 0:
                self.check_usable(tensor)
                self.take_over(tensor)
            tensor.read_at = self.num_steps
            if tensor.gradient is GradientPlace.PARAM:
                self.gradients.move_to_list(tensor)
            tensor.chunk.wait()
            tensor.is_looked_up = True
            leaf = tensor.view(tensor.chunk.param).detach()
            return leaf.requires_grad_(tensor.spec.trainable and torch.is_grad_enabled())

    def end_look_up(self, tensor: ManagedTensor, leaf: torch.Tensor, version: int, nbytes: int) -> None:
        """Ends a lookup of so many bytes; an embedding with ``max_norm`` writes to the rows that it reads."""
        tensor.lookup_nbytes += nbytes
        if leaf._version != version:
            self.write(tensor, leaf.detach(), voids_graphs=False)

    def read_gradient(self, tensor: ManagedTensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy of a parameter's gradient on the host; with several processes all call it together."""
        self.mirrors.sync_gradient(tensor)
        return self.sharing.tensor(Held(tensor, self.gradients.of(tensor), dtype), "the gradient")

    def write(self, tensor: ManagedTensor, value: torch.Tensor, *, voids_graphs: bool = True) -> None:
        """Changes the value of a parameter, in every place where it is; see ``Values.write``."""
        self.values.write(tensor, value, voids_graphs=voids_graphs)
        self.mirrors.refresh_value(tensor)

    def follow_master(self, tensor: ManagedTensor) -> None:
        """Lets the value of a parameter follow a change of its fp32 master."""
        self.write(tensor, tensor.view(tensor.chunk.lists[MASTER]))

    def take_over(self, tensor: ManagedTensor, *, keeps_unused: bool = False) -> None:
        """Takes over what a user wrote to one parameter without a trace: to what was handed out, or around torch's functions.

        Args:
            tensor: The parameter.
            keeps_unused: As for ``Mirrors.sync_value``.
        """
        if not (tensor.is_materialized or tensor.is_open or tensor.is_placeholder):
            value = raw_data(tensor.parameter)
            tensor.dematerialize()
            self.assign(tensor, value)
        self.mirrors.sync_value(tensor, keeps_unused=keeps_unused)

    def assign(self, tensor: ManagedTensor, value: torch.Tensor) -> None:
        """What ``parameter.data = value`` means: in torch both are the same memory from now on.

        Args:
            tensor: The parameter.
            value: A tensor that requires no gradient.

        """
        if tuple(value.shape) != tensor.spec.shape:
            self.give_up(tensor, value)
            return
        with self._lock:
            self.mirrors.drop_values(tensor)
            self.write(tensor, value, voids_graphs=False)
            if value.dtype == tensor.chunk.param.dtype:
                self.mirrors.add_value(tensor, value)

    def sync(self) -> None:
        """Takes over what users wrote without a trace, before values are used."""
        self.look_for_writes()
        self.mirrors.sync()

    def apply_factor(self) -> None:
        """Multiplies gradients with what the optimizer's step would multiply them with: somebody looks at them."""
        factor = self.gradients.take_factor()
        if factor is not None:
            for tensor in self.tensors:
                self.gradients.multiply(tensor, factor)
                self.mirrors.refresh_gradient(tensor)

    def begin_loading(self) -> None:
        """Begins to change values at home: gradients, and copies elsewhere, are dropped.

        Raises:
            EngineError: If a parameter is open.
        """
        self.unwind()
        for tensor in self.tensors:
            if tensor.is_open:
                self.check_usable(tensor)
        self.sync()
        self.discard_gradients()
        with self._lock:
            for chunk in self.chunks:
                self.residency.drop(chunk)

    def end_loading(self) -> None:
        """Ends ``begin_loading``: graphs of before are void."""
        self.values.version += 1
        for tensor in self.tensors:
            tensor.num_writes += 1
            self.mirrors.refresh_value(tensor)

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
            self.release_borrowed()
            self.steps.settle()
            self.gradients.coefficient = self.gradients.inverse_scale = None
            if self.residency.tracer.step is None:
                self._micro_batch = 0
            for tensor in self.tensors if tensors is None else tensors:
                self.mirrors.sync_gradient(tensor)
                if not (to_zero and self.mirrors.zero_gradient(tensor)):
                    self.mirrors.drop_gradient(tensor)
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
                self.residency.drop(chunk)
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
                    self.gradients.finish_update(tensor, self.mirrors.kept_gradient(tensor), keeps=keeps)
                    self.mirrors.refresh_value(tensor)

    @property
    def in_backward(self) -> bool:
        """Whether a backward has begun that has not ended."""
        return self.residency.in_backward

    @in_backward.setter
    def in_backward(self, value: bool) -> None:
        """Sets it."""
        self.residency.in_backward = value

    @property
    def dtype(self) -> torch.dtype:
        """Type of the ``param`` list."""
        return self.chunks[0].param.dtype if self.chunks else torch.float32

    @property
    def version(self) -> int:
        """Counts the changes of values: the same on all processes."""
        return self.values.version

    def finish_step(self) -> None:
        """Tells that the optimizer has changed the values, and lets chunks move to better homes."""
        self.values.version += 1
        self.num_steps += 1
        num_micro_batches, self._micro_batch = self._micro_batch, 0
        ledger = self.residency.ledger
        self.step_peaks = (ledger.step_peak(Tier.DEVICE), ledger.total_step_peak, ledger.step_peak(Tier.HOST))
        ledger.begin_step()
        self.steps.forget_step()
        if self.homes is not None:
            self.homes.update(num_micro_batches)
        for tensor in self.tensors:
            tensor.lookup_nbytes = 0

    def close(self) -> None:
        """Gives every payload back. Parameters must have their own storage again by then."""
        with self._lock:
            self.mirrors.close()
            self._transfers.settle()
            self._reducer.close()
            self.residency.close()
            for chunk in (chunk for chunk in self.chunks if not chunk.is_retired):
                chunk.wait()
                chunk.wait_for_reader()
                for name, payload in {"param": chunk.param, **chunk.lists}.items():
                    self._pool.release(chunk.home, payload, name, keep=False)
                chunk.lists.clear()
                chunk.compute = None
            self._pool.trim()
            self._transfers.close()

    # Inside

    def check_usable(self, tensor: ManagedTensor) -> None:
        """Refuses to use a parameter that is open, or that says that it is trained and cannot be.

        Raises:
            EngineError: If so.
        """
        if tensor.is_open:
            raise EngineError(
                f"parameter '{tensor.spec.name}' is open in full_parameters(); run the model after the block has ended"
            )
        if not tensor.spec.trainable and torch.is_grad_enabled() and requires_grad(tensor.parameter):
            if MASTER in self._list_names:
                raise EngineError(_unfrozen(tensor))

    def _reach(self, tensor: ManagedTensor, who: str) -> torch.Tensor:
        """The payload to compute with, holding this tensor's value."""
        if tensor.gradient is GradientPlace.PARAM and self._is_alone:
            self.gradients.move_to_list(tensor)
        return self.residency.reach(tensor.chunk, who)

    def _reduce(self, index: int) -> None:
        self._reducer.reduce(self.chunks[index])
        self.residency.tracer.note_reduced(index)

    def _deliver(self, tensor: ManagedTensor, average: torch.Tensor) -> None:
        """Takes an average over processes to its place at home."""
        if tensor.chunk.home is Tier.HOST:
            tensor.crossing_nbytes += average.numel() * average.dtype.itemsize
        self.mirrors.sync_gradient(tensor)
        self.gradients.add(tensor, average)
        self.mirrors.drop_gradient(tensor)


def _unfrozen(tensor: ManagedTensor) -> str:
    return (
        f"parameter '{tensor.spec.name}' was frozen when the engine was made and has no optimizer state; to train it, "
        "call model.patrickstar_engine.detach(), set requires_grad, and prepare the model again"
    )
