"""How many threads update optimizer states on the host.

Launchers of several processes set ``OMP_NUM_THREADS=1``, so that processes do not fight for cores in forward. The
optimizer's update on the host then has one core of many. It gets the cores of this process for itself; forward,
backward and norms keep the threads they have, since the order in which a reduction adds depends on their number.

``mp.spawn``, ``srun`` and ``mpirun`` set nothing, and torch then computes with all cores in every process. There the
update takes no more than the share of this process: eight processes do not start eight times as many workers as there
are cores.

[Note: same bits with any number of threads]
Adam gets as many workers (``optim/workers.py``), each of which computes whole tiles alone: every element is computed by
the same instructions whatever their number is. Other optimizers compute in torch's own threads and may reduce over a
tensor, in an order that depends on the number; they get another one only if the user has named it.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping

import psutil
import torch

from hf_patrickstar.common.cores import own_cores, usable_cores

_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")
"""Variables that ``torchrun`` and ``accelerate launch`` set for the processes that they start."""
_NUM_THREADS = "OMP_NUM_THREADS"


def launcher_environment() -> Mapping[str, str] | None:
    """What the process that started this one was started with; ``None`` if that cannot be seen."""
    try:
        return psutil.Process(os.getppid()).environ()
    except (psutil.Error, OSError):
        return None


def choose_threads(
    setting: "int | str",
    num_sharers: int,
    environment: Mapping[str, str],
    launcher: Callable[[], "Mapping[str, str] | None"] = launcher_environment,
) -> tuple[int | None, str]:
    """Decides with how many threads updates on the host run.

    Args:
        setting: ``host_threads`` of the configuration.
        num_sharers: Processes of the group that run on the cores of this one, itself counted.
        environment: The environment variables of this process.
        launcher: Tells those that its launcher was started with.

    Returns:
        How many, ``None`` for those that torch has anyway; and a sentence for the log.
    """
    if setting != "auto":
        return int(setting), f"host_threads={setting}: as asked"
    told, now = environment.get(_NUM_THREADS), torch.get_num_threads()
    num_cores, num = len(usable_cores()), own_cores(num_sharers)
    if told is None and (num_sharers < 2 or now <= num):
        return None, f"host_threads=auto: {now}, as torch has chosen"
    why = f"{_NUM_THREADS} is not set; {now}"
    if told is not None:
        if told != "1" or now != 1 or not any(name in environment for name in _LAUNCHERS):
            return None, f"host_threads=auto: {now}, as {_NUM_THREADS} or the program says"
        if _NUM_THREADS in (launcher() or ()):
            return None, f"host_threads=auto: {now}, as {_NUM_THREADS} said before the launcher began"
        why = f"{_NUM_THREADS}=1 comes from the launcher; 1"
    return num, (
        f"host_threads=auto: {num} for the optimizer's update on the host ({num_cores} cores, {num_sharers} processes "
        f"on them), because {why} for all else"
    )


@contextlib.contextmanager
def in_threads(num: int | None) -> Iterator[None]:
    """Lets torch compute with so many threads in a block; ``None`` for those that it has."""
    before = torch.get_num_threads()
    if num is None or num == before:
        yield
        return
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)
