"""Bounds and replays of scripts that are short enough to work out by hand."""

import dataclasses

import pytest

from hf_patrickstar.machine import Machine
from hf_patrickstar.schedule.bounds import bounds_of
from hf_patrickstar.schedule.clock import Lane
from hf_patrickstar.schedule.move_plan import Actions, MovePlan
from hf_patrickstar.schedule.replay import device_ns, replay
from hf_patrickstar.schedule.script import (
    Begin,
    DeviceOp,
    HostWork,
    Join,
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
WORK = DeviceOp("work", 20, 0, "float32")  # two seconds
NOWHERE = MovePlan((Actions(), Actions()), {}, (0, 0))


def seconds(timeline):
    return round(timeline.duration_ns / SECOND, 6)


LOADS = (Load(40), Load(40))


def play(*script, plan=NOWHERE, loads=LOADS):
    """Replays one micro-batch, or a script that names its parts and follows the same plan in each micro-batch."""
    script = script if Begin(Part.FORWARD) in script else (Begin(Part.FORWARD), *script)
    return replay(script, [plan] * script.count(Begin(Part.FORWARD)), loads, MACHINE)


FIRST = Actions(load=(0,))
ONE = MovePlan((FIRST, Actions()), {}, (40, 40))
BOTH = MovePlan((FIRST, Actions(load=(1,))), {}, (40, 80))
AHEAD = MovePlan((Actions(load=(0, 1)), Actions()), {}, (80, 80))
GROUPS = (Load(40, sent_nbytes=80 + 10), Load(40, sent_nbytes=90))
SEND = Send(0, 40)


def work(*nbytes, chunks=(), after=()):
    """Work of the host's thread; 28 bytes are a second."""
    return ThreadWork(tuple(HostWork("update", 0, n) for n in nbytes), frozenset(chunks), after)


SCRIPTS = {
    # Entries, a plan, loads -> seconds.
    "a chunk is loaded when it is reached": ((Reach(0), WORK, Reach(1), WORK), BOTH, LOADS, 4 + 2 + 4 + 2),
    "a load ahead runs beside work": ((Reach(0), WORK, Reach(1), WORK), AHEAD, LOADS, 4 + 4 + 2),
    "computation waits for a copy": ((SEND, Join(0), WORK), NOWHERE, LOADS, 2 + 2),
    # Several processes: the second part is loaded while the first group is gathered.
    "groups are gathered": ((Reach(0), WORK, Reach(1), WORK), AHEAD, GROUPS, 4 + 4 + 3 + 2),
    "a part that is here does not cross": (
        (Reach(0), WORK),
        ONE,
        (Load(100, sent_nbytes=90, is_here=True),),
        2 + 3 + 2,
    ),
    "a reduction does not wait for gathers": (
        (Reach(0), Reduce(30), Join(0), WORK),
        *(MovePlan((Actions(load=(1,)), Actions()), {}, (120, 120)), (Load(0), Load(400, sent_nbytes=30)), 40 + 1),
    ),
    "a message takes the host": ((WORK, Message(), HostWork("adam", 0, 28)), NOWHERE, LOADS, 5 + 1),
    "the thread comes after copies": ((SEND, work(28, after=(0,))), NOWHERE, LOADS, 3),
}


@pytest.mark.parametrize(("script", "plan", "loads", "duration"), SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_takes_as_long_as_by_hand(script, plan, loads, duration):
    assert seconds(play(*script, plan=plan, loads=loads)) == duration


def test_bounds():
    script = [Begin(Part.FORWARD), WORK, Begin(Part.BACKWARD), WORK, WORK, Send(0, 40)]
    timeline = play(*script)
    assert device_ns(script, MACHINE) == [(Part.FORWARD, 2 * SECOND), (Part.BACKWARD, 4 * SECOND)]
    few = bounds_of(script, timeline, MACHINE, updated_nbytes=28 * 1)
    assert (few.lower_ns, few.binding) == (6 * SECOND, "compute")
    assert few.clipped_ns == 6 * SECOND, "an update of a second hides behind the next forward"
    many = bounds_of(script, timeline, MACHINE, updated_nbytes=28 * 5)
    assert many.lower_ns == 6 * SECOND
    assert many.clipped_ns == (4 + 5) * SECOND
    linked = [Begin(Part.FORWARD), WORK, Begin(Part.BACKWARD), WORK, Reduce(30 * 9)]
    assert bounds_of(linked, play(*linked), MACHINE, updated_nbytes=28 * 1).binding == Lane.REDUCTIONS.value
    most = bounds_of(script, timeline, MACHINE, updated_nbytes=28 * 20)
    assert (most.lower_ns, most.binding) == (20 * SECOND, "host Adam")
    assert most.clipped_ns == 24 * SECOND
    other = bounds_of(script, timeline, MACHINE, updated_nbytes=12 * 28, optimizer="SGD")
    assert (other.lower_ns, other.binding) == (12 * SECOND, "host SGD"), "a value and a gradient read, a value written"
    assert other.clipped_ns == (4 + 12) * SECOND


def test_bounds_of_several_micro_batches():
    micro_batch = [Begin(Part.FORWARD), WORK, Begin(Part.BACKWARD), WORK, WORK]
    script = [*micro_batch * 3, Begin(Part.UPDATE), WORK]
    bounds = bounds_of(script, play(*script), MACHINE, updated_nbytes=28 * 7)
    assert bounds.lower_ns == (3 * 6 + 2) * SECOND
    assert (bounds.first_forward_ns, bounds.until_gradients_ns) == (2 * SECOND, (4 + 2 * 6) * SECOND)
    assert bounds.clipped_ns == (2 * 6 + 4 + 7) * SECOND, "the update hides behind one forward of three"


def test_a_load_comes_after_the_update_of_its_chunk():
    """Chunk 0 is needed at once, and chunk 1 is loaded ahead, while it is updated."""
    plan = MovePlan((Actions(load=(0, 1)), Actions()), {}, (0, 0))
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
