"""``PatrickStarTrainingArguments``: transformers' arguments and four more."""

import dataclasses
import os
from typing import Any, Literal, get_args

from transformers import TrainingArguments

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.errors import ConfigError

_NOT_PER_CHUNK = ("lomo", "adalomo")
Logging = Literal["off", "brief", "all"]
"""What is logged of the engine with each training loss."""


@dataclasses.dataclass
class PatrickStarArgumentsMixin:
    """Gives the four arguments to any subclass of ``TrainingArguments``; put it first in the bases of a dataclass::

        @dataclasses.dataclass
        class MyArguments(PatrickStarArgumentsMixin, Seq2SeqTrainingArguments): ...

    Args:
        patrickstar: Train with model data in chunks.
        patrickstar_config: Settings of the engine: a dictionary, JSON text, or the path of a JSON file; see
            ``PatrickStarConfig`` for the keys.
        patrickstar_logging: How many figures of the engine are logged with each training loss; docs/report.md lists
            them. ``log_history`` never has any.
        patrickstar_report: Whether a run records in the cache (``HF_ASSETS_CACHE``) what ``hf-patrickstar report
            OUTPUT_DIR`` shows. ``output_dir`` gets nothing of it.

    Raises:
        ConfigError: If arguments cannot work together.
    """

    patrickstar: bool = dataclasses.field(
        default=False,
        metadata={"help": "Train with model data in chunks that move between device and host (PatrickStar)."},
    )
    patrickstar_config: dict[str, Any] | str | None = dataclasses.field(
        default=None,
        metadata={
            "help": "Settings of PatrickStar: JSON text or the path of a JSON file, for example "
            '\'{"device_budget": "8GiB"}\'. See PatrickStarConfig.'
        },
    )
    patrickstar_logging: Logging = dataclasses.field(
        default="brief",
        metadata={
            "help": "Figures of PatrickStar with each training loss. 'brief': five for the report_to backends, two on "
            "the console when they change. 'all': all for both. 'off': none."
        },
    )
    patrickstar_report: bool = dataclasses.field(
        default=True,
        metadata={
            "help": "Record small files in the cache that 'hf-patrickstar report OUTPUT_DIR' makes a page of. "
            "No effect without --patrickstar."
        },
    )

    _has_trainer = False  # whether a Trainer with PatrickStarTrainerMixin has these arguments

    def __post_init__(self) -> None:
        """Validates the combination of arguments.

        Raises:
            ConfigError: If arguments cannot work together; the message says what to do.
        """
        if self.patrickstar_logging is False:  # YAML reads off as false
            self.patrickstar_logging = "off"
        if self.patrickstar_logging not in get_args(Logging):
            choices = ", ".join(map(repr, get_args(Logging)))
            raise ConfigError(f"patrickstar_logging is {self.patrickstar_logging!r}; it must be one of {choices}")
        engines = (("fsdp", "ACCELERATE_USE_FSDP"), ("deepspeed", "ACCELERATE_USE_DEEPSPEED"))
        for name, flag in engines if self.patrickstar else ():
            if getattr(self, name) or os.environ.get(flag, "").lower() in ("true", "1"):
                raise ConfigError(
                    f"--patrickstar and {name} both manage parameters; drop --{name} (and {name} in the accelerate "
                    "config), or drop --patrickstar"
                )
        super().__post_init__()  # type: ignore[misc]
        if not self.patrickstar:
            if self.patrickstar_config is not None:
                raise ConfigError("patrickstar_config is given but patrickstar is not; add --patrickstar")
            return
        config = PatrickStarConfig.from_any(self.patrickstar_config)
        if self._refuse_unsupported():  # recomputed blocks are asked to offload their inputs
            if config.activation_offload is False:
                raise ConfigError(
                    "offload in the arguments of gradient checkpointing and activation_offload=false contradict each "
                    "other; drop one of them"
                )
            config = dataclasses.replace(config, activation_offload=True)
        if self.patrickstar_config is not None or config.activation_offload is True:
            self.patrickstar_config = config.to_dict()
        # The engine trains 16-bit parameters with fp32 masters, so Accelerate must not autocast on top.
        arguments: Any = self  # the fields of the TrainingArguments class behind the mixin
        arguments.patrickstar_precision, arguments.mixed_precision = arguments.mixed_precision, "no"

    def _refuse_unsupported(self) -> bool:
        """Refuses what does not work; returns whether recomputed blocks are asked to offload their inputs."""
        arguments: Any = self
        is_offloading = False
        # transformers 5.17 has the older name alone, and later versions keep it as an alias.
        name = "activation_checkpointing" if hasattr(self, "activation_checkpointing") else "gradient_checkpointing"
        if getattr(self, name):
            kwargs = dict(getattr(self, f"{name}_kwargs") or {})
            if kwargs.setdefault("use_reentrant", False):
                raise ConfigError(
                    "reentrant checkpointing hides the backward of parameters; pass "
                    f"--{name}_kwargs '{{\"use_reentrant\": false}}'"
                )
            is_offloading = bool(kwargs.pop("offload", False))  # of transformers, which copies in the compute stream
            for alias in {name, "gradient_checkpointing"}:
                setattr(self, f"{alias}_kwargs", kwargs)
        optim = str(getattr(arguments.optim, "value", arguments.optim))
        if optim in _NOT_PER_CHUNK or optim.endswith("_layerwise"):
            raise ConfigError(
                f"--optim {optim} updates parameters inside backward, the engine after it; "
                "use --optim adamw_torch_fused"
            )
        for flag in ("fp16", "bf16"):
            if getattr(self, f"{flag}_full_eval") and not getattr(self, flag):
                raise ConfigError(
                    f"--{flag}_full_eval would change the type of parameters in chunks; use --{flag} instead"
                )
        return is_offloading

    @property
    def place_model_on_device(self) -> bool | None:
        """With ``patrickstar``, the engine places parameters; every Trainer reads this when it is made.

        Raises:
            ConfigError: With ``patrickstar``, if no Trainer that trains in chunks was given these arguments.
        """
        if not self.patrickstar:
            return super().place_model_on_device  # type: ignore[misc, no-any-return]
        if not self._has_trainer:
            raise ConfigError(
                "--patrickstar is given, but this Trainer does not train in chunks; use PatrickStarTrainer or put "
                "PatrickStarTrainerMixin before its class, or drop --patrickstar"
            )
        return False

    @property
    def n_gpu(self) -> int:
        """With ``patrickstar``, at most one: ``nn.DataParallel`` is never chosen for the user."""
        count = super().n_gpu  # type: ignore[misc]
        return min(count, 1) if self.patrickstar else count


@dataclasses.dataclass
class PatrickStarTrainingArguments(PatrickStarArgumentsMixin, TrainingArguments):
    """``transformers.TrainingArguments`` with ``patrickstar`` and three more that begin with it.

    Without ``patrickstar`` everything is as in transformers.

    Args:
        patrickstar: Train with model data in chunks.
        patrickstar_config: Settings of the engine: a dictionary, JSON text, or the path of a JSON file; see
            ``PatrickStarConfig`` for the keys.
        patrickstar_logging: How many figures of the engine are logged with each training loss; docs/report.md lists
            them. ``log_history`` never has any.
        patrickstar_report: Whether a run records in the cache (``HF_ASSETS_CACHE``) what ``hf-patrickstar report
            OUTPUT_DIR`` shows. ``output_dir`` gets nothing of it.

    Source: the design of ``transformers.TrainingArguments``; the settings are those of PatrickStar sections 6 and 8.

    Raises:
        ConfigError: If arguments cannot work together.
    """
