"""Adds the engine's figures to training logs: a console gets a few, other callbacks all, the Trainer's history none.

It also has what else the console of a Trainer shows, or does not show: lines, and bars of progress.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
from transformers import PrinterCallback, ProgressCallback
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from hf_patrickstar.report.figures import brief

_NOTEBOOK = "NotebookProgressCallback"
"""The console of a notebook, whose module can be imported in notebooks alone."""


def tell_console(handler: Any, *lines: str) -> None:
    """Prints lines where the Trainer prints its logs: beside a progress bar if there is one; without a console nowhere.

    Args:
        handler: The Trainer's ``CallbackHandler``.
        *lines: The lines.
    """
    consoles = [callback for callback in handler.callbacks if _is_console(callback) or _is_notebook(callback)]
    if not consoles:
        return
    bars = (getattr(console, "training_bar", None) for console in consoles)
    write: Callable[[str], Any] = next((bar.write for bar in bars if bar is not None), print)
    for line in lines:
        write(f"patrickstar: {line}")


@contextlib.contextmanager
def bars_as_asked(args: Any) -> Iterator[None]:
    """Inside the block the package shows no progress if ``disable_tqdm`` says so, and neither does transformers.

    Args:
        args: The arguments of a Trainer.
    """
    if not args.disable_tqdm or not is_progress_bar_enabled():
        yield
        return
    are_those_of_the_hub_disabled = are_progress_bars_disabled()
    disable_progress_bar()
    try:
        yield
    finally:
        enable_progress_bar()
        if are_those_of_the_hub_disabled:
            disable_progress_bars()


def _is_console(callback: Any) -> bool:
    return isinstance(callback, (PrinterCallback, ProgressCallback))


def _is_notebook(callback: Any) -> bool:
    return any(base.__name__ == _NOTEBOOK for base in type(callback).__mro__)


@contextlib.contextmanager
def figures_told(handler: Any, figures: Mapping[str, float], is_brief: bool) -> Iterator[None]:
    """Inside the block the logs that the Trainer passes to callbacks have the figures too.

    ``log_history``, and so ``trainer_state.json``, does not get them: seconds, and bytes of a step that is recorded
    again, would differ between a resumed run and an uninterrupted one.

    Args:
        handler: The Trainer's ``CallbackHandler``.
        figures: All figures.
        is_brief: Whether a console shows a few and not all.
    """

    def with_all(tell: Callable[..., Any]) -> Callable[..., Any]:
        def on_log(args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> Any:
            logs.update(figures)  # log_history has a copy without the figures
            return tell(args, state, control, logs, **kwargs)

        return on_log

    def with_few(tell: Callable[..., Any]) -> Callable[..., Any]:
        def on_log(args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> Any:
            others = {key: value for key, value in logs.items() if key not in figures}
            return tell(args, state, control, logs=others | brief(figures), **kwargs)

        return on_log

    consoles = [callback for callback in handler.callbacks if _is_console(callback)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_on_log(handler, with_all))
        for console in consoles if is_brief else ():
            stack.enter_context(_on_log(console, with_few))
        yield


@contextlib.contextmanager
def _on_log(owner: Any, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replaces the ``on_log`` of one object inside the block; the list of callbacks does not change."""
    before = dict(vars(owner))
    owner.on_log = change(owner.on_log)
    try:
        yield
    finally:
        if "on_log" in before:
            owner.on_log = before["on_log"]
        else:
            del owner.on_log
