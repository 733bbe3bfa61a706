"""``benchmarks/bench_timeline.py`` on a tiny model: both kinds of rows, with the bound that belongs to each."""

import dataclasses
import json

import pytest

from hf_patrickstar.machine import MACHINES
from hf_patrickstar.schedule.bounds import Bounds
from hf_patrickstar.schedule.script import Begin, Kernel, Part

TINY = {"hidden_size": 256, "num_hidden_layers": 3, "intermediate_size": 512, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("words", "bound"),
    [([], "clipped"), (["--updates", "backward", "--chunk_budget", "64MiB", "--accumulation", "2"], "unclipped")],
    ids=["beside forward", "in backward"],
)
def test_rows_have_the_bound_of_their_updates(words, bound, load, tmp_path, monkeypatch, capsys):
    bench = load("bench_timeline")
    monkeypatch.setitem(bench.MODELS, "tiny", TINY)
    path = tmp_path / "rows.json"
    command = ["--models", "tiny", "--tokens", "4096", "--machines", "rtx4090", "--output", str(path), *words]
    monkeypatch.setattr("sys.argv", ["bench_timeline.py", *command])
    bench.main()
    (row,) = json.loads(path.read_text())["rows"]
    assert row["over_lower_bound"] >= row[f"over_{bound}_bound"] > 0.99
    assert row["unclipped_bound_s"] <= row["clipped_bound_s"] <= row["serial_s"]
    said = capsys.readouterr().out
    assert f"{bound:>10}" in said
    assert f"{row[f'over_{bound}_bound']:.2f}x" in said


def test_without_clipping_updates_hide_behind_the_last_backward_and_the_next_forward(load):
    """Seconds of three micro-batches of forward 2 and backward 4, and of an update on the host."""
    bench = load("bench_timeline")
    machine = dataclasses.replace(MACHINES["rtx4090"], device_bandwidth=1.0, kernel_s=1e-9)
    part = [Begin(Part.FORWARD), Kernel("work", 0, 2, ""), Begin(Part.BACKWARD), Kernel("work", 0, 4, "")]
    script = [*part * 3, Begin(Part.UPDATE), Kernel("update", 0, 1, "")]
    for seconds, expected in ((7, 19), (11, 12 + 11), (30, 12 + 30)):
        lanes = {"compute": 19 * 10**9, "host Adam": seconds * 10**9}
        bounds = Bounds(lanes, 2 * 10**9, 16 * 10**9)
        assert bench.unclipped_bound_ns(script, bounds, machine) == expected * 10**9
