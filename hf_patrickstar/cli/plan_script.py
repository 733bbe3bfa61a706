"""``hf-patrickstar plan ... -- SCRIPT ARGS``: the script says what is trained."""

import argparse
import contextlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_patrickstar.cli.settings import settings_of
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.integrations.unchanged import Defaults, install

if TYPE_CHECKING:
    from hf_patrickstar.planner.planning import Circumstances
    from hf_patrickstar.planner.subject import Subject

_ITS_OWN = {
    "--gradient-checkpointing": "--gradient_checkpointing",
    "--batch-size": "--per_device_train_batch_size",
    "--accumulation": "--gradient_accumulation_steps",
    "--max-grad-norm": "--max_grad_norm",
    "--optimizer": "--optim",
    "--dtype": "--bf16 or --fp16",
    "--seq-len": "the one that cuts its sequences",
    "--task": "a script that trains for it",
    "--lora": "a script that adds adapters",
    "--peft": "a script that adds adapters",
}
"""Options of the command that a script's own arguments take the place of."""


def split_script(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line at the first ``--``.

    Args:
        words: The command line.

    Returns:
        What stands before it, and the script with its arguments.
    """
    place = words.index("--") if "--" in words else len(words)
    return list(words[:place]), list(words[place + 1 :])


def arrange_from(options: argparse.Namespace) -> "tuple[Subject, Circumstances]":
    """Runs the script up to its training; see ``arrange_script``.

    Raises:
        ConfigError: If an argument makes no sense, or the script never trains.
    """
    with contextlib.suppress(ConfigError):  # where transformers is imported already, scripts say what they use
        install(Defaults())
    # transformers takes seconds to import, and other commands do without.
    from hf_patrickstar.planner.script_subject import arrange_script

    if options.model is not None:
        raise ConfigError(f"'{options.model}' and a script after -- are both given; keep one of them")
    for name, instead in _ITS_OWN.items():
        key = name.removeprefix("--").replace("-", "_")
        if getattr(options, key) != options.defaults[key]:
            raise ConfigError(f"{name}: the script says this by its own arguments; give {instead} after SCRIPT")
    path, *arguments = options.script
    return arrange_script(
        path,
        arguments,
        options.machine,
        world_size=options.processes,
        device_memory=options.device_memory,
        host_memory=options.host_memory,
        settings=settings_of(options.set),
    )


def in_words_of_the_script(text: str) -> str:
    """A plan's text with the names that a Trainer's arguments have in place of the command's.

    Args:
        text: The text.
    """
    text = re.sub(r"--seq-len \d+", "by the script's own option that cuts sequences", text)
    for name, instead in _ITS_OWN.items():
        if instead.startswith("--"):
            text = re.sub(rf"{name}\b", instead, text)
    return text
