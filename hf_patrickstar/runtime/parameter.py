"""A managed parameter: its place in a chunk, its state, and its value, read and written in every place where it is.

[Note: originals]
A frozen fp32 parameter whose chunk has 16 bits has no master, since nothing updates it (``frozen_master`` asks for
one). The file that the parameter was read from has all of its bits: this is its *origin*. A read in the type that the
parameter was loaded in (state dictionaries, saving, copies, unfreezing) takes the bits from the origin. An element of
the chunk that differs from the rounded origin was written to since, and is read from the chunk. A value that is written
in fp32, by merging an adapter for example, is kept on the host and is the origin from then on.
"""

import dataclasses
import enum
import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hf_patrickstar.dist.sharing import Held
from hf_patrickstar.errors import BudgetError, PatrickStarError
from hf_patrickstar.layout.specs import MASTER, TensorSpec
from hf_patrickstar.memory.bits import differs, same_bits
from hf_patrickstar.memory.operators import as_it_is
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.model.live_parameter import (
    LiveMixin,
    can_answer,
    released_type,
    set_raw_data,
    set_raw_grad,
    storage_key,
)
from hf_patrickstar.units import format_nbytes, format_need

if TYPE_CHECKING:
    from hf_patrickstar.runtime.chunk import Chunk

logger = logging.getLogger(__name__)

_OWNER = "original"
"""Ledger owner of values that are kept on the host; see [Note: originals]."""
_PIECE_NUMEL = 2**18
"""Elements that are compared at once."""


class ValuePlace(enum.Enum):
    """Where the value of a parameter is, and so what the parameter itself is.

    ``NONE``: not in a chunk yet; the parameter is as it was. ``HOME``: in the chunk alone; the parameter is a
    placeholder, and answers by itself if it is bound. ``PARAMETER``: the parameter is a view of what is computed with.
    ``OPEN``: it is an ordinary parameter for a while, in ``full_parameters``. ``GIVEN_UP``: it is one for good, since
    somebody gave it another shape, or exchanged it.
    """

    NONE = "none"
    HOME = "home"
    PARAMETER = "parameter"
    OPEN = "open"
    GIVEN_UP = "given up"

    __hash__ = object.__hash__  # members are compared by identity; Enum's own is a Python function


class GradientPlace(enum.Enum):
    """Where the gradient of a parameter is; see ``runtime/gradients.py``.

    ``PARAM``: over the parameter's own place in the ``param`` list (gradient reuse, PatrickStar section 6.2).
    ``LIST``: in the accumulation list. ``REMOTE``: on the rank that owns the parameter. ``LEFT`` and ``APART``: in no
    chunk, but in ``ManagedParameter.kept``; the former as autograd has left it (see [Note: rest]), and the latter since
    a user still refers to it after a step, or all zeros if ``kept`` is ``None``.

    While a backward runs a gradient may be on its way to one of these: in the buffer of its group (``Groups``), or in
    ``ManagedParameter.deferred_gradient`` while the graph still needs the value that it would go over.
    """

    NONE = "none"
    PARAM = "param"
    LIST = "list"
    REMOTE = "remote"
    LEFT = "left"
    APART = "apart"

    __hash__ = object.__hash__  # members are compared by identity; Enum's own is a Python function


AT_HOME = frozenset({GradientPlace.PARAM, GradientPlace.LIST})
"""Updates find gradients in these places."""


class Epoch:
    """The time between two assignments of ``parameter.data``: in torch the parameter has the same memory throughout.

    What autograd keeps of a parameter refers to the epoch, and the parameter refers to it weakly: an epoch that is
    alive has operands of a graph.

    Attributes:
        value: The value at the end of the epoch, for graphs that were made in it; ``None`` before.
    """

    value: torch.Tensor | None = None


class Origin(Protocol):
    """Where the value of a parameter is, in the type that it was loaded in."""

    def read_again(self, start: int, stop: int) -> torch.Tensor:
        """Elements of the flattened parameter, on the host; do not write to them.

        Raises:
            PatrickStarError: If they are not there any more; the message says why.
        """


class _OnHost:
    """An ``Origin`` in host memory, with this rank's part of a value."""

    def __init__(self, buffer: torch.Tensor, first: int) -> None:
        self.buffer = buffer
        self._first = first

    def read_again(self, start: int, stop: int) -> torch.Tensor:
        return self.buffer[start - self._first : stop - self._first]


def round_masters(masters: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> None:
    """Writes the values of parameters from their fp32 masters, rounded to the types of their places at home.

    Args:
        masters: The masters, or parts of them.
        places: The same parts of the ``param`` list.
    """
    torch._foreach_copy_(list(places), list(masters))


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous tensor."""
    products = itertools.accumulate(reversed(shape[1:]), lambda left, right: left * max(right, 1), initial=1)
    return tuple(reversed(list(products))) if shape else ()


@dataclasses.dataclass(slots=True, eq=False)
class ManagedParameter:
    """One parameter under management: where it is, and its state (PatrickStar section 6.2).

    Args:
        spec: The parameter as numbers.
        parameter: The model's own parameter.
        offset_numel: Its offset in the buffer that modules compute with.
        placeholder: NaN in its shape.

    Attributes:
        released: What ``parameter.data`` is when the parameter is not being computed with: the placeholder, or its
            place in a chunk that is at rest.
    """

    spec: TensorSpec
    parameter: torch.nn.Parameter
    offset_numel: int
    placeholder: torch.Tensor
    released: torch.Tensor = dataclasses.field(init=False)
    released_key: int = 0
    typed: torch.Tensor = dataclasses.field(init=False)  # the same in the type that users see
    is_cast: bool = False  # whether modules compute with another type
    # Its place, which its chunk sets. One rank has all elements, unless the tensor is larger than a chunk.
    chunk: "Chunk" = dataclasses.field(init=False)
    parts: tuple[tuple[int, int], ...] = ()  # elements of the flat tensor that each rank owns, as (start, stop)
    part: tuple[int, int] = (0, 0)  # those of this rank
    own_numel: int = 0  # how many they are
    is_split: bool = False  # whether several ranks have some
    is_owned: bool = True  # whether this rank has any
    home_offset_numel: int = 0  # the offset of those in every list at home
    strides: tuple[int, ...] = ()
    # What it was, and will be again.
    original_dtype: torch.dtype = torch.float32  # which users see all the time
    original_type: type = torch.nn.Parameter
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    origin: Any = None  # what has bits of the value that the chunk does not hold; see [Note: originals]
    # Its value.
    place: ValuePlace = ValuePlace.NONE
    is_bound: bool = False  # whether the parameter answers while it has no value
    live: Any = None  # what answers then
    version: int = 0  # of the parameter, when it got its value
    users: tuple[int, ...] = ()  # acquisitions that have not ended: the thread of each
    view_on_device: torch.Tensor | None = None  # its place in a static chunk, kept; see ``Chunk.view_of``
    num_writes: int = 0  # changes of the value that void graphs
    read_at: int = -2  # ``num_writes`` when its value was read last
    epoch: "weakref.ref[Epoch] | None" = None
    lookup: str = "device"  # where an embedding reads its rows: or "home", or "auto", at home until it is decided
    lookup_nbytes: int = 0
    is_looked_up: bool = False
    # Its gradient.
    gradient: GradientPlace = GradientPlace.NONE
    is_consumed: bool = False  # whether a step has used the gradient, which is nowhere now
    is_incomplete: bool = False  # whether one came that torch would have added to a consumed one
    gradient_norm: torch.Tensor | None = None
    deferred_gradient: torch.Tensor | None = None  # it waits until nobody needs the value in its place
    kept: torch.Tensor | None = None  # the gradient, if that is ``LEFT`` or ``APART``
    crossing_nbytes: int = 0  # of gradients that are not in their place yet

    def __post_init__(self) -> None:
        parameter, numel = self.parameter, self.spec.numel
        self.released, self.released_key = self.placeholder, storage_key(self.placeholder)
        self.parts, self.part, self.own_numel = ((0, numel),), (0, numel), numel
        self.home_offset_numel = self.offset_numel
        self.strides = contiguous_strides(self.spec.shape)
        self.original_dtype, self.original_type, self.device = parameter.dtype, type(parameter), parameter.device
        self.is_cast = parameter.dtype is not self.placeholder.dtype
        self.typed = self.placeholder.as_strided((), ()).to(parameter.dtype).expand(self.spec.shape)

    def bind(self, live: Any) -> None:
        """Makes the parameter answer; see [Note: a parameter that answers]."""
        self.is_bound = can_answer(self.parameter)
        if self.is_bound:
            self.live = live
            self.original_type = type(self.parameter)
            self.parameter.__dict__["_live"] = live
            self.answer()

    @property
    def is_ours(self) -> bool:
        """Whether the parameter is of the class that the engine gave it; ``swap_tensors`` takes it away, say."""
        return not self.is_bound or isinstance(self.parameter, LiveMixin) or self.place is ValuePlace.OPEN

    def move_in(self) -> None:
        """Gives up the memory that the parameter had of its own, and its gradient: its value is in the chunk now."""
        self.place = ValuePlace.HOME
        set_raw_data(self.parameter, self.released)
        set_raw_grad(self.parameter, None)

    def round_master(self) -> None:
        """Writes the value at home from its master; see ``round_masters``."""
        round_masters([self.view(self.chunk.lists[MASTER])], [self.view(self.chunk.param)])

    def answer(self) -> None:
        """Lets the parameter answer by itself from now on, if it is bound."""
        if self.is_bound:
            self.parameter.__class__ = released_type(self.original_type)

    def take_value(self) -> None:
        """Takes the value away; the parameter answers by itself from now on."""
        assert self.place not in (ValuePlace.NONE, ValuePlace.GIVEN_UP)
        self.answer()
        set_raw_data(self.parameter, self.released)
        self.place = ValuePlace.HOME

    def release_as(self, released: torch.Tensor) -> None:
        """Makes ``parameter.data`` something else while no module computes with it; see [Note: rest]."""
        is_released = self.place is ValuePlace.HOME and storage_key(self.parameter) == self.released_key
        self.released, self.released_key = released, storage_key(released)
        if is_released:
            set_raw_data(self.parameter, released)

    @property
    def is_resting(self) -> bool:
        """Whether graphs may keep the parameter itself, which has its value all the time."""
        return self.chunk.device.keeps_values and self.released is not self.placeholder

    def open(self, value: torch.Tensor) -> None:
        """Makes it an ordinary parameter for a while, with a value of its own."""
        set_raw_data(self.parameter, value)
        if self.is_bound:
            self.parameter.__class__ = self.original_type
        self.place = ValuePlace.OPEN

    def unbind(self) -> None:
        """Makes it an ordinary parameter again, for good; it keeps what data it has."""
        if self.is_bound and self.is_ours:
            self.parameter.__class__ = self.original_type
            self.parameter.__dict__.pop("_live", None)
        self.is_bound = False

    def view(self, payload: torch.Tensor) -> torch.Tensor:
        """This rank's part of the tensor in a payload at home: in the tensor's shape, or flat if it is split."""
        if self.is_split:
            return payload[self.home_offset_numel : self.home_offset_numel + self.own_numel]
        return payload.as_strided(self.spec.shape, self.strides, self.home_offset_numel)

    def view_copy(self, payload: torch.Tensor) -> torch.Tensor:
        """The whole tensor in the buffer that modules compute with, or in a buffer of the same layout."""
        return payload.as_strided(self.spec.shape, self.strides, self.offset_numel)

    def own(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor in the parameter's shape, in the shape that ``view`` has."""
        return value.reshape(-1)[self.part[0] : self.part[1]] if self.is_split else value

    @property
    def is_rounded(self) -> bool:
        """Whether it is frozen, has no master, and was loaded with more bits than its chunk holds."""
        chunk = self.chunk
        is_narrow = chunk.dtype.itemsize < self.original_dtype.itemsize
        return is_narrow and not chunk.has_list(MASTER) and not chunk.spec.trainable

    @property
    def is_cpu_embedding(self) -> bool:
        """Whether an embedding reads its rows where this weight is at home, on the host."""
        return self.lookup != "device" and self.chunk.home is Tier.HOST

    @property
    def is_needed_at_home(self) -> bool:
        """Whether this step still needs the value at home, from which its chunk would be loaded again."""
        if self.chunk.is_group:
            return False
        return self.is_resting or bool(self.users) or (self.epoch is not None and self.epoch() is not None)

    # Its gradient; see ``runtime/gradients.py``

    @property
    def has_gradient(self) -> bool:
        """Whether it has a gradient, here or on the rank that owns it."""
        return self.gradient is not GradientPlace.NONE or self.deferred_gradient is not None

    def clear_gradient(self) -> None:
        """Forgets a gradient whose place holds the value again, or is about to."""
        self.gradient = GradientPlace.NONE
        self.is_consumed = self.is_incomplete = False
        self.gradient_norm = self.deferred_gradient = self.kept = None
        self.crossing_nbytes = 0

    def make_gradient_zero(self) -> None:
        """Makes all zeros its gradient, which is no other; it is here, or where the parameter is owned."""
        self.gradient = GradientPlace.APART if self.is_owned else GradientPlace.REMOTE
        self.is_consumed = False

    # Its value, where no module computes with it

    def held(self, dtype: torch.dtype) -> Held:
        """What this rank has of a parameter's value: in place, its fp32 master if there is one, or its original.

        Args:
            dtype: Type to read it in.
        """
        if not self.is_owned:
            return Held(self.spec, self.parts, None, dtype)
        if self.has_original(dtype):
            return Held(self.spec, self.parts, self.read_original, dtype)
        return Held(self.spec, self.parts, self.view(self.chunk.lists.get(MASTER, self.chunk.param)), dtype)

    def own_part(self, dtype: torch.dtype) -> torch.Tensor:
        """What this rank has of a parameter's value, in a type; in place where that is possible."""
        chunk = self.chunk
        chunk.device.looked_into.add(chunk)
        chunk.wait()
        if dtype == chunk.dtype and self.gradient is not GradientPlace.PARAM:
            return self.view(chunk.param)
        if self.has_original(dtype):
            return self.read_original().view_as(self.view(chunk.param)).to(dtype)
        return self.view(chunk.lists.get(MASTER, chunk.param)).to(dtype)

    def read(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A copy of a parameter's value on the host, with all bits that are known; see ``held``.

        With several processes all must call it, for the same parameter.

        Args:
            dtype: Type of the copy; by default the one that users see, in which the model was loaded.
        """
        with as_it_is():
            return self.chunk.device.sharing.tensor(self.held(dtype or self.original_dtype), "the value")

    def look(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The value on the compute device, with all bits that are known; in place where that is possible.

        With several processes all must call it, for the same parameter.

        Args:
            dtype: See ``read``.
        """
        chunk = self.chunk
        chunk.device.looked_into.add(chunk)
        dtype = self.original_dtype if dtype is None else dtype
        with as_it_is():
            if not self.chunk.device.sharing.is_alone:
                return self.read(dtype).to(chunk.device.torch_device)
            is_there = dtype is chunk.dtype and chunk.home_device != chunk.device.torch_device and chunk.arrival is None
            # A copy that was made after the gradient came has the gradient in this place.
            if is_there and chunk.compute is not None and self.gradient is not GradientPlace.PARAM:
                return self.view_copy(chunk.compute)
            # Whoever gets it may write to it, which a checkpoint that is being written must not see.
            return chunk.device.streams.on_device(self.own_part(dtype), copy=chunk.reader is not None)

    def host_alias(self) -> torch.Tensor:
        """The value on the host, in the type that users see, in place if possible: a tensor whose storage is it alone.

        It is only true until the parameter changes.
        """
        with as_it_is():
            if self.chunk.device.sharing.is_alone and self.spec.numel:
                own = self.own_part(self.original_dtype)
                if own.device.type == "cpu" and type(own) is torch.Tensor:
                    flat = own.detach().reshape(-1).view(torch.uint8)
                    return torch.from_numpy(flat.numpy()).view(self.original_dtype).view(self.spec.shape)
            return self.read()

    # Writing

    def write(self, value: torch.Tensor, *, voids_graphs: bool = True) -> None:
        """Changes the value of a parameter, in every place where it is; a gradient that it holds is kept.

        Where the new value has less bits than the fp32 master, elements that are the old value rounded keep theirs; so
        it is with originals of frozen parameters.

        Args:
            value: The new value, in the parameter's shape; any floating type, any device. It may be one of the places.
            voids_graphs: Whether a backward that needs the old value is refused from now on, as torch refuses it after
                a change in place; changes through ``.data`` go unnoticed there, and so here.
        """
        with self.chunk.device.lock, as_it_is(), torch.no_grad():
            chunk = self.chunk
            chunk.wait()
            chunk.wait_for_reader()
            if self.is_owned:
                own = self.own(value)
                self.keep_original(own)
                if chunk.has_list(MASTER):
                    _write_master(self.view(chunk.lists[MASTER]), own)
                if self.gradient is not GradientPlace.PARAM:
                    _copy(self.view(chunk.param), own)
            self._follow(value)
            self.num_writes += voids_graphs
            if voids_graphs and self.is_resting:
                torch.autograd.graph.increment_version(self.parameter)
            chunk.device.version += 1

    def _follow(self, value: torch.Tensor) -> None:
        """Makes a device copy of the chunk, if there is one, follow."""
        chunk = self.chunk
        if chunk.compute is None or chunk.is_static:
            return
        if not chunk.is_group and self.gradient is not GradientPlace.PARAM:
            self._refresh_copy()
        else:
            _copy(self.view_copy(chunk.compute), value)

    def restore(self) -> None:
        """Writes the parameter's place from ``master``, at home and in a device copy if there is one."""
        chunk = self.chunk
        chunk.wait()
        self.round_master()
        if not chunk.is_group:
            self._refresh_copy()

    def _refresh_copy(self) -> None:
        """Makes a device copy of the chunk, if there is one, follow a change that the host has made at home."""
        chunk = self.chunk
        if chunk.compute is not None and not chunk.is_static:
            home = self.view(chunk.param)
            chunk.note(chunk.device.streams.to_device(home, self.view_copy(chunk.compute)))
            chunk.device.counts.host_to_device_nbytes += home.numel() * home.dtype.itemsize

    def load(self, fill: Callable[[torch.Tensor], None]) -> None:
        """Changes what this rank has at home of a parameter that has no gradient and no copy; see ``begin_loading``.

        Args:
            fill: Writes the new value into what it is given: flat, fp32 if there is a master.
        """
        with self.chunk.device.lock:
            chunk = self.chunk
            chunk.wait()
            self.drop_original()
            fill(self.view(chunk.lists.get(MASTER, chunk.param)).view(-1))
            if chunk.has_list(MASTER):
                self.round_master()

    # Its original; see [Note: originals]

    def has_original(self, dtype: torch.dtype) -> bool:
        """Whether a read of a parameter in a given type takes it from its origin."""
        return self.origin is not None and dtype != self.chunk.dtype

    def read_original(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Reads elements of this rank's part of a parameter that has an origin, or has just lost it.

        Args:
            start: The first element of the flattened part.
            stop: One after the last; by default all.

        Returns:
            A flat tensor on the host, in the type that the parameter was loaded in, or in the type of the chunk if the
            origin is lost.
        """
        held, origin = self.view(self.chunk.param).reshape(-1)[start:stop].cpu(), self.origin
        if origin is None:
            return held
        value = torch.zeros(held.shape, dtype=self.original_dtype, device="cpu")
        begin = self.part[0] + start
        try:
            for place in range(0, held.numel(), _PIECE_NUMEL):
                own = held[place : place + _PIECE_NUMEL]
                found = origin.read_again(begin + place, begin + place + own.numel())
                is_written = differs(found.to(own.dtype), own)
                value[place : place + own.numel()] = torch.where(is_written, own.to(found.dtype), found)
        except PatrickStarError as error:
            self._lose_original(str(error), "; with frozen_master=true the host keeps all of their bits from the start")
            return held
        return value

    def keep_original(self, own: torch.Tensor) -> None:
        """Keeps all bits of a value that is about to be written to a parameter whose chunk rounds it.

        Args:
            own: This rank's part of the value.
        """
        dtype = self.chunk.dtype
        if not self.is_rounded or own.dtype.itemsize <= dtype.itemsize:
            return
        own = own.detach().reshape(-1).to("cpu", self.original_dtype)
        if self.origin is not None:
            before = self.read_original()
            if before.dtype == own.dtype and same_bits(before, own):
                return
        self.drop_original()
        if same_bits(own.to(dtype).to(own.dtype), own):
            return
        try:
            buffer = self.chunk.device.pool.allocate(Tier.HOST, own.numel(), own.dtype, _OWNER)
        except BudgetError:
            have = format_nbytes(self.chunk.device.pool.room(Tier.HOST))
            why = f"host_budget has {have} left, too little for all bits of frozen parameters that no file has"
            self._lose_original(why, f"; '{self.spec.name}' needs {format_need(own.nbytes)}")
            return
        self.origin = _OnHost(buffer.copy_(own), self.part[0])

    def drop_original(self) -> None:
        """Forgets the origin of a parameter."""
        if isinstance(self.origin, _OnHost):
            self.chunk.device.pool.release(Tier.HOST, self.origin.buffer, _OWNER, keep=False)
        self.origin = None

    def _lose_original(self, why: str, advice: str) -> None:
        self.origin = None
        if why not in self.chunk.device.warned:
            self.chunk.device.warned.add(why)
            logger.warning(
                "patrickstar: %s. So frozen parameters ('%s' is the first) are read and saved as they are computed "
                "with, rounded to %s%s",
                why,
                self.spec.name,
                self.spec.types.param,
                advice,
            )


def _write_master(master: torch.Tensor, value: torch.Tensor) -> None:
    if value.dtype.itemsize < master.dtype.itemsize:
        value = value.to(master.device)
        value = torch.where(differs(master.to(value.dtype), value), value.to(master.dtype), master)
    _copy(master, value)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.data_ptr() != source.data_ptr() or not target.numel():
        target.copy_(source)
