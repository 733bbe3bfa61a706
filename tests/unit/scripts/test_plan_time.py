"""``benchmarks/bench_plan_time.py`` on a tiny model: what it times, and which runs find the traces of a plan."""

import json
import pathlib
import subprocess
import sys

import pytest

import hf_patrickstar

ROOT = pathlib.Path(hf_patrickstar.__file__).parent.parent


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    output = tmp_path_factory.mktemp("plan_time") / "found.json"
    words = ["--device", "cpu", "--plans", "tiny", "--runs", "tiny", "--rounds", "1", "--output", str(output)]
    command = [sys.executable, "benchmarks/bench_plan_time.py", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text())


def test_plans_are_timed_after_libraries_were_loaded(found):
    questions = ["first", "same again", "another budget", "first, with advice"]
    assert [row["question"] for row in found["plans"]] == questions
    assert all(0 < row["seconds"] < row["process_s"] for row in found["plans"])
    assert all(row["peak_nbytes"] > 2**26 for row in found["plans"])


def test_runs_are_timed_without_and_with_traces_of_a_plan(found):
    without, with_traces = found["runs"]
    assert (without["kept_traces"], with_traces["kept_traces"]) == (False, True)
    assert "per step" not in without["expected"]
    assert "on the device, beside activations, at least" in without["expected"]
    assert "on the device, with activations, at least" in with_traces["expected"]
    assert "per step by the rates of 'h100'" in with_traces["expected"]
    assert all(row["seconds"] > 0 for row in found["runs"])
