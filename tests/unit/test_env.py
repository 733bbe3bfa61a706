"""``hf-patrickstar env``: what it prints, the file that it writes, and its exit status."""

import dataclasses
import importlib.metadata

import pytest
import torch

from hf_patrickstar import __version__
from hf_patrickstar.cli import env, files
from hf_patrickstar.cli.main import main
from hf_patrickstar.machine import MACHINES, find_machine

RATES = {
    "products in float32": "5.018e+04 GFLOP/s",
    "device memory": "2848 GB/s",
    "host -> device": "50.4 GB/s",
    "host memory": "230.4 GB/s",
    "operator": "6 us",
    "visit to a chunk": "25 us",
}


def rows_of(text):
    """What was printed, by name."""
    return {line[:24].rstrip(): line[24:] for line in text.splitlines() if line}


@pytest.fixture
def h100(monkeypatch):
    """A measurement that finds the machine that is known as h100."""
    monkeypatch.setattr(env, "measure_machine", lambda **_: MACHINES["h100"])


def test_the_machine_and_its_software(capsys, monkeypatch):
    monkeypatch.setattr(env, "measure_machine", lambda **_: pytest.fail("measured"))
    assert main(["env"]) == 0
    out, err = capsys.readouterr()
    rows = rows_of(out)
    names = "hf_patrickstar torch transformers accelerate Python system CPU cores memory accelerator"
    assert list(rows) == names.split()
    assert (rows["hf_patrickstar"], rows["torch"]) == (__version__, importlib.metadata.version("torch"))
    assert rows["cores"].endswith(f", torch uses {torch.get_num_threads()}")
    assert "iB" in rows["memory"]
    assert all(rows.values())
    assert err == ""


def test_rates_are_printed_and_the_file_is_read_back(h100, tmp_path, capsys):
    path = tmp_path / "machine.json"
    path.write_text("older")
    assert main(["env", "--measure", "--json", str(path)]) == 0
    assert find_machine(str(path)) == MACHINES["h100"]
    out = capsys.readouterr().out
    assert out.endswith(f"\n{path}: written\n")
    rows = rows_of(out)
    assert {name: rows[name] for name in RATES} == RATES
    h100 = MACHINES["h100"]
    rates = env.rates(dataclasses.replace(h100, flops={**h100.flops, "float32 NT": 5e9, "bfloat16 attention": 6e9}))
    assert rates["NT products in float32"] == "5 GFLOP/s"
    assert rates["attention in bfloat16"] == "6 GFLOP/s"
    rates = env.rates(find_machine("8xh100"))
    assert rates["between processes"].endswith(" GB/s")
    assert rates["message"] == f"{find_machine('8xh100').message_s * 1e6:.4g} us"
    assert "between processes" not in rows


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--measure", "--json", "{}/missing/m.json"],
            "cannot be written: there is no directory '{}/missing'; make it",
        ),
        (["--measure", "--json", "{}/m.json"], "'{}/m.json' cannot be written: permission denied; name another file"),
        (["--json", "{}/m.json"], "--json writes what was measured; add --measure"),
    ],
)
def test_paths_that_cannot_be_written_are_refused_before_anything_is_measured(
    tmp_path, capsys, monkeypatch, arguments, says
):
    monkeypatch.setattr(env, "measure_machine", lambda **_: pytest.fail("measured"))
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)
    assert main(["env", *(word.format(tmp_path) for word in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hf-patrickstar env: ")
    assert says.format(tmp_path) in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("cuda:0", "Fake 1000 (cuda:0), 2.00 GiB, 1.00 GiB free"),
        ("cpu", "none; a budgeted part of CPU memory takes its place"),
    ],
)
def test_an_accelerator_is_named(monkeypatch, device, said):
    monkeypatch.setattr(env, "find_device", lambda _: torch.device(device))
    monkeypatch.setattr(env, "device_name", lambda device: "Fake 1000")
    monkeypatch.setattr(env, "memory_info", lambda device: (2**30, 2**31))
    assert said in env.describe()["accelerator"]
