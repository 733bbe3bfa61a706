"""A Python program that runs in this process: a script or a module, with its own command line."""

import os
import runpy
import sys
from collections.abc import Sequence
from unittest import mock


def run_program(words: Sequence[str]) -> None:
    """Runs a program as ``python`` does, with its own ``sys.argv`` and ``sys.path[0]``, which it then restores.

    Args:
        words: ``SCRIPT ARGS...`` or ``-m MODULE ARGS...``.

    Raises:
        SystemExit: If the program ends itself.
        Exception: What the program raises.
    """
    is_module = words[0] == "-m"
    path, *arguments = words[1:] if is_module else words
    search = [os.getcwd() if is_module else os.path.dirname(os.path.realpath(path)), *sys.path[1:]]
    with mock.patch.object(sys, "argv", [path, *arguments]), mock.patch.object(sys, "path", search):
        if is_module:
            runpy.run_module(path, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(path, run_name="__main__")
