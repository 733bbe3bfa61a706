"""Simulated streams: what runs when, and which races are found."""

import weakref

import pytest
import torch
from race_detector import RaceError, SimulatedDriver
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from hf_patrickstar.memory.lanes import WorkLane
from hf_patrickstar.memory.streams import DeviceStreams
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.values import as_it_is
from hf_patrickstar.tracing.operands import storage_key

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


def test_a_copy_runs_when_it_is_joined_and_there_is_nan_until_then(sim):
    ticket = sim.streams.fetch(sim.home, sim.copy)
    assert not ticket.is_done
    assert ticket.lane is WorkLane.TO_DEVICE
    assert bytes(sim.copy.numpy().tobytes()) == b"\xff" * 16
    ticket.join()
    assert ticket.is_done
    assert sim.copy.numpy().tolist() == [1, 1, 1, 1]
    assert (sim.copy + 1).tolist() == [2, 2, 2, 2]


def test_a_copy_runs_when_the_host_waits_for_it(sim):
    gradient = torch.full((4,), 7.0)
    ticket = sim.streams.to_host(gradient, sim.home)
    assert not ticket.is_done
    ticket.wait()
    assert sim.home.tolist() == [7, 7, 7, 7]


def test_what_comes_before_runs_first(sim):
    first = sim.streams.to_host(torch.full((2,), 7.0), sim.home[:2])
    second = sim.streams.to_device(sim.home, sim.copy, after=[first])
    assert second.is_done
    assert first.is_done
    assert sim.copy.tolist() == [7, 7, 1, 1]


def test_an_earlier_copy_in_the_same_lane_runs_first(sim):
    sim.streams.fetch(sim.home, sim.copy)
    ticket = sim.streams.fetch(sim.other_home, sim.copy)
    ticket.join()
    assert sim.copy.tolist() == [2, 2, 2, 2]


def test_all_copies_have_run_at_the_end():
    sim = Sim()
    with sim.driver.watching():
        ticket = sim.streams.fetch(sim.home, sim.copy)
    assert ticket.is_done
    assert sim.driver.num_copies == 1


def test_a_buffer_of_a_copy_that_has_not_run_is_not_counted_as_used(sim):
    counts = [torch._C._storage_Use_Count(storage_key(buffer)) for buffer in (sim.home, sim.copy)]
    ticket = sim.streams.fetch(sim.home[2:], sim.copy[:2])
    assert counts == [torch._C._storage_Use_Count(storage_key(buffer)) for buffer in (sim.home, sim.copy)]
    sim.home, home = None, weakref.ref(sim.home)
    assert home() is None
    ticket.join()  # whoever dropped the memory does not look


def test_a_part_of_a_buffer_is_found_again(sim):
    sim.streams.fetch(sim.home.view(2, 2).t()[1], sim.copy.view(2, 2)[:, 0]).join()
    assert sim.copy.tolist() == [1, 3, 1, 3]


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
    assert not done & {(False, True, True), (False, False, True), (True, False, True)}, "they run in order"


# What is a race


def test_reading_what_is_not_there_yet(sim):
    sim.streams.fetch(sim.home, sim.copy)
    with pytest.raises(RaceError, match=r"'param on the device': 'aten::add' \(compute stream, number \d+\) reads"):
        sim.copy + 1


def test_other_bytes_are_no_race(sim):
    sim.streams.fetch(sim.home[:2], sim.copy[:2])
    assert (sim.copy[2:] + 1).tolist() == [4, 4]
    with pytest.raises(RaceError, match="reads bytes 4 to 12, and nothing orders it after 'copy of 8 bytes'"):
        sim.copy[1:3] + 1


def test_two_that_only_read_are_no_race(sim):
    ticket = sim.streams.fetch(sim.home, sim.copy)
    assert (sim.home + 1).tolist() == [2, 2, 2, 2]
    ticket.join()


def test_the_host_overwrites_what_a_copy_reads(sim):
    ticket = sim.streams.to_device(sim.home, sim.copy)
    with pytest.raises(RaceError, match=r"'aten::fill_' \(host, number \d+\) writes"):
        sim.home.fill_(5)
    ticket.wait()
    sim.home.fill_(5)
    assert sim.copy.tolist() == [1, 1, 1, 1]


def test_joining_is_not_waiting(sim):
    """The compute stream goes on after the copy, the host need not."""
    ticket = sim.streams.to_host(torch.ones(4), sim.home)
    ticket.join()
    with pytest.raises(RaceError, match="host"):
        sim.home + 1
    ticket.wait()
    assert (sim.home + 1).tolist() == [2, 2, 2, 2]


def test_copies_of_different_lanes_are_not_ordered(sim):
    ticket = sim.streams.to_host(torch.ones(4), sim.home)
    with pytest.raises(RaceError, match=r"copy stream 0.*nothing orders it after 'copy of 16 bytes' \(copy stream 1"):
        sim.streams.fetch(sim.home, sim.copy)
    sim.streams.fetch(sim.home, sim.other_copy, after=[ticket]).join()


def test_a_gradient_goes_over_what_a_copy_reads(sim):
    ticket = sim.streams.fetch(sim.home, sim.copy)
    with pytest.raises(RaceError, match="writes bytes 0 to 16"):
        sim.streams.to_host(torch.ones(4), sim.home)
    sim.streams.to_host(torch.ones(4), sim.home, after=[ticket])


def test_a_copy_that_does_not_wait_for_what_computes_its_source():
    sim = Sim()
    lane = sim.driver.new_stream()
    with sim.driver.watching():
        gradient = torch.ones(4) * 2
        with pytest.raises(RaceError, match="nothing orders it after 'its computation'"):
            sim.driver.copy(gradient, sim.home, lane)


def test_a_copy_over_what_is_still_read():
    sim = Sim()
    lane = sim.driver.new_stream()
    with sim.driver.watching():
        sim.copy + 1
        with pytest.raises(RaceError, match="nothing orders it after 'aten::add'"):
            sim.driver.copy(sim.home, sim.copy, lane)


def test_a_gradient_that_is_freed_too_early():
    sim = Sim()
    lane = sim.driver.new_stream()
    with sim.driver.watching():
        gradient = torch.ones(4) * 2
        lane.wait_stream(sim.driver.current_stream())
        sim.driver.copy(gradient, sim.home, lane)
        torch.ones(1) + 1
        del gradient
        with pytest.raises(RaceError, match="was freed, and the compute stream does not wait"):
            torch.ones(1) + 1


def test_a_gradient_in_flight_is_held(sim):
    ticket = sim.streams.to_host(torch.ones(4) * 2, sim.home)
    torch.ones(1) + 1
    sim.streams.release_in_flight()
    torch.ones(1) + 1
    ticket.wait()
    assert sim.home.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize(("tier", "waits"), [(Tier.DEVICE, "join"), (Tier.HOST, "wait")])
def test_memory_is_freed_while_it_is_copied(sim, tier, waits):
    ticket = sim.streams.fetch(sim.home, sim.copy)
    buffer = sim.home if tier is Tier.HOST else sim.copy
    with pytest.raises(RaceError, match="freeing the memory"):
        sim.driver.free(buffer)
    sim.driver.take(buffer, tier, "param")
    ticket = sim.streams.fetch(sim.other_home, sim.other_copy)
    getattr(ticket, waits)()
    sim.driver.free(sim.other_home if tier is Tier.HOST else sim.other_copy)


def test_an_operator_with_operands_on_both_tiers(sim):
    with pytest.raises(RaceError, match=r"'aten::add.*' has operands on the host and on the device"):
        sim.home + sim.copy


def test_a_copy_between_tiers_blocks_the_host(sim):
    sim.copy.mul_(2)
    sim.home.copy_(sim.copy)
    assert (sim.home + 1).tolist() == [7, 7, 7, 7]
    ticket = sim.streams.fetch(sim.other_home, sim.copy)
    with pytest.raises(RaceError, match="aten::copy_"):
        sim.home.copy_(sim.copy)
    ticket.join()
    sim.home.copy_(sim.copy)
    assert sim.home.tolist() == [2, 2, 2, 2]


def test_values_for_the_device_are_copied_from_the_host(sim):
    there = sim.streams.on_device(sim.home)
    assert (there + sim.copy).tolist() == [4, 4, 4, 4]
    assert sim.streams.on_device(sim.copy) is sim.copy
    assert storage_key(sim.streams.on_device(sim.copy, copy=True)) != storage_key(sim.copy)


def test_views_touch_nothing(sim):
    ticket = sim.streams.fetch(sim.home, sim.copy)
    view = sim.copy.view(2, 2).t()[0].detach()
    ticket.join()
    assert view.tolist() == [1, 1]


def test_questions_touch_nothing(sim):
    ticket = sim.streams.fetch(sim.home, sim.copy)
    assert torch.ops.prim.device.default(sim.copy) == CPU
    ticket.join()


def test_modes_that_were_left_on_do_not_keep_the_streams_watching():
    class Left(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    before = _get_current_dispatch_mode_stack()
    with Sim().driver.watching():
        Left().__enter__()
    assert _get_current_dispatch_mode_stack() == before


def test_lists_of_operands_are_seen(sim):
    ticket = sim.streams.fetch(sim.home, sim.copy)
    with pytest.raises(RaceError, match="writes bytes 0 to 16"):
        torch._foreach_mul_([sim.other_copy, sim.copy], 2.0)
    ticket.join()
    torch._foreach_mul_([sim.other_copy, sim.copy], 2.0)
    assert sim.copy.tolist() == [2, 2, 2, 2]


def test_what_the_engine_does_under_no_other_mode_is_seen(sim):
    ticket = sim.streams.fetch(sim.home, sim.copy)
    with as_it_is(), pytest.raises(RaceError, match="'aten::add'"):
        sim.copy + 1
    ticket.join()
    with as_it_is():
        assert (sim.copy + 1).tolist() == [2, 2, 2, 2]


def test_other_modes_are_off_there(sim):
    with FlopCounterMode(display=False) as counter:
        with as_it_is():
            sim.copy.view(2, 2) @ sim.copy.view(2, 2)
        assert not counter.get_total_flops()
        sim.copy.view(2, 2) @ sim.copy.view(2, 2)
        assert counter.get_total_flops()


def test_a_copy_that_comes_after_work_hides_none_that_does_not(sim):
    """The same bytes on the same lane twice; the first copy has forgotten the work of the host's thread."""
    work = sim.streams.on_host(lambda: sim.home.add_(1))
    lane = sim.streams._lanes[WorkLane.TO_DEVICE]
    sim.driver.copy(sim.home, sim.copy, lane)
    lane.wait_event(work.event)
    sim.driver.copy(sim.home, sim.copy, lane)
    with pytest.raises(RaceError, match="'param on the host': 'aten::add_'"):
        work.wait()
