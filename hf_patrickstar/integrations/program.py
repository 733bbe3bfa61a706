"""A Python program that runs in this process: a script or a module, with its own command line."""

import contextlib
import os
import runpy
import shutil
import sys
from collections.abc import Iterator, Sequence

from hf_patrickstar.errors import ConfigError


@contextlib.contextmanager
def as_program(path: str, arguments: Sequence[str], folder: str) -> Iterator[None]:
    """Gives ``sys.argv`` and ``sys.path[0]`` the values of a program; after the block both are as before.

    Args:
        path: The program's own name, ``sys.argv[0]``.
        arguments: Its arguments.
        folder: Where Python looks for its modules first.
    """
    argv, search = sys.argv, list(sys.path)
    sys.argv = [path, *arguments]
    sys.path[:1] = [folder]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, search


def find_program(words: Sequence[str]) -> list[str]:
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


def run_program(words: Sequence[str]) -> None:
    """Runs a program as ``python`` does, with ``__name__ == "__main__"``.

    Args:
        words: What ``find_program`` returns.

    Raises:
        SystemExit: If the program ends itself.
        Exception: What the program raises.
    """
    path, *arguments = words
    if path == "-m":
        module, *arguments = arguments
        with as_program(module, arguments, os.getcwd()):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    with as_program(path, arguments, os.path.dirname(os.path.realpath(path))):
        runpy.run_path(path, run_name="__main__")
