"""Saves and loads what training needs beside the weights: masters and optimizer states, by parameter name.

[Note: the format]
Each of p ranks writes one file ``optimizer-0000r-of-0000p.safetensors``, r from 1 to p, with its own tensors:
``exp_avg/<parameter>`` and so on. A tensor is whole, in the parameter's shape, or the flat part of a parameter that is
spread over ranks. The file's metadata has the range of each part, and the states that are no tensors; those that JSON
cannot give back as they were are bytes of ``torch.save``, whose names are in the metadata. ``master/<parameter>`` is
the engine's own; an optimizer's key of that name, one with ``/``, or one that is no text is written as Python does:
``='master'/<parameter>``.

Rank 0 adds ``optimizer.index.json`` with the files, the shapes of the parameters, and the param groups. Its entry
``optimizers`` has the groups again, by optimizer and in torch's order of parameters, with ``null`` for a parameter
whose state is in ``optimizer-others.safetensors``; ``has_others`` says whether that file was written. It also has what
JSON cannot give back of the groups. The files do not depend on chunks, budgets or devices, so any number of processes
can read them with any settings: each process finds the files of its elements, and reads only those.

The format of ``torch.distributed.checkpoint`` is not used: its safetensors writer builds a whole file in memory before
it writes any, and its own format has a pickled index that only torch reads. Both load into tensors beside the chunks.
"""

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from hf_patrickstar.checkpoint.background import BackgroundWrite
from hf_patrickstar.checkpoint.deferred import PIECE_NUMEL
from hf_patrickstar.checkpoint.other_states import (
    GROUP,
    OTHERS_NAME,
    OtherStates,
    coded,
    decoded,
    is_plain,
    json_settings,
    other_settings,
    pickled,
    read_others,
    save_others,
    unpickled,
    update_group,
)
from hf_patrickstar.checkpoint.pieces import piece_numel_of
from hf_patrickstar.checkpoint.progress import shown
from hf_patrickstar.checkpoint.safetensors_file import SafetensorsFile, write_safetensors
from hf_patrickstar.checkpoint.storage import damaged, describe_failure, missing_file
from hf_patrickstar.checkpoint.torch_state import TorchOptimizers
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.runtime.chunk import MASTER, Chunk, ManagedParameter
from hf_patrickstar.runtime.manager import ChunkManager

logger = logging.getLogger(__name__)

INDEX_NAME = "optimizer.index.json"
_FORMAT, _VERSION = "hf_patrickstar.training_state", 1


def shard_name(rank: int, world_size: int) -> str:
    """The file of a rank."""
    return f"optimizer-{rank + 1:05d}-of-{world_size:05d}.safetensors"


class ShardedOptimizer(TorchOptimizers, Protocol):
    """What the training state needs of the optimizers over chunks, as if they were one."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups."""
        ...

    @property
    def class_name(self) -> str:
        """The class name of the user's optimizer; several are joined by ``+``."""
        ...

    def named_groups(self) -> list[list[str]]:
        """The names of the parameters of each param group."""
        ...

    def placed_groups(self) -> list[list[list[str | None]]]:
        """For each optimizer and group the names of parameters in the optimizer's chunks, ``None`` for others."""
        ...

    def state_places(self, tensor: ManagedParameter) -> dict[str, torch.Tensor]:
        """The tensors of a parameter's state that are in chunk lists, and so exist before the first step."""
        ...

    def load_own_state(self, tensor: ManagedParameter, state: Mapping[str, Any]) -> None:
        """Loads this rank's part of a parameter's state; the caller has filled the tensors of ``state_places``."""
        ...

    def other_states(self) -> OtherStates:
        """The states of parameters that are updated outside of chunks."""
        ...

    def load_other_states(self, states: OtherStates) -> None:
        """Replaces the states of parameters that are updated outside of chunks."""
        ...

    def other_places(self) -> set[str]:
        """The places that ``other_states`` may have."""
        ...


class TrainingState:
    """Saves and loads masters and optimizer states, each process its own part.

    Args:
        manager: The manager of the chunks.
        optimizer: The optimizer over them.
        rank: This process.
        world_size: The number of processes.
        is_in_model_file: Whether a parameter is saved with the model; otherwise its master is saved here.
    """

    def __init__(
        self,
        manager: ChunkManager,
        optimizer: ShardedOptimizer,
        rank: int,
        world_size: int,
        is_in_model_file: Callable[[ManagedParameter], bool] = lambda tensor: True,
    ) -> None:
        self._is_in_model_file = is_in_model_file
        self._manager = manager
        self.optimizer = optimizer
        self.rank = rank
        self._world_size = world_size

    @property
    def is_empty(self) -> bool:
        """Whether there is no optimizer, and so nothing to save."""
        return not self.optimizer.param_groups

    def save(self, directory: str | os.PathLike[str], *, with_index: bool) -> None:
        """Writes this rank's part. Nothing is copied; processes do not wait for each other.

        Args:
            directory: A directory that exists.
            with_index: Whether to write the index too: one rank does, or one on each disk.

        Raises:
            CheckpointError: If it cannot be written, or a state cannot be pickled.
        """
        tensors, metadata, _ = self._collect()
        piece_numel = piece_numel_of(self._manager.chunks)
        write_safetensors(self._path(directory), tensors, metadata, piece_numel=piece_numel, is_sorted=False)
        if with_index:
            self._save_index(directory)

    def save_in_background(self, directory: str | os.PathLike[str], *, with_index: bool) -> BackgroundWrite:
        """Like ``save``, but a thread writes the tensors while training goes on; the index is written at once.

        Args:
            directory: A directory that exists.
            with_index: See ``save``.

        Raises:
            CheckpointError: If the index cannot be written, or a state cannot be pickled.
        """
        if with_index:
            self._save_index(directory)
        tensors, metadata, chunks = self._collect()
        return BackgroundWrite(self._path(directory), tensors, metadata, chunks, piece_numel_of(self._manager.chunks))

    def _path(self, directory: str | os.PathLike[str]) -> Path:
        return Path(directory) / shard_name(self.rank, self._world_size)

    def _save_index(self, directory: str | os.PathLike[str]) -> None:
        trainable = [tensor for tensor in self._manager.tensors if tensor.chunk.spec.is_updated]
        index = {
            "format": _FORMAT,
            "version": _VERSION,
            "optimizer": self.optimizer.class_name,
            "files": [shard_name(rank, self._world_size) for rank in range(self._world_size)],
            "has_others": save_others(
                directory, self.optimizer.other_states() | other_settings(self.optimizer.param_groups)
            ),
            "param_groups": [
                {**json_settings(group), "params": names}
                for group, names in zip(self.optimizer.param_groups, self.optimizer.named_groups(), strict=True)
            ],
            "optimizers": self.optimizer.placed_groups(),
            "parameters": {
                tensor.spec.name: {
                    "shape": list(tensor.spec.shape),
                    "dtype": str(tensor.original_dtype).removeprefix("torch."),
                }
                for tensor in trainable
            },
        }
        try:
            (Path(directory) / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise CheckpointError(describe_failure(Path(directory) / INDEX_NAME, error)) from error

    def owned(self) -> Iterator[ManagedParameter]:
        """The parameters with optimizer states of which this rank has a part at home, in the order of chunks."""
        return (t for chunk in self._manager.chunks if chunk.spec.is_updated for t in chunk.owned)

    def _collect(self) -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, Chunk]]:
        """The tensors to write, not copied; the metadata of the file; and the chunk of each tensor."""
        tensors: dict[str, torch.Tensor] = {}
        chunks: dict[str, Chunk] = {}
        parts: dict[str, list[int]] = {}
        values: dict[str, dict[str, Any]] = {}
        objects: list[str] = []
        for tensor in self.owned():
            name = tensor.spec.name
            owner, chunk = f"parameter '{name}'", tensor.chunk
            state = {coded(key, owner): value for key, value in self.optimizer.own_state(tensor).items()}
            if tensor.original_dtype is not chunk.state_dtype or not self._is_in_model_file(tensor):
                state[MASTER] = tensor.view(chunk.lists.get(MASTER, chunk.param))
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{key}/{name}"] = value
                    chunks[f"{key}/{name}"] = tensor.chunk
                    if tensor.is_split and value.dim():
                        parts[f"{key}/{name}"] = list(tensor.part)
                elif is_plain(value):
                    values.setdefault(name, {})[key] = value
                else:
                    tensors[f"{key}/{name}"] = pickled(value, decoded(key), owner)
                    chunks[f"{key}/{name}"] = tensor.chunk
                    objects.append(f"{key}/{name}")
        metadata = {"format": "pt", "rank": str(self.rank), "world_size": str(self._world_size)}
        told = {"parts": json.dumps(parts), "values": json.dumps(values), "objects": json.dumps(objects)}
        return tensors, metadata | told, chunks

    # Loading

    def open(self, directory: str | os.PathLike[str]) -> "Loading":
        """Checks a saved state against this optimizer. Nothing changes until ``Loading.apply``.

        Args:
            directory: The directory of the state, which any number of processes may have saved.

        Raises:
            CheckpointError: If a file is missing or damaged, or the state belongs to another optimizer, or to other
                parameters or groups.
        """
        saved = SavedState(directory)
        if saved.optimizer != self.optimizer.class_name:
            raise CheckpointError(
                f"'{saved.path}' was saved by {saved.optimizer}, this is {self.optimizer.class_name}; resume with the "
                "same optimizer, or without the training state (load the weights alone, as a model)"
            )
        self._check_groups(saved)
        for tensor in self._manager.tensors:
            if tensor.chunk.spec.is_updated:
                self._check_tensor(saved, tensor)
        unknown = sorted(saved.others.keys() - self.optimizer.other_places())
        if unknown:
            raise CheckpointError(
                f"'{saved.path.parent / OTHERS_NAME}' has a state of the parameter at place {unknown[0]}, which is in "
                "a chunk of its optimizer here, or not there; prepare the same optimizers in the same order"
            )
        return Loading(self, saved, self._manager, self.optimizer)

    def _check_groups(self, saved: "SavedState") -> None:
        ours = self.optimizer.named_groups()
        if len(ours) != len(saved.groups):
            raise CheckpointError(
                f"'{saved.path}' has {len(saved.groups)} param groups, this optimizer {len(ours)}; make it with the "
                "same groups (the same weight decay, say) as the one that was saved"
            )
        for number, (names, group) in enumerate(zip(ours, saved.groups, strict=True)):
            different = sorted(set(names) ^ set(group["params"]))
            if different:
                raise CheckpointError(
                    f"'{saved.path}': param group {number} was saved with {len(group['params'])} parameters and has "
                    f"{len(names)} here; '{different[0]}' is the first that is in one of them only. Make the param "
                    "groups of the same parameters as those that were saved"
                )

    def _check_tensor(self, saved: "SavedState", tensor: ManagedParameter) -> None:
        name = tensor.spec.name
        if name not in saved.shapes:
            raise CheckpointError(
                f"'{saved.path}' has no parameter '{name}': it was frozen when the state was saved, or has another "
                "name; freeze and name parameters as in the run that saved it, or load the weights alone, as a model"
            )
        if saved.shapes[name] != tensor.spec.shape:
            raise CheckpointError(
                f"'{saved.path}': parameter '{name}' has shape {saved.shapes[name]}, in the model {tensor.spec.shape}; "
                "make the model with the configuration that it was saved with"
            )
        has_state = tensor.is_owned and saved.keys(name) - {MASTER}  # else its owner checks
        needed = set(self.optimizer.state_places(tensor)) if has_state else set()
        missing = sorted(needed - saved.keys(name))
        if missing:
            raise CheckpointError(
                f"'{saved.path}' has no '{missing[0]}' of parameter '{name}': {saved.optimizer} was saved with other "
                "options than it has here; make the optimizer with the options that it was saved with"
            )
        if not tensor.is_owned:
            return
        saved.check_complete(name, *tensor.part)
        saved.check_objects(name)
        for key in saved.keys(name) & (needed | {MASTER}):
            shape = saved.shape(key, name)
            if shape != tensor.spec.shape:
                raise CheckpointError(
                    f"'{saved.path}': '{key}' of parameter '{name}' has shape {shape}, not that of the parameter, "
                    f"{tensor.spec.shape}; make the model with the configuration that it was saved with"
                )


def _missing(path: Path) -> str:
    """The message of an error: a file is missing without which the other files of the state cannot be read."""
    return (
        f"{missing_file(path)}; or delete every optimizer-* and {INDEX_NAME} beside it, to go on with optimizer.pt if "
        "that is there, and otherwise with a new optimizer"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """A range of elements of a flattened tensor, the file that has it, and whether the tensor has other ranges."""

    start: int
    stop: int
    file: SafetensorsFile
    key: str
    is_part: bool


class SavedState:
    """A training state on the disk.

    Args:
        directory: The directory of the state.

    Attributes:
        path: The path of its index.
        optimizer: The class of the optimizer.
        groups: The param groups, with the names of parameters for ``params``.
        optimizers: The parameters of each optimizer and group in torch's order: names, ``None`` for those whose state
            is in ``others``.
        shapes: The shape of every parameter.
        values: States that are no tensors, by parameter.
        others: States of parameters that were updated outside of chunks.

    Raises:
        CheckpointError: If the index is missing, or a file is damaged.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory) / INDEX_NAME
        try:
            index = json.loads(self.path.read_text(encoding="utf-8"))
            if index["format"] != _FORMAT or index["version"] > _VERSION:
                raise CheckpointError(
                    f"'{self.path}' is version {index['version']} of {index['format']}; this package reads "
                    f"version {_VERSION} of {_FORMAT}; use the version of hf_patrickstar that saved it, or a later one"
                )
            self.optimizer = str(index["optimizer"])
            self.groups: list[dict[Any, Any]] = [
                {
                    key: tuple(value) if type(value) is list and key != "params" else value
                    for key, value in group.items()
                }
                for group in index["param_groups"]
            ]
            self.shapes = {name: tuple(found["shape"]) for name, found in index["parameters"].items()}
            own_groups = [group["params"] for group in self.groups]  # older files lack it
            self.optimizers: list[list[list[str | None]]] = index.get("optimizers", [own_groups])
            names = [str(name) for name in index["files"]]
            has_others = bool(index.get("has_others"))  # older files lack it
        except FileNotFoundError as error:
            raise CheckpointError(_missing(self.path)) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(damaged(f"'{self.path}' is not the index of a training state: {error}")) from error
        if has_others and not (self.path.parent / OTHERS_NAME).is_file():
            raise CheckpointError(_missing(self.path.parent / OTHERS_NAME))
        self.others = read_others(directory)
        for number, group in enumerate(self.groups):
            group.update(self.others.pop(f"{GROUP}{number}", {}))
        self.values: dict[str, dict[Any, Any]] = {}
        self._objects: set[str] = set()
        self._pieces: dict[str, dict[str, list[_Piece]]] = {}
        # Files of other machines may be on other disks: a missing file is an error only if its content is needed.
        self._missing = [name for name in names if not (self.path.parent / name).exists()]
        for name in names:
            if name not in self._missing:
                self._add(SafetensorsFile(self.path.parent / name))

    def _add(self, file: SafetensorsFile) -> None:
        try:
            parts = {
                name: (int(start), int(stop)) for name, (start, stop) in json.loads(file.metadata["parts"]).items()
            }
            for name, values in json.loads(file.metadata["values"]).items():
                self.values.setdefault(name, {}).update({decoded(key): value for key, value in values.items()})
            self._objects.update(json.loads(file.metadata.get("objects", "[]")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(damaged(f"'{file.path}' is not a part of a training state: {error}")) from error
        for entry_name, entry in file.entries.items():
            key, _, name = entry_name.partition("/")
            numel = torch.Size(entry.shape).numel()
            start, stop = parts.get(entry_name, (0, numel))
            if stop - start != numel or start < 0:
                raise CheckpointError(
                    damaged(
                        f"'{file.path}': '{entry_name}' should be elements {start} to {stop}, it has {numel} elements"
                    )
                )
            pieces = self._pieces.setdefault(name, {}).setdefault(key, [])
            if not any((piece.start, piece.stop) == (start, stop) for piece in pieces):  # as for scalars
                pieces.append(_Piece(start, stop, file, entry_name, entry_name in parts))

    def keys(self, name: str) -> set[str]:
        """The names of the tensors in a parameter's state, as in the files; see ``decoded``."""
        return set(self._pieces.get(name, {}))

    def shape(self, key: str, name: str) -> tuple[int, ...]:
        """The shape of a whole tensor of a parameter's state."""
        pieces = self._pieces[name][key]
        is_part = any(piece.is_part for piece in pieces)
        return self.shapes[name] if is_part else pieces[0].file.entries[pieces[0].key].shape

    def dtype(self, key: str, name: str) -> torch.dtype:
        """The type of a tensor of a parameter's state."""
        piece = self._pieces[name][key][0]
        return piece.file.entries[piece.key].dtype

    def check_complete(self, name: str, start: int, stop: int) -> None:
        """Makes sure that the files have the state of some elements of a parameter.

        Args:
            name: The parameter.
            start: The first element.
            stop: One after the last element.

        Raises:
            CheckpointError: If they do not.
        """
        keys = self.keys(name)
        if not keys and self._missing:
            raise CheckpointError(
                f"'{self.path.parent / self._missing[0]}' is missing; parameter '{name}' is in no other file. Copy "
                "the files of all processes into the directory"
            )
        for key in sorted(keys):
            is_part = self.shape(key, name) == self.shapes[name]
            end, last = (start, stop) if is_part else (0, torch.Size(self.shape(key, name)).numel())
            for piece in sorted(self._pieces[name][key], key=lambda piece: piece.start):
                if piece.start <= end:
                    end = max(end, piece.stop)
            if end < last:
                missing = f"; {', '.join(self._missing)} is missing" if self._missing else ""
                raise CheckpointError(
                    f"'{self.path}': elements {end} to {last} of '{key}' of parameter '{name}' are in no "
                    f"file{missing}. Copy the files of all processes into the directory"
                )

    def check_objects(self, name: str) -> None:
        """Makes sure that the objects in a parameter's state can be loaded.

        Raises:
            CheckpointError: If the program has not said that the type of one is safe.
        """
        for key in self.keys(name):
            if self.is_object(key, name):
                self.read_whole(key, name)

    def is_object(self, key: str, name: str) -> bool:
        """Whether a part of a parameter's state is no tensor, but bytes of ``torch.save``."""
        return f"{key}/{name}" in self._objects

    def read(self, key: str, name: str, start: int, stop: int) -> torch.Tensor:
        """Reads elements of a tensor of a parameter's state into a new flat tensor."""
        pieces = self._overlapping(key, name, start, stop)
        if len(pieces) == 1:
            return pieces[0].file.read(pieces[0].key, start - pieces[0].start, stop - pieces[0].start)
        dtype = pieces[0].file.entries[pieces[0].key].dtype if pieces else torch.float32
        values = torch.zeros(stop - start, dtype=dtype, device="cpu")
        self.read_into(key, name, start, values)
        return values

    def read_whole(self, key: str, name: str) -> Any:
        """Reads a part of a parameter's state that no chunk has a place for: a tensor, or an object."""
        shape, first = self.shape(key, name), self._pieces[name][key][0]
        if self.is_object(key, name):  # other ranks may have written other bytes
            return unpickled(first.file.read(first.key, 0, first.stop), decoded(key), first.file.path)
        return self.read(key, name, 0, torch.Size(shape).numel()).view(shape)

    def read_into(self, key: str, name: str, start: int, values: torch.Tensor) -> None:
        """Fills ``values`` with elements of a tensor of a parameter's state.

        Args:
            key: The name of the tensor in the state.
            name: The parameter.
            start: The first element.
            values: The tensor to fill: flat and contiguous, of any type, on any device.
        """
        stop = start + values.numel()
        for piece in self._overlapping(key, name, start, stop):
            low, high = max(piece.start, start), min(piece.stop, stop)
            place = values[low - start : high - start]
            if place.device.type == "cpu" and place.dtype == piece.file.entries[piece.key].dtype:
                piece.file.read_into(piece.key, low - piece.start, place)
                continue
            for begin in range(low, high, PIECE_NUMEL):
                end = min(begin + PIECE_NUMEL, high)
                found = piece.file.read(piece.key, begin - piece.start, end - piece.start)
                values[begin - start : end - start].copy_(found)

    def _overlapping(self, key: str, name: str, start: int, stop: int) -> Sequence[_Piece]:
        return [piece for piece in self._pieces[name][key] if piece.start < stop and start < piece.stop]


class Loading:
    """A training state that was checked and can be loaded.

    Args:
        state: The training state to load into.
        saved: The saved state.
        manager: The manager of the chunks.
        optimizer: The optimizer over them.
    """

    def __init__(
        self, state: TrainingState, saved: SavedState, manager: ChunkManager, optimizer: ShardedOptimizer
    ) -> None:
        self._state, self._saved, self._manager, self._optimizer = state, saved, manager, optimizer

    @torch.no_grad()
    def apply(self) -> None:
        """Loads the state, one parameter after the other, and drops gradients.

        Raises:
            CheckpointError: If a file cannot be read any more.
        """
        saved, optimizer = self._saved, self._optimizer
        self._manager.begin_loading()
        tensors, is_first = list(self._state.owned()), self._state.rank == 0
        for tensor in shown(tensors, "Reading training state", "tensors", is_first=is_first):
            name, (start, stop) = tensor.spec.name, tensor.part
            places = optimizer.state_places(tensor)
            state: dict[Any, Any] = dict(saved.values.get(name, {}))
            for key in sorted(saved.keys(name)):
                if key == MASTER:
                    self._manager.load(tensor, lambda home: saved.read_into(MASTER, name, start, home))  # noqa: B023
                elif key in places:
                    saved.read_into(key, name, start, places[key].view(-1))
                elif tensor.is_split and not saved.is_object(key, name) and saved.shape(key, name) == tensor.spec.shape:
                    state[decoded(key)] = saved.read(key, name, start, stop)
                else:
                    state[decoded(key)] = saved.read_whole(key, name)
            optimizer.load_own_state(tensor, state)
        for group, found in zip(optimizer.param_groups, saved.groups, strict=True):
            update_group(group, found)
        optimizer.load_other_states(saved.others)
        self._manager.end_loading()
