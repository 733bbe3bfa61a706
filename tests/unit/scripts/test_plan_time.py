"""``benchmarks/bench_plan_time.py`` on a tiny model: its runs find traces exactly where a plan has left them."""

import json
import pathlib
import subprocess
import sys

import hf_patrickstar

ROOT = pathlib.Path(hf_patrickstar.__file__).parent.parent


def test_runs_are_timed_without_and_with_traces_of_a_plan(tmp_path):
    words = ["--device", "cpu", "--plans", "--runs", "tiny", "--rounds", "1", "--output", str(tmp_path / "found.json")]
    command = [sys.executable, "benchmarks/bench_plan_time.py", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    without, with_traces = found["runs"]
    assert (without["kept_traces"], with_traces["kept_traces"]) == (False, True)
    assert "per step" not in without["expected"]
    assert "on the device, beside activations, at least" in without["expected"]
    assert "on the device, with activations, at least" in with_traces["expected"]
    assert "per step by the rates of 'h100'" in with_traces["expected"]
    assert all(row["seconds"] > 0 for row in found["runs"])
    assert found["plans"] == []
