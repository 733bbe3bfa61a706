"""The optimizer's state in torch's own format: ``optimizer.pt``, from which the stock Trainer and plain torch resume.

One process writes the file, and the others send it their parts in pieces. Each process that resumes reads its own part.
Masters that the model's file has not are beside ``state``, under ``SAVED_MASTER``: in it, torch's optimizers would keep
them without updating them.

[Note: the format]
``torch.save`` needs every tensor in memory, and writes the whole storage of a view. ``write_torch`` accepts deferred
tensors, and writes only a tensor's own elements. The format is torch's since torch 1.6: a zip archive without
compression. ``data.pkl`` is a pickle of the object, in which each tensor refers to a record: ``data/0``, ``data/1`` and
so on. A record has the bytes of one tensor, and begins at a multiple of 64 bytes, so that it can be memory-mapped.
Records of tensors have no CRC32, as with ``torch.serialization.set_crc32_options(False)``: torch never verifies it, and
it would make writing a third slower. Instead the record ``checksums``, which torch ignores, has those of safetensors
files (``storage.checksum``), by the byte at which a record begins.
"""

import functools
import io
import json
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only, tree_map_with_path

from hf_patrickstar.checkpoint.deferred import PIECE_NUMEL, DeferredTensor, Reader, Source
from hf_patrickstar.checkpoint.safetensors_file import CHECKSUMS, Entry, FileSource, SafetensorsFile
from hf_patrickstar.checkpoint.state_files import StateFile, pickling, without_numpy
from hf_patrickstar.checkpoint.storage import NewFile, damaged
from hf_patrickstar.checkpoint.training_state import INDEX_NAME, SavedState, TrainingState, read_index
from hf_patrickstar.checkpoint.weight_files import load_torch_file
from hf_patrickstar.dist.sharing import Held
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.memory.operators import unseen
from hf_patrickstar.optim.state import SAVED_MASTER
from hf_patrickstar.runtime.parameter import contiguous_strides

_ALIGNMENT = 64
_HEAD_NBYTES = 30 + 20 + 4
"""Bytes of a record's header beside its name and padding: it has the sizes of a large file, too."""
_PADDING = 0x4246
"""torch's own number for padding in a header; readers of zip files skip numbers that they do not know."""


def torch_paths(directory: str | os.PathLike[str], num: int = 1, name: str = "optimizer.pt") -> list[Path]:
    """The files of optimizer states in a directory: ``optimizer.pt``, ``optimizer_1.pt`` and so on.

    Args:
        directory: The directory.
        num: The number of optimizers.
        name: The name of the first file.
    """
    first = Path(directory) / name
    return [first.with_stem(f"{first.stem}_{number}") if number else first for number in range(num)]


def begin_torch_state(saved: TrainingState, paths: Sequence[Path]) -> tuple[StateFile, dict[int, Held]]:
    """Finds out what there is to write in torch's format: a file for each optimizer. All processes call it together.

    Args:
        saved: The training state. What is in no chunk is copied.
        paths: The files; older ones are replaced when the new ones are complete.

    Returns:
        The files, and what this process has of each tensor by number, for ``Sharing.led``.
    """
    sharing = saved.manager.sharing
    sharing.enter("saves the optimizer's state")
    own = {tensor.spec.index: state for tensor, state in saved.own_states().items() if state}
    states = sharing.outline_states(own, saved.manager.place_of)
    held: dict[int, Held] = {}
    for state in states.values():
        for key, item in state.items():
            if isinstance(item, Held):
                stream = functools.partial(sharing.parts, item, f"'{key}'", is_prompt=False)
                state[key] = DeferredTensor.make(Source(item.shape, item.dtype, streams=stream))
                state[key].place = item.number  # in the order of chunks
                held[state[key].place] = item
    state_dicts = list(map(_packed, saved.state_dicts(states)))

    def write(**how: Any) -> None:
        for path, state_dict in zip(paths, state_dicts, strict=True):
            write_torch(path, state_dict, **how)

    tensors = {str(place): item.source for place, item in held.items() if isinstance(item.source, torch.Tensor)}
    chunks = {name: saved.manager.by_index[held[int(name)].spec.index].chunk for name in tensors}
    return StateFile(paths[0], tensors, chunks, write), held


def _packed(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Copies what is in no chunk, and moves masters to where torch's optimizers do not look.

    Scalars of numpy become Python's: ``weights_only`` of torch refuses them.
    """
    copy = tree_map_only(torch.Tensor, lambda t: t if isinstance(t, DeferredTensor) else t.detach().clone(), state_dict)
    copy = without_numpy(copy)
    masters = {place: state.pop(SAVED_MASTER) for place, state in copy["state"].items() if SAVED_MASTER in state}
    copy["state"] = {place: state for place, state in copy["state"].items() if state or place not in masters}
    return copy | ({SAVED_MASTER: masters} if masters else {})


def open_torch_state(
    state: TrainingState, directory: str | os.PathLike[str], *, is_verified: bool = True
) -> tuple[Callable[[], None], Mapping[str, torch.Tensor]]:
    """Does for ``optimizer.pt`` what ``TrainingState.open`` does for the files of this package.

    Args:
        state: The training state of this run.
        directory: The directory of ``optimizer.pt``.
        is_verified: See there.

    Raises:
        CheckpointError: If a file is missing or damaged, or belongs to other optimizers, parameters or groups.
    """
    found: list[dict[str, Any]] = []
    masters: dict[str, torch.Tensor] = {}
    owned = {tensor.spec.name for tensor in state.owned()}
    for optimizer, path in zip(state.optimizers, torch_paths(directory, len(state.optimizers)), strict=True):
        names = [name for group in optimizer.placed_groups() for name in group]
        found.append(TorchFile(path).value)
        try:
            if not optimizer._optimizer_load_state_dict_pre_hooks:  # else it is checked after they may have changed it
                optimizer.check_state_dict(found[-1])
            own = {str(names[n]): master for n, master in found[-1].pop(SAVED_MASTER, {}).items() if names[n] in owned}
        except ValueError as error:
            raise CheckpointError(f"'{path}': {error}; resume with the model and optimizer that were saved") from error
        except (LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(damaged(f"'{path}' is not the state of an optimizer: {error!r}")) from error
        verify([own, found[-1] if is_verified else {}])
        masters.update(own)
    return functools.partial(state.load_state_dicts, found), masters


class TorchFile(SafetensorsFile):
    """A file of ``torch.save``; its tensors are deferred, and those that ``write_torch`` wrote are verified when read.

    Args:
        path: The file.

    Raises:
        CheckpointError: If the file is missing, damaged, or has an object that ``weights_only`` of torch refuses.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        verify([self.get_tensor(name) for name, entry in self.entries.items() if not _is_deferred(name, entry)])

    @property
    def value(self) -> dict[str, Any]:
        """What was saved; the tensors of states are deferred, except scalars, and those that share memory."""

        def deferred(path: Any, item: Any) -> Any:
            name = _name_of(path)
            if name not in self.entries or not _is_deferred(name, self.entries[name]):
                return item
            dtype, shape, _ = self.entries[name]
            return DeferredTensor.make(FileSource(shape, dtype, [(0, item.numel(), self, name)]))

        return tree_map_with_path(deferred, self._loaded)  # type: ignore[no-any-return]

    def _read_header(self) -> None:
        def find(path: Any, tensor: Any, outlined: Any) -> None:
            if type(tensor) is torch.Tensor and tensor.is_contiguous():
                start = getattr(outlined.untyped_storage(), "_checkpoint_offset", None)
                if start is not None and tensor.untyped_storage().nbytes() == tensor.nbytes:
                    self.entries[_name_of(path)] = Entry(tensor.dtype, tuple(tensor.shape), start)

        self._loaded = load_torch_file(self.path)
        tree_map_with_path(find, self._loaded, torch.load(self.path, map_location="meta", weights_only=True))
        if not zipfile.is_zipfile(self.path):  # the format that torch had before 1.6
            return
        try:
            with zipfile.ZipFile(self.path) as archive:
                if f"archive/{CHECKSUMS}" not in archive.namelist():  # torch has written it
                    return
                saved = json.loads(archive.read(f"archive/{CHECKSUMS}"))
                archive.read("archive/data.pkl")  # which has a CRC32
            saved["sums"] = {name: saved["sums"][str(entry.start)] for name, entry in self.entries.items()}
            self.checksums = saved
        except Exception as error:  # zipfile raises many kinds
            raise CheckpointError(damaged(f"'{self.path}' is not as it was saved: {error!r}")) from error


def _name_of(path: Any) -> str:
    return "/".join(str(getattr(step, "key", step)) for step in path)


def _is_deferred(name: str, entry: Entry) -> bool:
    return bool(entry.shape) and name.startswith(("state/", f"{SAVED_MASTER}/"))


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
        return ("storage", torch.UntypedStorage, value.name, "cpu", value.nbytes) if type(value) is _Record else None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or is_traceable_wrapper_subclass(value):
            return NotImplemented  # torch takes a wrapper apart into its tensors
        record, shape = _Record(str(len(self.tensors)), value.nbytes), tuple(value.shape)
        self.tensors.append(value)
        hooks: OrderedDict[Any, Any] = OrderedDict()
        return torch._utils._rebuild_tensor_v3, (record, 0, shape, contiguous_strides(shape), False, hooks, value.dtype)


@unseen()
def write_torch(
    path: str | os.PathLike[str],
    value: Any,
    *,
    piece_numel: int = PIECE_NUMEL,
    on_written: Callable[[str], None] = lambda name: None,
) -> None:
    """Writes a file as ``torch.save`` does, which appears when all of it is on the disk. See [Note: the format].

    Args:
        path: The file; an older one is replaced.
        value: What to write; its tensors may be deferred. ``torch.load`` returns them as tensors on the host that need
            no gradient, each with its own storage.
        piece_numel: Elements in memory at once.
        on_written: Called with the ``place`` of each tensor that has been written; they are written in its order.

    Raises:
        CheckpointError: If the file cannot be written; if the disk is full, the message has the bytes needed and free.
    """
    pickler = _Pickler(pickled := io.BytesIO())
    with pickling():
        pickler.dump(value)
    nbytes = pickled.tell() + sum(tensor.nbytes for tensor in pickler.tensors)
    reader, sums, tensors = Reader(), dict[int, list[str]](), pickler.tensors
    with NewFile.opened(path, nbytes) as file, zipfile.ZipFile(file, "w") as archive:
        for number in sorted(range(len(tensors)), key=lambda number: getattr(tensors[number], "place", -1)):
            entry = zipfile.ZipInfo(f"archive/data/{number}")
            entry.header_offset, entry.CRC = file.tell(), 0
            entry.file_size = entry.compress_size = tensors[number].nbytes
            padding = -(file.tell() + _HEAD_NBYTES + len(entry.filename)) % _ALIGNMENT
            entry.extra = struct.pack("<HH", _PADDING, padding) + bytes(padding)
            file.write(entry.FileHeader(zip64=True))
            start = file.tell()
            sums[start] = file.write_tensor(tensors[number], reader, piece_numel)
            archive.filelist.append(entry)
            on_written(str(getattr(tensors[number], "place", None)))
        archive.start_dir = file.tell()  # where the archive goes on
        texts = {"data.pkl": pickled.getvalue(), "byteorder": sys.byteorder, "version": "3\n"}
        texts[CHECKSUMS] = json.dumps({"piece_numel": piece_numel, "sums": sums})
        for name, text in texts.items():
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), text)


def verify(value: Any) -> None:
    """Reads every deferred tensor in a value, so that it raises ``CheckpointError`` if one has not its checksums."""
    for tensor in tree_leaves(value):
        if isinstance(tensor, DeferredTensor):
            for _ in Reader().pieces(tensor, PIECE_NUMEL):
                pass


def verify_files(directory: str | os.PathLike[str]) -> Iterator[str]:
    """Verifies the files of a checkpoint that have checksums, and says of each file what it found.

    Args:
        directory: The checkpoint.

    Raises:
        CheckpointError: If a file is damaged.
    """
    for path in sorted(Path(directory).rglob("optimizer*")):
        if path.name == INDEX_NAME:
            read_index(path)
            yield f"{path}: as it was saved"
        if path.suffix in (".safetensors", ".pt", ".bin"):
            file = SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path)
            verify([file.get_tensor(name) for name in file.entries])
            yield f"{path}: {'as it was saved' if file.checksums else 'readable; it has no checksums'}"


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
        write_torch(path, state_dict)
    return paths
