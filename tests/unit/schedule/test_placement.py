import pytest

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.schedule.placement import ChunkBytes, plan_homes, plan_lookups, plan_margin
from hf_patrickstar.schedule.trace import Trace, Visit


def make_chunks(count, param=100, host_param=128, state=600, on_host=()):
    return [ChunkBytes(index, param, host_param, state, index in on_host) for index in range(count)]


def test_bytes_on_either_tier():
    chunk = ChunkBytes(0, 100, 128, 600)
    assert (chunk.device_nbytes, chunk.host_nbytes) == (700, 728)


def test_all_at_home_on_the_device_if_it_fits():
    plan = plan_homes(make_chunks(3), device_nbytes=2150, host_nbytes=0, working_set_nbytes=200, workspace_nbytes=50)
    assert plan.device_homed == {0, 1, 2}
    assert plan.reason == "all model data (2.05 KiB) is at home on the device: it fits the device budget"


def test_the_workspace_must_fit_too():
    plan = plan_homes(make_chunks(3), device_nbytes=2149, host_nbytes=9999, working_set_nbytes=200, workspace_nbytes=50)
    assert plan.device_homed == frozenset()


def test_at_home_on_the_host_otherwise():
    plan = plan_homes(make_chunks(3), device_nbytes=1000, host_nbytes=2234, working_set_nbytes=200, workspace_nbytes=50)
    assert plan.device_homed == frozenset()
    assert plan.reason == "model data (2.18 KiB) is at home on the host, chunks move to the device"


def test_the_last_chunks_move_home_when_the_host_is_full():
    plan = plan_homes(make_chunks(4), device_nbytes=1000, host_nbytes=2300, working_set_nbytes=200, workspace_nbytes=0)
    assert plan.device_homed == {3}
    assert plan.reason == "1 of 4 chunks are at home on the device: the host is full"


def test_as_many_as_needed_move_and_no_more():
    chunks = make_chunks(5)
    homed = [len(plan_homes(chunks, 3000, 728 * num_on_host, 200, 0).device_homed) for num_on_host in (5, 4, 3, 2)]
    assert homed == [0, 1, 2, 3]


def test_a_chunk_that_does_not_fit_beside_the_working_set_is_passed_over():
    chunks = [ChunkBytes(0, 100, 100, 200), ChunkBytes(1, 100, 100, 900)]
    plan = plan_homes(chunks, device_nbytes=600, host_nbytes=1000, working_set_nbytes=200, workspace_nbytes=0)
    assert plan.device_homed == {0}


def test_too_small_together():
    with pytest.raises(BudgetError) as caught:
        plan_homes(make_chunks(4), device_nbytes=1000, host_nbytes=2000, working_set_nbytes=200, workspace_nbytes=0)
    message = str(caught.value)
    assert message.startswith("host_budget is too small for the model data: 2.13 KiB (2184 bytes) needed on the host")
    assert "1.95 KiB (2000 bytes) available, after 1 of 4 chunks were given a home on the device" in message
    assert "200 B (200 bytes) is the largest working set" in message
    assert message.endswith("Raise host_budget by at least 184 bytes, or device_budget.")


def test_the_advice_of_the_error_is_enough():
    plan = plan_homes(make_chunks(4), device_nbytes=1000, host_nbytes=2184, working_set_nbytes=200, workspace_nbytes=0)
    assert plan.device_homed == {3}


def test_chunks_of_the_host_never_move_home():
    chunks = make_chunks(3, on_host={1})
    assert plan_homes(chunks, 9999, 9999, 200, 0).device_homed == {0, 2}
    assert plan_homes(chunks, 1400, 728, 0, 0).device_homed == {0, 2}


def test_chunks_of_the_host_need_the_host_even_if_the_rest_fits_the_device():
    with pytest.raises(BudgetError, match=r"728 B \(728 bytes\) needed on the host"):
        plan_homes(make_chunks(3, on_host={1}), 9999, 727, 200, 0)


def test_the_workspace_of_host_chunks_is_kept_free_on_the_host():
    """The others are at home on the device, but the optimizer updates this one on the host."""
    chunks = make_chunks(2, on_host={0})
    with pytest.raises(BudgetError):
        plan_homes(chunks, device_nbytes=800, host_nbytes=777, working_set_nbytes=100, workspace_nbytes=50)
    plan = plan_homes(chunks, device_nbytes=800, host_nbytes=778, working_set_nbytes=100, workspace_nbytes=50)
    assert plan.device_homed == {1}


def test_the_workspace_of_device_homed_chunks_is_kept_free_on_the_device():
    """The optimizer works where a chunk is at home, so one that moves home takes scratch space with it."""
    with pytest.raises(BudgetError):
        plan_homes(make_chunks(2), device_nbytes=900, host_nbytes=800, working_set_nbytes=200, workspace_nbytes=50)
    plan = plan_homes(make_chunks(2), device_nbytes=950, host_nbytes=800, working_set_nbytes=200, workspace_nbytes=50)
    assert plan.device_homed == {1}


def test_nothing_to_place():
    assert plan_homes([], 0, 0, 0, 0).device_homed == frozenset()


# The device margin: chunks of 100 bytes, 700 with their optimizer states


def make_trace(*rows, sizes=(100,) * 5):
    """A trace of (chunk, pinned chunks, bytes of others)."""
    return Trace("training", sizes, tuple(Visit(chunk, tuple(pinned), others) for chunk, pinned, others in rows))


SWEEP = make_trace((0, (), 50), (1, (), 50), (2, (), 50), (1, (), 50), (0, (), 50))


def margin_of(device_nbytes, trace=SWEEP, count=3, prefetch=0, **settings):
    return set(plan_margin(make_chunks(count), [trace], device_nbytes, prefetch, **settings).device_homed)


def test_as_many_first_layers_move_into_the_margin_as_leave_room_for_the_rest():
    """Each takes 700; the others still need 100 for the chunk that is computed with, and 50 are not chunks."""
    assert margin_of(849) == set()
    assert margin_of(850) == {0}
    assert margin_of(1549) == {0}
    assert margin_of(1550) == {0, 1}


def test_the_last_chunk_needs_no_room_to_move_any_more():
    assert margin_of(2149) == {0, 1}
    assert margin_of(2150) == {0, 1, 2}


def test_the_order_is_that_of_the_first_visit_in_any_trace():
    trace = make_trace((2, (), 0), (0, (), 0), (1, (), 0), (2, (), 0))
    assert margin_of(800, trace) == {2}
    assert margin_of(1500, trace) == {2, 0}
    other = make_trace((1, (), 0), (2, (), 0), (0, (), 0))
    chunks = make_chunks(3)
    assert plan_margin(chunks, [trace, other], 800, 0).device_homed == {1}, "as early as chunk 2, and before it"
    assert plan_margin(chunks[::-1], [trace, other], 1500, 0).device_homed == {1, 2}


def test_chunks_that_are_never_visited_come_last():
    trace = make_trace((1, (), 0), (2, (), 0))
    assert margin_of(1500, trace) == {1, 2}
    assert margin_of(2099, trace) == {1, 2}
    assert margin_of(2100, trace) == {0, 1, 2}


def test_the_first_that_does_not_fit_ends_it():
    """A smaller one behind it would fit, but its copies are easier to hide."""
    chunks = [ChunkBytes(0, 100, 128, 600), ChunkBytes(1, 100, 128, 2000), ChunkBytes(2, 100, 128, 0)]
    assert plan_margin(chunks, [SWEEP], 1500, 0).device_homed == {0}


def test_chunks_in_use_together_need_room_together():
    trace = make_trace((0, (), 50), (1, (0,), 50), (2, (0, 1), 50))
    assert margin_of(949, trace) == set()
    assert margin_of(950, trace) == {0}, "at the last moment 1 and 2 move, 0 does not"
    assert margin_of(1549, trace) == {0}
    assert margin_of(1550, trace) == {0, 1}


def test_every_moment_of_every_trace_must_have_room():
    flood = make_trace((0, (), 0), (1, (), 400), (2, (), 0))
    assert margin_of(1199, flood) == set()
    assert margin_of(1200, flood) == {0}
    chunks = make_chunks(3)
    assert plan_margin(chunks, [SWEEP, flood], 1199, 0).device_homed == frozenset()
    assert plan_margin(chunks, [flood, SWEEP], 1200, 0).device_homed == {0}


def test_room_for_what_is_brought_in_ahead_is_kept():
    assert margin_of(949, prefetch=100) == set()
    assert margin_of(950, prefetch=100) == {0}
    assert margin_of(2250, prefetch=100) == {0, 1, 2}


def test_bytes_that_chunks_may_not_take():
    """They are not added to what others take: others may take them."""
    assert margin_of(850, unusable_nbytes=50) == {0}
    assert margin_of(850, unusable_nbytes=51) == set()
    assert margin_of(1000, unusable_nbytes=200) == {0}


def test_chunks_at_home_on_the_device_are_passed_over_and_need_no_room():
    assert margin_of(849, kept=frozenset({0})) == set()
    assert margin_of(850, kept=frozenset({0})) == {1}
    assert margin_of(750, make_trace((0, (1,), 50)), count=2, kept=frozenset({0})) == {1}


def test_chunks_of_the_host_stay_there():
    chunks = make_chunks(3, on_host={0})
    assert plan_margin(chunks, [SWEEP], 850, 0).device_homed == {1}


def test_the_reason_of_a_margin():
    plan = plan_margin(make_chunks(3), [SWEEP], 1024 + 150, 0)
    assert plan.reason == (
        "1 of 3 chunks live in the device margin (700 B of 1.00 KiB that non-model data and working chunks leave "
        "free), the first layers first"
    )
    assert "(0 B of 0 B that" in plan_margin(make_chunks(3), [SWEEP], 100, 0).reason


def test_sizes_come_from_the_trace_where_a_chunk_may_not_move_home():
    """Chunk 4 is frozen: it is no candidate, but takes room whenever it is visited."""
    trace = make_trace((0, (), 0), (4, (), 0), sizes=(100, 100, 100, 100, 300))
    chunks = make_chunks(1)
    assert plan_margin(chunks, [trace], 999, 0).device_homed == frozenset()
    assert plan_margin(chunks, [trace], 1000, 0).device_homed == {0}


# Lookups


def test_embeddings_with_fewer_rows_in_use_than_weights_are_looked_up_at_home():
    plan = plan_lookups({0: 3072, 3: 1024, 5: 1024}, {0: 1024, 3: 1024, 5: 1025})
    assert plan.at_home == {0}
    assert plan.reason == (
        "cpu_embedding=auto: 1 of 3 untied embeddings are looked up on the CPU: weights of 5.00 KiB against 3.00 KiB "
        "of rows per micro-batch"
    )


def test_no_embeddings_to_decide_about():
    assert plan_lookups({}, {}).at_home == frozenset()
