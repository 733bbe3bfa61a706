"""Writes to parameters, by the engine and by users, and how the engine finds the users' writes.

[Note: writes without a trace]
Writes by torch's functions to a parameter come here at once. A write to ``parameter.data``, or to a view that outlives
its use, leaves no trace; ``watch`` finds it by comparison. Other copies that users have are compared by mirrors. After
an assignment (``parameter.data = x``) earlier graphs keep the value that they need, as torch keeps the memory.
"""

import dataclasses
from collections.abc import Iterable

import torch

from hf_patrickstar.layout.specs import MASTER
from hf_patrickstar.model.live_parameter import LiveMixin, raw_data, set_raw_data, storage_key
from hf_patrickstar.runtime.gradients import Gradients
from hf_patrickstar.runtime.mirrors import Fingerprint, GradientMirrors, ValueMirrors
from hf_patrickstar.runtime.parameter import GradientPlace, ManagedParameter


@dataclasses.dataclass(eq=False)
class Writes:
    """Brings a value that is written to a parameter to every place of this value.

    Attributes:
        gradients: Has the gradients.
        mirrors: Copies of values that users have; they follow each write.
        gradient_mirrors: Copies of gradients that users have.
        watched: Parameters whose value on the device is compared when they are released; see ``watch``.
    """

    gradients: Gradients
    mirrors: ValueMirrors
    gradient_mirrors: GradientMirrors
    watched: dict[ManagedParameter, Fingerprint] = dataclasses.field(default_factory=dict)

    # Known writes

    def apply(self, tensor: ManagedParameter, value: torch.Tensor, *, voids_graphs: bool = True) -> None:
        """Changes the value of a parameter, in every place where it is; see ``ManagedParameter.write``."""
        tensor.write(value, voids_graphs=voids_graphs)
        self.mirrors.refresh(tensor)

    def follow_master(self, tensor: ManagedParameter) -> None:
        """Lets the value of a parameter follow a change of its fp32 master."""
        self.apply(tensor, tensor.view(tensor.chunk.lists[MASTER]))

    def assign(self, tensor: ManagedParameter, value: torch.Tensor) -> None:
        """What ``parameter.data = value`` means: in torch both are the same memory from now on.

        Args:
            tensor: The parameter.
            value: A tensor that requires no gradient.
        """
        if tuple(value.shape) != tensor.spec.shape:
            self.give_up(tensor, value)
            return
        with self.gradients.lock:
            self.mirrors.drop(tensor)
            self._end_epoch(tensor)
            self.apply(tensor, value, voids_graphs=False)
            if value.dtype == tensor.original_dtype:
                self.mirrors.add(tensor, value)

    def take_back(self, tensor: ManagedParameter) -> None:
        """Takes the value away from a parameter, and takes over what was written to it meanwhile."""
        parameter, storage = tensor.parameter, tensor.chunk.storage
        assert storage is not None
        is_other = storage_key(parameter) != storage._cdata
        if is_other or parameter._version != tensor.version or parameter.shape != tensor.spec.shape:
            self._take_over_value(tensor, is_other=is_other)
        else:
            tensor.dematerialize()
            if tensor in self.watched:
                self._compare(tensor)

    def _take_over_value(self, tensor: ManagedParameter, *, is_other: bool) -> None:
        """Takes a value away from a parameter that was written to, or assigned, since the parameter got its value."""
        value = raw_data(tensor.parameter)
        if tuple(value.shape) != tensor.spec.shape:
            self.give_up(tensor, value)
            return
        tensor.dematerialize()
        if is_other:
            self._end_epoch(tensor)
        self.apply(tensor, value, voids_graphs=False)

    def _end_epoch(self, tensor: ManagedParameter) -> None:
        """Keeps the value that earlier graphs need, as torch keeps the memory that a parameter had."""
        epoch = None if tensor.epoch is None else tensor.epoch()
        if epoch is not None:
            widest = torch.promote_types(tensor.original_dtype, tensor.chunk.dtype)
            epoch.value = tensor.look(widest).clone()
            tensor.epoch = None

    # Writes without a trace

    def watch(self, tensor: ManagedParameter) -> None:
        """Looks for what is written to a copy on the device without a trace: by ``.data``, or a view that outlives it.

        The copy stays on the device until it has been compared with its home.
        """
        compute = tensor.chunk.compute
        if compute is not None and tensor not in self.watched:
            self.watched[tensor] = Fingerprint(tensor, tensor.view_copy(compute))
            tensor.chunk.num_watched += 1

    def settle_watched(self) -> None:
        """Compares what no module computes with any more, so that its copies may leave."""
        with self.gradients.lock:
            for tensor in [tensor for tensor in self.watched if not tensor.users]:
                self._compare(tensor)

    def _compare(self, tensor: ManagedParameter) -> None:
        compute = tensor.chunk.compute
        if compute is not None and (tensor.gradient is not GradientPlace.PARAM or tensor.chunk.is_group):
            self._take_over_copy(tensor, compute)
        if not tensor.chunk.is_aliased:  # else it may still be written to
            self._unwatch(tensor)

    def _take_over_copy(self, tensor: ManagedParameter, compute: torch.Tensor) -> None:
        """Takes over what was written to the copy; the view that it looks through is gone when it returns."""
        value = tensor.view_copy(compute)
        if self.watched[tensor].has_changed(value):
            self.apply(tensor, value, voids_graphs=False)

    def _unwatch(self, tensor: ManagedParameter) -> None:
        if self.watched.pop(tensor, None) is not None:
            tensor.chunk.num_watched -= 1

    def sync(self) -> None:
        """Takes over what users wrote without a trace, before values are used."""
        if self.watched:
            with self.gradients.lock:
                for tensor in list(self.watched):
                    self._compare(tensor)
        self.mirrors.sync()
        self.gradient_mirrors.sync()

    def take_over(self, tensor: ManagedParameter, *, keeps_unused: bool = False) -> None:
        """Does for one parameter what ``take_over_all`` does for several."""
        self.take_over_all((tensor,), keeps_unused=keeps_unused)

    def take_over_all(self, tensors: Iterable[ManagedParameter], *, keeps_unused: bool = False) -> None:
        """Takes over what users wrote to parameters: to what was handed out, or around torch's functions.

        Args:
            tensors: The parameters.
            keeps_unused: As for ``ValueMirrors.sync_one``.
        """
        mirrored = self.mirrors.by_tensor
        for tensor in tensors:
            parameter = tensor.parameter
            is_ours = isinstance(parameter, LiveMixin) or not tensor.is_bound
            # An assignment while it has its value, or is open, is found when that ends.
            is_left = is_ours and (tensor.is_materialized or storage_key(parameter) == tensor.placeholder_key)
            if not (is_left or tensor.is_open):
                self._take_over_data(tensor)
            if mirrored and tensor.spec.index in mirrored:
                self.mirrors.sync_one(tensor, keeps_unused=keeps_unused)

    def _take_over_data(self, tensor: ManagedParameter) -> None:
        if not tensor.is_ours:
            self.give_up_swapped(tensor)
            return
        value = raw_data(tensor.parameter)
        tensor.dematerialize()
        self.assign(tensor, value)

    # Parameters that leave

    def give_up(self, tensor: ManagedParameter, value: torch.Tensor) -> None:
        """Lets go of a parameter that somebody gave another shape; the engine takes it in again when it is used.

        Args:
            tensor: The parameter.
            value: Its present value.
        """
        self._drop(tensor)
        tensor.is_given_up = True
        set_raw_data(tensor.parameter, value)
        tensor.unbind()

    def give_up_swapped(self, tensor: ManagedParameter) -> None:
        """Lets go of a parameter that was exchanged for another tensor (``torch.utils.swap_tensors``).

        The parameter becomes an ordinary one. The other tensor answers for the value in the chunk now, and gets this
        value.

        Args:
            tensor: The managed tensor of the parameter.
        """
        if not tensor.is_given_up:
            self.mirrors.sync_one(tensor)
            tensor.live.kept = tensor.read().to(tensor.device)
            self.give_up(tensor, raw_data(tensor.parameter))

    def forget(self, tensor: ManagedParameter) -> None:
        """Drops mirrors and gradients of a parameter that is removed."""
        self._drop(tensor)
        self._unwatch(tensor)

    def _drop(self, tensor: ManagedParameter) -> None:
        self.mirrors.drop(tensor)
        self.gradient_mirrors.forget(tensor)
        self.gradients.drop(tensor)
