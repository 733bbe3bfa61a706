"""A Python program that runs in this process: a script or a module, with its own command line."""

import os
import runpy
import shutil
import sys
from collections.abc import Sequence

from hf_patrickstar.errors import ConfigError


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
    """Runs a program as ``python`` does, with its own ``sys.argv`` and ``sys.path[0]``, which it then restores.

    Args:
        words: What ``find_program`` returns.

    Raises:
        SystemExit: If the program ends itself.
        Exception: What the program raises.
    """
    is_module = words[0] == "-m"
    path, *arguments = words[1:] if is_module else words
    argv, search = sys.argv, list(sys.path)
    sys.argv = [path, *arguments]
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(path))
    try:
        if is_module:
            runpy.run_module(path, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, search
