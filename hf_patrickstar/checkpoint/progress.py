"""Progress of work that may take long: shown where the progress of transformers is shown."""

import contextlib
import contextvars
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm.auto import tqdm

PROGRESS_AFTER_S = 2
"""Seconds after which progress is shown; of work that is done earlier nothing is seen."""
_are_hidden = contextvars.ContextVar("_are_hidden", default=False)


@contextlib.contextmanager
def no_bars() -> Iterator[None]:
    """Hides the bars of this package inside of the block: what is done on tensors without bytes takes no time."""
    token = _are_hidden.set(True)
    try:
        yield
    finally:
        _are_hidden.reset(token)


def shown(items: Iterable[Any], what: str, unit: str, *, is_first: bool, total: int | None = None) -> Any:
    """Iterates over items and shows how many are done, as a bar on stderr.

    Nothing is shown where ``transformers.utils.logging.disable_progress_bar`` was called, or stderr is a file.

    Args:
        items: The items.
        what: What is done with them.
        unit: What an item is, in the plural.
        is_first: Whether this is the first process; others show nothing.
        total: How many there are, where ``items`` cannot tell.

    Returns:
        A ``tqdm`` bar: an iterable, and a context manager that has ``update``.
    """
    logging = sys.modules.get("transformers.utils.logging")  # a program that does not use it has not disabled its bars
    is_hidden = _are_hidden.get() or not is_first or not (logging is None or logging.is_progress_bar_enabled())
    # None: hidden where stderr is a file, which would get a line at each change.
    return tqdm(items, desc=what, unit=f" {unit}", total=total, delay=PROGRESS_AFTER_S, disable=is_hidden or None)
