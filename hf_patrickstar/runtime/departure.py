"""Leaves the other processes when Python ends, after the threads of gloo have let go of what they sent.

A thread of gloo drops the tensors of a collective after it has said that the collective is done, and takes Python's
lock for it. Where Python has ended meanwhile, that aborts the process: "terminate called without an active exception"
(pytorch/pytorch issue 190489). ``destroy_process_group`` waits for these threads only if nobody else holds the group;
an engine that lives until the program ends holds it, and so does torch's ``DistributedDataParallel``.
"""

import atexit
import time
from collections.abc import Callable

_NUM_PAUSES, _PAUSE_S = 20, 0.005
"""Several pauses, since in each of them a system that is busy runs the other threads once before it runs this one."""


def leave_at_exit(destroy: Callable[[], None]) -> None:
    """Has the process groups destroyed when Python ends, and lets the threads of gloo run before it does.

    Args:
        destroy: Destroys the groups that are left; asked for several times, it is called once.
    """
    atexit.unregister(_leave)  # so that what was registered since is run before
    atexit.register(_leave, destroy)


def _leave(destroy: Callable[[], None]) -> None:
    destroy()
    for _ in range(_NUM_PAUSES):
        time.sleep(_PAUSE_S)
