"""``save_state`` and ``load_state`` of models in chunks: written in pieces, and complete or not at all."""

import contextlib
import dataclasses
import functools
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from hf_patrickstar.checkpoint.checkpoints import has_training_state
from hf_patrickstar.checkpoint.found_weights import FoundWeights, find_weights
from hf_patrickstar.checkpoint.storage import describe_failure, missing_file, remove_checkpoint
from hf_patrickstar.checkpoint.torch_state import torch_paths
from hf_patrickstar.checkpoint.transaction import Checkpoint
from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.integrations.accelerator_optimizers import unwrapped
from hf_patrickstar.optim.optimizer import ChunkedOptimizer
from hf_patrickstar.runtime.together import roots_of

logger = logging.getLogger(__name__)

RANDOM_LOST = "random numbers will differ from those of an uninterrupted run"
_NUMBERED = re.compile(r"checkpoint_(\d+)")


def get_engine(model: torch.nn.Module) -> PatrickStarEngine | None:
    """The engine that is attached to a model, or ``None``."""
    return model.__dict__.get("patrickstar_engine")


@contextlib.contextmanager
def having(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an object another value of an attribute inside the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def missing_anywhere(engine: PatrickStarEngine, missing: Mapping[str, str]) -> Sequence[Mapping[str, str]]:
    """What each rank misses of a checkpoint; all processes call it together.

    Args:
        engine: The engine that loads the checkpoint.
        missing: The files that this process misses, each with what is lost without it.
    """
    found: Sequence[Mapping[str, str]] = engine.collectives.exchange(dict(missing), "looks for missing files")
    return found


def warn_of_missing(
    engine: PatrickStarEngine, directory: str | os.PathLike[str], found: Sequence[Mapping[str, str]]
) -> None:
    """Lets the first process warn of files that a checkpoint lacks, although it can be loaded.

    Args:
        engine: The engine that loads the checkpoint.
        directory: The checkpoint.
        found: What ``missing_anywhere`` found.
    """
    lost = {name: what for files in found for name, what in files.items()}
    if lost and engine.collectives.rank == 0:
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
        ``optimizer_format`` ``"torch"`` or ``"both"``, the states are in ``optimizer.bin``, ``optimizer_1.bin`` and so
        on, which Accelerate itself reads.

        Args:
            output_dir: As for ``Accelerator.save_state``.
            safe_serialization: As for ``Accelerator.save_state``; if false, a copy of the model is made in memory.
            **kwargs: As for ``Accelerator.save_state``.

        Returns:
            The directory.

        Raises:
            CheckpointError: If the checkpoint cannot be written; an older one stays unchanged.
        """
        self._follow_models()
        engines = self._trained_engines()
        if not engines:
            return super().save_state(output_dir, safe_serialization, **kwargs)
        engine = engines[0]
        configuration = self.project_configuration
        is_numbered = configuration.automatic_checkpoint_naming
        final = Path(output_dir or "") if not is_numbered else self._next_directory()
        if not is_numbered and output_dir is None:
            raise ValueError("save_state needs output_dir, or automatic_checkpoint_naming")
        with engine.checkpoints.writing(final) as checkpoint:
            engine.checkpoints.begin_state(checkpoint)
            for number, other in enumerate(engines[1:], 1):
                self._save_training_state(other, state_directory(checkpoint.path, number), checkpoint)
            with contextlib.ExitStack() as stack, self._without_chunked_optimizers():
                for other in (found for found in self._engines() if found is not engine):
                    stack.enter_context(other.weights.collected(keep=self.is_main_process))
                if safe_serialization:
                    stack.enter_context(engine.weights.streamed(is_reader=self.is_main_process))
                else:
                    stack.enter_context(engine.weights.collected(keep=self.is_main_process))
                self._save_others(checkpoint, safe_serialization, **kwargs)
            engine.checkpoints.end_state(checkpoint, self._torch_paths(engine, checkpoint))
            if is_numbered:
                checkpoint.on_commit = lambda: self._rotate(final.parent)
        return final

    def _save_training_state(self, engine: PatrickStarEngine, directory: Path, checkpoint: Checkpoint) -> None:
        try:
            if engine.config.optimizer_format != "torch":
                directory.mkdir(exist_ok=True)
        except OSError as error:
            raise CheckpointError(describe_failure(directory, error)) from error
        is_maker, paths = engine.collectives.rank in checkpoint.makers, self._torch_paths(engine, checkpoint)
        engine.checkpoints.save_state(directory, is_maker=is_maker, paths=paths)

    def _torch_paths(self, engine: PatrickStarEngine, checkpoint: Checkpoint) -> list[Path]:
        """The files from which Accelerate can read the states of an engine's optimizers; empty if it need not."""
        prepared = [unwrapped(item) for item in self._optimizers]
        if engine.config.optimizer_format == "sharded":
            return []
        for optimizer in prepared:
            if not isinstance(optimizer, ChunkedOptimizer):
                raise CheckpointError(
                    f"optimizer_format='{engine.config.optimizer_format}' cannot be used with save_state here: one of "
                    f"the prepared optimizers, {type(optimizer).__name__}, is over no model in chunks, and Accelerate "
                    "would give its file the name of another; set optimizer_format to 'sharded'"
                )
        paths = torch_paths(checkpoint.path, len(prepared), "optimizer.bin")
        return [paths[prepared.index(optimizer)] for optimizer in engine.optimizers]

    def _save_others(self, checkpoint: Checkpoint, safe_serialization: bool, **kwargs: Any) -> None:
        """Lets Accelerate save the rest, without automatic naming, in which all processes would wait for each other."""
        configuration = self.project_configuration
        unnamed = dataclasses.replace(configuration, automatic_checkpoint_naming=False)
        with having(self, "project_configuration", unnamed):
            super().save_state(str(checkpoint.path), safe_serialization, **kwargs)
            configuration.iteration = self.project_configuration.iteration

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> Any:
        """Like ``Accelerator.get_state_dict``; while a model is saved, tied parameters have only their first name.

        If another process saves the model, the dictionary is empty.

        Args:
            model: The model.
            unwrap: As for ``Accelerator.get_state_dict``.
        """
        engine = get_engine(model)
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
        self._follow_models()
        engines = self._trained_engines()
        for engine in engines:
            engine.checkpoints.wait()
        if engines and input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            input_dir = str(self._newest_directory())
        if not engines or input_dir is None or not os.path.isdir(input_dir):
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
            return
        strict, directory = load_model_func_kwargs.get("strict", True), Path(input_dir)
        states = [state_directory(directory, number) for number in range(len(engines))]
        with contextlib.ExitStack() as stack:
            if has_training_state(directory):
                stack.enter_context(self._without_chunked_optimizers())
                for engine, state in zip(engines, states, strict=True):
                    engine.checkpoints.together(functools.partial(_check_presence, state))
                    engine.checkpoints.check_state(state)
            engines[0].checkpoints.together(functools.partial(self._check_others, directory))
            warn_of_missing(engines[0], directory, missing_anywhere(engines[0], self._missing_others(directory)))
            if self._load_model_state_pre_hook:  # the hooks get all models, and may load them
                super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
                # After the weights: masters have more bits than what a hook may have loaded.
                for engine, state in zip(engines, states, strict=True):
                    engine.checkpoints.load_parts(None, state)
                return
            found = []
            for engine in engines:
                find = functools.partial(self._find_weights, engine, directory, strict)
                found.append(engine.checkpoints.together(find))
            stack.enter_context(self._without_models_of(engines))
            for engine, weights, state in zip(engines, found, states, strict=True):
                engine.checkpoints.load_parts(weights, state)
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
        values: dict[str, torch.Tensor] = {}
        missing: list[str] = []
        unexpected: list[str] = []
        roots = {id(root): number for number, root in enumerate(roots_of(engine.model))}
        for place, model in enumerate(self._models):
            if get_engine(model) is not engine:
                continue
            ending = f"_{place}" if place else ""
            path = directory / f"model{ending}.safetensors"
            if not path.is_file():
                path = directory / f"pytorch_model{ending}.bin"
            found = find_weights(model, path, engine.device)
            if strict and (found.missing_keys or found.unexpected_keys):
                raise CheckpointError(
                    f"'{path}' has no values for {found.missing_keys}, and has {found.unexpected_keys} that the model "
                    "does not know; pass strict=False to load the rest"
                )
            prefix = "" if model is engine.model else f"{roots[id(model)]}."
            values |= {prefix + name: value for name, value in found.values.items()}
            missing += [prefix + name for name in found.missing_keys]
            unexpected += [prefix + name for name in found.unexpected_keys]
        return FoundWeights(values, missing, unexpected)

    def _engines(self) -> list[PatrickStarEngine]:
        """The engines of the prepared models, each once."""
        found = (get_engine(model) for model in self._models)
        return list({id(engine): engine for engine in found if engine is not None}.values())

    def _trained_engines(self) -> list[PatrickStarEngine]:
        """The engines that have an optimizer."""
        return [engine for engine in self._engines() if engine.training_state is not None]

    def _follow_models(self) -> None:
        """Lets engines follow changes of their models, so that new parameters are saved or loaded too."""
        for engine in self._engines():
            engine.follow_model()

    def _without_chunked_optimizers(self) -> contextlib.AbstractContextManager[None]:
        """Hides optimizers over chunks from Accelerate."""
        others = [item for item in self._optimizers if not isinstance(unwrapped(item), ChunkedOptimizer)]
        return having(self, "_optimizers", others)

    def _without_models_of(self, engines: list[PatrickStarEngine]) -> contextlib.AbstractContextManager[None]:
        """Shows Accelerate dummies in place of models whose weights are loaded already."""
        shown = [_Loaded() if get_engine(model) in engines else model for model in self._models]
        return having(self, "_models", shown)

    # Automatic names

    def _next_directory(self) -> Path:
        directory = Path(str(self.project_dir)) / "checkpoints" / f"checkpoint_{self.save_iteration}"
        if directory.exists():
            raise ValueError(
                f"checkpoint directory {directory} exists already; set project_configuration.iteration to the number "
                "to go on with"
            )
        return directory

    def _newest_directory(self) -> Path:
        parent = Path(str(self.project_dir)) / "checkpoints"
        found = _numbered(parent)
        if not found:
            raise CheckpointError(f"'{parent}' has no checkpoint; give load_state the directory of one")
        return found[-1]

    def _rotate(self, parent: Path) -> None:
        limit = self.project_configuration.total_limit
        found = _numbered(parent)
        for path in found[: max(len(found) - limit, 0)] if limit is not None else []:
            remove_checkpoint(path)


def state_directory(directory: Path, number: int) -> Path:
    """The directory of an engine's training state in a checkpoint.

    Args:
        directory: The checkpoint.
        number: The engine's number among those that have optimizers, in the order of their models.
    """
    return directory / f"optimizer_{number}" if number else directory


def _check_presence(directory: Path) -> None:
    if not has_training_state(directory):
        raise CheckpointError(
            f"'{directory}' has no training state: the checkpoint was saved with other models or optimizers prepared, "
            "or with fewer; prepare the same ones, in the same order"
        )


class _Loaded(torch.nn.Module):
    """A dummy model that ignores the weights that it is given."""

    def load_state_dict(self, *_args: Any, **_kwargs: Any) -> tuple[list[str], list[str]]:  # type: ignore[override]
        """Does nothing."""
        return [], []


def _numbered(parent: Path) -> list[Path]:
    """The automatically named checkpoints, the oldest first."""
    names = [(int(match[1]), path) for path in parent.glob("*") if (match := _NUMBERED.fullmatch(path.name))]
    return [path for _, path in sorted(names)]
