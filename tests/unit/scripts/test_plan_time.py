"""``benchmarks/bench_plan_time.py`` on a tiny model: what it times, and which runs find the traces of a plan."""

import json
import pathlib
import subprocess
import sys

import pytest

import hf_patrickstar

ROOT = pathlib.Path(hf_patrickstar.__file__).parent.parent


@pytest.mark.long
def test_plans_and_runs_are_timed_without_and_with_traces_of_a_plan(tmp_path):
    output = tmp_path / "found.json"
    words = ["--device", "cpu", "--plans", "tiny", "--runs", "tiny", "--rounds", "1", "--output", str(output)]
    command = [sys.executable, "benchmarks/bench_plan_time.py", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    questions = ["first", "same again", "another budget", "first, with advice"]
    assert [row["question"] for row in found["plans"]] == questions
    assert all(0 < row["seconds"] < row["process_s"] and row["peak_nbytes"] > 2**26 for row in found["plans"])
    without, with_traces = found["runs"]
    assert (without["kept_traces"], with_traces["kept_traces"]) == (False, True)
    assert "beside activations, " in without["expected"]
    assert "per step by the rates of 'h100'" in with_traces["expected"]
    assert min(without["seconds"], with_traces["seconds"]) > 0
