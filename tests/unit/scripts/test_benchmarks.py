"""What benchmarks say of their own figures: aims, versions, and trees that are not committed."""

import json
import subprocess
import sys
import types

import pytest


def run(load, monkeypatch, tmp_path, name, words):
    """What a benchmark writes, run in this process."""
    target = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", *words.split(), "--output", str(target)])
    code = 0
    try:
        load(name).main()
    except SystemExit as error:
        code = error.code
    return code, json.loads(target.read_text())


TINY = "--device cpu --layers 1 --hidden 64 --length 16 --batch_size 1 --warmup 1 --steps 2 --repeats 1"


@pytest.mark.parametrize(("aim", "limit", "fails"), [(1e9, 1e9, False), (1e9, 0.0, True), (0.0, 1e9, False)])
def test_the_overhead_is_told_beside_its_aim_and_fails_above_its_limit(
    load, monkeypatch, tmp_path, capsys, aim, limit, fails
):
    assert load("bench_overhead").AIM == 1.02
    monkeypatch.setattr(load("bench_overhead"), "AIM", aim)
    code, found = run(load, monkeypatch, tmp_path, "bench_overhead", f"{TINY} --limit {limit}")
    assert (found["aim"], found["aim_met"], found["limit"]) == (aim, aim > 0, limit)
    assert f"aim of {aim}: {'met' if aim > 0 else 'not met'}\n" in capsys.readouterr().out
    assert bool(code) is fails


@pytest.mark.parametrize("aim", [0.0, 1e9])
def test_hooks_are_told_beside_their_aim(load, monkeypatch, tmp_path, capsys, aim):
    assert load("bench_overhead").DEEP_AIM_US == 25
    monkeypatch.setattr(load("bench_overhead"), "DEEP_AIM_US", aim)
    code, found = run(load, monkeypatch, tmp_path, "bench_overhead", f"{TINY} --deep 20")
    assert code == 0
    assert [row.get("aim_met") for row in found["rows"]] == [aim > 0, None, None]
    assert f"per module and pass: {'met' if aim > 0 else 'not met'}\n" in capsys.readouterr().out


def git(folder, *words):
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=folder, check=True)


@pytest.fixture
def tree(load, monkeypatch, tmp_path):
    """A repository with one commit, in which results are written."""
    common = load("common")
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setattr(common, "RESULTS", tmp_path / "benchmarks" / "results")
    common.RESULTS.mkdir(parents=True)
    (tmp_path / "code.py").write_text("1")
    (common.RESULTS / "old_cpu.json").write_text("1")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "output", "is_dirty", "is_said"),
    [
        (None, "results", False, False),
        ("code.py", "results", True, True),
        ("code.py", "found.json", True, False),
        ("benchmarks/results/old_cpu.json", "results", False, False),
    ],
)
def test_a_result_of_a_tree_that_is_not_committed_says_so(load, tree, capsys, changed, output, is_dirty, is_said):
    if changed is not None:
        (tree / changed).write_text("2")
    target = tree / "benchmarks" / "results" / "new_cpu.json" if output == "results" else tree / output
    options = types.SimpleNamespace(device="cpu", output=output if output == "results" else str(target))
    load("common").finish("new", options, {"seconds": 1})
    found = json.loads(target.read_text())
    assert found["seconds"] == 1
    assert found["commit"] != "unknown"
    assert found["commit"].endswith("-dirty") is is_dirty
    assert ("not to be committed" in capsys.readouterr().out) is is_said


@pytest.mark.parametrize("version", [None, "0.19.8"])
def test_the_version_of_deepspeed_is_recorded_where_it_is_installed(load, monkeypatch, version):
    monkeypatch.setattr(load("common"), "package_version", {"deepspeed": version}.get)
    assert load("common").machine("cpu")["versions"].get("deepspeed") == version
    assert ("deepspeed" in load("common").machine("cpu")["versions"]) is (version is not None)


def test_a_package_that_is_not_installed_has_no_version(load):
    assert load("common").package_version("torch")
    assert load("common").package_version("no-such-package") is None
