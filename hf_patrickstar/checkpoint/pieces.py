"""Writes tensors to a file in pieces, with one piece in memory at a time beside the tensors themselves."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hf_patrickstar.checkpoint.deferred import PIECE_NUMEL, Reader
from hf_patrickstar.checkpoint.storage import describe_failure, write_all
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.runtime.chunk import Chunk

_WRITEBACK_NBYTES = 2**25


class PieceWriter:
    """Writes tensors to a file.

    Args:
        file: The file, open for writing in binary.
        piece_numel: Elements in memory at once.
    """

    def __init__(self, file: Any, piece_numel: int) -> None:
        self._file = file
        self._piece_numel = piece_numel
        self._reader = Reader()
        self._waiting_nbytes = 0

    def write_bytes(self, data: bytes) -> None:
        """Writes bytes as they are."""
        write_all(self._file, memoryview(data))

    def write(self, tensor: torch.Tensor, record: Any = None) -> None:
        """Writes the elements of a tensor, one after the other.

        Args:
            tensor: The tensor, deferred or not.
            record: A file object to write through, such as a member of a zip file; by default the file itself.
        """
        with contextlib.closing(self._reader.pieces(tensor, self._piece_numel)) as pieces:
            for piece in pieces:
                write_all(record or self._file, bytes_of(piece.contiguous()))
                self._begin_writeback(piece.numel() * piece.dtype.itemsize)
                del piece  # so that the next piece is not allocated beside it

    def _begin_writeback(self, nbytes: int) -> None:
        """Starts to write the file's pages to the disk, so that fsync has less to do at the end.

        On Linux ``POSIX_FADV_DONTNEED`` starts that without waiting. If the call fails, fsync writes all pages.
        """
        self._waiting_nbytes += nbytes
        if self._waiting_nbytes < _WRITEBACK_NBYTES or not hasattr(os, "posix_fadvise"):
            return
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._waiting_nbytes = 0


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str], nbytes: int) -> Iterator[Any]:
    """Opens a file for writing; when the block has ended, all of it is on the disk.

    Args:
        path: The file; an older one is replaced.
        nbytes: The size that it will have, for errors.

    Raises:
        CheckpointError: If the file cannot be written; if the disk is full, the message has the bytes needed and free.
    """
    try:
        with open(path, "wb", buffering=0) as file:
            yield file
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(describe_failure(path, error, nbytes)) from error


def piece_numel_of(chunks: Iterable[Chunk]) -> int:
    """Elements that are in memory at once while chunks are saved: a chunk at most."""
    return min(max((chunk.spec.chunk_numel for chunk in chunks), default=PIECE_NUMEL), PIECE_NUMEL)


def bytes_of(values: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    if not values.numel():
        return memoryview(b"")
    flat = values.detach().as_strided((values.numel(),), (1,))  # a single element may have any stride
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)
