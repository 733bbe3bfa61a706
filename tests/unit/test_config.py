import json

import pytest

from hf_patrickstar import units
from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("device_budget", "1GiB", 2**30),
        ("host_budget", "2GB", 2 * 10**9),
        ("chunk_budget", "auto", "auto"),
        ("chunk_numel", " 4096 ", 4096),
        ("cpu_embedding", False, False),
        ("prefetch_depth", 0, 0),
        ("reduce_dtype", "fp32", "fp32"),
        ("host_threads", "auto", "auto"),
        ("process_wait_s", 0, 0),
        ("process_wait_s", None, None),
    ],
)
def test_values_that_are_taken(name, given, kept):
    assert getattr(PatrickStarConfig(**{name: given}), name) == kept


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("device_budget", "lots", "device_budget: 'lots' is not a size"),
        ("device_budget", 0, "device_budget: must be positive"),
        ("host_budget", -1, "host_budget: must be positive, got -1"),
        ("chunk_numel", 0, "chunk_numel: expected 'auto' or a positive number of elements, got 0"),
        ("chunk_numel", "big", "chunk_numel: expected 'auto' or a positive number of elements, got 'big'"),
        ("chunk_numel", 1.5, "chunk_numel: expected 'auto' or a positive number"),
        ("eviction", "fifo", "eviction: expected one of belady, lru, list_order, got 'fifo'"),
        ("placement", "device", "placement: expected one of auto, host, got 'device'"),
        ("prefetch_depth", -1, "prefetch_depth: expected 'auto' or a number of chunks, 0 or more, got -1"),
        ("machine", "rtx4091", "machine 'rtx4091' is not known.*Did you mean 'rtx4090'?"),
        ("machine", {"name": "mine", "flop": {}}, "machine: 'flop' is not a field; did you mean 'flops'?"),
        ("dtype", "int8", "dtype: expected one of auto, fp32, bf16, fp16, got 'int8'"),
        ("cpu_embedding", "yes", "cpu_embedding: expected true, false or 'auto', got 'yes'"),
        ("host_threads", 0, "host_threads: expected 'auto' or a number of threads, 1 or more, got 0"),
        ("pin_memory", "no", "pin_memory: expected true, false or 'auto', got 'no'"),
        ("process_wait_s", -1, "process_wait_s: expected a number of seconds, 0 or more, or null, got -1"),
        ("process_wait_s", float("nan"), "process_wait_s: expected a number of seconds"),
        ("debug_evict_all", 1, "debug_evict_all: expected true or false, got 1"),
        ("reshard_after_forward", "auto", "reshard_after_forward: expected true or false, got 'auto'"),
        ("overlap_optimizer", "backward", "overlap_optimizer: 'backward' was removed; set true"),
    ],
)
def test_values_that_are_refused(name, value, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        PatrickStarConfig(**{name: value})


@pytest.mark.parametrize("form", ["dict", "text", "padded text", "path", "path text"])
def test_from_every_form(form, tmp_path):
    values = {"device_budget": "1GiB", "eviction": "list_order", "cpu_embedding": False}
    path = tmp_path / "patrickstar.json"
    path.write_text(json.dumps(values))
    source = {
        "dict": values,
        "text": json.dumps(values),
        "padded text": "\n  " + json.dumps(values, indent=2),
        "path": path,
        "path text": str(path),
    }[form]
    expected = PatrickStarConfig(device_budget=2**30, eviction="list_order", cpu_embedding=False)
    assert PatrickStarConfig.from_any(source) == expected


def test_round_trip():
    given = {"device_budget": "1.5GiB", "host_budget": 10**9, "chunk_numel": "4096", "machine": "h100", "dtype": "fp16"}
    config = PatrickStarConfig(**given, eviction="list_order", cpu_embedding=True, prefetch_depth=3, pin_memory=False)
    assert PatrickStarConfig.from_any(config.to_dict()) == config
    assert PatrickStarConfig.from_any(json.dumps(config.to_dict())) == config
    assert PatrickStarConfig.from_any(config) is config
    assert PatrickStarConfig.from_any(None) == PatrickStarConfig()


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("device_buget", "device_budget"),
        ("gpu_budget", "device_budget"),
        ("cpu_budget", "host_budget"),
        ("chunk_size", "chunk_numel"),
    ],
)
def test_an_unknown_key_names_the_nearest(key, near):
    with pytest.raises(ConfigError, match=f"unknown key '{key}'; did you mean '{near}'.* Known: device_budget, "):
        PatrickStarConfig.from_any({key: 1})


@pytest.mark.parametrize("name", ["device_budget", "host_budget", "chunk_budget"])
def test_small_budgets_need_a_unit(name, monkeypatch):
    """A number that is less than 1 MiB is a number of GiB that has no unit."""
    monkeypatch.setattr(units, "LEAST_BUDGET_NBYTES", units.MIB)
    for value in (24, "24", " 24 ", "24.5"):
        with pytest.raises(ConfigError, match=rf"^{name}: \S+ is a number of bytes.*did you mean '[\d.]+GiB'"):
            PatrickStarConfig(**{name: value})
    for value, nbytes in (("24B", 24), ("64KiB", 65536), (2**20, 2**20), (str(2**20), 2**20)):
        config = PatrickStarConfig(**{name: value})
        assert getattr(config, name) == nbytes
        assert PatrickStarConfig.from_any(json.dumps(config.to_dict())) == config


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ('{"device_budget": }', r"the text given is not JSON: .*line 1 column"),
        (b"device_budget: 1GiB", r"file '.*bad.json' is not JSON"),
        (b"\xff\xfe\x00\x80", r"bad.json"),
        (b"[1, 2]", r"bad.json' holds list, expected a JSON object"),
        (None, r"cannot read file '.*bad.json': No such file.*give JSON text or the path"),
        ('{"prefetch_depth": -1}', "prefetch_depth: expected 'auto' or a number of chunks"),
        ({7: 1}, "unknown key '7'"),
        (["lru"], "expected a dict, JSON text or the path of a file"),
    ],
)
def test_a_source_that_is_none(source, said, tmp_path):
    path = tmp_path / "bad.json"
    if isinstance(source, bytes):
        path.write_bytes(source)
    with pytest.raises(ConfigError, match=said):
        PatrickStarConfig.from_any(path if source is None or isinstance(source, bytes) else source)
