"""Bounds and replays of scripts that are short enough to work out by hand."""

import dataclasses

import pytest

from hf_patrickstar.machine import Machine
from hf_patrickstar.schedule.bounds import bounds_of
from hf_patrickstar.schedule.clock import Lane
from hf_patrickstar.schedule.plan import Actions, Plan
from hf_patrickstar.schedule.replay import device_ns, replay
from hf_patrickstar.schedule.script import (
    Begin,
    BlockingCopy,
    HostWork,
    Join,
    Kernel,
    Load,
    Message,
    Part,
    Reach,
    Reduce,
    Send,
    ThreadWork,
)

SECOND = 10**9
MACHINE = Machine(
    name="slow",
    flops={"float32": 10.0},
    device_nbytes=1000,
    device_bandwidth=100.0,
    to_device_bandwidth=10.0,
    to_host_bandwidth=20.0,
    pageable_bandwidth=5.0,
    host_nbytes=1000,
    host_bandwidth=28.0,
    host_flops=100.0,
    num_cores=1,
    copy_latency_s=1e-9,
    operator_s=1e-9,
    kernel_s=1e-9,
    visit_s=1e-9,
    num_devices=3,
    link_bandwidth=30.0,
    link_latency_s=1e-9,
    message_s=5.0,
)
"""Whole seconds for bytes, and a nanosecond for everything else."""
WORK = Kernel("work", 20, 0, "float32")  # two seconds
NOWHERE = Plan((Actions(), Actions()), {}, (0, 0))


def seconds(timeline):
    return round(timeline.duration_ns / SECOND, 6)


LOADS = (Load(40), Load(40))


def play(*script, plan=NOWHERE, loads=LOADS):
    """Replays one micro-batch, or a script that names its parts and follows the same plan in each micro-batch."""
    script = script if Begin(Part.FORWARD) in script else (Begin(Part.FORWARD), *script)
    return replay(script, [plan] * script.count(Begin(Part.FORWARD)), loads, MACHINE)


def test_nothing_takes_no_time():
    assert play().duration_ns == 0


def test_a_chunk_is_loaded_when_it_is_reached_and_computation_waits():
    plan = Plan((Actions(load=(0,)), Actions(load=(1,))), {}, (40, 80))
    timeline = play(Reach(0), WORK, Reach(1), WORK, plan=plan)
    assert seconds(timeline) == 4 + 2 + 4 + 2, "the second load is started when the first work has been launched"
    assert timeline.busy_ns()[Lane.TO_DEVICE] == pytest.approx(8 * SECOND, abs=10)


def test_a_chunk_that_comes_ahead_is_waited_for_where_it_is_needed():
    plan = Plan((Actions(load=(0, 1)), Actions()), {}, (80, 80))
    timeline = play(Reach(0), WORK, Reach(1), WORK, plan=plan)
    assert seconds(timeline) == 4 + 4 + 2, "the second load runs beside the first work"


def test_gradients_leave_beside_computation():
    assert seconds(play(WORK, Send(0, 40, to_device=False), WORK)) == 2 + 2, "the copy of two seconds is hidden"


def test_a_gradient_goes_home_after_its_chunk_was_read_from_there():
    plan = Plan((Actions(load=(0,)), Actions()), {}, (40, 40))
    timeline = play(Reach(1), Send(0, 20, to_device=False), plan=plan)
    assert seconds(timeline) == 4 + 1


def test_computation_can_be_told_to_wait_for_a_copy():
    assert seconds(play(Send(0, 40, to_device=False), Join(0), WORK)) == 2 + 2
    assert seconds(play(Send(0, 40, to_device=False), WORK)) == 2


def test_a_blocking_copy_stops_everybody():
    timeline = play(WORK, BlockingCopy(10, to_device=True, is_pinned=False, place="here"), WORK)
    assert seconds(timeline) == 2 + 2 + 2
    assert list(timeline.waits_by_place()) == ["here"]


def test_bounds():
    script = [Begin(Part.FORWARD), WORK, Begin(Part.BACKWARD), WORK, WORK, Send(0, 40, to_device=False)]
    timeline = play(*script)
    assert device_ns(script, MACHINE) == [(Part.FORWARD, 2 * SECOND), (Part.BACKWARD, 4 * SECOND)]
    few = bounds_of(script, timeline, MACHINE, num_on_host=1)
    assert (few.lower_ns, few.binding) == (6 * SECOND, "compute")
    assert few.clipped_ns == 6 * SECOND, "an update of a second hides behind the next forward"
    many = bounds_of(script, timeline, MACHINE, num_on_host=5)
    assert many.lower_ns == 6 * SECOND
    assert many.clipped_ns == (4 + 5) * SECOND
    most = bounds_of(script, timeline, MACHINE, num_on_host=20)
    assert (most.lower_ns, most.binding) == (20 * SECOND, "host Adam")
    assert most.clipped_ns == 24 * SECOND
    other = bounds_of(script, timeline, MACHINE, num_on_host=28, optimizer="SGD")
    assert (other.lower_ns, other.binding) == (12 * SECOND, "host SGD"), "a value and a gradient read, a value written"
    assert other.clipped_ns == (4 + 12) * SECOND


def test_bounds_of_several_micro_batches():
    micro_batch = [Begin(Part.FORWARD), WORK, Begin(Part.BACKWARD), WORK, WORK]
    script = [*micro_batch * 3, Begin(Part.UPDATE), WORK]
    bounds = bounds_of(script, play(*script), MACHINE, num_on_host=7)
    assert bounds.lower_ns == (3 * 6 + 2) * SECOND
    assert (bounds.first_forward_ns, bounds.until_gradients_ns) == (2 * SECOND, (4 + 2 * 6) * SECOND)
    assert bounds.clipped_ns == (2 * 6 + 4 + 7) * SECOND, "the update hides behind one forward of three"


def test_each_micro_batch_follows_its_plan_from_the_first_moment():
    plan = Plan((Actions(load=(0,)), Actions(load=(1,))), {}, (40, 80))
    micro_batch = [Begin(Part.FORWARD), Reach(0), WORK, Begin(Part.BACKWARD), Reach(1), WORK]
    assert seconds(play(*micro_batch, plan=plan)) == 4 + 2 + 4 + 2
    assert seconds(play(*micro_batch, *micro_batch, plan=plan)) == 2 * (4 + 2 + 4 + 2)
    stay = Plan((Actions(), Actions()), {}, (80, 80))
    timeline = replay([*micro_batch, *micro_batch], [plan, stay], LOADS, MACHINE)
    assert seconds(timeline) == 4 + 2 + 4 + 2 + 2 + 2, "what stays is not loaded again"


def test_a_chunk_of_several_processes_is_gathered_when_the_own_part_is_there():
    plan = Plan((Actions(load=(0, 1)), Actions()), {}, (120, 240))
    loads = (Load(40, sent_nbytes=80 + 10), Load(40, sent_nbytes=90))
    timeline = play(Reach(0), WORK, Reach(1), WORK, plan=plan, loads=loads)
    assert seconds(timeline) == 4 + 4 + 3 + 2, "the second part is loaded while the first group is gathered"
    assert timeline.busy_ns()[Lane.GATHERS] == pytest.approx(6 * SECOND, abs=10)


def test_a_part_that_is_at_home_on_the_device_does_not_cross():
    plan = Plan((Actions(load=(0,)), Actions()), {}, (120, 120))
    timeline = play(Reach(0), WORK, plan=plan, loads=(Load(100, sent_nbytes=90, is_here=True),))
    assert seconds(timeline) == 2 + 3 + 2, "200 bytes at 100 per second, then the gather"


def test_a_reduction_runs_beside_computation_until_it_is_joined():
    assert seconds(play(WORK, Reduce(120), WORK)) == 2 + 4
    assert seconds(play(WORK, Reduce(120), Join(0), WORK)) == 2 + 4 + 2
    assert seconds(play(Send(0, 40, to_device=False), Reduce(120), Join(1), WORK)) == 4 + 2


def test_a_reduction_does_not_wait_for_gathers():
    plan = Plan((Actions(load=(1,)), Actions()), {}, (120, 120))
    timeline = play(Reach(0), Reduce(30), Join(0), WORK, plan=plan, loads=(Load(0), Load(400, sent_nbytes=30)))
    assert seconds(timeline) == 40 + 1
    assert timeline.critical_path()[-1].lane is Lane.GATHERS


def test_a_message_takes_the_host():
    timeline = play(WORK, Message(), HostWork("adam", 0, 28))
    assert seconds(timeline) == 5 + 1
    script = [Begin(Part.FORWARD), WORK, Begin(Part.BACKWARD), WORK, Reduce(30 * 9)]
    assert bounds_of(script, play(*script), MACHINE, num_on_host=1).binding == Lane.REDUCTIONS.value


def work(*nbytes, chunks=(), after=()):
    """Work of the host's thread; 28 bytes are a second."""
    return ThreadWork(tuple(HostWork("update", 0, n) for n in nbytes), frozenset(chunks), after)


def test_the_thread_of_the_host_works_beside_the_device():
    assert seconds(play(work(28, 28), WORK)) == 2
    assert seconds(play(work(28, 28, 28), WORK)) == 3


def test_the_thread_comes_after_copies():
    assert seconds(play(Send(0, 40, False), work(28, after=(0,)))) == 3


def test_a_load_comes_after_the_update_of_its_chunk():
    """Chunk 0 is needed at once, and chunk 1 is loaded ahead, while it is updated."""
    plan = Plan((Actions(load=(0, 1)), Actions()), {}, (0, 0))
    script = [work(28, chunks=[0]), work(28 * 9, chunks=[1]), Reach(0), WORK, Reach(1), WORK]
    # Updates end at 1 and 10, copies at 5 and 14, and the device works from 5 to 7 and from 14 to 16.
    timeline = play(*script, plan=plan)
    assert seconds(timeline) == 16
    assert {place: round(ns / SECOND) for place, ns in timeline.waits_by_place().items()} == {
        "the update of a chunk that is loaded": 1,
        "the update of a chunk that is used": 9,
    }


def test_workers_launch_while_others_compute():
    many = dataclasses.replace(MACHINE, operator_s=2.0)
    cores = dataclasses.replace(many, num_cores=2)
    alone, together = (replay([work(28, 28, 28)], [NOWHERE], LOADS, machine).busy_ns() for machine in (many, cores))
    assert (alone[Lane.HOST_WORK], together[Lane.HOST_WORK]) == (9 * SECOND, 6 * SECOND)
