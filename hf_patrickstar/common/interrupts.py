"""Ctrl-C that waits while something is done that must not stop halfway."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Lets Ctrl-C wait until the block has ended, because what it stops halfway could not be done again or taken back.

    The handler of ``SIGINT`` that the program has is called when the block has ended. A second Ctrl-C does not wait.
    Python calls such handlers in the main thread alone, so in other threads there is nothing to do.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[Any, ...]] = []

    def note(*args: Any) -> None:
        arrived.append(args)
        if len(arrived) > 1:
            handler(*args)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(arrived) == 1:
            handler(*arrived[0])
