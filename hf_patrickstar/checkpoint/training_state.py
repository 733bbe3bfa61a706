"""Saves and loads what training needs beside the weights: masters and optimizer states, by parameter name.

[Note: the training state]
Each of p ranks writes one file ``optimizer-0000r-of-0000p.safetensors``, r from 1 to p, with its own tensors:
``exp_avg/<parameter>`` and so on. A tensor is whole, in the parameter's shape, or the flat part of a parameter that is
spread over ranks. The file's metadata has the range of each part, and states that Python can write as literals; other
objects, and tensors whose key is no text or has a ``/``, are bytes of ``torch.save`` in the tensor ``pickled``.
``patrickstar_master/<parameter>`` is the engine's own.

Rank 0 adds ``optimizer.index.json`` with the files, the shapes of the parameters, and the names of those in each param
group. Its entry ``optimizers`` has the groups again, by optimizer and in torch's order of parameters, with ``null`` for
a parameter whose state is in ``optimizer-others.safetensors``, beside the settings of the groups. The files do not
depend on chunks, budgets or devices, so any number of processes can read them with any settings: each process finds the
files of its elements, and reads only those.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_patrickstar.checkpoint import state_files
from hf_patrickstar.checkpoint.deferred import PIECE_NUMEL, DeferredTensor, Reader
from hf_patrickstar.checkpoint.progress import shown
from hf_patrickstar.checkpoint.safetensors_file import FileSource, SafetensorsFile, write_safetensors
from hf_patrickstar.checkpoint.storage import damaged, missing_file, text_checksum
from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.layout.specs import MASTER
from hf_patrickstar.optim.kernel import Kernel
from hf_patrickstar.optim.optimizer import ChunkedOptimizer
from hf_patrickstar.optim.state import SAVED_MASTER, check_shapes
from hf_patrickstar.runtime.manager import ChunkManager
from hf_patrickstar.runtime.parameter import ManagedParameter

INDEX_NAME = "optimizer.index.json"
_OTHERS_NAME = "optimizer-others.safetensors"
_GROUP = "group."
"""The owner of a param group's settings in ``_OTHERS_NAME``: its number follows."""
_FORMAT, _VERSION = "hf_patrickstar.training_state", 3
_README_TITLE = "## Training state of this checkpoint"
_README = f"""{_README_TITLE}

hf_patrickstar has saved the optimizer's state in `optimizer-*.safetensors`, under the names of the model's parameters,
and its settings in `optimizer-others.safetensors`; `optimizer.index.json` lists the files. A Trainer with
`--patrickstar` resumes from them. **The stock Trainer does not read them**: without `optimizer.pt` it begins with a new
optimizer and schedule, and does not say so. This command writes it (Accelerate's `load_state` needs
`--output PATH_OF_THIS_DIRECTORY/optimizer.bin`):

    hf-patrickstar export PATH_OF_THIS_DIRECTORY
"""


def shard_name(rank: int, world_size: int) -> str:
    """The file of a rank."""
    return f"optimizer-{rank + 1:05d}-of-{world_size:05d}.safetensors"


def has_training_state(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory has a training state in this package's format, or only some files of one."""
    return any(any(Path(directory).glob(name)) for name in (INDEX_NAME, "optimizer-*.safetensors"))


def write_read_me(directory: Path, older: Path | None = None) -> None:
    """Adds a section about the files of the training state to the ``README.md`` of a checkpoint.

    Other text in it is kept: a library such as PEFT may have written it, or a user, in the older checkpoint.

    Args:
        directory: The checkpoint.
        older: The checkpoint that this one will replace, if there is one.
    """
    path = directory / "README.md"
    found = [place for place in (path, (older or directory) / path.name) if place.is_file()]
    before = found[0].read_text(encoding="utf-8", errors="replace") if found else ""
    path.write_text(f"{before.partition(_README_TITLE)[0].rstrip()}\n\n{_README}".lstrip(), encoding="utf-8")


@dataclasses.dataclass
class TrainingState:
    """Saves and loads masters and optimizer states, each process its own part.

    Attributes:
        manager: The manager of the chunks.
        optimizers: The optimizers over them; the list may grow.
        collectives: The processes that share them.
        is_in_model_file: Whether a parameter is saved with the model; otherwise its master is saved here.
    """

    manager: ChunkManager
    optimizers: Sequence[ChunkedOptimizer]
    collectives: Collectives
    is_in_model_file: Callable[[ManagedParameter], bool]

    @property
    def is_empty(self) -> bool:
        """Whether there is no optimizer, and so nothing to save."""
        return not self.optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def class_name(self) -> str:
        """The class names of the users' optimizers, joined by ``+``."""
        return "+".join(type(optimizer.inner).__name__ for optimizer in self.optimizers)

    def kernel_of(self, tensor: ManagedParameter) -> Kernel:
        """The kernel that updates a parameter."""
        return self.optimizers[tensor.chunk.spec.optimizer_index].kernel

    def named_groups(self) -> list[list[str]]:
        """The names of the parameters in chunks of each param group."""
        return [names for optimizer in self.optimizers for names in optimizer.named_groups()]

    def other_states(self) -> dict[str, dict[str, Any]]:
        """The states of parameters that are updated outside of chunks, by optimizer and position in its groups."""
        return {
            f"{number}.{place}": state
            for number, optimizer in enumerate(self.optimizers)
            for place, state in optimizer.other_states().items()
        }

    def load_other_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Replaces ``other_states``; a parameter without a given state begins anew."""
        for number, optimizer in enumerate(self.optimizers):
            own = {place: states.get(f"{number}.{place}", {}) for place in optimizer.other_states()}
            optimizer.load_other_states(own)

    def state_dicts(self, states: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
        """The ``state_dict`` of each optimizer.

        Args:
            states: The states of all ranks, by tensor index; their tensors may be deferred.
        """
        return [optimizer.state_dict_of(states) for optimizer in self.optimizers]

    def load_state_dicts(self, state_dicts: Sequence[dict[str, Any]]) -> None:
        """Loads a ``state_dict`` into each optimizer."""
        for optimizer, state_dict in zip(self.optimizers, state_dicts, strict=True):
            optimizer.load_state_dict(state_dict)

    def begin_save(self, directory: Path, *, with_index: bool) -> state_files.StateFile:
        """Writes the index, and returns what this rank has to write. Nothing is copied.

        Args:
            directory: A directory that exists.
            with_index: Whether to write the index: one rank does, or one on each disk.

        Raises:
            CheckpointError: If a state cannot be saved.
        """
        if with_index:
            self._save_index(directory)
        states = self.own_states()
        owned = {tensor.spec.name: tensor for tensor in states}
        tensors, metadata = state_files.pack({tensor.spec.name: state for tensor, state in states.items()})
        owners = {key: owned[name] for key in tensors if (name := key.partition("/")[2])}
        parts = {key: tensor.part for key, tensor in owners.items() if tensor.is_split and tensors[key].dim()}
        path = directory / shard_name(self.collectives.rank, self.collectives.world_size)
        metadata |= {"parts": json.dumps(parts)}
        write = functools.partial(write_safetensors, path, tensors, metadata)
        return state_files.StateFile(path, tensors, {key: tensor.chunk for key, tensor in owners.items()}, write)

    def own_states(self) -> dict[ManagedParameter, dict[Any, Any]]:
        """The states of ``owned``, with their masters if the model's file does not have these to the last bit."""
        states = {tensor: {**self.kernel_of(tensor).own_state(tensor)} for tensor in self.owned()}
        for tensor, state in states.items():
            if tensor.original_dtype is not tensor.chunk.state_dtype or not self.is_in_model_file(tensor):
                state[SAVED_MASTER] = tensor.view(tensor.chunk.lists.get(MASTER, tensor.chunk.param))
        return states

    @property
    def is_fresh(self) -> bool:
        """Whether the optimizers have no state yet on this process."""
        has_any = any(self.kernel_of(tensor).own_state(tensor) for tensor in self.owned())
        return not (has_any or any(self.other_states().values()))

    def _save_index(self, directory: Path) -> None:
        settings = {
            f"{_GROUP}{number}": {key: value for key, value in group.items() if key != "params"}
            for number, group in enumerate(self.param_groups)
        }
        write_safetensors(directory / _OTHERS_NAME, *state_files.pack(self.other_states() | settings))
        world_size = self.collectives.world_size
        trained = [tensor for tensor in self.manager.tensors if tensor.chunk.spec.is_updated]
        types = {t.spec.name: str(t.original_dtype).removeprefix("torch.") for t in trained}
        index = {
            "format": _FORMAT,
            "version": _VERSION,
            "optimizer": self.class_name,
            "files": [shard_name(rank, world_size) for rank in range(world_size)],
            "param_groups": [{"params": names} for names in self.named_groups()],
            "optimizers": [optimizer.placed_groups() for optimizer in self.optimizers],
            "parameters": {t.spec.name: {"shape": t.spec.shape, "dtype": types[t.spec.name]} for t in trained},
        }
        text = json.dumps({**index, "checksum": text_checksum(index)}, indent=1)
        (directory / INDEX_NAME).write_text(f"{text}\n", encoding="utf-8")

    def owned(self) -> list[ManagedParameter]:
        """The parameters with optimizer states of which this rank has a part at home, in the order of chunks."""
        return [t for chunk in self.manager.chunks if chunk.spec.is_updated for t in chunk.owned]

    def open(
        self, directory: str | os.PathLike[str], *, is_verified: bool = True
    ) -> tuple[Callable[[], None], Mapping[str, torch.Tensor]]:
        """Checks a saved state against this optimizer.

        Args:
            directory: The directory of the state, which any number of processes may have saved.
            is_verified: Whether all checksums are verified now, and not only those of masters. They need not be if no
                process has a state that could be lost: loading verifies them, too.

        Returns:
            A function that loads the state, and the masters of parameters by name, deferred: they are to be loaded
            instead of weights. If a state is damaged, the function raises ``CheckpointError``, and the optimizer has a
            part of the state.

        Raises:
            CheckpointError: If a file is missing or damaged, or the state belongs to another optimizer, or to other
                parameters or groups.
        """
        saved = SavedState(directory)
        if saved.optimizer != self.class_name:
            raise CheckpointError(
                f"'{saved.path}' was saved by {saved.optimizer}, this is {self.class_name}; resume with the same "
                "optimizer, or load the weights alone, as a model"
            )
        ours, theirs = self.named_groups(), [group["params"] for group in saved.groups]
        if len(ours) != len(theirs):
            raise CheckpointError(
                f"'{saved.path}' has {len(theirs)} param groups, this optimizer {len(ours)}; make the same ones (with "
                "the same weight decay, say)"
            )
        for number, (own, found) in enumerate(zip(ours, theirs, strict=True)):
            if different := sorted(set(own) ^ set(found)):
                raise CheckpointError(
                    f"'{saved.path}': param group {number} has {len(found)} parameters, and {len(own)} here; "
                    f"'{different[0]}' is only in one of them. Make the param groups of the same parameters"
                )
        for tensor in self.manager.tensors:
            if tensor.chunk.spec.is_updated:
                self._check_tensor(saved, tensor, is_verified=is_verified)
        if unknown := sorted(saved.others.keys() - self.other_states().keys()):
            raise CheckpointError(
                f"'{saved.path.with_name(_OTHERS_NAME)}' has a state of parameter {unknown[0]}, which has "
                "none outside of chunks here; prepare the same optimizers in the same order"
            )
        states = {tensor.spec.name: saved.states.get(tensor.spec.name, {}) for tensor in self.owned()}
        masters = {name: state[SAVED_MASTER] for name, state in states.items() if SAVED_MASTER in state}
        return functools.partial(self._load, saved), masters

    def _check_tensor(self, saved: "SavedState", tensor: ManagedParameter, *, is_verified: bool) -> None:
        name = tensor.spec.name
        if (shape := saved.shapes.get(name)) != tensor.spec.shape:  # in the groups there, so it has one there
            raise CheckpointError(
                f"'{saved.path}': parameter '{name}' has shape {shape}, in the model {tensor.spec.shape}; make the "
                "model with the configuration that it was saved with"
            )
        if not tensor.is_owned:
            return  # its owner checks
        saved.check_complete(name, *tensor.part, is_verified=is_verified)
        state, kernel = saved.state_of(name), self.kernel_of(tensor)
        try:
            check_shapes(tensor, state, kernel.state_places(tensor))
            kernel.check_own_state(tensor, state)
        except ValueError as error:
            raise CheckpointError(f"'{saved.path}': {error}; make the optimizer with the same options") from error

    def _load(self, saved: "SavedState") -> None:
        """Loads a state, one parameter after the other.

        Raises:
            CheckpointError: If a file cannot be read any more.
        """
        reader = Reader()
        for tensor in shown(self.owned(), "Reading training state", "tensors", is_first=self.collectives.rank == 0):
            name, start = tensor.spec.name, tensor.part[0]
            state, kernel = saved.state_of(name), self.kernel_of(tensor)
            places = kernel.state_places(tensor)
            for key in places.keys() & state.keys():
                reader.fill(places[key], state.pop(key), start)
            found = {key: reader.read_whole(v) if isinstance(v, DeferredTensor) else v for key, v in state.items()}
            kernel.load_own_state(tensor, found)
        for group, found in zip(self.param_groups, saved.groups, strict=True):
            state_files.update_group(group, found)
        self.load_other_states(saved.others)


def read_index(path: Path) -> dict[str, Any]:
    """Reads the index of a training state.

    Raises:
        CheckpointError: If it is missing or damaged, or another version has saved it.
    """
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        if (index["format"], index["version"]) != (_FORMAT, _VERSION):
            raise CheckpointError(
                f"'{path}' is version {index['version']} of {index['format']}; this package reads version {_VERSION} "
                f"of {_FORMAT}; use the version of hf_patrickstar that saved it"
            )
        if index.pop("checksum") != text_checksum(index):
            raise ValueError("it is not as it was saved")
        return dict(index)
    except FileNotFoundError as error:
        advice = f"delete every optimizer-* and {INDEX_NAME} there, to go on with optimizer.pt or a new optimizer"
        raise CheckpointError(f"{missing_file(path)}; or {advice}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(damaged(f"'{path}' is not the index of a training state: {error}")) from error


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
        states: The other states, by parameter and key; tensors with dimensions are deferred.
        others: States of parameters that were updated outside of chunks.

    Raises:
        CheckpointError: If the index is missing, or a file is damaged, or the program has not said that the type of an
            object is safe.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory) / INDEX_NAME
        index = read_index(self.path)
        self.optimizer = str(index["optimizer"])
        named_groups = [group["params"] for group in index["param_groups"]]
        self.shapes = {name: tuple(found["shape"]) for name, found in index["parameters"].items()}
        self.optimizers: list[list[list[str | None]]] = index["optimizers"]
        names = [str(name) for name in index["files"]]
        self.others, self.states = state_files.States(), state_files.States()
        for owner, key, value in state_files.unpack(SafetensorsFile(self.path.with_name(_OTHERS_NAME)), {}):
            is_deferred = isinstance(value, DeferredTensor)
            self.others.setdefault(owner, {})[key] = Reader().read_whole(value) if is_deferred else value
        settings = (self.others.pop(f"{_GROUP}{number}", {}) for number in range(len(named_groups)))
        self.groups = [{**found, "params": own} for found, own in zip(settings, named_groups, strict=True)]
        # Files of other machines may be on other disks: a missing file is an error only if its content is needed.
        self._missing = [name for name in names if not self.path.with_name(name).exists()]
        for file in (self.path.with_name(name) for name in names if name not in self._missing):
            for name, key, value in state_files.unpack(SafetensorsFile(file), self.shapes):
                first = self.states.setdefault(name, {}).setdefault(key, value)
                if isinstance(source := getattr(value, "recipe", None), FileSource) and first is not value:
                    first.recipe.pieces += source.pieces

    def check_complete(self, name: str, start: int, stop: int, *, is_verified: bool = False) -> None:
        """Makes sure that the files have the state of some elements of a parameter.

        Args:
            name: The parameter.
            start: The first element.
            stop: One after the last element.
            is_verified: Whether all of them are compared with their checksums, and not only the masters.

        Raises:
            CheckpointError: If they do not, or are damaged.
        """
        found = self.states.get(name, {})
        if not found and self._missing:
            raise CheckpointError(
                f"'{self.path.with_name(self._missing[0])}' is missing; parameter '{name}' is in no other file. Copy "
                "the files of all processes into the directory"
            )
        for key, value in found.items():
            if not isinstance(source := getattr(value, "recipe", None), FileSource):
                continue
            first, last = (start, stop) if source.shape == self.shapes[name] else (0, math.prod(source.shape))
            if (end := source.first_missing(first, last)) < last:
                missing = f"; {', '.join(self._missing)} is missing" if self._missing else ""
                raise CheckpointError(
                    f"'{self.path}': elements {end} to {last} of '{key}' of parameter '{name}' are in no "
                    f"file{missing}. Copy the files of all processes into the directory"
                )
            for _ in source.stream(first, last, PIECE_NUMEL) if is_verified or key == SAVED_MASTER else ():
                pass

    def state_of(self, name: str) -> dict[Any, Any]:
        """The state of a parameter, without its master: torch's optimizers have none. Its tensors are deferred."""
        return {key: value for key, value in self.states.get(name, {}).items() if key != SAVED_MASTER}

    def state_dicts(self) -> list[dict[str, Any]]:
        """The state in the format of ``torch.optim.Optimizer.state_dict``, a dictionary for each optimizer.

        Returns:
            The state dictionaries; their tensors are deferred, and whole where the files have parts.

        Raises:
            CheckpointError: If a file is missing.
        """
        groups = iter(self.groups)
        state_dicts = []
        for number, members in enumerate(self.optimizers):
            places = itertools.count()
            state: dict[Any, Any] = {}
            packed = []
            for names, group in zip(members, groups, strict=False):
                packed.append({**group, "params": [next(places) for _ in names]})
                for place, name in zip(packed[-1]["params"], names, strict=True):
                    if name is not None and name in self.shapes:
                        self.check_complete(name, 0, math.prod(self.shapes[name]))
                    if found := self.others.get(f"{number}.{place}", {}) if name is None else self.state_of(name):
                        state[place] = found
            state_dicts.append({"state": {**state, **self.others.get(f"{number}.-1", {})}, "param_groups": packed})
        return state_dicts
