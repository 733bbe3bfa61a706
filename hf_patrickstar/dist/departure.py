"""Leaves the other processes when Python ends, and gives the threads of gloo time to let go of tensors before.

A thread of gloo drops the tensors of a collective after it has said that the collective is done, and takes Python's
lock for it. Where Python has ended meanwhile, that aborts the process: "terminate called without an active exception"
(pytorch/pytorch issue 190489). ``destroy_process_group`` waits for these threads only if nobody else holds the group;
an engine that lives until the program ends holds it, and so does torch's ``DistributedDataParallel``.
"""

import atexit
import functools
import os
import time
from collections.abc import Callable

_NUM_PAUSES, _PAUSE_S = 20, 0.005
"""On a busy system one long pause may end before the other threads ran; several short ones give them several turns."""


@functools.cache
def leave_at_exit(destroy: Callable[[], None] | None = None) -> None:
    """Has the process groups destroyed when Python ends, and gives the threads of gloo time before Python is gone.

    The first call counts, and others with the same function do nothing: what the program has registered since then
    (``atexit``) runs before, and may still use the groups.

    Args:
        destroy: Destroys the groups that are left; ``None`` where they stay.
    """
    atexit.register(_leave, destroy, os.getpid())


def _leave(destroy: Callable[[], None] | None, pid: int) -> None:
    if os.getpid() != pid:
        return  # a process that was forked from the one that talks to the others
    try:
        if destroy is not None:
            destroy()
    finally:
        for _ in range(_NUM_PAUSES):
            time.sleep(_PAUSE_S)
