"""``save_state`` and ``load_state`` of models in chunks: written in pieces, and complete or not at all."""

import contextlib
import functools
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator

from hf_patrickstar.checkpoint.storage import missing_file, remove_checkpoint
from hf_patrickstar.checkpoint.torch_state import torch_paths
from hf_patrickstar.checkpoint.training_state import has_training_state
from hf_patrickstar.checkpoint.transaction import Checkpoint
from hf_patrickstar.checkpoint.weight_files import FoundWeights, find_weights
from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.integrations.accelerator_optimizers import unwrapped
from hf_patrickstar.model.model_set import roots_of
from hf_patrickstar.optim.optimizer import ChunkedOptimizer

logger = logging.getLogger(__name__)

RANDOM_LOST = "random numbers will differ from those of an uninterrupted run"
_NUMBERED = re.compile(r"checkpoint_(\d+)")


def engine_of(model: torch.nn.Module) -> PatrickStarEngine | None:
    """The engine that is attached to a model, or ``None``."""
    return model.__dict__.get("patrickstar_engine")


def engines_of(models: Iterable[torch.nn.Module]) -> list[PatrickStarEngine]:
    """The engines that are attached to models, each once."""
    return list(dict.fromkeys(engine for model in models if (engine := engine_of(model)) is not None))


def warn_of_missing(
    engine: PatrickStarEngine, directory: str | os.PathLike[str], found: Sequence[Mapping[str, str]]
) -> None:
    """Lets the first process warn of files that a checkpoint lacks, although it can be loaded.

    Args:
        engine: The engine that loads the checkpoint.
        directory: The checkpoint.
        found: Those that each rank misses, each with what is lost.
    """
    if (lost := {name: what for files in found for name, what in files.items()}) and engine.collectives.rank == 0:
        names, what = ", ".join(lost), ", ".join(dict.fromkeys(lost.values()))
        logger.warning("patrickstar: '%s' lacks %s: %s. To resume exactly, copy them there", directory, names, what)


class AcceleratorCheckpoints(Accelerator):
    """The part of ``PatrickStarAccelerator`` that saves and loads."""

    project_configuration: Any
    _models: Any
    _optimizers: Any

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Saves as ``Accelerator.save_state`` does; the directory appears when all of it is on the disk.

        Each process saves its part of the state of optimizers over chunks, in ``optimizer.index.json`` and the files
        that it names; the state of a second engine is in the directory ``optimizer_1``, and so on. With
        ``optimizer_format`` ``"torch"`` the states are in ``optimizer.bin``, ``optimizer_1.bin`` and so on, which
        Accelerate itself reads.

        Args:
            output_dir: As for ``Accelerator.save_state``.
            safe_serialization: As for ``Accelerator.save_state``; if false, a copy of the model is made in memory.
            **kwargs: As for ``Accelerator.save_state``.

        Returns:
            The directory.

        Raises:
            CheckpointError: If the checkpoint cannot be written; an older one stays unchanged.
        """
        engines = self._engines()
        if not (trained := [engine for engine in engines if engine.training_state is not None]):
            return super().save_state(output_dir, safe_serialization, **kwargs)
        configuration = self.project_configuration
        if is_numbered := configuration.automatic_checkpoint_naming:
            if (final := self._numbered_directories() / f"checkpoint_{self.save_iteration}").exists():
                raise ValueError(
                    f"'{final}' already exists; set project_configuration.iteration to the number to go on with"
                )
        elif output_dir is None:
            raise ValueError("save_state needs output_dir, or automatic_checkpoint_naming")
        else:
            final = Path(output_dir)
        first = trained[0]
        with first.checkpoints.writing(final) as checkpoint:
            for engine, directory in zip(trained[1:], _state_directories(checkpoint.path, trained)[1:], strict=True):
                directory.mkdir(exist_ok=True)
                engine.checkpoints.begin_state(checkpoint, directory, self._torch_paths(engine, checkpoint))
                engine.checkpoints.end_state(checkpoint, directory)
            first.checkpoints.begin_state(checkpoint, None, self._torch_paths(first, checkpoint))
            with contextlib.ExitStack() as stack, self._without_chunked_optimizers():
                # The streamed engine comes last: where it is read, other processes wait until all has been saved.
                for engine in sorted(engines, key=lambda engine: engine is first):
                    is_streamed = engine is first and safe_serialization
                    gather = engine.weights.streamed if is_streamed else engine.weights.collected
                    stack.enter_context(gather(is_reader=self.is_main_process))
                # In Accelerate's automatic naming all processes would wait for each other.
                stack.enter_context(mock.patch.object(configuration, "automatic_checkpoint_naming", False))
                super().save_state(str(checkpoint.path), safe_serialization, **kwargs)
            first.checkpoints.end_state(checkpoint)
            if is_numbered:
                checkpoint.on_commit = self._rotate
        return final

    def _torch_paths(self, engine: PatrickStarEngine, checkpoint: Checkpoint) -> list[Path]:
        """The files from which Accelerate can read the states of an engine's optimizers; empty if it need not."""
        prepared = [unwrapped(item) for item in self._optimizers]
        if engine.config.optimizer_format != "torch":
            return []
        for optimizer in prepared:
            if not isinstance(optimizer, ChunkedOptimizer):
                raise CheckpointError(
                    f"optimizer_format='torch' cannot be used with save_state: a prepared {type(optimizer).__name__} "
                    "is over no model in chunks, and Accelerate would give its file the name of another; set "
                    "optimizer_format to 'sharded'"
                )
        paths = torch_paths(checkpoint.path, len(prepared), "optimizer.bin")
        return [paths[prepared.index(optimizer)] for optimizer in engine.optimizers]

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> Any:
        """Like ``Accelerator.get_state_dict``; while a model is saved, tied parameters have only their first name.

        If another process saves the model, the dictionary is empty.

        Args:
            model: The model.
            unwrap: As for ``Accelerator.get_state_dict``.
        """
        engine = engine_of(model)
        if engine is not None and engine.weights.is_elsewhere:
            return {}
        state = super().get_state_dict(model, unwrap)
        if engine is None or not engine.weights.is_streaming:
            return state
        first = {id(value): name for name, value in reversed(state.items())}
        return {name: value for name, value in state.items() if first[id(value)] == name}

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """Loads what ``save_state`` saved, with any number of processes; each process reads only its part.

        Args:
            input_dir: As for ``Accelerator.load_state``.
            load_kwargs: As for ``Accelerator.load_state``.
            **load_model_func_kwargs: As for ``Accelerator.load_state``.

        Raises:
            CheckpointError: If something is missing, damaged or does not fit; nothing has changed then.
        """
        load_model_func_kwargs.setdefault("map_location", "cpu")
        engines = [engine for engine in self._engines() if engine.training_state is not None]
        for engine in engines:
            engine.checkpoints.wait()
        if engines and input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            parent = self._numbered_directories()
            if not (numbered := _numbered(parent)):
                raise CheckpointError(f"'{parent}' has no checkpoint; give load_state the directory of one")
            input_dir = str(numbered[-1])
        if not engines or input_dir is None or not os.path.isdir(input_dir):
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
            return
        strict, directory = load_model_func_kwargs.get("strict", True), Path(input_dir)
        states = _state_directories(directory, engines)
        with contextlib.ExitStack() as stack:
            if has_training_state(directory):
                stack.enter_context(self._without_chunked_optimizers())
                for engine, state in zip(engines, states, strict=True):
                    engine.checkpoints.together(functools.partial(_check_presence, state))
                    engine.checkpoints.check_state(state)
            engines[0].checkpoints.together(functools.partial(self._check_others, directory))
            missing = engines[0].collectives.exchange(self._missing_others(directory), "looks for missing files")
            warn_of_missing(engines[0], directory, missing)
            found = [FoundWeights() for _ in engines]
            if self._load_model_state_pre_hook:  # the hooks get all models, and may load them
                super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
            else:
                for number, engine in enumerate(engines):
                    find = functools.partial(self._find_weights, engine, directory, strict)
                    found[number] = engine.checkpoints.together(find)
            # After what hooks have loaded: masters have more bits.
            for engine, weights, state in zip(engines, found, states, strict=True):
                engine.checkpoints.load_parts(weights, state)
            if not self._load_model_state_pre_hook:
                models = [_Loaded() if engine_of(model) in engines else model for model in self._models]
                stack.enter_context(mock.patch.object(self, "_models", models))
                super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)

    def _check_others(self, directory: Path) -> None:
        """Raises ``CheckpointError`` if a file is missing that Accelerate would miss when the weights are loaded."""
        kinds = {"optimizer.bin": self._optimizers, "scheduler.bin": self._schedulers}
        paths = [path for name, items in kinds.items() for path in torch_paths(directory, len(items), name)]
        for path in paths if self.scaler is None else [*paths, directory / "scaler.pt"]:
            if not path.is_file():
                raise CheckpointError(missing_file(path))

    def _missing_others(self, directory: Path) -> dict[str, str]:
        """Files without which Accelerate goes on in silence, and what is lost then."""
        paths = torch_paths(directory, len(self._dataloaders), "dl_state_dict.bin")
        wanted = {
            path.name: "its data loader starts from the beginning"
            for path, loader in zip(paths, self._dataloaders, strict=True)
            if getattr(loader, "use_stateful_dataloader", False)
        }
        wanted[f"random_states_{self.process_index}.pkl"] = RANDOM_LOST
        return {name: what for name, what in wanted.items() if not (directory / name).is_file()}

    def _find_weights(self, engine: PatrickStarEngine, directory: Path, strict: bool) -> FoundWeights:
        """The weights of an engine's models, under the names that parameters have in the engine."""
        all_found = FoundWeights()
        roots = {id(root): number for number, root in enumerate(roots_of(engine.model))}
        for place, model in enumerate(self._models):
            if engine_of(model) is not engine:
                continue
            ending = f"_{place}" if place else ""
            path = directory / f"model{ending}.safetensors"
            path = path if path.is_file() else directory / f"pytorch_model{ending}.bin"
            found = find_weights(model, path, engine.device)
            if strict and (found.missing_keys or found.unexpected_keys):
                raise CheckpointError(
                    f"'{path}' has no values for {found.missing_keys}, and has {found.unexpected_keys} that the model "
                    "does not know; pass strict=False to load the rest"
                )
            prefix = "" if model is engine.model else f"{roots[id(model)]}."
            all_found.values.update({prefix + name: value for name, value in found.values.items()})
        return all_found

    def _engines(self) -> list[PatrickStarEngine]:
        """The engines of the prepared models, each once; they follow changes of their models first."""
        engines = engines_of(self._models)
        for engine in engines:
            engine.follow_model()
        return engines

    def _without_chunked_optimizers(self) -> contextlib.AbstractContextManager[Any]:
        """Hides optimizers over chunks from Accelerate."""
        others = [item for item in self._optimizers if not isinstance(unwrapped(item), ChunkedOptimizer)]
        return mock.patch.object(self, "_optimizers", others)

    # Automatic names

    def _numbered_directories(self) -> Path:
        return Path(str(self.project_dir)) / "checkpoints"

    def _rotate(self) -> None:
        limit = self.project_configuration.total_limit
        found = _numbered(self._numbered_directories())
        for path in found[: max(len(found) - limit, 0)] if limit is not None else []:
            remove_checkpoint(path)


def _state_directories(directory: Path, engines: Sequence[PatrickStarEngine]) -> list[Path]:
    """The directories of the training states of engines that have optimizers, in the order of their models."""
    return [directory / f"optimizer_{number}" if number else directory for number in range(len(engines))]


def _check_presence(directory: Path) -> None:
    if not has_training_state(directory):
        raise CheckpointError(f"'{directory}' has no training state; prepare the models and optimizers that were saved")


class _Loaded(torch.nn.Module):
    """A dummy model that ignores the weights that it is given."""

    def load_state_dict(self, *_args: Any, **_kwargs: Any) -> tuple[list[str], list[str]]:  # type: ignore[override]
        """Does nothing."""
        return [], []


def _numbered(parent: Path) -> list[Path]:
    """The automatically named checkpoints, the oldest first."""
    names = [(int(match[1]), path) for path in parent.glob("*") if (match := _NUMBERED.fullmatch(path.name))]
    return [path for _, path in sorted(names)]
