"""``hf-patrickstar run``: other people's scripts, untouched, with ``--patrickstar``; see [Note: no line changed]."""

import argparse
import contextlib
import importlib.util
import inspect
import json
import os
import pathlib
import runpy
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.errors import ConfigError, PatrickStarError
from hf_patrickstar.integrations import post_import

_WITH_VALUE = ("-m", "--module", "--patrickstar_config")
_COPY = "hf_patrickstar_post_import"
_SITECUSTOMIZE = f"""
import importlib.machinery
import importlib.util
import os
import sys

here = os.path.dirname(os.path.abspath(__file__))
others = [path for path in sys.path if os.path.abspath(path) != here]
spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
if spec is not None and spec.loader is not None:  # the one that this file stands before
    spec.loader.exec_module(importlib.util.module_from_spec(spec))

import {_COPY}

{_COPY}.install()
"""


def split_program(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits what follows ``run`` into the command's own options, and the program with its arguments.

    Args:
        words: The words; the program is the first that is no option, or follows ``-m MODULE``.
    """
    place = 0
    while place < len(words) and words[place].startswith("-"):
        name = words[place]
        place += 2 if name in _WITH_VALUE else 1
        if name == "--":
            return [*words[: place - 1]], [*words[place:]]
        if name in ("-m", "--module") or name.startswith("--module="):
            break
    return [*words[:place]], [*words[place:]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the command understands."""
    parser.usage = "%(prog)s [options] (SCRIPT | -m MODULE) ARGS..."
    parser.add_argument(
        "--patrickstar", action="store_true", help="train in chunks, whether or not the script has such an argument"
    )
    parser.add_argument("--patrickstar_config", metavar="JSON", help="settings: JSON text or the path of a JSON file")
    parser.add_argument(
        "--inherit",
        action="store_true",
        help="the program is any command, and Python processes that it starts are treated alike",
    )
    parser.add_argument("-m", "--module", metavar="MODULE", help="a module to run, as python -m does")


def run(options: argparse.Namespace) -> int:
    """Runs a program with classes of this package in place of those of transformers and Accelerate.

    Returns:
        The exit status of the program.

    Raises:
        ConfigError: If there is no such program, a setting is wrong, or transformers was imported before.
        SystemExit: If the program ends itself.
    """
    program = options.script or []
    if options.patrickstar_config is not None and not options.patrickstar:
        raise ConfigError("--patrickstar_config is given before the script but --patrickstar is not; add --patrickstar")
    PatrickStarConfig.from_any(options.patrickstar_config)
    if options.module is None and not program:
        raise ConfigError("there is no script; give the path of a file, -m MODULE, or --inherit and a command")
    wanted = {"patrickstar": options.patrickstar, "patrickstar_config": options.patrickstar_config}
    with _told(json.dumps(wanted)):
        if options.inherit:
            return _run_inheriting(_command(options.module, program))
        return _run_here(options.module, program, options.patrickstar)


@contextlib.contextmanager
def _told(text: str) -> Iterator[None]:
    before = os.environ.get(post_import.ASKED)
    os.environ[post_import.ASKED] = text
    try:
        yield
    finally:
        if before is None:
            del os.environ[post_import.ASKED]
        else:
            os.environ[post_import.ASKED] = before


# In this process


def _run_here(module: str | None, program: Sequence[str], is_asked: bool) -> int:
    if module is None and not os.path.isfile(program[0]):
        raise ConfigError(
            f"there is no script '{program[0]}'; give the path of a file, -m MODULE, or --inherit and a command"
        )
    if module is not None and importlib.util.find_spec(module.partition(".")[0]) is None:
        raise ConfigError(f"there is no module '{module}'; is it installed in this Python, {sys.executable}?")
    if not post_import.is_installed():
        early = [name for name in ("transformers.trainer", "transformers.training_args") if name in sys.modules]
        if early:
            raise ConfigError(
                f"'{early[0]}' was imported before, so that its classes are known already; start hf-patrickstar run as "
                "a program of its own"
            )
    post_import.install()
    _say(is_asked)
    try:
        with _as_program(module, program):
            if module is not None:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(os.path.abspath(program[0]), run_name="__main__")
    except post_import.MovedError as error:
        raise ConfigError(str(error)) from error
    except ConfigError:
        raise
    except PatrickStarError:  # the program's own line is worth more than one sentence
        traceback.print_exc()
        return 1
    except SystemExit as end:
        if end.code == 2 and "--patrickstar" in program and "transformers.training_args" not in sys.modules:
            print(
                "hf-patrickstar run: the script has no TrainingArguments that would take --patrickstar; give it before "
                "the script",
                file=sys.stderr,
            )
        raise
    return 0


def _say(is_asked: bool) -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    library = _versioned("transformers")
    if is_asked:
        what = (
            f"Trainer and TrainingArguments of {library} and Accelerator of {_versioned('accelerate')} train in chunks"
        )
    else:
        what = f"Trainer and TrainingArguments of {library} train in chunks if they are told to (--patrickstar)"
    print(f"hf-patrickstar run: {what}", file=sys.stderr, flush=True)


def _versioned(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return name


@contextlib.contextmanager
def _as_program(module: str | None, program: Sequence[str]) -> Iterator[None]:
    argv, search = sys.argv, list(sys.path)
    if module is None:
        sys.argv = [*program]
        sys.path[:1] = [os.path.dirname(os.path.abspath(program[0]))]
    else:
        sys.argv = [module, *program]
        sys.path[:1] = [os.getcwd()]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, search


# In the processes that a command starts


def _command(module: str | None, program: Sequence[str]) -> list[str]:
    if module is not None:
        return [sys.executable, "-m", module, *program]
    if os.path.isfile(program[0]) and program[0].endswith(".py"):
        return [sys.executable, *program]
    found = shutil.which(program[0])
    if found is None:
        raise ConfigError(f"there is no script and no command '{program[0]}'; give the path of a file or a command")
    return [found, *program[1:]]


def _run_inheriting(command: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="hf-patrickstar-run-") as directory:
        folder = pathlib.Path(directory)
        (folder / f"{_COPY}.py").write_text(inspect.getsource(post_import), encoding="utf-8")
        (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE, encoding="utf-8")
        search = [directory, *filter(None, [os.environ.get("PYTHONPATH")])]
        status = subprocess.call(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(search)})
    return status if status >= 0 else 128 - status  # as a shell says it of a signal
