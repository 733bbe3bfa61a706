"""A plug-in for the trainers of LLaMA-Factory's ``v1``: three names in its YAML make it train in chunks.

::

    init_config: {name: patrickstar_host}
    dist_config: {name: patrickstar, device_budget: 8GiB}
    optim_config: {name: patrickstar_adamw, lr: 1.0e-5}

``python -m hf_patrickstar.integrations.llamafactory sft train.yaml`` runs it. LLaMA-Factory finds plug-ins in a
registry that a module fills when it is imported, and no key of its YAML names such a module.

[Note: llamafactory]
Its ``BaseTrainer`` hands the model to the plug-in of ``dist_config`` before there is an optimizer, and then to the one
of ``optim_config``. An engine needs both, so the first keeps what it was asked for on the model, and the second makes
the engine. All kinds of plug-ins share one registry, so their names differ. Without ``init_config`` the whole
model is read onto the device.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
from llamafactory.v1.plugins.model_plugins.initialization import InitPlugin
from llamafactory.v1.plugins.trainer_plugins.distributed.hub import DistributedPlugin
from llamafactory.v1.plugins.trainer_plugins.optimizer import OptimizerPlugin

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.errors import ConfigError, PatrickStarError

NAME, OPTIMIZER, HOST = "patrickstar", "patrickstar_adamw", "patrickstar_host"
_ASKED = "_patrickstar_asked"
_MESH = ("name", "timeout", "mp_replicate_size", "mp_shard_size", "dp_size", "cp_size")
"""Keys of ``dist_config`` that LLaMA-Factory itself reads."""


@InitPlugin(HOST).register()
def start_on_host() -> torch.device:
    """Where the model is read to: host memory, from where the engine fills its chunks."""
    return torch.device("cpu")


@DistributedPlugin(NAME).register()
def ask_for_chunks(model: torch.nn.Module, dist_config: Mapping[str, Any], **kwargs: Any) -> torch.nn.Module:
    """Takes note of ``dist_config``; the model goes into chunks when its optimizer is made.

    Args:
        model: The model.
        dist_config: Settings as ``PatrickStarConfig`` names them, and LLaMA-Factory's own keys.
        **kwargs: ``bf16``, whether it trains in bf16 with fp32 masters.

    Returns:
        The same model.

    Raises:
        ConfigError: If a setting makes no sense, or there are several processes.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("the plug-in works with one process, since LLaMA-Factory saves on rank 0 alone; start one")
    config = PatrickStarConfig.from_any({key: value for key, value in dist_config.items() if key not in _MESH})
    model.__dict__[_ASKED] = config, "bf16" if kwargs.get("bf16") else "no"
    return model


@OptimizerPlugin(OPTIMIZER).register()
def make_adamw(model: torch.nn.Module, optim_config: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Puts the model into chunks, with ``torch.optim.AdamW`` over its trainable parameters.

    Args:
        model: A model that ``ask_for_chunks`` has seen.
        optim_config: Arguments of ``torch.optim.AdamW``.

    Returns:
        The optimizer in chunks.

    Raises:
        BudgetError: If a budget (bytes) is too small.
    """
    config, precision = model.__dict__[_ASKED]
    options = {key: value for key, value in optim_config.items() if key != "name"}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = PatrickStarEngine(model, config, torch.optim.AdamW(trainable, **options), precision=precision)
    assert engine.optimizer is not None
    return engine.optimizer


def main() -> None:
    """Runs ``sft`` of LLaMA-Factory's ``v1`` in this process, with the plug-in registered.

    Raises:
        SystemExit: With one sentence; status 2 if an argument or setting makes no sense, 1 if memory does not suffice.
    """
    try:
        if sys.argv[1:2] != ["sft"]:
            raise ConfigError("the command must be sft, followed by a YAML file")
        del sys.argv[1]
        from llamafactory.v1.config import get_args
        from llamafactory.v1.trainers.sft_trainer import run_sft

        model_args, _, training_args, _ = get_args()
        given = {**vars(training_args), "init_config": model_args.init_config}
        for key, name in {"dist_config": NAME, "optim_config": OPTIMIZER, "init_config": HOST}.items():
            if (given[key] or {}).get("name") != name:
                raise ConfigError(f"the YAML file does not say '{key}: {{name: {name}}}'; add it")
        if "lr" not in training_args.optim_config:
            raise ConfigError("optim_config has no 'lr', and LLaMA-Factory does not pass learning_rate to it; add lr")
        run_sft()
    except PatrickStarError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from error


if __name__ == "__main__":
    main()
