"""The arithmetic for other systems in ``benchmarks/bench_paper_scale.py``, and what is committed of it."""

import dataclasses
import json
import types

import pytest

from hf_patrickstar.machine import MACHINES
from hf_patrickstar.planner.subject import find_subject
from hf_patrickstar.tracing.fake import FakeTensors


@pytest.fixture
def bench(load):
    return load("bench_paper_scale")


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
        ("zero3 bf16", 0.4, 0.2 + 0.4 + 0.2, {}),  # half the bytes of gradients and of Adam
        ("paged", 4.0, 1.0 + 3.0 + 0.2, FOUR),  # every device has all states
        ("plain", 4.0, 4.0, {}),
    ],
)
def test_steps_of_other_systems_take_at_least_what_nothing_hides(bench, system, compute_s, seconds, changes):
    machine = dataclasses.replace(ROUND, **changes)
    assert bench.least_seconds(machine, 10**9, compute_s, bench.COPIES[system]) == pytest.approx(seconds)


def test_adapters_are_counted_as_peft_makes_them(bench):
    pytest.importorskip("peft")
    arguments = bench.TRAININGS["qlora"].arguments
    config = bench.config_of(3, 768, True)
    given = {"task": None, "batch_size": 1, "length": 16, "checkpointing": False, "adapters": arguments["adapters"]}
    with FakeTensors():
        model = find_subject(config, **given).make_model()
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert bench.numbers_of(3, 768, True).adapters == trained


def test_devices_share_a_drive_that_takes_states_but_no_parameters(bench):
    machine, _ = bench.TODAY[-1]
    there = bench.with_drive(machine)
    assert machine.num_devices * there.disk_nbytes == bench.DRIVE_NBYTES
    assert machine.num_devices * there.disk_bandwidth == pytest.approx(MACHINES["h100"].disk_bandwidth)
    options = types.SimpleNamespace(today=True, train="adamw")
    small = dataclasses.replace(ROUND, device_nbytes=2**30, host_nbytes=2**30)
    models = {"0.1B": (10, 768), "0.8B": (14, 2048), "1.5B": (28, 2048)}
    for disk_nbytes, last in ((0, 0), (2**30, 0), (2**40, 1)):  # 1.5B has no room for 2 bytes per parameter
        found = dataclasses.replace(small, disk_nbytes=disk_nbytes)
        assert bench.last_by_bytes(found, models, options) == last


# What is committed


def committed(bench, name, key="rows"):
    return json.loads((bench.common.RESULTS / f"bench_paper_scale{name}_cpu.json").read_text())[key]


@pytest.mark.parametrize(
    ("name", "train"), [("", "adamw"), ("_today", "adamw"), ("_today_8bit", "8bit"), ("_today_qlora", "qlora")]
)
def test_committed_rows_have_what_the_arithmetic_says(bench, name, train):
    today = name != ""
    machines = {machine.name: machine for machine, _ in (bench.TODAY if today else bench.PAPER_MACHINES)}
    models = bench.LLAMAS | bench.TRAININGS[train].larger if today else bench.TABLE_2
    for row in committed(bench, name):
        machine, tokens = machines[row["machine"]], row["batch_size"] * row["length"]
        activations = bench.activations_of(row["activations_nbytes"], tokens, *models[row["largest"]])
        found = bench.by_arithmetic(machine, models, activations, types.SimpleNamespace(today=today, train=train))
        assert found == row["others"]
        others = bench.tokens_at_most(machine, models, row, today, bench.TRAININGS[train].operations)
        assert others == pytest.approx(row["others_tokens_per_s_at_most"])
