"""Complete checkpoints of an engine: weights in common file formats, and the training state."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch

from hf_patrickstar.checkpoint.deferred import Reader
from hf_patrickstar.checkpoint.progress import shown
from hf_patrickstar.checkpoint.storage import StagedDirectory, remove_leftovers
from hf_patrickstar.checkpoint.torch_state import begin_torch_state, open_torch_state, torch_paths
from hf_patrickstar.checkpoint.training_state import INDEX_NAME, TrainingState, has_training_state, write_read_me
from hf_patrickstar.checkpoint.transaction import Checkpoint, Transactions
from hf_patrickstar.checkpoint.weight_files import FoundWeights, find_weights, origin_of, shape_mismatch
from hf_patrickstar.checkpoint.weights import ChunkWeights
from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.memory.operators import unseen
from hf_patrickstar.runtime.parameter import ManagedParameter

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_NUM_WATCHED = 100
"""Losses and norms after a resume that are looked at."""


class Checkpoints(Transactions):
    """Saves and loads the weights and the training state of an engine.

    Args:
        model: The model.
        weights: Reads and writes its parameters.
        state: Its training state; empty if no optimizer trains it.
        config: Settings; ``optimizer_format`` and ``background_save`` are used.
    """

    def __init__(
        self, model: torch.nn.Module, weights: ChunkWeights, state: TrainingState, config: PatrickStarConfig
    ) -> None:
        super().__init__(state.collectives, state.manager.sharing.enter)
        self._config = config
        self._model = model
        self._manager = state.manager
        self._weights = weights
        self.state = state
        self._loaded = ""
        self._num_watched = 0  # losses and norms that are still to be looked at since something was loaded
        self._is_alone = self._manager.sharing.is_alone
        self._is_told = self._is_alone or state.collectives.rank > 0 or config.optimizer_format != "auto"

    # Saving

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
            is_main = self._collectives.rank == 0
            with self._weights.streamed(is_reader=is_main):
                if is_main:
                    self._save_weights(checkpoint.path)
            self.end_state(checkpoint)

    @unseen()
    def begin_state(
        self, checkpoint: Checkpoint, directory: Path | None = None, paths: Sequence[Path] | None = None
    ) -> None:
        """Starts a thread in each process that saves its part of the training state; the model may be saved meanwhile.

        Args:
            checkpoint: The checkpoint.
            directory: Where in it; by default the checkpoint itself.
            paths: The files in torch's format, one for each optimizer; by default ``optimizer.pt`` and so on.

        Raises:
            CheckpointError: If the index cannot be written, or a state cannot be saved without pickling it.
        """
        if self.state.is_empty:
            return
        place, form = directory or checkpoint.path, self._config.optimizer_format
        is_torch = form == "torch" or (form == "auto" and self._is_alone and paths is None)
        checkpoint.paths = (paths or torch_paths(place, len(self.state.optimizers))) if is_torch else ()
        if not is_torch:
            file = self.state.begin_save(place, with_index=self._collectives.rank in checkpoint.makers)
        elif self._is_alone:
            file, _ = begin_torch_state(self.state, checkpoint.paths)
        else:
            return
        file.start(self._weights.piece_numel)
        checkpoint.write = file

    @unseen()
    def end_state(self, checkpoint: Checkpoint, directory: Path | None = None) -> None:
        """Writes the training state in torch's format, if several processes have to; all processes call it together.

        Without ``background_save``, or with ``directory``, it waits for the thread that ``begin_state`` has started.

        Args:
            checkpoint: The checkpoint.
            directory: See ``begin_state``.

        Raises:
            CheckpointError: If a file cannot be written.
        """
        if self.state.is_empty:
            return
        is_maker, final = self._collectives.rank in checkpoint.makers, checkpoint.final
        if checkpoint.paths and not self._is_alone:
            file, held = begin_torch_state(self.state, checkpoint.paths)
            with self._manager.sharing.led(lambda number: held[number], is_reader=is_maker):
                if is_maker:
                    file.write(piece_numel=self._weights.piece_numel)
        if is_maker and not checkpoint.paths:
            write_read_me(directory or checkpoint.path, final)
        if not self._is_told:
            self._is_told = True
            text = "patrickstar: the stock Trainer reads no pieces; for optimizer.pt run: hf-patrickstar export %s"
            logger.warning(text, final)
        if checkpoint.write is not None and (directory or not self._config.background_save):
            write, checkpoint.write = checkpoint.write, None
            if (error := write.join()) is not None:
                raise error

    def _save_weights(self, directory: Path) -> None:
        model: Any = self._model
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(directory)
            return
        state = model.state_dict()
        tensors = {name: v.contiguous() for name, v in state.items() if isinstance(v, torch.Tensor)}
        for name in state.keys() - tensors.keys():
            logger.warning("patrickstar: '%s' of the model is no tensor and is not saved", name)
        safetensors.torch.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

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
                text = "patrickstar: '%s' has neither %s nor optimizer.pt: the optimizer keeps the state that it has"
                logger.warning(text, directory, INDEX_NAME)
        with self._weights.streamed(is_reader=True):  # PEFT looks at names and shapes of the state_dict
            found = self.together(lambda: self._find_all(directory))
        return self.load_parts(found, directory)

    @unseen()
    def load_weights(
        self, path: str | os.PathLike[str], state_directory: str | os.PathLike[str] | None = None
    ) -> FoundWeights:
        """Loads weights, and a training state if asked to; all processes call it together.

        Args:
            path: A directory or a file; see ``open_weights``.
            state_directory: See ``load_parts``.

        Returns:
            The weights that were found, and the names that did not match.

        Raises:
            CheckpointError: If something is missing, damaged or does not fit, here or on another process; nothing has
                changed then.
        """
        self._manager.sharing.enter("loads weights")
        self.wait()
        found = self.together(lambda: find_weights(self._model, path, self._manager.device.torch_device))
        self._loaded = str(path)
        return self.load_parts(found, state_directory)

    def _find_all(self, directory: str | os.PathLike[str]) -> FoundWeights:
        """The weights in a directory; raises ``CheckpointError`` if a parameter has none."""
        found = find_weights(self._model, directory, self._manager.device.torch_device)
        names = dict(self._model.named_parameters(remove_duplicate=False))
        if missing := [name for name in found.missing_keys if name in names]:
            raise CheckpointError(
                f"'{directory}' has no value for '{missing[0]}', and {len(missing) - 1} more; give a checkpoint of "
                "the same model, saved whole"
            )
        return found

    def together(self, function: Callable[[], _T]) -> _T:
        """Calls a function on all processes; if it fails on one of them, all raise. All processes call it together.

        Args:
            function: The function; it must not communicate with other processes.

        Returns:
            The result of the function.

        Raises:
            CheckpointError: If the function raised ``CheckpointError``, here or on another process.
        """
        try:
            result = function()
        except CheckpointError as error:
            self._first_failure(error, "loads a checkpoint")
            raise
        if (failed := self._first_failure(None, "loads a checkpoint")) is not None:
            rank, text = failed
            raise CheckpointError(f"rank {rank} cannot load the checkpoint: {text}")
        return result

    @unseen()
    def load_parts(self, found: FoundWeights, state_directory: str | os.PathLike[str] | None = None) -> FoundWeights:
        """Loads weights that were found, and a training state; all processes call it together.

        Args:
            found: The weights; what has none keeps its own.
            state_directory: The directory of a training state, in this package's format or as ``optimizer.pt``. If it
                has neither, or with ``None``, the optimizer keeps its state.

        Raises:
            CheckpointError: If something does not fit, here or on another process; nothing has changed then.
        """
        self.wait()
        is_fresh = self._is_fresh()
        opened = self.together(lambda: self._open(found, state_directory, is_fresh))
        with self._manager.lock.held("loading a checkpoint"), torch.no_grad():
            if found.values or opened is not None:
                self._manager.begin_loading()
                if opened is not None:
                    self._load_state(opened[0], is_fresh)
                self._apply(found.values, {} if opened is None else opened[1])
                self._manager.end_loading()
        self._manager.sharing.meet("loads a checkpoint")  # one process may have a slower disk
        self._loaded, self._num_watched = str(state_directory or self._loaded), _NUM_WATCHED
        return found

    def _is_fresh(self) -> bool:
        """Whether the optimizers have no state yet on any process; all processes call it together."""
        return all(self._collectives.exchange(self.state.is_fresh, "loads a checkpoint"))

    def _load_state(self, load: Callable[[], None], is_fresh: bool) -> None:
        """Loads the training state before any weight; if it is damaged, an optimizer without a state has none again."""
        before = self.state.state_dicts({}) if is_fresh else None
        try:
            self.together(load)
        except CheckpointError:
            if before is not None:
                self.state.load_state_dicts(before)
                self.state.load_other_states({})
            raise

    def note(self, value: torch.Tensor | None, what: str) -> None:
        """Warns of the first value since something was loaded that is not finite.

        Only the first values are looked at: each look waits for the device.

        Args:
            value: A loss, or the norm of gradients.
            what: What it is.
        """
        if value is None or not self._num_watched:
            return
        self._num_watched -= 1
        if not bool(value.detach().isfinite().all()):
            text = "patrickstar: the %s is not finite, for the first time since '%s' was loaded; weights have no "
            text += "checksums; verify other files by: hf-patrickstar check %s"
            logger.warning(text, what, self._loaded, self._loaded)
            self._num_watched = 0

    def check_state(self, directory: str | os.PathLike[str]) -> None:
        """Makes sure that a training state, if one is there, can be loaded; all processes call it together.

        Args:
            directory: The directory of the training state.

        Raises:
            CheckpointError: If it cannot be loaded, here or on another process.
        """
        is_fresh = self._is_fresh()
        self.together(lambda: self._open(FoundWeights(), directory, is_fresh))

    def _open(
        self, found: FoundWeights, directory: str | os.PathLike[str] | None, is_fresh: bool
    ) -> tuple[Callable[[], None], Mapping[str, torch.Tensor]] | None:
        """Checks what is to be loaded; returns what ``TrainingState.open`` does, if there is a training state."""
        for tensor in self._manager.tensors:
            if (value := _value_of(tensor, found.values)) is not None and tuple(value.shape) != tensor.spec.shape:
                raise CheckpointError(shape_mismatch(tensor.spec.name, value, tensor.spec.shape))
        if self.state.is_empty or directory is None:
            return None
        if has_training_state(directory):
            return self.state.open(directory, is_verified=not is_fresh)
        return open_torch_state(self.state, directory, is_verified=not is_fresh) if has_torch_state(directory) else None

    def _apply(self, values: Mapping[str, torch.Tensor], masters: Mapping[str, torch.Tensor]) -> None:
        """Loads weights, or masters where there are any: they have more bits."""
        reader, piece_numel, found = Reader(), self._weights.piece_numel, {**values, **masters}
        tensors = [t for chunk in self._manager.chunks for t in chunk.owned if _value_of(t, found) is not None]
        for tensor in shown(tensors, "Reading weights", "tensors", is_first=self._collectives.rank == 0):
            master, start = masters.get(tensor.spec.name), tensor.part[0]
            value = _value_of(tensor, values).to(tensor.original_dtype) if master is None else master
            self._manager.load(tensor, lambda home: reader.fill(home, value, start, piece_numel))  # noqa: B023
            tensor.origin = origin_of(value) if tensor.is_rounded else None
        for name, buffer in self._model.named_buffers():
            if name in values:
                buffer.copy_(reader.read(values[name]).view(buffer.shape))


def has_torch_state(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory has an ``optimizer.pt``, or one of a later optimizer."""
    return any(any(Path(directory).glob(name)) for name in ("optimizer.pt", "optimizer_[0-9]*.pt"))


def _value_of(tensor: ManagedParameter, values: Mapping[str, torch.Tensor]) -> Any:
    """The saved weight of a parameter, or ``None``."""
    return next((values[name] for name in (tensor.spec.name, *tensor.spec.aliases) if name in values), None)
