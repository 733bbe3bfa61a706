"""A plug-in for axolotl: two keys in its YAML make it train in chunks.

::

    plugins:
      - hf_patrickstar.integrations.axolotl.PatrickStarPlugin
    patrickstar: true
    patrickstar_config:
      device_budget: 8GiB

[Note: axolotl]
axolotl asks its plug-ins for a mixin of its training arguments, for values of these, and for a trainer's class. This
plug-in finds the class that axolotl would take without plug-ins, and puts ``PatrickStarTrainerMixin`` before it. With
``rl``, axolotl passes no model to a plug-in's class, but it does to the one that ``trainer_cls`` names; there the
plug-in sets ``trainer_cls`` to a name in this module, and ``__getattr__`` makes that class.

axolotl reads a model onto the device, all of it, before there is a trainer. ``pre_model_load`` lets it stay in host
memory, from where the engine fills its chunks.
"""

import os
import types
from typing import Any

from axolotl.integrations.base import BasePlugin, PluginManager
from axolotl.utils.dict import DictDefault
from pydantic import BaseModel, model_validator

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.integrations.trainer import PatrickStarTrainerMixin

_OTHERS = ("deepspeed", "fsdp", "fsdp_config", "torch_compile", "load_in_8bit", "load_in_4bit", "gptq")
_PREFIX = "PatrickStar"


class PatrickStarArgs(BaseModel):
    """The keys that the plug-in adds to axolotl's YAML; the arguments of ``PatrickStarArgumentsMixin``."""

    patrickstar: bool | None = None
    patrickstar_config: dict[str, Any] | str | None = None
    patrickstar_logging: str | bool | None = None
    patrickstar_report: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def check_patrickstar(cls, data: Any) -> Any:
        """Refuses, before a model is read, what cannot work.

        Raises:
            ValueError: If a setting makes no sense, or another key asks for what chunks cannot do.
        """
        if not data.get("patrickstar"):
            if data.get("patrickstar_config") is not None:
                raise ValueError("patrickstar_config is given but patrickstar is not; add 'patrickstar: true'")
            return data
        for key in _OTHERS:
            if data.get(key):
                raise ValueError(f"'patrickstar: true' cannot train together with '{key}'; drop one of the two")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("the plug-in works with one process, since axolotl saves on rank 0 alone; start one")
        PatrickStarConfig.from_any(_plain(data.get("patrickstar_config")))
        return data


class PatrickStarPlugin(BasePlugin):
    """Makes axolotl train in chunks where its YAML says ``patrickstar: true``; otherwise it changes nothing.

    See [Note: axolotl]. Tried with axolotl 0.19.0, in one process: full, LoRA, ``rl: dpo`` and ``rl: grpo``.
    """

    def get_input_args(self) -> str:
        """The path of the class of keys that the YAML may have."""
        return f"{__name__}.{PatrickStarArgs.__name__}"

    def get_training_args_mixin(self) -> str:
        """The path of the mixin of training arguments."""
        return "hf_patrickstar.integrations.training_args.PatrickStarArgumentsMixin"

    def get_training_args(self, cfg: DictDefault) -> dict[str, Any]:
        """The values of the mixin's arguments."""
        keys = PatrickStarArgs.model_fields if cfg.patrickstar else ()
        return {key: _plain(cfg[key]) for key in keys if cfg[key] is not None}

    def pre_model_load(self, cfg: DictDefault) -> None:
        """Lets the model stay in host memory, and chooses the trainer's class where ``rl`` is set.

        Raises:
            ConfigError: If another plug-in chooses a trainer.
        """
        if not cfg.patrickstar:
            return
        for other in PluginManager.get_instance().plugins.values():
            if other is not self and (chosen := other.get_trainer_cls(cfg)) is not None:
                raise ConfigError(
                    f"the plug-in {type(other).__name__} chooses {chosen.__name__}, which does not train in chunks; "
                    "remove it from 'plugins', or drop 'patrickstar: true'"
                )
        cfg.device_map = "cpu"
        cfg.experimental_skip_move_to_device = True
        if cfg.rl and not cfg.trainer_cls:
            from axolotl.core.builders.rl import HFRLTrainerBuilder

            cfg.trainer_cls = f"{__name__}.{_PREFIX}{_chosen_by(HFRLTrainerBuilder, cfg, {})[0].__name__}"

    def get_trainer_cls(self, cfg: DictDefault) -> type | None:
        """The class that axolotl would take without plug-ins, made to train in chunks.

        Returns:
            The class; ``None`` without ``patrickstar``, and with ``rl``, where ``trainer_cls`` names it.
        """
        if not cfg.patrickstar or cfg.rl:
            return None
        from axolotl.core.builders.causal import HFCausalTrainerBuilder

        return _with_chunks(_chosen_by(HFCausalTrainerBuilder, cfg))

    def post_trainer_create(self, cfg: DictDefault, trainer: Any) -> None:
        """Checks that the trainer trains in chunks.

        Raises:
            ConfigError: If ``trainer_cls`` names one that does not.
        """
        if cfg.patrickstar and not isinstance(trainer, PatrickStarTrainerMixin):
            raise ConfigError(
                f"axolotl trains with {type(trainer).__name__}, which does not train in chunks; derive 'trainer_cls' "
                "from PatrickStarTrainerMixin"
            )


def __getattr__(name: str) -> Any:
    """A trainer of axolotl's for ``rl`` with chunks: ``PatrickStarAxolotlDPOTrainer`` of ``AxolotlDPOTrainer``."""
    if name.startswith(f"{_PREFIX}Axolotl"):
        import axolotl.core.trainers
        import axolotl.core.trainers.grpo.trainer

        for module in (axolotl.core.trainers, axolotl.core.trainers.grpo.trainer):
            if hasattr(module, name.removeprefix(_PREFIX)):
                return _with_chunks(getattr(module, name.removeprefix(_PREFIX)))
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def _chosen_by(builder: Any, cfg: DictDefault, *args: Any) -> Any:
    """What a builder of axolotl's chooses without plug-ins."""
    alone = DictDefault({**cfg, "plugins": None})
    return builder._get_trainer_cls(types.SimpleNamespace(cfg=alone, model=None, model_ref=None), *args)


def _with_chunks(base: type) -> type:
    return type(f"{_PREFIX}{base.__name__}", (PatrickStarTrainerMixin, base), {"__module__": __name__})


def _plain(value: Any) -> Any:
    """Settings as an ordinary dictionary; axolotl's own gives ``None`` for a key that is not there."""
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value
