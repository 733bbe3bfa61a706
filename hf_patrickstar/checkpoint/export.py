"""The way back: a training state as the ``optimizer.pt`` that the stock Trainer, and plain torch, resume from."""

import os
from pathlib import Path
from typing import Any

import torch

from hf_patrickstar.checkpoint.storage import replace_file
from hf_patrickstar.checkpoint.training_state import SavedState
from hf_patrickstar.runtime.chunk import MASTER

OPTIMIZER_NAME = "optimizer.pt"


def torch_state_dict(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """A training state in the format of ``torch.optim.Optimizer.state_dict``.

    Masters are left out: torch's optimizers have none.

    Args:
        directory: Where the training state is.

    Returns:
        States by number and param groups; tensors on the host, in the shapes of parameters.

    Raises:
        CheckpointError: If a file is missing or damaged.
    """
    saved = SavedState(directory)
    numbers: dict[str, int] = {}
    state: dict[int, dict[str, Any]] = {}
    groups = []
    for group in saved.groups:
        for name in group["params"]:
            numbers.setdefault(name, len(numbers))
        packed = {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
        packed["params"] = [numbers[name] for name in group["params"]]
        groups.append(packed)
    for name, number in numbers.items():
        found = dict(saved.values.get(name, {}))
        if name in saved.shapes:
            saved.check_complete(name, 0, torch.Size(saved.shapes[name]).numel())
        for key in sorted(saved.keys(name) - {MASTER}):
            shape = saved.shape(key, name)
            found[key] = saved.read(key, name, 0, torch.Size(shape).numel()).view(shape)
        if found:
            state[number] = found
    return {"state": state, "param_groups": groups}


def export(directory: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> Path:
    """Writes the training state of a checkpoint as ``optimizer.pt``.

    Args:
        directory: The checkpoint.
        output: The file; by default ``optimizer.pt`` in the checkpoint, where the stock Trainer looks for it. One that
            is there is replaced when the new one is complete.

    Returns:
        The file.

    Raises:
        CheckpointError: If the training state cannot be read, or the file cannot be written.
    """
    path = Path(output) if output is not None else Path(directory) / OPTIMIZER_NAME
    state = torch_state_dict(directory)
    replace_file(path, lambda temporary: torch.save(state, temporary))
    return path
