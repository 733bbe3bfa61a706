"""Tells the checkpoints of DeepSpeed and FSDP from ordinary ones."""

import os
from pathlib import Path

from hf_patrickstar.checkpoint.weight_files import has_weights
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.integrations.conversion.converted import RESUME

_SIGNS = (
    ("deepspeed", "DeepSpeed", ("global_step*/", "zero_to_fp32.py")),
    ("fsdp", "FSDP", ("pytorch_model_fsdp*", "optimizer_0/")),
)


def check_origin(directory: str | os.PathLike[str]) -> str | None:
    """Looks whether a checkpoint was written by DeepSpeed or FSDP, whose optimizer states cannot be read.

    Args:
        directory: The checkpoint that a run is resumed from.

    Returns:
        A warning if the weights can be loaded and the optimizer's states cannot; ``None`` for an ordinary checkpoint.

    Raises:
        CheckpointError: If the weights cannot be read either.
    """
    for source, name, signs in _SIGNS:
        if not any(any(Path(directory).glob(sign)) for sign in signs):
            continue
        if not has_weights(directory):
            raise CheckpointError(
                f"'{directory}' is a checkpoint of {name}, with no weights to read; convert it first. {RESUME[source]}"
            )
        return (
            f"patrickstar: '{directory}' is a checkpoint of {name}: its weights are loaded, its optimizer states are "
            "not read, and training goes on with new ones"
        )
    return None
