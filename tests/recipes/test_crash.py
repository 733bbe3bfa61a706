"""A short version of the crash test; see scripts/crash_test.py."""

import os
import subprocess
import sys

import pytest
from support.running import ROOT

pytestmark = pytest.mark.xdist_group("distributed")  # one worker of pytest-xdist, or each starts processes


def test_nothing_is_lost_when_training_is_killed(tmp_path):
    command = [sys.executable, str(ROOT / "scripts/crash_test.py"), "--kills", "3", "--full_disks", "1"]
    command += ["--steps", "9", "--folder", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)
    assert result.stdout.splitlines()[-1:] == ["3 kills, 3 resumes, 0 lost"], result.stdout + result.stderr[-6000:]
    assert result.returncode == 0
    assert list(tmp_path.iterdir()) == []
