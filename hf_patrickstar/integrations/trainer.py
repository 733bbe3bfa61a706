"""``PatrickStarTrainer``, and the mixin that gives any other Trainer the same."""

from typing import Any

from transformers import Trainer

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.errors import EngineError
from hf_patrickstar.integrations.accelerator import PatrickStarAccelerator, get_engine


class PatrickStarTrainerMixin:
    """Makes a Trainer train in chunks when its arguments say ``patrickstar``.

    Put it before the Trainer class: ``class MyTrainer(PatrickStarTrainerMixin, Seq2SeqTrainer): ...``. The arguments
    must have ``patrickstar`` (see ``PatrickStarArgumentsMixin``); without it, or if it is false, nothing changes.
    """

    args: Any
    model: Any
    accelerator: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator as the Trainer does; with ``patrickstar`` it becomes a ``PatrickStarAccelerator``.

        Raises:
            ConfigError: If a setting cannot work, or several processes were started.
        """
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if getattr(self.args, "patrickstar", False):
            config = PatrickStarConfig.from_any(self.args.patrickstar_config)
            steps = self.args.gradient_accumulation_steps
            PatrickStarAccelerator.adopt(self.accelerator, config, self.args.patrickstar_precision, steps)

    @property
    def patrickstar_engine(self) -> PatrickStarEngine | None:
        """The engine that is attached to the model, or ``None`` before the first ``train`` or ``evaluate``."""
        return get_engine(self.model)

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


class PatrickStarTrainer(PatrickStarTrainerMixin, Trainer):
    """``transformers.Trainer``; with ``PatrickStarTrainingArguments(patrickstar=True)`` it trains in chunks.

    Losses, logs, checkpoints, evaluation and resuming are the Trainer's own. The model object stays the same and
    stays usable: ``state_dict``, ``save_pretrained``, ``generate`` and ``load_state_dict`` see true values.
    """
