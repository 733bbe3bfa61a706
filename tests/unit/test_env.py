"""``hf-patrickstar env``: what it prints, the file that it writes, and its exit status."""

import functools
import importlib.metadata
import pathlib

import pytest
import torch

from hf_patrickstar import __version__
from hf_patrickstar.cli import env, files
from hf_patrickstar.cli.main import main
from hf_patrickstar.machine import MACHINES, find_machine
from hf_patrickstar.report.measure import Effort, measure_machine

TINY = Effort(nbytes=2**16, most_rows=128, calls=5, repetitions=2, seconds=0.05)


def rows_of(text):
    """What was printed, by name."""
    return {line[:24].rstrip(): line[24:] for line in text.splitlines() if line}


@pytest.fixture
def h100(monkeypatch):
    """A measurement that finds the machine that is known as h100."""
    monkeypatch.setattr(env, "measure_machine", lambda **_: MACHINES["h100"])


@pytest.fixture
def never(monkeypatch):
    """A measurement that must not begin."""

    def measure(**_):
        raise AssertionError("measured")

    monkeypatch.setattr(env, "measure_machine", measure)


def test_the_machine_and_its_software(never, capsys):
    assert main(["env"]) == 0
    out, err = capsys.readouterr()
    rows = rows_of(out)
    assert list(rows) == [
        *("hf_patrickstar", "torch", "transformers", "accelerate"),
        *("Python", "system", "CPU", "cores", "memory", "accelerator"),
    ]
    assert rows["hf_patrickstar"] == __version__
    assert rows["torch"] == importlib.metadata.version("torch")  # which need not say that CUDA is there
    assert rows["cores"].endswith(f", torch uses {torch.get_num_threads()}")
    assert "iB" in rows["memory"]
    assert all(rows.values())
    assert err == ""


def test_an_accelerator_and_a_library_that_is_not_there(monkeypatch):
    def version(name):
        raise env.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(env.importlib.metadata, "version", version)
    monkeypatch.setattr(env, "find_device", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(env, "device_name", lambda device: "Fake 1000")
    monkeypatch.setattr(env, "memory_info", lambda device: (2**30, 2**31))
    found = env.describe()
    assert found["accelerator"] == "Fake 1000 (cuda:0), 2.00 GiB, 1.00 GiB free"
    assert found["accelerate"] == "not installed"


def test_rates(h100, capsys):
    assert main(["env", "--measure"]) == 0
    rows = rows_of(capsys.readouterr().out)
    expected = {"products in bfloat16": "7.418e+05 GFLOP/s", "host memory": "230.4 GB/s", "operator": "6 us"}
    assert {name: rows[name] for name in expected} == expected
    assert len(rows) == 10 + 13


def test_the_file_is_read_back(h100, tmp_path, capsys):
    path = tmp_path / "machine.json"
    path.write_text("older")
    assert main(["env", "--measure", "--json", str(path)]) == 0
    assert find_machine(str(path)) == MACHINES["h100"]
    assert capsys.readouterr().out.endswith(f"\n{path}: written\n")


def test_this_machine_is_measured(monkeypatch, tmp_path, capsys):
    measured = []

    def measure(**others):
        measured.append(measure_machine(TINY, **others))
        return measured[-1]

    monkeypatch.setattr(env, "seconds_of_a_visit", lambda: 3e-5)
    monkeypatch.setattr(env, "measure_machine", measure)
    path = tmp_path / "machine.json"
    assert main(["env", "--measure", "--json", str(path)]) == 0
    assert [find_machine(str(path))] == measured
    assert measured[0].visit_s == 3e-5
    out, err = capsys.readouterr()
    assert "products in float32" in rows_of(out)
    assert err == "", "a short measurement shows no progress"


def test_a_long_measurement_shows_its_progress(monkeypatch, capsys):
    monkeypatch.setattr(env, "tqdm", functools.partial(env.tqdm, mininterval=0))
    monkeypatch.setattr(env, "PROGRESS_AFTER_S", 0)
    monkeypatch.setattr(
        env, "measure_machine", lambda progress, visit: list(progress(["one", "two"])) and MACHINES["h100"]
    )
    assert main(["env", "--measure"]) == 0
    assert "measuring: 100%" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--json", "x.json"], "--json writes what was measured; add --measure"),
        (["--measure", "--json", "missing/machine.json"], "there is no directory 'missing'; make it"),
        (["--measure", "--json", "."], "'.' is a directory; name a file"),
        (["--measure", "--json", "machine.json"], "permission denied; name another file"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_measured(never, words, sentence, capsys, monkeypatch):
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)
    assert main(["env", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert sentence in err
    assert err.count("\n") == 1


def test_a_disk_that_is_full(h100, tmp_path, capsys, monkeypatch):
    def write(self, *arguments, **others):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_text", write)
    path = tmp_path / "machine.json"
    assert main(["env", "--measure", "--json", str(path)]) == 2
    out, err = capsys.readouterr()
    assert "products in float32" in out, "what was measured is not lost"
    assert (
        err == f"hf-patrickstar env: --json: '{path}' cannot be written: No space left on device; name another file\n"
    )


def test_links_are_printed_where_processes_were_measured_together():
    rates = env.rates(find_machine("8xh100"))
    assert rates["between processes"].endswith(" GB/s")
    assert rates["message"] == f"{find_machine('8xh100').message_s * 1e6:.4g} us"
    assert "between processes" not in env.rates(MACHINES["h100"])
