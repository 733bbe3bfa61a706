"""``PatrickStarTrainer``, and the mixin that gives any other Trainer the same."""

import logging
from typing import Any

from transformers import Trainer, TrainerCallback

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.errors import ConfigError, EngineError
from hf_patrickstar.integrations.accelerator import PatrickStarAccelerator
from hf_patrickstar.integrations.trainer_checkpoints import TrainerCheckpoints
from hf_patrickstar.runtime.admission import check_model

_PER_STEP = (
    "host_to_device_nbytes",
    "device_to_host_nbytes",
    "chunk_loads",
    "chunk_evictions",
    "chunk_hits",
    "prefetches",
    "late_prefetches",
    "waiting_seconds",
    "chunk_moves",
    "moved_home_to_device_nbytes",
    "moved_home_to_host_nbytes",
    "all_gathers",
    "reduce_scatters",
    "sent_nbytes",
    "messages",
)
_AS_THEY_ARE = (
    "device_step_peak_nbytes",
    "device_total_step_peak_nbytes",
    "host_step_peak_nbytes",
    "device_peak_nbytes",
    "device_total_peak_nbytes",
    "host_peak_nbytes",
    "device_budget_nbytes",
    "host_budget_nbytes",
    "skipped_steps",
    "lost_steps",
    "recorded_steps",
    "retries",
    "chunks_in_margin",
)


class PatrickStarTrainerMixin(TrainerCheckpoints):
    """Makes a Trainer train in chunks when its arguments say ``patrickstar``.

    Put it before the Trainer class: ``class MyTrainer(PatrickStarTrainerMixin, Seq2SeqTrainer): ...``, and do the same
    to its arguments with ``PatrickStarArgumentsMixin``. If ``patrickstar`` is false, nothing changes.

    Raises:
        ConfigError: At construction, if a setting or the model cannot work.
        BudgetError: From ``train`` or ``evaluate``, if a budget (bytes) is too small; the model is as it was.
        EngineError: From ``train``, if the model cannot be managed.
    """

    args: Any
    model: Any
    accelerator: Any
    callback_handler: Any
    optimizer: Any
    lr_scheduler: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator as the Trainer does; with ``patrickstar`` it becomes a ``PatrickStarAccelerator``.

        Raises:
            ConfigError: If a setting or the model cannot work, or processes launched together would train alone.
        """
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if not getattr(self.args, "patrickstar", False):
            return
        if not hasattr(self.args, "patrickstar_precision"):
            raise ConfigError(
                f"{type(self.args).__name__} has 'patrickstar' but is not made for it; derive it from "
                "PatrickStarArgumentsMixin and the TrainingArguments class of your Trainer"
            )
        _follow_log_level(self.args.get_process_log_level())
        config = PatrickStarConfig.from_any(self.args.patrickstar_config)
        if self.model is not None:
            check_model(self.model)
        steps = self.args.gradient_accumulation_steps
        PatrickStarAccelerator.adopt(self.accelerator, config, self.args.patrickstar_precision, steps)

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Logs as the Trainer does; beside a training loss go the engine's statistics, under ``patrickstar/``.

        What moved and happened is per optimizer step since the last such log, peaks are those of the last step and of
        the run; all sizes in bytes.

        Args:
            logs: The values to log.
            *args: As for ``Trainer.log``.
            **kwargs: As for ``Trainer.log``.
        """
        engine = self.patrickstar_engine
        if engine is not None and "loss" in logs:
            logs = {**logs, **self._patrickstar_logs(engine.stats())}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _patrickstar_logs(self, stats: dict[str, Any]) -> dict[str, float]:
        before: dict[str, Any] = getattr(self, "_patrickstar_logged", {})
        if before.get("steps", 0) > stats["steps"]:
            before = {}  # another engine since then
        self._patrickstar_logged = stats
        steps = max(
            stats["steps"] + stats["skipped_steps"] - before.get("steps", 0) - before.get("skipped_steps", 0), 1
        )
        logs = {f"patrickstar/{key}": (stats[key] - before.get(key, 0)) / steps for key in _PER_STEP}
        return logs | {f"patrickstar/{key}": stats[key] for key in _AS_THEY_ARE}

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of one micro-batch, repeated if device memory does not suffice.

        Args:
            *args: As for ``Trainer.training_step``.
            **kwargs: As for ``Trainer.training_step``.

        Returns:
            The loss, a scalar tensor.

        Raises:
            DeviceMemoryError: If memory does not suffice after three repetitions.
        """
        run = super().training_step  # type: ignore[misc]
        engine = self.patrickstar_engine
        if engine is not None:
            # The only place between a step and the Trainer's zero_grad where others are called.
            engine.manager.gradients.is_watched = any(
                getattr(callback, "on_optimizer_step", None) is not None
                and type(callback).on_optimizer_step is not TrainerCallback.on_optimizer_step
                for callback in self.callback_handler.callbacks
            )
        return run(*args, **kwargs) if engine is None else engine.attempt(lambda: run(*args, **kwargs))

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates or predicts as the Trainer does; with several processes all of them must call it.

        Args:
            *args: As for ``Trainer.evaluation_loop``.
            **kwargs: As for ``Trainer.evaluation_loop``.

        Returns:
            What ``Trainer.evaluation_loop`` returns.

        Raises:
            CollectiveError: If other processes do not come, or do something else.
        """
        engine = self.patrickstar_engine
        if engine is not None:  # the Trainer gathers something before it calls the model, and would wait in there
            engine.manager.sharing.enter("evaluates")
        return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def patrickstar_stats(self) -> dict[str, Any]:
        """Bytes and events of the engine so far.

        Returns:
            See ``PatrickStarEngine.stats``; all sizes in bytes.

        Raises:
            EngineError: If no engine is attached yet, or ``patrickstar`` is off.
        """
        engine = self.patrickstar_engine
        if engine is None:
            raise EngineError("no engine yet: pass --patrickstar, and call train() or evaluate() first")
        return engine.stats()


def _follow_log_level(level: int) -> None:
    """Lets ``--log_level`` speak for this package too: at ``info`` it explains what ``auto`` decided."""
    package = logging.getLogger("hf_patrickstar")
    package.setLevel(level)
    if not package.handlers and not logging.getLogger().handlers:
        package.addHandler(logging.StreamHandler())


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
