"""Records what a micro-batch of a plain model does; see [Note: micro-batches that are replayed].

The recorder listens to the model as an engine does: the same hooks call it, parameters answer in the same way, and
autograd keeps operands in the same way. It notes what an engine would do. The model has its parameters all the time, in
fake tensors without bytes.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from hf_patrickstar.common.stage import Stage
from hf_patrickstar.errors import TraceError
from hf_patrickstar.layout.specs import TensorSpec
from hf_patrickstar.memory.operators import unpacked
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.model.casting import Casting
from hf_patrickstar.model.live_parameter import RAW, Access, LiveMixin, raw_data, raw_grad, set_raw_grad, storage_key
from hf_patrickstar.model.lock import EngineLock
from hf_patrickstar.model.quantized import buffers_of, named_parameters
from hf_patrickstar.runtime.activations import LEAST_DIM
from hf_patrickstar.runtime.frames import Call, Frame, Frames, Lookup
from hf_patrickstar.runtime.hooks import ModelHooks
from hf_patrickstar.runtime.live_tensor import LiveTensor
from hf_patrickstar.schedule import op_trace
from hf_patrickstar.schedule.script import Begin, Part
from hf_patrickstar.schedule.trace import Shapes
from hf_patrickstar.tracing.answers import ASKS_VALUE, AnsweringMode, has_no_value
from hf_patrickstar.tracing.costs import Charges, cost_of
from hf_patrickstar.tracing.notes import Notes, SavedActivation, SavedOperand, Watched
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


class Recorder(AnsweringMode):
    """Listens to one model during one micro-batch; see ``ModelListener``, which has the meaning of most methods.

    Args:
        model: The model; its parameters are fake, in the types that they were loaded in, and have no gradients. It is
            as it was when ``run`` returns, or raises.
        specs: The parameters of the model as numbers.
        inputs: The tensors of the batch.
        casting: The types that forwards compute in.
        setting: How operators run.

    Attributes:
        notes: What was noted so far.
        parameters: The same, as ``ParameterValues``.
        tensors: The parameters of the model.
        frames: See ``ModelListener``.
        lock: See ``ModelListener``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        specs: Sequence[TensorSpec],
        inputs: Iterable[torch.Tensor],
        casting: Casting,
        setting: Setting,
    ) -> None:
        super().__init__()
        self._model, self._casting, self._setting = model, casting, setting
        parameters = named_parameters(model)
        self.tensors = [Watched(spec, parameters[spec.name], setting.looked_up) for spec in specs]
        self.parameters = self.notes = Notes(inputs, buffers_of(model), self.tensors)
        self.frames, self.lock = Frames(), EngineLock()
        self.resting: tuple[frozenset[int], bool] = frozenset(), False
        self._charges = Charges(has_accelerator=setting.has_accelerator, times=setting.times)
        self._is_quiet = False
        self._is_evaluation = not torch.is_grad_enabled()

    def run(self, forward: Callable[[], Any], backward: Callable[[Any], Any] | None) -> op_trace.OpTrace | None:
        """Runs a micro-batch, and notes what it does; called under fake tensors.

        A forward under ``torch.no_grad()`` is an evaluation.

        Args:
            forward: Computes the loss with the model.
            backward: Runs the backward of what ``forward`` has returned; ``None`` for a forward alone.

        Returns:
            The notes, or ``None`` if the model does something that the notes have no word for.

        Raises:
            TraceError: If the model communicates, asks for a value that only bytes have, or takes too long.
        """
        with self._attached():
            self.notes.add(Begin(Part.FORWARD))
            result = forward()
            if backward is not None:
                self.notes.add(Begin(Part.BACKWARD))
                result = backward(result)
            found = self.notes.end()
        del result  # which lives until then, and so does what a backward would need
        return found

    @contextlib.contextmanager
    def _attached(self) -> Iterator[None]:
        """Inside of it the model is listened to; what is compiled runs as it is written."""
        hooks = ModelHooks(self._model, self, torch.device("cpu"), self._casting)
        with contextlib.ExitStack() as stack:
            stack.callback(hooks.packed_layers.restore)
            for watched in self.tensors:
                stack.callback(watched.unbind)
            stack.callback(hooks.detach)
            hooks.attach()
            for watched in self.tensors:
                watched.bind(LiveWatched(watched, self, hooks.autograd, self._casting.inputs is not None))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self)
            yield

    # Modules

    def before_forward(self, call: Call, shapes: Shapes, present: Iterable[torch.Tensor]) -> None:
        """An outermost forward begins."""
        if self._is_evaluation and call.is_training:
            self.notes.is_odd = True
        self.notes.enter_forward(shapes, present, is_inner=not (call.is_training or self._is_evaluation))

    def after_forward(self, frame: Frame, *, has_failed: bool) -> None:
        """It has ended."""
        is_inner = frame.stage is Stage.EVALUATION and not self._is_evaluation
        self.notes.add(op_trace.LeaveForward(is_inner))
        self.lock.release()

    def before_module(self, frame: Frame, own: Sequence[Watched], name: str) -> None:
        """A module computes with its parameters from now on."""
        self.notes.acquire_all(own, name, frame.acquired, is_recomputed=frame.stage is Stage.BACKWARD)

    def after_module(self, frame: Frame) -> None:
        """It has computed."""
        self.frames.end(frame)
        self.notes.release_all(frame.acquired)  # type: ignore[arg-type]

    def lookup_begin(self, tensor: Any) -> Lookup:
        """A tensor on the host stands in for the weight of an embedding that is looked up at home."""
        self._is_quiet = True
        with torch.inference_mode(False):  # a tensor of inference mode has no version
            leaf = raw_data(tensor.parameter).new_empty(tensor.spec.shape)
        self._is_quiet = False
        self._charges.put(leaf, Tier.HOST)
        self.notes.own(leaf)
        leaf.requires_grad_(tensor.spec.trainable and torch.is_grad_enabled())
        return Lookup(tensor, leaf, leaf._version)

    def lookup_end(self, lookup: Lookup, nbytes: int) -> None:
        """The embedding has read its rows."""
        self.notes.add(op_trace.LookedUp(lookup.tensor.spec.index, nbytes))
        if lookup.leaf._version != lookup.version:  # an embedding with ``max_norm`` has changed its rows
            self.notes.is_odd = True

    def unwind(self) -> None:
        """Ends forwards that were interrupted."""
        while self.frames.stack:
            frame = self.frames.stack.pop()
            frame.leave_contexts()
            self.frames.end(frame)

    # Autograd

    def is_parameter(self, key: int) -> bool:
        """Whether the memory of a parameter has this address."""
        return key in self.notes.by_storage

    def pack(self, operand: torch.Tensor) -> Any:
        """Keeps an operand by what is noted of it."""
        key, notes = storage_key(operand), self.notes
        watched = notes.by_parameter.get(id(operand)) or notes.by_storage.get(key) or notes.exact.get(key)
        if watched is None or operand.dtype not in (watched.placeholder.dtype, watched.typed.dtype):
            return self._keep(operand)
        view = raw_data(operand) if isinstance(operand, LiveMixin) else operand
        return SavedOperand(watched, view, is_exact=operand.dtype is not watched.placeholder.dtype)

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
        return self.notes.keep(operand, stand_in) or (operand.detach() if operand.requires_grad else operand)

    def operand_needed(self, saved: Any) -> torch.Tensor:
        """Notes that backward needs an operand."""
        if isinstance(saved, SavedActivation):
            self.notes.add(op_trace.Wanted(saved.number))
            return saved.tensor
        if not saved.is_exact:
            self.notes.add(op_trace.Need(saved.watched.spec.index))
            self.notes.note_use(saved.watched)
        view = saved.view()
        return view.clone() if torch.is_grad_enabled() else view  # type: ignore[no-any-return]

    def backward_begin(self, end: Callable[[], None]) -> None:
        """Nothing is to be noted: notes of its operands say when it begins."""

    def backward_end(self) -> None:
        """A backward has ended."""
        self.notes.add(op_trace.LeaveBackward())

    def store_gradient(self, tensor: Watched, gradient: torch.Tensor, *, is_at_home: bool = False) -> None:
        """A gradient is finished."""
        self.notes.add_gradient(tensor, gradient, is_at_home=is_at_home)

    gradient_ready = recorded_gradient_ready = store_gradient

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
                self.notes.add(work)
        self.notes.add_results(result)
        self._is_quiet = True
        self.notes.add_results(unpacked(func, args, result))
        self._is_quiet = False


class LiveWatched(LiveTensor):
    """Answers for one parameter of a model that is recorded.

    Whatever looks into the parameter looks into its own memory, and is noted as an engine has it.
    """

    listener: Recorder

    def access_at_home(self, func: Any, *, writes: bool) -> Access:
        """See ``LiveTensor``; what it would wait for no notes can tell."""
        self.listener.notes.is_odd = True
        return Access(raw_data(self.tensor.parameter).to(self.typed.dtype))

    def alias(self) -> torch.Tensor:
        """See ``LiveTensor``."""
        return raw_data(self.tensor.parameter)

    def graph_copy(self) -> torch.Tensor:
        """See ``LiveTensor``."""
        return self.tensor.parameter.clone()  # type: ignore[no-any-return]

    def exact_copy(self, value: torch.Tensor, *, is_graph: bool) -> torch.Tensor:
        """See ``LiveTensor``."""
        made = value.to(self.tensor.typed.dtype)
        self.listener.notes.exact[storage_key(made)] = self.tensor
        return made

    def get_grad(self) -> torch.Tensor | None:
        """The gradient, which is there in the middle of a backward."""
        return raw_grad(self.tensor.parameter)

    def set_grad(self, gradient: torch.Tensor | None) -> None:
        """Replaces the gradient."""
        set_raw_grad(self.tensor.parameter, gradient)

    def assign(self, value: torch.Tensor) -> None:
        """Notes an assignment; the parameter stays as it is, since the model is not the recording's to change."""
        self.listener.notes.is_odd |= value is not self.tensor.parameter

    def host_value(self) -> torch.Tensor:
        """The value, which has no bytes: nothing that depends on it can be noted."""
        self.listener.notes.is_odd = True
        return raw_data(self.tensor.parameter)

    def view_whole(self, func: Any) -> torch.Tensor:
        """A view of the whole parameter in the graph of autograd."""
        with torch.enable_grad(), RAW():
            return func(self.tensor.parameter, self.tensor.parameter)  # type: ignore[no-any-return]
