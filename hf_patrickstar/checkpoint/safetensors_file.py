"""Safetensors files, written and read in pieces.

The library ``safetensors`` writes only tensors that are all in memory at once, and reads through a memory map, whose
pages count as memory of the process. This module writes chunks with one piece in memory beside them, and reads values
straight into chunks. The format is the library's: the same tensors make the same bytes.
"""

import contextlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch

from hf_patrickstar.checkpoint.deferred import PIECE_NUMEL, DeferredTensor, in_reading_order
from hf_patrickstar.checkpoint.patches import SAVE_FILE, replaced
from hf_patrickstar.checkpoint.pieces import PieceWriter, bytes_of, new_file
from hf_patrickstar.checkpoint.progress import shown
from hf_patrickstar.checkpoint.storage import damaged, missing_file, replace_file
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.memory.operators import unseen

# In the library's order of types; in a file, tensors of a later type come first.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RANKS = {dtype: rank for rank, dtype in enumerate(DTYPES.values())}
_ALIGNMENT = 8
_MOST_HEADER_NBYTES = 100_000_000


class Entry(NamedTuple):
    """One tensor of a file: its type and shape, and where its bytes begin and end in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """A file that is open for reading; the constructor checks that it is complete.

    Args:
        path: The file.

    Attributes:
        entries: The tensors by name.
        metadata: The metadata of the file.

    Raises:
        CheckpointError: If it is missing, truncated, or no safetensors file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._descriptor = -1
        self.path = Path(path)
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY)
            self.entries, self.metadata = self._read_header()
            self._stamp = self._find_stamp()
        except FileNotFoundError as error:
            raise CheckpointError(missing_file(self.path)) from error
        except OSError as error:
            raise CheckpointError(
                f"'{self.path}' cannot be read: {error.strerror or error}; make it readable"
            ) from error

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def _find_stamp(self) -> tuple[int, int]:
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns

    def check_unchanged(self) -> None:
        """Makes sure that the file has not been written to since it was opened; a removed file is still readable.

        Raises:
            CheckpointError: If it has been written to.
        """
        try:
            is_same = self._find_stamp() == self._stamp
        except OSError as error:
            raise CheckpointError(
                damaged(f"'{self.path}' cannot be read any more: {error.strerror or error}")
            ) from error
        if not is_same:
            raise CheckpointError(damaged(f"'{self.path}' was written to since it was opened"))

    def _read_header(self) -> tuple[dict[str, Entry], dict[str, str]]:
        size = os.fstat(self._descriptor).st_size
        prefix = os.pread(self._descriptor, _ALIGNMENT, 0)
        if len(prefix) < _ALIGNMENT:
            raise CheckpointError(damaged(f"'{self.path}' is truncated: it has {size} bytes, not even a header"))
        (length,) = struct.unpack("<Q", prefix)
        if length > _MOST_HEADER_NBYTES:
            raise CheckpointError(
                damaged(f"'{self.path}' is not a safetensors file: its header would have {length} bytes")
            )
        begin = _ALIGNMENT + length
        if begin > size:
            raise CheckpointError(
                damaged(f"'{self.path}' is truncated: its header ends at byte {begin}, the file at {size}")
            )
        try:
            header = json.loads(os.pread(self._descriptor, length, _ALIGNMENT))
            metadata = header.pop("__metadata__", None) or {}
            if not all(isinstance(text, str) for text in metadata.values()):
                raise ValueError("its metadata are no texts")
            entries = {name: self._entry(name, found, begin) for name, found in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointError(damaged(f"'{self.path}' is not a safetensors file: {error}")) from error
        end = begin
        for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
            if entry.start != end:
                raise CheckpointError(
                    damaged(f"'{self.path}': tensor '{name}' begins at byte {entry.start}, not at {end}")
                )
            if entry.stop > size:
                raise CheckpointError(
                    damaged(
                        f"'{self.path}' is truncated: tensor '{name}' ends at byte {entry.stop}, the file at {size}"
                    )
                )
            end = entry.stop
        if end != size:
            raise CheckpointError(damaged(f"'{self.path}' has {size} bytes, its tensors end at byte {end}"))
        return entries, metadata

    def _entry(self, name: str, found: Mapping[str, Any], begin: int) -> Entry:
        if found["dtype"] not in DTYPES:
            raise CheckpointError(
                f"'{self.path}': tensor '{name}' has type {found['dtype']}, which is not supported; save it in a "
                "type that torch and safetensors have"
            )
        dtype, shape = DTYPES[found["dtype"]], tuple(int(size) for size in found["shape"])
        start, stop = (begin + int(offset) for offset in found["data_offsets"])
        if any(size < 0 for size in shape):
            raise CheckpointError(damaged(f"'{self.path}': tensor '{name}' has shape {shape}, which no tensor has"))
        numel = math.prod(shape)
        if stop - start != numel * dtype.itemsize:
            text = f"tensor '{name}' of shape {shape} in {found['dtype']} should have {numel * dtype.itemsize} bytes"
            raise CheckpointError(damaged(f"'{self.path}': {text}, it has {stop - start}"))
        return Entry(dtype, shape, start, stop)

    @staticmethod
    def name_of(dtype: torch.dtype) -> str:
        """The name of a type in the format."""
        return _NAMES[dtype]

    def deferred(self, name: str) -> DeferredTensor:
        """A tensor of the file, deferred."""
        return DeferredTensor.make(FileSource(self, name), is_loadable=True)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Reads elements of a flattened tensor into a new tensor on the host.

        Args:
            name: The tensor.
            start: The first element.
            stop: One after the last.

        Raises:
            CheckpointError: If the file cannot be read any more.
        """
        dtype = self.entries[name].dtype
        if stop <= start:
            return torch.zeros(0, dtype=dtype, device="cpu")
        values = torch.frombuffer(bytearray((stop - start) * dtype.itemsize), dtype=dtype)
        self.read_into(name, start, values)
        return values

    def read_into(self, name: str, start: int, values: torch.Tensor) -> None:
        """Fills ``values`` with elements of a flattened tensor, without a copy.

        Args:
            name: The tensor.
            start: The first element.
            values: The tensor to fill: contiguous, on the host, in the type that the file has.

        Raises:
            CheckpointError: If the file cannot be read any more.
        """
        entry = self.entries[name]
        offset = entry.start + start * entry.dtype.itemsize
        view = bytes_of(values)
        try:
            while len(view):
                count = os.preadv(self._descriptor, [view], offset)
                if not count:
                    raise CheckpointError(
                        damaged(f"'{self.path}' ends at byte {offset}, in the middle of tensor '{name}'")
                    )
                view, offset = view[count:], offset + count
        except OSError as error:
            raise CheckpointError(
                damaged(f"'{self.path}': tensor '{name}' cannot be read: {error.strerror}")
            ) from error


class FileSource:
    """A tensor of a file as the source of a deferred tensor.

    Args:
        file: The file.
        name: The tensor.

    Attributes:
        shape: Its shape.
        dtype: Its type.
        is_for_threads: Several threads may read it at once.
    """

    is_for_threads = True

    def __init__(self, file: SafetensorsFile, name: str) -> None:
        self._file, self._name = file, name
        self.dtype, self.shape, *_ = file.entries[name]

    def read(self, start: int, stop: int) -> torch.Tensor:
        """See ``Source.read``."""
        return self._file.read(self._name, start, stop)

    def read_again(self, start: int, stop: int) -> torch.Tensor:
        """Like ``read``, and makes sure that the file has not changed since it was opened.

        Raises:
            CheckpointError: If the file has been written to since, or cannot be read.
        """
        self._file.check_unchanged()
        value = self.read(start, stop)
        self._file.check_unchanged()  # it must not have changed during the read either
        return value

    def read_into(self, start: int, values: torch.Tensor) -> None:
        """See ``DirectSource.read_into``."""
        self._file.read_into(self._name, start, values)

    def __str__(self) -> str:
        return f"'{self._file.path}'"


@unseen()
def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    piece_numel: int = PIECE_NUMEL,
    is_sorted: bool = True,
    on_written: Callable[[str], None] = lambda name: None,
) -> int:
    """Writes a file in pieces; when it returns, all of the file is on the disk.

    Args:
        path: The file; an older one is replaced.
        tensors: The tensors, deferred or not.
        metadata: The metadata of the file.
        piece_numel: Elements in memory at once.
        is_sorted: Whether to place tensors in the library's order; otherwise they are in the given order.
        on_written: Called with the name of every tensor that has been written.

    Returns:
        The size of the file in bytes.

    Raises:
        CheckpointError: If the file cannot be written; if the disk is full, the message has the bytes needed and free.
    """
    names = list(tensors)
    if is_sorted:
        names.sort(key=lambda name: (-_RANKS.get(tensors[name].dtype, 0), name))
    header, offsets, nbytes = _make_header(names, tensors, metadata)
    with new_file(path, len(header) + nbytes) as file:
        writer = PieceWriter(file, piece_numel)
        writer.write_bytes(header)
        for name in in_reading_order(names, tensors):
            file.seek(len(header) + offsets[name])
            writer.write(tensors[name])
            on_written(name)
    return len(header) + nbytes


@contextlib.contextmanager
def streamed_writing(piece_numel: int) -> Iterator[None]:
    """Inside the block ``safetensors.torch.save_file`` accepts deferred tensors, in each library of ``SAVE_FILE``.

    A call without deferred tensors is passed to the original function.

    Args:
        piece_numel: Elements in memory at once.
    """
    original = safetensors.torch.save_file

    def save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        if any(isinstance(tensor, DeferredTensor) for tensor in tensors.values()):
            # If several processes write, each has a file system of its own, and a console too.
            with shown((), f"Writing {Path(filename).name}", "tensors", is_first=True, total=len(tensors)) as bar:

                def write(path: Path) -> None:
                    write_safetensors(
                        path, tensors, metadata, piece_numel=piece_numel, on_written=lambda name: bar.update()
                    )

                replace_file(Path(filename), write)
        else:
            original(tensors, filename, metadata=metadata)

    with replaced(SAVE_FILE, save_file):
        yield


def _make_header(
    names: list[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> tuple[bytes, dict[str, int], int]:
    """The header, the offset of each tensor from its end, and the bytes of all tensors."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    offset = 0
    offsets = {}
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise CheckpointError(
                f"tensor '{name}' has type {tensor.dtype}, which safetensors cannot hold; convert it to another type "
                "before it is saved"
            )
        offsets[name] = offset
        nbytes = tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text, offsets, offset
