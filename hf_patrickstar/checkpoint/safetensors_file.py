"""Safetensors files, written and read in pieces.

The library ``safetensors`` checks files. Its writer needs all tensors in memory at once, and its reader maps a file
into memory, where each page is read when it is touched. This module writes tensors with one piece in memory beside
them, and reads values straight into chunks.
"""

import contextlib
import functools
import json
import math
import os
import struct
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch

from hf_patrickstar.checkpoint.deferred import PIECE_NUMEL, DeferredTensor, Reader, Source, in_reading_order, replaced
from hf_patrickstar.checkpoint.progress import shown
from hf_patrickstar.checkpoint.storage import NewFile, bytes_of, checksum, damaged, missing_file, text_checksum
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.memory.operators import unseen

SAVE_FILE = (
    ("safetensors.torch", "save_file"),
    ("transformers.modeling_utils", "safe_save_file"),
    ("peft.peft_model", "safe_save_file"),
    ("accelerate.utils.other", "safe_save_file"),
)
"""Where libraries have ``safetensors.torch.save_file``, which ``streamed_writing`` replaces."""
CHECKSUMS = "hf_patrickstar.checksums"
"""The entry of a file's metadata that has the checksums of each tensor: one of every ``piece_numel`` elements."""
_ALIGNMENT = 8


class Entry(NamedTuple):
    """One tensor of a file: its type and shape, and the byte of the file at which it begins."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class SafetensorsFile(contextlib.AbstractContextManager["SafetensorsFile", None]):
    """A file that is open for reading, with the methods of ``safetensors.safe_open``; its tensors are deferred.

    The constructor checks that the file is complete. It stays open as long as a tensor refers to it.

    Args:
        filename: The file.
        *_args: Ignored, as are keywords: what ``safe_open`` accepts.

    Attributes:
        entries: The tensors by name.
        checksums: Those of pieces of tensors, by name, and elements of a piece; empty if the file has none.

    Raises:
        CheckpointError: If it is missing, truncated, or no safetensors file.
    """

    def __init__(self, filename: str | os.PathLike[str], *_args: Any, **_kwargs: Any) -> None:
        self.path = Path(filename)
        self.entries: dict[str, Entry] = {}
        self.checksums: dict[str, Any] = {}
        self._metadata: dict[str, str] = {}
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor).atexit = False
            self._read_header()
            self._stamp = self._find_stamp()
        except FileNotFoundError as error:
            raise CheckpointError(missing_file(self.path)) from error
        except OSError as error:
            raise CheckpointError(f"'{self.path}' cannot be read: {error}; make it readable") from error
        except (safetensors.SafetensorError, ValueError) as error:
            raise CheckpointError(damaged(f"'{self.path}' is not a complete safetensors file: {error}")) from error

    @unseen()
    def _read_header(self) -> None:
        with safetensors.safe_open(self.path, "pt") as file:
            (length,) = struct.unpack("<Q", os.pread(self._descriptor, 8, 0))
            start, self._metadata = 8 + length, file.metadata() or {}
            if CHECKSUMS in self._metadata:
                header = json.loads(os.pread(self._descriptor, length, 8))
                self.checksums = json.loads(header["__metadata__"].pop(CHECKSUMS))
                if self.checksums.pop("header", None) != text_checksum([header, self.checksums]):
                    raise ValueError("its header is not the one that was saved")
            for name in file.offset_keys():
                tensor = file.get_tensor(name)  # maps its bytes, and reads none
                self.entries[name] = Entry(tensor.dtype, tuple(tensor.shape), start)
                start += tensor.numel() * tensor.dtype.itemsize

    def _find_stamp(self) -> tuple[int, int]:
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns

    def check_unchanged(self) -> None:
        """Makes sure that the file has not been written to since it was opened; a removed file is still readable.

        Raises:
            CheckpointError: If it has been written to.
        """
        if self._find_stamp() != self._stamp:
            raise CheckpointError(damaged(f"'{self.path}' was written to since it was opened"))

    def __exit__(self, *_: Any) -> None:
        """Does nothing."""

    def keys(self) -> list[str]:
        """The names of the tensors."""
        return list(self.entries)

    def metadata(self) -> dict[str, str]:
        """The metadata of the file."""
        return self._metadata

    def get_tensor(self, name: str) -> DeferredTensor:
        """A tensor of the file, deferred."""
        dtype, shape, _ = self.entries[name]
        return DeferredTensor.make(FileSource(shape, dtype, [(0, math.prod(shape), self, name)]), is_loadable=True)

    get_slice = get_tensor  # part of it can be read

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Reads elements of a flattened tensor into a new tensor on the host."""
        return Reader().read(self.get_tensor(name), start, stop)

    def read_into(self, name: str, start: int, values: torch.Tensor) -> None:
        """Fills ``values`` with elements of a flattened tensor, without a copy.

        Args:
            name: The tensor.
            start: The first element.
            values: The tensor to fill: contiguous, on the host, in the type that the file has.

        Raises:
            CheckpointError: If the file cannot be read any more, or has other bytes than were written.
        """
        entry, view = self.entries[name], bytes_of(values)
        begin = start * entry.dtype.itemsize
        if name not in (sums_of := self.checksums.get("sums", {})):
            self._read_bytes(name, begin, view)
            return
        sums, size = sums_of[name], self.checksums["piece_numel"] * entry.dtype.itemsize
        end, numel = begin + len(view), math.prod(entry.shape)
        for number in range(begin // size, -(-end // size)):
            low, high = number * size, min((number + 1) * size, numel * entry.dtype.itemsize)
            is_whole = begin <= low and high <= end
            piece = view[low - begin : high - begin] if is_whole else memoryview(bytearray(high - low))
            self._read_bytes(name, low, piece)
            if checksum(piece) != sums[number]:
                raise CheckpointError(damaged(f"'{self.path}': tensor '{name}' has other bytes than were saved"))
            if not is_whole:
                first, last = max(low, begin), min(high, end)
                view[first - begin : last - begin] = piece[first - low : last - low]

    def _read_bytes(self, name: str, begin: int, view: memoryview) -> None:
        """Fills memory with the bytes of a tensor from the given one on."""
        offset = self.entries[name].start + begin
        try:
            while len(view):
                if not (count := os.preadv(self._descriptor, [view], offset)):
                    raise CheckpointError(damaged(f"'{self.path}' ends at byte {offset}, inside of tensor '{name}'"))
                view, offset = view[count:], offset + count
        except OSError as error:
            raise CheckpointError(damaged(f"'{self.path}': tensor '{name}' cannot be read: {error}")) from error


class FileSource(Source):
    """A tensor in files, whole or in ranges of elements, as the source of a deferred tensor.

    Args:
        shape: The shape of the whole tensor.
        dtype: Its type.
        pieces: The first element of each range and one after the last, the file that has it, and its name there.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, pieces: list[tuple[int, int, SafetensorsFile, str]]
    ) -> None:
        super().__init__(shape, dtype, is_for_threads=True, name=f"'{pieces[0][2].path}'")
        self.pieces = pieces

    def first_missing(self, start: int, stop: int) -> int:
        """The first of some elements that is in no file; ``stop`` if all are there."""
        for low, high, *_ in sorted(self.pieces, key=lambda piece: piece[:2]):
            if low <= start:
                start = max(start, high)
        return min(start, stop)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """See ``Source.read``; nobody else has the memory of the result."""
        nbytes = (stop - start) * self.dtype.itemsize
        values = torch.frombuffer(bytearray(nbytes or 8), dtype=self.dtype)[: stop - start]
        self.read_into(start, values)
        return values

    def read_into(self, start: int, values: torch.Tensor) -> None:
        """See ``Source.read_into``."""
        for low, high, file, name in self.pieces:
            begin, end = max(low, start), min(high, start + values.numel())
            if begin < end:
                file.read_into(name, begin - low, values[begin - start : end - start])

    def read_again(self, start: int, stop: int) -> torch.Tensor:
        """Like ``read``, and makes sure that the files have not changed since they were opened.

        Raises:
            CheckpointError: If a file has been written to since, or cannot be read.
        """
        for *_, file, _ in self.pieces:
            file.check_unchanged()
        value = self.read(start, stop)
        for *_, file, _ in self.pieces:
            file.check_unchanged()  # it must not have changed during the read either
        return value


@unseen()
def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    piece_numel: int = PIECE_NUMEL,
    on_written: Callable[[str], None] = lambda name: None,
) -> None:
    """Writes a file in pieces, which appears when all of it is on the disk, or not at all.

    Args:
        path: The file; an older one is replaced.
        tensors: The tensors, deferred or not, in their order in the file.
        metadata: The metadata of the file; if ``CHECKSUMS`` is in it, the file gets checksums.
        piece_numel: Elements in memory at once.
        on_written: Called with the name of every tensor that has been written.

    Raises:
        CheckpointError: If the file cannot be written; if the disk is full, the message has the bytes needed and free.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    stop = 0
    for name, tensor in tensors.items():
        shape, start, stop = list(tensor.shape), stop, stop + tensor.numel() * tensor.dtype.itemsize
        dtype = str(tensor.dtype).removeprefix("torch.")
        try:
            spec = safetensors.TensorSpec(dtype=dtype, shape=shape, data_ptr=0, data_len=stop - start)
        except safetensors.SafetensorError as error:
            raise CheckpointError(f"tensor '{name}': {error}; convert it to another type before it is saved") from error
        header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [start, stop]}
    sums = {name: [checksum(memoryview(b""))] * -(-tensor.numel() // piece_numel) for name, tensor in tensors.items()}
    is_checked = CHECKSUMS in (metadata or ())
    known = {"piece_numel": piece_numel, "sums": sums}
    if is_checked:
        del header["__metadata__"][CHECKSUMS]

    def head() -> bytes:
        whole = header
        if is_checked:
            checksums = json.dumps({**known, "header": text_checksum([header, known])})
            whole = {**header, "__metadata__": {**header["__metadata__"], CHECKSUMS: checksums}}
        text = json.dumps(whole, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return struct.pack("<Q", len(text)) + text

    begin, reader = len(head()), Reader()
    with NewFile.opened(path, begin + stop) as file:
        for name in in_reading_order(tensors):
            file.seek(begin + header[name]["data_offsets"][0])
            sums[name] = file.write_tensor(tensors[name], reader, piece_numel, is_checked=is_checked)
            on_written(name)
        file.seek(0)
        file.write(head())  # which has its length before the checksums are known


@contextlib.contextmanager
def streamed_writing(piece_numel: int) -> Iterator[None]:
    """Inside the block ``safetensors.torch.save_file`` accepts deferred tensors, in each library of ``SAVE_FILE``.

    A call without deferred tensors is passed to the original function.

    Args:
        piece_numel: Elements in memory at once.
    """
    original = safetensors.torch.save_file

    def save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        if not any(isinstance(tensor, DeferredTensor) for tensor in tensors.values()):
            original(tensors, filename, metadata=metadata)
            return
        # The larger elements come first, as in the library, so that all are aligned.
        ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
        # If several processes write, each has a file system of its own, and a console too.
        with shown((), f"Writing {Path(filename).name}", "tensors", is_first=True, total=len(tensors)) as bar:
            write = functools.partial(write_safetensors, filename, ordered, metadata, piece_numel=piece_numel)
            write(on_written=lambda name: bar.update())

    with replaced(SAVE_FILE, save_file):
        yield
