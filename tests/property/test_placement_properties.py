import dataclasses
import itertools
import statistics

from hypothesis import given, settings
from hypothesis import strategies as st

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.schedule.margin import fill_margin
from hf_patrickstar.schedule.placement import ChunkBytes, Tiers, plan_homes, spill
from hf_patrickstar.schedule.trace import Trace, Visit

fast = settings(deadline=None, max_examples=200, database=None, derandomize=True)


def place(chunks, device, host, working_set, workspace):
    return plan_homes(chunks, Tiers(host, device, [(working_set, frozenset())], workspace, workspace))


@st.composite
def chunk_lists(draw):
    chunks = []
    for index in range(draw(st.integers(0, 10))):
        param = draw(st.integers(1, 200))
        host_param = param + draw(st.integers(0, param))
        state = draw(st.sampled_from([0, 6 * param]))
        chunks.append(ChunkBytes(index, param, host_param, state, draw(st.integers(0, 4)) == 0))
    return chunks


def params_at_once(chunks):
    return st.integers(0, sum(chunk.param_nbytes for chunk in chunks if not chunk.on_host))


@st.composite
def plans(draw):
    """Chunks, budgets near to what some homes need, working set and workspace; the device holds the working set."""
    chunks = draw(chunk_lists())
    on_device = [chunk for chunk in chunks if not chunk.on_host and draw(st.booleans())]
    on_host = [chunk for chunk in chunks if chunk not in on_device]
    slack = st.integers(0, 50) | st.integers(0, 5000)
    working_set, workspace = draw(params_at_once(chunks)), draw(st.integers(0, 100))
    device = max(working_set, sum(chunk.device_nbytes for chunk in on_device)) + draw(slack)
    host = sum(chunk.host_nbytes for chunk in on_host) + draw(slack)
    return chunks, device, host, working_set, workspace


def needs(chunks, homed, working_set, workspace):
    """Bytes on the device and on the host while training: the optimizer works where trainable chunks are at home."""
    at_device = [chunk for chunk in chunks if chunk.chunk_index in homed]
    at_host = [chunk for chunk in chunks if chunk.chunk_index not in homed]
    moves = any(not chunk.on_host for chunk in at_host)
    device = sum(chunk.device_nbytes for chunk in at_device) + (working_set if moves else 0)
    host = sum(chunk.host_nbytes for chunk in at_host)
    device += workspace if any(chunk.state_nbytes for chunk in at_device) else 0
    host += workspace if any(chunk.state_nbytes for chunk in at_host) else 0
    return device, host


@fast
@given(plans())
def test_both_budgets_hold_or_it_is_refused(case):
    chunks, device, host, working_set, workspace = case
    try:
        plan = place(*case)
    except BudgetError:
        tiers = Tiers(host, device, [(working_set, frozenset())], workspace, workspace)
        assert not any(fits(chunks, homed, tiers) for homed in all_homes(chunks))
        return
    device_need, host_need = needs(chunks, plan.device, working_set, workspace)
    assert device_need <= device
    assert host_need <= host
    assert plan.device <= {chunk.chunk_index for chunk in chunks if not chunk.on_host}
    assert plan.reasons["first homes"]


def all_homes(chunks):
    """Every set of chunks that could be at home on the device."""
    movable = [chunk.chunk_index for chunk in chunks if not chunk.on_host]
    return (frozenset(some) for count in range(len(movable) + 1) for some in itertools.combinations(movable, count))


def fits(chunks, homed, tiers):
    on_host = [chunk for chunk in chunks if chunk.chunk_index not in homed]
    return tiers.on_device(chunks, homed) <= tiers.device_nbytes and tiers.on_host(on_host) <= tiers.host_nbytes


@settings(fast, max_examples=400)
@given(plans(), st.integers(0, 100))
def test_if_any_homes_fit_both_tiers_those_are_found_that_take_least_of_the_device(case, device_workspace):
    chunks, device, host, working_set, workspace = case
    tiers = Tiers(host, device, [(working_set, frozenset())], workspace, device_workspace)
    found = spill(chunks, tiers)
    fitting = [homed for homed in all_homes(chunks) if fits(chunks, homed, tiers)]
    assert (found is None) == (not fitting)
    if found is not None:
        assert found in fitting
        assert tiers.on_device(chunks, found) == min(tiers.on_device(chunks, homed) for homed in fitting)


@st.composite
def tides(draw):
    """Chunks, and two tiers of which the device needs copies of some chunks, and more, at each moment."""
    chunks, device, host, _, workspace = draw(plans())
    movable = [chunk.chunk_index for chunk in chunks if not chunk.on_host]
    moments = []
    for _ in range(draw(st.integers(1, 4))):
        in_use = draw(st.frozensets(st.sampled_from(movable), max_size=3)) if movable else frozenset()
        copies = sum(chunk.param_nbytes for chunk in chunks if chunk.chunk_index in in_use)
        moments.append((draw(st.integers(0, 100)) + copies, in_use))
    return chunks, Tiers(host, device, moments, workspace, workspace)


@settings(fast, max_examples=400)
@given(tides())
def test_homes_fit_every_moment_and_are_found_if_any_fit_beside_copies_of_all_chunks_in_use(case):
    chunks, tiers = case
    found = spill(chunks, tiers)
    assert found is None or fits(chunks, found, tiers)
    highest = max(nbytes for nbytes, _ in tiers.needs)
    roomy = dataclasses.replace(tiers, needs=[(highest, frozenset())])
    if any(fits(chunks, homed, roomy) for homed in all_homes(chunks)):
        assert found is not None


@st.composite
def margins(draw):
    """Chunks that may move into the margin, traces that visit them, and what the device has."""
    chunks = draw(chunk_lists().filter(bool))
    indices = st.integers(0, len(chunks) - 1)
    visits = st.builds(Visit, indices, st.sets(indices, max_size=3).map(tuple), st.integers(0, 300))
    sizes = tuple(chunk.param_nbytes for chunk in chunks)
    traces = [
        Trace("training", sizes, tuple(draw(st.lists(visits, min_size=1, max_size=8))))
        for _ in range(draw(st.integers(1, 3)))
    ]
    kept = draw(st.frozensets(indices, max_size=2))
    device = draw(st.integers(0, 1000) | st.integers(0, 10_000))
    ahead = draw(st.lists(st.integers(0, 200), min_size=len(chunks), max_size=len(chunks)))
    return chunks, traces, device, ahead, kept, draw(st.integers(0, 300))


def margin_need(case, homed):
    """The most bytes of any moment, if these chunks live in the margin."""
    chunks, traces, _, ahead, kept, unusable = case
    moving = {index for trace in traces for visit in trace.visits for index in (visit.chunk_index, *visit.pinned)}
    moving -= kept | homed
    fixed = max((ahead[index] for index in moving), default=0)
    fixed += sum(chunks[index].device_nbytes for index in homed)
    return fixed + max(
        max(visit.non_model_nbytes, unusable)
        + sum(chunks[index].param_nbytes for index in {visit.chunk_index, *visit.pinned} - kept - homed)
        for trace in traces
        for visit in trace.visits
    )


@fast
@given(margins())
def test_the_margin_leaves_room_at_every_moment_and_holds_the_next_chunk_no_more(case):
    chunks, traces, device, _, kept, _ = case
    homed = frozenset(fill_margin(*case))
    movable = {chunk.chunk_index for chunk in chunks} - kept
    assert homed <= movable
    if homed:
        assert margin_need(case, homed) <= device
    places = [[visit.chunk_index for visit in trace.visits] for trace in traces]
    usual = 3 * statistics.mean([chunk.param_nbytes for chunk in chunks])
    large = {index for index in movable if chunks[index].param_nbytes > usual}

    def first(index):
        return min((order.index(index) for order in places if index in order), default=999), index

    for index in large - homed:  # each had its turn beside those that came before it
        before = {other for other in large & homed if first(other) < first(index)}
        assert margin_need(case, homed & before | {index}) > device
    left_out = sorted(movable - homed - large, key=first)
    if left_out:
        assert all(first(index) < first(left_out[0]) for index in homed - large)
        assert margin_need(case, homed | {left_out[0]}) > device
