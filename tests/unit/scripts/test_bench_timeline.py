"""``benchmarks/bench_timeline.py`` on a tiny model."""

import json

TINY = {"hidden_size": 256, "num_hidden_layers": 3, "intermediate_size": 512, "num_attention_heads": 2}


def test_a_row_has_its_bounds(load, tmp_path, monkeypatch, capsys):
    bench = load("bench_timeline")
    monkeypatch.setitem(bench.MODELS, "tiny", TINY)
    path = tmp_path / "rows.json"
    command = ["--models", "tiny", "--tokens", "4096", "--machines", "rtx4090", "--output", str(path)]
    monkeypatch.setattr("sys.argv", ["bench_timeline.py", *command])
    bench.main()
    (row,) = json.loads(path.read_text())["rows"]
    assert row["over_lower_bound"] >= row["over_clipped_bound"] > 0.99
    assert row["clipped_bound_s"] <= row["serial_s"]
    said = capsys.readouterr().out
    assert f"{'clipped':>10}" in said
    assert f"{row['over_clipped_bound']:.2f}x" in said
