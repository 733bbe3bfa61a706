"""TRL's trainers with chunks: ``SFTTrainer``, ``DPOTrainer`` and ``GRPOTrainer``; docs/plugins.md lists the others.

Change the imports and pass ``patrickstar=True``::

    from hf_patrickstar.integrations.trl import PatrickStarSFTConfig as SFTConfig
    from hf_patrickstar.integrations.trl import PatrickStarSFTTrainer as SFTTrainer

Any other trainer of TRL takes the same two mixins. This module imports TRL, which is an optional package:
``pip install 'hf_patrickstar[trl]'``.
"""

import dataclasses

from hf_patrickstar.integrations.trainer import PatrickStarTrainerMixin
from hf_patrickstar.integrations.training_args import PatrickStarArgumentsMixin

try:
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
except ModuleNotFoundError as error:
    if error.name != "trl":
        raise
    raise ModuleNotFoundError(
        "hf_patrickstar.integrations.trl needs TRL, which is not installed; run: pip install 'hf_patrickstar[trl]'",
        name="trl",
    ) from error


@dataclasses.dataclass
class PatrickStarSFTConfig(PatrickStarArgumentsMixin, SFTConfig):
    """``trl.SFTConfig`` with ``patrickstar`` and three more arguments; see ``PatrickStarArgumentsMixin``.

    Raises:
        ConfigError: If arguments cannot work together.
    """


@dataclasses.dataclass
class PatrickStarDPOConfig(PatrickStarArgumentsMixin, DPOConfig):
    """``trl.DPOConfig`` with ``patrickstar`` and three more arguments; see ``PatrickStarArgumentsMixin``.

    Raises:
        ConfigError: If arguments cannot work together.
    """


@dataclasses.dataclass
class PatrickStarGRPOConfig(PatrickStarArgumentsMixin, GRPOConfig):
    """``trl.GRPOConfig`` with ``patrickstar`` and three more arguments; see ``PatrickStarArgumentsMixin``.

    Raises:
        ConfigError: If arguments cannot work together.
    """


class PatrickStarSFTTrainer(PatrickStarTrainerMixin, SFTTrainer):
    """``trl.SFTTrainer``; with ``PatrickStarSFTConfig(patrickstar=True)`` it trains in chunks.

    Raises:
        ConfigError: At construction, if a setting or the model cannot work.
        BudgetError: From ``train`` or ``evaluate``, if a budget (bytes) is too small; the model is as it was.
        EngineError: From ``train``, if the model cannot be managed.
    """


class PatrickStarDPOTrainer(PatrickStarTrainerMixin, DPOTrainer):
    """``trl.DPOTrainer``; with ``PatrickStarDPOConfig(patrickstar=True)`` it trains in chunks.

    A reference model that is given, or read beside the trained one, is in chunks too, with an engine of its own and the
    same settings. With adapters the reference is the frozen base itself.

    Raises:
        ConfigError: At construction, if a setting or the model cannot work.
        BudgetError: From ``train`` or ``evaluate``, if a budget (bytes) is too small; the model is as it was.
        EngineError: From ``train``, if the model cannot be managed.
    """


class PatrickStarGRPOTrainer(PatrickStarTrainerMixin, GRPOTrainer):
    """``trl.GRPOTrainer``; with ``PatrickStarGRPOConfig(patrickstar=True)`` it trains in chunks.

    Text is generated from the model in chunks, or by vLLM. vLLM gets the values one parameter at a time, in TRL's own
    loop; of what was handed out at most two parameters, with adapters three, are in memory at once.

    Raises:
        ConfigError: At construction, if a setting or the model cannot work.
        BudgetError: From ``train`` or ``evaluate``, if a budget (bytes) is too small; the model is as it was.
        EngineError: From ``train``, if the model cannot be managed.
    """
