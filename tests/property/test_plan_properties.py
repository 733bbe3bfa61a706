"""Plans replayed by an interpreter that knows nothing of how they were made."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.schedule.eviction import Chooser
from hf_patrickstar.schedule.move_plan import make_plan
from hf_patrickstar.schedule.trace import Trace, Visit

NUM_CHUNKS = 6
DEPTHS = range(5)
fast = settings(deadline=None, max_examples=300, derandomize=True, database=None)


@dataclasses.dataclass
class Case:
    """What ``make_plan`` is given."""

    trace: Trace
    capacities: list[int]
    policy: str
    resident: dict[int, int]
    dropped_after: frozenset[int]
    static: frozenset[int]

    def plan(self, depth):
        return make_plan(
            self.trace,
            self.capacities,
            Chooser(self.policy),
            self.resident,
            dropped_after=self.dropped_after,
            static=self.static,
            prefetch_depth=depth,
        )

    def needs(self):
        """Bytes in use at each moment, whatever the policy does."""
        return [
            sum(self.trace.chunk_nbytes[index] for index in {visit.chunk_index, *visit.pinned} - self.static)
            for visit in self.trace.visits
        ]


@st.composite
def traces(draw):
    """Each visit keeps its chunk in use over some of the following moments, as a module does."""
    sizes = tuple(draw(st.lists(st.integers(1, 40), min_size=NUM_CHUNKS, max_size=NUM_CHUNKS)))
    chunks = draw(st.lists(st.integers(0, NUM_CHUNKS - 1), min_size=1, max_size=16))
    in_use_until = [moment + draw(st.sampled_from([0, 0, 0, 1, 2, 5])) for moment in range(len(chunks))]
    visits = []
    for moment, chunk in enumerate(chunks):
        pinned = {other for other, until in zip(chunks[:moment], in_use_until, strict=False) if until >= moment}
        visits.append(Visit(chunk, tuple(sorted(pinned - {chunk}))))
    return Trace("t", sizes, tuple(visits))


slacks = st.integers(0, 30) | st.integers(0, 150)


@st.composite
def cases(draw, slack=slacks):
    trace = draw(traces())
    static = draw(st.frozensets(st.integers(0, NUM_CHUNKS - 1), max_size=2))
    order = [index for index in draw(st.permutations(range(NUM_CHUNKS))) if index not in static]
    present = order[: draw(st.integers(0, 4))]
    resident = {index: place - len(present) for place, index in enumerate(present)}
    dropped_after = draw(st.sampled_from([frozenset(), frozenset(range(NUM_CHUNKS)), frozenset({0, 1, 2})]))
    case = Case(trace, [], draw(st.sampled_from(["belady", "lru", "list_order"])), resident, dropped_after, static)
    case.capacities = [need + draw(slack) for need in case.needs()]
    return case


def replay(case, plan, *, may_leave_and_come_back=False):
    """Follows a plan and checks every action; returns its loads in order, each with its moment."""
    sizes, there, loads = case.trace.chunk_nbytes, set(case.resident), []
    assert len(plan.moments) == len(plan.chunk_nbytes) == len(case.trace.visits)
    for moment, (visit, actions) in enumerate(zip(case.trace.visits, plan.moments, strict=True)):
        for index in actions.evict:
            assert index in there, "evicted, but not there"
            assert index not in visit.pinned, "evicted, but in use"
            assert index != visit.chunk_index or may_leave_and_come_back, "evicted, but visited"
            there.remove(index)
        for index in actions.load:
            assert index not in there, "loaded, but there"
            assert index not in case.static, "loaded, but at home there"
            there.add(index)
            loads.append((index, moment))
        assert visit.chunk_index in there | case.static, "visited, but not there"
        assert there >= set(visit.pinned) - case.static, "in use, but not there"
        nbytes = sum(sizes[index] for index in there)
        assert nbytes == plan.chunk_nbytes[moment]
        assert nbytes <= case.capacities[moment]
    assert set(plan.resident) == there
    return loads


def first_use(case, index, moment):
    """When a chunk that was loaded at a moment is visited."""
    visits = case.trace.visits
    return next(later for later in range(moment, len(visits)) if visits[later].chunk_index == index)


@fast
@given(cases(), st.sampled_from(DEPTHS))
def test_a_plan_can_be_followed(case, depth):
    plan = case.plan(depth)
    loads = replay(case, plan)
    assert plan.num_loads == len(loads)
    assert plan.num_evictions == len(case.resident) + len(loads) - len(plan.resident)
    last_visits = {visit.chunk_index: moment for moment, visit in enumerate(case.trace.visits)}
    assert plan.resident == {index: last_visits.get(index, case.resident.get(index)) for index in plan.resident}


@fast
@given(cases())
def test_prefetch_moves_not_a_byte_more(case):
    on_demand = replay(case, case.plan(0))
    assert all(case.trace.visits[moment].chunk_index == index for index, moment in on_demand)
    for depth in DEPTHS[1:]:
        plan = case.plan(depth)
        loads = replay(case, plan)
        assert [index for index, _ in loads] == [index for index, _ in on_demand]
        pairs = list(zip(loads, on_demand, strict=True))
        assert all(early <= demand for (_, early), (_, demand) in pairs)
        assert [first_use(case, *load) for load in loads] == [demand for _, demand in on_demand]
        for now in range(len(plan.moments)):
            assert sum(early <= now < demand for (_, early), (_, demand) in pairs) <= depth
        void = case.plan(0).resident.keys() - plan.resident.keys()
        assert void <= case.dropped_after, "only what the update voids leaves for a load ahead"


@fast
@given(cases(slack=st.integers(-3, 60)), st.sampled_from(DEPTHS))
def test_a_plan_is_refused_where_what_is_in_use_does_not_fit_and_nowhere_else(case, depth):
    too_small = [moment for moment, need in enumerate(case.needs()) if need > case.capacities[moment]]
    if not too_small:
        replay(case, case.plan(depth))
        return
    with pytest.raises(BudgetError, match=f"^moment {too_small[0]} of trace 't': "):
        case.plan(depth)


@fast
@given(cases(), st.frozensets(st.integers(1, 16), max_size=3), st.sampled_from(DEPTHS))
def test_what_leaves_after_forward_is_there_and_not_in_use(case, turns, depth):
    """The visited one may go and come back at once: it was done with, and is needed again."""
    trace = case.trace
    trace = dataclasses.replace(trace, forward_ends=tuple(sorted(turn for turn in turns if turn <= len(trace.visits))))
    plan = make_plan(
        trace,
        case.capacities,
        Chooser(case.policy),
        case.resident,
        dropped_after=case.dropped_after,
        static=case.static,
        prefetch_depth=depth,
        reshard_after_forward=True,
    )
    replay(dataclasses.replace(case, trace=trace), plan, may_leave_and_come_back=True)
