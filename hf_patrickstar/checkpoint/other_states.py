"""Saves optimizer states of parameters outside of an optimizer's chunks: in no chunk, or in another optimizer's.

All processes have the same states, so one process writes them. As in torch, a state is identified by the position of
its parameter in the param groups.
"""

import contextlib
import io
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


def pickled(value: Any, key: str, owner: str) -> torch.Tensor:
    """The bytes of a state that is neither a tensor nor a number, as ``torch.save`` writes them.

    Args:
        value: The state: a projector of GaLore, for example.
        key: Its name, for errors.
        owner: What it belongs to, for errors.

    Raises:
        CheckpointError: If it cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:
        raise CheckpointError(
            f"state '{key}' of {owner} is a {type(value).__name__}, which cannot be pickled ({error}); save without "
            "the optimizer's state (save_only_model of the Trainer)"
        ) from error
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8).clone()


def unpickled(data: torch.Tensor, key: str, path: Path) -> Any:
    """What ``pickled`` was given, with tensors on the host; only of types that ``torch.load`` takes to be safe.

    Args:
        data: The bytes.
        key: The name of the state, for errors.
        path: The file that they were read from, for errors.

    Raises:
        CheckpointError: If the program has not said that the type is safe.
    """
    found = data.numpy().tobytes()
    try:
        return torch.load(io.BytesIO(found), map_location="cpu", weights_only=True)
    except Exception as error:
        types = []
        with contextlib.suppress(Exception):
            types = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(found))
        if not types:
            raise CheckpointError(damaged(f"'{path}': '{key}' cannot be loaded: {error}")) from error
        names = ", ".join(types)
        raise CheckpointError(
            f"'{path}': '{key}' is an object of {names}, and types are loaded only if the program says that they are "
            f"safe; call torch.serialization.add_safe_globals([{names}]) before resuming"
        ) from error


def save_others(directory: str | os.PathLike[str], states: Mapping[str, Mapping[str, Any]]) -> bool:
    """Writes states, if there are any.

    Args:
        directory: A directory that exists.
        states: The states.

    Returns:
        Whether there are any.

    Raises:
        CheckpointError: If they cannot be written, or one cannot be pickled.
    """
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    objects: list[str] = []
    for place, state in states.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{place}/{key}"] = value
            elif isinstance(value, SCALARS):
                values.setdefault(place, {})[key] = value
            else:
                tensors[f"{place}/{key}"] = pickled(value, key, "a parameter that is in no chunk")
                objects.append(f"{place}/{key}")
    if not (tensors or values):
        return False
    metadata = {"format": "pt", "values": json.dumps(values), "objects": json.dumps(objects)}
    write_safetensors(Path(directory) / OTHERS_NAME, tensors, metadata)
    return True


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
        objects = json.loads(file.metadata.get("objects", "[]"))
        states: OtherStates = {str(place): dict(found) for place, found in json.loads(file.metadata["values"]).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(damaged(f"'{path}' is not a part of a training state: {error}")) from error
    for name, entry in file.entries.items():
        place, _, key = name.partition("/")
        numel = torch.Size(entry.shape).numel()
        value = file.read(name, 0, numel).view(entry.shape)
        states.setdefault(place, {})[key] = unpickled(value, key, path) if name in objects else value
    return states
