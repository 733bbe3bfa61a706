"""``PatrickStarTrainer``, and the mixin that gives any other Trainer the same."""

import contextlib
import logging
import weakref
from collections.abc import Iterator
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import TrainOutput

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.errors import ConfigError, DeviceMemoryError, EngineError
from hf_patrickstar.integrations.accelerator import PatrickStarAccelerator
from hf_patrickstar.integrations.trainer_checkpoints import TrainerCheckpoints
from hf_patrickstar.integrations.trainer_report import TrainingRun, bars_as_asked, tell_console, tell_figures
from hf_patrickstar.integrations.training_script import naming_plan_command
from hf_patrickstar.model.admission import check_model, check_shapes
from hf_patrickstar.report.outcome import figures_between
from hf_patrickstar.runtime.recovery import MAX_RETRIES


class PatrickStarTrainerMixin(TrainerCheckpoints):
    """Makes a Trainer train in chunks when its arguments say ``patrickstar``.

    Put it before the Trainer class: ``class MyTrainer(PatrickStarTrainerMixin, Seq2SeqTrainer): ...``. The arguments
    class needs ``PatrickStarArgumentsMixin`` in the same way. If ``patrickstar`` is false, nothing changes.

    Raises:
        ConfigError: At construction, if a setting or the model cannot work.
        BudgetError: From ``train`` or ``evaluate``, if a budget (bytes) is too small; the model is as it was.
        EngineError: From ``train``, if the model cannot be managed.
    """

    _run: TrainingRun | None = None
    _shown: dict[str, str]
    """Figures that the console has shown last."""
    _is_shrinking = False  # whether the Trainer is looking for a smaller batch size, because the engine has given up

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator as the Trainer does; with ``patrickstar`` it becomes a ``PatrickStarAccelerator``.

        Raises:
            ConfigError: If a setting or the model cannot work, or processes launched together would train alone.
        """
        super().create_accelerator_and_postprocess()
        if not getattr(self.args, "patrickstar", False):
            return
        if not hasattr(self.args, "patrickstar_precision"):
            raise ConfigError(
                f"{type(self.args).__name__} has 'patrickstar' but is not made for it; derive it from "
                "PatrickStarArgumentsMixin and the TrainingArguments class of your Trainer"
            )
        self.args._has_trainer = True  # type: ignore[attr-defined]
        package = logging.getLogger("hf_patrickstar")  # --log_level is for it, too: at info it logs what it decided
        package.setLevel(self.args.get_process_log_level())
        if not package.handlers and not logging.getLogger().handlers:
            package.addHandler(logging.StreamHandler())
        self._shown = {}
        config = PatrickStarConfig.from_any(self.args.patrickstar_config)  # type: ignore[attr-defined]
        if self.model is not None:
            check_model(self.model)
            check_shapes(self.model)
        accelerator: Any = self.accelerator
        accelerator.__class__ = PatrickStarAccelerator  # the same object, since the Trainer hands out its bound methods
        steps = self.args.gradient_accumulation_steps
        accelerator.set_up_patrickstar(config, self.args.patrickstar_precision, steps, _Teller(self))

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Logs as the Trainer does; with a training loss, callbacks also get figures of the engine.

        ``patrickstar_logging`` selects the figures: by default a console gets at most three, and all other callbacks
        (``report_to``) get all that docs/report.md lists. Counts and moved bytes are means per optimizer step since the
        last such log; sizes are in bytes. ``log_history`` gets none, so that a resumed run has the same history. With
        ``patrickstar_report`` they are recorded, too.

        Args:
            logs: The values to log.
            *args: As for ``Trainer.log``.
            **kwargs: As for ``Trainer.log``.
        """
        engine, choice = self.patrickstar_engine, getattr(self.args, "patrickstar_logging", "off")
        with contextlib.ExitStack() as stack:
            if engine is not None and "loss" in logs:
                before, engine.logged = engine.logged, engine.stats()
                figures = figures_between(before, engine.logged)
                if self._run is not None:
                    self._run.note_loss(logs, figures)
                if choice != "off":
                    tell_figures(stack, self.callback_handler, figures, self._shown if choice == "brief" else None)
            elif self._run is not None and "eval_loss" in logs:
                self._run.note_evaluation(float(logs["eval_loss"]))
            super().log(logs, *args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Trains as the Trainer does; see ``TrainerCheckpoints.train``. With ``patrickstar_report`` it is recorded.

        Unless ``patrickstar_logging`` is ``"off"``, the console shows what is expected, and what the run came to.

        Args:
            *args: As for ``Trainer.train``.
            **kwargs: As for ``Trainer.train``.

        Returns:
            What ``Trainer.train`` returns.

        Raises:
            CheckpointError: If a checkpoint cannot be read, or cannot be written.
            BudgetError: If memory does not suffice; the message ends with the command for a plan, if a script runs.
        """
        self._shown = {}
        try:
            with naming_plan_command(self.args.world_size):
                result = super().train(*args, **kwargs)
            if self._run is not None:
                self._tell(self._run.describe())
            return result
        finally:
            self._forget_run()

    def _forget_run(self) -> None:
        if self._run is not None:
            self._run.close()
        self._run = None

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self._unmeasured():
            super()._save_checkpoint(model, trial)

    @contextlib.contextmanager
    def _unmeasured(self) -> Iterator[None]:
        """Inside the block no time passes for the run, and bars are shown as ``disable_tqdm`` says."""
        with contextlib.nullcontext() if self._run is None else self._run.paused(), bars_as_asked(self.args):
            yield

    def _tell(self, line: str | None) -> None:
        """Prints a line on the console of the first process, unless the user wants none."""
        if line is None or self.args.patrickstar_logging == "off":  # type: ignore[attr-defined]
            return
        if self.is_world_process_zero():  # type: ignore[attr-defined]
            tell_console(self.callback_handler, line)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Prepares as the Trainer does: makes the engine, and reads a checkpoint."""
        with self._unmeasured():
            return super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of one micro-batch, repeated if device memory does not suffice.

        With ``auto_find_batch_size`` the engine first repeats the micro-batch with more of the device for activations.
        If that fails, the Trainer starts over with smaller batches, and the engine repeats none of them until one
        succeeds.

        Args:
            *args: As for ``Trainer.training_step``.
            **kwargs: As for ``Trainer.training_step``.

        Returns:
            The loss, a scalar tensor.

        Raises:
            DeviceMemoryError: If memory does not suffice in the end.
        """
        run = super().training_step
        engine = self.patrickstar_engine
        if engine is None:
            return run(*args, **kwargs)
        if self._run is None:
            is_recorded = self.args.patrickstar_report and self.is_world_process_zero()  # type: ignore[attr-defined]
            self._run = TrainingRun(self, is_recorded=is_recorded)
        self._tell(self._run.begin_micro_batch(kwargs["inputs"] if "inputs" in kwargs else args[1]))
        # on_optimizer_step is the only call of user code between a step and the Trainer's zero_grad.
        engine.manager.gradients.is_watched = any(
            getattr(type(callback), "on_optimizer_step", None) is not TrainerCallback.on_optimizer_step
            for callback in self.callback_handler.callbacks
        )
        try:
            loss = engine.attempt(lambda: run(*args, **kwargs), 0 if self._is_shrinking else MAX_RETRIES)
        except DeviceMemoryError:
            self._is_shrinking = self.args.auto_find_batch_size
            self._forget_run()  # if the Trainer starts over, so does its record
            raise
        self._is_shrinking = False
        return loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates or predicts as the Trainer does; with several processes all of them must call it.

        Args:
            *args: As for ``Trainer.evaluation_loop``.
            **kwargs: As for ``Trainer.evaluation_loop``.

        Returns:
            What ``Trainer.evaluation_loop`` returns.

        Raises:
            CollectiveError: If other processes do not call it in time, or call something else.
        """
        engine = self.patrickstar_engine
        if engine is not None:  # before the Trainer's own gather, which would wait without a warning
            engine.manager.sharing.enter("evaluates")
        with self._unmeasured(), naming_plan_command(self.args.world_size):  # it makes an engine if there is none
            return super().evaluation_loop(*args, **kwargs)

    def patrickstar_stats(self) -> dict[str, Any]:
        """Bytes and counts of the engine so far.

        Returns:
            See ``PatrickStarEngine.stats``; all sizes in bytes.

        Raises:
            EngineError: If no engine is attached yet, or ``patrickstar`` is off.
        """
        engine = self.patrickstar_engine
        if engine is None:
            raise EngineError("no engine yet: pass --patrickstar, and call train() or evaluate() first")
        return engine.stats()


class _Teller:
    """Has a Trainer print what a new engine expects; a Trainer that is pickled is an ordinary one, and has none."""

    def __init__(self, trainer: PatrickStarTrainerMixin) -> None:
        self._trainer = weakref.ref(trainer)

    def __reduce__(self) -> Any:
        return type(None), ()

    def __call__(self, text: str) -> None:
        trainer = self._trainer()
        if trainer is not None and not logging.getLogger("hf_patrickstar").isEnabledFor(logging.INFO):
            trainer._tell(text)


class PatrickStarTrainer(PatrickStarTrainerMixin, Trainer):
    """``transformers.Trainer``; with ``PatrickStarTrainingArguments(patrickstar=True)`` it trains in chunks.

    Losses, logs, checkpoints, evaluation and resuming are the Trainer's own. The model object stays the same and
    stays usable: ``state_dict``, ``save_pretrained``, ``generate`` and ``load_state_dict`` see true values.

    Source: PatrickStar section 8.5, with Hugging Face's interface in place of the paper's.

    Raises:
        ConfigError: At construction, if a setting or the model cannot work.
        BudgetError: From ``train`` or ``evaluate``, if a budget (bytes) is too small; the model is as it was.
        EngineError: From ``train``, if the model cannot be managed.
    """
