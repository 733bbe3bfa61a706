"""``hf-patrickstar COMMAND``: one function per command."""

import argparse
import os
import sys
from collections.abc import Sequence

from hf_patrickstar.checkpoint.torch_state import export
from hf_patrickstar.cli import check, convert, env, plan, report, run
from hf_patrickstar.errors import ConfigError, PatrickStarError
from hf_patrickstar.units import format_nbytes
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
        words, script = run.split_program(words)
    options = _parser().parse_args(words)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-patrickstar", description="Fine-tune models that are too big for the device."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (add_arguments, run_command, text, more) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}. {more}")
        command.set_defaults(run=run_command)
        add_arguments(command)
    return parser


def _add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="a checkpoint that was saved with --patrickstar")
    parser.add_argument("--output", metavar="FILE", help="the file to write or replace (default: DIR/optimizer.pt)")


def _export(options: argparse.Namespace) -> None:
    for path in export(options.directory, options.output):
        print(f"{path}: {format_nbytes(path.stat().st_size)}")


_COMMANDS = {
    "export": (
        *(_add_export_arguments, _export),
        *("write the optimizer.pt of a checkpoint, which the stock Trainer reads", ""),
    ),
    "env": (
        *(env.add_arguments, env.run, "print what this machine is, and measure how fast it is"),
        "Under torchrun or accelerate launch all processes measure at the same time, and their links, too.",
    ),
    "plan": (
        *(plan.add_arguments, plan.run, "tell whether a model fits a machine, and how fast it trains there"),
        "It reads no weights.",
    ),
    "check": (
        *(check.add_arguments, check.run),
        "compare a few steps of a script's training without and with --patrickstar, bit by bit",
        "It compares losses, gradient norms, parameters and buffers. Nothing is saved, evaluated or reported.",
    ),
    "run": (
        *(run.add_arguments, run.run),
        "run a training script that does not know this package; its parser then knows --patrickstar",
        "Its Trainer and TrainingArguments get --patrickstar and --patrickstar_config; not a line of it changes. "
        "Options before SCRIPT hold for all of the script.",
    ),
    "report": (
        *(report.add_arguments, report.run, "make a page of a run"),
        "It shows what a run with --patrickstar has recorded.",
    ),
    "convert": (
        *(convert.add_arguments, convert.run),
        "make --patrickstar_config from a configuration of DeepSpeed, FSDP or Accelerate",
        "It prints the JSON, and on the standard error what each key becomes.",
    ),
}
"""Each command: a function that adds its arguments, one that runs it, and its help in short and at length."""
