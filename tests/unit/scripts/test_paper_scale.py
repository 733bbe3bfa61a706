"""The arithmetic for other systems in ``benchmarks/bench_paper_scale.py``, and what is committed of it."""

import dataclasses
import json
import types

import pytest

from hf_patrickstar.machine import MACHINES
from hf_patrickstar.memory.tiers import DEVICE_SHARE, HOST_SHARE


@pytest.fixture
def bench(load):
    return load("bench_paper_scale")


def largest_of(bench, host_nbytes, device_nbytes=10**15):
    machine = dataclasses.replace(
        MACHINES["v100"], host_nbytes=int(host_nbytes / HOST_SHARE), device_nbytes=int(device_nbytes / DEVICE_SHARE)
    )
    models = {"small": (1, 512), "large": (100, 512)}
    return bench.by_arithmetic(machine, models, lambda layers, hidden: 0, types.SimpleNamespace(today=False))


@pytest.mark.parametrize(("system", "nbytes"), [("static", 14), ("zero3", 18)])
def test_the_host_holds_bytes_per_parameter_and_the_device_parameters_or_a_layer(bench, system, nbytes):
    numel = bench.num_parameters(100, 512, False)
    assert largest_of(bench, nbytes * numel * 1.001)[system] == "large"
    assert largest_of(bench, nbytes * numel * 0.999)[system] == "small"
    need = 2 * numel if system == "static" else 4 * 12 * 512**2
    assert largest_of(bench, 10**15, need * 1.001)[system] == "large"
    assert largest_of(bench, 10**15, need * 0.999)[system] != "large"


ROUND = dataclasses.replace(
    MACHINES["v100"], to_device_bandwidth=10e9, to_host_bandwidth=5e9, host_bandwidth=70e9, num_devices=1
)
"""10**9 parameters take Adam 0.4 s there, and 2 bytes of each 0.2 s to the device and 0.4 s to the host."""
FOUR = {"num_devices": 4, "link_bandwidth": 1e9}


@pytest.mark.parametrize(
    ("system", "compute_s", "seconds", "changes"),
    [
        ("static", 4.0, 1.0 + 3.0 + 0.4, {}),  # gradients leave beside 3 s of backward, values come beside Adam
        ("zero3", 0.4, 0.2 + 0.8 + 0.4, {}),  # values bind in forward, fp32 gradients in backward
        ("fsdp2", 1.2, 0.4 + 0.9 + 0.4, {}),  # fp32 values bind in forward
        ("zero3", 4.0, 1.0 + 3.0 + 0.1, FOUR),  # devices share copies and Adam but not computation
    ],
)
def test_steps_of_other_systems_take_at_least_what_nothing_hides(bench, system, compute_s, seconds, changes):
    machine = dataclasses.replace(ROUND, **changes)
    assert bench.least_seconds(machine, 10**9, compute_s, bench.COPIES[system]) == pytest.approx(seconds)


def test_the_last_that_fits_is_found_with_few_plans(bench):
    for largest in range(-1, 8):
        asked = []
        assert bench.last_fitting(lambda n, asked=asked, most=largest: asked.append(n) or n <= most, 7) == largest
        assert len(asked) <= 4


# What is committed


def committed(bench, name, key="rows"):
    return json.loads((bench.common.RESULTS / f"bench_paper_scale{name}_cpu.json").read_text())[key]


@pytest.mark.parametrize("today", [False, True])
def test_committed_rows_have_what_the_arithmetic_says(bench, today):
    machines = {machine.name: machine for machine, _ in (bench.TODAY if today else bench.PAPER_MACHINES)}
    models = bench.LLAMAS if today else bench.TABLE_2
    for row in committed(bench, "_today" if today else ""):
        machine, tokens = machines[row["machine"]], row["batch_size"] * row["length"]
        activations = bench.activations_of(row["activations_nbytes"], tokens, *models[row["largest"]])
        found = bench.by_arithmetic(machine, models, activations, types.SimpleNamespace(today=today))
        assert found == row["others"]
        others = bench.tokens_at_most(machine, models, row, today)
        assert others == pytest.approx(row["others_tokens_per_s_at_most"])


def test_committed_terms_add_up_and_models_do_not_grow_with_the_batch(bench):
    rows = committed(bench, "", "speeds")
    found = [(row["machine"], row["model"], row["batch_size"], row["papers_tflops"]) for row in rows]
    assert found == [(each.machine.name, each.model, each.batch_size, each.tflops) for each in bench.FIGURES]
    for row in rows:
        flops = 8 * row["parameters"] * row["batch_size"] * 1024 / 1e12
        assert (row["tflops"], row["papers_tflops"]) == pytest.approx(
            (flops / row["seconds"], flops / row["papers_seconds"])
        )
        critical = {bench.Lane(name): seconds for name, seconds in row["critical_s"].items()}
        times = row["seconds"], row["papers_seconds"]
        terms = bench.terms_of(times, critical, row["in_all_s"], row["factor_of_compute"])
        assert terms == pytest.approx(row["terms_s"])
        assert sum(terms.values()) == pytest.approx(row["papers_seconds"] - row["seconds"])
    places, rows = ["-", *bench.TABLE_2], committed(bench, "_batches")
    for machine in (bench.V100, bench.V100_120):
        found = [
            (row["batch_size"], places.index(row["largest"] or "-")) for row in rows if row["machine"] == machine.name
        ]
        assert [batch_size for batch_size, _ in found] == [4, 8, 16, 32, 64]
        assert found == sorted(found, key=lambda each: -each[1])
