"""The arithmetic for other systems in ``benchmarks/bench_paper_scale.py``."""

import dataclasses
import json
import types

import pytest

from hf_patrickstar.machine import MACHINES
from hf_patrickstar.memory.tiers import DEVICE_SHARE, HOST_SHARE


@pytest.fixture
def bench(load):
    return load("bench_paper_scale")


def test_activations_are_those_that_were_found_and_grow_by_fp32_inputs_of_blocks(bench):
    activations = bench.activations_of(10_000_000, tokens=100, layers=10, hidden=64)
    assert activations(10, 64) == 10_000_000
    assert activations(11, 64) - activations(10, 64) == 4 * 100 * 64
    assert activations(10, 128) == 2 * activations(10, 64)


def largest_of(bench, host_nbytes, device_nbytes=10**15):
    machine = dataclasses.replace(
        MACHINES["v100"], host_nbytes=int(host_nbytes / HOST_SHARE), device_nbytes=int(device_nbytes / DEVICE_SHARE)
    )
    models = {"small": (1, 512), "large": (100, 512)}
    options = types.SimpleNamespace(today=False)
    return bench.by_arithmetic(machine, models, lambda layers, hidden: 0, options)


@pytest.mark.parametrize(("system", "nbytes"), [("static", 14), ("zero3", 18), ("zero3 x 1.5", 27), ("fsdp2", 16)])
def test_the_host_holds_bytes_per_parameter(bench, system, nbytes):
    need = nbytes * bench.num_parameters(100, 512, False)
    assert largest_of(bench, need * 1.001)[system] == "large"
    assert largest_of(bench, need * 0.999)[system] == "small"


def test_the_device_holds_parameters_or_a_layer(bench):
    need = {"static": 2 * bench.num_parameters(100, 512, False), "zero3": 4 * 12 * 512**2, "fsdp2": 4 * 12 * 512**2}
    for system, nbytes in need.items():
        assert largest_of(bench, 10**15, nbytes * 1.001)[system] == "large"
        assert largest_of(bench, 10**15, nbytes * 0.999)[system] != "large"


@pytest.mark.parametrize("today", [False, True])
def test_committed_rows_have_what_the_arithmetic_says(load, bench, today):
    name = "bench_paper_scale_today_cpu.json" if today else "bench_paper_scale_cpu.json"
    machines = {machine.name: machine for machine, _ in (bench.TODAY if today else bench.PAPER_MACHINES)}
    models = bench.LLAMAS if today else bench.TABLE_2
    for row in json.loads((load("common").RESULTS / name).read_text())["rows"]:
        tokens = row["batch_size"] * row["length"]
        activations = bench.activations_of(row["activations_nbytes"], tokens, *models[row["largest"]])
        found = bench.by_arithmetic(machines[row["machine"]], models, activations, types.SimpleNamespace(today=today))
        assert found == row["others"]
