"""A device for torch in pure Python: ``sim:0``, whose memory only its own operators reach.

[Note: a fake device]
torch lets Python register the device that it keeps for others (``PrivateUse1``). A tensor of ``sim`` is an ordinary
tensor with the keys, the autocast and the backward thread of an accelerator; its bytes are in host memory that a table
here knows. Every operator with a tensor of ``sim`` comes to one function, which
refuses operands of two devices as accelerators do, and computes with the CPU's kernels. So parameters, hooks and
classes are what they are on an accelerator, values are numbers, and what would be an error on an accelerator is
``MixedDevicesError``, or the ``RuntimeError`` that torch raises by itself before.

Under ``FakeTensorMode`` a device that is not there works, too. But a parameter is a ``FakeTensor`` then, which cannot
answer for its value as live parameters do, and nothing that looks at a number could be tested.

``register`` changes the process for good: torch finds an accelerator from then on.
"""

import contextlib
import weakref
from unittest import mock

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from hf_patrickstar.memory.driver import HostThread
from hf_patrickstar.memory.streams import DeviceStreams

NAME = "sim"
DEVICE = torch.device("cpu")  # until ``register``

_aten = torch.ops.aten
_CPU_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_VIEWS = (
    _aten.as_strided.default,
    _aten.view.default,
    _aten._reshape_alias.default,
    _aten.unfold.default,
    _aten.set_.source_Storage_storage_offset,
    _aten.set_.source_Tensor,
)
"""Operators that need no bytes: the CPU's kernels keep the keys and the storage of what they look at."""
_COPIES = ("aten::_copy_from", "aten::_copy_from_and_resize", "aten::_foreach_copy_")
"""Operators with operands of two devices."""
_TAKES_NUMBERS = ("aten::_foreach_mul_", "aten::_foreach_mul", "aten::_fused_adamw_", "aten::_fused_adam_")
"""Operators, beside those of single elements, that take a number on the host for one on the device."""


# Memory


class Memory:
    """The memory of the device."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.current = self.peak = 0
        self._storages = {}

    def take(self, memory):
        """A storage of the device for host memory."""
        nbytes = memory.nbytes()
        if self.current + nbytes > self.capacity:
            raise torch.OutOfMemoryError(f"{NAME} out of memory: {nbytes} bytes beside {self.current}")
        storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), DEVICE, nbytes)
        self._storages[storage._cdata] = memory
        self.current += nbytes
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._free, storage._cdata, nbytes).atexit = False
        return storage

    def _free(self, key, nbytes):
        del self._storages[key]
        self.current -= nbytes

    def at(self, storage):
        """The host memory of a storage of the device."""
        return self._storages[storage._cdata]

    def of(self, tensor):
        """The host memory of a tensor of the device."""
        return self.at(tensor.untyped_storage())

    def restart(self):
        self.peak = self.current

    def stats(self):
        return {"allocated_bytes.all.current": self.current, "allocated_bytes.all.peak": self.peak}


MEMORY = Memory(1 << 28)


def is_on_device(value):
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def on_host(tensor):
    """The bytes of a tensor of the device, as a tensor on the host."""
    made = torch.empty(0, dtype=tensor.dtype)
    return made.set_(MEMORY.of(tensor), tensor.storage_offset(), tensor.size(), tensor.stride())


def on_device(tensor):
    """A tensor of the device with the memory of one on the host."""
    return _look_into(torch._C._acc.create_empty_tensor([0], tensor.dtype), tensor)


def _look_into(made, tensor):
    """Gives a tensor of the device the memory of one on the host."""
    storage = MEMORY.take(tensor.untyped_storage())
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    return _aten.set_.source_Storage_storage_offset.redispatch(_CPU_KERNEL, made, storage, *place)


# Operators


class MixedDevicesError(RuntimeError):
    """An operator has tensors of two devices."""


def check(op, tensors):
    """Raises if an operator has tensors of two devices."""
    if op._schema.name in _COPIES:
        return
    takes_numbers = torch.Tag.pointwise in op.tags or op._schema.name in _TAKES_NUMBERS
    if takes_numbers:
        tensors = [tensor for tensor in tensors if tensor.dim() or tensor.device.type != "cpu"]
    for tensor in tensors[1:]:
        if tensor.device != tensors[0].device:
            raise MixedDevicesError(f"{op}: operands on {tensors[0].device} and {tensor.device}")


class _Call:
    """One call of an operator. Methods, not functions inside of one: those would be a cycle that holds the tensors."""

    def __init__(self):
        self.tensors = []
        self.pairs = {}  # id of a tensor of the device -> the tensor, and its bytes on the host

    def enter(self, leaf):
        """What the kernel of the CPU gets."""
        if isinstance(leaf, torch.Tensor):
            self.tensors.append(leaf)
            if leaf.device.type == NAME:
                return self.pairs.setdefault(id(leaf), (leaf, on_host(leaf)))[1]
        elif isinstance(leaf, (list, tuple)):
            return [self.enter(item) for item in leaf]
        elif isinstance(leaf, torch.device) and leaf.type == NAME:
            return torch.device("cpu")
        return leaf

    def leave(self, leaf):
        """What the caller gets for a result: the tensor that was written to, or a new one."""
        if isinstance(leaf, torch.Tensor):
            for owner, host in self.pairs.values():
                if host is leaf:
                    return owner
            return on_device(leaf)
        return type(leaf)(map(self.leave, leaf)) if isinstance(leaf, (list, tuple)) else leaf


def _run(op, *args, **kwargs):
    """Runs any operator with the kernel of the CPU."""
    call = _Call()
    args, kwargs = call.enter(args), {key: call.enter(value) for key, value in kwargs.items()}
    check(op, call.tensors)
    result = op(*args, **kwargs)
    for owner, host in call.pairs.values():
        if host.size() != owner.size() or host.untyped_storage()._cdata != MEMORY.of(owner)._cdata:
            _look_into(owner, host)  # an output that was resized
    return call.leave(result)


def _view_of(op):
    return lambda *args, **kwargs: op.redispatch(_CPU_KERNEL, *args, **kwargs)


def _copy_from(source, target, non_blocking=False):
    to, it = (on_host(tensor) if is_on_device(tensor) else tensor for tensor in (target, source))
    to.copy_(it)
    return target


def _clone_storage(storage):
    """``torch.UntypedStorage.clone``, by which ``copy.deepcopy`` copies tensors."""
    return MEMORY.take(MEMORY.at(storage).clone()) if storage.device.type == NAME else _clone_on_host(storage)


_clone_on_host = torch.UntypedStorage.clone


def _histc(tensor, *args, **kwargs):
    """Accelerators count whole numbers, too, and models ask for it there alone."""
    return on_device(torch.histc(on_host(tensor).float(), *args, **kwargs).to(tensor.dtype))


_OWN = {
    _aten._copy_from.default: _copy_from,
    _aten._local_scalar_dense.default: lambda tensor: on_host(tensor).item(),
    _aten.histc.default: _histc,
    # ``torch.tensor`` under FakeTensorMode looks for a kernel of this operator itself.
    _aten.empty_strided.default: lambda *args, **kwargs: _run(_aten.empty_strided.default, *args, **kwargs),
}


# Autocast

_NARROW = "linear matmul mm bmm addmm baddbmm conv1d conv2d scaled_dot_product_attention _grouped_mm"
_WIDE = "cross_entropy_loss nll_loss softmax.int log_softmax.int layer_norm gelu pow.Tensor_Scalar sum rsqrt"


def _casting(op, find_dtype):
    """The kernel of autocast for an operator."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(leaf):
        is_cast = is_on_device(leaf) and leaf.dtype in (torch.float32, torch.float16, torch.bfloat16)
        return leaf.to(find_dtype()) if is_cast else leaf

    def kernel(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(key):
            return op(*tree_map(cast, args), **tree_map(cast, kwargs))

    return kernel


# Streams


class Streams(HostThread):
    """A driver, whose streams have nothing to wait for: every copy is complete when it was started. It is all of them.

    It stands for ``Driver`` of ``memory/driver.py``, ``torch.Stream`` and ``torch.Event``. Its host thread is
    a real one.
    """

    def new_stream(self):
        return self

    current_stream = record_event = new_stream

    def inside(self, stream):
        return contextlib.nullcontext()

    def is_on_device(self, tensor):
        return is_on_device(tensor)

    def is_pinned(self, tensor):
        return not is_on_device(tensor)

    def copy(self, source, target, stream):
        assert is_on_device(source) != is_on_device(target), "a copy between host and device"
        target.copy_(source)

    def query(self):
        return True

    def wait_stream(self, *args):
        pass

    wait_event = synchronize = wait_stream


# Registration


class _Module:
    """What ``torch.sim`` is."""

    is_initialized = is_available = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    manual_seed_all = staticmethod(lambda seed: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    # Random numbers are those of the CPU.
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: torch.set_rng_state(state))


_ACCELERATOR = {
    "get_memory_info": lambda device=None: (MEMORY.capacity - MEMORY.current, MEMORY.capacity),
    "memory_reserved": lambda device=None: MEMORY.current,
    "memory_stats": lambda device=None: MEMORY.stats(),
    "reset_peak_memory_stats": lambda device=None: MEMORY.restart(),
    "empty_cache": lambda: None,
    "current_stream": lambda device=None: Streams(),
}
_libraries = []


def register():
    """Makes the device torch's accelerator, and lets engines copy over its streams."""
    global DEVICE
    _setup_privateuseone_for_python_backend(NAME, _Module())
    DEVICE = torch.device(NAME, 0)
    every, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _libraries.extend((every, own))  # what they registered goes with them
    every.fallback(_run, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for op, function in _OWN.items():
        own.impl(op, function, "PrivateUse1")
    for op in _VIEWS:
        own.impl(op, _view_of(op), "PrivateUse1")
    for names, find in ((_NARROW, lambda: torch.get_autocast_dtype(NAME)), (_WIDE, lambda: torch.float32)):
        for name in names.split():
            packet, _, overload = name.partition(".")
            op = getattr(getattr(_aten, packet), overload or "default")
            own.impl(op, _casting(op, find), "AutocastPrivateUse1")
    mock.patch.object(torch.UntypedStorage, "clone", _clone_storage).start()
    mock.patch.multiple("torch.accelerator", **_ACCELERATOR).start()
    make = lambda device: DeviceStreams(device, Streams())  # noqa: E731
    mock.patch("hf_patrickstar.setup.resources.make_streams", make).start()
