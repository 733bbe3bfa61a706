"""Any trace, with any number of its activations on the host."""

from hypothesis import given, settings
from hypothesis import strategies as st

from hf_patrickstar.schedule.trace import Activation, Trace, Visit, common_trace

fast = settings(deadline=None, max_examples=300, derandomize=True, database=None)


@st.composite
def calls(draw):
    """How often chunks are visited, when forward ends, and when each activation is kept, idle and needed, in order."""
    num_visits = draw(st.integers(1, 14))
    ends = draw(st.sampled_from([(), (draw(st.integers(1, num_visits)),)]))
    triples = st.lists(st.integers(0, num_visits - 1), min_size=3, max_size=3).map(sorted)
    return num_visits, ends, sorted(draw(st.lists(triples, max_size=6)))


@st.composite
def traces(draw, of=None):
    """Activations are on the device from when they are kept, beside something else."""
    num_visits, ends, moments = draw(calls() if of is None else of)
    sizes = [draw(st.integers(0, 40)) for _ in moments]
    activations = tuple(
        Activation(place, nbytes, *found) for place, (nbytes, found) in enumerate(zip(sizes, moments, strict=True))
    )
    visits = []
    for moment in range(num_visits):
        there = sum(known.nbytes for known in activations if known.kept_at <= moment)
        visits.append(Visit(moment % 3, (), there + draw(st.integers(0, 30)), draw(st.integers(0, 5))))
    return Trace("t", (8, 8, 8), tuple(visits), ((),), ends, activations)


@st.composite
def pairs(draw):
    """Two micro-batches of other inputs, which do the same."""
    same = st.just(draw(calls()))
    return draw(traces(same)), draw(traces(same))


def there_of(trace):
    return [visit.non_model_nbytes for visit in trace.visits]


@fast
@given(traces(), st.lists(st.integers(0, 8), max_size=4))
def test_any_way_to_a_number_gives_the_same_trace(trace, nums):
    found = trace
    for num in nums:
        found = found.offloading(num)
        assert found == trace.offloading(num)
        assert found.num_offloaded == min(num, len(trace.activations))
    assert found.offloading(0) == trace


@fast
@given(traces())
def test_if_more_leave_no_moment_needs_more_and_none_gains_more_than_their_bytes(trace):
    for num in range(len(trace.activations)):
        fewer, more = trace.offloading(num), trace.offloading(num + 1)
        gained = [before - after for before, after in zip(there_of(fewer), there_of(more), strict=True)]
        assert all(0 <= nbytes <= trace.activations[num].nbytes for nbytes in gained)
        last = trace.activations[num]
        for moment, nbytes in enumerate(gained):
            assert not nbytes or max(last.kept_at, last.idle_from) < moment < last.needed_at, "it was not idle"
        assert more.offloaded_nbytes == fewer.offloaded_nbytes + last.nbytes


@fast
@given(pairs(), st.integers(0, 6), st.integers(0, 6))
def test_two_traces_as_one_have_room_for_both_whatever_leaves(both, num, other_num):
    ours, theirs = both[0].offloading(num), both[1].offloading(other_num)
    for merged in (ours.merged(theirs), common_trace([ours, theirs])):
        assert merged.num_offloaded == max(ours.num_offloaded, theirs.num_offloaded)
        for count in range(len(ours.activations) + 1):
            needed = zip(*(there_of(each.offloading(count)) for each in (merged, *both)), strict=True)
            assert all(found >= max(needs) for found, *needs in needed)
