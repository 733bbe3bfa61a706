"""Puts classes of this package where other people's scripts find those of transformers and Accelerate.

[Note: no line changed]
A script that says ``from transformers import Trainer`` gets what the module ``transformers.trainer`` has under that
name when the script, or another library, asks for it. ``install`` waits for the module to be imported, and puts
``PatrickStarTrainer`` there, a subclass, before anybody has asked: so ``Seq2SeqTrainer``, TRL's trainers and the
parsers of arguments inherit it. ``TrainingArguments`` are replaced likewise. Without ``patrickstar`` among the
arguments both classes do what their bases do. ``Accelerator`` is replaced only if chunks were asked for on the command
line of ``run``, since a bare loop has no arguments that could say so.

This module imports the standard library alone: ``hf-patrickstar run --inherit`` lets processes that a command starts
import a copy of it before anything else, and most of these have nothing to do with training.
"""

import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

ASKED = "HF_PATRICKSTAR_RUN"
"""The environment variable in which ``run`` tells a process, and those that it starts, what was asked for."""

_PACKAGE = "hf_patrickstar"


class MovedError(ImportError):
    """A version of a library does not have a class where this package would put its own."""


def asked() -> dict[str, Any] | None:
    """What ``hf-patrickstar run`` was asked for, in this process or in one that it comes from.

    Returns:
        A dictionary with ``patrickstar`` and ``patrickstar_config``; ``None`` where ``run`` has no part in it.
    """
    text = os.environ.get(ASKED)
    found: dict[str, Any] | None = json.loads(text) if text else None
    return found


def asked_config() -> Any:
    """The settings that were asked for on the command line of ``run``; ``None`` if chunks were not asked for there."""
    found = asked()
    return None if found is None or not found["patrickstar"] else found["patrickstar_config"] or {}


def install() -> None:
    """Lets classes be replaced when their modules are imported; Accelerate may be there already."""
    if not is_installed():
        sys.meta_path.insert(0, PostImport(_REPLACEMENTS))
    if "accelerate" in sys.modules:
        _replace_accelerator(sys.modules["accelerate"])


def is_installed() -> bool:
    """Whether ``install`` was called in this process."""
    return any(isinstance(finder, PostImport) for finder in sys.meta_path)


class PostImport(importlib.abc.MetaPathFinder):
    """Does something with modules as soon as they have been imported.

    Args:
        work: What to do with a module, by its full name.
    """

    def __init__(self, work: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._work = work

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds a module as the other finders do, with a loader that does the work afterwards."""
        if fullname not in self._work:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self._work[fullname])
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, work: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._work = work

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the module's own loader does."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """As the module's own loader does, which the module has from now on."""
        module.__loader__ = self._loader
        assert module.__spec__ is not None
        module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._work(module)


def _replace_trainer(module: ModuleType) -> None:
    _replace(module, "Trainer", "trainer", "PatrickStarTrainer")


def _replace_arguments(module: ModuleType) -> None:
    _replace(module, "TrainingArguments", "training_args", "PatrickStarTrainingArguments")


def _replace_accelerator(module: ModuleType) -> None:
    found = asked()
    if found is not None and found["patrickstar"]:
        _replace(module, "Accelerator", "accelerator", "PatrickStarAccelerator")


_REPLACEMENTS = {
    "transformers.trainer": _replace_trainer,
    "transformers.training_args": _replace_arguments,
    "accelerate": _replace_accelerator,  # when all of it is there: its own modules import each other
}


def _replace(module: ModuleType, name: str, place: str, ours: str) -> None:
    """Puts a class of ours into a module, and wherever the module's package has the same class."""
    before = getattr(module, name, None)
    if not isinstance(before, type):
        library = module.__name__.partition(".")[0]
        version = getattr(sys.modules.get(library), "__version__", "of an unknown version")
        raise MovedError(
            f"{library} {version} has no class '{name}' in '{module.__name__}', where hf-patrickstar run puts its own; "
            f"install a version of {library} that hf_patrickstar was tested with, or change the script's two imports"
        )
    known = sys.modules.get(f"{_PACKAGE}.integrations.{place}")
    if known is not None and getattr(known, ours, before) is before:
        return  # it is this module that imports the library: the script names our class by itself
    try:
        replacement = getattr(importlib.import_module(f"{_PACKAGE}.integrations.{place}"), ours)
    except ModuleNotFoundError as error:
        if error.name == _PACKAGE:  # another Python, which has not installed this package
            return
        raise
    library = module.__name__.partition(".")[0]
    for other in {module.__name__, library, f"{library}.{name.lower()}"}:
        there = sys.modules.get(other)
        if there is not None and vars(there).get(name) is before:
            setattr(there, name, replacement)
