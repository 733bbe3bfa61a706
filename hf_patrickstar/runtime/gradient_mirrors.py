"""What was handed out of gradients, and may be written to, or read, later; see [Note: mirrors]."""

import torch

from hf_patrickstar.runtime.bits import same_bits
from hf_patrickstar.runtime.chunk import ManagedTensor
from hf_patrickstar.runtime.gradient_place import GradientPlace
from hf_patrickstar.runtime.gradients import Gradients
from hf_patrickstar.runtime.mirrors import SCAN_AT, Mirror, MirrorUsers, Recent
from hf_patrickstar.runtime.sharing import Held
from hf_patrickstar.runtime.values import Values, as_it_is


class GradientMirrors:
    """All that was handed out of gradients; see [Note: mirrors].

    Args:
        values: Knows the processes and the device.
        gradients: Has the gradients.
        users: Knows whether anybody has what was handed out.
    """

    def __init__(self, values: Values, gradients: Gradients, users: MirrorUsers) -> None:
        self._values = values
        self._gradients = gradients
        self._users = users
        self._lock = values.lock
        self._follows = values.sharing.is_alone  # see [Note: mirrors]
        self._mirrors: dict[int, Mirror] = {}
        self._recent = Recent()
        self._scan_at = SCAN_AT

    def hand_out(self, tensor: ManagedTensor) -> torch.Tensor:
        """The gradient as an ordinary tensor: the same one as long as somebody refers to it.

        fp16 gradients are handed out in fp32, since who unscales them would lose the small ones otherwise; with several
        processes all gradients are.

        Args:
            tensor: A parameter that has a gradient.
        """
        with self._lock, as_it_is(), torch.no_grad():
            self.sync_one(tensor)
            mirror = self._mirrors.get(tensor.spec.index)
            if mirror is None or not self._follows:
                mirror = self._copy_of(tensor, mirror)
            return mirror.value

    def _copy_of(self, tensor: ManagedTensor, known: Mirror | None) -> Mirror:
        home = self._gradients.of(tensor)
        if self._follows:
            assert home is not None
            wanted = tensor.chunk.state_dtype if home.dtype is torch.float16 else home.dtype
            value = home.to(self._values.device, wanted, copy=True)
        else:  # in fp32: only the rank that has the gradient at home knows whether it is a sum
            held = Held(tensor, home, tensor.chunk.state_dtype)
            value = self._values.sharing.tensor(held, "the gradient").to(self._values.device)
        if known is not None:
            known.value.copy_(value)
            return known
        mirror = Mirror(tensor, value, is_held=False)
        self._users.enter(mirror)
        self._mirrors[tensor.spec.index] = mirror
        return mirror

    def assign(self, tensor: ManagedTensor, gradient: torch.Tensor) -> None:
        """Makes a tensor the gradient of a parameter: its values, and what is written to it later.

        Args:
            tensor: The parameter.
            gradient: In the parameter's shape.
        """
        with self._lock, as_it_is(), torch.no_grad():
            self.drop(tensor)
            self._gradients.drop(tensor)
            self._gradients.put(tensor, tensor.own(gradient.detach()))
            self._follow(tensor, gradient)

    def follow_recorded(self, tensor: ManagedTensor, gradient: torch.Tensor) -> None:
        """Makes a tensor that has the values of a parameter's gradient, and a graph, what is handed out of it.

        Args:
            tensor: The parameter.
            gradient: What a backward has computed that is recorded itself (``create_graph``).
        """
        with self._lock:
            self.drop(tensor)
            self._follow(tensor, gradient)

    def _follow(self, tensor: ManagedTensor, gradient: torch.Tensor) -> None:
        # With a graph it has more than its values, which are at home.
        mirror = Mirror(tensor, gradient, is_held=gradient.requires_grad)
        self._users.enter(mirror)
        self._mirrors[tensor.spec.index] = mirror

    def sync_one(self, tensor: ManagedTensor) -> None:
        """Takes over what was written to a gradient that was handed out; drops it if nobody uses it."""
        if tensor.spec.index not in self._mirrors:
            return
        with self._lock, as_it_is(), torch.no_grad():
            mirror = self._mirrors.get(tensor.spec.index)  # not before: another thread may drop it
            if mirror is None:
                return
            if mirror.value.untyped_storage()._cdata != mirror.storage._cdata:  # gradient.data = value
                self._users.leave(mirror)
                mirror.storage = mirror.value.untyped_storage()
                self._users.enter(mirror)
            is_zero = tensor.gradient is GradientPlace.ZERO and not mirror.value.any()
            home = None if is_zero else self._gradients.of(tensor)
            if home is not None:
                own = tensor.own(mirror.value.detach())
                if not same_bits(home.to(own.dtype), own.to(home.device)):
                    self._gradients.put(tensor, own)
                del own  # which looks into it, too
            mirror.is_held |= mirror.value.requires_grad  # what was written to it was recorded
            if not self._users.has(mirror):
                self.drop(tensor)

    def refresh(self, tensor: ManagedTensor) -> None:
        """Lets a gradient that was handed out follow a change: what another backward added, or clipping."""
        if tensor.spec.index not in self._mirrors:
            return
        with self._lock, as_it_is(), torch.no_grad():
            home, mirror = self._gradients.of(tensor), self._mirrors.get(tensor.spec.index)
            if mirror is not None and self._follows and home is not None and 0 not in mirror.value.stride():
                mirror.value.copy_(home)
            else:
                self.drop(tensor)

    def zero(self, tensor: ManagedTensor) -> bool:
        """Writes zeros to a gradient that somebody has, and goes on following it; whether there is one."""
        if tensor.spec.index not in self._mirrors:
            return False
        with self._lock:
            mirror = self._mirrors.get(tensor.spec.index)
            if mirror is None or not (self._follows and self._users.has(mirror)):
                return False
            mirror.is_held = False
            mirror.value.detach_().requires_grad_(False).zero_()
            return True

    def drop(self, tensor: ManagedTensor) -> None:
        """Forgets a gradient that was handed out; code that has it keeps it."""
        if tensor.spec.index not in self._mirrors:
            return
        with self._lock:
            mirror = self._mirrors.pop(tensor.spec.index, None)
            if mirror is not None:
                self._users.leave(mirror)

    def kept(self, tensor: ManagedTensor) -> torch.Tensor | None:
        """The gradient of a parameter, if it follows and somebody still refers to what was handed out."""
        if not self._follows or tensor.spec.index not in self._mirrors:
            return None
        with self._lock:
            mirror = self._mirrors.get(tensor.spec.index)
            return None if mirror is None or not self._users.has(mirror) else mirror.value

    def __len__(self) -> int:
        """How many gradients are handed out."""
        return len(self._mirrors)

    def sync(self) -> None:
        """Takes over what was written to any gradient that was handed out."""
        for mirror in list(self._mirrors.values()):
            self.sync_one(mirror.tensor)

    def sync_unused(self, but: ManagedTensor) -> None:
        """Takes over, and frees, what nobody refers to any more; see ``ValueMirrors.sync_unused``."""
        recent = self._recent.before(but)
        if not self._mirrors:
            return
        with self._lock:
            if len(self._mirrors) < self._scan_at:
                indices = [tensor.spec.index for tensor in recent if tensor is not but]
                found = [self._mirrors[index] for index in indices if index in self._mirrors]
            else:
                found = list(self._mirrors.values())
                self._scan_at = max(SCAN_AT, 2 * len(self._mirrors))
            for mirror in found:
                if not self._users.has(mirror):
                    self.sync_one(mirror.tensor)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is handed out."""
        return sum(mirror.value.nbytes for mirror in self._mirrors.values())

    def close(self) -> None:
        """Forgets everything."""
        for mirror in self._mirrors.values():
            self._users.leave(mirror)
        self._mirrors.clear()
