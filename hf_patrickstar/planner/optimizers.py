"""The optimizers that a plan makes by name: those of torch, and those of bitsandbytes by the names of ``--optim``."""

import copy
import difflib
import functools
from collections.abc import Callable
from typing import Any

import torch

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.schedule.bounds import ADAM

_ADAMW = ("adamw", "adamw_torch", "adamw_torch_fused")
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def find_optimizer(name: str) -> MakeOptimizer | None:
    """What makes an optimizer with its defaults; ``None`` for the fused AdamW.

    Args:
        name: The name of a class of ``torch.optim``, in any case, or of an optimizer of bitsandbytes as ``--optim`` of
            ``TrainingArguments`` has it.

    Raises:
        ConfigError: If there is none of this name, or if bitsandbytes is needed and not installed.
    """
    classes = _optimizers()
    if name.lower() in _ADAMW:
        return None
    if name.lower() in classes:
        return classes[name.lower()]
    if name.lower() in _of_bitsandbytes():
        from transformers import Trainer, TrainingArguments

        try:
            arguments = object.__new__(TrainingArguments)  # its constructor would end the Accelerator of the process
            arguments.optim = name.lower()
            kind, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"optimizer '{name}' needs bitsandbytes: pip install hf_patrickstar[bnb]") from error
        return functools.partial(kind, **settings)
    near = difflib.get_close_matches(name.lower(), [*classes, *_of_bitsandbytes()], n=1)
    hint = f"; did you mean '{near[0]}'?" if near else "; use the name of a class there, such as adamw or sgd"
    raise ConfigError(f"optimizer '{name}' is not in torch.optim{hint}")


def keep_embeddings_wide(optimizer: Any, model: torch.nn.Module) -> None:
    """Asks an optimizer of bitsandbytes for states of 32 bits of embeddings, as the Trainer does.

    Args:
        optimizer: An optimizer, of any library.
        model: The model whose parameters it has.
    """
    manager = getattr(optimizer, "mng", None)
    if manager is None:
        return
    embeddings = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    optimizer.mng = copy.copy(manager)  # the library has one for all optimizers of the process
    optimizer.mng.index2config, optimizer.mng.module_weight_config_triple = {}, []
    optimizer.mng.pid2config = {id(module.weight): {"optim_bits": 32} for module in embeddings}


def _optimizers() -> dict[str, MakeOptimizer]:
    return {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }


def _of_bitsandbytes() -> list[str]:
    """Names of ``--optim`` for optimizers of bitsandbytes."""
    # These import what all trainers need, which takes seconds.
    from transformers.training_args import OptimizerNames

    own, others = ("8bit", "paged", "lion", "bnb", "ademamix"), ("torch", "galore")
    names = [item.value for item in OptimizerNames if any(part in item.value for part in own)]
    return [name for name in names if not any(part in name for part in others)]


def optimizer_name(name: str) -> str:
    """What an optimizer is called on a screen: AdamW is Adam, whose update takes as long.

    Args:
        name: The name of its class, in any case, or of ``--optim``.
    """
    if name.lower() in ("adam", *_ADAMW):
        return ADAM
    return getattr(_optimizers().get(name.lower()), "__name__", name)
