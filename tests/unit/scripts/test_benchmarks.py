"""Benchmarks with tiny sizes, and what they say of their own figures: aims, versions, trees that are not committed."""

import json
import subprocess
import sys
import types

import pytest

SIZES = {"hidden_size": 256, "num_hidden_layers": 3, "intermediate_size": 512, "num_attention_heads": 2}
OVERHEAD = "--device cpu --layers 1 --hidden 64 --length 16 --batch_size 1 --warmup 1 --steps 2 --repeats 1"


@pytest.fixture
def run(load, monkeypatch, tmp_path):
    """Runs a benchmark in this process; returns its exit status and what it has written."""

    def run(name, words):
        target = tmp_path / "found.json"
        monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", *words.split(), "--output", str(target)])
        code = 0
        try:
            load(name).main()
        except SystemExit as error:
            code = error.code
        return code, json.loads(target.read_text())

    return run


@pytest.mark.long
@pytest.mark.parametrize(("aim", "limit", "fails"), [(1e9, 0.0, True), (0.0, 1e9, False)])
def test_the_overhead_is_said_beside_its_aim_and_fails_above_its_limit(
    load, monkeypatch, run, capsys, aim, limit, fails
):
    bench = load("bench_overhead")
    assert (bench.AIM, bench.DEEP_AIM_US) == (1.02, 25)
    monkeypatch.setattr(bench, "AIM", aim)
    monkeypatch.setattr(bench, "DEEP_AIM_US", aim)
    code, found = run("bench_overhead", f"{OVERHEAD} --limit {limit}")
    assert (bool(code), found["aim_met"], found["limit"]) == (fails, aim > 0, limit)
    code, found = run("bench_overhead", f"{OVERHEAD} --deep 20")
    assert (code, [row.get("aim_met") for row in found["rows"]]) == (0, [aim > 0, None, None])
    said = capsys.readouterr().out
    for what in (f"aim of {aim}", "per module and pass"):
        assert f"{what}: {'met' if aim > 0 else 'not met'}\n" in said


@pytest.mark.long
def test_a_timeline_has_its_bounds(load, monkeypatch, run, capsys):
    monkeypatch.setitem(load("bench_timeline").MODELS, "tiny", SIZES)
    _, found = run("bench_timeline", "--models tiny --tokens 4096 --machines rtx4090")
    (row,) = found["rows"]
    assert row["over_lower_bound"] >= row["over_clipped_bound"] > 0.99
    assert row["clipped_bound_s"] <= row["serial_s"]
    assert f"{row['over_clipped_bound']:.2f}x" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "is_dirty"), [(None, False), ("code.py", True), ("benchmarks/results/old_cpu.json", False)]
)
def test_a_result_of_a_tree_that_is_not_committed_says_so(load, monkeypatch, tmp_path, capsys, changed, is_dirty):
    common, results = load("common"), tmp_path / "benchmarks" / "results"
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setattr(common, "RESULTS", results)
    results.mkdir(parents=True)
    for path in (tmp_path / "code.py", results / "old_cpu.json"):
        path.write_text("1")
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "first")):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)
    if changed is not None:
        (tmp_path / changed).write_text("2")
    common.finish("new", types.SimpleNamespace(device="cpu", output="results"), {"seconds": 1})
    found = json.loads((results / "new_cpu.json").read_text())
    assert (found["seconds"], found["commit"] != "unknown", found["commit"].endswith("-dirty")) == (1, True, is_dirty)
    assert ("not to be committed" in capsys.readouterr().out) is is_dirty
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("COMMIT", "abc")
    common.finish("new", types.SimpleNamespace(device="cpu", output=str(tmp_path / "found.json")), {})
    assert json.loads((tmp_path / "found.json").read_text())["commit"] == "abc", "where there is no git"


def test_peers_name_the_index_of_the_device(load, monkeypatch):
    """``torch.cuda.set_device`` refuses a device without one."""
    import torch

    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(torch._utils._get_device_index(device)))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "0")  # what is set is taken back
    for device in ("cuda", "cuda:1"):
        with load("peers").process_group(torch.device(device)):
            pass
    assert chosen == [0, 1]
