"""``benchmarks/bench_timeline.py`` on a tiny model: both kinds of rows, with the bound that belongs to each."""

import json

import pytest

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
