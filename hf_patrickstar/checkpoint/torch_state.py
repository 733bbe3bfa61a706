"""The training state in torch's own format: ``optimizer.pt``, from which the stock Trainer and plain torch resume.

One process writes the file, and the others send it their parts in pieces. Each process that resumes maps the file into
memory, and reads its own part. The file has no masters: torch's optimizers would keep them without updating them.
"""

import functools
import os
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from hf_patrickstar.checkpoint.deferred import DeferredTensor, StreamedSource
from hf_patrickstar.checkpoint.storage import damaged, replace_file
from hf_patrickstar.checkpoint.torch_file import write_torch
from hf_patrickstar.checkpoint.weight_files import load_torch_file
from hf_patrickstar.dist.sharing import Held, SharedState, Sharing
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.runtime.chunk import ManagedParameter
from hf_patrickstar.runtime.manager import ChunkManager


def torch_paths(directory: str | os.PathLike[str], num: int = 1, name: str = "optimizer.pt") -> list[Path]:
    """The files of optimizer states in a directory: ``optimizer.pt``, ``optimizer_1.pt`` and so on.

    Args:
        directory: The directory.
        num: The number of optimizers.
        name: The name of the first file.
    """
    first = Path(directory) / name
    return [first.with_stem(f"{first.stem}_{number}") if number else first for number in range(num)]


class TorchOptimizers(Protocol):
    """What torch's format needs of the optimizers over chunks."""

    def __len__(self) -> int:
        """The number of optimizers."""
        ...

    def own_state(self, tensor: ManagedParameter) -> dict[str, Any]:
        """This rank's part of a parameter's state, not copied; empty before the first step."""
        ...

    def state_dicts(self, states: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
        """The ``state_dict`` of each optimizer, made of the states of all ranks."""
        ...

    def check_state_dict(self, number: int, state_dict: Mapping[str, Any]) -> None:
        """Raises ``ValueError`` if a state does not belong to the optimizer of this number."""
        ...

    def load_state_dicts(self, state_dicts: Sequence[dict[str, Any]]) -> None:
        """Loads the state of each optimizer; all processes call it together."""
        ...


class _StateSource(StreamedSource):
    """A tensor of an optimizer's state, on any ranks, as the source of a deferred tensor."""

    def __init__(self, sharing: Sharing, held: Held, state: SharedState) -> None:
        self._sharing, self._held, self._key = sharing, held, state.key
        self.shape, self.dtype = state.shape, state.dtype

    def stream(self, start: int, stop: int, piece_numel: int) -> Generator[torch.Tensor, None, None]:
        return self._sharing.parts(self._held, (start, stop), piece_numel, f"'{self._key}'", is_prompt=False)


class TorchState:
    """Saves and loads optimizer states in torch's format.

    Args:
        manager: The manager of the chunks.
        optimizers: The optimizers over them.
    """

    def __init__(self, manager: ChunkManager, optimizers: TorchOptimizers) -> None:
        self._manager = manager
        self._optimizers = optimizers

    def write(self, paths: Sequence[Path], *, is_writer: bool, piece_numel: int) -> None:
        """Writes one file for each optimizer; all processes call it together.

        Args:
            paths: The files; older ones are replaced when the new ones are complete.
            is_writer: Whether this process writes; several processes may, each on its own disk.
            piece_numel: Elements in memory at once.

        Raises:
            CheckpointError: If a file cannot be written, here or by another process.
        """
        sharing = self._manager.sharing
        sharing.enter("saves the optimizer's state")
        own = self._own_states()
        states = sharing.outline_states(own, self._manager.place_of)
        shared = [value for state in states.values() for value in state.values() if isinstance(value, SharedState)]
        held = [
            Held(item.spec, item.parts, own.get(item.spec.index, {}).get(item.key), item.dtype, number)
            for number, item in enumerate(shared)
        ]
        with sharing.led(lambda number: held[number], is_reader=is_writer):
            if not is_writer:
                return
            for item, holding in zip(shared, held, strict=True):
                deferred = DeferredTensor.make(_StateSource(sharing, holding, item))
                states[item.spec.index][item.key] = deferred
            write = functools.partial(write_torch, piece_numel=piece_numel)
            for path, state_dict in zip(paths, self._optimizers.state_dicts(states), strict=True):
                replace_file(path, functools.partial(write, value=state_dict))

    def _own_states(self) -> dict[int, dict[str, Any]]:
        """This rank's parts of the states, not copied, by tensor index."""
        own = {}
        for chunk in self._manager.chunks:
            for tensor in chunk.owned if chunk.spec.is_updated else ():
                state = self._optimizers.own_state(tensor)
                if state:
                    own[tensor.spec.index] = dict(state)
        return own

    def open(self, directory: str | os.PathLike[str]) -> "TorchLoading":
        """Checks saved states against the optimizers. Nothing changes until ``TorchLoading.apply``.

        Args:
            directory: The directory of ``optimizer.pt``.

        Raises:
            CheckpointError: If a file is missing or damaged, or belongs to other optimizers, parameters or groups.
        """
        found = []
        for number, path in enumerate(torch_paths(directory, len(self._optimizers))):
            state_dict = load_torch_file(path)
            try:
                self._optimizers.check_state_dict(number, state_dict)
            except ValueError as error:
                raise CheckpointError(f"'{path}': {error}") from error
            except (KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(damaged(f"'{path}' is not the state of an optimizer: {error!r}")) from error
            found.append(state_dict)
        return TorchLoading(self._manager, self._optimizers, found)


class TorchLoading:
    """Optimizer states that were checked and can be loaded.

    Args:
        manager: The manager of the chunks.
        optimizers: The optimizers over them.
        state_dicts: The states, mapped into memory.
    """

    def __init__(
        self, manager: ChunkManager, optimizers: TorchOptimizers, state_dicts: Sequence[dict[str, Any]]
    ) -> None:
        self._manager, self._optimizers, self._state_dicts = manager, optimizers, state_dicts

    def apply(self) -> None:
        """Loads the states, and drops gradients. All processes call it together."""
        self._manager.begin_loading()
        self._optimizers.load_state_dicts(self._state_dicts)
        self._manager.end_loading()
