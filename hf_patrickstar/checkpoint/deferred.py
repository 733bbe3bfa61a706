"""Deferred tensors: their shape and type are known, and their values are read when they are needed, in pieces.

A checkpoint library renames, splits and joins tensors before it reads or writes them. With deferred tensors it does so
without any value: each result records how to compute it from tensors in files or in chunks. So the values of a model
are never in memory twice.
"""

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, ClassVar
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_patrickstar.errors import EngineError

PIECE_NUMEL = 2**18
"""Default number of elements of a piece: of what is in memory at once, beside the tensors themselves.

A piece is small enough to stay in the processor's cache from its conversion, or its arrival from another process, until
it is written. The allocator may spread several pieces over the heap; together they stay well below two chunks.
"""


@dataclasses.dataclass(eq=False)
class Source:
    """Where the values of a tensor are: a function reads them at any place, or in pieces one after the other.

    Attributes:
        shape: The shape of the tensor.
        dtype: Its type.
        reads: Does what ``read`` does; ``stream`` then calls it for each piece.
        streams: Does what ``stream`` does; ``read`` then takes its only piece.
        is_for_threads: Several threads may read it at once.
        name: What has the values, for errors.
        read_into: Fills a tensor with elements of the flattened tensor from the given one on, if the source can do
            that. The tensor to fill is flat, contiguous, on the host, and has the source's type.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    reads: Callable[[int, int], torch.Tensor] | None = None
    streams: Callable[[int, int, int], Generator[torch.Tensor, None, None]] | None = None
    is_for_threads: bool = False
    name: str = ""
    read_into: ClassVar[Any] = None

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Reads elements of the flattened tensor.

        Args:
            start: The first element.
            stop: One after the last element.

        Returns:
            A flat tensor on the host that may alias memory in use: do not write to it.
        """
        if self.reads is not None:
            return self.reads(start, stop)
        (value,) = self.stream(start, stop, max(stop - start, 1))
        return value

    def stream(self, start: int, stop: int, piece_numel: int) -> Generator[torch.Tensor, None, None]:
        """Reads pieces of ``piece_numel`` elements in order; see ``read``. A caller that stops early must close it."""
        if self.streams is not None:
            yield from self.streams(start, stop, piece_numel)
            return
        for begin in range(start, stop, piece_numel):
            yield self.read(begin, min(begin + piece_numel, stop))


class _Call:
    """The result of a function of other tensors, some of which are deferred."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, place: int | None = None) -> None:
        self._function, self._args, self._kwargs, self._place = function, args, kwargs, place

    def leaf(self) -> Any:
        """The first source that it needs."""
        first = next(v for v in tree_leaves((self._args, self._kwargs)) if isinstance(v, DeferredTensor))
        return first.recipe.leaf() if isinstance(first.recipe, _Call) else first.recipe

    def compute(self, read_whole: Callable[["DeferredTensor"], torch.Tensor]) -> torch.Tensor:
        args, kwargs = tree_map_only(DeferredTensor, read_whole, (self._args, self._kwargs))
        result = self._function(*args, **kwargs)
        return result if self._place is None else result[self._place]


class DeferredTensor(torch.Tensor):
    """A tensor on the meta device that records where its values come from.

    Functions of it return deferred tensors; ``to`` changes its type and ignores the device. Functions that need values
    (``READING``) read them, or raise if the tensor is still to be loaded. ``Reader`` reads values in pieces.
    """

    recipe: "Source | _Call"
    is_loadable: bool
    """Whether the tensor is still to be loaded into a model; its ``device`` is then the CPU."""

    @staticmethod
    def make(source: Source, *, is_loadable: bool = False) -> "DeferredTensor":
        """Makes a deferred tensor of a source.

        Args:
            source: Where its values are.
            is_loadable: See the attribute.
        """
        return _wrap(torch.zeros(source.shape, dtype=source.dtype, device="meta"), source, is_loadable)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name == "__deepcopy__":
            tensor, memo = args
            return memo[id(tensor)] if id(tensor) in memo else memo.setdefault(id(tensor), _deepcopy(tensor))
        if name in _OF_THE_META_TENSOR:
            if func == _DATA:
                return _alias(args[0])
            if func == _SET_DATA:  # by which code casts a model in place
                tensor, value = args
                if not isinstance(value, DeferredTensor):
                    raise EngineError(
                        "values were assigned to a parameter of deferred_weights, which would be lost when it is read; "
                        "change it after the engine was made, in full_parameters(), or load the model without "
                        "deferred_weights"
                    )
                tensor.recipe, tensor.is_loadable = value.recipe, value.is_loadable
            if func == _DEVICE and args[0].is_loadable:
                return torch.device("cpu")
            if func in _TRANSPOSED:
                return _record(func, args, kwargs)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "equal" and all(value.is_loadable for value in args if isinstance(value, DeferredTensor)):
            return _equal(*args)
        if name == "copy_" and not isinstance(args[0], DeferredTensor):
            target, value = args[:2]
            if value.is_loadable or target.shape != value.shape or not target.is_contiguous():
                return _read_now(name, func, args, kwargs)
            Reader().fill(target, value)
            return target
        is_assigned = name == "__setitem__" and isinstance(args[0], DeferredTensor)
        if is_assigned or (name.endswith("_") and not name.endswith("__")) or kwargs.get("out") is not None:
            raise EngineError(
                f"'{name}' would change a tensor that is not read yet; change it after the engine was made, or load "
                "the model without deferred_weights"
            )
        if name in READING:
            return _read_now(name, func, args, kwargs)
        if name in ("detach", "contiguous", "clone", "alias") or (name == "__getitem__" and args[1] is Ellipsis):
            return _alias(args[0])
        if name in ("to", "float", "half", "bfloat16", "type", "type_as"):
            return _cast(func, args, kwargs)
        return _record(func, args, kwargs)


READING = frozenset(
    ("numpy", "item", "tolist", "cpu", "cuda", "equal", "allclose", "__array__", "__bool__", "__float__")
) | {"__int__", "__index__", "__reduce_ex__", "__setitem__", "share_memory_", "pin_memory"}
"""Functions that need values."""
_OF_THE_META_TENSOR = ("__get__", "__set__", "requires_grad_", "data_ptr", "__repr__", "__format__", "__hash__")
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_TRANSPOSED = tuple(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH"))


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its recipe: an ordinary tensor on the meta device."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)


def _wrap(meta: torch.Tensor, recipe: "Source | _Call", is_loadable: bool) -> DeferredTensor:
    tensor: DeferredTensor = torch.Tensor._make_subclass(DeferredTensor, meta)
    tensor.recipe, tensor.is_loadable = recipe, is_loadable
    return tensor


def _alias(tensor: DeferredTensor) -> DeferredTensor:
    return _wrap(_bare(tensor), tensor.recipe, tensor.is_loadable)


def _read_now(name: str, function: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function with the values of deferred tensors; raises if only the engine may load one of them."""
    if any(value.is_loadable for value in _deferred_in((args, kwargs))):
        raise EngineError(
            f"'{name}' needs the values of a parameter of deferred_weights, which is not read yet; give the model to a "
            "Trainer with patrickstar, or to prepare(), first, or load it without deferred_weights"
        )
    args, kwargs = tree_map_only(DeferredTensor, Reader().read_whole, (args, kwargs))
    return function(*args, **kwargs)


def _deepcopy(tensor: DeferredTensor) -> Any:
    """A copy with the same recipe, for code that copies a module."""
    copied: Any = _alias(tensor).requires_grad_(tensor.requires_grad)
    return torch.nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else copied


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compares values in pieces; transformers compares tied weights that a checkpoint has under both names."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if getattr(left, "recipe", left) is getattr(right, "recipe", right):
        return True
    pairs = zip(Reader().pieces(left, PIECE_NUMEL), Reader().pieces(right, PIECE_NUMEL), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def _deferred_in(tree: Any) -> list[DeferredTensor]:
    return [value for value in tree_leaves(tree) if isinstance(value, DeferredTensor)]


def _shapes(args: Any) -> Any:
    """The arguments as tensors on the meta device, to compute the shape of a result."""
    return tree_map_only(torch.Tensor, lambda value: value.to("meta"), tree_map_only(DeferredTensor, _bare, args))


def _cast(func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    with torch._C.DisableTorchFunctionSubclass():
        if func is torch.Tensor.to:  # the device argument is ignored, positional or keyword
            kwargs = {key: value for key, value in kwargs.items() if key != "copy"}
            dtype = torch._C._nn._parse_to(*args[1:], **kwargs)[1] or tensor.dtype
        else:
            result = func(*_shapes(args), **_shapes(kwargs))
            if isinstance(result, str):  # the name of its type
                return result
            dtype = result.dtype
    if dtype == tensor.dtype:
        return _alias(tensor)
    if isinstance(tensor.recipe, _Call):
        return _record(torch.Tensor.to, (tensor, dtype), {})
    source: Source = tensor.recipe
    cast = Source(
        source.shape,
        dtype,
        lambda start, stop: source.read(start, stop).to(dtype),  # element by element, so parts can be read
        is_for_threads=source.is_for_threads,
        name=source.name,
    )
    return DeferredTensor.make(cast, is_loadable=tensor.is_loadable)


def _record(func: Any, args: Any, kwargs: Any) -> Any:
    bare_args, bare_kwargs = _shapes((args, kwargs))
    is_loadable = any(value.is_loadable for value in _deferred_in((args, kwargs)))
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*bare_args, **bare_kwargs)

    def wrap(item: Any, place: int | None) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        # Its storage has just its size, since libraries count the bytes of storages.
        meta = torch.zeros(item.shape, dtype=item.dtype, device="meta")
        return _wrap(meta, _Call(func, args, kwargs, place), is_loadable)

    if isinstance(result, (tuple, list)):
        return type(result)(wrap(item, place) for place, item in enumerate(result))
    return wrap(result, None)


def in_reading_order(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of tensors, but tensors of one type that one source gives follow each other: it is read once.

    Args:
        tensors: The tensors, deferred or not.
    """
    groups: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        recipe = getattr(tensor, "recipe", None)
        groups.setdefault((id(recipe.leaf()), tensor.dtype) if isinstance(recipe, _Call) else name, []).append(name)
    return [name for group in groups.values() for name in group]


class Reader:
    """Reads the values of deferred tensors.

    It caches the source that it last read as a whole, for functions that split one tensor.
    """

    def __init__(self) -> None:
        self._last: dict[Source, torch.Tensor] = {}
        self._lock = threading.Lock()

    def read(self, tensor: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Reads elements of a flattened tensor; the result of a function is computed as a whole first.

        Args:
            tensor: A deferred tensor, or an ordinary one.
            start: The first element.
            stop: One after the last element; by default the end.

        Returns:
            A flat tensor on the host that may alias memory in use: do not write to it.
        """
        stop = tensor.numel() if stop is None else stop
        with torch.no_grad(), torch.device("cpu"):
            if not isinstance(tensor, DeferredTensor):
                return tensor.detach().reshape(-1)[start:stop].cpu()
            if isinstance(tensor.recipe, _Call):
                with self._lock:
                    return self._whole(tensor).reshape(-1)[start:stop]
            return tensor.recipe.read(start, stop)

    def read_whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Reads a tensor in its shape; see ``read``."""
        return self.read(tensor).view(tensor.shape)

    def fill(self, values: torch.Tensor, tensor: torch.Tensor, start: int = 0, piece_numel: int = PIECE_NUMEL) -> None:
        """Fills ``values`` with elements of a tensor.

        Args:
            values: The tensor to fill; contiguous, of any type, on any device.
            tensor: A deferred tensor, or an ordinary one.
            start: The first element, of the flattened tensor.
            piece_numel: Elements in memory at once, if they cannot be read straight into ``values``.
        """
        flat = values.view(-1)
        stop, recipe = start + flat.numel(), getattr(tensor, "recipe", None)
        if recipe is None:
            flat.copy_(tensor.detach().reshape(-1)[start:stop])
        elif getattr(recipe, "read_into", None) and flat.device.type == "cpu" and flat.dtype == tensor.dtype:
            recipe.read_into(start, flat)
        else:
            for piece in self.pieces(tensor, piece_numel, start, stop):
                flat[: piece.numel()].copy_(piece)
                flat = flat[piece.numel() :]

    def pieces(
        self, tensor: torch.Tensor, piece_numel: int, start: int = 0, stop: int | None = None
    ) -> Generator[torch.Tensor, None, None]:
        """Yields elements in order, in pieces; see ``read``. A caller that stops early must close the generator."""
        stop = tensor.numel() if stop is None else stop
        recipe = getattr(tensor, "recipe", None)
        if start < stop and isinstance(recipe, Source):
            yield from recipe.stream(start, stop, piece_numel)
        elif start < stop:  # the result of a function is computed once for all pieces
            flat = tensor.detach().reshape(-1)[start:stop] if recipe is None else self.read(tensor, start, stop)
            yield from (piece.cpu() for piece in flat.split(piece_numel))

    def _whole(self, tensor: DeferredTensor) -> torch.Tensor:
        recipe = tensor.recipe
        if isinstance(recipe, _Call):
            return recipe.compute(self._whole)
        if recipe not in self._last:
            self._last.clear()  # first, so that two are never in memory
            self._last[recipe] = recipe.read(0, tensor.numel()).view(recipe.shape)
        return self._last[recipe]


@contextlib.contextmanager
def replaced(places: Sequence[tuple[str, str]], replacement: Any) -> Iterator[None]:
    """Replaces a function inside of a block, wherever its modules are imported; afterwards all is as it was.

    The replacement holds for the whole process, other threads included.

    Args:
        places: Modules, and the function's name there. A module that is not imported, or does not have the name, is
            skipped; a library that gets a deferred tensor all the same fails with an error: the tensor has no bytes.
        replacement: What is called instead.
    """
    with contextlib.ExitStack() as stack:
        for module, name in places:
            found = sys.modules.get(module)
            if hasattr(found, name):
                stack.enter_context(mock.patch.object(found, name, replacement))
        yield
