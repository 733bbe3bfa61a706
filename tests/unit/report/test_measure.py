"""Measuring a machine: by hand over a timer that is made up, sweeps of caches, and in earnest with tiny work."""

import dataclasses
import itertools

import pytest
import torch
from support.race_detector import SimulatedDriver

from hf_patrickstar.memory.streams import DeviceStreams
from hf_patrickstar.report import measure
from hf_patrickstar.report.measure import DTYPES, Effort, Sweeps, cpu_name, measure_machine

CPU = torch.device("cpu")


SLOW = Effort(nbytes=4_000, most_rows=256, calls=10, repetitions=3, seconds=10.0)


def rates_of(rows, seconds):
    """Rates of all types and kinds, of a layer with a quarter as many inputs, and of attention of half as many."""
    layer, half = 2 * rows * rows * (rows // 4), rows // 2
    attention = 7 * 2 * (half * (half + 1) // 2) * 128  # one head; two products in forward and five in backward
    kinds = {"": layer, " NT": layer, " TN": layer, " attention": attention}
    return {dtype + kind: flops / seconds for dtype in DTYPES for kind, flops in kinds.items()}


@pytest.fixture
def timed(monkeypatch):
    """Measures with an effort; work takes the given seconds in turns, by name of the figure if it is one of them."""
    monkeypatch.setattr(measure.time, "perf_counter", lambda: 0.0)

    def measured(effort=SLOW, seconds=(0.25,), **by_name):
        calls, now = [], [itertools.cycle(seconds)]

        def timer(device, work, before=lambda: None):
            before()
            work()
            calls[-1][1] += 1
            return next(now[0])

        def progress(names):
            for name in names:
                calls.append([name, 0])
                now[0] = itertools.cycle(by_name.get(name, seconds))
                yield name

        monkeypatch.setattr(measure, "seconds_of", timer)
        return measure_machine(effort, progress), dict(calls)

    return measured


def test_figures_are_work_by_time(timed, monkeypatch):
    machine, _ = timed(operator_s=(0.75, 0.25))
    assert machine.flops == rates_of(256, 0.25)
    assert machine.host_flops == machine.flops["float32"]
    assert machine.device_bandwidth == 2 * 4_000 / 0.25, "read and written"
    assert machine.to_device_bandwidth == machine.to_host_bandwidth == machine.pageable_bandwidth == 4_000 / 0.25
    assert machine.host_bandwidth == 28 * 250 / 0.25, "Adam over 16-bit values"
    copied = machine.memory_bandwidth * 0.25 - 28 * 250
    assert copied >= 0, "all that Adam reads and writes"
    assert copied % (4 * 62) == 0, "and copies of a sixteenth in both directions, or half a pair between two medians"
    assert machine.copy_latency_s == 0.25
    num_operators = 0.5 / machine.operator_s
    assert num_operators == round(num_operators) >= 6 * measure._BLOCKS, "three modules in a block, both directions"
    assert (machine.num_devices, machine.name) == (1, cpu_name())
    assert machine.host_nbytes == machine.device_nbytes > 0
    monkeypatch.setattr(measure.torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(measure, "own_cores", lambda num_sharers: 3 // num_sharers)
    machine, _ = timed()
    assert (machine.num_cores, machine.core_bandwidth) == (3, machine.host_bandwidth / 3), "threads are no cores"


def test_how_often_and_how_large(timed, monkeypatch):
    assert timed(dataclasses.replace(SLOW, seconds=1.0))[0].flops == rates_of(128, 0.25), "slow"
    machine, calls = timed(dataclasses.replace(SLOW, repetitions=1, seconds=20.0))
    assert machine.flops == rates_of(256, 0.25 / 10), "fast ones are called often"
    _, calls = timed(dataclasses.replace(SLOW, seconds=-1.0))
    assert (calls["pageable_bandwidth"], calls["products in float32"]) == (1, 2), "one to find the size"
    assert timed(seconds=(9.0, 1.0, 2.0))[0].pageable_bandwidth == 4_000 / 2.0, "the median counts"
    assert timed(seconds=(0.0,))[0].pageable_bandwidth == 4_000 / 1e-9, "no division by zero"
    once = dataclasses.replace(SLOW, repetitions=1)
    assert timed(once, kernel_s=(0.5, 0.2))[0].kernel_s == pytest.approx(0.03), "what one element takes more than none"
    assert timed(once, kernel_s=(0.2, 0.5))[0].kernel_s == 1e-9
    assert timed(once, duplex_share=(0.25, 0.2, 0.4))[0].duplex_share == 0.25 / 0.4, "of the slower direction"
    assert timed(once, duplex_share=(0.25, 0.2, 0.1))[0].duplex_share == 1.0
    monkeypatch.setattr(measure, "available_host_nbytes", lambda: 8_010)
    assert timed()[0].pageable_bandwidth == 1_000 / 0.25, "an eighth of the free memory"


@pytest.mark.parametrize("refused", ["float16", "float32"])
def test_a_type_that_cannot_be_multiplied_is_missing(refused, timed, monkeypatch):
    real, fails = measure._product, lambda: torch.mm(torch.zeros(1), torch.zeros(1))
    monkeypatch.setattr(measure, "_product", lambda *given: (fails, 1) if given[2] == refused else real(*given))
    if refused == "float32":
        with pytest.raises(RuntimeError, match="must be a matrix"):
            timed()
    else:
        assert list(timed()[0].flops) == [key for key in rates_of(256, 1.0) if not key.startswith(refused)]


def test_a_kind_of_product_that_fails_is_charged_as_others(timed, monkeypatch):
    real = torch.nn.functional.scaled_dot_product_attention

    def attend(query, *others, **kwargs):
        return real(query, *others, **kwargs) if query.dtype is torch.float32 else torch.mm(query, query)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    machine, _ = timed()
    assert set(rates_of(256, 1.0)) - set(machine.flops) == {"bfloat16 attention", "float16 attention"}
    numbers = 10**15, 0, "bfloat16"
    assert machine.kernel_ns(*numbers, "attention") == 2 * machine.kernel_ns(*numbers)


def test_an_accelerator(timed, monkeypatch):
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
    with driver.watching():
        machine, _ = timed()
    assert (machine.name, machine.device_nbytes, machine.has_accelerator) == ("Fake 1000", 99_000, True)
    assert machine.to_device_bandwidth == machine.to_host_bandwidth == 2_000 / 0.25, "an eighth of what is free"
    assert machine.host_flops == machine.flops["float32"] == 2 * 256 * 256 * 64 / 0.25
    assert machine.kernel_s == 0.25 / 10
    assert len(waited) == 2 * SLOW.repetitions, "launches are timed with an empty queue"


def test_a_sweep_follows_each_module_in_both_directions_changes_nothing_and_is_left_out(monkeypatch):
    now = itertools.count()  # each look at the clock is a second after the one before
    monkeypatch.setattr(measure.time, "perf_counter", lambda: float(next(now)))
    made, inputs = Sweeps(CPU, nbytes=64), torch.randn(4, 2, requires_grad=True)
    layers = [torch.nn.Linear(2, 2) for _ in range(3)]
    plain = [inputs, *(parameter for layer in layers for parameter in layer.parameters())]
    expected = torch.autograd.grad(torch.nn.Sequential(*layers)(inputs).sum(), plain)
    loss = made.between(layers)(inputs).sum()
    assert made.seconds == 3.0
    found = torch.autograd.grad(loss, plain)
    assert made.seconds == 6.0
    assert (made._swept == 6.0).all(), "each goes through all of the buffer"
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    for _ in range(2):
        seconds = made.host_seconds(lambda: [made.sweep() for _ in range(3)])
        assert seconds == 4.0, "a sweep takes a second, and so does all that is before and after one"
    monkeypatch.setattr(measure, "is_accelerator", lambda device: True)
    none = Sweeps(CPU)
    none.between([torch.nn.Linear(2, 2)])(torch.ones(1, 2)).sum().backward()
    assert none.seconds == 0.0, "the host of an accelerator has its caches to itself"
