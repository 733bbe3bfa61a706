"""When Python looks for cycles of objects that nobody needs any more."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Switches collections off inside of the block, in which libraries, or results that were kept, are loaded.

    Loading the libraries takes a fifth longer if Python looks for cycles meanwhile.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def frozen_objects() -> Iterator[None]:
    """Leaves the objects that are there out of collections inside of the block, unless the caller does so already.

    Most of them are those of libraries, and Python takes 0.3 seconds to look at all. What code inside of the block has
    set aside (``gc.freeze``) is collected again after it, too.
    """
    is_first = not gc.get_freeze_count()
    if is_first:
        gc.freeze()
    try:
        yield
    finally:
        if is_first:
            gc.unfreeze()
