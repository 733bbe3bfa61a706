"""A plug-in for axolotl: two keys in its YAML make it train in chunks.

::

    plugins:
      - hf_patrickstar.integrations.axolotl.PatrickStarPlugin
    patrickstar: true
    patrickstar_config:
      device_budget: 8GiB

[Note: axolotl]
axolotl asks its plug-ins for a mixin of its training arguments, for values of these, and for a trainer's class. The
first plug-in that names a class decides, in place of axolotl's own choice. So this plug-in finds the class that axolotl
would take without it, from the other plug-ins or from its builder, and puts ``PatrickStarTrainerMixin`` before it. With
``rl``, axolotl passes no model to a plug-in's class, but it does to the one that ``trainer_cls`` names; there the
plug-in sets ``trainer_cls`` to a name in this module, and ``__getattr__`` makes that class.

axolotl reads a model onto the device, all of it, before there is a trainer, and moves it there where several processes
train. ``pre_model_load`` lets it stay in host memory, from where the engine fills its chunks.
"""

import types
from typing import Any

from axolotl.integrations.base import BasePlugin, PluginManager
from axolotl.utils.dict import DictDefault
from pydantic import BaseModel, Field, model_validator

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.integrations.trainer import PatrickStarTrainerMixin

_KEYS = ("patrickstar", "patrickstar_config", "patrickstar_logging", "patrickstar_report")
_OTHERS = ("deepspeed", "fsdp", "fsdp_config", "torch_compile", "load_in_8bit", "load_in_4bit", "gptq")
_PREFIX = "PatrickStar"


class PatrickStarArgs(BaseModel):
    """The keys that the plug-in adds to axolotl's YAML; the arguments of ``PatrickStarArgumentsMixin``."""

    patrickstar: bool | None = Field(default=None, description="Train with model data in chunks.")
    patrickstar_config: dict[str, Any] | str | None = Field(
        default=None, description="Settings of the engine, as PatrickStarConfig names them, or the path of a JSON file."
    )
    patrickstar_logging: str | bool | None = Field(default=None, description="'off', 'brief' or 'all'.")
    patrickstar_report: bool | None = Field(default=None, description="Record what 'hf-patrickstar report' shows.")

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
        try:
            PatrickStarConfig.from_any(_plain(data.get("patrickstar_config")))
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return data


class PatrickStarPlugin(BasePlugin):
    """Makes axolotl train in chunks where its YAML says ``patrickstar: true``; otherwise it changes nothing.

    See [Note: axolotl]. Tried with axolotl 0.19.0.
    """

    def get_input_args(self) -> str:
        """The path of the class of keys that the YAML may have."""
        return f"{__name__}.{PatrickStarArgs.__name__}"

    def get_training_args_mixin(self) -> str:
        """The path of the mixin of training arguments."""
        return "hf_patrickstar.integrations.training_args.PatrickStarArgumentsMixin"

    def get_training_args(self, cfg: DictDefault) -> dict[str, Any]:
        """The values of the mixin's arguments.

        Args:
            cfg: axolotl's configuration.
        """
        if not cfg.patrickstar:
            return {}
        return {key: _plain(cfg[key]) for key in _KEYS if cfg[key] is not None}

    def pre_model_load(self, cfg: DictDefault) -> None:
        """Lets the model stay in host memory, and chooses the trainer's class where ``rl`` is set.

        Args:
            cfg: axolotl's configuration, which is changed.

        Raises:
            ConfigError: If ``trainer_cls`` names a class that does not train in chunks.
        """
        if not cfg.patrickstar:
            return
        cfg.device_map = "cpu"
        cfg.experimental_skip_move_to_device = True
        if cfg.rl and not str(cfg.trainer_cls or "").startswith(f"{__name__}."):
            from axolotl.core.builders.rl import HFRLTrainerBuilder

            chosen = _chosen_by(HFRLTrainerBuilder, cfg, {})[0]
            if issubclass(chosen, PatrickStarTrainerMixin):
                return
            if cfg.trainer_cls:
                raise ConfigError(
                    f"trainer_cls '{cfg.trainer_cls}' does not train in chunks; derive it from "
                    "hf_patrickstar.PatrickStarTrainerMixin, before axolotl's class"
                )
            cfg.trainer_cls = f"{__name__}.{_PREFIX}{chosen.__name__}"

    def get_trainer_cls(self, cfg: DictDefault) -> type | None:
        """The class that axolotl would take without this plug-in, made to train in chunks.

        Args:
            cfg: axolotl's configuration.

        Returns:
            The class; ``None`` without ``patrickstar``, and with ``rl``, where ``trainer_cls`` names it.
        """
        if not cfg.patrickstar or cfg.rl:
            return None
        others = (item for item in PluginManager.get_instance().plugins.values() if item is not self)
        chosen = next((found for found in (other.get_trainer_cls(cfg) for other in others) if found is not None), None)
        if chosen is None:
            from axolotl.core.builders.causal import HFCausalTrainerBuilder

            chosen = _chosen_by(HFCausalTrainerBuilder, cfg)
        return _with_chunks(chosen)

    def post_trainer_create(self, cfg: DictDefault, trainer: Any) -> None:
        """Checks that the trainer trains in chunks.

        Args:
            cfg: axolotl's configuration.
            trainer: The trainer that axolotl has made.

        Raises:
            ConfigError: If another plug-in has chosen a trainer that does not.
        """
        if cfg.patrickstar and not isinstance(trainer, PatrickStarTrainerMixin):
            raise ConfigError(
                f"axolotl trains with {type(trainer).__name__}, which another plug-in has chosen, and which knows "
                "nothing of chunks; name hf_patrickstar.integrations.axolotl.PatrickStarPlugin first in 'plugins'"
            )

    def post_train(self, cfg: DictDefault, model: Any) -> None:
        """With several processes, gives the model back as ordinary tensors, since axolotl saves it on rank 0 alone.

        Each process then has the whole model in host memory.

        Args:
            cfg: axolotl's configuration.
            model: The trained model.
        """
        engine = getattr(model, "patrickstar_engine", None)
        if cfg.patrickstar and engine is not None and not engine.manager.sharing.is_alone:
            engine.detach()


def __getattr__(name: str) -> Any:
    """A trainer of axolotl's for ``rl`` with chunks: ``PatrickStarAxolotlDPOTrainer`` of ``AxolotlDPOTrainer``."""
    if name.startswith(f"{_PREFIX}Axolotl"):
        import axolotl.core.trainers
        import axolotl.core.trainers.grpo.trainer

        for module in (axolotl.core.trainers, axolotl.core.trainers.grpo.trainer):
            base = getattr(module, name.removeprefix(_PREFIX), None)
            if base is not None:
                return _with_chunks(base)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def _chosen_by(builder: Any, cfg: DictDefault, *args: Any) -> Any:
    """What a builder of axolotl's chooses without plug-ins."""
    alone = DictDefault({**cfg, "plugins": None})
    return builder._get_trainer_cls(types.SimpleNamespace(cfg=alone, model=None, model_ref=None), *args)


def _with_chunks(base: type) -> type:
    if issubclass(base, PatrickStarTrainerMixin):
        return base
    return type(f"{_PREFIX}{base.__name__}", (PatrickStarTrainerMixin, base), {"__module__": __name__})


def _plain(value: Any) -> Any:
    """Settings as an ordinary dictionary; axolotl's own gives ``None`` for a key that is not there."""
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value
