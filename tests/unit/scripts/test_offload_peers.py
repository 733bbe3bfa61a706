"""The offload benchmark under other systems and beside its simulated time, on a tiny model on the CPU."""

import dataclasses
import json
import os
import pathlib
import pickle
import subprocess
import sys

import pytest

import hf_patrickstar
from hf_patrickstar.errors import BudgetError
from hf_patrickstar.machine import MACHINES

ROOT = pathlib.Path(hf_patrickstar.__file__).parent.parent
TINY = "--device cpu --size tiny --batch_size 2 --length 16 --warmup 1 --steps 3"
WITHOUT_DEEPSPEED = "sys.modules['deepspeed'] = None"
FULL_DEVICE = """
import torch.distributed.fsdp
def fully_shard(*args, **settings):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much.\\nMore is said.")
torch.distributed.fsdp.fully_shard = fully_shard
"""
SMALL_HOST = """
import hf_patrickstar.memory.tiers
hf_patrickstar.memory.tiers.available_host_nbytes = lambda: 2**20
"""
PROGRAM = """
import runpy, sys
{}
sys.argv = sys.argv[1:]
sys.path.insert(0, "benchmarks")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(target, words, before=()):
    """What the benchmark writes, and what it prints."""
    command = [sys.executable, *before, "benchmarks/bench_offload.py", *f"{TINY} {words}".split()]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command += ["--output", str(target)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(target.read_text()), done.stdout


def test_fsdp2_trains_the_same_as_plain_torch_and_this_package(tmp_path):
    found = {kind: run(tmp_path / kind, f"--kind {kind}")[0] for kind in ("plain", "patrickstar", "fsdp2")}
    peer = found["fsdp2"]
    assert peer["fits"]
    assert peer["tokens_per_second"] > 0
    assert peer["host_peak_nbytes"] > 0
    assert len(peer["seconds_per_step"]) == 3
    assert len(peer["losses"]) == 4
    # The root and both blocks, with their values at home on the host.
    assert (peer["sharded_modules"], peer["parameters_on"]) == (3, "cpu")
    for kind in ("plain", "patrickstar"):
        assert peer["losses"] == pytest.approx(found[kind]["losses"], rel=2**-8), "as near as bf16 is"
        assert peer["parameters"] == found[kind]["parameters"]


def test_zero3_is_skipped_where_deepspeed_is_not_installed(tmp_path):
    found, printed = run(tmp_path / "found.json", "--kind zero3", ("-c", PROGRAM.format(WITHOUT_DEEPSPEED)))
    assert found["skipped"] == "deepspeed is not installed"
    assert "fits" not in found, "nobody knows"
    assert "bench_offload_tiny_zero3: skipped: deepspeed is not installed\n" in printed


@pytest.mark.parametrize(
    ("before", "why"),
    [
        (FULL_DEVICE, "CUDA out of memory. Tried to allocate much."),
        (SMALL_HOST, "16 bytes per parameter are 1.63 MiB of the host, and 1.00 MiB are left"),
    ],
)
def test_a_peer_that_does_not_fit_is_no_failure(tmp_path, before, why):
    found, printed = run(tmp_path / "found.json", "--kind fsdp2", ("-c", PROGRAM.format(before)))
    assert found["fits"] is False
    assert found["why"] == why
    assert "tokens_per_second" not in found
    assert f"bench_offload_tiny_fsdp2: does not fit: {why}\n" in printed


def test_simulated_time_of_a_plan_that_was_carried_along_stands_beside_measured_time(tmp_path):
    settings = """--settings {"dtype":"bf16","device_budget":"1MiB"}"""
    command = [sys.executable, "benchmarks/bench_offload.py", *f"{TINY} {settings} --record".split()]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(tmp_path / "plan")], cwd=ROOT, env=env, check=True, capture_output=True, timeout=280)
    slow = dataclasses.replace(MACHINES["h100"], name="slow", operator_s=0.01)
    (tmp_path / "slow.json").write_text(slow.to_json())
    words = f"--kind patrickstar {settings} --plan {tmp_path / 'plan'}"
    found, _ = run(tmp_path / "found.json", words)
    at_other_rates, printed = run(tmp_path / "found.json", f"{words} --rates {tmp_path / 'slow.json'}")
    simulated_s, measured_s = found["simulated_seconds_per_step"], sorted(found["seconds_per_step"])[1]
    assert found["simulated_over_measured"] == pytest.approx(simulated_s / measured_s)
    assert found["simulated_on"] == "accelerator, known rates"
    assert at_other_rates["simulated_on"] == "slow, measured rates"
    assert at_other_rates["simulated_seconds_per_step"] > 10 * simulated_s > 0
    assert 0 < found["planned_device_peak_nbytes"] <= 2**20 == found["stats"]["device_budget_nbytes"]
    assert found["simulated_busy_shares"]["compute"] > 0
    assert found["busy_shares"]["compute"] > 0
    assert "device_peak_nbytes" not in found, "the CPU has no memory of its own"
    assert "simulated_seconds_per_step" in printed


def test_a_plan_of_a_larger_device_does_not_cost_what_was_measured(tmp_path):
    """The device that is there may be smaller than the one that the plan was made for."""
    plan = pickle.dumps(Unfit())
    (tmp_path / "plan").write_bytes(plan)
    before = f"sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})"
    found, _ = run(
        tmp_path / "found.json",
        f"--kind patrickstar --plan {tmp_path / 'plan'}",
        ("-c", PROGRAM.format(before)),
    )
    assert found["tokens_per_second"] > 0
    assert found["simulation_error"] == "BudgetError: too small"


def test_what_cannot_be_measured_afterwards_does_not_cost_what_was(tmp_path):
    before = """
import hf_patrickstar.integrations.trainer_report as lanes
def fail(self): raise RuntimeError("no lanes")
lanes.LaneWatch.begin_step = fail
"""
    words = f"--kind patrickstar --plan {tmp_path / 'missing'}"
    found, printed = run(tmp_path / "found.json", words, ("-c", PROGRAM.format(before)))
    assert found["tokens_per_second"] > 0
    assert found["figures_error"] == "RuntimeError: no lanes"
    assert "missing" in found["simulation_error"]
    assert printed.count("step ") >= 4, "every step is printed when it is done"


class Unfit:
    """A simulation that fits nowhere."""

    traces = ()

    @property
    def rules(self):
        raise BudgetError("too small")
