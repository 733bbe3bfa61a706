"""Parameters of static chunks, which modules get and give back together, since nothing has to move for them.

[Note: parameters that are there]
A module that computes with parameters of static chunks meets the same memory each time. What ``Parameters.acquire`` and
``release`` look for is looked for all the same, for each parameter: writes, assignments, gradients in the place of the
value, other threads. But the lock and the context of torch are entered once for a module, nobody is asked where a chunk
is, and the view that a parameter gets is made once. Where there is more to do for a parameter, it and those after it
are acquired or released one by one.
"""

import threading
from collections.abc import Callable, Sequence

import torch

from hf_patrickstar.runtime.chunk import Chunk, ManagedTensor
from hf_patrickstar.runtime.gradient_place import GradientPlace
from hf_patrickstar.runtime.live_parameter import (
    RAW,
    LiveMixin,
    released_type,
    requires_grad,
    set_data_inside,
    storage_key,
)


def place_of(tensor: ManagedTensor, chunk: Chunk) -> torch.Tensor | None:
    """The place of a parameter in its chunk, made once for all uses; ``None`` if the chunk is not static.

    It is for the engine alone: ``Chunk.is_aliased`` does not count who has it.

    Args:
        tensor: The parameter.
        chunk: Its chunk.
    """
    view = chunk.views.get(tensor)
    if view is None and chunk.compute is not None and chunk.is_static and chunk.compute is chunk.param:
        view = tensor.view_copy(chunk.compute)
        if type(view) is type(chunk.compute):  # else it is of a mode that is in force just now
            chunk.views[tensor] = view
    return view


def acquire_idle(
    tensors: Sequence[ManagedTensor],
    acquired: list[ManagedTensor],
    type_of: Callable[[type], type],
    is_handed_out: Callable[[ManagedTensor], bool] | None,
    *,
    is_recomputed: bool,
) -> None:
    """Gives the first parameters of a module their values, as far as nothing else is to be done for them.

    Args:
        tensors: All parameters of the module.
        acquired: Those that have got their values are added to it.
        type_of: The class of a parameter that has its value.
        is_handed_out: Whether users have copies of a value, so that there may be more to do; ``None`` if of none.
        is_recomputed: Whether the forward runs again inside of a backward.
    """
    this = threading.get_ident()
    with RAW():
        for tensor in tensors:
            parameter, chunk = tensor.parameter, tensor.chunk
            if (
                tensor.users
                or tensor.is_open
                or tensor.is_materialized
                or not tensor.is_bound
                or tensor.gradient is GradientPlace.PARAM
                or not isinstance(parameter, LiveMixin)
                or storage_key(parameter) != tensor.placeholder_key
                or (is_handed_out is not None and is_handed_out(tensor))
                or (is_recomputed and not requires_grad(parameter))
            ):
                return
            view = chunk.views.get(tensor)
            if view is None:
                view = place_of(tensor, chunk)
                if view is None:
                    return
            tensor.read_at = tensor.num_writes
            set_data_inside(parameter, view)
            parameter.__class__ = type_of(tensor.original_type)  # another thread may use it from now on
            tensor.is_materialized = True
            tensor.version = parameter._version
            chunk.num_computing += 1
            tensor.users = 1
            tensor.threads.append(this)
            acquired.append(tensor)


def release_unchanged(tensors: Sequence[ManagedTensor]) -> int:
    """Takes their values from the first parameters of a module, as far as nothing was written to them.

    Args:
        tensors: Parameters that a module has acquired.

    Returns:
        How many.
    """
    this, num_released = threading.get_ident(), 0
    with RAW():
        for tensor in tensors:
            parameter, storage = tensor.parameter, tensor.chunk.storage
            if (
                tensor.users != 1
                or not tensor.is_materialized
                or tensor.threads[0] != this
                or not tensor.is_bound
                or storage is None
                or storage_key(parameter) != storage._cdata
                or parameter._version != tensor.version
                or parameter.shape != tensor.spec.shape
            ):
                break
            tensor.users = 0
            tensor.threads.clear()
            tensor.chunk.num_computing -= 1
            parameter.__class__ = released_type(tensor.original_type)  # it answers by itself from now on
            set_data_inside(parameter, tensor.placeholder)
            tensor.is_materialized = False
            num_released += 1
    return num_released
