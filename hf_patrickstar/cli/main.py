"""``hf-patrickstar COMMAND``: one function per command."""

import argparse
import os
import sys
from collections.abc import Sequence

from hf_patrickstar.checkpoint.export import export
from hf_patrickstar.cli import check, convert, plan, report
from hf_patrickstar.cli import run as run_command
from hf_patrickstar.cli.env import env
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
        words, script = run_command.split_program(words)
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
    command = commands.add_parser(
        "export",
        help="write the optimizer.pt of a checkpoint, for the stock Trainer",
        description="Writes the optimizer's state of a checkpoint as the optimizer.pt that the stock Trainer reads.",
    )
    command.add_argument("directory", metavar="DIR", help="a checkpoint that was saved with --patrickstar")
    command.add_argument(
        "--output",
        metavar="FILE",
        help="where to write it; by default DIR/optimizer.pt. An older file is replaced",
    )
    command.set_defaults(run=_export)
    command = commands.add_parser(
        "env",
        help="print what this machine is, and measure how fast",
        description="Prints what this machine and its software are, and measures how fast it computes and copies.",
    )
    command.add_argument(
        "--measure",
        action="store_true",
        help="measure its rates, on as many cores as torch uses; takes some seconds. Under torchrun or accelerate "
        "launch all processes measure at the same time, and their links, too",
    )
    command.add_argument(
        "--json", metavar="FILE", help="where to write what was measured, as a machine; an older file is replaced"
    )
    command.set_defaults(run=_env)
    command = commands.add_parser(
        "plan",
        help="tell whether a model fits a machine, and how fast it trains there",
        description="Tells whether a model fits a machine and how fast it trains there, without weights or a device.",
    )
    plan.add_arguments(command)
    command.set_defaults(run=plan.run, defaults={action.dest: action.default for action in command._actions})
    command = commands.add_parser(
        "check",
        help="compare a few steps of a script's training without and with --patrickstar, bit by bit",
        description="Trains a few steps with a user's own script, without and with --patrickstar, and compares losses, "
        "gradient norms, and all parameters and buffers. Nothing is saved, evaluated or reported.",
    )
    check.add_arguments(command)
    command.set_defaults(run=check.run)
    run_command.add_to(commands)
    command = commands.add_parser(
        "report",
        help="make a page of a run",
        description="Makes one HTML page of what a run with --patrickstar has recorded in its output directory.",
    )
    report.add_arguments(command)
    command.set_defaults(run=report.run)
    _add_convert(commands)
    return parser


def _add_convert(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "convert",
        help="make --patrickstar_config from a configuration of DeepSpeed or FSDP",
        description="Prints the JSON for --patrickstar_config, and on the standard error what each key of a "
        "configuration of DeepSpeed, FSDP or Accelerate becomes, or why it is not needed.",
    )
    convert.add_arguments(command)
    command.set_defaults(run=convert.run)


def _export(options: argparse.Namespace) -> None:
    for path in export(options.directory, options.output):
        print(f"{path}: {format_nbytes(path.stat().st_size)}")


def _env(options: argparse.Namespace) -> None:
    env(options.measure, options.json)
