"""Saves optimizer states of parameters outside of an optimizer's chunks: in no chunk, or in another optimizer's.

All processes have the same states, so one process writes them. As in torch, a state is identified by the position of
its parameter in the param groups. What JSON cannot give back of the groups themselves is beside them.
"""

import ast
import contextlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from hf_patrickstar.checkpoint.safetensors_file import SafetensorsFile, write_safetensors
from hf_patrickstar.checkpoint.storage import damaged
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.runtime.chunk import MASTER

OTHERS_NAME = "optimizer-others.safetensors"
GROUP = "group."
"""The place of what JSON cannot give back of a param group begins so; its number follows."""

_SCALARS = (int, float, str, bool, type(None))
"""The types of states that are saved as JSON."""

OtherStates = dict[str, dict[Any, Any]]
"""The states by place, ``<optimizer>.<parameter>``: the optimizer's number, and the parameter's in its groups.

Number -1 has what is kept under keys that are no parameters.
"""

_CODED = "="
"""A name in a file that begins with it is a key as Python writes it."""


def coded(key: Any, owner: str) -> str:
    """The name in a file of what an optimizer keeps under a key; it has no ``/``, and is never ``MASTER``.

    Args:
        key: A text, mostly, which is its own name; numbers, and tuples of both, are written as Python does.
        owner: What the state belongs to, for errors.

    Raises:
        CheckpointError: If the key is something else.
    """
    if isinstance(key, str) and "/" not in key and key != MASTER and not key.startswith(_CODED):
        return str.__str__(key)
    name = f"{_CODED}{key!r}".replace("/", r"\x2f")
    if type(decoded(name)) is not type(key) or decoded(name) != key:
        raise CheckpointError(
            f"the state of {owner} has the key {key!r}, and a {type(key).__name__} cannot be a name in a safetensors "
            "file, as texts and numbers can; save with optimizer_format='torch'"
        )
    return name


def decoded(name: str) -> Any:
    """The key of which ``coded`` made a name."""
    with contextlib.suppress(ValueError, SyntaxError):  # a file may be older than coded names
        return ast.literal_eval(name.removeprefix(_CODED)) if name.startswith(_CODED) else name
    return name


def pickled(value: Any, key: Any, owner: str) -> torch.Tensor:
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


def unpickled(data: torch.Tensor, key: Any, path: Path) -> Any:
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
            owner = "a param group" if place.startswith(GROUP) else "the optimizer"
            name = coded(key, owner)
            if isinstance(value, torch.Tensor):
                tensors[f"{place}/{name}"] = value
            elif isinstance(value, _SCALARS):
                values.setdefault(place, {})[name] = value
            else:
                tensors[f"{place}/{name}"] = pickled(value, key, owner)
                objects.append(f"{place}/{name}")
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
        values = json.loads(file.metadata["values"])
        states: OtherStates = {p: {decoded(name): v for name, v in found.items()} for p, found in values.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(damaged(f"'{path}' is not a part of a training state: {error}")) from error
    for name, entry in file.entries.items():
        place, _, key = name.partition("/")  # older files have keys with more of them
        numel = torch.Size(entry.shape).numel()
        value = file.read(name, 0, numel).view(entry.shape)
        states.setdefault(place, {})[decoded(key)] = unpickled(value, decoded(key), path) if name in objects else value
    return states


def json_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a param group that JSON can hold: numbers, texts, and tuples and lists of them."""
    plain = {key: _simplified(value) for key, value in group.items() if key != "params" and isinstance(key, str)}
    return {key: value for key, value in plain.items() if is_plain(value)}


def other_settings(groups: Sequence[Mapping[Any, Any]]) -> OtherStates:
    """The entries of param groups that JSON does not give back: what is no number, text or tuple of them."""

    def is_given_back(key: Any, value: Any) -> bool:
        items = value if type(value) is tuple else (value,)
        return isinstance(key, str) and all(
            isinstance(_simplified(item), _SCALARS) and not isinstance(item, torch.Tensor) for item in items
        )

    return {
        f"{GROUP}{number}": {k: v for k, v in group.items() if k != "params" and not is_given_back(k, v)}
        for number, group in enumerate(groups)
    }


def _simplified(value: Any) -> Any:
    """Converts scalars of torch and numpy to Python's numbers."""
    if isinstance(value, (tuple, list)):
        return [_simplified(item) for item in value]
    numel = value.numel() if isinstance(value, torch.Tensor) else getattr(value, "size", None)
    return value.item() if isinstance(value, (torch.Tensor, numpy.generic, numpy.ndarray)) and numel == 1 else value


def is_plain(value: Any) -> bool:
    """Whether JSON gives a value back as it was: a tuple would come back as a list."""
    return isinstance(value, _SCALARS) or (type(value) is list and all(map(is_plain, value)))


def update_group(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Loads the saved entries of a param group; tensors stay tensors, and lists stay lists."""
    for key, value in saved.items():
        if key == "params":
            continue
        present = group.get(key)
        if isinstance(present, torch.Tensor) and isinstance(value, (int, float)):
            present.fill_(value)
        elif isinstance(present, torch.Tensor) and getattr(value, "shape", None) == present.shape:
            present.copy_(value)
        else:  # older files do not tell lists from tuples
            group[key] = list(value) if isinstance(value, tuple) and isinstance(present, list) else value
