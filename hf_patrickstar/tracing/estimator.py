"""Tells an engine what a step will do before its first forward.

[Note: steps that are estimated]
Before the first step of each kind, and of each bucket of input shapes, the engine has to know which chunks are needed
when, and what else takes memory. A copy of the model without bytes does what the step will do (``micro_batch.py``), on
inputs of the same shapes, and nobody sees it (``unobserved.py``). Its operators are replayed chunk by chunk
(``schedule/step.py``). So homes are decided, and the first step follows a plan.

What the loop computes of the model's outputs is not known yet. If there is no loss among them, a logarithm of softmax
stands in for it, which takes as much memory as a cross entropy. Code of libraries that asks for a value gets a
plausible one. In both cases the trace is not certain. The first step is measured, and its bytes correct what was
estimated. Where a model cannot be copied, or the user's code asks for values, its first step is recorded instead.
"""

import collections
import contextlib
import dataclasses
import functools
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.utils._pytree import tree_leaves

from hf_patrickstar.checkpoint.progress import shown
from hf_patrickstar.errors import Later, TraceError
from hf_patrickstar.layout.packing import Layout
from hf_patrickstar.layout.specs import TensorSpec, collect_specs
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.model.casting import Casting
from hf_patrickstar.model.chunked_loss import has_chunked_loss
from hf_patrickstar.model.quantized import parameters_of
from hf_patrickstar.runtime.frames import Call
from hf_patrickstar.runtime.hooks import has_hooks_of_user
from hf_patrickstar.runtime.manager import ChunkManager
from hf_patrickstar.runtime.parameter import ManagedParameter
from hf_patrickstar.runtime.steps import Estimated, EstimateStep
from hf_patrickstar.schedule.op_trace import EnterForward, OpTrace
from hf_patrickstar.schedule.step import Places, StepRules, traces_of
from hf_patrickstar.schedule.trace import KnownTraces, Shapes, Trace
from hf_patrickstar.setup.decisions import Decisions
from hf_patrickstar.setup.needs import describe_least
from hf_patrickstar.setup.resources import SHARE_IN_FLIGHT
from hf_patrickstar.tracing.attention import fused_attention, masks_of_batches
from hf_patrickstar.tracing.fake import OTHERS_CODE, FakeTensors, copy_without_bytes
from hf_patrickstar.tracing.kept_traces import keep_traces
from hf_patrickstar.tracing.micro_batch import MicroBatch, trace
from hf_patrickstar.tracing.recorder import Setting
from hf_patrickstar.tracing.unobserved import TRACE_LOCK, unobserved
from hf_patrickstar.units import MIB

logger = logging.getLogger(__name__)

_PACKAGE = __name__.partition(".")[0]
_TIMEOUT_S = 60.0
"""Seconds after which the first step is recorded instead."""
_ROUNDING = 0.05
_WORKSPACES_NBYTES = 64 * MIB
"""What is added on an accelerator until the first step is measured: its allocator rounds up, libraries take space."""
_MOST_WORKSPACES = 1 / 16
"""How much of what is free that is at most: a small budget would have no room for chunks."""


def make_estimator(model: torch.nn.Module, manager: ChunkManager, decisions: Decisions) -> EstimateStep | None:
    """Makes what estimates the steps of an engine; ``None`` where nobody follows plans, or tensors have no bytes.

    Args:
        model: The model.
        manager: Knows its parameters and their chunks.
        decisions: What was decided about the model.
    """
    if detect_fake_mode() is not None or not manager.steps.policy.has_plans:
        return None
    return StepEstimator(model, manager, decisions).estimate


class StepEstimator:
    """Estimates the steps of one engine; see [Note: steps that are estimated].

    Args:
        model: The model.
        manager: Knows its parameters and their chunks.
        decisions: What was decided about the model.
    """

    def __init__(self, model: torch.nn.Module, manager: ChunkManager, decisions: Decisions) -> None:
        resources = decisions.situation.resources
        self._known = decisions.numbers, decisions.situation
        self._model = model
        self._manager = manager
        self._casting = decisions.precision.casting(torch.device("cpu"))
        self._device = resources.device
        self._rank = resources.collectives.rank
        num, in_flight_nbytes = manager.steps.num_micro_batches, resources.streams.most_in_flight_nbytes
        self._rules = StepRules(num, in_flight_nbytes, resources.collectives.is_asynchronous)
        self._keeps = decisions.situation.config.reuse_plan and self._rank == 0
        self._first_chunks = [chunk.spec for chunk in manager.chunks]  # those of the key under which traces are kept
        self._kept: dict[str, Trace] = {}
        self._not_estimated: set[tuple[str, bool]] = set()  # calls that could not be traced
        self._is_certain = True  # what is traced now

    def estimate(self, call: Call, shapes: Shapes) -> Estimated | None:
        """What a step will do that a call begins; see ``steps.EstimateStep``."""
        begin, what, self._is_certain = time.monotonic(), (call.name, call.is_training), True
        if what in self._not_estimated:
            return None
        try:
            ops, tensors = self._trace(call, shapes)
            if ops is None:
                raise TraceError(
                    "the model does what a trace has no word for: it reads a parameter through .data or detach(), "
                    "evaluates inside of its forward, or changes an embedding that is looked up on the CPU"
                )
        except (Exception, SystemExit) as error:  # the user's code may raise anything, and what is wrong fails again
            self._not_estimated.add(what)
            reason = str(error)
            if not isinstance(error, TraceError):
                reason = f"the model does not run with tensors without bytes ({type(error).__name__}: {error})"
            logger.info("patrickstar: the first step is recorded: %s", reason)
            return None
        found = self._estimated(call, ops, tensors)
        peak = max(made.non_model_peak_nbytes for made in found.traces) / MIB
        text = f"{len(found.traces[0].visits)} visits to chunks, at most {peak:.1f} MiB beside chunks"
        taken_s = time.monotonic() - begin
        logger.info("patrickstar: a step was planned before it began: %s; it took %.1f s", text, taken_s)
        return found

    def _keep(self, traces: Sequence[Trace], is_padded: bool) -> None:
        known, outdated = self._manager.steps.known, self._manager.steps.outdated_by(traces)
        earlier = {key: made for key, made in known.traces.items() if key not in outdated}
        self._kept.update({made.key: made for made in traces})
        lookups = {**known.lookups, **self._manager.evictor.lookups}
        keep_traces(KnownTraces(known.key, {**earlier, **self._kept}, lookups, is_padded))

    def _beside_nbytes(self, ops: OpTrace) -> int:
        """What is on an accelerator beside a step: memory of others that is there, and of libraries that will be."""
        ledger = self._manager.ledger
        there = next((note.nbytes + note.buffers_nbytes for note in ops.notes if isinstance(note, EnterForward)), 0)
        workspaces = min(_WORKSPACES_NBYTES, int(_MOST_WORKSPACES * max(ledger.available(Tier.DEVICE), 0)))
        return max(ledger.non_model_nbytes() - there, 0) + workspaces

    # A copy of the model

    def _trace(self, call: Call, shapes: Shapes) -> tuple[OpTrace | None, dict[TensorSpec, ManagedParameter]]:
        """What a micro-batch does, and the parameters of the copy of the model."""
        tensors: dict[TensorSpec, ManagedParameter] = {}
        by_name = {tensor.spec.name: tensor for tensor in self._manager.tensors}
        cpu = torch.device("cpu")

        make_model = functools.partial(copy_without_bytes, self._model, device=cpu)

        def make_inputs() -> Mapping[str, Any]:
            inputs = call.args, call.kwargs
            return {"inputs": copy_without_bytes(inputs, shapes=dict(enumerate(shapes)), device=cpu)}

        def prepare(model: torch.nn.Module) -> tuple[list[TensorSpec], Casting]:
            found, _, _ = collect_specs(model, parameters_of=parameters_of)
            tensors.clear()
            for spec in found:
                if spec.name not in by_name:
                    raise TraceError(f"parameter '{spec.name}' is not managed")
                tensor = by_name[spec.name]
                tensors[dataclasses.replace(tensor.spec, index=spec.index)] = tensor
            return list(tensors), self._casting

        def compute_loss(model: torch.nn.Module, inputs: Mapping[str, Any]) -> Any:
            args, kwargs = inputs["inputs"]
            output = model.get_submodule(call.name)(*args, **kwargs)
            return self._loss_of(output) if call.is_training else output

        config, num = {"chunked_loss": has_chunked_loss(self._model)}, self._rules.num_micro_batches
        what = MicroBatch(make_model, make_inputs, compute_loss, config, num, call.is_training, prepare)
        found = [tensor for tensor in self._manager.tensors if tensor.is_cpu_embedding]
        looked_up = [it.spec.name for it in found if not has_hooks_of_user(it.parameter, it.spec.trainable)]
        masks = masks_of_batches(has_padding=call.has_padding, is_packed="position_ids" in call.kwargs)
        is_apart = self._device.type != "cpu"
        limit = _time_limit(is_first=self._rank == 0)
        # The time that another thread traces is not counted.
        with TRACE_LOCK, limit as check_time, unobserved(), FakeTensors(), masks, as_on(self._device):
            setting = Setting(looked_up, is_apart, check_time=check_time, note_question=self._note_question)
            ops = trace(what, setting, is_checked=False)
        return ops, tensors

    def _note_question(self) -> None:
        """Somebody asks for a value: the user's code may do anything with it, code of libraries goes on as usual."""
        for frame, _ in traceback.walk_stack(sys._getframe(1)):
            origin = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            if origin in ("torch", _PACKAGE):
                continue
            if origin not in OTHERS_CODE:
                raise TraceError(
                    f"the model asks for the value of a tensor (line {frame.f_lineno} of {frame.f_code.co_filename}), "
                    "which tensors without bytes do not have"
                )
            break
        self._is_certain = False

    def _loss_of(self, output: Any) -> torch.Tensor:
        found = loss_in(output)
        if found is None:
            self._is_certain = False
            return stand_in_for_loss(output)
        return found

    # Chunk by chunk

    def _estimated(self, call: Call, ops: OpTrace, tensors: Mapping[TensorSpec, ManagedParameter]) -> Estimated:
        place_of = {tensor.spec.index: spec.index for spec, tensor in tensors.items()}  # others have left the model
        chunks = []
        for chunk in self._manager.chunks:
            indices = tuple(place_of[index] for index in chunk.spec.tensor_indices if index in place_of)
            chunks.append(dataclasses.replace(chunk.spec, tensor_indices=indices))
        chunk_of = {spec.index: tensor.chunk.spec.index for spec, tensor in tensors.items()}
        own_numel = {spec.index: tensor.own_numel for spec, tensor in tensors.items()}
        places = Places(chunks, {spec.index: spec for spec in tensors}, chunk_of, own_numel)
        name = call.name  # what is kept below would keep the call, and so its inputs
        traces = traces_of(ops, places, self._rules, is_training=call.is_training, name=name)
        has_changed = [chunk.spec for chunk in self._manager.chunks] != self._first_chunks
        if call.is_training and self._keeps and not has_changed:
            self._keep(traces, call.has_padding)
        beside_nbytes = self._beside_nbytes(ops)
        traces = [self._as_allocated(made, beside_nbytes) for made in traces]
        least = None
        is_same = not has_changed and all(place == index for index, place in place_of.items())
        # What another process asks for may take more than the trace of this one says.
        if call.is_training and is_same and self._known[1].resources.collectives.world_size == 1:

            def traces_on(layout: Layout, device_nbytes: int) -> list[Trace]:
                in_flight = self._rules.in_flight_nbytes and device_nbytes // SHARE_IN_FLIGHT
                rules = dataclasses.replace(self._rules, in_flight_nbytes=in_flight)
                found = traces_of(ops, Places.of(layout), rules, name=name)
                return [self._as_allocated(made, beside_nbytes) for made in found]

            least = Later(functools.partial(describe_least, *self._known, traces_on))
        index_of = {place: index for index, place in place_of.items()}
        lookups = collections.Counter({index_of[place]: n for place, n in ops.looked_up_nbytes().items()})
        return Estimated(traces, lookups, self._device.type == "cpu" and self._is_certain, least)

    def _as_allocated(self, made: Trace, beside_nbytes: int) -> Trace:
        """A trace with what an accelerator's allocator takes for tensors, and so many bytes beside them."""
        if self._device.type == "cpu":
            return made
        nbytes = (int((1 + _ROUNDING) * visit.non_model_nbytes) + beside_nbytes for visit in made.visits)
        return made.with_non_model_nbytes(list(nbytes))


@contextlib.contextmanager
def as_on(device: torch.device) -> Iterator[None]:
    """Inside, the CPU computes in the types, and with the attention, of an accelerator.

    Args:
        device: The device; on the CPU nothing changes.
    """
    with contextlib.ExitStack() as stack:
        if device.type != "cpu":
            stack.enter_context(fused_attention())
            if torch.is_autocast_enabled(device.type):
                stack.enter_context(torch.autocast("cpu", dtype=torch.get_autocast_dtype(device.type)))
        yield


def loss_in(output: Any) -> torch.Tensor | None:
    """The loss among the outputs of a model, or ``None`` if there is none.

    Args:
        output: The outputs.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss.mean()
    leaves = _with_gradients(output)
    return leaves[0] if leaves and not leaves[0].dim() else None  # a tuple that begins with the loss


def stand_in_for_loss(output: Any) -> torch.Tensor:
    """What stands in for the loss; see [Note: steps that are estimated].

    Args:
        output: The outputs of a model.

    Raises:
        TraceError: If nothing among them has a gradient.
    """
    leaves = _with_gradients(output)
    if not leaves:
        raise TraceError("no output of the model has a gradient")
    return torch.stack([_stand_in(leaf) for leaf in leaves]).sum()


def _with_gradients(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _stand_in(output: torch.Tensor) -> torch.Tensor:
    wide = output.float() if output.is_floating_point() else output.abs()
    return torch.log_softmax(wide, -1).mean() if wide.dim() else wide


@contextlib.contextmanager
def _time_limit(*, is_first: bool) -> Iterator[Callable[[], None]]:
    """Gives what ends a recording that takes too long, and shows one that takes more than two seconds."""
    end = time.monotonic() + _TIMEOUT_S

    def check() -> None:
        if time.monotonic() > end:
            raise TraceError(f"recording a micro-batch with tensors without bytes took longer than {_TIMEOUT_S:g} s")
        bar.update()

    with shown((), "Planning the first step", "operators", is_first=is_first) as bar:
        yield check
