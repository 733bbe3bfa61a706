"""Converts a training state to the ``optimizer.pt`` from which the stock Trainer and plain torch resume."""

import functools
import os
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from hf_patrickstar.checkpoint.deferred import DeferredTensor, Reader
from hf_patrickstar.checkpoint.other_states import decoded
from hf_patrickstar.checkpoint.storage import replace_file
from hf_patrickstar.checkpoint.torch_file import write_torch
from hf_patrickstar.checkpoint.torch_state import torch_paths
from hf_patrickstar.checkpoint.training_state import INDEX_NAME, SavedState
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.runtime.chunk import MASTER


class _SavedSource:
    """A tensor of a training state on the disk, in one file or several, as the source of a deferred tensor."""

    def __init__(self, saved: SavedState, key: str, name: str) -> None:
        self._saved, self._key, self._name = saved, key, name
        self.shape, self.dtype = saved.shape(key, name), saved.dtype(key, name)

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self._saved.read(self._key, self._name, start, stop)

    def __str__(self) -> str:
        return f"'{self._saved.path}'"


def deferred_state_dicts(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """A training state in the format of ``torch.optim.Optimizer.state_dict``, a dictionary for each optimizer.

    Masters are left out: torch's optimizers have none.

    Args:
        directory: Where the training state is.

    Returns:
        The state dictionaries; their tensors are deferred, and whole where the files have parts.

    Raises:
        CheckpointError: If a file is missing or damaged.
    """
    saved = SavedState(directory)
    groups = iter(saved.groups)
    state_dicts = []
    for number, members in enumerate(saved.optimizers):
        state: dict[Any, Any] = {}
        packed = []
        place = 0
        for names, group in zip(members, groups, strict=False):
            packed.append({**group, "params": list(range(place, place + len(names)))})
            for name in names:
                found = saved.others.get(f"{number}.{place}", {}) if name is None else _state_of(saved, name)
                if found:
                    state[place] = found
                place += 1
        state.update(saved.others.get(f"{number}.-1", {}))
        state_dicts.append({"state": state, "param_groups": packed})
    return state_dicts


def _state_of(saved: SavedState, name: str) -> dict[Any, Any]:
    """The state of a parameter that was in a chunk; raises ``CheckpointError`` if a part of it is missing."""
    if name in saved.shapes:
        saved.check_complete(name, 0, torch.Size(saved.shapes[name]).numel())
    state = dict(saved.values.get(name, {}))
    for key in sorted(saved.keys(name) - {MASTER}):
        is_object = saved.is_object(key, name)
        tensor = None if is_object else DeferredTensor.make(_SavedSource(saved, key, name))
        state[decoded(key)] = saved.read_whole(key, name) if is_object else tensor
    return state


def torch_state_dict(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The state of the first optimizer, with every tensor in memory; see ``deferred_state_dicts``.

    Args:
        directory: Where the training state is.

    Raises:
        CheckpointError: If a file is missing or damaged.
    """
    found: dict[str, Any] = tree_map_only(DeferredTensor, Reader().read_whole, deferred_state_dicts(directory)[0])
    return found


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
        raise CheckpointError(
            f"'{default}' is there already, and nothing that it could be written from; use it as it is"
        )
    state_dicts = deferred_state_dicts(directory)
    paths = torch_paths(first.parent, len(state_dicts), first.name)
    for path, state_dict in zip(paths, state_dicts, strict=True):
        replace_file(path, functools.partial(write_torch, value=state_dict))
    return paths
