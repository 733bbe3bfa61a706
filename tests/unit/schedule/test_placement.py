"""What is said of homes, and which chunks leave a full host; tests/property has the laws of budgets."""

import dataclasses
import pickle

import pytest

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.machine import CPU_TIER, MACHINES
from hf_patrickstar.schedule.placement import ChunkBytes, Limits, Lookups, Tiers, plan_homes, plan_lookups, spill
from hf_patrickstar.shortage import Limit
from hf_patrickstar.units import GIB, MIB


def place(chunks, device_nbytes, host_nbytes, working_set_nbytes, workspace_nbytes, **settings):
    needs = [(working_set_nbytes, frozenset())]
    return plan_homes(chunks, Tiers(host_nbytes, device_nbytes, needs, workspace_nbytes, workspace_nbytes), **settings)


def make_chunks(count, on_host=()):
    """Each takes 700 bytes on the device and 728 on the host."""
    return [ChunkBytes(index, 100, 128, 600, index in on_host) for index in range(count)]


FITS, HOST = "all model data (2.05 KiB) is at home on the device", "model data (2.18 KiB) is at home on the host"
FULL = "1 of 3 chunks are at home on the device: the host is full"


@pytest.mark.parametrize(
    ("chunks", "device_nbytes", "host_nbytes", "workspace", "homed", "reason"),
    [
        (make_chunks(3), 2150, 0, 50, {0, 1, 2}, FITS),
        (make_chunks(3), 2149, 9999, 50, set(), HOST),
        (make_chunks(3), 1000, 3 * 728 + 50, 50, set(), HOST),
        (make_chunks(3), 950, 3 * 728 + 49, 50, {2}, FULL),
        (make_chunks(3), 900, 2 * 728, 0, {2}, FULL),
        ([ChunkBytes(0, 100, 100, 200), ChunkBytes(1, 100, 100, 900)], 600, 1000, 0, {0}, "1 of 2 chunks"),
        (make_chunks(3, on_host={1}), 9999, 9999, 0, {0, 2}, ""),
        (make_chunks(3, on_host={1}), 1600, 728, 0, {0, 2}, ""),
        (make_chunks(2, on_host={0}), 950, 728 + 50, 50, {1}, ""),
        ([], 200, 0, 0, set(), ""),
    ],
    ids=[
        *("all fits the device", "the workspace must fit too", "all fits the host", "the workspace moves, too", "full"),
        *(
            "what does not fit is passed over",
            "what is looked up stays",
            "and the rest leaves",
            "its workspace",
            "none",
        ),
    ],
)
def test_homes_of_chunks(chunks, device_nbytes, host_nbytes, workspace, homed, reason):
    """Beside a working set of 200 bytes."""
    plan = place(chunks, device_nbytes, host_nbytes, 200, workspace)
    assert plan.device_homed == homed
    assert reason in plan.reason


@pytest.mark.parametrize(
    ("chunks", "device_nbytes", "host_nbytes", "workspace"),
    [
        (make_chunks(3), 949, 3 * 728 + 49, 50),
        (make_chunks(3, on_host={1}), 9999, 727, 0),
        (make_chunks(2, {0}), 950, 777, 50),
    ],
)
def test_a_byte_less_is_refused(chunks, device_nbytes, host_nbytes, workspace):
    with pytest.raises(BudgetError, match=r"\(\d+ bytes\) needed on the host"):
        place(chunks, device_nbytes, host_nbytes, 200, workspace)


def test_what_is_too_small_together_says_how_much_is_enough():
    with pytest.raises(BudgetError) as caught:
        place(make_chunks(4), 1000, 2000, 200, 0)
    message = str(caught.value)
    for text in (
        "host_budget is too small for the model data: 3.01 KiB (3084 bytes) needed on both tiers together, 2.93 KiB",
        "2.13 KiB (2184 bytes) needed on the host, 1.95 KiB (2000 bytes) available, after 1 of 4 chunks were given",
        "Raise host_budget to at least 2184 bytes, or raise device_budget",
        "device_budget=1600 is enough, too",
    ):
        assert text in message
    assert [row.split() for row in message.splitlines()[1:]] == [
        row.split()
        for row in (
            *("tier owner need", "host param 384 B", "host masters and states 1.76 KiB", "host workspace 0 B"),
            *("host total 2.13 KiB", "host usable now 1.95 KiB", "device chunks at home 700 B"),
            *("device working set 200 B", "device workspace 0 B", "device total 900 B", "device usable now 1000 B"),
        )
    ]
    assert len(place(make_chunks(4), 1000, 2184, 200, 0).device_homed) == 1
    assert len(place(make_chunks(4), 1600, 2000, 200, 0).device_homed) == 2


def test_the_message_is_worded_once_and_only_where_it_is_read(monkeypatch):
    """To find what would be enough takes time; processes hand errors to each other as text."""
    worded = []
    monkeypatch.setattr("hf_patrickstar.schedule.placement.too_small", lambda *_: worded.append(1) or "too small")
    with pytest.raises(BudgetError) as caught:
        place(make_chunks(4), 600, 1000, 200, 0)
    assert not worded
    assert str(caught.value) == str(caught.value) == "too small"
    assert pickle.loads(pickle.dumps(caught.value)).args == ("too small",)
    assert len(worded) == 1


@pytest.mark.parametrize(
    ("is_auto", "said", "is_advised"),
    [
        (False, f"Raise host_budget to at least {4 * 728} bytes, or", True),
        (True, "the host has too little memory for the model data", False),
    ],
)
def test_while_activations_are_unknown_the_advice_is_a_host_for_all_chunks(is_auto, said, is_advised):
    """What is enough beside the reserve is said apart; nothing is advised that the machine does not have."""
    device = Limit("device_budget", 980, is_auto=is_auto, usable=0.98)
    limits = Limits(Limit("host_budget", 2000, is_auto=is_auto), [device], 20)
    with pytest.raises(BudgetError) as caught:
        plan_homes(make_chunks(4), Tiers(2000, 980, [(200, frozenset())]), limits=limits)
    enough = "at most 20 B (20 bytes) of the device, host_budget=2184 or device_budget=1633 is enough."
    assert said in str(caught.value)
    assert (enough in str(caught.value)) is is_advised


# Chunks that the host has no room for


def sized(*sizes):
    return [ChunkBytes(index, 0, 0, size) for index, size in enumerate(sizes)]


MIXED = [ChunkBytes(0, 100, 100, 600), ChunkBytes(1, 100, 100, 0), ChunkBytes(2, 100, 100, 600)]
NEEDS = [(500, frozenset({0, 1})), (300, frozenset({2}))]


@pytest.mark.parametrize(
    ("chunks", "tiers", "order", "leave"),
    [
        (sized(300, 700, 300, 500), Tiers(1000, 800, []), None, {2, 3}),
        (sized(300, 700, 300, 500), Tiers(1150, 800, []), None, {1}),
        (MIXED, Tiers(1450, 100, [], 50, 50), None, {1}),
        (MIXED, Tiers(1449, 699, [], 50, 50), None, None),
        (MIXED, Tiers(1449, 750, [], 50, 50), None, {2}),
        (make_chunks(2), Tiers(0, 1450, [], 50, 50), None, {0, 1}),
        (make_chunks(2), Tiers(0, 1449, [], 50, 50), None, None),
        (make_chunks(3), Tiers(2 * 728, 1200, NEEDS), None, {2}),
        (make_chunks(3), Tiers(2 * 728, 1100, NEEDS), [2, 1, 0], {1}),
        (make_chunks(3), Tiers(2 * 728, 1099, NEEDS), None, None),
        (make_chunks(4), Tiers(2 * 728, 9999, []), None, {2, 3}),
        (make_chunks(4), Tiers(2 * 728, 9999, []), [1, 3, 0, 2], {1, 3}),
    ],
    ids=[
        *("those that fit best", "one that fits best", "a frozen one needs no scratch space", "none fits", "fits"),
        *(
            "a host without updates needs none",
            "the device does",
            "the last",
            "in use at the highest moment",
            "neither",
        ),
        *("of equal ones the last", "of equal ones in an order"),
    ],
)
def test_chunks_that_leave_a_full_host(chunks, tiers, order, leave):
    assert spill(chunks, tiers, *([] if order is None else [order])) == leave


def test_very_many_sizes_are_compared_roughly():
    """Far fewer sums than there are; less than the smallest chunk is left free all the same."""
    sizes = [1000 + 37 * index + index * index % 91 for index in range(60)]
    homed = spill(sized(*sizes), Tiers(sum(sizes) // 2, sum(sizes), []))
    left = sum(sizes) // 2 - sum(size for index, size in enumerate(sizes) if index not in homed)
    assert 0 <= left < min(sizes)


# Embeddings that are looked up on the CPU


TRAINED, FROZEN = Lookups(100 * MIB, 4 * MIB, True), Lookups(100 * MIB, 4 * MIB, False)
LARGE_ROWS = dataclasses.replace(TRAINED, rows_nbytes=101 * MIB)


@pytest.mark.parametrize(
    ("lookups", "machine", "free_nbytes", "chosen", "said"),
    [
        ({0: TRAINED, 3: LARGE_ROWS, 5: FROZEN}, CPU_TIER, GIB, {0: "home", 3: "device", 5: "home"}, "2 of 3"),
        ({0: TRAINED}, MACHINES["h100"], 100 * MIB, {0: "device"}, "0 of 1"),
        ({0: TRAINED}, MACHINES["h100"], 100 * MIB - 1, {0: "home"}, "(1 of them because the device has no room)"),
        ({}, CPU_TIER, GIB, {}, ""),
    ],
    ids=["fewer rows than weights", "a dense gradient on the CPU", "no room", "none"],
)
def test_embeddings_are_looked_up_where_it_is_faster(lookups, machine, free_nbytes, chosen, said):
    found, reason = plan_lookups(lookups, machine, free_nbytes)
    assert found == chosen
    assert said in reason


def test_where_the_bus_is_fast_a_dense_gradient_on_the_cpu_costs_more_than_the_copies():
    """One core fills zeros: at 4 GB/s 25 ms, beside two copies of 4 ms each for the weight and its gradient."""
    h100 = MACHINES["h100"]
    chosen, reason = plan_lookups({0: TRAINED, 1: FROZEN}, h100, GIB)
    assert chosen == {0: "device", 1: "home"}, "a frozen one has no gradient"
    rows = [h100.copy_ns(4 * MIB, to_device=to_device) for to_device in (True, False)]
    weight = [h100.copy_ns(100 * MIB, to_device=to_device) for to_device in (True, False)]
    gradient = h100.num_cores * h100.host_ns(0, 100 * MIB) + h100.host_ns(0, 200 * MIB)
    at_home, on_device = 2 * rows[0] + rows[1] + gradient, 2 * weight[0] + weight[1] + h100.kernel_ns(0, 300 * MIB, "")
    for figure in ("1 of 2", "'h100'", f"{at_home / 1e6:.2f} ms for it on the CPU", f"{on_device / 1e6:.2f} ms"):
        assert figure in reason
