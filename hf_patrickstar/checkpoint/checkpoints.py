"""Complete checkpoints of an engine: weights in common file formats, and the training state."""

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from hf_patrickstar.checkpoint.deferred import Reader
from hf_patrickstar.checkpoint.found_weights import FoundWeights, find_weights, shape_mismatch
from hf_patrickstar.checkpoint.origins import origin_of
from hf_patrickstar.checkpoint.progress import shown
from hf_patrickstar.checkpoint.read_me import write_read_me
from hf_patrickstar.checkpoint.safetensors_file import SafetensorsFile, streamed_writing
from hf_patrickstar.checkpoint.storage import StagedDirectory, missing_file, remove_leftovers
from hf_patrickstar.checkpoint.torch_state import TorchLoading, TorchState, torch_paths
from hf_patrickstar.checkpoint.training_state import INDEX_NAME, Loading, TrainingState
from hf_patrickstar.checkpoint.transaction import Checkpoint, Transactions
from hf_patrickstar.checkpoint.weights import ChunkWeights
from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.memory.operators import unseen
from hf_patrickstar.runtime.chunk import ManagedParameter
from hf_patrickstar.runtime.manager import ChunkManager

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_WEIGHTS_NAME = "model.safetensors"
_ADAPTER_NAME = "adapter_model.safetensors"


class Checkpoints:
    """Saves and loads the weights and the training state of an engine.

    Args:
        model: The model.
        manager: The manager of its chunks.
        weights: Reads and writes its parameters.
        state: Its training state; empty if no optimizer trains it.
        collectives: The processes that share it.
        config: Settings; ``optimizer_format`` and ``background_save`` are used.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        manager: ChunkManager,
        weights: ChunkWeights,
        state: TrainingState,
        collectives: Collectives,
        config: PatrickStarConfig,
    ) -> None:
        self._is_sharded = config.optimizer_format != "torch"
        self._is_torch = config.optimizer_format != "sharded"
        self._in_background = config.background_save
        self._model = model
        self._manager = manager
        self._weights = weights
        self.state = state
        self.torch_state = TorchState(manager, state.optimizer)
        self._collectives = collectives
        self._transactions = Transactions(collectives, manager.sharing.enter)

    # Saving

    def writing(self, final: str | os.PathLike[str]) -> contextlib.AbstractContextManager[Checkpoint]:
        """Writes a checkpoint that appears complete or not at all; see ``Transactions.writing``.

        Args:
            final: The directory of the finished checkpoint.
        """
        return self._transactions.writing(final)

    def wait(self) -> None:
        """Waits until a checkpoint that is written in the background is complete; see ``Transactions.wait``."""
        self._transactions.wait()

    def close(self) -> None:
        """Waits until the background threads of this process have ended; see ``Transactions.close``."""
        self._transactions.close()

    @unseen()
    def save(self, directory: str | os.PathLike[str]) -> None:
        """Saves weights and training state; all processes call it together.

        Args:
            directory: The checkpoint's directory; it appears when all of it is on the disk.

        Raises:
            CheckpointError: If the checkpoint cannot be written; an older one in its place stays unchanged.
        """
        with self.writing(directory) as checkpoint:
            self.begin_state(checkpoint)
            self._save_weights(checkpoint.path)
            self.end_state(checkpoint)

    @unseen()
    def begin_state(self, checkpoint: Checkpoint) -> None:
        """Starts a thread in each process that saves its part of the training state; the model may be saved meanwhile.

        Args:
            checkpoint: The checkpoint.

        Raises:
            CheckpointError: If the index cannot be written, or a state cannot be saved without pickling it.
        """
        if not self.state.is_empty and self._is_sharded:
            with_index = self._collectives.rank in checkpoint.makers
            checkpoint.write = self.state.save_in_background(checkpoint.path, with_index=with_index)

    @unseen()
    def end_state(self, checkpoint: Checkpoint, paths: Sequence[Path] | None = None) -> None:
        """Writes the training state in torch's format, if the settings ask for it; all processes call it together.

        Without ``background_save`` it also waits for the thread that ``begin_state`` has started.

        Args:
            checkpoint: The checkpoint.
            paths: The files in torch's format, one for each optimizer; by default ``optimizer.pt`` and so on.

        Raises:
            CheckpointError: If a file cannot be written.
        """
        is_maker = self._collectives.rank in checkpoint.makers
        self._complete_state(checkpoint.path, paths, is_maker=is_maker, older=checkpoint.staged.final)
        if checkpoint.write is None or self._in_background:
            return
        write, checkpoint.write = checkpoint.write, None
        write.join()
        if write.error is not None:
            raise write.error

    @unseen()
    def save_state(
        self, directory: str | os.PathLike[str], *, is_maker: bool, paths: Sequence[Path] | None = None
    ) -> None:
        """Saves the training state alone; all processes call it together.

        Args:
            directory: A directory that exists.
            is_maker: Whether this process also writes the files that exist once for all, or once on each disk.
            paths: See ``end_state``.

        Raises:
            CheckpointError: If a file cannot be written.
        """
        if self._is_sharded and not self.state.is_empty:
            self.state.save(directory, with_index=is_maker)
        self._complete_state(directory, paths, is_maker=is_maker)

    def _complete_state(
        self,
        directory: str | os.PathLike[str],
        paths: Sequence[Path] | None,
        *,
        is_maker: bool,
        older: Path | None = None,
    ) -> None:
        """Writes the state in torch's format, and the ``README.md`` that explains the files of the processes."""
        if self.state.is_empty:
            return
        if self._is_torch:
            paths = paths or torch_paths(directory, len(self.state.optimizer))
            self.torch_state.write(paths, is_writer=is_maker, piece_numel=self._weights.piece_numel)
        if self._is_sharded and is_maker:
            write_read_me(directory, older)

    def _save_weights(self, directory: Path) -> None:
        is_main = self._collectives.rank == 0
        with self._weights.streamed(is_reader=is_main):
            if not is_main:
                return
            model: Any = self._model
            if hasattr(model, "save_pretrained"):
                model.save_pretrained(directory)
                return
            import safetensors.torch

            with streamed_writing(self._weights.piece_numel):
                state = model.state_dict()
                tensors = {name: v.contiguous() for name, v in state.items() if isinstance(v, torch.Tensor)}
                for name in state.keys() - tensors.keys():
                    logger.warning("patrickstar: '%s' of the model is no tensor and is not saved", name)
                safetensors.torch.save_file(tensors, directory / _WEIGHTS_NAME, metadata={"format": "pt"})

    # Loading

    @unseen()
    def load(self, directory: str | os.PathLike[str]) -> FoundWeights:
        """Loads what ``save`` saved; the number of processes, chunk size, budgets and devices may differ.

        Without a training state in the directory the optimizer keeps its own, with a warning.

        Args:
            directory: The checkpoint's directory.

        Returns:
            The weights that were found, and the names that did not match.

        Raises:
            CheckpointError: If something is missing, damaged or does not fit; nothing has changed then.
        """
        self._manager.sharing.enter("loads a checkpoint")
        self.wait()
        if self._collectives.rank == 0:
            staged = StagedDirectory(directory)
            staged.recover()
            remove_leftovers(staged.final.parent)
            if not (self.state.is_empty or has_training_state(directory) or has_torch_state(directory)):
                logger.warning(
                    "patrickstar: '%s' has neither %s nor optimizer.pt: the optimizer keeps the state that it has",
                    directory,
                    INDEX_NAME,
                )
        if self.together(lambda: bool(adapter_directories(self._model, directory))):
            self.check_state(directory)
            with self._manager.model_lock.held("loading adapters"):
                self._load_adapters(directory)
            return self.load_parts(None, directory)
        found = self.together(lambda: self._find_all(directory))
        return self.load_parts(found, directory)

    @unseen()
    def load_weights(self, path: str | os.PathLike[str]) -> FoundWeights:
        """Loads weights alone; all processes call it together.

        Args:
            path: A directory or a file; see ``open_weights``.

        Returns:
            The weights that were found, and the names that did not match.

        Raises:
            CheckpointError: If something is missing, damaged or does not fit, here or on another process; nothing has
                changed then.
        """
        self._manager.sharing.enter("loads weights")
        self.wait()
        return self.load_parts(self.together(lambda: find_weights(self._model, path, self._manager.values.device)))

    def _find_all(self, directory: str | os.PathLike[str]) -> FoundWeights:
        """The weights in a directory; raises ``CheckpointError`` if a parameter has none."""
        found = find_weights(self._model, directory, self._manager.values.device)
        names = dict(self._model.named_parameters(remove_duplicate=False))
        missing = [name for name in found.missing_keys if name in names]
        if missing:
            raise CheckpointError(
                f"'{directory}' has no value for '{missing[0]}', and {len(missing) - 1} more; give a checkpoint of "
                "the same model, saved whole"
            )
        return found

    def _load_adapters(self, directory: str | os.PathLike[str]) -> None:
        """Lets PEFT read the adapters, which are small, and find their parameters by name."""
        from peft import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

        def check() -> None:
            for name, path in adapter_directories(self._model, directory).items():
                if not (path / _ADAPTER_NAME).is_file():
                    raise CheckpointError(missing_file(path / _ADAPTER_NAME))
                file = SafetensorsFile(path / _ADAPTER_NAME)
                for key, value in get_peft_model_state_dict(self._model, adapter_name=name).items():
                    if key not in file.entries:
                        raise CheckpointError(
                            f"'{file.path}' has no tensor '{key}'; load a checkpoint of the same adapters"
                        )
                    if file.entries[key].shape != tuple(value.shape):
                        raise CheckpointError(shape_mismatch(key, file.deferred(key), tuple(value.shape)))

        with self._weights.streamed(is_reader=True):  # names and shapes without values
            self.together(check)
        self._manager.begin_loading()
        for name, path in adapter_directories(self._model, directory).items():
            set_peft_model_state_dict(self._model, load_peft_weights(str(path), device="cpu"), adapter_name=name)

    def together(self, function: Callable[[], _T]) -> _T:
        """Calls a function on all processes; if it fails on one of them, all raise. All processes call it together.

        Args:
            function: The function; it must not communicate with other processes.

        Returns:
            The result of the function.

        Raises:
            CheckpointError: If the function raised ``CheckpointError``, here or on another process.
        """
        error: CheckpointError | None = None
        try:
            result = function()
        except CheckpointError as raised:
            error = raised
        texts = self._collectives.exchange(None if error is None else str(error), "loads a checkpoint")
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text is not None:
                raise CheckpointError(f"rank {rank} cannot load the checkpoint: {text}")
        return result

    @unseen()
    def load_parts(
        self, found: FoundWeights | None, state_directory: str | os.PathLike[str] | None = None
    ) -> FoundWeights:
        """Loads weights that were found, and a training state; all processes call it together.

        Args:
            found: The weights; with ``None`` the model keeps its own.
            state_directory: The directory of a training state, in this package's format or as ``optimizer.pt``. If it
                has neither, or with ``None``, the optimizer keeps its state.

        Raises:
            CheckpointError: If something does not fit, here or on another process; nothing has changed then.
        """
        self.wait()
        found = found or FoundWeights({}, [], [])
        loading = self._open(found, state_directory)
        with self._manager.model_lock.held("loading a checkpoint"):
            self._apply(found)
            if loading is not None:
                loading.apply()
        self._manager.sharing.meet("loads a checkpoint")  # one process may have a slower disk
        return found

    def check_state(self, directory: str | os.PathLike[str]) -> None:
        """Makes sure that a training state, if one is there, can be loaded; all processes call it together.

        Args:
            directory: The directory of the training state.

        Raises:
            CheckpointError: If it cannot be loaded, here or on another process.
        """
        self._open(FoundWeights({}, [], []), directory)

    def _open(
        self, found: FoundWeights, state_directory: str | os.PathLike[str] | None
    ) -> Loading | TorchLoading | None:
        """Checks what is to be loaded, on all processes, before any of them changes something."""

        def open_all() -> Loading | TorchLoading | None:
            self._check(found)
            if self.state.is_empty or state_directory is None:
                return None
            if has_training_state(state_directory):
                return self.state.open(state_directory)
            return self.torch_state.open(state_directory) if has_torch_state(state_directory) else None

        return self.together(open_all)

    def _check(self, found: FoundWeights) -> None:
        for tensor in self._manager.tensors:
            value = _value_of(tensor, found.values)
            if value is not None and tuple(value.shape) != tensor.spec.shape:
                raise CheckpointError(shape_mismatch(tensor.spec.name, value, tensor.spec.shape))

    @torch.no_grad()
    def _apply(self, found: FoundWeights) -> None:
        if not found.values:
            return
        reader, piece_numel = Reader(), self._weights.piece_numel
        self._manager.begin_loading()
        tensors, is_first = [t for chunk in self._manager.chunks for t in chunk.owned], self.state.rank == 0
        for tensor in shown(tensors, "Reading weights", "tensors", is_first=is_first):
            value = _value_of(tensor, found.values)
            if value is None:
                continue
            value = value.to(tensor.original_dtype)
            start = tensor.part[0]
            self._manager.load(tensor, lambda home: reader.fill(home, value, start, piece_numel))  # noqa: B023
            tensor.origin = origin_of(value) if tensor.is_rounded else None
        for name, buffer in self._model.named_buffers():
            if name in found.values:
                buffer.copy_(reader.read(found.values[name]).view(buffer.shape))
        self._manager.end_loading()


def has_training_state(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory has a training state in this package's format, or only some files of one."""
    return any(any(Path(directory).glob(name)) for name in (INDEX_NAME, "optimizer-*.safetensors"))


def has_torch_state(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory has an ``optimizer.pt``, or one of a later optimizer."""
    return any(any(Path(directory).glob(name)) for name in ("optimizer.pt", "optimizer_[0-9]*.pt"))


def adapter_directories(model: torch.nn.Module, directory: str | os.PathLike[str]) -> dict[str, Path]:
    """The directories of a PEFT model's adapters in a checkpoint, by adapter name; empty if no adapter has its file.

    Args:
        model: The model.
        directory: The checkpoint.
    """
    names = getattr(model, "peft_config", None) or {}
    places = {name: Path(directory) / ("" if name == "default" else name) for name in names}
    return places if any((path / _ADAPTER_NAME).is_file() for path in places.values()) else {}


def _value_of(tensor: ManagedParameter, values: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    return next((values[name] for name in (tensor.spec.name, *tensor.spec.aliases) if name in values), None)
