"""What benchmarks say of their own figures: aims, versions, and trees that are not committed."""

import importlib
import json
import pathlib
import sys

import pytest

import hf_patrickstar

BENCHMARKS = pathlib.Path(hf_patrickstar.__file__).parent.parent / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Imports a module of the benchmarks."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


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
