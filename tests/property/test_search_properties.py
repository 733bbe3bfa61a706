import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.spec_builders import make_modules, make_tensors

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.layout import search
from hf_patrickstar.layout.packing import pack
from hf_patrickstar.layout.search import fixed_layout, search_layout
from hf_patrickstar.units import align

ITEMSIZE = 2
fast = settings(deadline=None, max_examples=100, database=None, derandomize=True)


@st.composite
def models(draw):
    """Tensors, the modules that own them in runs, and a set of tensors on the host."""
    numels = draw(st.lists(st.integers(1, 1500), min_size=1, max_size=14))
    frozen = draw(st.frozensets(st.integers(0, len(numels) - 1), max_size=4))
    groups, start = [], 0
    while start < len(numels):
        stop = min(start + draw(st.integers(1, 4)), len(numels))
        groups.append(range(start, stop))
        start = stop
    on_host = draw(st.frozensets(st.integers(0, len(numels) - 1), max_size=2))
    return make_tensors(*numels, frozen=frozen), make_modules(*groups), on_host


def least_need(tensors, modules, on_host):
    """Bytes that no layout can do without."""
    movable = [[align(tensors[i].numel) for i in module.tensor_indices if i not in on_host] for module in modules]
    return max(sum(numels) for numels in movable) * ITEMSIZE


def candidates(tensors, modules, on_host):
    """What the search looks at, as its docstring says it, found another way: size -> utilisation, working set."""
    total = sum(align(spec.numel) for spec in tensors if spec.index not in on_host)
    sizes = {align(-(-total // parts)) for parts in range(1, search.MAX_CANDIDATES + 1)} - {0}
    sizes |= {align(spec.numel) for spec in tensors}
    if not total:
        sizes.add(align(1))
    found = {}
    for size in sizes:
        layout = pack(tensors, size, on_host)
        capacity = sum(chunk.capacity_numel for chunk in layout.chunks)
        found[size] = (
            sum(spec.numel for spec in tensors) / capacity,
            layout.working_set_nbytes(modules)[0],
        )
    return found


@st.composite
def searches(draw):
    tensors, modules, on_host = draw(models())
    least = least_need(tensors, modules, on_host)
    budget = draw(st.none() | st.integers(least, 20 * least + 1) | st.integers(0, least))
    return tensors, modules, on_host, budget


@fast
@given(searches())
def test_within_the_budget_or_refused(case):
    tensors, modules, on_host, budget = case
    least = least_need(tensors, modules, on_host)
    if budget is not None and budget < least:
        with pytest.raises(BudgetError, match=f"at least {least} bytes"):
            search_layout(tensors, modules, budget, on_host)
        return
    choice = search_layout(tensors, modules, budget, on_host)
    assert choice.working_set_nbytes == choice.layout.working_set_nbytes(modules)[0]
    assert choice.working_set_nbytes >= least
    assert budget is None or choice.working_set_nbytes <= budget


@fast
@given(searches())
def test_never_worse_than_brute_force(case):
    tensors, modules, on_host, budget = case
    found = candidates(tensors, modules, on_host)
    fitting = {size: item for size, item in found.items() if budget is None or item[1] <= budget}
    if not fitting:
        with pytest.raises(BudgetError):
            search_layout(tensors, modules, budget, on_host)
        return
    choice = search_layout(tensors, modules, budget, on_host)
    size = choice.layout.chunk_numel
    assert choice.num_candidates == len(found)
    assert fitting[size] == (choice.layout.utilisation, choice.working_set_nbytes)
    preferred = fitting
    if budget is not None:
        total = sum(align(spec.numel) for spec in tensors if spec.index not in on_host)
        most = max(total // 16, align(1))
        preferred = {size: item for size, item in fitting.items() if size * ITEMSIZE * 8 <= budget and size <= most}
    if not preferred:
        assert choice.working_set_nbytes == min(need for _, need in fitting.values())
        return
    best = max(utilisation for utilisation, _ in preferred.values())
    assert size == max(size for size, (utilisation, _) in preferred.items() if utilisation >= best - 0.005)


@fast
@given(searches())
def test_more_budget_never_turns_a_layout_into_a_refusal(case):
    tensors, modules, on_host, budget = case
    if budget is None:
        return
    try:
        need = search_layout(tensors, modules, budget, on_host).working_set_nbytes
    except BudgetError as error:
        need = int(str(error).split("at least ")[1].split(" bytes")[0])
    assert search_layout(tensors, modules, max(need, budget), on_host).working_set_nbytes <= max(need, budget)


@fast
@given(searches(), st.integers(64, 3000))
def test_a_fixed_size_is_kept_or_refused(case, chunk_numel):
    tensors, modules, on_host, budget = case
    layout = pack(tensors, chunk_numel, on_host)
    need = layout.working_set_nbytes(modules)[0]
    if budget is not None and need > budget:
        with pytest.raises(BudgetError, match=f"at least {need} bytes"):
            fixed_layout(tensors, modules, chunk_numel, budget, on_host)
    else:
        choice = fixed_layout(tensors, modules, chunk_numel, budget, on_host)
        assert (choice.layout, choice.working_set_nbytes) == (layout, need)
