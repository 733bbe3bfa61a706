"""Measuring a machine: figures by hand over a timer that is made up, and real ones of tiny work."""

import dataclasses
import itertools
import statistics
import threading

import pytest
import torch
from race_detector import SimulatedDriver

from hf_patrickstar.machine import find_machine
from hf_patrickstar.memory.streams import DeviceStreams
from hf_patrickstar.report import measure, sweeps
from hf_patrickstar.report.measure import DTYPES, Effort, cpu_name, measure_machine

TINY = Effort(nbytes=2**16, most_rows=128, calls=5, repetitions=2, seconds=0.05)
SLOW = Effort(nbytes=4_000, most_rows=256, calls=10, repetitions=3, seconds=10.0)


class Timer:
    """Does the work and says how long it has taken, without looking at a clock."""

    def __init__(self, *seconds):
        self.seconds = itertools.cycle(seconds)
        self.devices = []

    def __call__(self, device, work, before=lambda: None):
        self.devices.append(device)
        before()
        work()
        return next(self.seconds)


@pytest.fixture
def quarter(monkeypatch):
    """Whatever is done takes a quarter of a second."""
    timer = Timer(0.25)
    monkeypatch.setattr(measure, "seconds_of", timer)
    return timer


# By hand


def assert_counted(num_operators):
    """Three modules in a block call an operator each in forward and in backward at least."""
    assert num_operators == round(num_operators) >= 6 * measure._BLOCKS


@pytest.fixture
def blocks(quarter, monkeypatch):
    """Names of figures for ``progress``: blocks of operators take half a second more than what stands around them."""
    monkeypatch.setattr(sweeps.time, "perf_counter", lambda: 0.0)

    def set_timer(names):
        for name in names:
            quarter.seconds = itertools.cycle([0.75, 0.25] if name == "operator_s" else [0.25])
            yield name

    return set_timer


def test_figures_are_work_by_time(quarter, blocks):
    machine = measure_machine(SLOW, blocks)
    assert machine.flops == dict.fromkeys(DTYPES, 2 * 256**3 / 0.25)
    assert machine.host_flops == machine.flops["float32"]
    assert machine.device_bandwidth == 2 * 4_000 / 0.25, "read and written"
    assert machine.to_device_bandwidth == machine.to_host_bandwidth == machine.pageable_bandwidth == 4_000 / 0.25
    assert machine.host_bandwidth == 3 * 4_000 / 0.25, "two read and one written"
    assert machine.copy_latency_s == 0.25
    assert_counted(0.5 / machine.operator_s)
    assert machine.kernel_s == 1e-9, "one element takes as long as none"
    assert machine.num_devices == 1
    assert machine.core_bandwidth == machine.host_bandwidth / machine.num_cores
    assert machine.num_cores == torch.get_num_threads()
    assert machine.host_nbytes == machine.device_nbytes > 0
    assert machine.name == cpu_name()


def test_threads_beyond_the_cores_of_the_process_are_none(quarter, monkeypatch):
    monkeypatch.setattr(measure.torch, "get_num_threads", lambda: 8)
    for cores, num in ((3, 3), (9, 8)):
        monkeypatch.setattr(measure, "own_cores", lambda num_sharers, cores=cores: cores // num_sharers)
        machine = measure_machine(SLOW)
        assert (machine.num_cores, machine.core_bandwidth) == (num, machine.host_bandwidth / num)


@pytest.mark.parametrize(("one", "none", "kernel_s"), [(0.5, 0.2, 0.03), (0.2, 0.5, 1e-9)])
def test_the_shortest_kernel_of_a_cpu_is_what_one_element_takes_more_than_none(one, none, kernel_s, quarter):
    def set_timer(names):
        for name in names:
            if name == "kernel_s":
                quarter.seconds = iter((one, none))
            yield name

    machine = measure_machine(dataclasses.replace(SLOW, repetitions=1), set_timer)
    assert machine.kernel_s == pytest.approx(kernel_s)


def test_sweeps_are_left_out_of_what_operators_take(monkeypatch):
    """Each look at the clock is a second later: a sweep takes one, and so does all that is before and after one."""
    now = itertools.count()
    monkeypatch.setattr(sweeps.time, "perf_counter", lambda: float(next(now)))
    swept = sweeps.Sweeps(torch.device("cpu"), nbytes=64)
    measurement = measure._Measurement(torch.device("cpu"), SLOW)

    def work():
        for _ in range(3):
            swept.sweep()

    assert [measurement._host_seconds(work, swept) for _ in range(2)] == [4.0, 4.0]
    assert swept.seconds == 3.0
    measurement.close()


def test_a_slow_type_is_measured_with_small_matrices(quarter):
    machine = measure_machine(dataclasses.replace(SLOW, seconds=1.0))
    assert machine.flops == dict.fromkeys(DTYPES, 2 * 128**3 / 0.25)


def test_the_median_counts(monkeypatch):
    monkeypatch.setattr(measure, "seconds_of", Timer(9.0, 1.0, 2.0))
    machine = measure_machine(dataclasses.replace(SLOW, most_rows=128))
    assert machine.pageable_bandwidth == 4_000 / statistics.median([9.0, 1.0, 2.0])


def test_what_takes_long_is_not_repeated(quarter):
    names = []

    def note(found):
        for name in found:
            names.append((name, len(quarter.devices)))
            yield name

    measure_machine(dataclasses.replace(SLOW, seconds=0.0), note)
    counts = {name: after - before for (name, before), (_, after) in itertools.pairwise(names)}
    assert counts["pageable_bandwidth"] == counts["host_bandwidth"] == 1
    assert counts["products in float32"] == 2, "one to find the size"


def test_a_time_of_zero_is_no_division(monkeypatch):
    monkeypatch.setattr(measure, "seconds_of", Timer(0.0))
    machine = measure_machine(SLOW)
    assert machine.pageable_bandwidth == 4_000 / 1e-9


def test_buffers_are_a_part_of_the_free_memory(quarter, monkeypatch):
    monkeypatch.setattr(measure, "available_host_nbytes", lambda: 8_010)
    assert measure_machine(SLOW).pageable_bandwidth == 1_000 / 0.25
    monkeypatch.setattr(measure, "available_host_nbytes", lambda: 0)
    assert measure_machine(SLOW).pageable_bandwidth == 4 / 0.25


def test_a_type_that_cannot_be_multiplied_is_missing(quarter, monkeypatch):
    real = torch.mm

    def multiply(left, right, out):
        if left.dtype is refused:
            raise RuntimeError("not implemented for this type")
        return real(left, right, out=out)

    monkeypatch.setattr(torch, "mm", multiply)
    refused = torch.float16
    assert list(measure_machine(SLOW).flops) == ["float32", "bfloat16"]
    refused = torch.float32
    with pytest.raises(RuntimeError, match="not implemented"):
        measure_machine(SLOW)


def test_progress_gets_all_figures_at_once(quarter):
    told = []
    measure_machine(SLOW, lambda names: told.append(list(names)) or names)
    assert told == [
        [
            *(f"products in {dtype}" for dtype in DTYPES),
            *("device_bandwidth", "to_device_bandwidth", "to_host_bandwidth", "pageable_bandwidth", "copy_latency_s"),
            *("host_bandwidth", "operator_s", "kernel_s"),
        ]
    ]


# Over simulated streams


@pytest.fixture
def accelerator(monkeypatch):
    """The CPU taken for an accelerator, over simulated streams; gives what the host waited for."""
    driver, waited = SimulatedDriver(), []
    fakes = {
        "is_accelerator": lambda device: True,
        "memory_info": lambda device: (16_000, 99_000),
        "device_name": lambda device: "Fake 1000",
        "make_streams": lambda device: DeviceStreams(device, driver),
        "synchronize": waited.append,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(measure, name, fake)
    monkeypatch.setattr(sweeps, "is_accelerator", lambda device: True)
    with driver.watching():
        yield waited


def test_an_accelerator(accelerator, quarter, blocks, monkeypatch):
    swept = []
    monkeypatch.setattr(sweeps, "_Interlude", swept.append)
    machine = measure_machine(SLOW, blocks)
    assert machine.name == "Fake 1000"
    assert machine.device_nbytes == 99_000 != machine.host_nbytes
    assert machine.to_device_bandwidth == machine.to_host_bandwidth == 2_000 / 0.25, "an eighth of what is free"
    assert machine.host_flops == machine.flops["float32"] == 2 * 256**3 / 0.25
    assert machine.kernel_s == 0.25 / 10
    assert_counted(0.5 / machine.operator_s)
    assert len(accelerator) == 2 * SLOW.repetitions, "launches are timed with an empty queue"
    assert not swept, "its host has its caches to itself"


# In earnest


def test_tiny_work_is_measured_and_read_back(tmp_path):
    machine = measure_machine(TINY)
    numbers = dataclasses.asdict(machine)
    assert all(rate > 0 for rate in numbers["flops"].values())
    assert "float32" in machine.flops
    path = tmp_path / "machine.json"
    path.write_text(machine.to_json())
    assert find_machine(str(path)) == machine


def test_no_thread_is_left():
    # Engines of other tests in this process may not have been collected yet.
    before = set(threading.enumerate())
    measure_machine(dataclasses.replace(TINY, nbytes=2**20))
    assert not set(threading.enumerate()) - before


def test_the_name_of_the_cpu(monkeypatch, tmp_path):
    assert cpu_name()
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2: GHz\nmodel name\t: Another\n")
    assert cpu_name(path) == "Some CPU @ 2: GHz"
    monkeypatch.setattr(measure.platform, "processor", lambda: "")
    monkeypatch.setattr(measure.platform, "machine", lambda: "riscv64")
    path.write_text("processor\t: 0\n")
    assert cpu_name(path) == cpu_name(tmp_path / "missing") == "riscv64"
