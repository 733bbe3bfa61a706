"""What users have of parameters and their gradients, and what they write to it.

[Note: mirrors]
In torch ``parameter.data``, a view, ``numpy()`` and ``parameter.grad`` are the memory of the parameter: code that keeps
one sees every later change, and what is written to one counts. The memory of a chunk cannot be handed out, since the
place of a value may hold a gradient next. So a copy is, and the engine keeps the two the same: before it uses the value
it compares and takes over what was written, and when it has changed the value it writes to the copy. A copy that
nobody else refers to any more is compared once more and freed. With several processes what was handed out does not
follow (each process has a part of the value, and they need not keep the same), but what is written to it counts until
the next change.

[Note: writes without a trace]
Writes by torch's functions to a parameter come here at once. A write to ``parameter.data``, or to a view that outlives
its use, leaves no trace; ``watch`` finds it by comparison. Other copies that users have are compared by mirrors. After
an assignment (``parameter.data = x``) earlier graphs keep the value that they need, as torch keeps the memory.
"""

import dataclasses
import sys
import zlib
from collections.abc import Iterable, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hf_patrickstar.dist.sharing import Held
from hf_patrickstar.layout.specs import MASTER
from hf_patrickstar.memory.bits import same_bits
from hf_patrickstar.memory.operators import as_it_is
from hf_patrickstar.model.live_parameter import LiveMixin, raw_data, set_raw_data, storage_key
from hf_patrickstar.runtime.chunk import Device
from hf_patrickstar.runtime.gradients import Gradients
from hf_patrickstar.runtime.parameter import GradientPlace, ManagedParameter, ValuePlace

_SCAN_AT = 8
"""With so many parameters handed out, look for all that nobody uses any more; with fewer, at the last two alone."""


class Fingerprint:
    """How a tensor looked that has a parameter's value, and that users may write to without a trace.

    One process compares the bits of the tensor with those at home. Several processes compare checksums of the tensor,
    so that every process finds out, wherever the value is at home. One process does so, too, where the value is read
    from a file, which is not read again to compare. Fake tensors have no bytes: nobody has written to them.

    Args:
        tensor: The parameter.
        value: The tensor, as it is now.
    """

    def __init__(self, tensor: ManagedParameter, value: torch.Tensor) -> None:
        self._tensor = tensor
        self._has_bytes = not isinstance(value, FakeTensor)
        is_apart = not tensor.chunk.device.sharing.is_alone or tensor.has_original(value.dtype)
        self._has_checksum = self._has_bytes and is_apart
        self._checksum = 0
        self.renew(value)

    def renew(self, value: torch.Tensor) -> None:
        """Takes the tensor as it is now for the parameter's value."""
        if self._has_checksum:
            self._checksum = zlib.crc32(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def has_changed(self, value: torch.Tensor) -> bool:
        """Whether the tensor was written to since; a second call answers for the time after the first."""
        if not self._has_bytes:
            return False
        if not self._has_checksum:
            home = self._at_home(value.dtype)
            return not same_bits(self._tensor.chunk.device.streams.on_tier_of(value, home), home)
        before = self._checksum
        self.renew(value)
        return self._checksum != before

    def _at_home(self, dtype: torch.dtype) -> torch.Tensor:
        chunk = self._tensor.chunk
        if chunk.is_static and chunk.has_list(MASTER):  # what is computed with is at home, and may be this very tensor
            return self._tensor.view(chunk.lists[MASTER]).to(dtype)
        return self._tensor.own_part(dtype)


@dataclasses.dataclass(eq=False)
class Mirror:
    """A tensor that users look into, in place of a parameter or its gradient.

    Attributes:
        tensor: The parameter.
        value: What was handed out; users have aliases of it.
        is_held: Whether it must outlive its last reference, because only its address was asked for.
        fingerprint: How it looked, if it has a value.
    """

    tensor: ManagedParameter
    value: torch.Tensor
    is_held: bool = False
    fingerprint: Fingerprint | None = None

    def __post_init__(self) -> None:
        self.storage = self.value.untyped_storage()


class Mirrors:
    """What mirrors of values and of gradients have in common.

    Args:
        device: The device.

    Attributes:
        by_tensor: What was handed out of each parameter, by its index.
        follows: Whether it stays the same as the value; see [Note: mirrors].
    """

    def __init__(self, device: Device) -> None:
        self.by_tensor: dict[int, list[Mirror]] = {}
        self.follows = device.sharing.is_alone
        self._torch_device, self._lock = device.torch_device, device.lock
        self._num_own = device.num_mirrors
        self._recent: list[ManagedParameter] = []  # the last two that were asked for
        self._scan_at = _SCAN_AT

    def _enter(self, mirror: Mirror) -> Mirror:
        key = mirror.storage._cdata
        self._num_own[key] = self._num_own.get(key, 0) + 1
        self.by_tensor.setdefault(mirror.tensor.spec.index, []).append(mirror)
        return mirror

    def _leave(self, mirror: Mirror) -> None:
        index, key = mirror.tensor.spec.index, mirror.storage._cdata
        self.by_tensor[index].remove(mirror)
        if not self.by_tensor[index]:
            del self.by_tensor[index]
        self._num_own[key] -= 1
        if not self._num_own[key]:
            del self._num_own[key]

    def _is_used(self, mirror: Mirror) -> bool:
        """Whether anybody else has what was handed out, or looks into it.

        Each mirror is one user of its storage, and the storage's own Python object, which all mirrors over it share, is
        one more; of the tensor itself the mirror and the call below have a reference.
        """
        key = mirror.storage._cdata
        is_looked_into = torch._C._storage_Use_Count(key) > self._num_own[key] + 1
        num_own = 2 + (mirror.value is mirror.tensor.kept)
        return mirror.is_held or is_looked_into or sys.getrefcount(mirror.value) > num_own

    def sync_one(self, tensor: ManagedParameter) -> None:
        """Takes over what was written to a parameter's mirrors, and drops those that nobody uses."""
        raise NotImplementedError

    def sync(self) -> None:
        """Takes over what was written to anything that was handed out; the engine is about to use it."""
        if self.by_tensor:
            with self._lock:
                for tensor in [mirrors[0].tensor for mirrors in self.by_tensor.values()]:
                    self.sync_one(tensor)

    def sync_unused(self, but: ManagedParameter) -> None:
        """Takes over, and frees, what nobody refers to any more.

        A loop that binds a name to each value still has the one before when it asks for the next, so the last two that
        were asked for are looked at, and all of them from time to time.

        Args:
            but: A parameter whose mirrors stay; it is noted as the last that was asked for.
        """
        recent = self._recent
        if not recent or recent[-1] is not but:
            self._recent = [*recent[-1:], but]
        if not self.by_tensor:
            return
        with self._lock:
            scans = len(self.by_tensor) >= self._scan_at  # at every access it would be quadratic in a loop over all
            for tensor in [mirrors[0].tensor for mirrors in self.by_tensor.values()] if scans else recent:
                mirrors = () if tensor is but else self.by_tensor.get(tensor.spec.index, ())
                if not all(self._is_used(mirror) for mirror in mirrors):
                    self.sync_one(tensor)
            if scans:
                self._scan_at = max(_SCAN_AT, 2 * len(self.by_tensor))

    def forget(self, tensor: ManagedParameter) -> None:
        """Forgets what was handed out of a parameter; code that has it keeps it."""
        if tensor.spec.index in self.by_tensor:
            with self._lock:
                for mirror in list(self.by_tensor.get(tensor.spec.index, ())):
                    self._leave(mirror)

    def close(self) -> None:
        """Forgets everything."""
        for tensor in [mirrors[0].tensor for mirrors in self.by_tensor.values()]:
            self.forget(tensor)


class ValueMirrors(Mirrors):
    """All that was handed out of the values of parameters; see [Note: mirrors]."""

    def hand_out(self, tensor: ManagedParameter, *, is_on_host: bool = False, is_held: bool = False) -> torch.Tensor:
        """A copy of the value that stays the same as the value, in the type that the model was loaded in.

        Args:
            tensor: The parameter.
            is_on_host: Whether it is on the host; else it is on the compute device.
            is_held: Whether it must outlive its last reference.
        """
        with self._lock, as_it_is(), torch.no_grad():
            self.sync_one(tensor, keeps_unused=True)
            wanted, device = tensor.original_dtype, torch.device("cpu") if is_on_host else self._torch_device
            for mirror in self._reusable(tensor):
                if mirror.value.dtype == wanted and mirror.value.device == device and mirror.value.is_contiguous():
                    mirror.is_held |= is_held
                    return mirror.value
            return self.add(tensor, tensor.read() if is_on_host else tensor.look().clone(), is_held=is_held)

    def add(self, tensor: ManagedParameter, value: torch.Tensor, *, is_held: bool = False) -> torch.Tensor:
        """Lets a tensor that has a parameter's value stay the same as the value, and returns it.

        Args:
            tensor: The parameter.
            value: The tensor, which users have or will have.
            is_held: Whether it must outlive its last reference.
        """
        with self._lock:
            self._enter(Mirror(tensor, value, is_held, Fingerprint(tensor, value)))
            return value

    def sync_one(self, tensor: ManagedParameter, *, keeps_unused: bool = False) -> None:
        """See ``Mirrors``.

        Args:
            tensor: The parameter.
            keeps_unused: Drop none: the next call may ask for the same memory again.
        """
        if tensor.spec.index not in self.by_tensor:
            return
        with self._lock, as_it_is(), torch.no_grad():
            mirrors = self.by_tensor.get(tensor.spec.index, [])  # not before: another thread may drop them
            for mirror in list(mirrors):
                if mirror not in mirrors:
                    continue  # what was written to another one has ended it
                assert mirror.fingerprint is not None
                if mirror.fingerprint.has_changed(mirror.value):
                    tensor.write(mirror.value, voids_graphs=False)
                    self.refresh(tensor, but=mirror)
                if not (keeps_unused or self._is_used(mirror)):
                    self._leave(mirror)

    def sync(self) -> None:
        """See ``Mirrors``; what only the address was asked for lives no longer than until now."""
        for mirror in [mirror for mirrors in self.by_tensor.values() for mirror in mirrors]:
            mirror.is_held = False
        super().sync()

    def refresh(self, tensor: ManagedParameter, *, but: Mirror | None = None) -> None:
        """Lets the mirrors of a parameter follow a change of its value.

        Args:
            tensor: The parameter.
            but: The mirror that the change came from.
        """
        if tensor.spec.index not in self.by_tensor:
            return
        with self._lock, as_it_is(), torch.no_grad():
            for mirror in [mirror for mirror in self.by_tensor.get(tensor.spec.index, ()) if mirror is not but]:
                if self.follows:
                    assert mirror.fingerprint is not None
                    mirror.value.copy_(tensor.own_part(mirror.value.dtype))
                    mirror.fingerprint.renew(mirror.value)
                else:
                    self._leave(mirror)

    def has_reusable(self, tensor: ManagedParameter) -> bool:
        """Whether ``hand_out`` can give again what a user has already."""
        return bool(self._reusable(tensor))

    def _reusable(self, tensor: ManagedParameter) -> Sequence[Mirror]:
        """With several processes there are none: another one may not have its mirror any more, and all must read."""
        return self.by_tensor.get(tensor.spec.index, ()) if self.follows else ()

    def drop(self, tensor: ManagedParameter) -> None:
        """Takes over what was written to a parameter's mirrors; from now on they are tensors of their own."""
        with self._lock:
            self.sync_one(tensor)
            self.forget(tensor)


class GradientMirrors(Mirrors):
    """All that was handed out of gradients, one mirror of each; see [Note: mirrors].

    Args:
        device: The device.
        gradients: Has the gradients.
    """

    def __init__(self, device: Device, gradients: Gradients) -> None:
        super().__init__(device)
        self._gradients = gradients

    def of(self, tensor: ManagedParameter) -> Mirror | None:
        """The mirror of a parameter's gradient, if there is one."""
        mirrors = self.by_tensor.get(tensor.spec.index)
        return mirrors[0] if mirrors else None

    def hand_out(self, tensor: ManagedParameter) -> torch.Tensor:
        """The gradient as an ordinary tensor: the same one as long as somebody refers to it.

        Its type is the one that the parameter shows.

        Args:
            tensor: A parameter that has a gradient.
        """
        with self._lock, as_it_is(), torch.no_grad():
            if not self.follows:
                self.sync_one(tensor)
            mirror = self.of(tensor)
            left = tensor.kept if tensor.gradient is GradientPlace.LEFT else None
            if left is not None and left.dtype is tensor.original_dtype:
                return left if mirror else self._enter(Mirror(tensor, left)).value
            if mirror is None or not self.follows:
                mirror = self._copy_of(tensor, mirror)
            return mirror.value

    def _copy_of(self, tensor: ManagedParameter, known: Mirror | None) -> Mirror:
        home, wanted = self._gradients.of(tensor), tensor.original_dtype
        if self.follows:
            assert home is not None
            value = home.to(self._torch_device, wanted, copy=True)
        else:
            held = Held(tensor.spec, tensor.parts, home, wanted)
            value = tensor.chunk.device.sharing.tensor(held, "the gradient").to(self._torch_device)
        if known is not None:
            known.value.copy_(value)
            return known
        return self._enter(Mirror(tensor, value))

    def assign(self, tensor: ManagedParameter, gradient: torch.Tensor) -> None:
        """Makes a tensor the gradient of a parameter: its values, and what is written to it later.

        Args:
            tensor: The parameter.
            gradient: In the parameter's shape.
        """
        with self._lock, as_it_is(), torch.no_grad():
            self._gradients.drop(tensor)
            self._gradients.put(tensor, tensor.own(gradient.detach()))
            self.follow_recorded(tensor, gradient)

    def follow_recorded(self, tensor: ManagedParameter, gradient: torch.Tensor) -> None:
        """Makes a tensor that has the values of a parameter's gradient, and a graph, what is handed out of it.

        Args:
            tensor: The parameter.
            gradient: What a backward has computed that is recorded itself (``create_graph``).
        """
        with self._lock:
            self.forget(tensor)
            # With a graph it has more than its values, which are at home.
            self._enter(Mirror(tensor, gradient, is_held=gradient.requires_grad))

    def sync_one(self, tensor: ManagedParameter) -> None:
        """See ``Mirrors``."""
        if tensor.spec.index not in self.by_tensor:
            return
        with self._lock, as_it_is(), torch.no_grad():
            if tensor.spec.index not in self.by_tensor:  # asked again: another thread may have dropped it
                return
            (mirror,) = self.by_tensor[tensor.spec.index]
            if mirror.value is not tensor.kept:  # else it is the gradient itself
                self._take_over(tensor, mirror)
            if not self._is_used(mirror):
                self._leave(mirror)

    def _take_over(self, tensor: ManagedParameter, mirror: Mirror) -> None:
        """Takes over what was written to what was handed out."""
        if mirror.value.untyped_storage()._cdata != mirror.storage._cdata:  # gradient.data = value
            self._leave(mirror)
            mirror.storage = mirror.value.untyped_storage()
            self._enter(mirror)
        is_zero = tensor.gradient is GradientPlace.APART and tensor.kept is None and not mirror.value.any()
        home = None if is_zero else self._gradients.of(tensor)
        if home is not None:
            own = tensor.own(mirror.value.detach())
            if not same_bits(home.to(own.dtype), own.to(home.device)):
                self._gradients.put(tensor, own)
            del own  # which looks into it, too
        mirror.is_held |= mirror.value.requires_grad  # what was written to it was recorded

    def refresh(self, tensor: ManagedParameter) -> None:
        """Lets a gradient that was handed out follow a change: what another backward added, or clipping."""
        if tensor.spec.index not in self.by_tensor:
            return
        with self._lock, as_it_is(), torch.no_grad():
            home, mirror = self._gradients.of(tensor), self.of(tensor)
            if mirror is not None and self.follows and home is not None and 0 not in mirror.value.stride():
                mirror.value.copy_(home)
            else:
                self.forget(tensor)

    def zero(self, tensor: ManagedParameter) -> bool:
        """Writes zeros to a gradient that somebody has, and goes on following it; whether there is one."""
        with self._lock:
            mirror = self.of(tensor)
            if mirror is None or not (self.follows and self._is_used(mirror)):
                return False
            mirror.is_held = False
            mirror.value.detach_().requires_grad_(False).zero_()
            return True

    def kept(self, tensor: ManagedParameter) -> torch.Tensor | None:
        """The gradient of a parameter, if it follows and somebody still refers to what was handed out."""
        with self._lock:
            mirror = self.of(tensor) if self.follows else None
            is_left = tensor.gradient is GradientPlace.LEFT  # an update looks into it, so it was asked before
            return None if mirror is None or not (is_left or self._is_used(mirror)) else mirror.value


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
        if not tensor.is_ours:
            self.give_up_swapped(tensor)
        elif is_other or parameter._version != tensor.version or parameter.shape != tensor.spec.shape:
            self._take_over_value(tensor, is_other=is_other)
        else:
            tensor.take_value()
            if tensor in self.watched:
                self._compare(tensor)

    def _take_over_value(self, tensor: ManagedParameter, *, is_other: bool) -> None:
        """Takes a value away from a parameter that was written to, or assigned, since the parameter got its value."""
        value = raw_data(tensor.parameter)
        if tuple(value.shape) != tensor.spec.shape:
            self.give_up(tensor, value)
            return
        tensor.take_value()
        if is_other:
            self._end_epoch(tensor)
        self.apply(tensor, value, voids_graphs=False)

    def _end_epoch(self, tensor: ManagedParameter) -> None:
        """Keeps the value that earlier graphs need, as torch keeps the memory that a parameter had."""
        if tensor.is_resting and tensor.chunk.is_aliased:
            tensor.chunk.renew()
        epoch = None if tensor.epoch is None else tensor.epoch()
        if epoch is not None:
            epoch.value = tensor.look(torch.promote_types(tensor.original_dtype, tensor.chunk.dtype)).clone()
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
        if self.mirrors.by_tensor:
            self.mirrors.sync()
        if self.gradient_mirrors.by_tensor:
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
            has_value = tensor.place is ValuePlace.PARAMETER
            is_left = is_ours and (has_value or storage_key(parameter) == tensor.released_key)
            if not (is_left or tensor.place in (ValuePlace.OPEN, ValuePlace.GIVEN_UP)):
                if not is_ours:
                    self.give_up_swapped(tensor)
                else:
                    value = raw_data(parameter)
                    tensor.take_value()
                    self.assign(tensor, value)
            if mirrored and tensor.spec.index in mirrored:
                self.mirrors.sync_one(tensor, keeps_unused=keeps_unused)

    # Parameters that leave

    def give_up(self, tensor: ManagedParameter, value: torch.Tensor) -> None:
        """Lets go of a parameter that somebody gave another shape; the engine takes it in again when it is used.

        Args:
            tensor: The parameter.
            value: Its present value.
        """
        self._drop(tensor)
        tensor.place = ValuePlace.GIVEN_UP
        set_raw_data(tensor.parameter, value)
        tensor.unbind()

    def give_up_swapped(self, tensor: ManagedParameter) -> None:
        """Lets go of a parameter that was exchanged for another tensor (``torch.utils.swap_tensors``).

        The parameter becomes an ordinary one. The other tensor answers for the value in the chunk now, and gets this
        value.

        Args:
            tensor: The managed tensor of the parameter.
        """
        if tensor.place is not ValuePlace.GIVEN_UP:
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
