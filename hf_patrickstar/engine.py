"""The engine: prepare, forward, backward and step of one model, on one page.

The constructor decides on numbers first (specs -> budgets -> layout -> homes) and allocates every payload. Only then it
moves values and attaches hooks, so a construction that fails leaves the model as it was.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from hf_patrickstar.checkpoint.checkpoints import Checkpoints
from hf_patrickstar.checkpoint.first_values import FirstValues
from hf_patrickstar.checkpoint.training_state import TrainingState
from hf_patrickstar.checkpoint.weight_files import is_in_model_file
from hf_patrickstar.checkpoint.weights import ChunkWeights
from hf_patrickstar.config import ConfigSource, PatrickStarConfig
from hf_patrickstar.counts import Counts
from hf_patrickstar.errors import ConfigError, EngineError
from hf_patrickstar.membership import Membership, check_optimizers, holders
from hf_patrickstar.memory.operators import unseen
from hf_patrickstar.memory.streams import Streams
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.model.admission import check_compiled
from hf_patrickstar.model.chunked_loss import LOGIT_NBYTES, chunk_losses, find_heads
from hf_patrickstar.model.live_parameter import set_raw_data
from hf_patrickstar.model.model_set import roots_of
from hf_patrickstar.model.quantized import buffers_of
from hf_patrickstar.optim.kernel import Kernel, Means
from hf_patrickstar.optim.optimizer import ChunkedOptimizer
from hf_patrickstar.optim.threads import choose_threads
from hf_patrickstar.optim.torch_kernel import OWN_STATE, make_kernel
from hf_patrickstar.optim.workers import HostWorkers
from hf_patrickstar.report.survey import Survey, take_survey
from hf_patrickstar.runtime.chunk import Chunk
from hf_patrickstar.runtime.hooks import ModelHooks
from hf_patrickstar.runtime.live_model import LiveModel
from hf_patrickstar.runtime.live_tensor import managers_of
from hf_patrickstar.runtime.manager import ChunkManager
from hf_patrickstar.runtime.parameter import ValuePlace
from hf_patrickstar.runtime.recovery import MAX_RETRIES, Recovery
from hf_patrickstar.runtime.steps import MovePolicy
from hf_patrickstar.schedule.trace import KnownTraces, Trace
from hf_patrickstar.setup.decisions import list_names
from hf_patrickstar.setup.homes import Situation
from hf_patrickstar.setup.needs import decide, remedies
from hf_patrickstar.setup.payloads import Payloads
from hf_patrickstar.setup.resources import Resources
from hf_patrickstar.tracing.estimator import make_estimator
from hf_patrickstar.tracing.kept_traces import find_traces

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_Model = TypeVar("_Model", bound=torch.nn.Module)


class PatrickStarEngine:
    """Trains a model whose model data lives in chunks (PatrickStar sections 5 and 6).

    The model is changed in place and stays the user's model: same class, same modules, same ``Parameter`` objects.
    While the engine is attached, a parameter has its shape and type, but storage only while a module computes with it.
    A parameter is in one engine. Another engine is detached if its model is a part of this one, or this one a part of
    it, or if it has parameters of the optimizer; its own optimizers go on as torch's, also if this engine fails.

    Args:
        model: The model, on the host or on the compute device; several that share an optimizer are given as one
            ``ModelSet`` and stay models of their own.
        config: Settings; a ``PatrickStarConfig``, dictionary, JSON text or path.
        optimizer: A torch optimizer over the model's parameters, or several; the engine takes over their states.
            ``None`` makes an engine for evaluation, or for an optimizer that comes later: it has no optimizer states,
            and masters only if they are needed to restore the model.
        device: The compute device; by default the current accelerator if there is one, else the CPU tier. Or
            ``Streams`` that stand in for those of a device, to simulate it.
        gradient_accumulation_steps: Micro-batches per step. With more than one, gradients have their own chunk list
            from the start (4 bytes more per parameter). It is a hint: results are right for any pattern of calls.
        precision: ``"no"``, ``"bf16"`` or ``"fp16"``: what ``dtype="auto"`` follows.
        on_decided: Called with what was decided, in one line, before anything is allocated.
        process_group: The processes that train together, each with its part of the data; by default the default group
            of ``torch.distributed``, if that is initialised. Each process must make the engine, for the same model. Or
            a function that makes collectives that stand in for them (see ``Resources.find``), to simulate them.

    Raises:
        ConfigError: If a setting cannot work for this model.
        BudgetError: If a budget is too small; the message says for what, and by how much.
        EngineError: If the model cannot be managed (no trainable parameter, meta parameters), or an optimizer is not
            one over its parameters.

    Attributes:
        counts: What it has done so far; ``stats`` returns these numbers and others.
        logged: What ``stats`` returned when a Trainer last logged it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: ConfigSource = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        device: torch.device | str | Streams | None = None,
        gradient_accumulation_steps: int = 1,
        precision: str = "no",
        on_decided: Callable[[str], object] | None = None,
        process_group: Any = None,
    ) -> None:
        self.model = model
        self.config = PatrickStarConfig.from_any(config)
        self._num_micro_batches = max(gradient_accumulation_steps, 1)
        self.counts = Counts()
        self.logged: Mapping[str, Any] = {}
        given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else [*(optimizer or ())]
        check_optimizers(model, given)
        self._heads = find_heads(model) if self.config.chunked_loss is True else []
        gradients = _take_over(model, given)
        self.resources = Resources.find(self.config, device, process_group, self._make_room, self.counts)
        self.device, self.collectives = self.resources.device, self.resources.collectives
        self.ledger = self.resources.ledger
        num_threads, said = choose_threads(self.config.host_threads, self.collectives.num_core_sharers, os.environ)
        logger.info("patrickstar: %s", said)
        self._workers = HostWorkers(num_threads)
        self._means = Means(
            self.resources.pool,
            self.resources.has_lanes,
            is_alone=self.collectives.world_size == 1,
            state_dtype=self.config.state_dtype,
            prefer_fused=self.device.type != "cpu",
            workers=self._workers,
            num_threads=None if self.config.host_threads == "auto" else int(self.config.host_threads),
        )
        self._kernels: list[Kernel] = [make_kernel(item, self._means) for item in given]
        situation = Situation(self.config, self.resources, self._kernels, holders(given), self._num_micro_batches)
        weakref.finalize(self, self.collectives.close)  # the process group has threads and sockets
        self._decisions = decide(model, precision, situation)
        known = find_traces(model, self._decisions)
        self._decisions, known = self._decisions.with_tide(known)
        estimate, homes = self._decisions.estimate(known), self._decisions.homes
        self.estimated = estimate.cost_when_settled(homes)
        num_chunks = len(self._decisions.chunk_nbytes)
        check_compiled(model, num_chunks - (len(homes.device) if self.collectives.world_size == 1 else 0), num_chunks)
        expected = self._decisions.expected(estimate, self.estimated)
        if known.traces and estimate.with_least_offload(homes) is None:
            known = dataclasses.replace(known, traces={})  # a step without room is looked at before it begins
        logger.info("patrickstar: %s", expected)
        if on_decided is not None:
            on_decided(expected)
        self._payloads = Payloads(self._decisions)
        self.manager = self._make_manager(self._payloads.allocate(), known)
        self.manager.engine = self
        self.weights = weights = ChunkWeights(self.manager)
        self.optimizers: list[ChunkedOptimizer] = []
        self._attached = True
        self._buffer_devices: list[tuple[torch.Tensor, torch.device]] = []
        self._first_values = FirstValues(self.manager.tensors, self.collectives, weights.piece_numel, self._workers)
        with self.manager.lock.held("PatrickStarEngine()"):
            self._attach(given)
        for part in (model, *roots_of(model)):
            part.__dict__["patrickstar_engine"] = self
        for parameter, gradient in gradients:
            parameter.grad = gradient
        self._decisions.explain()

    @property
    def optimizer(self) -> ChunkedOptimizer | None:
        """The optimizer over chunks, the first one if there are several; ``None`` in an engine without one."""
        return self.optimizers[0] if self.optimizers else None

    @property
    def training_state(self) -> TrainingState | None:
        """Masters and optimizer states, as checkpoints have them; ``None`` in an engine without an optimizer."""
        return self.checkpoints.state if self.optimizers else None

    def follow_model(self) -> bool:
        """Adapts the engine to changes of the model or the param groups, as every forward and step does anyway.

        With several processes all of them call it together.

        Returns:
            Whether there may have been any.

        Raises:
            BudgetError: If there is no room for new parameters; nothing has changed then.
        """
        with self.manager.lock.held("follow_model()"):
            return self._follow_model(True)

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> ChunkedOptimizer:
        """Adds an optimizer: its parameters move to chunks that have its states, and keep their gradients.

        A parameter that another optimizer of the engine holds already stays in its chunk, where the new optimizer
        updates it too. With several processes all of them call it together.

        Args:
            optimizer: A torch optimizer over the model's parameters; a state that it has is taken over.

        Returns:
            The optimizer over chunks.

        Raises:
            BudgetError: If there is no room; nothing has changed then.
            EngineError: If it has none of the model's parameters.
        """
        check_optimizers(self.model, [optimizer])
        kernel, number = make_kernel(optimizer, self._means), len(self._kernels)
        chunked = ChunkedOptimizer(optimizer, kernel, self.manager, number, self.follow_model, self.optimizers)
        self._kernels.append(kernel)
        self.optimizers.append(chunked)
        self._decisions.lists[number] = list_names(kernel, self._num_micro_batches)
        self.manager.has_new_groups = True
        try:
            self.follow_model()
        except BaseException:
            if not any(chunk.tensors and chunk.spec.optimizer_index == number for chunk in self.manager.chunks):
                self._kernels.pop()
                self.optimizers.pop()
                self.manager.has_new_groups = False
            raise
        self.manager.evictor.moves_homes = self._decisions.situation.can_move_homes
        chunked.take_inner_state()
        return chunked

    def _follow_model(self, is_training: bool) -> bool:
        return self._attached and hasattr(self, "_membership") and self._membership.follow(is_training=is_training)

    def _make_manager(self, chunks: list[Chunk], known: KnownTraces) -> ChunkManager:
        decisions, config, resources, collectives = self._decisions, self.config, self.resources, self.collectives
        is_wide = decisions.precision.dtype is torch.float32 and decisions.precision.autocast is None
        return ChunkManager(
            chunks=chunks,
            pool=resources.pool,
            meter=resources.meter,
            streams=resources.streams,
            collectives=collectives,
            counts=self.counts,
            policy=MovePolicy.of(config, collectives.world_size, decisions.prefetch_depth),
            estimate=decisions.estimate(known),
            margin=decisions.homes.margin,
            reserve=self._payloads.reserve,
            advise=functools.partial(remedies, self.model, config, is_wide=is_wide),
            num_micro_batches=self._num_micro_batches,
            keeps_gradients=config.keep_gradients,
            checks_all=config.debug_collectives,
            known=known,
        )

    @property
    def prefetch_depth(self) -> int:
        """How many chunks are loaded ahead, by the settings or as was decided."""
        return self._decisions.prefetch_depth

    def _attach(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Attaches hooks, then moves values into chunks; an error undoes all of it."""
        gradients = [(parameter, parameter.grad) for parameter in self._decisions.parameters]
        try:
            chunk_losses(self._heads)
            self._first_values.begin(self.model)
            for number, (inner, kernel) in enumerate(zip(optimizers, self._kernels, strict=True)):
                chunked = ChunkedOptimizer(inner, kernel, self.manager, number, self.follow_model, self.optimizers)
                self.optimizers.append(chunked)
            is_in_file = functools.partial(is_in_model_file, self.model)
            state = TrainingState(self.manager, self.optimizers, self.collectives, is_in_file)
            self.checkpoints = Checkpoints(self.model, self.weights, state, self.config)
            casting = self._decisions.precision.casting(self.device)
            self.hooks = hooks = ModelHooks(self.model, self.manager, self.device, casting, self._follow_model)
            self._live = LiveModel(self.model, self.manager, self.weights, hooks.autograd, casting.inputs is not None)
            self._membership = Membership(
                self.model,
                self.manager,
                self.hooks,
                self._live,
                self.weights,
                self._payloads,
                self.optimizers,
                self.collectives,
                self._decisions,
            )
            self._recovery = Recovery(self.manager, self.device, functools.partial(buffers_of, self.model))
            self.hooks.attach()
            self._live.attach(self.hooks.ids)
            self.manager.lock.wait_for_forwards(self.model.modules(), "PatrickStarEngine()")
            self.manager.steps.estimator = make_estimator(self.model, self.manager, self._decisions)
            with contextlib.suppress(ConfigError):  # the model has no head
                for head in () if self._heads else find_heads(self.model):
                    if (tensor := self.manager.find(head.weight)) is not None:
                        self.manager.evictor.logits = tensor.chunk.spec.index, LOGIT_NBYTES * head.out_features
            self._move_in()
            for optimizer in self.optimizers:
                optimizer.take_inner_state()
        except BaseException:
            self._detach()
            self._first_values.give_back()
            for parameter, gradient in gradients:
                parameter.grad = gradient
            raise

    @property
    def dtype(self) -> torch.dtype:
        """Type of most parameters on the compute device."""
        return self._decisions.precision.dtype

    # One page of use

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Runs backward. ``loss.backward()`` does the same, and does not warn if it is not finite after a resume.

        Args:
            loss: A scalar tensor.
            **kwargs: Passed to ``torch.Tensor.backward``.
        """
        loss.backward(**kwargs)
        self.checkpoints.note(loss, "loss")

    def attempt(self, function: Callable[[], _T], max_retries: int = MAX_RETRIES) -> _T:
        """Runs forward and backward of one micro-batch, and repeats them if device memory does not suffice.

        A bare loop calls ``engine.attempt(lambda: train_on(batch))``; the Trainer does the same. Before each repetition
        the engine restores gradients, parameters and random states, so that no micro-batch is lost or counted twice,
        and leaves more of the device to activations.

        Args:
            function: Runs forward and backward once. It must not call the optimizer's step, or have other effects that
                a repetition would double.
            max_retries: The most repetitions.

        Returns:
            What the function returned.

        Raises:
            DeviceMemoryError: If memory does not suffice after all repetitions. Parameters are as they were before.
                Gradients are too, unless parts of this micro-batch were added to gradients of earlier ones: then all
                gradients are dropped, and the message says so.
        """
        if self.collectives.world_size > 1:
            return function()  # a repetition would call collectives that the other processes have left behind
        return self._recovery.run(function, max_retries)

    def full_parameters(
        self, parameters: Iterable[torch.nn.Parameter] | None = None, writeback: bool = True, with_grads: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Gives parameters their full value, as ordinary tensors on the host, inside a ``with`` block.

        Args:
            parameters: Which; all by default. Opening a few at a time keeps memory low.
            writeback: Whether the engine takes over what the block changed in place or through ``.data``.
            with_grads: Whether they also have ``.grad``: this step's gradient so far, before unscaling and clipping.

        Returns:
            A context manager. Do not run the model inside it.

        Raises:
            EngineError: If one of the parameters is not managed.
        """
        tensors = self.manager.tensors
        if parameters is not None:
            tensors = []
            for parameter in parameters:
                tensor = self.manager.find(parameter)
                if tensor is None:
                    raise EngineError(
                        f"a parameter of shape {tuple(parameter.shape)} is not managed by this engine; give "
                        "parameters of the model that was prepared"
                    )
                tensors.append(tensor)
        return self.weights.opened(tensors, writeback, with_grads)

    def save_checkpoint(self, directory: str | os.PathLike[str]) -> None:
        """Saves weights, in common file formats, and the training state; all processes call it together.

        The caller must save learning rate schedulers and random states.

        Args:
            directory: The checkpoint's directory. It appears when all of it is on the disk; an older one is replaced.

        Raises:
            CheckpointError: If the checkpoint cannot be written; an older one stays unchanged.
        """
        self.follow_model()
        self.checkpoints.save(directory)

    def load_checkpoint(self, directory: str | os.PathLike[str]) -> None:
        """Loads what ``save_checkpoint`` or a Trainer with ``patrickstar`` saved; all processes call it together.

        The number of processes, chunk size, budgets, devices and placement may differ from those of the run that saved
        the checkpoint: every value is the same to the last bit. Gradients are dropped.

        Args:
            directory: The checkpoint's directory.

        Raises:
            CheckpointError: If something is missing, damaged or does not fit; nothing has changed then.
        """
        self.follow_model()
        found = self.checkpoints.load(directory)
        if found.unexpected_keys:
            logger.warning("patrickstar: '%s' has %s, which the model does not know", directory, found.unexpected_keys)

    def stats(self) -> dict[str, Any]:
        """Bytes and counts so far.

        Returns:
            ``device_peak_nbytes``, ``host_peak_nbytes``: most bytes of chunks at once on each tier.
            ``device_total_peak_nbytes``: most bytes of chunks and non-model data at once on the device, as far as it
            was measured or is known from a recorded step. On a CPU with no ``device_budget`` only chunks are counted.
            ``device_step_peak_nbytes``, ``device_total_step_peak_nbytes``, ``host_step_peak_nbytes``: the same in the
            last step.
            ``device_budget_nbytes``, ``host_budget_nbytes``: the budgets. ``chunk_budget_nbytes``: what chunks may take
            on the device at most: the lesser of its budget and ``chunk_budget``.
            ``model_data_nbytes``: bytes of all chunk lists, padding left out.
            ``host_to_device_nbytes``, ``device_to_host_nbytes``: bytes moved. ``offloaded_nbytes``: those of
            activations that left the device between forward and backward.
            ``disk_read_nbytes``, ``disk_written_nbytes``, ``disk_seconds``: masters and states that updates have read
            from the disk and written there, and for how long.
            ``chunk_loads``, ``chunk_evictions``, ``chunk_invalidations``: how often a chunk came to the device, left
            it for want of room, or was dropped because the optimizer had changed its home.
            ``chunk_visits``: how often a chunk was needed on the device, in a model whose chunks move; ``chunk_hits``:
            how often it was there, without a wait.
            ``prefetches``, ``late_prefetches``, ``waiting_seconds``: loads that were started ahead, those that had not
            arrived when they were needed, and how long the host waited for them.
            ``loading_seconds``: how long the host was busy with loads that had not been started ahead.
            ``computing_seconds``: seconds by the host's clock from the begin of forward to the end of backward;
            ``settling_seconds``: from there to the optimizer's step; ``updating_seconds``: of the optimizer's step.
            ``chunk_moves``, ``moved_home_to_device_nbytes``, ``moved_home_to_host_nbytes``: how often a chunk moved its
            home, and the bytes of all its lists. The moved bytes above do not include these, or rows of lookups.
            ``steps``, ``skipped_steps``: optimizer steps.
            ``recorded_steps``: traces made. ``diverged_steps``: steps that differed from their trace, and went on
            without a plan.
            ``retries``: how often a micro-batch was repeated because memory had not sufficed.
            ``chunks_in_margin``: chunks whose home, optimizer states included, is in the device margin.
            ``all_gathers``, ``reduce_scatters``, ``sent_nbytes``, ``messages``: collectives with other processes, the
            bytes of parameters and gradients that this process sent, and the short messages in which processes agree.
            ``num_chunks``, ``chunk_numel``, ``chunk_utilisation``: the layout.
        """
        layout, peaks = self._membership.layout, self.manager.steps.peaks
        is_metered = self.resources.is_metered  # else the bytes of traces alone would count, and of some steps alone
        return {
            "device_peak_nbytes": self.ledger.peak(Tier.DEVICE),
            "device_total_peak_nbytes": self.ledger.total_peak if is_metered else self.ledger.peak(Tier.DEVICE),
            "host_peak_nbytes": self.ledger.peak(Tier.HOST),
            "device_step_peak_nbytes": peaks[0],
            "device_total_step_peak_nbytes": peaks[1] if is_metered else peaks[0],
            "host_step_peak_nbytes": peaks[2],
            "device_budget_nbytes": self.ledger.budget(Tier.DEVICE),
            "host_budget_nbytes": self.ledger.budget(Tier.HOST),
            "chunk_budget_nbytes": min(limit.nbytes for limit in self.ledger.limits(Tier.DEVICE)),
            "model_data_nbytes": self.model_data_nbytes(),
            **dataclasses.asdict(self.counts),
            "chunks_in_margin": len(self.manager.evictor.in_margin),
            "num_chunks": len(layout.chunks) * self.collectives.world_size,
            "chunk_numel": layout.chunk_numel,
            "chunk_utilisation": layout.utilisation,
        }

    def survey(self) -> Survey:
        """Which parameter lives where, and what was on the device at each moment of the last steps, sizes in bytes."""
        manager = self.manager
        followed = [(manager.rest.as_taken(trace), plan, room) for trace, plan, room in manager.steps.followed]
        return take_survey(manager.chunks, self.ledger, followed, self.reasons)

    @property
    def chunks(self) -> Sequence[Chunk]:
        """All chunks of this process, in order, for measurements: to be read only."""
        return self.manager.chunks

    @property
    def traces(self) -> Mapping[str, Trace]:
        """What each kind of micro-batch does, by key, as planned, estimated or recorded: to be read only."""
        return self.manager.steps.traces

    @property
    def reasons(self) -> tuple[str, ...]:
        """What was decided, a sentence each: when the engine was made, and since then about lookups and the margin."""
        later = self.manager.evictor.reasons
        return (*[reason for name, reason in self._decisions.reasons.items() if name not in later], *later.values())

    def model_data_nbytes(self) -> int:
        """Bytes of model data over both tiers, padding left out.

        14 per trainable parameter in 16-bit, 16 in fp32,
        2 or 4 per frozen one; with an accumulation list 4 more per trainable parameter.
        """
        total = 0
        for chunk in self.manager.chunks:
            per_element = sum(payload.dtype.itemsize for payload in chunk.held.values())
            total += sum(tensor.own_numel for tensor in chunk.owned) * per_element
        return total + sum(self.ledger.owners(tier).get(OWN_STATE, 0) for tier in Tier)

    def detach(self) -> None:
        """Removes the engine from the model, when no other thread is inside of a forward, a backward or a step.

        Every hook is removed; every parameter has its value, its original type and its own storage; the optimizers that
        the user made have their states. Gradients are dropped.

        Raises:
            EngineError: If a parameter is open in ``full_parameters``, or another thread has been inside for too long;
                nothing is removed.
            Exception: What an update that was under way raised; nothing is removed, and the next call removes all.
        """
        if not self._attached:
            return
        if self.manager.frames.stack:
            self.manager.unwind()  # a forward of this thread that was interrupted holds the lock
        with self.manager.lock.held("detach()"):
            self._detach()

    @unseen()
    @torch.no_grad()
    def _detach(self) -> None:
        if not self._attached:
            return  # another thread has done so
        self.weights.check_closed()
        for chunk in self.manager.chunks:
            chunk.wait_for_update()
        if self.model.__dict__.get("patrickstar_engine") is self:  # else construction failed
            self.manager.sharing.enter("detaches the engine")
        self._attached = False
        chunk_losses(self._heads, is_chunked=False)
        if hasattr(self, "checkpoints"):
            self.checkpoints.close()
        with self.manager.gradients.lock:  # other threads may read parameters
            self._give_back_values()
        for kernel in self._kernels:
            kernel.release()
        self._workers.close()
        self.collectives.close()
        for part in (self.model, *roots_of(self.model)):
            for name in ("patrickstar_engine", "backward"):
                part.__dict__.pop(name, None)

    def _give_back_values(self) -> None:
        for tensor in self.manager.tensors:
            if tensor.place is ValuePlace.NONE:  # construction failed before its value was moved in
                tensor.unbind()
        if hasattr(self, "hooks"):
            self.hooks.detach()
            self.manager.parameters.release_held_outside_forward()
            self._live.detach()
        self.manager.writes.sync()
        self.manager.discard_gradients()
        for optimizer in self.optimizers:
            optimizer.give_back_state()
        for tensor in self.manager.tensors:
            if tensor.place not in (ValuePlace.NONE, ValuePlace.GIVEN_UP):
                set_raw_data(tensor.parameter, self.weights.read(tensor).to(tensor.device))
                tensor.unbind()
        if hasattr(self, "hooks"):
            self.hooks.packed_layers.restore()
        for buffer, device in self._buffer_devices:
            set_raw_data(buffer, buffer.data.to(device))
        self.manager.close()

    def _make_room(self) -> None:
        """Makes room on the compute tier for non-model data."""
        if self.manager.writes.watched:
            self.manager.writes.settle_watched()
        self.manager.evictor.make_room_for_non_model(is_step=self.manager.frames.is_inside)

    def _move_in(self) -> None:
        """Moves buffers to the device, and parameters into their chunks."""
        for buffer in buffers_of(self.model):
            self._buffer_devices.append((buffer, buffer.device))
            set_raw_data(buffer, buffer.data.to(self.device))
        with self.manager.gradients.lock, self.resources.pool.locking_beside():  # other threads may read parameters
            self._first_values.move_in(buffers_of(self.model), self._live.bind)
        self._workers.close()  # a process that is forked before the first update starts threads of its own


def _take_over(
    model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Detaches the engines of models that are parts of a model or around it, and of what the optimizers hold.

    An engine that merely shares frozen parameters keeps them, unless it was made to train and its model has nothing
    trainable any more: that of an adapter which was merged.

    Returns:
        Copies of gradients that no step has used yet.
    """
    gradients, held = [], holders(optimizers)
    for manager in managers_of(model.parameters()):
        other = manager.engine.model
        inside = ({*around.modules()}.intersection(roots_of(part)) for around, part in ((model, other), (other, model)))
        present = {id(parameter) for parameter in other.parameters()}
        own = [tensor for tensor in manager.tensors if tensor.spec.trainable]
        is_over = bool(manager.engine.optimizers) and not any(id(tensor.parameter) in present for tensor in own)
        if not (is_over or any(inside) or any(id(tensor.parameter) in held for tensor in manager.tensors)):
            continue
        waiting = [tensor.parameter for tensor in manager.tensors if tensor.has_gradient]
        found = ((parameter, parameter.grad) for parameter in waiting)
        gradients += [(parameter, gradient.clone()) for parameter, gradient in found if gradient is not None]
        logger.info("patrickstar: detached the engine of %s, whose parameters are in this model", type(other).__name__)
        manager.engine.detach()
    for parameter, gradient in gradients:
        parameter.grad = gradient  # where it stays if this engine fails
    return gradients


def initialize_engine(
    model_func: Callable[[], _Model],
    config: ConfigSource = None,
    optimizer_func: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
    *,
    device: torch.device | str | Streams | None = None,
    gradient_accumulation_steps: int = 1,
) -> tuple[_Model, ChunkedOptimizer]:
    """Makes a model and its optimizer for a bare PyTorch loop (PatrickStar section 8.5).

    Args:
        model_func: Makes the model.
        config: Settings; see ``PatrickStarConfig.from_any``.
        optimizer_func: Makes a torch optimizer from the list of trainable parameters; by default
            ``torch.optim.AdamW(parameters, fused=True)``.
        device: The compute device; by default the current accelerator if there is one, else the CPU tier. Or
            ``Streams`` that stand in for those of a device, to simulate it.
        gradient_accumulation_steps: Micro-batches per step.

    Returns:
        The model and the optimizer. ``get_engine(model)`` is the engine; ``model.backward(loss)`` and
        ``loss.backward()`` do the same.

    Raises:
        ConfigError: If a setting cannot work for this model.
        BudgetError: If a budget is too small.
        EngineError: If the model cannot be managed.
    """
    model = model_func()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise EngineError(
            "the model has no trainable parameter: every requires_grad is False; unfreeze what should be trained"
        )
    make = optimizer_func or (lambda parameters: torch.optim.AdamW(parameters, fused=True))
    engine = PatrickStarEngine(
        model, config, make(trainable), device=device, gradient_accumulation_steps=gradient_accumulation_steps
    )
    assert engine.optimizer is not None
    if not hasattr(model, "backward"):
        model.__dict__["backward"] = engine.backward
    return model, engine.optimizer


def get_engine(model: torch.nn.Module) -> PatrickStarEngine:
    """The engine that manages a model: for statistics, checkpoints, ``attempt`` and ``full_parameters``.

    ``model.patrickstar_engine`` is the same object, which type checkers do not know.

    Args:
        model: A model that ``initialize_engine``, ``PatrickStarAccelerator.prepare`` or the ``train`` of a Trainer has
            prepared; or an adapter around one.

    Raises:
        EngineError: If it has none, or has been detached from it.
    """
    engine = getattr(model, "patrickstar_engine", None)
    if not isinstance(engine, PatrickStarEngine):
        raise EngineError(
            f"{type(model).__name__} has no engine: its parameters are not in chunks. Prepare it by initialize_engine, "
            "by PatrickStarAccelerator.prepare, or by train() of a Trainer with --patrickstar"
        )
    return engine
