"""The distributions hold what they should, and the wheel works where there is no checkout."""

import os
import pathlib
import subprocess
import sys

import pytest

import hf_patrickstar

pytestmark = pytest.mark.long
ROOT = pathlib.Path(hf_patrickstar.__file__).parent.parent


def test_the_wheel_runs_the_commands_and_the_quickstart():
    environment = {**os.environ, "PYTHON": sys.executable}
    process = subprocess.run(
        ["bash", "scripts/wheel.sh"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.splitlines()[-2:] == ["quickstart: ok", "wheel: ok"]
