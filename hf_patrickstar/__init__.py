"""Fine-tune pretrained models that are too big for the device, with the Trainer script you already have.

Change two imports, pass ``--patrickstar``::

    from hf_patrickstar import PatrickStarTrainer as Trainer
    from hf_patrickstar import PatrickStarTrainingArguments as TrainingArguments
"""

from typing import TYPE_CHECKING, Any

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
    from hf_patrickstar.checkpoint.weight_files import deferred_weights
    from hf_patrickstar.config import PatrickStarConfig
    from hf_patrickstar.engine import PatrickStarEngine, get_engine, initialize_engine
    from hf_patrickstar.integrations.accelerator import PatrickStarAccelerator
    from hf_patrickstar.integrations.trainer import PatrickStarTrainer, PatrickStarTrainerMixin
    from hf_patrickstar.integrations.training_args import PatrickStarArgumentsMixin, PatrickStarTrainingArguments
    from hf_patrickstar.integrations.trl import PatrickStarDPOConfig as PatrickStarDPOConfig
    from hf_patrickstar.integrations.trl import PatrickStarDPOTrainer as PatrickStarDPOTrainer
    from hf_patrickstar.integrations.trl import PatrickStarGRPOConfig as PatrickStarGRPOConfig
    from hf_patrickstar.integrations.trl import PatrickStarGRPOTrainer as PatrickStarGRPOTrainer
    from hf_patrickstar.integrations.trl import PatrickStarSFTConfig as PatrickStarSFTConfig
    from hf_patrickstar.integrations.trl import PatrickStarSFTTrainer as PatrickStarSFTTrainer
    from hf_patrickstar.planner.from_python import plan
    from hf_patrickstar.planner.training_plan import Chunks, Plan, Speed, TierUse, TriedChange

_LAZY = {
    "deferred_weights": "hf_patrickstar.checkpoint.weight_files",
    "PatrickStarConfig": "hf_patrickstar.config",
    **dict.fromkeys(("PatrickStarEngine", "get_engine", "initialize_engine"), "hf_patrickstar.engine"),
    "PatrickStarAccelerator": "hf_patrickstar.integrations.accelerator",
    **dict.fromkeys(("PatrickStarTrainer", "PatrickStarTrainerMixin"), "hf_patrickstar.integrations.trainer"),
    "PatrickStarArgumentsMixin": "hf_patrickstar.integrations.training_args",
    "PatrickStarTrainingArguments": "hf_patrickstar.integrations.training_args",
    **dict.fromkeys(("Chunks", "Plan", "Speed", "TierUse", "TriedChange"), "hf_patrickstar.planner.training_plan"),
    "plan": "hf_patrickstar.planner.from_python",
}

# These need TRL, which is optional, so they are not in __all__: "from hf_patrickstar import *" would fail without it.
_OF_TRL = {
    *("PatrickStarDPOConfig", "PatrickStarDPOTrainer", "PatrickStarGRPOConfig", "PatrickStarGRPOTrainer"),
    *("PatrickStarSFTConfig", "PatrickStarSFTTrainer"),
}

__all__ = [
    "BudgetError",
    "CheckpointError",
    "Chunks",
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
    "Plan",
    "Speed",
    "TierUse",
    "TriedChange",
    "__version__",
    "deferred_weights",
    "get_engine",
    "initialize_engine",
    "plan",
]


if not TYPE_CHECKING:  # where type checkers see a __getattr__, every name is there, misspelled ones too

    def __getattr__(name: str) -> Any:
        """Imports torch, transformers and accelerate only when something that needs them is asked for."""
        if name in _LAZY or name in _OF_TRL:
            import importlib

            return getattr(importlib.import_module(_LAZY.get(name, "hf_patrickstar.integrations.trl")), name)
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
