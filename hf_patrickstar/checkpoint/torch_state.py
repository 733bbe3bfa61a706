"""The optimizer's state in torch's own format: ``optimizer.pt``, from which the stock Trainer and plain torch resume.

One process writes the file, and the others send it their parts in pieces. Each process that resumes maps the file into
memory, and reads its own part. The file has no masters: torch's optimizers would keep them without updating them.

[Note: the format]
``torch.save`` needs every tensor in memory, and writes the whole storage of a view. ``write_torch`` accepts deferred
tensors, and writes only a tensor's own elements. The format is torch's since torch 1.6: a zip archive without
compression. ``data.pkl`` is a pickle of the object, in which each tensor refers to a record: ``data/0``, ``data/1`` and
so on. A record has the bytes of one tensor, and begins at a multiple of 64 bytes, so that it can be memory-mapped.
``zipfile`` writes the checksum into a record's header after the record's bytes, so the bytes are never needed all at
once.
"""

import functools
import io
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from hf_patrickstar.checkpoint.deferred import PIECE_NUMEL, DeferredTensor, Reader, StreamedSource
from hf_patrickstar.checkpoint.storage import NewFile, damaged, replace_file, write_tensor
from hf_patrickstar.checkpoint.training_state import INDEX_NAME, SavedState
from hf_patrickstar.checkpoint.weight_files import load_torch_file
from hf_patrickstar.dist.sharing import Held
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.memory.operators import unseen
from hf_patrickstar.optim.optimizer_set import OptimizerSet
from hf_patrickstar.runtime.chunk import contiguous_strides
from hf_patrickstar.runtime.manager import ChunkManager

_ALIGNMENT = 64
_HEAD_NBYTES = 30 + 20
"""Bytes of a record's header without its name, and of the sizes of a large file, which each header has too."""
_PADDING_HEAD = struct.Struct("<HH")
_PADDING_KIND = 0x4246
"""torch's own number for padding; readers of zip files skip kinds that they do not know."""


def torch_paths(directory: str | os.PathLike[str], num: int = 1, name: str = "optimizer.pt") -> list[Path]:
    """The files of optimizer states in a directory: ``optimizer.pt``, ``optimizer_1.pt`` and so on.

    Args:
        directory: The directory.
        num: The number of optimizers.
        name: The name of the first file.
    """
    first = Path(directory) / name
    return [first.with_stem(f"{first.stem}_{number}") if number else first for number in range(num)]


def save_torch_state(
    manager: ChunkManager, optimizers: OptimizerSet, paths: Sequence[Path], *, is_writer: bool, piece_numel: int
) -> None:
    """Writes one file for each optimizer; all processes call it together.

    Args:
        manager: The manager of the chunks.
        optimizers: The optimizers over them.
        paths: The files; older ones are replaced when the new ones are complete.
        is_writer: Whether this process writes; several processes may, each on its own disk.
        piece_numel: Elements in memory at once.

    Raises:
        CheckpointError: If a file cannot be written, here or by another process.
    """
    sharing = manager.sharing
    sharing.enter("saves the optimizer's state")
    owned = (tensor for chunk in manager.chunks if chunk.spec.is_updated for tensor in chunk.owned)
    own = {tensor.spec.index: state for tensor in owned if (state := optimizers.own_state(tensor))}
    states = sharing.outline_states(own, manager.place_of)
    held: dict[int | None, Held] = {}
    for state in states.values():
        for key, item in state.items():
            if isinstance(item, Held):
                held[item.number] = item
                stream = functools.partial(sharing.parts, item, f"'{key}'", is_prompt=False)
                state[key] = DeferredTensor.make(StreamedSource(item.shape, item.dtype, stream))
    with sharing.led(lambda number: held[number], is_reader=is_writer):
        if is_writer:
            for path, state_dict in zip(paths, optimizers.state_dicts(states), strict=True):
                replace_file(path, functools.partial(write_torch, value=state_dict, piece_numel=piece_numel))


def open_torch_state(optimizers: OptimizerSet, directory: str | os.PathLike[str]) -> Callable[[], None]:
    """Checks saved states against optimizers.

    Args:
        optimizers: The optimizers over chunks.
        directory: The directory of ``optimizer.pt``.

    Returns:
        A function that loads the states; all processes call it together.

    Raises:
        CheckpointError: If a file is missing or damaged, or belongs to other optimizers, parameters or groups.
    """
    found = []
    for number, path in enumerate(torch_paths(directory, len(optimizers))):
        found.append(load_torch_file(path))
        try:
            optimizers.check_state_dict(number, found[-1])
        except ValueError as error:
            raise CheckpointError(f"'{path}': {error}; resume with the model and optimizer that were saved") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(damaged(f"'{path}' is not the state of an optimizer: {error!r}")) from error
    return functools.partial(optimizers.load_state_dicts, found)


class _Record(NamedTuple):
    """The bytes of one tensor, as the pickle refers to them."""

    name: str
    nbytes: int


class _Pickler(pickle.Pickler):
    """Pickles tensors as references to records."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)  # the only one that ``torch.load`` supports with ``weights_only``
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        is_record = type(value) is _Record
        return ("storage", torch.UntypedStorage, value.name, "cpu", value.nbytes) if is_record else None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or is_traceable_wrapper_subclass(value):
            return NotImplemented  # torch takes a wrapper apart into its tensors
        record, shape = _Record(str(len(self.tensors)), value.nbytes), tuple(value.shape)
        self.tensors.append(value)
        hooks: OrderedDict[Any, Any] = OrderedDict()
        arguments = record, 0, shape, contiguous_strides(shape), False, hooks, value.dtype
        return torch._utils._rebuild_tensor_v3, arguments


@unseen()
def write_torch(path: str | os.PathLike[str], value: Any, *, piece_numel: int = PIECE_NUMEL) -> None:
    """Writes a file as ``torch.save`` does; when it returns, all of the file is on the disk. See [Note: the format].

    Args:
        path: The file; an older one is replaced.
        value: What to write; its tensors may be deferred. ``torch.load`` returns them as tensors on the host that need
            no gradient, each with its own storage.
        piece_numel: Elements in memory at once.

    Raises:
        CheckpointError: If the file cannot be written; if the disk is full, the message has the bytes needed and free.
    """
    pickler = _Pickler(pickled := io.BytesIO())
    pickler.dump(value)
    nbytes = pickled.tell() + sum(tensor.nbytes for tensor in pickler.tensors)
    reader = Reader()
    with NewFile.opened(path, nbytes) as file, zipfile.ZipFile(file, "w") as archive:

        def write(name: str, data: torch.Tensor | bytes) -> None:
            entry = zipfile.ZipInfo(f"archive/{name}")
            padding = -(file.tell() + _HEAD_NBYTES + len(entry.filename) + _PADDING_HEAD.size) % _ALIGNMENT
            entry.extra = _PADDING_HEAD.pack(_PADDING_KIND, padding) + b"Z" * padding
            with archive.open(entry, "w", force_zip64=True) as record:
                if isinstance(data, bytes):
                    record.write(data)
                else:
                    write_tensor(record, data, reader, piece_numel)

        write("data.pkl", pickled.getvalue())
        write("byteorder", sys.byteorder.encode())
        for number, tensor in enumerate(pickler.tensors):
            write(f"data/{number}", tensor)
        write("version", b"3\n")


def torch_state_dict(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The saved state of the first optimizer as ``torch.optim.Optimizer.state_dict`` has it, with tensors in memory.

    Args:
        directory: Where the training state is.

    Raises:
        CheckpointError: If a file is missing or damaged.
    """
    return tree_map_only(DeferredTensor, Reader().read_whole, SavedState(directory).state_dicts()[0])


def export(directory: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> list[Path]:
    """Writes the training state of a checkpoint as ``optimizer.pt``, with a piece of it in memory at a time.

    Args:
        directory: The checkpoint.
        output: The file; by default ``optimizer.pt`` in the checkpoint, where the stock Trainer looks for it. An older
            file is replaced when the new one is complete. The state of a second optimizer is in ``optimizer_1.pt``.

    Returns:
        The files.

    Raises:
        CheckpointError: If the training state cannot be read, or a file cannot be written.
    """
    (default,) = torch_paths(directory)
    first = Path(output) if output is not None else default
    if not (Path(directory) / INDEX_NAME).exists() and default.is_file():
        raise CheckpointError(f"'{default}' is there, and no {INDEX_NAME} to write it from; use the file as it is")
    state_dicts = SavedState(directory).state_dicts()
    paths = torch_paths(first.parent, len(state_dicts), first.name)
    for path, state_dict in zip(paths, state_dicts, strict=True):
        replace_file(path, functools.partial(write_torch, value=state_dict))
    return paths
