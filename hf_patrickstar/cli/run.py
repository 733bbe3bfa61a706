"""``hf-patrickstar run [OPTIONS] SCRIPT ARGS``: a script that does not know this package trains in chunks."""

import argparse
import dataclasses
import json
import os
import shutil
import sys
import traceback
from collections.abc import Sequence

from hf_patrickstar.cli import inherited
from hf_patrickstar.cli.patching import Defaults, install
from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.errors import ConfigError, PatrickStarError
from hf_patrickstar.integrations.program import run_program

HELP = (
    "run a training script that does not know this package; its parser then knows --patrickstar. Its Trainer and "
    "TrainingArguments get --patrickstar and --patrickstar_config; not a line of it changes. Options before SCRIPT "
    "hold for all of the script."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the command understands before SCRIPT."""
    parser.usage = "%(prog)s [--patrickstar] [--patrickstar_config JSON] [--inherit] (SCRIPT | -m MODULE) ARGS..."
    add = parser.add_argument
    text = "train everything in chunks: every TrainingArguments and every Accelerator of the script"
    add("--patrickstar", action="store_true", help=text)
    add("--patrickstar_config", metavar="JSON", help="settings for all of them: JSON text or the path of a JSON file")
    add("--inherit", action="store_true", help="do the same in Python processes that the script starts (launchers)")


def split_program(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line before its SCRIPT or ``-m``.

    Args:
        words: ``run`` and all that follows.

    Returns:
        ``run`` and its own options, and the program with its arguments.
    """
    place = 1
    while place < len(words) and words[place].startswith("-") and words[place] != "-m":
        place += 2 if words[place] == "--patrickstar_config" else 1
    return list(words[:place]), list(words[place:])


def run(options: argparse.Namespace) -> int:
    """Runs the program with the classes of this package in place; see [Note: unchanged scripts].

    Returns:
        0; 2 if a setting cannot work, and 1 if another error of this package ended the program. It is
        printed, with the line of the program at which it happened.

    Raises:
        ConfigError: If an argument makes no sense, or a library was imported before.
        SystemExit: If the program ends itself.
        Exception: What the program raises.
    """
    if options.patrickstar_config is not None and not options.patrickstar:
        raise ConfigError("--patrickstar_config is given before SCRIPT but --patrickstar is not; add --patrickstar")
    config = options.patrickstar_config
    PatrickStarConfig.from_any(config)
    if config is not None and os.path.isfile(config):
        config = os.path.abspath(config)  # the script may change the working directory
    program = _find_program(options.script or [])
    defaults = Defaults(options.patrickstar, config)
    install(defaults)
    if options.inherit:
        _let_inherit(defaults)
    try:
        run_program(program)
    except PatrickStarError as error:
        print(f"hf-patrickstar run: {_place(error, program[0])}{error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _find_program(words: Sequence[str]) -> list[str]:
    """Finds the program of a command line; a script that is no file is looked up on ``PATH``, as a shell does.

    Args:
        words: ``SCRIPT ARGS...`` or ``-m MODULE ARGS...``.

    Returns:
        The same with the path of the script.

    Raises:
        ConfigError: If there is no such program.
    """
    if not words:
        raise ConfigError("there is no script to run; write SCRIPT ARGS or -m MODULE ARGS")
    given, *others = words
    if given == "-m":
        if not others:
            raise ConfigError("-m is given without a module; write -m MODULE ARGS")
        return list(words)
    path = given if os.path.isfile(given) else shutil.which(given)
    if path is None:
        raise ConfigError(f"there is no script '{given}'; give the path of a file, or -m MODULE")
    return [path, *others]


def _place(error: PatrickStarError, path: str) -> str:
    """The last line of the program that an error came through, as the beginning of a sentence."""
    own = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{path}, line {own[-1]}: " if own else ""


def _let_inherit(defaults: Defaults) -> None:
    """Lets processes that this one starts do the same, by their environment."""
    folder = os.path.dirname(os.path.abspath(inherited.__file__))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    os.environ["HF_PATRICKSTAR_RUN"] = json.dumps(dataclasses.asdict(defaults))
