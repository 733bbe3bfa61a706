import dataclasses

import pytest

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.machine import CPU_TIER, MACHINES
from hf_patrickstar.schedule.placement import ChunkBytes, Lookups, Tiers, plan_homes, plan_lookups, spill
from hf_patrickstar.units import GIB, MIB


def place(chunks, device_nbytes, host_nbytes, working_set_nbytes, workspace_nbytes, **settings):
    needs = [(working_set_nbytes, frozenset())]
    return plan_homes(chunks, Tiers(host_nbytes, device_nbytes, needs, workspace_nbytes, workspace_nbytes), **settings)


def make_chunks(count, param=100, host_param=128, state=600, on_host=()):
    return [ChunkBytes(index, param, host_param, state, index in on_host) for index in range(count)]


def test_too_small_together():
    message = (
        r"^host_budget and device_budget are together too small for the model data: 2\.84 KiB \(parameters 512 B, "
        r"masters and states 2\.34 KiB\), for which the host has 1\.95 KiB; the device, where a step needs 200 B, has "
    )
    with pytest.raises(BudgetError, match=message):
        place(make_chunks(4), device_nbytes=1000, host_nbytes=2000, working_set_nbytes=200, workspace_nbytes=0)


# Chunks that the host has no room for


def test_very_many_sizes_are_compared_roughly():
    """Far fewer sums than there are; less than the smallest chunk is left free all the same."""
    sizes = [1000 + 37 * index + index * index % 91 for index in range(60)]
    chunks = [ChunkBytes(index, 0, 0, size) for index, size in enumerate(sizes)]
    homed = spill(chunks, Tiers(sum(sizes) // 2, sum(sizes), []))
    left = sum(sizes) // 2 - sum(size for index, size in enumerate(sizes) if index not in homed)
    assert 0 <= left < min(sizes)


# CpuEmbeddings


TRAINED, FROZEN = Lookups(100 * MIB, 4 * MIB, True), Lookups(100 * MIB, 4 * MIB, False)


def test_on_one_memory_embeddings_with_fewer_rows_in_use_than_weights_are_looked_up_at_home():
    """The gradient costs the same on both tiers, so that bytes that are copied decide."""
    lookups = {0: TRAINED, 3: dataclasses.replace(TRAINED, rows_nbytes=101 * MIB), 5: FROZEN}
    assert plan_lookups(lookups, CPU_TIER, GIB)[0] == {0: "home", 3: "device", 5: "home"}


def test_a_dense_gradient_on_the_cpu_costs_more_than_the_copies_where_the_bus_is_fast_and_the_host_slow():
    h100 = MACHINES["h100"].with_cores(16)
    chosen, reason = plan_lookups({0: TRAINED, 1: FROZEN}, h100, GIB)
    assert chosen == {0: "device", 1: "home"}, "a frozen one has no gradient"
    rows = [h100.copy_ns(4 * MIB, to_device=to_device) for to_device in (True, False)]
    weight = [h100.copy_ns(100 * MIB, to_device=to_device) for to_device in (True, False)]
    at_home = 2 * rows[0] + rows[1] + h100.host_ns(0, 600 * MIB)
    on_device = 2 * weight[0] + weight[1] + h100.kernel_ns(0, 300 * MIB, "")
    assert f"{at_home / 1e6:.2f} ms for it on the CPU, {on_device / 1e6:.2f} ms on the device" in reason
    assert plan_lookups({0: TRAINED}, MACHINES["h100"], GIB)[0] == {0: "home"}


def test_an_embedding_for_which_the_device_has_no_room_stays_at_home():
    slow = MACHINES["h100"].with_cores(16)
    assert plan_lookups({0: TRAINED}, slow, 100 * MIB)[0] == {0: "device"}
    chosen, reason = plan_lookups({0: TRAINED}, slow, 100 * MIB - 1)
    assert chosen == {0: "home"}
    assert "(1 of them because the device has no room)" in reason


def test_all_at_home_on_the_device_if_it_fits():
    plan = place(make_chunks(3), device_nbytes=2150, host_nbytes=0, working_set_nbytes=200, workspace_nbytes=50)
    assert plan.device == {0, 1, 2}
    assert (
        plan.reasons["first homes"] == "all model data (2.05 KiB) is at home on the device: it fits the device budget"
    )


def test_of_equal_chunks_those_first_in_order_leave():
    assert spill(make_chunks(4), Tiers(2 * 728, 9999, [])) == {2, 3}
    assert spill(make_chunks(4), Tiers(2 * 728, 9999, []), [1, 3, 0, 2]) == {1, 3}


@pytest.mark.parametrize("host_nbytes", range(8, 24, 2))
def test_more_of_the_disk_never_makes_a_model_too_large(host_nbytes):
    """Chunks whose states may be on the disk may live on the device all the same."""
    chunks = [ChunkBytes(index, 2, 2, 6, list_nbytes=6) for index in range(10)]
    needs = [(2, frozenset({index})) for index in range(10)]
    found = [plan_homes(chunks, Tiers(host_nbytes, 50, needs, disk_nbytes=disk)) for disk in (30, 60, 1000)]
    for homes in found:
        assert homes.device.isdisjoint(homes.disk)
        left = set(range(10)) - homes.device
        assert sum(8 - 6 * (index in homes.disk) for index in left) <= host_nbytes
    assert {len(homes.disk) for homes in found} == {len(found[0].disk)}
