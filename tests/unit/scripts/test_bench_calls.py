"""A step makes few calls into the package: what Python costs a model for being in chunks, on any device."""

import json
import pathlib
import subprocess
import sys

import hf_patrickstar

BENCHMARK = pathlib.Path(hf_patrickstar.__file__).parent.parent / "benchmarks/bench_calls.py"
MOST_CALLS = {"resident": 1300, "moving": 3200, "moving, torch's clipping": 4800}
MOST_TO_COPY = 5
"""Frames from a module's hook to the load of a chunk."""


def test_a_steady_step_makes_few_calls(tmp_path):
    # In a process of its own: where other threads may read parameters, or something was compiled, more is called.
    command = [sys.executable, str(BENCHMARK), "--output", str(tmp_path / "calls.json")]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    found = json.loads((tmp_path / "calls.json").read_text())
    for mode, most in MOST_CALLS.items():
        assert 0 < found[mode]["calls"] <= most, found[mode]
        moves = mode != "resident"
        assert (found[mode]["loads"] > 0) is moves
        assert moves <= found[mode]["frames_to_copy"] <= moves * MOST_TO_COPY, "0 where nothing is loaded"
