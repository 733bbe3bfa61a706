"""Writes the ``README.md`` that explains the files of a checkpoint."""

import os
from pathlib import Path

from hf_patrickstar.checkpoint.storage import describe_failure
from hf_patrickstar.errors import CheckpointError

README_NAME = "README.md"
_TITLE = "## Training state of this checkpoint"
_TEXT = f"""{_TITLE}

This checkpoint was saved by hf_patrickstar. The model is in the files that transformers always writes, and
`from_pretrained` reads them without hf_patrickstar. The state of the optimizer is in files of their own:

- `optimizer-00001-of-0000N.safetensors` and so on: one file for each of the N processes that trained. A file has the
  optimizer's averages and step counts of some parameters, and their fp32 values (`master/...`) where the model's file
  has fewer bits. These are ordinary safetensors files, in which tensors have the names of the model's parameters.
- `optimizer.index.json`: the names of these files, the parameters with their shapes, and the learning rates and other
  settings of the optimizer.
- `optimizer-others.safetensors`, only if it is needed: the state of parameters that do not belong to the model, and
  settings of the optimizer that are no numbers or texts.

A Trainer with `--patrickstar` resumes from these files, with any number of processes. **The stock Trainer does not read
them**: without `optimizer.pt` it begins with a new optimizer and a new learning rate schedule, and does not say so.
This command writes the `optimizer.pt` that the stock Trainer and plain torch resume from:

    hf-patrickstar export PATH_OF_THIS_DIRECTORY

Accelerate's own `load_state` wants another name: add `--output PATH_OF_THIS_DIRECTORY/optimizer.bin`.

To have `optimizer.pt` in every checkpoint, train with `--patrickstar_config '{{"optimizer_format": "both"}}'`, or with
`"torch"` to have it in place of these files.
"""


def write_read_me(directory: str | os.PathLike[str], older: str | os.PathLike[str] | None = None) -> None:
    """Adds a section about the files of the training state to the ``README.md`` of a checkpoint.

    Other text in it is kept: a library such as PEFT may have written it, or a user, in the older checkpoint.

    Args:
        directory: The checkpoint.
        older: The checkpoint that this one will replace, if there is one.

    Raises:
        CheckpointError: If it cannot be written.
    """
    path = Path(directory) / README_NAME
    try:
        found = [place for place in (path, Path(older or directory) / README_NAME) if place.is_file()]
        before = found[0].read_text(encoding="utf-8", errors="replace") if found else ""
        own = before.partition(_TITLE)[0].rstrip()
        path.write_text(f"{own}\n\n{_TEXT}".lstrip(), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(describe_failure(path, error)) from error
