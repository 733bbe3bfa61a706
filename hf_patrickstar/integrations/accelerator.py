"""``PatrickStarAccelerator``: Accelerate's interface over the engine."""

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, DynamoBackend
from accelerate.utils.other import is_repeated_blocks

from hf_patrickstar.config import ConfigSource, PatrickStarConfig
from hf_patrickstar.dist.watchdog import announce
from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.errors import ConfigError, EngineError
from hf_patrickstar.integrations.accelerator_checkpoints import AcceleratorCheckpoints, engine_of, engines_of
from hf_patrickstar.integrations.accelerator_optimizers import (
    PreparedOptimizer,
    families,
    held_by,
    innermost,
    unwrapped,
)
from hf_patrickstar.model.model_set import ModelSet, roots_of
from hf_patrickstar.optim.optimizer import ChunkedOptimizer
from hf_patrickstar.optim.scaler import ChunkedGradScaler


class PatrickStarAccelerator(AcceleratorCheckpoints):
    """An ``accelerate.Accelerator`` whose prepared model and optimizer live in chunks.

    ``prepare(model, optimizer, ...)`` attaches an engine to the model, which stays the same object, and returns an
    optimizer over chunks. ``backward``, ``clip_grad_norm_``, ``accumulate``, ``save_state`` and ``load_state`` are
    used as always. With ``mixed_precision`` the model computes under autocast, and parameters that autocast would round
    are 16-bit, with fp32 masters.

    Source: PatrickStar section 8.5, with Accelerate's interface in place of the paper's.

    Args:
        *args: As for ``Accelerator``.
        patrickstar_config: Settings; a ``PatrickStarConfig``, dictionary, JSON text or path.
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``; by default what ``accelerate launch`` was told.
        **kwargs: As for ``Accelerator``.

    Raises:
        ConfigError: If a setting cannot work, or processes that were launched together would train alone.
    """

    def __init__(
        self, *args: Any, patrickstar_config: ConfigSource = None, mixed_precision: str | None = None, **kwargs: Any
    ) -> None:
        precision = mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        super().__init__(*args, mixed_precision="no", **kwargs)
        config = PatrickStarConfig.from_any(patrickstar_config)
        self.set_up_patrickstar(config, precision, self.gradient_state.num_steps)

    def set_up_patrickstar(
        self,
        config: PatrickStarConfig,
        precision: str,
        accumulation_steps: int,
        on_decided: Callable[[str], object] | None = None,
    ) -> None:
        """Completes an accelerator that was made without mixed precision, here or by a Trainer.

        Args:
            config: Settings.
            precision: ``"no"``, ``"bf16"`` or ``"fp16"``.
            accumulation_steps: Micro-batches per step.
            on_decided: See ``PatrickStarEngine``; for each engine that it will make.

        Raises:
            ConfigError: If a setting cannot work, or processes that were launched together would train alone.
        """
        if precision not in ("no", "bf16", "fp16"):
            raise ConfigError(f"mixed_precision='{precision}' is not supported; use bf16, fp16 or no")
        if self.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM):
            raise ConfigError(
                f"Accelerate was configured for {self.distributed_type.value}, which manages parameters itself; remove "
                "it from the accelerate config or from the arguments"
            )
        if (launched := int(os.environ.get("WORLD_SIZE", "1"))) > 1 and self.num_processes == 1:
            raise ConfigError(
                f"{launched} processes were launched, but Accelerate lets each of them train alone; on a machine "
                "without accelerators pass --use_cpu (TrainingArguments) or Accelerator(cpu=True), or set "
                "ACCELERATE_USE_CPU=true"
            )
        announce()
        self.patrickstar_config = config
        self._patrickstar_precision = precision
        self._patrickstar_options = {"gradient_accumulation_steps": accumulation_steps, "on_decided": on_decided}
        self.patrickstar_dtype = precision if config.dtype == "auto" else config.dtype
        self._patrickstar_preparing: list[torch.nn.Module] = []
        self.scaler = ChunkedGradScaler(self.device.type) if self.patrickstar_dtype == "fp16" else None

    @property
    def mixed_precision(self) -> str:
        """The precision that was asked for: ``"no"``, ``"bf16"`` or ``"fp16"``."""
        return str(getattr(self, "_patrickstar_precision", "no"))

    def autocast(self, autocast_handler: Any = None) -> Any:
        """The autocast context of the model's forward, for losses that are computed outside of it.

        Its type is ``mixed_precision``, unless ``dtype`` of the configuration names another one.

        Args:
            autocast_handler: As for ``Accelerator.autocast``.
        """
        if not self._computes_under_autocast:
            return contextlib.nullcontext()
        kwargs = {} if autocast_handler is None else autocast_handler.to_kwargs()
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[self.patrickstar_dtype]
        return torch.autocast(self.device.type, **{"dtype": dtype, "cache_enabled": False, **kwargs})

    @property
    def _computes_under_autocast(self) -> bool:
        return self.patrickstar_dtype in ("bf16", "fp16") and self.patrickstar_config.autocast is not False

    # Preparing

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepares objects as ``Accelerator.prepare`` does; models get engines, and optimizers get places in chunks.

        Each optimizer trains the models whose parameters it holds, even if it was prepared before them. Models that
        share an optimizer share an engine; every other model has its own engine.

        Args:
            *args: Models, optimizers, data loaders, schedulers, in any order.
            device_placement: As for ``Accelerator.prepare``; not used for what is in chunks.

        Raises:
            EngineError: If a model cannot be managed.
            ConfigError: If a setting cannot work for this model.
            BudgetError: If a budget is too small.
        """
        models = [item for item in args if isinstance(item, torch.nn.Module)]
        with mock.patch.object(self, "_patrickstar_preparing", models):
            self._connect(models, [item for item in args if isinstance(item, torch.optim.Optimizer)])
            return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Prepares a model: unchanged if it has an engine, else it gets one.

        Any optimizer can train a model that was prepared without one, whether the optimizer is prepared or not.

        Args:
            model: The model.
            device_placement: Not used; chunks decide.
            evaluation_mode: Whether it will not be trained.

        Returns:
            The same model.
        """
        if engine_of(model) is None:
            is_frozen = not any(parameter.requires_grad for parameter in model.parameters())
            if is_frozen and not evaluation_mode:  # a teacher, for example, which Accelerate prepares as usual
                with (
                    mock.patch.object(self, "native_amp", self._computes_under_autocast),
                    mock.patch.object(self.state, "_mixed_precision", self.patrickstar_dtype),
                ):
                    return super().prepare_model(model, device_placement, evaluation_mode=True)
            self._connect([model], [], is_training=not evaluation_mode)
        if model not in self._models:
            self._models.append(model)
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Wraps the chunked form of an optimizer as Accelerate does.

        Args:
            optimizer: A torch optimizer, or one that was prepared before. Until its model is prepared, the returned
                optimizer steps as the torch optimizer does; from then on it trains the model in chunks.
            device_placement: Not used; states live where their chunks are.

        Returns:
            An ``AcceleratedOptimizer``.
        """
        if not isinstance(optimizer, PreparedOptimizer):
            self._connect([], [optimizer])
            optimizer = PreparedOptimizer(unwrapped(optimizer), device_placement=False, scaler=self.scaler)
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        self._point(optimizer)
        return optimizer

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Wraps a scheduler as Accelerate does; the scheduler steps with the optimizer that it was made for.

        Args:
            scheduler: A torch scheduler, or one that was prepared before.
        """
        prepared = super().prepare_scheduler(scheduler)
        own = [item for item in self._optimizers if innermost(item) is getattr(scheduler, "optimizer", None)]
        if own and prepared is not scheduler:
            prepared.optimizers = own
        return prepared

    def _connect(
        self, models: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer], *, is_training: bool = True
    ) -> None:
        """Makes or extends the engines of models and optimizers that are prepared now, and of those they belong to."""
        all_models = list(dict.fromkeys([*self._models, *self._patrickstar_preparing, *models]))
        given = list(dict.fromkeys(map(innermost, optimizers)))
        if not any(held_by(optimizer) for optimizer in given) and given and models:
            raise EngineError(
                "the optimizer has no parameter to update: the model has no trainable parameter (every requires_grad "
                "is False?); unfreeze what should be trained"
            )
        # The newest optimizer first: of several that hold a parameter, the first one updates it in its chunk.
        known = list(dict.fromkeys([*given, *map(innermost, self._optimizers)])) if is_training else []
        for members, own in families(all_models, known):
            is_new = any(model in models for model in members) or any(optimizer in given for optimizer in own)
            trained = [model for model in members if any(parameter.requires_grad for parameter in model.parameters())]
            if is_new and (trained or own or not is_training):
                self._engage(trained or members, own)
        for prepared in [*self._optimizers, *optimizers]:
            self._point(prepared)

    def _engage(self, models: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
        """Makes one engine train these models with these optimizers."""
        engines = engines_of(models)
        if len(engines) == 1 and {*map(id, roots_of(engines[0].model))} == {*map(id, models)}:
            engine = engines[0]
            present = [item.inner for item in engine.optimizers]
            if not (new := [optimizer for optimizer in optimizers if optimizer not in present]):
                return
            held = set().union(*map(held_by, present))
            if present and all(item in optimizers for item in present) and all(map(held.isdisjoint, map(held_by, new))):
                for optimizer in new:
                    engine.add_optimizer(optimizer)
                return
        plugin = self.state.dynamo_plugin
        for model in models if plugin.backend != DynamoBackend.NO else ():
            regions = [block for part in model.modules() if is_repeated_blocks(part) for block in part.children()]
            for part in regions if plugin.use_regional_compilation and regions else [model]:
                part.compile(**plugin.to_kwargs())  # in place: the engine says where the model is too large for that
        options: dict[str, Any] = {"precision": self._patrickstar_precision, **self._patrickstar_options}
        together = models[0] if len(models) == 1 else ModelSet(models)
        PatrickStarEngine(together, self.patrickstar_config, optimizers, device=self.device, **options)

    def _chunked(self, optimizer: torch.optim.Optimizer) -> ChunkedOptimizer | None:
        """The ``ChunkedOptimizer`` of a user's optimizer, or ``None``."""
        engines = engines_of([*self._models, *self._patrickstar_preparing])
        found = (item for engine in engines for item in engine.optimizers)
        return next((item for item in found if item.inner is optimizer), None)

    def _point(self, optimizer: Any) -> None:
        """Makes the wrapper that was returned for an optimizer use the optimizer's current ``ChunkedOptimizer``."""
        if (chunked := self._chunked(innermost(optimizer))) is not None and isinstance(optimizer, PreparedOptimizer):
            optimizer.take(chunked)

    # Gradients

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Runs backward as ``Accelerator.backward`` does; warns of the first loss after a resume that is not finite.

        Args:
            loss: A scalar tensor.
            **kwargs: As for ``Accelerator.backward``.
        """
        super().backward(loss, **kwargs)
        for engine in engines_of(self._models):
            engine.checkpoints.note(loss, "loss")

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscales the gradients of optimizers, by default of all; see ``ChunkedOptimizer.unscale``."""
        if self.scaler is None:
            return
        optimizers = self._optimizers if optimizer is None else optimizer
        for item in optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]:
            self.scaler.unscale_(unwrapped(item))

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """Clips gradients by global norm.

        Args:
            parameters: Parameters whose gradients are clipped together, of one model or of several.
            max_norm: The largest norm that is not clipped.
            norm_type: Order of the norm.

        Returns:
            The norm before clipping, a scalar tensor.
        """
        parameters, optimizer = self._begin_clipping(parameters)
        clip = torch.nn.utils.clip_grad_norm_ if optimizer is None else optimizer.clip_grad_norm_
        norm = clip(parameters, float(max_norm), float(norm_type))
        for engine in engines_of(self._models) if self.scaler is None else ():  # else an overflow is no surprise
            engine.checkpoints.note(norm, "gradient norm")
        return norm

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clips every element of gradients to ``[-clip_value, clip_value]``.

        Args:
            parameters: Parameters whose gradients are clipped, of one model or of several.
            clip_value: The bound.
        """
        parameters, optimizer = self._begin_clipping(parameters)
        if optimizer is not None:
            optimizer.clip_grad_value_(clip_value, parameters)
        else:
            torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def _begin_clipping(self, parameters: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], ChunkedOptimizer | None]:
        """Unscales gradients; returns the parameters, and the optimizer that can clip them in their chunks.

        That is ``None`` if the gradients are not all in one engine that has an optimizer; then torch clips them.
        """
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        wanted = {id(parameter) for parameter in parameters}
        self.unscale_gradients([item for item in self._optimizers if not wanted.isdisjoint(held_by(item))])
        found = [e for e in engines_of(self._models) if any(map(e.manager.find, parameters))]
        return parameters, found[0].optimizer if len(found) == 1 else None
