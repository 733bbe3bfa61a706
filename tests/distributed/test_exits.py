"""Processes that end with their engine, while threads of gloo still have tensors of the last collective."""

import os
import subprocess
import sys

from support.processes import ENVIRONMENT

SCRIPT = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from hf_patrickstar.dist.collectives import Collectives


def talk(rank, store):
    timeout = timedelta(seconds=50)
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2, timeout=timeout)
    collectives = Collectives.connect(None, torch.device("cpu"))
    sys.setswitchinterval(1000)  # the thread that has run the collective gets Python only where this one waits
    dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.ones(1))
    return collectives


codes = []
for attempt in range(6):
    children = []
    for rank in range(2):
        children.append(os.fork())
        if not children[-1]:
            collectives = talk(rank, f"{sys.argv[1]}/store{attempt}")
            sys.exit()
    codes += [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
print(codes)
"""


def test_no_process_aborts_where_it_ends(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path)],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.splitlines()[-1] == str([0] * 12), done.stderr[-2000:]
