"""``save_state`` and ``load_state`` of models in chunks: piece by piece, whole or not at all, in any shape."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from hf_patrickstar.checkpoint.checkpoints import FoundWeights, find_weights, has_training_state
from hf_patrickstar.checkpoint.storage import remove_checkpoint
from hf_patrickstar.checkpoint.transaction import Checkpoint
from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.optim.optimizer import ChunkedOptimizer

_NUMBERED = re.compile(r"checkpoint_(\d+)")


def get_engine(model: torch.nn.Module) -> PatrickStarEngine | None:
    """The engine that is attached to a model, or ``None``."""
    return model.__dict__.get("patrickstar_engine")


class AcceleratorCheckpoints(Accelerator):
    """The part of ``PatrickStarAccelerator`` that saves and loads."""

    project_configuration: Any
    _models: Any
    _optimizers: Any

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Saves as ``Accelerator.save_state`` does; the directory appears when all of it is on the disk.

        The state of an optimizer over chunks is saved by all processes, each its part, in ``optimizer.index.json`` and
        the files that it names.

        Args:
            output_dir: As for ``Accelerator.save_state``.
            safe_serialization: As for ``Accelerator.save_state``; if false, the model is held in memory once more.
            **kwargs: As for ``Accelerator.save_state``.

        Returns:
            The directory.

        Raises:
            CheckpointError: If it cannot be written; an older one is as it was.
        """
        engine = self._trained_engine()
        if engine is None:
            return super().save_state(output_dir, safe_serialization, **kwargs)
        configuration = self.project_configuration
        is_numbered = configuration.automatic_checkpoint_naming
        final = Path(output_dir or "") if not is_numbered else self._next_directory()
        if not is_numbered and output_dir is None:
            raise ValueError("save_state needs output_dir, or automatic_checkpoint_naming")
        with engine.checkpoints.writing(final) as checkpoint:
            engine.checkpoints.begin_state(checkpoint)
            others = [found for found in map(get_engine, self._models) if found not in (None, engine)]
            with contextlib.ExitStack() as stack, self._without_chunked_optimizers():
                for other in others:
                    assert other is not None
                    stack.enter_context(other.weights.collected(keep=self.is_main_process))
                if safe_serialization:
                    stack.enter_context(engine.weights.streamed(is_reader=self.is_main_process))
                else:
                    stack.enter_context(engine.weights.collected(keep=self.is_main_process))
                self._save_others(checkpoint, safe_serialization, **kwargs)
            engine.checkpoints.end_state(checkpoint)
            if is_numbered:
                checkpoint.on_commit = lambda: self._rotate(final.parent)
        return final

    def _save_others(self, checkpoint: Checkpoint, safe_serialization: bool, **kwargs: Any) -> None:
        """All that Accelerate saves; names are given already, and processes do not wait for each other in there."""
        configuration = self.project_configuration
        self.project_configuration = dataclasses.replace(configuration, automatic_checkpoint_naming=False)
        try:
            super().save_state(str(checkpoint.path), safe_serialization, **kwargs)
            configuration.iteration = self.project_configuration.iteration
        finally:
            self.project_configuration = configuration

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> Any:
        """As ``Accelerator.get_state_dict``, while a model is saved without the second names of tied parameters.

        Of a model that another process saves, this one has nothing.

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
        """Loads what ``save_state`` saved, in any shape; each process reads its part of it.

        Args:
            input_dir: As for ``Accelerator.load_state``.
            load_kwargs: As for ``Accelerator.load_state``.
            **load_model_func_kwargs: As for ``Accelerator.load_state``.

        Raises:
            CheckpointError: If something is missing, damaged or does not fit; nothing has changed then.
        """
        load_model_func_kwargs.setdefault("map_location", "cpu")
        engine = self._trained_engine()
        if engine is not None:
            engine.checkpoints.wait()
            if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
                input_dir = str(self._newest_directory())
        if engine is None or input_dir is None or not os.path.isdir(input_dir):
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
            return
        strict = load_model_func_kwargs.get("strict", True)
        with contextlib.ExitStack() as stack:
            if has_training_state(input_dir):
                stack.enter_context(self._without_chunked_optimizers())
            if self._load_model_state_pre_hook:  # they see all models, and may load them
                engine.checkpoints.check_state(input_dir)
                super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
                # After the weights: masters have more bits than what a hook may have loaded.
                engine.checkpoints.load_parts(None, input_dir)
                return
            directory = Path(input_dir)
            place, found = engine.checkpoints.together(lambda: self._find_weights(engine, directory, strict))
            stack.enter_context(self._without_model(place))
            engine.checkpoints.load_parts(found, input_dir)
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)

    def _find_weights(self, engine: PatrickStarEngine, directory: Path, strict: bool) -> tuple[int, FoundWeights]:
        """The engine's model among those prepared, and its weights."""
        place = next(number for number, model in enumerate(self._models) if get_engine(model) is engine)
        ending = f"_{place}" if place else ""
        path = directory / f"model{ending}.safetensors"
        if not path.is_file():
            path = directory / f"pytorch_model{ending}.bin"
        found = find_weights(self._models[place], path)
        if strict and (found.missing_keys or found.unexpected_keys):
            raise CheckpointError(
                f"'{path}' has no values for {found.missing_keys}, and has {found.unexpected_keys} that the model does "
                "not know; pass strict=False to load the rest"
            )
        return place, found

    def _trained_engine(self) -> PatrickStarEngine | None:
        engines = (get_engine(model) for model in self._models)
        return next((engine for engine in engines if engine is not None and engine.training_state is not None), None)

    @contextlib.contextmanager
    def _without_chunked_optimizers(self) -> Iterator[None]:
        """Hides optimizers over chunks from Accelerate."""
        optimizers = self._optimizers
        self._optimizers = [item for item in optimizers if not isinstance(_unwrapped(item), ChunkedOptimizer)]
        try:
            yield
        finally:
            self._optimizers = optimizers

    @contextlib.contextmanager
    def _without_model(self, place: int) -> Iterator[None]:
        """Lets Accelerate see, in place of a model that is loaded already, one that takes what it is given."""
        models = self._models
        self._models = [*models[:place], _Loaded(), *models[place + 1 :]]
        try:
            yield
        finally:
            self._models = models

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
            raise CheckpointError(f"'{parent}' has no checkpoint")
        return found[-1]

    def _rotate(self, parent: Path) -> None:
        limit = self.project_configuration.total_limit
        found = _numbered(parent)
        for path in found[: max(len(found) - limit, 0)] if limit is not None else []:
            remove_checkpoint(path)


class _Loaded(torch.nn.Module):
    """A model without parameters that loads anything."""

    def load_state_dict(self, *_args: Any, **_kwargs: Any) -> tuple[list[str], list[str]]:  # type: ignore[override]
        """Does nothing."""
        return [], []


def _numbered(parent: Path) -> list[Path]:
    """The automatically named checkpoints, the oldest first."""
    names = [(int(match[1]), path) for path in parent.glob("*") if (match := _NUMBERED.fullmatch(path.name))]
    return [path for _, path in sorted(names)]


def _unwrapped(optimizer: Any) -> Any:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
