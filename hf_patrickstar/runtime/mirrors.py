"""What was handed out of a parameter, and may be written to, or read, later; ``gradient_mirrors`` is for its gradient.

[Note: mirrors]
In torch ``parameter.data``, a view, ``numpy()`` and ``parameter.grad`` are the memory of the parameter: who keeps one
sees every later change, and what is written to one counts. The memory of a chunk cannot be handed out, since the place
of a value may hold a gradient next. So a copy is, and the engine keeps the two the same: before it uses the value it
compares (``fingerprint.py``) and takes over what was written, and when it has changed the value it writes to the copy.
A copy that nobody else refers to any more is compared once more and freed. With several processes what was handed out
does not follow (each process has a part of the value, and they need not keep the same), but what is written to it
counts until the next change.
"""

import sys
from collections.abc import Sequence

import torch

from hf_patrickstar.runtime.chunk import ManagedTensor
from hf_patrickstar.runtime.fingerprint import Fingerprint
from hf_patrickstar.runtime.values import Values, as_it_is

SCAN_AT = 8
"""With so many parameters handed out, look for all that nobody uses any more; with fewer, at the last two alone."""


class Mirror:
    """A tensor that users look into, in place of a parameter or its gradient.

    Args:
        tensor: The parameter.
        value: What was handed out; users have aliases of it.
        is_held: Whether it must outlive its last reference, because only its address was asked for.
    """

    def __init__(self, tensor: ManagedTensor, value: torch.Tensor, *, is_held: bool) -> None:
        self.tensor = tensor
        self.value = value
        self.is_held = is_held
        self.storage = value.untyped_storage()


class MirrorUsers:
    """Knows which storages mirrors look into, and so whether anybody else does."""

    def __init__(self) -> None:
        self._num_own: dict[int, int] = {}  # how many of a storage's users are mirrors

    def enter(self, mirror: Mirror) -> None:
        """Takes note of a mirror."""
        key = mirror.storage._cdata
        self._num_own[key] = self._num_own.get(key, 0) + 1

    def leave(self, mirror: Mirror) -> None:
        """Forgets it."""
        key = mirror.storage._cdata
        self._num_own[key] -= 1
        if not self._num_own[key]:
            del self._num_own[key]

    def has(self, mirror: Mirror) -> bool:
        """Whether anybody else has what was handed out, or looks into it.

        Each mirror is one user of its storage, and the storage's own Python object, which all mirrors over it share, is
        one more; of the tensor itself the mirror and the call below have a reference.
        """
        key = mirror.storage._cdata
        is_looked_into = torch._C._storage_Use_Count(key) > self._num_own[key] + 1
        return mirror.is_held or is_looked_into or sys.getrefcount(mirror.value) > 2


class Recent:
    """The last two tensors that were asked for, whose mirrors are looked at when the next one is asked for.

    A loop that binds a name to each value still has the one before when it asks for the next, so the last one alone
    would always be in use.
    """

    def __init__(self) -> None:
        self._tensors: list[ManagedTensor] = []

    def before(self, tensor: ManagedTensor) -> list[ManagedTensor]:
        """The two that were asked for before this one, which is noted as the last from now on."""
        recent = self._tensors
        if not recent or recent[-1] is not tensor:
            self._tensors = [*recent[-1:], tensor]
        return recent


class ValueMirrors:
    """All that was handed out of the values of parameters; see [Note: mirrors].

    Args:
        values: Reads and writes values.
        users: Knows whether anybody has what was handed out.
    """

    def __init__(self, values: Values, users: MirrorUsers) -> None:
        self._values = values
        self._users = users
        self._lock = values.lock
        self._follows = values.sharing.is_alone
        self._mirrors: dict[int, list[Mirror]] = {}
        self._fingerprints: dict[Mirror, Fingerprint] = {}
        self._recent = Recent()
        self._scan_at = SCAN_AT

    def hand_out(
        self, tensor: ManagedTensor, host_dtype: torch.dtype | None = None, *, is_held: bool = False
    ) -> torch.Tensor:
        """A copy of the value that stays the same as the value.

        Args:
            tensor: The parameter.
            host_dtype: The type of a copy on the host; by default the copy is on the compute device, in the type that
                is computed with.
            is_held: Whether it must outlive its last reference.
        """
        with self._lock, as_it_is(), torch.no_grad():
            self.sync_one(tensor, keeps_unused=True)
            wanted = host_dtype or tensor.chunk.dtype
            device = torch.device("cpu") if host_dtype else self._values.device
            for mirror in self._reusable(tensor):
                if mirror.value.dtype == wanted and mirror.value.device == device and mirror.value.is_contiguous():
                    mirror.is_held |= is_held
                    return mirror.value
            value = self._values.read(tensor, wanted) if host_dtype else self._values.look(tensor).clone()
            return self.add(tensor, value, is_held=is_held)

    def add(self, tensor: ManagedTensor, value: torch.Tensor, *, is_held: bool = False) -> torch.Tensor:
        """Lets a tensor that has a parameter's value stay the same as the value.

        Args:
            tensor: The parameter.
            value: The tensor, which users have or will have.
            is_held: Whether it must outlive its last reference.

        Returns:
            The tensor.
        """
        with self._lock:
            mirror = Mirror(tensor, value, is_held=is_held)
            self._fingerprints[mirror] = Fingerprint(self._values, tensor, value)
            self._users.enter(mirror)
            self._mirrors.setdefault(tensor.spec.index, []).append(mirror)
            return value

    def sync_one(self, tensor: ManagedTensor, *, keeps_unused: bool = False) -> None:
        """Takes over what was written to a parameter's mirrors, and drops those that nobody uses.

        Args:
            tensor: The parameter.
            keeps_unused: Do not drop them: the next call may ask for the same memory again.
        """
        if tensor.spec.index not in self._mirrors:
            return
        with self._lock, as_it_is(), torch.no_grad():
            mirrors = self._mirrors.get(tensor.spec.index, [])  # not before: another thread may drop them
            for mirror in list(mirrors):
                if mirror not in mirrors:
                    continue  # what was written to another one has ended it
                self._take_over(mirror)
                if not (keeps_unused or self._users.has(mirror)):
                    self._drop(mirror)

    def _take_over(self, mirror: Mirror) -> None:
        if self._fingerprints[mirror].has_changed(mirror.value):
            self._values.write(mirror.tensor, mirror.value, voids_graphs=False)
            self.refresh(mirror.tensor, but=mirror)

    def _drop(self, mirror: Mirror) -> None:
        index = mirror.tensor.spec.index
        self._mirrors[index].remove(mirror)
        if not self._mirrors[index]:
            del self._mirrors[index]
        self._leave(mirror)

    def _leave(self, mirror: Mirror) -> None:
        del self._fingerprints[mirror]
        self._users.leave(mirror)

    def refresh(self, tensor: ManagedTensor, *, but: Mirror | None = None) -> None:
        """Lets the mirrors of a parameter follow a change of its value.

        Args:
            tensor: The parameter.
            but: The mirror that the change came from.
        """
        if tensor.spec.index not in self._mirrors:
            return
        with self._lock, as_it_is(), torch.no_grad():
            for mirror in [mirror for mirror in self._mirrors.get(tensor.spec.index, ()) if mirror is not but]:
                if self._follows:
                    mirror.value.copy_(self._values.own_part(tensor, mirror.value.dtype))
                    self._fingerprints[mirror].renew(mirror.value)
                else:
                    self._drop(mirror)

    def has(self, tensor: ManagedTensor) -> bool:
        """Whether a parameter's value is handed out."""
        return bool(self._mirrors.get(tensor.spec.index))

    @property
    def has_any(self) -> bool:
        """Whether any value is handed out."""
        return bool(self._mirrors)

    def has_reusable(self, tensor: ManagedTensor) -> bool:
        """Whether ``hand_out`` can give again what a user has already."""
        return bool(self._reusable(tensor))

    def _reusable(self, tensor: ManagedTensor) -> Sequence[Mirror]:
        """With several processes there are none: another one may not have its mirror any more, and all must read."""
        return self._mirrors.get(tensor.spec.index, ()) if self._follows else ()

    def drop(self, tensor: ManagedTensor) -> None:
        """Takes over what was written to a parameter's mirrors; from now on they are tensors of their own."""
        if tensor.spec.index not in self._mirrors:
            return
        with self._lock:
            self.sync_one(tensor)
            for mirror in self._mirrors.pop(tensor.spec.index, ()):
                self._leave(mirror)

    def sync(self) -> None:
        """Takes over what was written to anything that was handed out; the engine is about to use values."""
        if not self._mirrors:
            return
        with self._lock:
            tensors = [mirrors[0].tensor for mirrors in self._mirrors.values()]
            for mirrors in self._mirrors.values():
                for mirror in mirrors:
                    mirror.is_held = False
            for tensor in tensors:
                self.sync_one(tensor)

    def sync_unused(self, but: ManagedTensor) -> None:
        """Takes over, and frees, what nobody refers to any more.

        Args:
            but: A parameter whose mirrors stay.
        """
        recent = self._recent.before(but)
        if not self._mirrors:
            return
        with self._lock:
            scans = len(self._mirrors) >= self._scan_at  # at every access it would be quadratic in a loop over all
            found = [mirrors[0].tensor for mirrors in self._mirrors.values()] if scans else recent
            for tensor in found:
                mirrors = () if tensor is but else self._mirrors.get(tensor.spec.index, ())
                if not all(self._users.has(mirror) for mirror in mirrors):
                    self.sync_one(tensor)
            if scans:
                self._scan_at = max(SCAN_AT, 2 * len(self._mirrors))

    @property
    def nbytes(self) -> int:
        """Bytes of all that is handed out."""
        return sum(mirror.value.nbytes for mirrors in self._mirrors.values() for mirror in mirrors)

    def close(self) -> None:
        """Forgets everything."""
        for mirrors in self._mirrors.values():
            for mirror in mirrors:
                self._leave(mirror)
        self._mirrors.clear()
