"""The driver of a machine that is not here: what costs what, and who waits for whom, in numbers worked out by hand."""

import pytest
import torch
from oracle.driver import VirtualDriver

from hf_patrickstar.machine import Machine
from hf_patrickstar.memory.streams import DeviceStreams
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.schedule.clock import Lane

CPU = torch.device("cpu")
SECOND = 10**9
MACHINE = Machine(
    name="slow",
    flops={"float32": 1000.0},
    device_nbytes=10**6,
    device_bandwidth=100.0,
    to_device_bandwidth=10.0,
    to_host_bandwidth=20.0,
    pageable_bandwidth=5.0,
    host_nbytes=10**6,
    host_bandwidth=50.0,
    host_flops=100.0,
    num_cores=1,
    copy_latency_s=1.0,
    operator_s=0.5,
    kernel_s=0.25,
)
"""So slow that everything is a matter of seconds."""


@pytest.fixture
def driver():
    driver = VirtualDriver(MACHINE)
    with driver.watching():
        yield driver


def make_buffer(driver, tier, numel=10):
    buffer = torch.zeros(numel)
    driver.take(buffer, tier, "a test")
    driver.begin()
    return buffer


def seconds(timeline):
    return timeline.duration_ns / SECOND


def test_the_host_launches_a_kernel_and_the_device_takes_its_bytes(driver):
    a = make_buffer(driver, Tier.DEVICE)
    begin = driver.clock.now_ns
    a.neg()
    assert driver.clock.now_ns - begin == SECOND // 2, "the host goes on"
    assert seconds(driver.end()) == 0.5 + 0.8, "the launch, then 80 bytes at 100 per second"


def test_memory_of_the_host_takes_the_host(driver):
    a = make_buffer(driver, Tier.HOST)
    a.mul_(2)
    timeline = driver.end()
    assert seconds(timeline) == 0.5 + 80 / 50
    assert timeline.busy_ns()[Lane.COMPUTE] == 0


def test_a_value_that_is_asked_for_stops_the_host(driver):
    a = make_buffer(driver, Tier.DEVICE)
    a.sum().item()
    timeline = driver.end()
    (wait,) = timeline.waits
    # 0.5 launch, 0.44 the sum; the question is launched at 1.0 and takes 0.25.
    assert (wait.begin_ns - timeline.begin_ns, wait.duration_ns) == (int(1.0 * SECOND), int(0.25 * SECOND))


def test_a_copy_between_the_tiers_outside_of_a_lane_stops_the_host(driver):
    host, device = torch.zeros(10), torch.zeros(10)
    driver.take(host, Tier.HOST, "a test")
    driver.begin()
    device.neg()  # until 1.3
    device.copy_(host)
    timeline = driver.end()
    assert seconds(timeline) == 1.3 + 1 + 40 / 10
    assert [wait.duration_ns for wait in timeline.waits] == [int((6.3 - 1.0) * SECOND)]


def test_copies_in_lanes_run_beside_computation(driver):
    streams = DeviceStreams(CPU, driver)
    host, device, other = torch.zeros(10), torch.zeros(10), torch.zeros(10)
    driver.take(host, Tier.HOST, "a home")
    driver.begin()
    ticket = streams.fetch(host, device)  # started at 0.5, until 5.5
    other.neg()  # launched at 1.0, until 1.8
    assert not ticket.is_done
    ticket.join()
    device.neg()  # after the copy
    timeline = driver.end()
    assert seconds(timeline) == 5.5 + 0.8
    assert [span.lane for span in timeline.critical_path()] == [Lane.HOST, Lane.TO_DEVICE, Lane.COMPUTE]


def test_operands_of_the_host_are_copied_for_a_kernel_of_the_device(driver):
    host, device = torch.zeros(10), torch.zeros(10)
    driver.take(host, Tier.HOST, "a test")
    driver.begin()
    (host + device).neg()
    assert seconds(driver.end()) == pytest.approx(0.5 + 5 + 0.5 + 1.2 + 0.8)


def test_what_is_added_to_memory_of_the_host_is_copied_there_first(driver):
    total, gradient = torch.zeros(10), torch.zeros(10)
    driver.take(total, Tier.HOST, "a list")
    driver.begin()
    total.add_(gradient)
    # 0.5 to start, 1 and 40 bytes at 5 for the copy; 0.5 to call, 120 bytes at 50 for the sum.
    assert seconds(driver.end()) == pytest.approx(0.5 + 1 + 8 + 0.5 + 2.4)


def test_the_thread_of_the_host_works_beside_the_host(driver):
    streams, home = DeviceStreams(CPU, driver), make_buffer(driver, Tier.HOST)
    ticket = streams.on_host(lambda: home.mul_(2))
    assert not ticket.is_done
    home.neg()  # 0.5 to 1, then 1.6 seconds
    ticket.wait()
    timeline = driver.end()
    assert seconds(timeline) == pytest.approx(0.5 + 0.5 + 1.6), "the thread is done at 0.5 and 2.1"
    assert timeline.busy_ns()[Lane.HOST_WORK] == pytest.approx((0.5 + 1.6) * SECOND)


def test_a_copy_that_is_started_ahead_follows_the_thread_and_the_host_goes_on(driver):
    streams, target, home = DeviceStreams(CPU, driver), torch.zeros(10), make_buffer(driver, Tier.HOST)
    begin = driver.clock.now_ns
    update = streams.on_host(lambda: home.mul_(2))  # 0.5 to 2.6
    copy = streams.fetch(home, target, after=[update])  # 2.6 to 7.6
    assert driver.clock.now_ns - begin == SECOND
    assert not copy.is_done
    copy.join()
    assert driver.clock.now_ns - begin == pytest.approx(2.6 * SECOND), "no stream can wait for the thread"
    target.neg()  # 7.6 to 8.4
    assert seconds(driver.end()) == pytest.approx(8.4)


def test_an_embedding_whose_weight_is_at_home_gets_indices_and_gives_rows(driver):
    weight, indices = make_buffer(driver, Tier.HOST, 1000).view(100, 10), torch.tensor([1, 2])
    rows = torch.nn.functional.embedding(indices, weight)
    timeline = driver.end()
    assert [span.what for span in timeline.own_spans if span.lane is Lane.HOST][-3:] == [
        *("start a copy", "aten.embedding", "start a copy")
    ]
    busy = timeline.busy_ns()
    # 16 bytes of indices to the host, where they are not pinned, and 80 bytes of rows back.
    assert (busy[Lane.TO_HOST], busy[Lane.TO_DEVICE]) == ((1 + 16 / 5) * SECOND, (1 + 80 / 5) * SECOND)
    assert driver.tier_of(rows) is Tier.DEVICE
