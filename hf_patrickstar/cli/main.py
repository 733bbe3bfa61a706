"""``hf-patrickstar COMMAND``: one function per command."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from hf_patrickstar.cli import plan
from hf_patrickstar.errors import ConfigError, PatrickStarError
from hf_patrickstar.version import __version__

_CLOSED_PIPE = 141
"""The status that a shell gives for a program which SIGPIPE has ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: What follows the name of the program; by default those of this process.

    Returns:
        The exit status: 0; 1 if the command failed, or a plan does not fit; 2 if it cannot do what its arguments say;
        141 if nobody reads what it prints. What went wrong is told in one line.
    """
    script: list[str] = []
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["plan"]:
        words, script = plan.split_script(words)
    elif words[:1] == ["run"]:
        from hf_patrickstar.cli import run

        words, script = run.split_program(words)
    options = _parser(words).parse_args(words)
    options.script = script or getattr(options, "script", None)
    try:
        status = int(options.run(options) or 0)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has seen enough, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would tell of it as it ends
        return _CLOSED_PIPE
    except PatrickStarError as error:
        print(f"hf-patrickstar {options.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return status


def _parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Knows all commands; where it is ``plan`` this one alone, whose answer may be known: others import torch."""
    modules: tuple[Any, ...] = (plan,)
    if words[:1] != ["plan"]:
        from hf_patrickstar.cli import check, env, export, report, run

        modules = export, env, plan, check, run, report
    about = "Fine-tune models that are too big for the device."
    parser = argparse.ArgumentParser(prog="hf-patrickstar", description=about)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in modules:
        text, _, more = module.HELP.partition(". ")
        name, about = module.__name__.rpartition(".")[2], f"{text[0].upper()}{text[1:]}. {more}"
        command = commands.add_parser(name, help=text, description=about)
        command.set_defaults(run=module.run)
        module.add_arguments(command)
    return parser
