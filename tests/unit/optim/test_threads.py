"""How many threads update optimizer states on the host, on a machine with 16 cores."""

import math

import pytest

from hf_patrickstar.common import cores
from hf_patrickstar.optim import threads as module
from hf_patrickstar.optim.threads import choose_threads

TORCHRUN = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}
ACCELERATE = {"OMP_NUM_THREADS": "1", "ACCELERATE_MIXED_PRECISION": "no"}
FOUR = {**TORCHRUN, "OMP_NUM_THREADS": "4"}
LAUNCHER, UNSET = (
    "because OMP_NUM_THREADS=1 comes from the launcher; 1 for all else",
    "because OMP_NUM_THREADS is not set; ",
)
PROGRAM = "host_threads=auto: 1, as OMP_NUM_THREADS or the program says"


@pytest.mark.parametrize(
    ("environment", "setting", "sharers", "launcher", "torchs", "quota", "threads", "said"),
    [
        # One thread by the launcher becomes the cores of the process.
        *((TORCHRUN, "auto", sharers, None, 1, math.inf, num, LAUNCHER) for sharers, num in ((1, 16), (3, 5), (32, 1))),
        (ACCELERATE, "auto", 2, {}, 1, math.inf, 8, LAUNCHER),
        # What somebody has set holds.
        (
            TORCHRUN,
            "auto",
            2,
            {"OMP_NUM_THREADS": "1"},
            1,
            math.inf,
            None,
            "1, as OMP_NUM_THREADS said before the launcher",
        ),
        (FOUR, "auto", 2, {}, 1, math.inf, None, PROGRAM),
        ({"OMP_NUM_THREADS": "1"}, "auto", 2, {}, 1, math.inf, None, PROGRAM),
        (TORCHRUN, "auto", 2, None, 2, math.inf, None, ""),
        (TORCHRUN, 5, 2, None, 1, math.inf, 5, "host_threads=5: as asked"),
        # Processes for which nobody has set a number share the cores.
        *(({}, "auto", sharers, None, 16, math.inf, num, UNSET) for sharers, num in ((2, 8), (3, 5), (32, 1))),
        ({"TORCHELASTIC_RUN_ID": "none"}, "auto", 2, None, 16, 6.5, 3, UNSET),
        # Threads of torch that are no more than the share of the process stay.
        *(
            ({}, "auto", sharers, None, torchs, math.inf, None, f"host_threads=auto: {torchs}, as torch has chosen")
            for sharers, torchs in ((1, 16), (2, 8), (2, 4), (32, 1))
        ),
    ],
)
def test_threads_of_updates(environment, setting, sharers, launcher, torchs, quota, threads, said, monkeypatch):
    for user in (cores, module):
        monkeypatch.setattr(user, "usable_cores", lambda: frozenset(range(16)))
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: torchs)
    found, reason = choose_threads(setting, sharers, environment, lambda: launcher)
    assert found == threads
    assert said in reason
    assert setting != "auto" or not threads or f"auto: {threads} for the optimizer's update" in reason
