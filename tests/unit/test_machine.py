"""A machine as rates: times by hand, files that are read back, and what is refused."""

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.machine import MACHINES, Card, Host, Machine, find_machine, machine_of, peak, whole_host_nbytes
from hf_patrickstar.schedule.script import DeviceOp

fast = settings(deadline=None, max_examples=100, database=None, derandomize=True)
GIB = 2**30

ROUND = Machine(
    name="round",
    flops={"float32": 1e12, "bfloat16": 4e12},
    device_nbytes=8 * GIB,
    device_bandwidth=1e12,
    to_device_bandwidth=10e9,
    to_host_bandwidth=5e9,
    pageable_bandwidth=2e9,
    host_nbytes=64 * GIB,
    host_bandwidth=100e9,
    host_flops=50e9,
    num_cores=4,
    copy_latency_s=10e-6,
    operator_s=6e-6,
    kernel_s=2e-6,
    num_devices=2,
    link_bandwidth=20e9,
    link_latency_s=30e-6,
)
POSITIVE = [
    field.name for field in dataclasses.fields(Machine) if field.name not in ("name", "flops", "has_accelerator")
]


@pytest.mark.parametrize(
    ("flops", "nbytes", "dtype", "nanoseconds"),
    [
        (10**9, 0, "float32", 1_000_000),
        (10**9, 0, "bfloat16", 250_000),
        (10**9, 0, "float16", 250_000),  # a 16-bit type that is missing is as fast as the other one
        (10**9, 0, "float64", 1_000_000),  # any other is as slow as float32
        (10**9, 2 * 10**9, "float32", 2_000_000),  # bound by memory
        (10, 10, "float32", 2_000),  # the shortest kernel
        (0, 0, "float32", 2_000),
    ],
)
def test_a_kernel_takes_the_longest_of_three(flops, nbytes, dtype, nanoseconds):
    assert ROUND.kernel_ns(flops, nbytes, dtype) == nanoseconds


@pytest.mark.parametrize(
    ("dtype", "kind", "nanoseconds"),
    [
        ("bfloat16", "NT", 500_000),
        ("float16", "NT", 500_000),  # as fast as the other 16-bit type in this, too
        ("bfloat16", "TN", 250_000),  # as fast as other products
        ("bfloat16", "attention", 500_000),  # half as fast as products
        ("float32", "attention", 4_000_000),
        ("float64", "attention", 4_000_000),
    ],
)
def test_kinds_of_products_have_rates_of_their_own(dtype, kind, nanoseconds):
    rates = {"bfloat16 NT": 2e12, "float32 attention": 0.25e12}
    machine = dataclasses.replace(ROUND, flops={**ROUND.flops, **rates})
    assert machine.kernel_ns(10**9, 0, dtype, kind) == nanoseconds
    assert DeviceOp("product", 10**9, 0, dtype, kind).duration_ns(machine) == nanoseconds


@pytest.mark.parametrize(
    ("flops", "nbytes", "nanoseconds"), [(50_000, 0, 1_000), (0, 100_000, 1_000), (50_000, 400_000, 4_000), (0, 0, 0)]
)
def test_an_operator_on_the_host_has_no_least_time(flops, nbytes, nanoseconds):
    assert ROUND.host_ns(flops, nbytes) == nanoseconds


@pytest.mark.parametrize(
    ("to_device", "is_pinned", "nanoseconds"),
    [(True, True, 110_000), (False, True, 210_000), (True, False, 510_000), (False, False, 510_000)],
)
def test_a_copy_has_its_latency_beside_its_bytes(to_device, is_pinned, nanoseconds):
    assert ROUND.copy_ns(10**6, to_device=to_device, is_pinned=is_pinned) == nanoseconds


@fast
@given(st.integers(0, 10**15), st.integers(0, 10**12), st.integers(0, 10**12), st.sampled_from(sorted(MACHINES)))
def test_more_work_never_takes_less_time(flops, nbytes, more, name):
    machine = MACHINES[name]
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        assert machine.kernel_ns(flops, nbytes, dtype) <= machine.kernel_ns(flops + more, nbytes + more, dtype)
    assert machine.host_ns(flops, nbytes) <= machine.host_ns(flops + more, nbytes + more)
    for to_device in (True, False):
        fast_copy, slow_copy = (machine.copy_ns(nbytes, to_device=to_device, is_pinned=pinned) for pinned in (1, 0))
        assert fast_copy <= slow_copy <= machine.copy_ns(nbytes + more, to_device=to_device, is_pinned=False)


def refused(call, *arguments, **others):
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **others)
    return str(caught.value)


def test_several_devices_share_a_host():
    one, eight = find_machine("h100"), find_machine("8xh100")
    assert (eight.num_devices, eight.num_cores, eight.host_nbytes) == (8, 14, 256 * GIB)
    assert (eight.flops, eight.device_nbytes) == (one.flops, one.device_nbytes)
    assert eight.host_bandwidth < one.host_bandwidth
    assert find_machine("2xrtx4090").link_bandwidth < find_machine("2xa100-40").link_bandwidth
    assert find_machine("1xh100") == one
    desktop, two = find_machine("rtx4090"), find_machine("2xrtx4090")
    assert 2 * two.host_nbytes == desktop.host_nbytes == 128 * GIB, "a desktop has one memory, however many cards"
    assert [whole_host_nbytes(name) for name in ("2xrtx4090", "8xh100", "mine")] == [128 * GIB, 2048 * GIB, None]
    assert "at most 8 devices" in refused(find_machine, "9xh100")
    assert "is not known" in refused(find_machine, "2xh1000")


@pytest.mark.parametrize(
    ("device_name", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L4", "accelerator"),
    ],
)
def test_the_machine_of_a_device(device_name, name):
    assert machine_of(device_name).name == name


def test_the_part_of_one_of_several_processes():
    part = MACHINES["h100"].shared_by(4)
    whole = MACHINES["h100"]
    assert (part.num_devices, part.num_cores, part.host_nbytes) == (4, 12, whole.host_nbytes // 4)
    assert (part.host_bandwidth, part.host_flops) == (whole.host_bandwidth / 4, whole.host_flops / 4)
    assert (part.link_bandwidth, part.to_device_bandwidth) == (whole.to_host_bandwidth, whole.to_device_bandwidth)
    assert find_machine("8xh100").shared_by(2).link_bandwidth == find_machine("8xh100").link_bandwidth
    assert MACHINES["rtx4090"].shared_by(64).num_cores == 1


def test_fewer_cores_bound_what_the_host_does():
    whole = MACHINES["h100"]
    part = whole.with_cores(16)
    assert (part.num_cores, part.host_flops) == (16, whole.host_flops / 3)
    assert part.host_bandwidth == 16 * whole.core_bandwidth < whole.host_bandwidth
    assert part.with_cores(16) is part
    assert ROUND.collective_ns(2 * 10**6) == 100_000 + 30_000
    assert whole.with_cores(47).host_bandwidth == whole.host_bandwidth, "so many are enough for the memory"


def test_known_machines_make_sense_and_are_read_back(tmp_path):
    path = tmp_path / "machine"
    for name, machine in MACHINES.items():
        assert find_machine(name) == machine
        assert machine.name == name
        assert machine.flops["float16"] > machine.flops["float32"]
        assert machine.device_bandwidth > machine.host_bandwidth > machine.pageable_bandwidth
        assert machine.host_nbytes > machine.device_nbytes
        assert (machine.num_devices > 1) == (machine.link_bandwidth > 0)
        assert machine.with_cores(128) is machine
        path.write_text(machine.to_json())
        assert find_machine(str(path)) == machine
    left_out = ("kernel_s", "operator_s", "core_bandwidth")
    fields = {key: value for key, value in json.loads(ROUND.to_json()).items() if key not in left_out}
    path.write_text(json.dumps(fields))
    assert find_machine(str(path)) == dataclasses.replace(ROUND, kernel_s=2e-6, operator_s=6e-6)


def test_every_rate_and_size_is_a_positive_number():
    values = [(field, -1.0) for field in POSITIVE]
    values += [("operator_s", value) for value in (0, math.nan, math.inf, None, "80GiB", True, [1.0])]
    for field, value in values:
        message = refused(dataclasses.replace, ROUND, **{field: value})
        assert message == f"machine 'round': {field} is {value!r}; it must be a positive number"
    assert dataclasses.replace(ROUND, num_devices=1, link_bandwidth=0.0).link_bandwidth == 0.0
    assert "link_bandwidth is -1.0" in refused(dataclasses.replace, ROUND, num_devices=1, link_bandwidth=-1.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"flops": {"float32": 1.0, "bfloat16": -2.0}}, "flops['bfloat16'] is -2.0; it must be a positive number"),
        ({"flops": {"float32": 1.0, "float32 NT": 0}}, "flops['float32 NT'] is 0; it must be a positive number"),
        ({"flops": {"bfloat16": 1.0}}, "flops has no 'float32', which other types fall back to; add it"),
        ({"flops": 3.0}, "flops is 3.0; it must be rates by type"),
        ({"name": 5}, "machine: name is 5; it must be text"),
        ({"has_accelerator": 1}, "has_accelerator"),
        ({"host_bandwith": 1.0}, "'host_bandwith' is not a field; did you mean 'host_bandwidth'?"),
        ({"colour": "red"}, "'colour' is not a field; known are name, flops, device_nbytes, "),
    ],
)
def test_what_makes_no_sense_in_a_file_gets_a_sentence(change, said, tmp_path):
    (tmp_path / "machine.json").write_text(json.dumps({**json.loads(ROUND.to_json()), **change}))
    assert said in refused(find_machine, str(tmp_path / "machine.json"))


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "cannot be read as JSON: "), (None, "No such file"), ("[1]", "write it with 'hf-patrickstar env --measure")],
)
def test_a_file_that_holds_no_machine(text, said, tmp_path):
    path = tmp_path / "machine.json"
    if text is not None:
        path.write_text(text)
    message = refused(find_machine, str(path))
    assert message.startswith(f"machine '{path}': the file ")
    assert said in message
    path.write_text(json.dumps({"name": "x"}))
    assert "num_cores" in refused(find_machine, str(path))
    assert refused(find_machine, "a100-8").endswith(" Did you mean 'a100-80'?")
    assert "3 processes need as many devices, num_devices is 2; use fewer" in refused(ROUND.check_processes, 3)
    assert "give --machine 4xh100, or use fewer" in refused(find_machine("2xh100").check_processes, 4)


def test_the_figures_of_data_sheets_are_not_reached():
    machine = peak("sheet", Card(400.0, 0.75, 100.0, 1000.0, 30.0, 10.0, 2, (Host(80.0, 3, 5),) * 2))
    assert machine.flops == {"float32": 75.0, "bfloat16": 300.0, "float16": 300.0}
    assert machine.device_bandwidth == 850.0
    assert machine.to_device_bandwidth == machine.to_host_bandwidth == 24.0
    assert machine.pageable_bandwidth == 3.0
    assert machine.host_bandwidth == 60.0
    assert machine.host_flops == 90e9
    assert (machine.device_nbytes, machine.host_nbytes, machine.num_cores) == (2 * GIB, 5 * GIB, 3)
