"""``PatrickStarAccelerator``: Accelerate's interface over the engine."""

import os
from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, DynamoBackend

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.errors import ConfigError, EngineError
from hf_patrickstar.integrations.accelerator_checkpoints import AcceleratorCheckpoints, get_engine
from hf_patrickstar.optim.optimizer import ChunkedOptimizer
from hf_patrickstar.optim.scaler import ChunkedGradScaler


class PatrickStarAccelerator(AcceleratorCheckpoints):
    """An ``accelerate.Accelerator`` whose prepared model and optimizer live in chunks.

    ``prepare(model, optimizer, ...)`` attaches an engine to the model, which stays the same object, and returns an
    optimizer over chunks. ``backward``, ``clip_grad_norm_``, ``accumulate``, ``save_state`` and ``load_state`` are
    used as always. ``mixed_precision`` chooses 16-bit parameters with fp32 masters in place of autocast.

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
        self, *args: Any, patrickstar_config: Any = None, mixed_precision: str | None = None, **kwargs: Any
    ) -> None:
        precision = mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        super().__init__(*args, mixed_precision="no", **kwargs)
        steps = self.gradient_state.num_steps
        self._set_up_patrickstar(PatrickStarConfig.from_any(patrickstar_config), str(precision), steps)

    @classmethod
    def adopt(
        cls, accelerator: Accelerator, config: PatrickStarConfig, precision: str, gradient_accumulation_steps: int
    ) -> "PatrickStarAccelerator":
        """Turns an accelerator that somebody else made, without mixed precision, into one of this class.

        The Trainer makes its own accelerator and hands out bound methods of it, so the object must stay the same.

        Args:
            accelerator: What to turn; changed in place.
            config: Settings.
            precision: ``"no"``, ``"bf16"`` or ``"fp16"``.
            gradient_accumulation_steps: Micro-batches per step.

        Raises:
            ConfigError: If a setting cannot work, or processes that were launched together would train alone.
        """
        accelerator.__class__ = cls
        assert isinstance(accelerator, PatrickStarAccelerator)
        accelerator._set_up_patrickstar(config, precision, gradient_accumulation_steps)
        return accelerator

    def _set_up_patrickstar(self, config: PatrickStarConfig, precision: str, accumulation_steps: int) -> None:
        if precision not in ("no", "bf16", "fp16"):
            raise ConfigError(f"mixed_precision='{precision}' is not supported; use bf16, fp16 or no")
        if self.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM):
            raise ConfigError(
                f"Accelerate was configured for {self.distributed_type.value}, which manages parameters itself; remove "
                "it from the accelerate config or from the arguments"
            )
        compiler = getattr(getattr(self.state, "dynamo_plugin", None), "backend", None)
        if compiler is not None and compiler != DynamoBackend.NO:
            raise ConfigError(
                f"Accelerate was configured to compile with {compiler.value}, which traces the engine's hooks away; "
                "remove the dynamo backend from the accelerate config or from the arguments"
            )
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        if launched > 1 and self.num_processes == 1:
            raise ConfigError(
                f"{launched} processes were launched, but Accelerate lets each of them train alone; on a machine "
                "without accelerators pass --use_cpu (TrainingArguments) or Accelerator(cpu=True), or set "
                "ACCELERATE_USE_CPU=true"
            )
        self.patrickstar_config = config
        self._patrickstar_precision = precision
        self._patrickstar_accumulation_steps = accumulation_steps
        effective = precision if config.dtype == "auto" else config.dtype
        self.scaler = ChunkedGradScaler(self.device.type) if effective == "fp16" else None

    # Preparing

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepares objects as ``Accelerator.prepare`` does; a model and its optimizer get an engine.

        Args:
            *args: Models, optimizers, data loaders, schedulers.
            device_placement: As for ``Accelerator.prepare``; not used for what is in chunks.

        Raises:
            EngineError: If several optimizers are given, or the optimizer is of none of the models.
            ConfigError: If a setting cannot work for this model.
            BudgetError: If a budget is too small.
        """
        models = [item for item in args if isinstance(item, torch.nn.Module)]
        optimizers = [item for item in args if isinstance(item, torch.optim.Optimizer)]
        if len(optimizers) > 1:
            raise EngineError(f"one optimizer with several param groups is supported, got {len(optimizers)} optimizers")
        if optimizers:
            optimizer = _innermost(optimizers[0])
            model = self._model_of(optimizer, models)
            engine = get_engine(model)
            if engine is None or engine.optimizer is None or engine.optimizer.inner is not optimizer:
                # Also an optimizer of ours whose engine had to give way to another one meanwhile.
                self._engage(model, optimizer)
                args = tuple(optimizer if item is optimizers[0] else item for item in args)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Prepares a model: unchanged if it has an engine; for evaluation it gets one without an optimizer.

        A model that is prepared for training without its optimizer gets its engine when the optimizer is prepared.

        Args:
            model: The model.
            device_placement: Not used; chunks decide.
            evaluation_mode: Whether it will not be trained.

        Returns:
            The same model.
        """
        if not evaluation_mode and not any(parameter.requires_grad for parameter in model.parameters()):
            # A teacher, say: nothing of it is trained, and Accelerate's own way is right.
            return super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        if model not in self._models:
            self._models.append(model)
        if evaluation_mode and get_engine(model) is None:
            self._engage(model, None)
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Wraps the chunked form of an optimizer as Accelerate does.

        Args:
            optimizer: A torch optimizer, or one that was prepared before.
            device_placement: Not used; states live where their chunks are.

        Returns:
            An ``AcceleratedOptimizer`` over a ``ChunkedOptimizer``.
        """
        if isinstance(optimizer, AcceleratedOptimizer):
            if optimizer not in self._optimizers:
                self._optimizers.append(optimizer)
            return optimizer
        if not isinstance(optimizer, ChunkedOptimizer):
            model = self._model_of(optimizer)
            engine = get_engine(model)
            if engine is None or engine.optimizer is None or engine.optimizer.inner is not optimizer:
                engine = self._engage(model, optimizer)
            assert engine.optimizer is not None
            optimizer = engine.optimizer
        prepared = AcceleratedOptimizer(optimizer, device_placement=False, scaler=self.scaler)
        self._optimizers.append(prepared)
        return prepared

    def _engage(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> PatrickStarEngine:
        """Attaches an engine; one that is attached for another optimizer, or for evaluation, gives way."""
        present = get_engine(model)
        if present is not None:
            present.detach()
        return PatrickStarEngine(
            model,
            self.patrickstar_config,
            optimizer,
            device=self.device,
            gradient_accumulation_steps=self._patrickstar_accumulation_steps,
            precision=self._patrickstar_precision,
        )

    def _model_of(self, optimizer: torch.optim.Optimizer, models: Iterable[torch.nn.Module] = ()) -> torch.nn.Module:
        wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for model in [*models, *self._models]:
            if wanted & {id(parameter) for parameter in model.parameters()}:
                return model
        if models and not wanted:
            raise EngineError(
                "the optimizer has no parameter to update: the model has no trainable parameter (every requires_grad "
                "is False?); unfreeze what should be trained"
            )
        raise EngineError("the optimizer's parameters belong to no prepared model; prepare the model with it")

    # Gradients

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Tells optimizers, all by default, that gradients carry the loss scale; they remove it as they read them."""
        if self.scaler is None:
            return
        optimizers = self._optimizers if optimizer is None else optimizer
        for item in optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]:
            while isinstance(item, AcceleratedOptimizer):
                item = item.optimizer
            self.scaler.unscale_(item)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """Clips gradients by global norm.

        Args:
            parameters: Parameters whose norm counts.
            max_norm: The largest norm that is left alone.
            norm_type: Order of the norm.

        Returns:
            The norm before clipping, a scalar tensor.

        Raises:
            EngineError: If they belong to no prepared model, or to several.
        """
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        optimizer = self._optimizer_of(parameters)
        self.unscale_gradients(optimizer)
        return optimizer.clip_grad_norm_(parameters, float(max_norm), float(norm_type))

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clips every element of gradients to ``[-clip_value, clip_value]``.

        Args:
            parameters: Parameters whose gradients are clipped.
            clip_value: The bound.

        Raises:
            EngineError: If they belong to no prepared model.
        """
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        optimizer = self._optimizer_of(parameters)
        self.unscale_gradients(optimizer)
        optimizer.clip_grad_value_(clip_value, parameters)

    def _optimizer_of(self, parameters: list[torch.Tensor]) -> ChunkedOptimizer:
        found = []
        for item in self._optimizers:
            while isinstance(item, AcceleratedOptimizer):
                item = item.optimizer
            if isinstance(item, ChunkedOptimizer) and item.owns(parameters) and item not in found:
                found.append(item)
        if len(found) != 1:
            raise EngineError(
                f"the parameters belong to {len(found)} prepared models; clip those of one model at a time, after "
                "accelerator.prepare(model, optimizer)"
            )
        return found[0]


def _innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The torch optimizer that the user made."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer.inner if isinstance(optimizer, ChunkedOptimizer) else optimizer
