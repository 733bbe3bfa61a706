"""Simulated streams: what runs when, and which races are found; with them, the order that streams of a device keep."""

import pytest
import torch
from support.race_detector import RaceError, SimulatedDriver

from hf_patrickstar.memory.operators import as_it_is
from hf_patrickstar.memory.streams import DeviceStreams
from hf_patrickstar.memory.tiers import Tier

CPU = torch.device("cpu")


class Sim:
    """Streams over a simulated driver, and buffers of four numbers on both tiers."""

    def __init__(self, seed=None):
        self.driver = SimulatedDriver(seed)
        self.streams = DeviceStreams(CPU, self.driver)
        self.home, self.other_home = (self.buffer(Tier.HOST, value) for value in (1.0, 2.0))
        self.copy, self.other_copy = (self.buffer(Tier.DEVICE, value) for value in (3.0, 4.0))

    def buffer(self, tier, value):
        made = torch.full((4,), value)
        self.driver.take(made, tier, "param")
        return made


@pytest.fixture
def sim():
    made = Sim()
    with made.driver.watching():
        yield made


# When copies run


def test_with_a_seed_some_run_earlier():
    done = set()
    for seed in range(20):
        sim = Sim(seed)
        with sim.driver.watching():
            tickets = [sim.streams.fetch(sim.home, sim.buffer(Tier.DEVICE, 0.0)) for _ in range(3)]
            done.add(tuple(ticket.is_done for ticket in tickets))
            tickets[-1].join()
            assert all(ticket.is_done for ticket in tickets)
    assert (True, True, True) in done
    assert len(done) > 2
    assert all(list(found) == sorted(found, reverse=True) for found in done), "they run in order"


# What is a race, and what prevents it


def read(sim):
    sim.streams.fetch(sim.home, sim.copy)
    return sim.copy + 1


def read_a_part(sim):
    sim.streams.fetch(sim.home[:2], sim.copy[:2])
    assert (sim.copy[2:] + 1).tolist() == [4, 4], "other bytes are no race"
    return sim.copy[1:3] + 1


def overwrite(sim):
    sim.streams.to_device(sim.home, sim.copy)
    assert (sim.home + 1).tolist() == [2, 2, 2, 2], "two that only read are no race"
    sim.home.fill_(5)


def read_what_was_only_joined(sim):
    """The compute stream goes on after the copy, the host need not."""
    sim.streams.to_host(torch.ones(4), sim.home).join()
    return sim.home + 1


def load_while_a_gradient_arrives(sim):
    sim.streams.to_host(torch.ones(4), sim.home)
    sim.streams.fetch(sim.home, sim.copy)


def free_a_gradient(sim):
    gradient, lane = torch.ones(4) * 2, sim.driver.new_stream()
    lane.wait_stream(sim.driver.current_stream())
    sim.driver.copy(gradient, sim.home, lane)
    del gradient
    torch.ones(1) + 1


def free_a_source(sim):
    sim.streams.fetch(sim.home, sim.copy)
    sim.driver.free(sim.home)


def write_a_list(sim):
    sim.streams.fetch(sim.home, sim.copy)
    torch._foreach_mul_([sim.other_copy, sim.copy], 2.0)


def mix_tiers(sim):
    return sim.home + sim.copy


RACES = {
    read: r"'param on the device': 'aten::add' \(compute stream, number \d+\) reads",
    read_a_part: "reads bytes 4 to 12, and nothing orders it after 'copy of 8 bytes'",
    overwrite: r"'aten::fill_' \(host, number \d+\) writes",
    read_what_was_only_joined: "host",
    load_while_a_gradient_arrives: r"copy stream 0.*nothing orders it after 'copy of 16 bytes' \(copy stream 1",
    free_a_gradient: "was freed, and the compute stream does not wait",
    free_a_source: "freeing the memory",
    write_a_list: "writes bytes 0 to 16",
    mix_tiers: r"'aten::add.*' has operands on the host and on the device",
}


@pytest.mark.parametrize("race", RACES, ids=lambda race: race.__name__)
def test_a_race_is_found_with_both_sides(sim, race):
    with pytest.raises(RaceError, match=RACES[race]):
        race(sim)


def test_what_waits_is_no_race(sim):
    load = sim.streams.fetch(sim.home, sim.copy)
    store = sim.streams.to_host(torch.ones(4), sim.home, after=[load])
    again = sim.streams.fetch(sim.home, sim.other_copy, after=[store])
    load.join()
    torch._foreach_mul_([sim.copy], 2.0)
    with as_it_is():
        assert (sim.copy + 1).tolist() == [3, 3, 3, 3]
    again.join()
    sim.driver.free(sim.other_copy)
    again.wait()
    store.wait()
    sim.home.fill_(5)
    sim.home.copy_(sim.copy)  # a copy between tiers blocks the host
    assert (sim.home + 1).tolist() == [3, 3, 3, 3]
    sim.driver.free(sim.home)


def test_a_copy_that_comes_after_work_hides_none_that_does_not(sim):
    """The same bytes on the same lane twice; the first copy has forgotten the work of the host's thread."""
    work, lane = sim.streams.on_host(lambda: sim.home.add_(1)), sim.driver.new_stream()
    lane.wait_stream(sim.driver.current_stream())
    sim.driver.copy(sim.home, sim.copy, lane)
    lane.wait_event(work.event)
    sim.driver.copy(sim.home, sim.copy, lane)
    with pytest.raises(RaceError, match="'param on the host': 'aten::add_'"):
        work.wait()
