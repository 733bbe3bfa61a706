"""``run`` under torchrun: every process of a stock script trains its part."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from support.scripts import PLAIN_EXIT, write_stock_scripts

TESTS = pathlib.Path(__file__).parents[1]
LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.mark.long
def test_two_processes_train_a_stock_script_together(tmp_path):
    write_stock_scripts(tmp_path)
    words = ["--use_cpu", "--max_steps", "2", "--logging_steps", "1", "--report_to", "none", "--save_strategy", "no"]
    words += ["--per_device_train_batch_size", "2", "--learning_rate", "5e-3", "--disable_tqdm", "true"]
    search = [str(TESTS.parent), str(TESTS)]
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    results = []
    chunked = [*LAUNCH, "-m", "hf_patrickstar", "run", "clm.py", "--output_dir", "chunked", *words, "--patrickstar"]
    for launched, folders in (
        ([*LAUNCH, "clm.py", "--output_dir", "plain", *words], [str(PLAIN_EXIT), *search]),
        (chunked, search),
    ):
        done = subprocess.run(
            [sys.executable, *launched],
            cwd=tmp_path,
            env={**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(folders)},
            capture_output=True,
            text=True,
            timeout=170,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-6000:]
        results.append(json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"losses"'))))
    plain, chunked = results
    assert (plain["size"], plain["is_chunked"]) == (2, False)
    assert (chunked["size"], chunked["is_chunked"]) == (2, True)
    assert chunked["losses"] == plain["losses"]
    told = re.findall(r"patrickstar: \d+ steps?, .*; peak ", done.stdout + done.stderr)
    assert len(told) == 1, "one process says what the run came to"
