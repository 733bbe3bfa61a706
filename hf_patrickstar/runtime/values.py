"""The values of parameters: read from, and written to, every place where they are."""

import functools
import threading
from collections.abc import Callable

import torch

from hf_patrickstar.dist.sharing import Held, Sharing
from hf_patrickstar.layout.specs import MASTER
from hf_patrickstar.memory.operators import as_it_is
from hf_patrickstar.runtime.bits import differs
from hf_patrickstar.runtime.chunk import Device, GradientPlace, ManagedParameter
from hf_patrickstar.runtime.originals import Originals


class Values:
    """Reads and writes the values of parameters where no module computes with them.

    Args:
        device: The device.
        sharing: Reads what other ranks have at home.
        originals: Has the bits of frozen parameters that chunks do not hold.

    Attributes:
        device: The compute device.
        streams: How bytes cross.
        lock: Held while values or gradients change their places.
        version: Counts changes of values.
        num_mirrors: How many mirrors look into each storage, by its address; see ``Mirrors``.
    """

    def __init__(self, device: Device, sharing: Sharing, originals: Originals) -> None:
        self.version = 0
        self.num_mirrors: dict[int, int] = {}
        self.sharing = sharing
        self.originals = originals
        self.device, self.streams = device.streams.device, device.streams
        self.lock = threading.RLock()
        self._counts, self._looked_into = device.counts, device.looked_into

    # Reading

    def held(self, tensor: ManagedParameter, dtype: torch.dtype) -> Held:
        """What this rank has of a parameter's value: in place, its fp32 master if there is one, or its original.

        Args:
            tensor: The parameter.
            dtype: Type to read it in.
        """
        if not tensor.is_owned:
            return Held(tensor.spec, tensor.parts, None, dtype)
        if self.originals.has(tensor, dtype):
            return Held(tensor.spec, tensor.parts, functools.partial(self.originals.read, tensor), dtype)
        return Held(tensor.spec, tensor.parts, tensor.view(tensor.chunk.lists.get(MASTER, tensor.chunk.param)), dtype)

    def own_part(self, tensor: ManagedParameter, dtype: torch.dtype) -> torch.Tensor:
        """What this rank has of a parameter's value, in a type; in place where that is possible."""
        self._looked_into.add(tensor.chunk)
        chunk = tensor.chunk
        chunk.wait()
        if dtype == chunk.dtype and tensor.gradient is not GradientPlace.PARAM:
            return tensor.view(chunk.param)
        if self.originals.has(tensor, dtype):
            return self.originals.read(tensor).view_as(tensor.view(chunk.param)).to(dtype)
        return tensor.view(chunk.lists.get(MASTER, chunk.param)).to(dtype)

    def read(self, tensor: ManagedParameter, dtype: torch.dtype) -> torch.Tensor:
        """A copy of a parameter's value on the host, with all bits that are known; see ``held``.

        With several processes all must call it, for the same parameter.

        Args:
            tensor: The parameter.
            dtype: Type of the copy.
        """
        with as_it_is():
            return self.sharing.tensor(self.held(tensor, dtype), "the value")

    def look(self, tensor: ManagedParameter, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The value on the compute device, with all bits that are known; in place where that is possible.

        With several processes all must call it, for the same parameter.

        Args:
            tensor: The parameter.
            dtype: Type to read it in; by default the one that users see, in which the model was loaded.
        """
        self._looked_into.add(tensor.chunk)
        chunk = tensor.chunk
        dtype = tensor.original_dtype if dtype is None else dtype
        with as_it_is():
            if not self.sharing.is_alone:
                return self.read(tensor, dtype).to(self.device)
            is_there = dtype is chunk.dtype and chunk.home_device != self.device and chunk.arrival is None
            # A copy that was made after the gradient came has the gradient in this place.
            if is_there and chunk.compute is not None and tensor.gradient is not GradientPlace.PARAM:
                return tensor.view_copy(chunk.compute)
            # Whoever gets it may write to it, which a checkpoint that is being written must not see.
            return self.streams.on_device(self.own_part(tensor, dtype), copy=chunk.reader is not None)

    def host_alias(self, tensor: ManagedParameter, dtype: torch.dtype) -> torch.Tensor:
        """The value on the host, without a copy if it is there in this type: a tensor whose storage is it alone.

        It is only true until the parameter changes.
        """
        with as_it_is():
            if self.sharing.is_alone and tensor.spec.numel:
                own = self.own_part(tensor, dtype)
                if own.device.type == "cpu" and type(own) is torch.Tensor:
                    flat = own.detach().reshape(-1).view(torch.uint8)
                    return torch.from_numpy(flat.numpy()).view(dtype).view(tensor.spec.shape)
            return self.read(tensor, dtype)

    # Writing

    def write(self, tensor: ManagedParameter, value: torch.Tensor, *, voids_graphs: bool = True) -> None:
        """Changes the value of a parameter, in every place where it is; a gradient that it holds is kept.

        Where the new value has less bits than the fp32 master, elements that are the old value rounded keep theirs; so
        it is with originals of frozen parameters.

        Args:
            tensor: The parameter.
            value: The new value, in the parameter's shape; any floating type, any device. It may be one of the places.
            voids_graphs: Whether a backward that needs the old value is refused from now on, as torch refuses it after
                a change in place; changes through ``.data`` go unnoticed there, and so here.
        """
        with self.lock, as_it_is(), torch.no_grad():
            chunk = tensor.chunk
            chunk.wait()
            chunk.wait_for_reader()
            if tensor.is_owned:
                own = tensor.own(value)
                self.originals.note_write(tensor, own)
                if chunk.has_list(MASTER):
                    _write_master(tensor.view(chunk.lists[MASTER]), own)
                if tensor.gradient is not GradientPlace.PARAM:
                    _copy(tensor.view(chunk.param), own)
            self._follow(tensor, value)
            tensor.num_writes += voids_graphs
            self.version += 1

    def _follow(self, tensor: ManagedParameter, value: torch.Tensor) -> None:
        """Makes a device copy of the chunk, if there is one, follow."""
        chunk = tensor.chunk
        if chunk.compute is None or chunk.is_static:
            return
        if not chunk.is_group and tensor.gradient is not GradientPlace.PARAM:
            self.refresh_copy(tensor)
        else:
            _copy(tensor.view_copy(chunk.compute), value)

    def restore(self, tensor: ManagedParameter) -> None:
        """Writes the parameter's place from ``master``, at home and in a device copy if there is one."""
        chunk = tensor.chunk
        chunk.wait()
        tensor.round_master()
        if not chunk.is_group:
            self.refresh_copy(tensor)

    def refresh_copy(self, tensor: ManagedParameter) -> None:
        """Makes a device copy of the chunk, if there is one, follow a change that the host has made at home."""
        chunk = tensor.chunk
        if chunk.compute is not None and not chunk.is_static:
            home = tensor.view(chunk.param)
            chunk.note(self.streams.to_device(home, tensor.view_copy(chunk.compute)))
            self._counts.host_to_device_nbytes += home.numel() * home.dtype.itemsize

    def load(self, tensor: ManagedParameter, fill: Callable[[torch.Tensor], None]) -> None:
        """Changes what this rank has at home of a parameter that has no gradient and no copy; see ``begin_loading``.

        Args:
            tensor: The parameter.
            fill: Writes the new value into what it is given: flat, fp32 if there is a master.
        """
        with self.lock:
            chunk = tensor.chunk
            chunk.wait()
            self.originals.drop(tensor)
            fill(tensor.view(chunk.lists.get(MASTER, chunk.param)).view(-1))
            if chunk.has_list(MASTER):
                tensor.round_master()


def _write_master(master: torch.Tensor, value: torch.Tensor) -> None:
    if value.dtype.itemsize < master.dtype.itemsize:
        value = value.to(master.device)
        value = torch.where(differs(master.to(value.dtype), value), value.to(master.dtype), master)
    _copy(master, value)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.data_ptr() != source.data_ptr() or not target.numel():
        target.copy_(source)
