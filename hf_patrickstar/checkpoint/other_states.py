"""Saves optimizer states of parameters outside of an optimizer's chunks: in no chunk, or in another optimizer's.

All processes have the same states, so one process writes them. As in torch, a state is identified by the position of
its parameter in the param groups.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hf_patrickstar.checkpoint.safetensors_file import SafetensorsFile, write_safetensors
from hf_patrickstar.checkpoint.storage import damaged
from hf_patrickstar.errors import CheckpointError

OTHERS_NAME = "optimizer-others.safetensors"

SCALARS = (int, float, str, bool, type(None))
"""The types of states that are saved as JSON."""

OtherStates = dict[str, dict[str, Any]]
"""The states by place, ``<optimizer>.<parameter>``: the optimizer's number, and the parameter's in its groups."""


def refusal(key: str, value: Any, owner: str) -> CheckpointError:
    """The error for a state of ``owner`` that is of no type that can be saved."""
    return CheckpointError(
        f"state '{key}' of {owner} is a {type(value).__name__}, which cannot be saved without pickling it; optimizers "
        "whose state is made of tensors and numbers can be saved"
    )


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
            elif isinstance(value, SCALARS):
                values.setdefault(place, {})[key] = value
            else:
                raise refusal(key, value, "a parameter that is in no chunk")
    if tensors or values:
        write_safetensors(Path(directory) / OTHERS_NAME, tensors, {"format": "pt", "values": json.dumps(values)})


def read_others(directory: str | os.PathLike[str]) -> OtherStates:
    """Reads the states that ``save_others`` wrote; empty if it wrote none.

    Args:
        directory: The directory of the training state.

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
        raise CheckpointError(damaged(f"'{path}' is not a part of a training state: {error}")) from error
    for name, entry in file.entries.items():
        place, _, key = name.rpartition("/")
        numel = torch.Size(entry.shape).numel()
        states.setdefault(place, {})[key] = file.read(name, 0, numel).view(entry.shape)
    return states
