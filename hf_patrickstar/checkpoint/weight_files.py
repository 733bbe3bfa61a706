"""Opens and checks the files of a model's weights; values are read when they are needed."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hf_patrickstar.checkpoint.deferred import DeferredTensor
from hf_patrickstar.checkpoint.patches import LOAD_STATE_DICT, SAFE_OPEN, replaced
from hf_patrickstar.checkpoint.safetensors_file import SafetensorsFile
from hf_patrickstar.checkpoint.storage import damaged, missing_file
from hf_patrickstar.errors import CheckpointError

_SAFE_FILE, _SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
_TORCH_FILE, _TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_NAMES = (_SAFE_FILE, _SAFE_INDEX, _TORCH_FILE, _TORCH_INDEX)


class _MemorySource:
    """A tensor in memory, or in a memory-mapped file, as the source of a deferred tensor."""

    def __init__(self, tensor: torch.Tensor, path: Path) -> None:
        self._tensor, self._path = tensor, path
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.is_for_threads = tensor.is_contiguous()  # each piece of another one is made from a copy of the whole

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self._tensor.reshape(-1)[start:stop]

    def __str__(self) -> str:
        return f"'{self._path}'"


def has_weights(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory has the weights of a model, under one of the names that libraries look for."""
    return any((Path(directory) / name).is_file() for name in _NAMES)


def open_weights(path: str | os.PathLike[str]) -> dict[str, DeferredTensor]:
    """Opens the weights of a saved model.

    Args:
        path: A directory with ``model.safetensors`` or ``pytorch_model.bin``, or their indices and shards, or one file.

    Returns:
        Deferred tensors by their names in the files.

    Raises:
        CheckpointError: If a file is missing, truncated, or has an object that ``weights_only`` of torch refuses.
    """
    path = Path(path)
    if path.is_file():
        return _open_index(path) if path.name.endswith(".index.json") else _open_file(path)
    for name in _NAMES:
        if (path / name).is_file():
            return open_weights(path / name)
    raise CheckpointError(
        f"'{path}' has no weights: none of {', '.join(_NAMES[:-1])} and {_NAMES[-1]} is there; give a directory that "
        "save_pretrained or a Trainer has written"
    )


def open_safetensors(directory: str | os.PathLike[str]) -> dict[str, DeferredTensor]:
    """Opens the weights that a directory has in safetensors files; empty if there are none, or they are damaged.

    Args:
        directory: The directory.
    """
    for name in (_SAFE_FILE, _SAFE_INDEX):
        path = Path(directory) / name
        if path.is_file():
            with contextlib.suppress(CheckpointError):
                return open_weights(path)
    return {}


def _open_index(path: Path) -> dict[str, DeferredTensor]:
    try:
        shards = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {name: _open_file(path.parent / name) for name in sorted(set(shards.values()))}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(damaged(f"'{path}' is not the index of a checkpoint: {error}")) from error
    for tensor, name in shards.items():
        if tensor not in files[name]:
            raise CheckpointError(damaged(f"'{path}' says that tensor '{tensor}' is in '{name}', but it is not"))
    return {tensor: files[name][tensor] for tensor, name in shards.items()}


def _open_file(path: Path) -> dict[str, DeferredTensor]:
    if path.suffix == ".safetensors":
        file = SafetensorsFile(path)
        return {name: file.deferred(name) for name in file.entries}
    return {
        name: DeferredTensor.make(_MemorySource(tensor, path), is_loadable=True)
        for name, tensor in load_torch_file(path).items()
        if isinstance(tensor, torch.Tensor)
    }


def load_torch_file(path: Path) -> dict[str, Any]:
    """Loads a file of ``torch.save`` with ``weights_only``; tensors are memory-mapped if its format allows that.

    Args:
        path: The file.

    Raises:
        CheckpointError: If it is missing, damaged, or holds other objects.
    """
    try:
        try:
            loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            loaded = torch.load(path, map_location="cpu", weights_only=True)  # the format before torch 1.6
    except FileNotFoundError as error:
        raise CheckpointError(missing_file(path)) from error
    except Exception as error:
        raise CheckpointError(
            f"'{path}' cannot be loaded safely: {error}; use a checkpoint in safetensors files, or one that was "
            "saved again by save_pretrained"
        ) from error
    if not isinstance(loaded, dict):
        raise CheckpointError(
            f"'{path}' holds a {type(loaded).__name__}, not a dictionary; save the state_dict instead"
        )
    return loaded


class _OpenedFile:
    """Replaces ``safetensors.safe_open``; its tensors are deferred."""

    def __init__(self, filename: Any, *_args: Any, **_kwargs: Any) -> None:
        self._file = SafetensorsFile(filename)

    def keys(self) -> list[str]:
        """The names of the tensors."""
        return list(self._file.entries)

    def metadata(self) -> dict[str, str]:
        """The metadata of the file."""
        return self._file.metadata

    def get_tensor(self, name: str) -> DeferredTensor:
        """One tensor."""
        return self._file.deferred(name)

    def get_slice(self, name: str) -> "_OpenedSlice":
        """One tensor, to be sliced."""
        return _OpenedSlice(self._file.deferred(name))

    def __enter__(self) -> "_OpenedFile":
        return self

    def __exit__(self, *_: Any) -> None:
        """Does nothing: the file stays open as long as a tensor refers to it."""


class _OpenedSlice:
    """Replaces the result of ``get_slice`` of ``safetensors``."""

    def __init__(self, tensor: DeferredTensor) -> None:
        self._tensor = tensor

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]

    def get_shape(self) -> list[int]:
        """Sizes of the tensor."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Name of its type in the format."""
        return SafetensorsFile.name_of(self._tensor.dtype)


@contextlib.contextmanager
def deferred_weights(enabled: bool = True) -> Iterator[None]:
    """Inside the block ``from_pretrained`` reads no weights; the engine reads them later, straight into chunks.

    So weights are never in memory twice, and each process reads only its own part. The model has shapes, types and
    names, and PEFT can wrap it; it gets its values when a Trainer, or ``prepare``, makes its engine::

        with hf_patrickstar.deferred_weights(enabled=training_args.patrickstar):
            model = AutoModelForCausalLM.from_pretrained(name)

    Args:
        enabled: If false, ``from_pretrained`` reads weights as usual.

    Raises:
        CheckpointError: From ``from_pretrained``, if a file is truncated.
    """
    if not enabled:
        yield
        return
    import transformers.modeling_utils  # noqa: F401  (what is replaced must be imported)

    def load_state_dict(path: Any, *_args: Any, **_kwargs: Any) -> dict[str, DeferredTensor]:
        return _open_file(Path(path))

    with replaced(SAFE_OPEN, _OpenedFile), replaced(LOAD_STATE_DICT, load_state_dict):
        yield
