"""What is written to parameters, by the engine and by users, and how the latter is found out.

[Note: writes without a trace]
What torch's functions write to a parameter comes here at once. What is written to ``parameter.data``, or to a view that
outlives its use, leaves no trace: such a parameter is watched, and its copy on the device compared with its home before
the copy is used or dropped. What was handed out otherwise is compared by ``Mirrors``. Where the parameter was made to
be another memory (``parameter.data = x``), graphs of before keep the value that they need, as torch keeps the memory.
"""

import torch

from hf_patrickstar.runtime.bits import same_bits
from hf_patrickstar.runtime.chunk import MASTER, Chunk, Epoch, GradientPlace, ManagedTensor
from hf_patrickstar.runtime.gradients import Gradients
from hf_patrickstar.runtime.live_parameter import raw_data, storage_key
from hf_patrickstar.runtime.mirrors import Mirrors, checksum_of
from hf_patrickstar.runtime.values import Values


class Writes:
    """Takes what is written to parameters to every place where they are.

    Args:
        values: Writes values.
        mirrors: What was handed out, which follows.
        gradients: Has the gradients; its lock is held while values change.
    """

    def __init__(self, values: Values, mirrors: Mirrors, gradients: Gradients) -> None:
        self._values = values
        self._mirrors = mirrors
        self._gradients = gradients
        self._lock = gradients.lock
        self._is_alone = values.sharing.is_alone
        self._watched: dict[ManagedTensor, int] = {}  # with a checksum of the copy, if there are several processes

    # Known ones

    def apply(self, tensor: ManagedTensor, value: torch.Tensor, *, voids_graphs: bool = True) -> None:
        """Changes the value of a parameter, in every place where it is; see ``Values.write``."""
        self._values.write(tensor, value, voids_graphs=voids_graphs)
        self._mirrors.refresh_value(tensor)

    def follow_master(self, tensor: ManagedTensor) -> None:
        """Lets the value of a parameter follow a change of its fp32 master."""
        self.apply(tensor, tensor.view(tensor.chunk.lists[MASTER]))

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
            self._mirrors.drop_values(tensor)
            self._end_epoch(tensor)
            self.apply(tensor, value, voids_graphs=False)
            if value.dtype == tensor.chunk.param.dtype:
                self._mirrors.add_value(tensor, value)

    def take_back(self, tensor: ManagedTensor) -> None:
        """Ends a parameter's having a value, and takes over what was written to it meanwhile."""
        parameter, storage = tensor.parameter, tensor.chunk.storage
        assert storage is not None
        is_other = storage_key(parameter) != storage._cdata
        if is_other or parameter._version != tensor.version or parameter.shape != tensor.spec.shape:
            self._take_over_value(tensor, is_other=is_other)
        else:
            tensor.dematerialize()
            if tensor in self._watched:
                self._compare(tensor)

    def _take_over_value(self, tensor: ManagedTensor, *, is_other: bool) -> None:
        """Ends a parameter's having a value that is not, or not any more, the one that it was given."""
        value = raw_data(tensor.parameter)
        if tuple(value.shape) != tensor.spec.shape:
            self.give_up(tensor, value)
            return
        tensor.dematerialize()
        if is_other:
            self._end_epoch(tensor)
        self.apply(tensor, value, voids_graphs=False)

    def _end_epoch(self, tensor: ManagedTensor) -> None:
        """Keeps what graphs of before need, as torch keeps memory that a parameter had."""
        if tensor.num_saved:
            tensor.epoch.value = self._values.look(tensor).clone()
            tensor.epoch = Epoch()

    # Those without a trace

    def sync(self) -> None:
        """Takes over what users wrote without a trace, before values are used."""
        self.collect()
        self._mirrors.sync()

    def take_over(self, tensor: ManagedTensor, *, keeps_unused: bool = False) -> None:
        """Takes over what users wrote to one parameter: to what was handed out, or around torch's functions.

        Args:
            tensor: The parameter.
            keeps_unused: As for ``Mirrors.sync_value``.
        """
        if not tensor.is_as_left:
            self._take_over_data(tensor)
        self._mirrors.sync_value(tensor, keeps_unused=keeps_unused)

    def _take_over_data(self, tensor: ManagedTensor) -> None:
        if not tensor.is_ours:
            self.give_up_swapped(tensor)
            return
        value = raw_data(tensor.parameter)
        tensor.dematerialize()
        self.assign(tensor, value)

    def watch(self, tensor: ManagedTensor) -> None:
        """Looks for what is written to a device copy without a trace: by ``.data``, or a view that outlives its use."""
        if tensor not in self._watched:
            self._watched[tensor] = self._checksum_of_copy(tensor)

    def collect(self, chunk: Chunk | None = None) -> None:
        """Takes over what was written to device copies of watched parameters.

        Args:
            chunk: The chunk whose copy is about to be dropped; all by default.
        """
        if self._watched:
            with self._lock:
                for tensor in [t for t in self._watched if chunk is None or t.chunk is chunk]:
                    self._compare(tensor)
                    if chunk is not None:
                        self._watched.pop(tensor, None)

    def _compare(self, tensor: ManagedTensor) -> None:
        chunk = tensor.chunk
        if chunk.compute is not None and (tensor.gradient is not GradientPlace.PARAM or not self._is_alone):
            value = tensor.view_copy(chunk.compute)
            if self._is_alone:
                home = self._values.own_part(tensor, value.dtype) if MASTER not in chunk.lists else self._master(tensor)
                is_written = not same_bits(value.to(home.device), home)
            else:
                before, self._watched[tensor] = self._watched[tensor], self._checksum_of_copy(tensor)
                is_written = before != self._watched[tensor]
            if is_written:
                self.apply(tensor, value, voids_graphs=False)
        if not chunk.is_aliased:  # else it may still be written to
            self._watched.pop(tensor, None)

    def _checksum_of_copy(self, tensor: ManagedTensor) -> int:
        """With several processes all find out by it what was written, wherever the value is at home."""
        compute = tensor.chunk.compute
        return 0 if self._is_alone or compute is None else checksum_of(tensor.view_copy(compute))

    def _master(self, tensor: ManagedTensor) -> torch.Tensor:
        """The value in the parameter's type, from ``master``: a static chunk has no other place to compare with."""
        return tensor.view(tensor.chunk.lists[MASTER]).to(tensor.chunk.param.dtype)

    # Parameters that go

    def give_up(self, tensor: ManagedTensor, value: torch.Tensor) -> None:
        """Lets go of a parameter that somebody gave another shape; the engine takes it in again when it is used.

        Args:
            tensor: The parameter.
            value: What it has now.
        """
        self._drop(tensor)
        tensor.is_given_up = True
        tensor.unbind()
        tensor.parameter.data = value

    def give_up_swapped(self, tensor: ManagedTensor) -> None:
        """Lets go of a parameter that was exchanged for another tensor (``torch.utils.swap_tensors``).

        It is an ordinary one, and the other tensor is what answers for the value in the chunk: that gets it.

        Args:
            tensor: A parameter that is not ours any more.
        """
        if not tensor.is_given_up:
            self._mirrors.sync_value(tensor)
            tensor.live.kept = self._values.read(tensor, tensor.original_dtype).to(tensor.device)
            self.give_up(tensor, raw_data(tensor.parameter))

    def forget(self, tensor: ManagedTensor) -> None:
        """Drops whatever there is of a parameter that is removed."""
        self._drop(tensor)
        self._watched.pop(tensor, None)

    def _drop(self, tensor: ManagedTensor) -> None:
        self._mirrors.drop_values(tensor)
        self._mirrors.drop_gradient(tensor)
        self._gradients.drop(tensor)
