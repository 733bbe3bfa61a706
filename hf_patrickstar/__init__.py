"""Fine-tune pretrained models that are too big for the device, with the Trainer script you already have.

Change two imports, pass ``--patrickstar``::

    from hf_patrickstar import PatrickStarTrainer as Trainer
    from hf_patrickstar import PatrickStarTrainingArguments as TrainingArguments
"""

from typing import TYPE_CHECKING, Any

from hf_patrickstar.checkpoint.weight_files import deferred_weights
from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.engine import PatrickStarEngine, initialize_engine
from hf_patrickstar.errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    DeviceMemoryError,
    EngineError,
    PatrickStarError,
)
from hf_patrickstar.version import __version__

if TYPE_CHECKING:
    from hf_patrickstar.integrations.accelerator import PatrickStarAccelerator
    from hf_patrickstar.integrations.trainer import PatrickStarTrainer, PatrickStarTrainerMixin
    from hf_patrickstar.integrations.training_args import PatrickStarArgumentsMixin, PatrickStarTrainingArguments
    from hf_patrickstar.planner.planning import plan

_LAZY = {
    "PatrickStarArgumentsMixin": "hf_patrickstar.integrations.training_args",
    "PatrickStarAccelerator": "hf_patrickstar.integrations.accelerator",
    "PatrickStarTrainer": "hf_patrickstar.integrations.trainer",
    "PatrickStarTrainerMixin": "hf_patrickstar.integrations.trainer",
    "PatrickStarTrainingArguments": "hf_patrickstar.integrations.training_args",
    "plan": "hf_patrickstar.planner.planning",
}

__all__ = [
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "DeviceMemoryError",
    "EngineError",
    "PatrickStarAccelerator",
    "PatrickStarArgumentsMixin",
    "PatrickStarConfig",
    "PatrickStarEngine",
    "PatrickStarError",
    "PatrickStarTrainer",
    "PatrickStarTrainerMixin",
    "PatrickStarTrainingArguments",
    "__version__",
    "deferred_weights",
    "initialize_engine",
    "plan",
]


if not TYPE_CHECKING:  # where type checkers see a __getattr__, every name is there, misspelled ones too

    def __getattr__(name: str) -> Any:
        """Imports transformers and accelerate only when something that needs them is asked for."""
        if name in _LAZY:
            import importlib

            return getattr(importlib.import_module(_LAZY[name]), name)
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
