"""The parameters under management: which there are, and how each has its value for a while."""

import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from hf_patrickstar.errors import DeviceMemoryError, EngineError
from hf_patrickstar.runtime.chunk import MASTER, Chunk, ManagedTensor
from hf_patrickstar.runtime.gradient_place import GradientPlace
from hf_patrickstar.runtime.gradients import Gradients
from hf_patrickstar.runtime.guard import Guard
from hf_patrickstar.runtime.live_parameter import acquired_type, requires_grad
from hf_patrickstar.runtime.resident import acquire_idle, release_unchanged
from hf_patrickstar.runtime.steps import Steps
from hf_patrickstar.runtime.turns import Turns, pauses_s
from hf_patrickstar.runtime.writes import Writes


class Parameters:
    """Finds parameters, and gives them their values.

    Args:
        chunks: All chunks; the list may grow.
        steps: Brings chunks to the device.
        gradients: Makes way for a value that is needed while a gradient is in its place.
        writes: Takes over what users wrote to a parameter.
        turns: Knows whether other threads may read parameters.

    Attributes:
        tensors: All, in model order.
        by_index: The same by their number.
        held_outside_forward: Those that code in backward acquired with no forward around it.
    """

    def __init__(
        self, chunks: Sequence[Chunk], steps: Steps, gradients: Gradients, writes: Writes, turns: Turns
    ) -> None:
        self.tensors: list[ManagedTensor] = []
        self.by_index: dict[int, ManagedTensor] = {}
        self.held_outside_forward: list[ManagedTensor] = []
        self._by_parameter: dict[int, ManagedTensor] = {}
        self._steps = steps
        self._executor = steps.executor
        self._gradients = gradients
        self._writes = writes
        self._lock = gradients.lock
        self._turns = turns
        self._guard = Guard(turns)
        self._is_trained = False  # whether any chunk has masters, so that gradients are asked for
        tensors = (tensor for chunk in chunks for tensor in chunk.tensors)
        self.index(sorted(tensors, key=lambda tensor: tensor.spec.index))

    # Which there are

    def index(self, tensors: Sequence[ManagedTensor]) -> None:
        """Takes note of which parameters there are.

        Args:
            tensors: All, in model order.
        """
        self.tensors[:] = tensors
        self.by_index.clear()
        self.by_index.update((tensor.spec.index, tensor) for tensor in tensors)
        self._by_parameter = {id(tensor.parameter): tensor for tensor in tensors}
        self._is_trained = any(tensor.chunk.has_list(MASTER) for tensor in tensors)

    def find(self, parameter: torch.Tensor) -> ManagedTensor | None:
        """The managed parameter that a parameter is, or ``None``."""
        tensor = self._by_parameter.get(id(parameter))
        return None if tensor is None or tensor.is_given_up else tensor

    def forget(self, tensor: ManagedTensor) -> None:
        """Forgets a parameter that is removed; ``index`` follows when all that change have changed."""
        self._by_parameter.pop(id(tensor.parameter), None)

    # Their values

    @property
    def type_of(self) -> Callable[[type], type]:
        """Finds the class that a parameter has while it has its value, by the class that it had before the engine."""
        return self._guard.type_of if self._turns.others_may_read() else acquired_type

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
                    try:
                        return self._acquire(tensor, module_name, is_alias)
                    except DeviceMemoryError:
                        is_held = self._is_held_elsewhere()  # by now, as the attempt has seen it
                        raise
            except DeviceMemoryError as error:
                pauses = iter(pauses_s()) if pauses is None else pauses
                pause_s = next(pauses)
                # Where the system refused memory, no thread will let go of it.
                if not pause_s or not is_held or error.__cause__ is not None:
                    self._steps.give_up()
                    raise
                time.sleep(pause_s)

    def _acquire(self, tensor: ManagedTensor, module_name: str, is_alias: bool) -> None:
        if tensor.users == 0:
            if tensor.is_open:
                self.check_usable(tensor)
            if not tensor.spec.trainable:
                self._check_unfrozen(tensor)
            self._writes.take_over(tensor)
        payload = self._ensure_on_device(tensor, module_name)
        tensor.read_at = tensor.num_writes
        if not is_alias and not tensor.is_materialized:
            tensor.materialize(payload, self.type_of)
        if tensor.users == 0:
            tensor.chunk.num_computing += 1
        tensor.users += 1
        tensor.threads.append(threading.get_ident())

    def acquire_all(
        self, tensors: Sequence[ManagedTensor], module_name: str, acquired: list[ManagedTensor], *, is_recomputed: bool
    ) -> None:
        """Gives the parameters of a module their values: what ``acquire`` does for each, in order.

        Args:
            tensors: The parameters.
            module_name: Who asks, for errors.
            acquired: Each is added to it as soon as it has its value.
            is_recomputed: Whether the forward runs again inside of a backward. Of a frozen parameter checkpointing
                would keep the object, which has no value later: it is an alias, and its chunk stays.

        Raises:
            Exception: See ``acquire``.
        """
        begin = len(acquired)
        if peek_interpreter_stack() is None and not torch.is_inference_mode_enabled():
            with self._lock:
                if self._executor.is_at_rest:
                    handed_out = self._writes.handed_out()
                    acquire_idle(tensors, acquired, self.type_of, handed_out, is_recomputed=is_recomputed)
            if len(acquired) - begin == len(tensors):
                return
        for tensor in tensors[len(acquired) - begin :]:
            is_alias = is_recomputed and not requires_grad(tensor.parameter)
            self.acquire(tensor, module_name, is_alias=is_alias)
            acquired.append(tensor)

    def release_all(self, tensors: Sequence[ManagedTensor]) -> None:
        """Ends one acquisition of each of the parameters of a module, in order."""
        num_released = 0
        if peek_interpreter_stack() is None:
            with self._lock:
                if self._executor.is_at_rest and not self._writes.is_watching:
                    num_released = release_unchanged(tensors)
            if num_released == len(tensors):
                return
        for tensor in tensors[num_released:]:
            self.release(tensor)

    def _is_held_elsewhere(self) -> bool:
        """Whether another thread holds a parameter, and may let go of it."""
        this = threading.get_ident()
        return any(ident != this for tensor in self.tensors for ident in tensor.threads)

    def release(self, tensor: ManagedTensor) -> None:
        """Ends one acquisition; after the last, the parameter is a placeholder again."""
        if peek_interpreter_stack() is not None:
            with temporarily_clear_interpreter_stack():
                return self.release(tensor)
        with self._lock:
            tensor.users -= 1
            this = threading.get_ident()  # what code in backward holds, any thread may release
            tensor.threads.remove(this if this in tensor.threads else tensor.threads[-1])
            if tensor.users == 0:
                tensor.chunk.num_computing -= 1
                if tensor.is_materialized:
                    self._writes.take_back(tensor)
        return None

    def release_held_outside_forward(self) -> None:
        """Takes back parameters that were read outside of every forward."""
        with self._lock:
            while self.held_outside_forward:
                self.release(self.held_outside_forward.pop())

    def find_at_rest(self, tensor: ManagedTensor) -> torch.Tensor | None:
        """The payload to compute with where ``ensure_on_device`` has nothing to do but to find it, else ``None``."""
        if tensor.gradient is GradientPlace.PARAM or not self._executor.is_at_rest:
            return None
        return tensor.chunk.compute

    def ensure_on_device(self, tensor: ManagedTensor, who: str) -> torch.Tensor:
        """The payload to compute with, with this parameter's value; while it is aliased its chunk cannot leave.

        Args:
            tensor: The parameter.
            who: Who asks, for errors.
        """
        try:
            with self._lock:
                return self._ensure_on_device(tensor, who)
        except DeviceMemoryError:
            self._steps.give_up()
            raise

    def _ensure_on_device(self, tensor: ManagedTensor, who: str) -> torch.Tensor:
        if tensor.gradient is GradientPlace.PARAM and not tensor.chunk.is_group:
            self._gradients.move_to_list(tensor)
        return self._executor.ensure_on_device(tensor.chunk, who)

    # Checks

    def check_usable(self, tensor: ManagedTensor) -> None:
        """Refuses to use a parameter that is open.

        Raises:
            EngineError: If so.
        """
        if tensor.is_open:
            raise EngineError(
                f"parameter '{tensor.spec.name}' is open in full_parameters(); run the model after the block has ended"
            )

    def check_gradient(self, tensor: ManagedTensor) -> None:
        """Refuses a gradient that the engine cannot store, or that was computed with something else than the value.

        Raises:
            EngineError: If so.
        """
        if not tensor.spec.trainable:
            raise EngineError(_unfrozen(tensor))
        if tensor.read_at < tensor.num_writes - 1:
            raise EngineError(
                f"a gradient arrived for parameter '{tensor.spec.name}', whose value was not read in this step nor "
                "in the one before: what computed with it went around torch's functions and found NaN in its "
                "place; let it read the parameter inside of the forward of the module that owns it, or in "
                "full_parameters()"
            )

    def _check_unfrozen(self, tensor: ManagedTensor) -> None:
        """Refuses to compute with a frozen parameter whose gradient would stay on this process, and not be averaged.

        One that is unfrozen between forwards is adopted by then. Alone, autograd keeps the gradient of any other.

        Raises:
            EngineError: If so.
        """
        is_unfrozen = torch.is_grad_enabled() and requires_grad(tensor.parameter)
        if is_unfrozen and tensor.chunk.is_group and self._is_trained:
            raise EngineError(_unfrozen(tensor))


def _unfrozen(tensor: ManagedTensor) -> str:
    return (
        f"parameter '{tensor.spec.name}' was unfrozen inside of a forward, where the processes cannot agree on a place "
        "for its gradient; set requires_grad between two steps: before the model is called, or in a TrainerCallback "
        "(on_step_begin, on_epoch_begin)"
    )
