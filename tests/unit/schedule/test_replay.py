"""A step on the clock, computed by hand.

The bus carries a byte per nanosecond to the host and two to the device. A copy takes 10 ns more, and the host needs a
nanosecond to start anything.
"""

import dataclasses

import pytest

from hf_patrickstar.machine import MACHINES
from hf_patrickstar.schedule.clock import Lane
from hf_patrickstar.schedule.move_plan import Actions, MovePlan
from hf_patrickstar.schedule.replay import Player, replay
from hf_patrickstar.schedule.script import Begin, DeviceOp, Join, Keep, Load, Part, Reach, Reduce, Restore, Send

MACHINE = dataclasses.replace(
    MACHINES["h100"],
    to_host_bandwidth=1e9,
    to_device_bandwidth=2e9,
    copy_latency_s=10e-9,
    operator_s=1e-9,
    visit_s=1e-9,
)


def compute(name, duration_ns=100):
    return DeviceOp(name, 0, 0, "float32", measured_ns=duration_ns)


FORWARD = [Begin(Part.FORWARD), *(compute("a"), Keep(0), compute("b"), Keep(1), compute("c"), Keep(2), compute("d"))]
BACKWARD = [
    Begin(Part.BACKWARD),
    *(compute("e"), Restore(2), compute("f"), Restore(1), compute("g"), Restore(0), compute("h")),
]
STEP = [*FORWARD, *BACKWARD]


def plan_of(*offloaded, moments=()):
    return MovePlan(moments, {}, (), offloaded)


def spans_of(script, *plans, loads=()):
    """When what ran in each lane, without that of the host."""
    timeline = replay(script, plans, loads, MACHINE)
    spans = [span for span in timeline.own_spans if span.lane is not Lane.HOST]
    assert timeline.end_ns == max(span.end_ns for span in spans)
    return [(span.lane, span.what.split(",")[0], span.begin_ns, span.end_ns) for span in spans]


C, TO_HOST, TO_DEVICE = Lane.COMPUTE, Lane.TO_HOST, Lane.TO_DEVICE


def test_where_none_leaves_the_compute_lane_waits_for_nothing():
    expected = [(C, name, 1 + 100 * number, 101 + 100 * number) for number, name in enumerate("abcdefgh")]
    assert spans_of(STEP, plan_of()) == expected


def test_two_leave_and_come_back():
    """A copy begins when its operand is computed; the next one is kept when the copy is done, one comes back ahead."""
    assert spans_of(STEP, plan_of(1000, 500)) == [
        (C, "a", 1, 101),
        (TO_HOST, "activation 0", 101, 1111),
        (C, "b", 101, 201),
        (TO_HOST, "activation 1", 1111, 1621),  # the memory of the first one is free now
        (C, "c", 1111, 1211),
        (C, "d", 1621, 1721),  # the third was kept, and stays
        (C, "e", 1721, 1821),
        (TO_DEVICE, "activation 1", 1821, 2081),  # ahead, as backward needs the third
        (C, "f", 1821, 1921),
        (TO_DEVICE, "activation 0", 2081, 2591),  # ahead, as backward needs the second
        (C, "g", 2081, 2181),
        (C, "h", 2591, 2691),
    ]


def test_the_last_one_is_gone_when_forward_ends_and_comes_back_when_backward_needs_it():
    small = plan_of(50, 50, 500)
    assert spans_of(STEP, small)[5:] == [
        (TO_HOST, "activation 2", 301, 811),
        (C, "d", 301, 401),
        (C, "e", 811, 911),
        (TO_DEVICE, "activation 2", 911, 1171),
        (TO_DEVICE, "activation 1", 1171, 1206),
        (C, "f", 1171, 1271),
        (TO_DEVICE, "activation 0", 1271, 1306),
        (C, "g", 1271, 1371),
        (C, "h", 1371, 1471),
    ]


@pytest.mark.parametrize("num_cores", [1, 4])
def test_a_collective_of_the_cpu_takes_its_time_once(num_cores):
    """The thread that computes adds what it receives. A gather takes one of its cores."""
    links = {"link_bandwidth": 1e9, "link_latency_s": 10e-9}
    machine = dataclasses.replace(MACHINE, has_accelerator=False, num_cores=num_cores, num_devices=2, **links)
    script = [Begin(Part.FORWARD), compute("a"), Reduce(90), Join(0), compute("b")]
    begins = {span.what: span.begin_ns for span in replay(script, [plan_of()], [], machine).own_spans}
    assert (begins["reduce, 90 bytes sent"], begins["b"]) == (102, 203)
    player = Player(machine)
    assert player.gather(90).time_ns == 101
    assert player.clock.end_of(Lane.HOST).time_ns == 1 + 100 // num_cores


@pytest.mark.parametrize("num", [0, 1])
def test_they_share_lanes_with_chunks(num):
    """A gradient waits for the activation before it, and the activation that comes back for the load before it."""
    script = [
        *(Begin(Part.FORWARD), compute("a"), Keep(0), Send(0, 100), compute("b"), Begin(Part.BACKWARD)),
        *(Reach(1), compute("c"), Restore(0), compute("d")),
    ]
    plan = plan_of(*[1000] * num, moments=(Actions((), (1,), ()),))
    loads = [Load(100), Load(600)]
    found = spans_of(script, plan, loads=loads)
    of_chunks = [(what, begin, end) for lane, what, begin, end in found if what.startswith("chunk")]
    assert (
        of_chunks
        == [
            [("chunk 0", 101, 211), ("chunk 1", 201, 511)],
            [("chunk 0", 1111, 1221), ("chunk 1", 1111, 1421)],
        ][num]
    )
    assert found[-1] == [(C, "d", 611, 711), (C, "d", 2031, 2131)][num]


def test_an_update_over_the_bus_takes_both_directions_at_once():
    """The first load of a step brings states, which leave as they come; the second one brings the value alone."""
    script = [Begin(Part.FORWARD), Reach(0), compute("a"), Begin(Part.BACKWARD), Reach(0), compute("b")]
    plan = plan_of(moments=(Actions((), (0,), ()), Actions((), (0,), ())))
    found = spans_of(script, plan, loads=[Load(100, states_nbytes=(360, 900), num_tiles=1)])
    launched = 14  # copies and kernels of a tile
    assert found == [
        (TO_DEVICE, "update chunk 0", launched + 1, launched + 1 + 200 + 10),  # 360 bytes at 0.9 of two per nanosecond
        (TO_HOST, "update chunk 0", launched + 2, launched + 2 + 1000 + 10),
        (C, "a", 1026, 1126),
        (TO_DEVICE, "chunk 0", 1126, 1186),
        (C, "b", 1186, 1286),
    ]
