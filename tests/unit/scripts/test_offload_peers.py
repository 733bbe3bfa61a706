"""The offload benchmark under other systems and beside its replay, on a tiny model on the CPU."""

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


def run(words, target=None, before=()):
    """What the benchmark writes, and what it prints."""
    command = [sys.executable, *before, "benchmarks/bench_offload.py", *f"{TINY} {words}".split()]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command += [] if target is None else ["--output", str(target)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout if target is None else (json.loads(target.read_text()), done.stdout)


def replay(results, tmp_path):
    """What a replay of results comes to, by their names; without rates, by those of an accelerator."""
    record = {"device": "some accelerator", "parts": {name: {"result": result} for name, result in results.items()}}
    (tmp_path / "record.json").write_text(json.dumps(record))
    return run(f"--replay {tmp_path / 'record.json'}", tmp_path / "replay.json")[0]["rows"]


@pytest.mark.long
def test_a_replay_moves_what_the_run_did_and_other_ways_train_the_same(tmp_path):
    ours, printed = run(f"--kind patrickstar {SETTINGS}", tmp_path / "own")
    assert printed.count("step ") >= 6, "every step is printed when it is done"
    trainers, _ = run(f"--kind trainer {SETTINGS}", tmp_path / "trainer")
    plain, _ = run("--kind plain", tmp_path / "plain")
    for found in (ours, trainers, plain):
        assert (len(found["seconds_per_step"]), len(found["losses"])) == (3, 4)
        assert min(found["seconds_per_step"]) > 0 <= found["seconds_after_steps"]
        trace = found["trace"]
        whole = sum(trace["kernels"].values()) + trace["gap_seconds"] + trace["short_gap_seconds"]
        assert whole == pytest.approx(trace["seconds"], rel=0.01)
    assert ours["trace"]["kernels"].keys() >= {"forward", "backward", "update"}
    assert ours["trace"]["counted"]["chunk_loads"] > 0
    assert trainers["losses"] == pytest.approx(ours["losses"], rel=2**-8), "norms decay in one of them"
    peer, _ = run("--kind fsdp2", tmp_path / "peer")
    assert peer["fits"]
    # The root and both blocks, with their values at home on the host.
    assert (peer["sharded_modules"], peer["parameters_on"]) == (3, "cpu")
    assert peer["losses"] == pytest.approx(plain["losses"], rel=2**-8), "as near as bf16 is"
    assert peer["parameters"] == plain["parameters"]
    replayed = replay({"ours": ours, "plain": plain, "broken": {**ours, "ran": {}}}, tmp_path)
    assert replayed.keys() == {"ours", "broken"}
    assert replayed["broken"]["error"].startswith("KeyError")
    row = replayed["ours"]
    assert row["counted"] == ours["trace"]["counted"]
    assert row["over_measured"] == pytest.approx(row["seconds"] / sorted(ours["seconds_per_step"])[1])
    assert row["busy"]["compute"] > 0
