"""The Trainer's checkpoints of a model in chunks: written in pieces, and complete or not at all."""

import contextlib
import logging
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, TrainOutput, sort_checkpoints

from hf_patrickstar.checkpoint.checkpoints import has_torch_state
from hf_patrickstar.checkpoint.storage import damaged, missing_file, remove_checkpoint, remove_leftovers
from hf_patrickstar.checkpoint.torch_state import torch_state_dict
from hf_patrickstar.checkpoint.training_state import INDEX_NAME, has_training_state
from hf_patrickstar.checkpoint.transaction import Checkpoint
from hf_patrickstar.checkpoint.weight_files import FoundWeights, has_weights, load_torch_file
from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.integrations.accelerator_checkpoints import RANDOM_LOST, engine_of, warn_of_missing

logger = logging.getLogger(__name__)

_STATE_LOST = "the optimizer and the schedule of learning rates begin anew"
_URGENT = "checkpoint-is-incomplete.txt"
"""The Trainer puts this file into a checkpoint that it saves because the process is about to be killed."""


if TYPE_CHECKING:  # the mixin has the attributes and methods of the Trainer that it stands before
    from transformers import Trainer as _AnyTrainer
else:
    _AnyTrainer = object


class TrainerCheckpoints(_AnyTrainer):
    """Saves and loads the checkpoints of a Trainer whose model has an engine; without one, as the Trainer does."""

    model: Any
    optimizer: Any
    lr_scheduler: Any
    _saving: Checkpoint | None = None
    _resumed: str | None = None
    """Where weights are that are read when there are chunks to read them into."""
    _step_at_begin = 0

    @property
    def patrickstar_engine(self) -> PatrickStarEngine | None:
        """The engine that is attached to the model, or ``None`` before the first ``train`` or ``evaluate``."""
        return engine_of(self.model)

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Trains as the Trainer does; when it returns, every checkpoint is complete.

        Half-written checkpoints that a killed run left in the output directory are removed first.

        Args:
            *args: As for ``Trainer.train``.
            **kwargs: As for ``Trainer.train``.

        Returns:
            What ``Trainer.train`` returns.

        Raises:
            CheckpointError: If a checkpoint cannot be read, or cannot be written.
        """
        if getattr(self.args, "patrickstar", False) and self.args.local_process_index == 0:
            assert self.args.output_dir is not None  # by now the arguments have chosen one
            remove_leftovers(self.args.output_dir)
        try:
            result = super().train(*args, **kwargs)
        except BaseException:
            if self.patrickstar_engine is not None:
                self.patrickstar_engine.checkpoints.close()
            raise
        finally:
            self._resumed = None
        if self.patrickstar_engine is not None:
            self.patrickstar_engine.checkpoints.wait()
        return result

    # Saving

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Saves the model as the Trainer does; with several processes all of them must call it.

        Args:
            *args: As for ``Trainer.save_model``.
            **kwargs: As for ``Trainer.save_model``.

        Raises:
            CheckpointError: If a file cannot be written.
        """
        with contextlib.ExitStack() as stack:
            if (engine := self.patrickstar_engine) is not None:
                engine.follow_model()
                stack.enter_context(engine.weights.streamed(is_reader=self.args.should_save))
            super().save_model(*args, **kwargs)

    def _get_output_dir(self, trial: Any) -> str:
        return str(super()._get_output_dir(trial) if self._saving is None else self._saving.path.parent)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Lets the Trainer write to a temporary directory, which is renamed when all of it is on the disk."""
        engine = self.patrickstar_engine
        if engine is None:
            super()._save_checkpoint(model, trial)
            return
        run_dir = self._get_output_dir(trial)
        final = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        is_urgent = os.path.exists(os.path.join(final, _URGENT))
        engine.follow_model()
        engine.checkpoints.wait()
        best = self.state.best_model_checkpoint
        try:
            with engine.checkpoints.writing(final) as checkpoint, mock.patch.object(self, "_saving", checkpoint):
                if not self.args.save_only_model:
                    engine.checkpoints.begin_state(checkpoint)
                super()._save_checkpoint(model, trial)
                self._find_best(run_dir, checkpoint)
                protected = self.state.best_model_checkpoint
                checkpoint.on_commit = lambda: _rotate(run_dir, self.args.save_total_limit, protected)
        except BaseException:
            self.state.best_model_checkpoint = best
            raise
        if self.args.push_to_hub or is_urgent:
            engine.checkpoints.wait()
        if self.args.push_to_hub:
            self._push_from_checkpoint(final)

    def _find_best(self, run_dir: str, checkpoint: Checkpoint) -> None:
        """Sets the final path of the best checkpoint; the Trainer has looked for it in the temporary directory."""
        step = self.state.best_global_step
        best = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")
        is_kept = step == self.state.global_step or os.path.exists(best)
        if step and is_kept and self.args.save_strategy != SaveStrategy.NO and best != self.state.best_model_checkpoint:
            self.state.best_model_checkpoint = best
            if self.args.should_save:
                self.state.save_to_json(str(checkpoint.path / TRAINER_STATE_NAME))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._saving is None:  # else _save_checkpoint pushes it from its final path
            super()._push_from_checkpoint(checkpoint_folder)

    def _finalize_training(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        """Waits for checkpoints in the background before the Trainer deletes old ones."""
        if self.patrickstar_engine is not None:
            self.patrickstar_engine.checkpoints.wait()
            if self._is_over() and self.args.should_save:
                run_dir = self._get_output_dir(trial)
                resumed = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
                remove_leftovers(run_dir)
                _rotate(run_dir, self.args.save_total_limit, self.state.best_model_checkpoint, resumed)
        return super()._finalize_training(trial, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Each process writes its part of the optimizer's state; one writes the scheduler's, as in the Trainer."""
        engine = self.patrickstar_engine
        if engine is None or engine.training_state is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        assert self._saving is not None  # begin_state was called before the model was saved
        engine.checkpoints.end_state(self._saving)
        if self.args.should_save:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch reminds of the optimizer, which is saved above
                torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    # Loading

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """The epochs and batches trained so far; unlike the Trainer's, a finished run trains no further step."""
        trained: tuple[int, int] = super()._init_training_state(*args, **kwargs)
        self._step_at_begin = self.state.global_step
        if not (getattr(self.args, "patrickstar", False) and self._is_over()):
            return trained
        text = "patrickstar: the checkpoint is of step %d of %d; to train on, raise --max_steps or --num_train_epochs"
        logger.warning(text, self.state.global_step, self.state.max_steps)
        return self.state.num_train_epochs, 0

    def _is_over(self) -> bool:
        """Whether the run was resumed from its last step."""
        return 0 < self.state.max_steps <= self._step_at_begin

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Loads the weights, if there are chunks to read them into; otherwise they are read when there are."""
        is_ours = getattr(self.args, "patrickstar", False) and not hasattr(self.model, "peft_config")
        if is_ours and (warning := check_origin(resume_from_checkpoint)) is not None:
            logger.warning(warning)
        if not is_ours or not has_weights(resume_from_checkpoint):  # the Trainer reports that there are no weights
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif self.patrickstar_engine is None:
            self._resumed = resume_from_checkpoint
        else:
            self._load_weights(self.patrickstar_engine, resume_from_checkpoint)

    def _load_weights(self, engine: PatrickStarEngine, directory: str, state_directory: str | None = None) -> None:
        engine.follow_model()
        found = engine.checkpoints.load_weights(directory, state_directory)
        left_out = getattr(self.model, "_keys_to_ignore_on_save", None)  # which the Trainer's warnings need
        with mock.patch.object(self.model, "_keys_to_ignore_on_save", left_out, create=True):
            self._issue_warnings_after_load(found)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Reads the weights that were left for now, and this process's part of the optimizer's state."""
        engine, resumed, path = self.patrickstar_engine, self._resumed, Path(checkpoint or "")
        self._resumed = None
        if engine is None:
            if checkpoint is None or not has_training_state(path) or (path / OPTIMIZER_NAME).is_file():
                super()._load_optimizer_and_scheduler(checkpoint)
            else:  # it was saved with patrickstar
                _check_schedule(checkpoint)
                self.optimizer.load_state_dict(torch_state_dict(checkpoint))
                self.lr_scheduler.load_state_dict(load_torch_file(path / SCHEDULER_NAME))
            return
        schedule = None
        if checkpoint is not None and not self._begins_anew(engine, checkpoint):
            schedule = engine.checkpoints.together(lambda: load_torch_file(path / SCHEDULER_NAME))
        state_directory = None if schedule is None else checkpoint
        if resumed is not None:
            self._load_weights(engine, resumed, state_directory)
        elif state_directory is not None:
            engine.follow_model()
            engine.checkpoints.load_parts(FoundWeights(), state_directory)
        if schedule is not None:
            self.lr_scheduler.load_state_dict(schedule)

    def _begins_anew(self, engine: PatrickStarEngine, checkpoint: str) -> bool:
        """Whether optimizer and schedule begin anew: as the Trainer, the engine loads both or none.

        Raises:
            CheckpointError: If only some processes find both, or the schedule is missing and the optimizer is not.
        """
        found = engine.collectives.exchange(self._missing_files(checkpoint), "looks for missing files")
        without = [rank for rank, files in enumerate(found) if _STATE_LOST in files.values()]
        if 0 < len(without) < len(found):
            name = next(name for name, what in found[without[0]].items() if what == _STATE_LOST)
            raise CheckpointError(
                f"rank {without[0]} finds no {name} in '{checkpoint}', where other ranks find theirs; copy the files "
                "of the checkpoint to its machine (the Trainer writes them there with save_on_each_node)"
            )
        engine.checkpoints.together(lambda: _check_schedule(checkpoint))
        warn_of_missing(engine, checkpoint, found)
        return bool(without)

    def _missing_files(self, checkpoint: str) -> dict[str, str]:
        """Files that a checkpoint lacks and that the Trainer goes on without, each with what is lost then."""
        wanted = {SCHEDULER_NAME: _STATE_LOST, self._rng_name: RANDOM_LOST}
        if self.accelerator.scaler is not None:
            wanted[SCALER_NAME] = "the loss scale begins anew"
        has_state = has_training_state(checkpoint) or has_torch_state(checkpoint)
        missing = {} if has_state else {f"{INDEX_NAME} (or {OPTIMIZER_NAME})": _STATE_LOST}
        return missing | {name: what for name, what in wanted.items() if not (Path(checkpoint) / name).is_file()}

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restores random numbers as the Trainer does; an error names the file, and all processes raise it."""

        def restore() -> None:
            try:
                super(TrainerCheckpoints, self)._load_rng_state(checkpoint)
            except Exception as error:
                file = Path(str(checkpoint)) / self._rng_name
                raise CheckpointError(damaged(f"'{file}' has no random numbers: {error!r}")) from error

        engine = self.patrickstar_engine
        restore() if engine is None else engine.checkpoints.together(restore)

    @property
    def _rng_name(self) -> str:
        """The file of this process's random numbers."""
        return "rng_state.pth" if self.args.world_size == 1 else f"rng_state_{self.args.process_index}.pth"

    def _load_best_model(self) -> None:
        engine, best = self.patrickstar_engine, self.state.best_model_checkpoint
        if engine is None:
            super()._load_best_model()
            return
        engine.checkpoints.wait()
        if best is None or hasattr(self.model, "peft_config") or not os.path.isdir(best):
            engine.follow_model()
            super()._load_best_model()
        else:
            self._load_weights(engine, best)


def check_origin(directory: str | os.PathLike[str]) -> str | None:
    """Looks whether a checkpoint was written by DeepSpeed or FSDP, whose optimizer states cannot be read.

    Args:
        directory: The checkpoint that a run is resumed from.

    Returns:
        A warning if the weights can be loaded and the optimizer's states cannot; ``None`` for an ordinary checkpoint.

    Raises:
        CheckpointError: If the weights cannot be read either.
    """
    signs = {"DeepSpeed": ("global_step*/", "zero_to_fp32.py"), "FSDP": ("pytorch_model_fsdp*", "optimizer_0/")}
    for name, tool in (("DeepSpeed", "its zero_to_fp32.py"), ("FSDP", "'accelerate merge-weights'")):
        if not any(any(Path(directory).glob(sign)) for sign in signs[name]):
            continue
        if not has_weights(directory):
            raise CheckpointError(
                f"'{directory}' is a checkpoint of {name}, with no weights to read; convert it with {tool}, and give "
                "the result as --model_name_or_path"
            )
        return (
            f"patrickstar: '{directory}' is a checkpoint of {name}: its weights are loaded, its optimizer states are "
            "not read, and training goes on with new ones"
        )
    return None


def _check_schedule(checkpoint: str) -> None:
    """Makes sure that a checkpoint with the optimizer's files of this package has the schedule, too.

    Raises:
        CheckpointError: If not: the Trainer would begin anew with both.
    """
    if has_training_state(checkpoint) and not (path := Path(checkpoint) / SCHEDULER_NAME).is_file():
        raise CheckpointError(
            f"{missing_file(path)}; or delete every optimizer-* and {INDEX_NAME} beside it, to begin with a new "
            "optimizer and schedule"
        )


def _rotate(run_dir: str, limit: int | None, *wanted: str | None) -> None:
    """Deletes the oldest checkpoints as the Trainer does, each in one step; the newest and those wanted stay."""
    if limit is None or limit <= 0:
        return
    checkpoints = sort_checkpoints(run_dir, PREFIX_CHECKPOINT_DIR, use_mtime=True)
    protected = {str(Path(path)) for path in (*checkpoints[-1:], *wanted) if path is not None}
    surplus = len(checkpoints) - max(limit, len(protected))
    for checkpoint in [path for path in checkpoints if str(Path(path)) not in protected][: max(surplus, 0)]:
        remove_checkpoint(checkpoint)
