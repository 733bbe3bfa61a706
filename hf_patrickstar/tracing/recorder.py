"""Records what a micro-batch of a plain model does; see [Note: micro-batches that are replayed].

The recorder does what ``runtime/hooks.py`` does for an engine, without one: its hooks are at the same places of the
model, parameters answer as they do there (``reads.py``), and autograd keeps operands in the same way. So the notes are
what torch would tell an engine. The model has its parameters all the time, in fake tensors without bytes.
"""

import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from hf_patrickstar.errors import TraceError
from hf_patrickstar.layout.specs import TensorSpec
from hf_patrickstar.memory.operators import unpacked
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.activations import LEAST_DIM
from hf_patrickstar.runtime.autograd import Autograd, may_keep, refuse_reentrant
from hf_patrickstar.runtime.casting import Casting
from hf_patrickstar.runtime.compiled import is_compiled
from hf_patrickstar.runtime.frames import Frame, Lookup, current_stage
from hf_patrickstar.runtime.hooks import has_hooks_of_user, is_embedding, places_of, tensors_in
from hf_patrickstar.runtime.live_parameter import LiveMixin, raw_data, released_type, storage_key, take_raw_grad
from hf_patrickstar.runtime.model_set import roots_of
from hf_patrickstar.runtime.quantized import PackedLayers, buffers_of, named_parameters
from hf_patrickstar.schedule import op_trace
from hf_patrickstar.schedule.script import Begin, Part
from hf_patrickstar.schedule.trace import input_shapes
from hf_patrickstar.states import Stage
from hf_patrickstar.tracing.answers import ASKS_VALUE, AnsweringMode, has_no_value
from hf_patrickstar.tracing.charges import Charges
from hf_patrickstar.tracing.costs import cost_of
from hf_patrickstar.tracing.notes import Activation, Notes, Operand, Watched
from hf_patrickstar.tracing.reads import Reads
from hf_patrickstar.tracing.timing import OperatorTimes

_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_dtensor"})
"""Where operators that communicate are registered."""
_UNANSWERED = DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """How the operators of a micro-batch run.

    Attributes:
        looked_up: Names of the weights whose embeddings read their rows at home.
        has_accelerator: Whether the device has memory of its own.
        times: What operators take, if the machine is the one at hand; else its rates say it.
        check_time: Called before each operator; ends a recording that takes too long.
        note_question: Called where code asks for a value that tensors without bytes do not have; ends the recording if
            a plausible one will not do.
    """

    looked_up: Collection[str] = ()
    has_accelerator: bool = True
    times: OperatorTimes | None = None
    check_time: Callable[[], None] | None = None
    note_question: Callable[[], None] | None = None


def record(
    model: torch.nn.Module,
    forward: Callable[[], Any],
    backward: Callable[[Any], Any] | None,
    *,
    specs: Sequence[TensorSpec],
    inputs: Iterable[torch.Tensor],
    casting: Casting,
    setting: Setting,
) -> op_trace.OpTrace | None:
    """Runs a micro-batch, and notes what it does; called under fake tensors.

    A forward under ``torch.no_grad()`` is an evaluation.

    Args:
        model: The model; its parameters are fake, in the types that they were loaded in, and have no gradients. It is
            as it was when this returns, or raises.
        forward: Computes the loss with the model.
        backward: Runs the backward of what ``forward`` has returned; ``None`` for a forward alone.
        specs: The parameters of the model as numbers.
        inputs: The tensors of the batch.
        casting: The types that forwards compute in.
        setting: How operators run.

    Returns:
        The notes, or ``None`` if the model does something that the notes have no word for.

    Raises:
        TraceError: If the model communicates, asks for a value that only bytes have, or takes too long.
    """
    return _Recorder(model, specs, inputs, casting, setting).run(forward, backward)


class _Recorder(AnsweringMode):
    """Hooks of one model, for one micro-batch."""

    def __init__(
        self,
        model: torch.nn.Module,
        specs: Sequence[TensorSpec],
        inputs: Iterable[torch.Tensor],
        casting: Casting,
        setting: Setting,
    ) -> None:
        super().__init__()
        self._model, self._casting = model, casting
        self._setting = setting
        parameters = named_parameters(model)
        self._watched = {id(parameters[spec.name]): Watched(spec, parameters[spec.name]) for spec in specs}
        self._by_storage = {watched.key: watched for watched in self._watched.values()}
        self._owned = set(self._by_storage)
        self._notes = Notes(inputs, buffers_of(model), self._owned)
        self._charges = Charges(has_accelerator=setting.has_accelerator, times=setting.times)
        self._is_quiet = False
        self._is_evaluation = not torch.is_grad_enabled()
        self._autograd = Autograd(
            self._pack, self._unpack, lambda end: None, self._end_backward, self._by_storage.__contains__
        )
        self._stack = self._notes.frames.stack

    def run(self, forward: Callable[[], Any], backward: Callable[[Any], Any] | None) -> op_trace.OpTrace | None:
        """See ``record``."""
        with self._attached():
            self._notes.add(Begin(Part.FORWARD))
            result = forward()
            if backward is not None:
                self._notes.add(Begin(Part.BACKWARD))
                result = backward(result)
            found = self._notes.end()
        del result  # which lives until then, and so does what a backward would need
        return found

    # Attach and detach

    @contextlib.contextmanager
    def _attached(self) -> Iterator[None]:
        """Inside of it the model is listened to; what is compiled runs as it is written."""
        with contextlib.ExitStack() as stack:
            layers = PackedLayers()
            stack.callback(layers.restore)
            layers.prepare(self._model.modules())
            for watched in self._watched.values():
                self._attach_parameter(watched, stack)
            inside = {
                part
                for module in self._model.modules()
                if is_compiled(module)
                for part in module.modules()
                if part is not module
            }
            for name, module in self._model.named_modules():
                if module not in inside and any(True for _ in module.parameters()):
                    self._attach_module(module, name or type(self._model).__name__, stack)
            if self._casting.inputs is not None:
                for root in roots_of(self._model):
                    stack.callback(root.register_forward_pre_hook(self._cast_inputs, with_kwargs=True).remove)
            stack.callback(self._unwind)
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self)
            yield

    def _attach_parameter(self, watched: Watched, stack: contextlib.ExitStack) -> None:
        parameter = watched.parameter
        stack.callback(setattr, parameter, "data", watched.typed)
        if watched.spec.trainable:
            before = parameter._post_accumulate_grad_hooks
            stack.callback(setattr, parameter, "_post_accumulate_grad_hooks", before)
            stack.callback(parameter.register_post_accumulate_grad_hook(self._store_gradient).remove)
        parameter._live = Reads(watched, self._notes, self._autograd, self._casting.inputs is not None)
        stack.callback(parameter.__dict__.pop, "_live")
        parameter.__class__ = released_type(watched.original_type)
        stack.callback(setattr, parameter, "__class__", watched.original_type)

    def _attach_module(self, module: torch.nn.Module, name: str, stack: contextlib.ExitStack) -> None:
        own = list(dict.fromkeys(watched for _, _, watched in self._places_of(module)))
        is_lookup = is_embedding(module) and len(own) == 1 and own[0].spec.name in self._setting.looked_up
        looks_up = is_lookup and not has_hooks_of_user(own[0].parameter, own[0].spec.trainable)

        def before(_module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            frame = Frame(_module, current_stage())
            if not self._stack:
                self._enter_outermost(frame, name, args, kwargs)
            self._stack.append(frame)
            if own and looks_up and peek_interpreter_stack() is None:
                self._begin_lookup(frame, own[0])
            elif own:
                self._enter_module(frame, own)

        def after(_module: torch.nn.Module, args: Any, output: Any) -> Any:
            if not self._stack or self._stack[-1].module is not _module:
                return None
            result = self._leave_module(self._stack.pop(), output)
            return None if result is output else result

        stack.callback(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(after, always_call=True).remove)

    def _places_of(self, module: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
        return places_of(module, lambda parameter: self._watched.get(id(parameter)))

    def _unwind(self) -> None:
        """Ends forwards that were interrupted."""
        while self._stack:
            frame = self._stack.pop()
            frame.leave_contexts()
            self._notes.frames.end(frame)

    # Forward

    def _cast_inputs(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return self._casting.narrow(args, kwargs)

    def _enter_outermost(self, frame: Frame, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        is_recomputed = frame.stage is Stage.BACKWARD
        if is_recomputed:
            refuse_reentrant(f"module '{name}'")
        else:
            may_keep(f"the forward of {name}")
            inputs = list(tensors_in((args, kwargs)))
            shapes = input_shapes([tensor.shape for tensor in inputs])
            present = itertools.chain(inputs, buffers_of(self._model))
            if self._is_evaluation and frame.stage is not Stage.EVALUATION:
                self._notes.is_odd = True
            self._notes.enter_forward(shapes, present, is_inner=self._is_inner(frame))
            frame.saved_tensors = self._autograd.kept_as_numbers()
            frame.saved_tensors.__enter__()
        frame.autocast = self._casting.autocast(is_recomputed=is_recomputed)
        if frame.autocast is not None:
            frame.autocast.__enter__()

    def _is_inner(self, frame: Frame) -> bool:
        """Whether a forward is an evaluation inside of a training step."""
        return frame.stage is Stage.EVALUATION and not self._is_evaluation

    def _enter_module(self, frame: Frame, own: Sequence[Any]) -> None:
        if peek_interpreter_stack() is not None:
            self._replace(frame)
            return
        for watched in own:
            is_alias = frame.stage is Stage.BACKWARD and not watched.parameter.requires_grad
            self._notes.acquire(watched, is_alias=is_alias)
            frame.acquired.append(watched)
        others = _top_saved_tensors_default_hooks(True)
        if frame.saved_tensors is None and (others is None or others[0] is not self._autograd.pack):
            frame.saved_tensors = self._autograd.keep_inside()

    def _leave_module(self, frame: Frame, output: Any) -> Any:
        """Ends the forward of a module; returns what takes the place of its output."""
        self._notes.frames.end(frame)
        for watched in frame.acquired:
            self._notes.release(watched)  # type: ignore[arg-type]
        for lookup in frame.lookups.values():
            self._end_lookup(frame, lookup, output)
        result = output if frame.autocast is None else self._casting.widen(output)
        frame.leave_contexts()
        if not self._stack and frame.stage is not Stage.BACKWARD:
            self._notes.add(op_trace.LeaveForward(self._is_inner(frame)))
        return result

    def _replace(self, frame: Frame) -> None:
        """Puts copies in the place of a module's parameters, for a forward under ``torch.func``; see ``hooks``."""
        for places, key, watched in self._places_of(frame.module):
            self._notes.acquire(watched)
            places[key] = watched.parameter.clone()
            self._notes.release(watched)
            frame.replaced.append((places, key, watched.parameter))

    # Embeddings that are looked up at home

    def _begin_lookup(self, frame: Frame, watched: Any) -> None:
        self._is_quiet = True
        with torch.inference_mode(False):  # a tensor of inference mode has no version
            leaf = raw_data(watched.parameter).new_empty(watched.spec.shape)
        self._is_quiet = False
        self._charges.put(leaf, Tier.HOST)
        key = storage_key(leaf)
        self._owned.add(key)
        weakref.finalize(leaf.untyped_storage(), self._owned.discard, key)  # other memory may be at the same address
        leaf.requires_grad_(watched.spec.trainable and torch.is_grad_enabled())
        if leaf.requires_grad:

            def store(found: torch.Tensor) -> None:
                gradient, found.grad = found.grad, None
                if gradient is not None:
                    self._autograd.notice_backward()
                    self._notes.add_gradient(watched, gradient, is_at_home=True)

            leaf.register_post_accumulate_grad_hook(store)
        frame.lookups[id(watched.parameter)] = Lookup(watched, leaf, leaf._version)

    def _end_lookup(self, frame: Frame, lookup: Lookup, output: Any) -> None:
        counts = frame.stage is Stage.FORWARD and isinstance(output, torch.Tensor)
        self._notes.add(op_trace.LookedUp(lookup.tensor.spec.index, output.nbytes if counts else 0))
        if lookup.leaf._version != lookup.version:  # an embedding with ``max_norm`` has changed its rows
            self._notes.is_odd = True

    # Backward; see ``Autograd``

    def _pack(self, operand: torch.Tensor) -> Any:
        key = storage_key(operand)
        watched = self._watched.get(id(operand)) or self._by_storage.get(key) or self._notes.exact.get(key)
        if watched is None or operand.dtype not in (watched.placeholder.dtype, watched.typed.dtype):
            return self._keep(operand)
        view = raw_data(operand) if isinstance(operand, LiveMixin) else operand
        return Operand(watched, view, is_exact=operand.dtype is not watched.placeholder.dtype)

    def _keep(self, operand: torch.Tensor) -> Any:
        """Keeps an operand that is no parameter; see ``Kept``."""
        stand_in = None
        if operand.dim() < LEAST_DIM:
            return operand.detach() if operand.requires_grad else operand
        if has_no_value(operand) and operand.layout is torch.strided and operand.numel():
            self._is_quiet = True
            stand_in = operand.new_empty_strided(operand.size(), operand.stride())
            self._is_quiet = False
            self._charges.put(stand_in, self._charges.tier_of(operand))
        return self._notes.keep(operand, stand_in) or (operand.detach() if operand.requires_grad else operand)

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, Activation):
            self._notes.add(op_trace.Wanted(saved.number))
            return saved.tensor
        if not saved.is_exact:
            self._notes.add(op_trace.Need(saved.watched.spec.index))
            self._notes.note_use(saved.watched)
        view = saved.view()
        return view.clone() if torch.is_grad_enabled() else view  # type: ignore[no-any-return]

    def _end_backward(self) -> None:
        self._notes.add(op_trace.LeaveBackward())

    def _store_gradient(self, parameter: torch.Tensor) -> None:
        self._autograd.notice_backward()
        gradient = take_raw_grad(parameter)
        if gradient is not None:
            self._notes.add_gradient(self._watched[id(parameter)], gradient, is_at_home=False)

    # Operators

    def answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """See ``AnsweringMode``.

        Raises:
            TraceError: If the operator communicates, or its result depends on values.
        """
        if self._setting.check_time is not None:
            self._setting.check_time()
        if func is ASKS_VALUE and self._setting.note_question is not None and has_no_value(args[0]):
            self._setting.note_question()
        name = str(func)
        if name.partition(".")[0] in _COLLECTIVES:
            raise TraceError(
                f"the model calls the collective '{name}', which nobody answers while its operators are recorded with "
                "tensors without bytes"
            )
        try:
            return super().answer(func, args, kwargs)
        except _UNANSWERED as error:
            raise TraceError(
                f"the model calls operator '{func}', whose result depends on values that tensors without bytes do not "
                f"have ({type(error).__name__}: {error})"
            ) from error

    def has_run(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """See ``AnsweringMode``."""
        if self._is_quiet:
            return
        cost = cost_of(func, args, kwargs, result)
        if cost is not None:
            for work in self._charges.charge(func, args, kwargs, result, cost):
                self._notes.add(work)
        self._notes.add_results(result)
        self._is_quiet = True
        self._notes.add_results(unpacked(func, args, result))
        self._is_quiet = False
