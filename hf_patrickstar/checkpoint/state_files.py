"""How optimizer states and settings of any kind are kept in files: tensors, what JSON has, and pickled objects."""

import ast
import contextlib
import dataclasses
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_patrickstar.checkpoint.safetensors_file import CHECKSUMS, FileSource, SafetensorsFile, write_safetensors
from hf_patrickstar.checkpoint.storage import damaged
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.layout.specs import MASTER

OTHERS_NAME = "optimizer-others.safetensors"
GROUP = "group."
"""The place in ``OTHERS_NAME`` of what JSON cannot give back of a param group begins so; its number follows."""

_SCALARS = (int, float, str, bool, type(None))
"""The types of states that are saved as JSON."""
_CODED = "="
"""A name in a file that begins with it is a key as Python writes it."""

States = dict[str, dict[Any, Any]]
"""The states of an optimizer by parameter."""


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
            f"the state of '{owner}' has the key {key!r}: a {type(key).__name__} cannot be a name in a safetensors "
            "file; save with optimizer_format='torch'"
        )
    return name


def decoded(name: str) -> Any:
    """The key of which ``coded`` made a name."""
    with contextlib.suppress(ValueError, SyntaxError):  # a file may be older than coded names
        return ast.literal_eval(name.removeprefix(_CODED)) if name.startswith(_CODED) else name
    return name


def pack(
    states: Mapping[str, Mapping[Any, Any]], name_of: Callable[[str, str], str], masters: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Puts states into the form of a safetensors file. Nothing is copied but objects.

    Args:
        states: What is kept under each key, by owner.
        name_of: The name of a tensor in the file, by owner and coded key.
        masters: The fp32 values of owners, which are saved with their states as ``MASTER``.

    Returns:
        The tensors of the file, and its metadata: states that JSON can hold, and which tensors are pickled objects.

    Raises:
        CheckpointError: If a state cannot be pickled, or its key cannot be a name.
    """
    tensors: dict[str, torch.Tensor] = {}
    values: States = {}
    objects = []
    for owner, state in states.items():
        for key, value in state.items():
            name = coded(key, owner)
            if isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value):
                tensors[name_of(owner, name)] = value
            elif is_plain(value):
                values.setdefault(owner, {})[name] = value
            else:
                tensors[name_of(owner, name)] = _pickled(value, f"state '{key}' of '{owner}'")
                objects.append(name_of(owner, name))
        if owner in masters:
            tensors[name_of(owner, MASTER)] = masters[owner]
    return tensors, {"format": "pt", "values": json.dumps(values), "objects": json.dumps(objects), CHECKSUMS: ""}


def unpack(file: SafetensorsFile, owner_first: bool) -> Iterator[tuple[str, str, Any]]:
    """Yields what ``pack`` put into a file: owner, coded key, and a plain value or where the rest of it is.

    Args:
        file: The file.
        owner_first: Whether names of tensors in the file begin with the owner and not with the key.

    Raises:
        CheckpointError: If the file is damaged.
    """
    try:
        metadata = {"objects": "[]", "parts": "{}", **file.metadata()}
        values, objects = json.loads(metadata["values"]), set(json.loads(metadata["objects"]))
        parts = {name: (int(start), int(stop)) for name, (start, stop) in json.loads(metadata["parts"]).items()}
        yield from ((owner, key, value) for owner, state in values.items() for key, value in state.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(damaged(f"'{file.path}' is not a part of a training state: {error!r}")) from error
    for entry_name, (dtype, shape, _) in file.entries.items():
        numel = math.prod(shape)
        start, stop = parts.get(entry_name, (0, numel))
        if stop - start != numel or start < 0:
            raise CheckpointError(
                damaged(f"'{file.path}': '{entry_name}' should have elements {start} to {stop}, and has {numel}")
            )
        first, _, second = entry_name.partition("/")  # the names of parameters may have more of them
        owner, key = (first, second) if owner_first else (second, first)
        pieces = [(start, stop, file, entry_name)]
        yield owner, key, SavedTensor(shape, dtype, pieces, key, entry_name in objects, entry_name in parts)


@dataclasses.dataclass(eq=False)
class SavedTensor(FileSource):
    """A tensor of a state in files, or an object.

    Attributes:
        key: Its name in the state; see ``decoded``.
        is_object: Whether its elements are the bytes of a pickled object.
        is_part: Whether other files may have other elements of it.
    """

    key: str
    is_object: bool
    is_part: bool

    def load(self) -> Any:
        """The tensor in memory, or the object, with tensors on the host.

        Raises:
            CheckpointError: If the program has not said that the type of the object is safe.
        """
        values = self.read(0, math.prod(self.shape))
        if not self.is_object:
            return values.view(self.shape)
        found = io.BytesIO(values.numpy().tobytes())
        try:
            return torch.load(found, map_location="cpu", weights_only=True)
        except Exception as error:
            types = []
            with contextlib.suppress(Exception):
                found.seek(0)
                types = torch.serialization.get_unsafe_globals_in_checkpoint(found)
            if not types:
                raise CheckpointError(damaged(f"{self}: '{decoded(self.key)}' cannot be loaded: {error}")) from error
            names = ", ".join(types)
            raise CheckpointError(
                f"{self}: '{decoded(self.key)}' is an object of {names}, which is loaded only if the program says that "
                f"this is safe; call torch.serialization.add_safe_globals([{names}]) before resuming"
            ) from error


def _pickled(value: Any, what: str) -> torch.Tensor:
    """The bytes of a state that is neither a tensor nor plain: of a projector of GaLore, for example."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:
        raise CheckpointError(
            f"{what} is a {type(value).__name__}, which cannot be pickled ({error}); save without the optimizer's "
            "state (save_only_model of the Trainer)"
        ) from error
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8).clone()


def save_others(directory: Path, states: Mapping[str, Mapping[Any, Any]]) -> bool:
    """Writes states of parameters outside of an optimizer's chunks, and settings, if there are any.

    All processes have the same states, so one process writes them. As in torch, a state is identified by the position
    of its parameter in the param groups.

    Args:
        directory: A directory that exists.
        states: The states by place: ``<optimizer>.<parameter>``, which are the optimizer's number and the parameter's
            in its groups (-1 for what is kept under keys that are no parameters), or ``group.<number>``.

    Returns:
        Whether there are any.

    Raises:
        CheckpointError: If they cannot be written, or one cannot be pickled.
    """
    tensors, metadata = pack(states, "{}/{}".format, {})
    if has_any := any(states.values()):
        write_safetensors(directory / OTHERS_NAME, tensors, metadata)
    return has_any


def read_others(directory: str | os.PathLike[str], *, is_needed: bool) -> States:
    """Reads the states that ``save_others`` wrote; empty if it wrote none.

    Args:
        directory: The directory of the training state.
        is_needed: Whether it wrote some.

    Raises:
        CheckpointError: If the file is damaged, or missing and needed.
    """
    path, states = Path(directory) / OTHERS_NAME, States()
    for place, key, value in unpack(SafetensorsFile(path), True) if is_needed or path.is_file() else ():
        states.setdefault(place, {})[decoded(key)] = value.load() if isinstance(value, SavedTensor) else value
    return states


# Settings of param groups


def split_settings(groups: Sequence[Mapping[Any, Any]]) -> tuple[list[dict[str, Any]], States]:
    """What JSON can hold of param groups, and by place what it does not give back as it was.

    Scalars of torch and numpy are numbers in JSON; tuples are lists, which loading makes tuples again.
    """
    plain: list[dict[str, Any]] = []
    others = States()
    for number, group in enumerate(groups):
        plain.append({})
        for key, value in group.items():
            if key == "params":
                continue
            simple = _simplified(value)
            if isinstance(key, str) and is_plain(simple):
                plain[-1][key] = simple
            items = value if type(value) is tuple else (value,)
            are_given_back = (isinstance(_simplified(v), _SCALARS) and not isinstance(v, torch.Tensor) for v in items)
            if not (isinstance(key, str) and all(are_given_back)):
                others.setdefault(f"{GROUP}{number}", {})[key] = value
    return plain, others


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
        present = group.get(key)
        if key == "params":
            continue
        if isinstance(present, torch.Tensor) and isinstance(value, (int, float)):
            present.fill_(value)
        elif isinstance(present, torch.Tensor) and getattr(value, "shape", None) == present.shape:
            present.copy_(value)
        else:  # older files do not tell lists from tuples
            group[key] = list(value) if isinstance(value, tuple) and isinstance(present, list) else value
