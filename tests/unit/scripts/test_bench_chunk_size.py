"""``benchmarks/bench_chunk_size.py`` on a tiny model: a row for each size of chunks and each budget."""

import json


def test_each_size_has_a_row_for_each_budget(load, tmp_path, monkeypatch):
    bench = load("bench_chunk_size")
    monkeypatch.setitem(bench.MODELS, "tiny", (bench.llama(12, 256, 512), (4 * 256 + 3 * 512) * 256))
    monkeypatch.setattr(bench, "LEAST", 2**20)
    path = tmp_path / "rows.json"
    words = ["--models", "tiny", "--tokens", "64", "--machines", "rtx4090", "--output", str(path)]
    monkeypatch.setattr("sys.argv", ["bench_chunk_size.py", *words])
    bench.main()
    rows = json.loads(path.read_text())["rows"]
    assert [(row["budget"], row["size"]) for row in rows] == [
        (budget, size) for budget in ("tight", "medium", "all") for size in ("auto", "0.5 block", "1 block", "2 block")
    ]
    numels = {row["size"]: row["chunk_numel"] for row in rows if row["seconds"] is not None}
    assert numels["2 block"] == 2 * numels["1 block"] == 2 * 655_360
    assert all(row["device_nbytes"] > rows[0]["least_nbytes"] for row in rows)
    assert all(row["seconds"] > 0 for row in rows if row["size"] == "auto"), "the tight budget is one of this size"
