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


ROUND = dataclasses.replace(
    MACHINES["v100"], to_device_bandwidth=10e9, to_host_bandwidth=5e9, host_bandwidth=70e9, num_devices=1
)
"""10**9 parameters take Adam 0.4 s there, and 2 bytes of each 0.2 s to the device and 0.4 s to the host."""


@pytest.mark.parametrize(
    ("system", "compute_s", "seconds"),
    [
        ("static", 4.0, 1.0 + 3.0 + 0.4),  # gradients leave in 0.4 s beside 3 s of backward, values come beside Adam
        ("static", 0.4, 0.1 + 0.4 + 0.4),  # gradients bind
        ("zero3", 4.0, 1.0 + 3.0 + 0.4),
        ("zero3", 0.4, 0.2 + 0.8 + 0.4),  # values bind in forward, fp32 gradients in backward
        ("fsdp2", 4.0, 1.0 + 3.0 + 0.4),
        ("fsdp2", 1.2, 0.4 + 0.9 + 0.4),  # fp32 values bind in forward
    ],
)
def test_steps_of_other_systems_take_at_least_what_nothing_hides(bench, system, compute_s, seconds):
    assert bench.least_seconds(ROUND, 10**9, compute_s, bench.COPIES[system]) == pytest.approx(seconds)


def test_values_bind_beside_adam_where_the_host_is_faster_than_the_bus(bench):
    machine = dataclasses.replace(ROUND, host_bandwidth=700e9)
    assert bench.least_seconds(machine, 10**9, 4.0, bench.COPIES["static"]) == pytest.approx(1.0 + 3.0 + 0.2)


def test_devices_share_copies_and_adam_but_not_computation(bench):
    machine = dataclasses.replace(ROUND, num_devices=4, link_bandwidth=1e9)
    assert bench.least_seconds(machine, 10**9, 4.0, bench.COPIES["zero3"]) == pytest.approx(1.0 + 3.0 + 0.1)


def test_tokens_of_other_systems_scale_our_computation_by_parameters(bench):
    models = {"small": (10, 512), "large": (100, 512)}
    numel = {name: bench.num_parameters(*sizes, False) for name, sizes in models.items()}
    row = {"batch_size": 2, "length": 1000, "largest": "large", "device_s": 8.0}
    row["others"] = {"static": "small", "fsdp2": None}
    found = bench.tokens_at_most(ROUND, models, row, False)
    computes = 8.0 * numel["small"] / numel["large"]
    seconds = bench.least_seconds(ROUND, numel["small"], computes, bench.COPIES["static"])
    assert found == {"static": pytest.approx(2000 / seconds), "fsdp2": None}


def test_terms_are_what_nothing_hides_and_add_up_to_the_difference(bench):
    lane = bench.Lane
    critical = dict.fromkeys(lane, 0.0)
    critical |= {lane.COMPUTE: 8.0, lane.HOST_WORK: 0.5, lane.TO_DEVICE: 0.25, lane.TO_HOST: 1.0, lane.GATHERS: 0.25}
    in_all = {"optimizer": 3.0, "copies": 4.0, "between devices": 1.0}
    terms = bench.terms_of((10.0, 20.0), critical, in_all, 1.25)
    assert terms == {"compute": 2.0, "optimizer": 2.5, "copies": 2.75, "between devices": 0.75, "rest": 2.0}
    assert sum(terms.values()) == 10.0


@pytest.mark.parametrize("largest", [-1, 0, 3, 6, 7])
def test_the_last_that_fits_is_found_with_few_plans(bench, largest):
    asked = []

    def fits(place):
        asked.append(place)
        return place <= largest

    assert bench.last_fitting(fits, 7) == largest
    assert len(asked) <= 4
    assert asked[0] == 7


@pytest.mark.parametrize("today", [False, True])
def test_committed_tokens_of_other_systems_are_what_the_arithmetic_says(bench, today):
    name = "bench_paper_scale_today_cpu.json" if today else "bench_paper_scale_cpu.json"
    machines = {machine.name: machine for machine, _ in (bench.TODAY if today else bench.PAPER_MACHINES)}
    models = bench.LLAMAS if today else bench.TABLE_2
    for row in json.loads((bench.common.RESULTS / name).read_text())["rows"]:
        found = bench.tokens_at_most(machines[row["machine"]], models, row, today)
        assert found == pytest.approx(row["others_tokens_per_s_at_most"])


def test_committed_terms_add_up_and_every_figure_of_the_papers_is_there(bench):
    rows = json.loads((bench.common.RESULTS / "bench_paper_scale_cpu.json").read_text())["speeds"]
    found = [(row["machine"], row["model"], row["batch_size"], row["papers_tflops"]) for row in rows]
    assert found == [(each.machine.name, each.model, each.batch_size, each.tflops) for each in bench.FIGURES]
    for row in rows:
        flops = 8 * row["parameters"] * row["batch_size"] * 1024 / 1e12
        assert row["tflops"] == pytest.approx(flops / row["seconds"])
        assert row["papers_tflops"] == pytest.approx(flops / row["papers_seconds"])
        assert sum(row["terms_s"].values()) == pytest.approx(row["papers_seconds"] - row["seconds"])
        critical = {bench.Lane(name): seconds for name, seconds in row["critical_s"].items()}
        times = row["seconds"], row["papers_seconds"]
        terms = bench.terms_of(times, critical, row["in_all_s"], row["factor_of_compute"])
        assert terms == pytest.approx(row["terms_s"])


def test_committed_models_do_not_grow_with_the_batch(bench):
    rows = json.loads((bench.common.RESULTS / "bench_paper_scale_batches_cpu.json").read_text())["rows"]
    places = ["-", *bench.TABLE_2]
    for machine in (bench.V100, bench.V100_120):
        found = [row for row in rows if row["machine"] == machine.name]
        assert [row["batch_size"] for row in found] == [4, 8, 16, 32, 64]
        sizes = [places.index(row["largest"] or "-") for row in found]
        assert sizes == sorted(sizes, reverse=True)
