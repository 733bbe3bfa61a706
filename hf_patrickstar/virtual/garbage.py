"""How often Python looks for cycles of objects while an engine is told what happens.

[Note: rare collections]
An engine of fake tensors makes some hundred thousand small objects for one plan, and Python looks for cycles among them
after every few hundred: a fifth of the time. Next to none of them are in cycles. While a model runs Python goes on as
usual: a cycle may hold activations, and when they are freed decides how much memory a plan counts.

Now and then Python looks at all objects that there are, most of which are those of libraries: 0.3 seconds each time.
``objects_set_aside`` leaves them out. Loading the libraries takes a fifth longer if Python looks for cycles meanwhile.
"""

import contextlib
import gc
from collections.abc import Iterator

_RARELY = 20_000
"""New objects between two collections; Python's own number is some hundred."""


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Lets Python collect rarely; see [Note: rare collections]. No model may run inside."""
    usual = gc.get_threshold()
    if usual[0]:  # 0: the caller has switched collections off
        gc.set_threshold(max(usual[0], _RARELY), *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Switches collections off inside of the block, in which libraries, or results that were kept, are loaded."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def objects_set_aside() -> Iterator[None]:
    """Leaves the objects that are there out of collections inside of the block, unless the caller does so already.

    What code inside of the block has set aside (``gc.freeze``) is collected again after it, too.
    """
    is_first = not gc.get_freeze_count()
    if is_first:
        gc.freeze()
    try:
        yield
    finally:
        if is_first:
            gc.unfreeze()
