"""Writes files for ``torch.load`` in pieces.

``torch.save`` needs every tensor in memory, and writes the whole storage of a view. ``write_torch`` accepts deferred
tensors, and writes only a tensor's own elements.

[Note: the format]
The format is torch's own since torch 1.6: a zip archive without compression. ``data.pkl`` is a pickle of the object, in
which each tensor refers to a record: ``data/0``, ``data/1`` and so on. A record has the bytes of one tensor, and begins
at a multiple of 64 bytes, so that it can be memory-mapped. ``zipfile`` writes the checksum into a record's header after
the record's bytes, so the bytes are never needed all at once.
"""

import io
import math
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from typing import Any

import torch

from hf_patrickstar.checkpoint.deferred import PIECE_NUMEL
from hf_patrickstar.checkpoint.pieces import PieceWriter, new_file
from hf_patrickstar.memory.operators import unseen
from hf_patrickstar.runtime.chunk import contiguous_strides

_PROTOCOL = 2
"""The pickle protocol: the only one that ``torch.load`` supports with ``weights_only``."""
_FORMAT_VERSION = "3\n"
_ALIGNMENT = 64
_HEAD_NBYTES, _SIZES_NBYTES = 30, 20
"""Bytes of a record's header without its name, and of the zip64 sizes that the header of a large record has too."""
_PADDING_HEAD = struct.Struct("<HH")
_PADDING_KIND = 0x4246
"""torch's own number for padding; readers of zip files skip kinds that they do not know."""
LARGE_NBYTES = 2**29


class _Record:
    """The bytes of one tensor, as the pickle refers to them."""

    def __init__(self, number: int, tensor: torch.Tensor) -> None:
        kind = getattr(torch, tensor.type().rpartition(".")[2].replace("Tensor", "Storage"), None)
        self.is_typed = kind is not None
        numel = tensor.numel() if self.is_typed else tensor.numel() * tensor.dtype.itemsize
        self.reference = ("storage", kind or torch.UntypedStorage, str(number), "cpu", numel)


class _Pickler(pickle.Pickler):
    """Pickles tensors as references to records."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        return value.reference if isinstance(value, _Record) else None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        record = _Record(len(self.tensors), value)
        self.tensors.append(value)
        shape = tuple(value.shape)
        arguments: tuple[Any, ...] = (
            record,
            0,
            shape,
            contiguous_strides(shape),
            False,
            OrderedDict(),
        )  # no gradient, no hooks
        if record.is_typed:
            return torch._utils._rebuild_tensor_v2, arguments
        return torch._utils._rebuild_tensor_v3, (*arguments, value.dtype)  # for types without a storage class


@unseen()
def write_torch(path: str | os.PathLike[str], value: Any, *, piece_numel: int = PIECE_NUMEL) -> int:
    """Writes a file as ``torch.save`` does; when it returns, all of the file is on the disk.

    Args:
        path: The file; an older one is replaced.
        value: What to write; its tensors may be deferred. ``torch.load`` returns them as tensors on the host that need
            no gradient, each with its own storage.
        piece_numel: Elements in memory at once.

    Returns:
        The size of the file in bytes.

    Raises:
        CheckpointError: If the file cannot be written; if the disk is full, the message has the bytes needed and free.
    """
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(value)
    nbytes = pickled.tell() + sum(_nbytes(tensor) for tensor in pickler.tensors)
    with new_file(path, nbytes) as file:
        buffered = io.BufferedWriter(file)  # zipfile ignores how many bytes a raw file has accepted
        writer = PieceWriter(buffered, piece_numel)
        with zipfile.ZipFile(buffered, "w") as archive:
            archive.writestr(_entry("data.pkl", buffered.tell(), pickled.tell()), pickled.getvalue())
            archive.writestr(_entry("byteorder", buffered.tell(), 0), sys.byteorder)
            for number, tensor in enumerate(pickler.tensors):
                entry = _entry(f"data/{number}", buffered.tell(), _nbytes(tensor))
                with archive.open(entry, "w", force_zip64=_is_large(_nbytes(tensor))) as record:
                    writer.write(tensor, record)
            archive.writestr(_entry("version", buffered.tell(), 0), _FORMAT_VERSION)
        buffered.flush()
        nbytes = buffered.tell()
        buffered.detach()
    return nbytes


def _nbytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _is_large(nbytes: int) -> bool:
    """Whether a record's header gets zip64 sizes."""
    return nbytes >= LARGE_NBYTES


def _entry(name: str, begin: int, nbytes: int) -> zipfile.ZipInfo:
    """The header of a record that begins at byte ``begin``, padded so that its data begins at a multiple of 64."""
    entry = zipfile.ZipInfo(f"archive/{name}")
    head = begin + _HEAD_NBYTES + len(entry.filename) + _PADDING_HEAD.size + _SIZES_NBYTES * _is_large(nbytes)
    padding = -head % _ALIGNMENT
    entry.extra = _PADDING_HEAD.pack(_PADDING_KIND, padding) + b"Z" * padding
    return entry
