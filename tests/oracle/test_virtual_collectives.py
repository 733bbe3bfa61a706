"""Collectives with processes that are not here: what they cost, and what the others say."""

import dataclasses

import pytest
import torch
from oracle.collectives import VirtualPeers
from oracle.driver import VirtualDriver
from test_driver import MACHINE as SLOW
from test_driver import SECOND, seconds

from hf_patrickstar.events import MessageExchanged, SlicesGathered, SlicesReduced
from hf_patrickstar.memory.streams import DeviceStreams
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.schedule.clock import Lane

CPU = torch.device("cpu")
MACHINE = dataclasses.replace(SLOW, num_devices=4, link_bandwidth=60.0, link_latency_s=1.0, message_s=3.0)
"""So slow that everything is a matter of seconds."""


@pytest.fixture
def driver():
    driver = VirtualDriver(MACHINE)
    with driver.watching():
        yield driver


def connect(driver, world_size=4, reduce_dtype="auto"):
    events = []
    return VirtualPeers(driver, world_size)(CPU, events.append, reduce_dtype), events


def test_a_reduction_sends_a_slice_to_every_other_process_and_is_divided_where_it_is_joined(driver):
    collectives, events = connect(driver)
    assert collectives.is_asynchronous
    buffer = torch.zeros(20)
    driver.begin()
    ticket = collectives.reduce_scatter(buffer, (None, None), "a test")
    assert not ticket.is_done
    ticket.join()
    timeline = driver.end()
    # 0.5 to start it, 1 and 60 bytes at 60; then the divisor and the division of 44 bytes at 100.
    assert seconds(timeline) == pytest.approx(0.5 + 2 + 0.25 + 0.44)
    assert timeline.busy_ns()[Lane.REDUCTIONS] == 2 * SECOND
    assert events == [SlicesReduced(60)]


def test_sixteen_bit_sums_in_fp32_send_twice_the_bytes(driver):
    collectives, events = connect(driver, reduce_dtype="fp32")
    assert collectives.staging_numel(5, torch.bfloat16) == (0, 20)
    buffer, wide = torch.zeros(20, dtype=torch.bfloat16), torch.zeros(20)
    driver.begin()
    collectives.reduce_scatter(buffer, (None, wide), "a test")
    reduction = [span for span in driver.end().own_spans if span.lane is Lane.REDUCTIONS]
    assert [span.what for span in reduction] == ["reduce, 60 bytes sent"]
    assert events == [SlicesReduced(60)], "twice the bytes of a slice of bfloat16 for each of the others"


def test_a_gather_comes_after_the_copy_of_the_own_slice(driver):
    collectives, events = connect(driver)
    streams = DeviceStreams(CPU, driver)
    home, buffer = torch.zeros(5), torch.zeros(20)
    driver.take(home, Tier.HOST, "a home")
    driver.begin()
    streams.to_slice(home, buffer[:5])  # 0.5 to 3.5
    with streams.beside():
        ticket = collectives.all_gather(buffer, "a test")  # 3.5 to 5.5
    assert driver.clock.now_ns - driver.end().begin_ns >= SECOND
    ticket.join()
    buffer.neg()
    timeline = driver.end()
    assert [span.lane for span in timeline.own_spans if span.lane is not Lane.HOST] == [
        *(Lane.TO_DEVICE, Lane.GATHERS, Lane.COMPUTE)
    ]
    assert events == [SlicesGathered(60)]


def test_a_message_stops_the_host_and_everybody_says_the_same(driver):
    collectives, events = connect(driver)
    driver.begin()
    assert collectives.exchange([1, 2], "says something") == [[1, 2]] * 4
    assert collectives.exchange("text", "says something") == ["text"] * 4
    collectives.all_reduce(torch.zeros(3), "a test")
    collectives.begin_broadcast(torch.zeros(3), 0, "a test")()
    messages = [span for span in driver.end().own_spans if span.what == "exchange a message"]
    assert [span.duration_ns for span in messages] == [3 * SECOND] * 4
    assert events == [MessageExchanged()] * 3
