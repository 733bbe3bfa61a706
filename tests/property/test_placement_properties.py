from hypothesis import given, settings
from hypothesis import strategies as st

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.schedule.placement import ChunkBytes, plan_homes

fast = settings(deadline=None, max_examples=200, database=None, derandomize=True)


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
        plan = plan_homes(*case)
    except BudgetError:
        return
    device_need, host_need = needs(chunks, plan.device_homed, working_set, workspace)
    assert device_need <= device
    assert host_need <= host


@fast
@given(plans())
def test_only_chunks_that_move_are_given_a_home_on_the_device(case):
    try:
        plan = plan_homes(*case)
    except BudgetError:
        return
    assert plan.device_homed <= {chunk.chunk_index for chunk in case[0] if not chunk.on_host}
    assert plan.reason


@fast
@given(plans())
def test_nothing_is_refused_that_the_host_alone_or_the_device_alone_can_hold(case):
    chunks, device, host, working_set, workspace = case
    movable = frozenset(chunk.chunk_index for chunk in chunks if not chunk.on_host)
    for homed in (frozenset(), movable):
        device_need, host_need = needs(chunks, homed, working_set, workspace)
        # The plan reserves the workspace wherever chunks might be; a refusal within that much is no fault.
        if device_need + workspace <= device and host_need + workspace <= host:
            plan_homes(*case)


@fast
@given(plans(), st.integers(0, 500))
def test_more_host_memory_never_moves_more_chunks_home(case, more):
    chunks, device, host, working_set, workspace = case
    try:
        homed = plan_homes(*case).device_homed
    except BudgetError:
        return
    richer = plan_homes(chunks, device, host + more, working_set, workspace).device_homed
    movable = {chunk.chunk_index for chunk in chunks if not chunk.on_host}
    assert richer == movable or len(richer) <= len(homed)


@fast
@given(plans())
def test_what_the_refusal_advises_is_enough(case):
    chunks, device, host, working_set, workspace = case
    try:
        plan_homes(*case)
    except BudgetError as error:
        advised = int(str(error).split("Raise host_budget by at least ")[1].split(" bytes")[0])
        assert advised > 0
        plan_homes(chunks, device, host + advised, working_set, workspace)
