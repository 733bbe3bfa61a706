"""What was handed out of a parameter or its gradient, and may be written to, or read, later.

[Note: mirrors]
In torch ``parameter.data``, a view, ``numpy()`` and ``parameter.grad`` are the memory of the parameter: who keeps one
sees every later change, and what is written to one counts. The memory of a chunk cannot be handed out, since the place
of a value may hold a gradient next. So a copy is, and the engine keeps the two the same: before it uses the value it
compares and takes over what was written, and when it has changed the value it writes to the copy. A copy that nobody
else refers to any more is compared once more and freed. With several processes what was handed out does not follow
(each process has a part of the value, and they need not keep the same), but what is written to it counts until the next
change. There a checksum tells what was written, so that every process finds out, wherever the value is at home. Of what
was read from a file there is a checksum, too: the file is not read again to compare.
"""

import sys
import zlib

import torch

from hf_patrickstar.runtime.bits import same_bits
from hf_patrickstar.runtime.chunk import GradientPlace, ManagedTensor
from hf_patrickstar.runtime.gradients import Gradients
from hf_patrickstar.runtime.sharing import Held
from hf_patrickstar.runtime.values import Values, as_it_is

_SCAN_AT = 8
"""With so many parameters handed out, look for all that nobody uses any more; with fewer, at the last one alone."""


class Mirror:
    """A tensor that users look into, in place of a parameter or its gradient.

    Args:
        tensor: The parameter.
        value: What was handed out; users have aliases of it.
        is_held: Whether it must outlive its last reference, because only its address was asked for.
        checksum: Of its bits as they were handed out, where they are not compared with what is at home.
    """

    def __init__(
        self, tensor: ManagedTensor, value: torch.Tensor, *, is_held: bool, checksum: int | None = None
    ) -> None:
        self.tensor = tensor
        self.value = value
        self.is_held = is_held
        self.checksum = checksum
        self.storage = value.untyped_storage()


class Mirrors:
    """All that was handed out of the parameters of one engine; see [Note: mirrors].

    Args:
        values: Reads and writes values.
        gradients: Has the gradients.
    """

    def __init__(self, values: Values, gradients: Gradients) -> None:
        self._values = values
        self._gradients = gradients
        self._lock = gradients.lock
        self._of_values: dict[int, list[Mirror]] = {}
        self._of_gradients: dict[int, Mirror] = {}
        self._last: ManagedTensor | None = None
        self._scan_at = _SCAN_AT
        self._num_own: dict[int, int] = {}  # how many of a storage's users are mirrors

    # Values

    def hand_out_value(
        self, tensor: ManagedTensor, dtype: torch.dtype | None = None, *, on_host: bool = False, is_held: bool = False
    ) -> torch.Tensor:
        """A copy of the value that stays the same as the value.

        Args:
            tensor: The parameter.
            dtype: The type; by default the one that is computed with.
            on_host: Whether it shall be on the host; by default it is on the compute device.
            is_held: Whether it must outlive its last reference.
        """
        with self._lock, as_it_is(), torch.no_grad():
            self.sync_value(tensor, keeps_unused=True)
            wanted = dtype or tensor.chunk.param.dtype
            device = torch.device("cpu") if on_host else self._values.device
            known = self._of_values.get(tensor.spec.index, ()) if self._values.sharing.is_alone else ()
            for mirror in known:  # other processes may not have theirs any more
                if mirror.value.dtype == wanted and mirror.value.device == device and mirror.value.is_contiguous():
                    mirror.is_held |= is_held
                    return mirror.value
            value = self._values.read(tensor, wanted) if on_host else self._values.look(tensor).clone()
            return self.add_value(tensor, value, is_held=is_held)

    def add_value(self, tensor: ManagedTensor, value: torch.Tensor, *, is_held: bool = False) -> torch.Tensor:
        """Lets a tensor that has a parameter's value stay the same as the value.

        Args:
            tensor: The parameter.
            value: The tensor, which users have or will have.
            is_held: Whether it must outlive its last reference.

        Returns:
            The tensor.
        """
        with self._lock:
            is_compared = self._values.sharing.is_alone and not self._values.originals.has(tensor, value.dtype)
            mirror = Mirror(tensor, value, is_held=is_held, checksum=None if is_compared else checksum_of(value))
            self._enter(mirror)
            self._of_values.setdefault(tensor.spec.index, []).append(mirror)
            return value

    def sync_value(self, tensor: ManagedTensor, *, keeps_unused: bool = False) -> None:
        """Takes over what was written to a parameter's mirrors, and drops those that nobody uses.

        Args:
            tensor: The parameter.
            keeps_unused: Do not drop them: the next call may ask for the same memory again.
        """
        mirrors = self._of_values.get(tensor.spec.index)
        if not mirrors:
            return
        with self._lock, as_it_is(), torch.no_grad():
            for mirror in list(mirrors):
                if mirror not in mirrors:
                    continue  # what was written to another one has ended it
                self._take_over_value(mirror)
                if not (keeps_unused or self._is_used(mirror)):
                    self._drop_value(mirror)

    def _take_over_value(self, mirror: Mirror) -> None:
        tensor = mirror.tensor
        if mirror.checksum is None:
            home = self._values.own_part(tensor, mirror.value.dtype)
            is_written = not same_bits(mirror.value.to(home.device), home)
        else:
            before, mirror.checksum = mirror.checksum, checksum_of(mirror.value)
            is_written = mirror.checksum != before
        if is_written:
            self._values.write(tensor, mirror.value, voids_graphs=False)
            self.refresh_value(tensor, but=mirror)

    def _drop_value(self, mirror: Mirror) -> None:
        index = mirror.tensor.spec.index
        self._of_values[index].remove(mirror)
        if not self._of_values[index]:
            del self._of_values[index]
        self._leave(mirror)

    def refresh_value(self, tensor: ManagedTensor, *, but: Mirror | None = None) -> None:
        """Lets the mirrors of a parameter follow a change of its value.

        Args:
            tensor: The parameter.
            but: The mirror that the change came from.
        """
        mirrors = self._of_values.get(tensor.spec.index, ())
        if not mirrors:
            return
        with self._lock, as_it_is(), torch.no_grad():
            if not self._values.sharing.is_alone:
                for mirror in list(mirrors):
                    if mirror is not but:
                        self._drop_value(mirror)
                return
            for mirror in mirrors:
                if mirror is not but:
                    mirror.value.copy_(self._values.own_part(tensor, mirror.value.dtype))
                    mirror.checksum = None if mirror.checksum is None else checksum_of(mirror.value)

    def has_value(self, tensor: ManagedTensor) -> bool:
        """Whether a parameter's value is handed out."""
        return bool(self._of_values.get(tensor.spec.index))

    def drop_values(self, tensor: ManagedTensor) -> None:
        """Takes over what was written to a parameter's mirrors; from now on they are tensors of their own."""
        self.sync_value(tensor)
        for mirror in self._of_values.pop(tensor.spec.index, ()):
            self._leave(mirror)

    # Gradients

    def hand_out_gradient(self, tensor: ManagedTensor) -> torch.Tensor:
        """The gradient as an ordinary tensor: the same one as long as somebody refers to it.

        fp16 gradients are handed out in fp32, since who unscales them would lose the small ones otherwise.

        Args:
            tensor: A parameter that has a gradient.
        """
        with self._lock, as_it_is(), torch.no_grad():
            self.sync_gradient(tensor)
            mirror = self._of_gradients.get(tensor.spec.index)
            if mirror is None or not self._values.sharing.is_alone:
                mirror = self._mirror_gradient(tensor, mirror)
            return mirror.value

    def _mirror_gradient(self, tensor: ManagedTensor, known: Mirror | None) -> Mirror:
        home = self._gradients.of(tensor)
        dtype = tensor.chunk.param.dtype if home is None else home.dtype
        wanted = tensor.chunk.state_dtype if dtype is torch.float16 else dtype
        if self._values.sharing.is_alone:
            assert home is not None
            value = home.to(self._values.device, wanted, copy=True)
        else:
            value = self._values.sharing.tensor(Held(tensor, home, wanted), "the gradient").to(self._values.device)
        if known is not None:
            known.value.copy_(value)
            return known
        mirror = Mirror(tensor, value, is_held=False)
        self._enter(mirror)
        self._of_gradients[tensor.spec.index] = mirror
        return mirror

    def assign_gradient(self, tensor: ManagedTensor, gradient: torch.Tensor) -> None:
        """Makes a tensor the gradient of a parameter: its values, and what is written to it later.

        Args:
            tensor: The parameter.
            gradient: In the parameter's shape.
        """
        with self._lock, as_it_is(), torch.no_grad():
            self.drop_gradient(tensor)
            self._gradients.drop(tensor)
            self._gradients.put(tensor, tensor.own(gradient.detach()))
            self._follow_gradient(tensor, gradient)

    def follow_recorded(self, tensor: ManagedTensor, gradient: torch.Tensor) -> None:
        """Makes a tensor that has the values of a parameter's gradient, and a graph, what is handed out of it.

        Args:
            tensor: The parameter.
            gradient: What a backward has computed that is recorded itself (``create_graph``).
        """
        with self._lock:
            self.drop_gradient(tensor)
            self._follow_gradient(tensor, gradient)

    def _follow_gradient(self, tensor: ManagedTensor, gradient: torch.Tensor) -> None:
        # With a graph it has more than its values, which are at home.
        mirror = Mirror(tensor, gradient, is_held=gradient.requires_grad)
        self._enter(mirror)
        self._of_gradients[tensor.spec.index] = mirror

    def sync_gradient(self, tensor: ManagedTensor) -> None:
        """Takes over what was written to a gradient that was handed out; drops it if nobody uses it."""
        mirror = self._of_gradients.get(tensor.spec.index)
        if mirror is None:
            return
        with self._lock, as_it_is(), torch.no_grad():
            if mirror.value.untyped_storage()._cdata != mirror.storage._cdata:  # gradient.data = value
                self._leave(mirror)
                mirror.storage = mirror.value.untyped_storage()
                self._enter(mirror)
            is_zero = tensor.gradient is GradientPlace.ZERO and not mirror.value.any()
            home = None if is_zero else self._gradients.of(tensor)
            if home is not None:
                own = tensor.own(mirror.value.detach())
                if not same_bits(home.to(own.dtype), own.to(home.device)):
                    self._gradients.put(tensor, own)
                del own  # which looks into it, too
            mirror.is_held |= mirror.value.requires_grad  # what was written to it was recorded
            if not self._is_used(mirror):
                self.drop_gradient(tensor)

    def refresh_gradient(self, tensor: ManagedTensor) -> None:
        """Lets a gradient that was handed out follow a change: what another backward added, or clipping."""
        mirror = self._of_gradients.get(tensor.spec.index)
        if mirror is None:
            return
        with self._lock, as_it_is(), torch.no_grad():
            home = self._gradients.of(tensor)
            if self._values.sharing.is_alone and home is not None and 0 not in mirror.value.stride():
                mirror.value.copy_(home)
            else:
                self.drop_gradient(tensor)

    def zero_gradient(self, tensor: ManagedTensor) -> bool:
        """Writes zeros to a gradient that somebody has, and goes on following it; whether there is one."""
        mirror = self._of_gradients.get(tensor.spec.index)
        if mirror is None or not self._values.sharing.is_alone or not self._is_used(mirror):
            return False
        mirror.is_held = False
        mirror.value.detach_().requires_grad_(False).zero_()
        return True

    def drop_gradient(self, tensor: ManagedTensor) -> None:
        """Forgets a gradient that was handed out; whoever has it keeps it."""
        mirror = self._of_gradients.pop(tensor.spec.index, None)
        if mirror is not None:
            self._leave(mirror)

    def kept_gradient(self, tensor: ManagedTensor) -> torch.Tensor | None:
        """The gradient of a parameter, if somebody still refers to what was handed out."""
        mirror = self._of_gradients.get(tensor.spec.index)
        return None if mirror is None or not self._is_used(mirror) else mirror.value

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient is handed out."""
        return bool(self._of_gradients)

    # All

    @property
    def nbytes(self) -> int:
        """Bytes of all that is handed out."""
        values = [mirror.value for mirrors in self._of_values.values() for mirror in mirrors]
        values += [mirror.value for mirror in self._of_gradients.values()]
        return sum(value.numel() * value.dtype.itemsize for value in values)

    def sync(self) -> None:
        """Takes over what was written to anything that was handed out; the engine is about to use values."""
        if not self._of_values and not self._of_gradients:
            return
        with self._lock:
            tensors = [mirrors[0].tensor for mirrors in self._of_values.values()]
            for mirrors in self._of_values.values():
                for mirror in mirrors:
                    mirror.is_held = False
            for tensor in tensors:
                self.sync_value(tensor)
            self.sync_gradients()

    def sync_gradients(self) -> None:
        """The same of gradients alone."""
        for mirror in list(self._of_gradients.values()):
            self.sync_gradient(mirror.tensor)

    def sync_unused(self, but: ManagedTensor) -> None:
        """Takes over, and frees, what nobody refers to any more.

        Args:
            but: A parameter whose mirrors stay.
        """
        num_tensors = len(self._of_values) + len(self._of_gradients)
        if not num_tensors:
            return
        with self._lock:
            last, self._last = self._last if self._last is not but else None, but
            if num_tensors < self._scan_at:  # a scan per access would be quadratic in a loop over all parameters
                self._sync_if_unused(last)
                return
            for mirrors in list(self._of_values.values()):
                if mirrors[0].tensor is not but:
                    self._sync_if_unused(mirrors[0].tensor)
            for mirror in list(self._of_gradients.values()):
                self._sync_if_unused(mirror.tensor)
            self._scan_at = max(_SCAN_AT, 2 * (len(self._of_values) + len(self._of_gradients)))

    def _sync_if_unused(self, tensor: ManagedTensor | None) -> None:
        if tensor is None:
            return
        mirrors = self._of_values.get(tensor.spec.index, ())
        if mirrors and not all(self._is_used(mirror) for mirror in mirrors):
            self.sync_value(tensor)
        gradient = self._of_gradients.get(tensor.spec.index)
        if gradient is not None and not self._is_used(gradient):
            self.sync_gradient(tensor)

    def close(self) -> None:
        """Forgets everything."""
        self._of_values.clear()
        self._of_gradients.clear()
        self._num_own.clear()

    # Inside

    def _enter(self, mirror: Mirror) -> None:
        key = mirror.storage._cdata
        self._num_own[key] = self._num_own.get(key, 0) + 1

    def _leave(self, mirror: Mirror) -> None:
        key = mirror.storage._cdata
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
        return mirror.is_held or is_looked_into or sys.getrefcount(mirror.value) > 2


def checksum_of(value: torch.Tensor) -> int:
    """A checksum of a tensor's bits."""
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data)
