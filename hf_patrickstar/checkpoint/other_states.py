"""States of what an optimizer updates outside of its chunks: parameters of no model, or in chunks of another optimizer.

All processes have the same, so one writes them. They go by their places in the param groups, as in torch.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hf_patrickstar.checkpoint.safetensors_file import SafetensorsFile, write_safetensors
from hf_patrickstar.errors import CheckpointError

OTHERS_NAME = "optimizer-others.safetensors"

OtherStates = dict[str, dict[str, Any]]
"""The states by place: the optimizer's number, and the parameter's among those of its groups."""


def save_others(directory: str | os.PathLike[str], states: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes states, if there are any.

    Args:
        directory: A directory that exists.
        states: The states.

    Raises:
        CheckpointError: If they cannot be written, or one cannot be saved without pickling it.
    """
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for place, state in states.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{place}/{key}"] = value
            elif isinstance(value, (int, float, str, bool, type(None))):
                values.setdefault(place, {})[key] = value
            else:
                raise CheckpointError(
                    f"state '{key}' of a parameter that is in no chunk is a {type(value).__name__}, which cannot be "
                    "saved without pickling it; optimizers whose state is made of tensors and numbers can be saved"
                )
    if tensors or values:
        write_safetensors(Path(directory) / OTHERS_NAME, tensors, {"format": "pt", "values": json.dumps(values)})


def read_others(directory: str | os.PathLike[str]) -> OtherStates:
    """Reads what was written; empty if nothing was.

    Args:
        directory: Where it was saved.

    Raises:
        CheckpointError: If the file is damaged.
    """
    path = Path(directory) / OTHERS_NAME
    if not path.is_file():
        return {}
    file = SafetensorsFile(path)
    try:
        states: OtherStates = {str(place): dict(found) for place, found in json.loads(file.metadata["values"]).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"'{path}' is not a part of a training state: {error}") from error
    for name, entry in file.entries.items():
        place, _, key = name.rpartition("/")
        numel = torch.Size(entry.shape).numel()
        states.setdefault(place, {})[key] = file.read(name, 0, numel).view(entry.shape)
    return states
