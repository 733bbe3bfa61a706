"""What benchmarks say of their own figures, and where they compute."""

import json
import subprocess
import types

import pytest


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
