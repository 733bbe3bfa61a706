"""Runs a user's own training script up to the moment when it trains.

[Note: scripts]
``run_script`` runs a script in this process as ``python SCRIPT ARGS...`` does: ``__name__`` is ``"__main__"``,
``sys.argv`` and ``sys.path[0]`` are the script's. Until the script ends, two things of transformers are caught:

- ``TrainingArguments.__post_init__``: every arguments object is shown to ``on_arguments`` before it checks itself, so
  that a command can change what the script was told, wherever the script has it from (its command line, a file, its
  code). ``PatrickStarArgumentsMixin.__post_init__``, which runs before it, is caught for the same reason.
- ``Trainer.train``: ``on_train`` is called in its place, with the Trainer and a function that trains. A subclass with a
  ``train`` of its own is caught where that calls ``super().train()``.

What ``on_train`` returns is what the script gets from ``train()``, and the script goes on. A command that needs no more
of the script ends it with ``StopScript(value)``: it is no ``Exception``, so a script that handles errors does not see
it, and blocks of ``finally`` run as usual.
"""

import contextlib
import functools
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from transformers import Trainer, TrainingArguments

from hf_patrickstar.errors import BudgetError, ConfigError, Later
from hf_patrickstar.integrations.program import run_program
from hf_patrickstar.integrations.training_args import PatrickStarArgumentsMixin


class ScriptError(ConfigError):
    """A script that is not there, or that does not do what a command needs; the message is one sentence."""


class StopScript(BaseException):
    """Raised by ``on_train`` to end the script; see [Note: scripts].

    Args:
        value: What ``run_script`` returns; by default ``None``.
    """


_SECRET = re.compile("(token|key|password|secret)$", re.IGNORECASE)
"""Names of arguments whose values are not repeated."""

OnArguments = Callable[[TrainingArguments], None]
OnTrain = Callable[[Trainer, Callable[..., Any]], Any]


def run_script(path: str, arguments: Sequence[str], on_train: OnTrain, on_arguments: OnArguments | None = None) -> Any:
    """Runs a script as ``python PATH ARGUMENTS...`` does; see [Note: scripts].

    Args:
        path: The script.
        arguments: Its own arguments.
        on_train: Called in place of ``Trainer.train``, with the Trainer and with ``train`` itself, which takes the
            arguments of ``Trainer.train`` and by default those that the script gave.
        on_arguments: Called once with each ``TrainingArguments`` object, before the object checks itself.

    Returns:
        The value of ``StopScript``; ``None`` if the script came to its end.

    Raises:
        ScriptError: If there is no such file, or the script ended without calling ``train()`` of a Trainer.
        SystemExit: If the script ended itself with another status than 0.
        Exception: What the script raises.
    """
    if not os.path.isfile(path):
        raise ScriptError(f"there is no script '{path}'; give the path of a file")
    told: set[str] = set()
    try:
        with _caught(on_train, on_arguments, told):
            run_program([path, *arguments])
    except StopScript as stop:
        return stop.args[0] if stop.args else None
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    if "built" not in told:
        raise ScriptError(
            f"'{path}' ended without building a Trainer; give a script that trains with a transformers Trainer, "
            "with the arguments with which it does"
        )
    if "trained" not in told:
        raise ScriptError(
            f"'{path}' built a Trainer and ended without calling train(); add --do_train, or what else makes the "
            "script train"
        )
    return None


@contextlib.contextmanager
def _caught(on_train: OnTrain, on_arguments: OnArguments | None, told: set[str]) -> Iterator[None]:
    """Replaces what is caught; adds to ``told`` that a Trainer was ``"built"`` and ``"trained"``."""
    seen: list[Any] = []

    def showing(check: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(check)
        def post_init(self: Any) -> None:
            if on_arguments is not None and not any(item is self for item in seen):
                seen.append(self)
                on_arguments(self)
            check(self)

        return post_init

    build, train = Trainer.__init__, Trainer.train

    @functools.wraps(build)
    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        told.add("built")
        build(self, *args, **kwargs)

    @functools.wraps(train)
    def training(self: Any, *args: Any, **kwargs: Any) -> Any:
        told.add("trained")

        return on_train(self, lambda *a, **k: train(self, *a, **k) if a or k else train(self, *args, **kwargs))

    with contextlib.ExitStack() as stack:
        for owner in {TrainingArguments, PatrickStarArgumentsMixin}:  # the mixin is empty where stock classes have it
            if hasattr(owner, "__post_init__"):
                stack.enter_context(mock.patch.object(owner, "__post_init__", showing(owner.__post_init__)))
        stack.enter_context(mock.patch.object(Trainer, "__init__", noting))
        stack.enter_context(mock.patch.object(Trainer, "train", training))
        yield


def plan_command(num_processes: int) -> str:
    """What to paste into a shell for a plan of the script that runs; empty if none does.

    Args:
        num_processes: How many train together.
    """
    script, *words = sys.argv or [""]
    is_script = script.endswith(".py") and getattr(sys.modules["__main__"], "__spec__", None) is None
    if not is_script or "ipykernel" in script:
        return ""
    for place, word in enumerate(words):
        name, is_given, _ = word.partition("=")
        if name.startswith("-") and _SECRET.search(name):  # errors go into logs and reports
            words[place : place + 1 if is_given else place + 2] = [f"{name}=..."]
    processes = ["--processes", str(num_processes)] if num_processes > 1 else []
    return shlex.join(["hf-patrickstar", "plan", "--machine", "this", *processes, "--", script, *words])


@contextlib.contextmanager
def naming_plan_command(num_processes: int) -> Iterator[None]:
    """Lets an error about memory in the block end with the command for a plan of the script, if one runs.

    Args:
        num_processes: How many train together.
    """
    try:
        yield
    except BudgetError as error:
        more, plan = error.more, plan_command(num_processes)
        error.more = Later(lambda: said if plan in (said := str(more)) else f"{said}\nTo plan the run: {plan}".lstrip())
        raise


def touch_nothing(arguments: Any, directory: str, **more: Any) -> None:
    """Changes training arguments, before they check themselves, so that nothing of the user's is written to.

    Args:
        arguments: The arguments object.
        directory: What the Trainer may write to in place of ``output_dir``.
        **more: Other fields with their values.
    """
    fields = {"output_dir": directory, "report_to": "none", "push_to_hub": False, "resume_from_checkpoint": None}
    fields |= {"save_strategy": "no", "eval_strategy": "no", "eval_on_start": False, "load_best_model_at_end": False}
    for name, value in {**fields, **more}.items():
        setattr(arguments, name, value)
