"""The offload benchmark under other systems and beside its simulated time, on a tiny model on the CPU."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import hf_patrickstar

ROOT = pathlib.Path(hf_patrickstar.__file__).parent.parent
TINY = "--device cpu --size tiny --batch_size 2 --length 16 --warmup 1 --steps 3"
SETTINGS = """--settings {"dtype":"bf16","device_budget":"1MiB"}"""
WITHOUT_DEEPSPEED = "sys.modules['deepspeed'] = None"
FULL_DEVICE = """
import torch.distributed.fsdp
def fully_shard(*args, **settings):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much.\\nMore is said.")
torch.distributed.fsdp.fully_shard = fully_shard
"""
PROGRAM = """
import runpy, sys
{}
sys.argv = sys.argv[1:]
sys.path.insert(0, "benchmarks")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(words, target=None, before=()):
    """What the benchmark writes, and what it prints."""
    command = [sys.executable, *before, "benchmarks/bench_offload.py", *f"{TINY} {words}".split()]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command += [] if target is None else ["--output", str(target)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout if target is None else (json.loads(target.read_text()), done.stdout)


@pytest.mark.long
def test_a_run_stands_beside_the_simulated_time_of_its_plan_and_beside_fsdp2(tmp_path):
    run(f"{SETTINGS} --record {tmp_path / 'plan'}")
    found, printed = run(f"--kind patrickstar {SETTINGS} --plan {tmp_path / 'plan'}", tmp_path / "own")
    simulated_s, measured_s = found["simulated_seconds_per_step"], sorted(found["seconds_per_step"])[1]
    assert found["simulated_over_measured"] == pytest.approx(simulated_s / measured_s)
    assert found["simulated_on"] == "accelerator, known rates"
    assert 0 < found["planned_device_peak_nbytes"] <= 2**20 == found["stats"]["device_budget_nbytes"]
    assert (found["simulated_busy_shares"]["compute"], found["busy_shares"]["compute"]) > (0, 0)
    assert printed.count("step ") >= 4, "every step is printed when it is done"
    peer, _ = run("--kind fsdp2", tmp_path / "peer")
    assert peer["fits"]
    assert min(peer["tokens_per_second"], peer["host_peak_nbytes"]) > 0
    # The root and both blocks, with their values at home on the host.
    assert (peer["sharded_modules"], peer["parameters_on"]) == (3, "cpu")
    assert (len(peer["seconds_per_step"]), len(peer["losses"])) == (3, 4)
    assert peer["losses"] == pytest.approx(found["losses"], rel=2**-8), "as near as bf16 is"
    assert peer["parameters"] == found["parameters"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "before", "key", "value", "said"),
    [
        ("zero3", WITHOUT_DEEPSPEED, "skipped", "deepspeed is not installed", "zero3: skipped: deepspeed is not"),
        ("fsdp2", FULL_DEVICE, "why", "CUDA out of memory. Tried to allocate much.", "fsdp2: does not fit: CUDA"),
        ("patrickstar --plan missing", "", "simulation_error", "FileNotFoundError", "tokens"),
    ],
)
def test_what_is_not_there_is_no_failure(tmp_path, kind, before, key, value, said):
    found, printed = run(f"--kind {kind}", tmp_path / "found.json", ("-c", PROGRAM.format(before)))
    assert found[key].startswith(value)
    assert said in printed
    assert found.get("fits") is {"skipped": None, "why": False, "simulation_error": True}[key]
