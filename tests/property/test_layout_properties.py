"""Laws of layouts, for one process and for several; tests/unit/layout has layouts worked out by hand."""

import itertools
import re

from hypothesis import given, settings
from hypothesis import strategies as st
from support.spec_builders import fixed_layout, make_modules, make_tensors, pack, search_layout

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.layout import filling
from hf_patrickstar.layout.packing import gradients_nbytes
from hf_patrickstar.units import ALIGNMENT_NUMEL, align

fast = settings(deadline=None, max_examples=150, database=None, derandomize=True)


def room(spec, world_size=2):
    """Elements that a tensor takes; one rank of several owns the offset of an empty one."""
    return max(align(spec.numel), ALIGNMENT_NUMEL if world_size > 1 else 0)


@st.composite
def packings(draw):
    """Tensors, those on the host, and a layout for some processes."""
    numels = draw(st.lists(st.integers(0, 2000) | st.sampled_from([0, 64, 128, 5000]), max_size=25))
    indices = st.frozensets(st.integers(0, max(len(numels) - 1, 0)))
    tensors = make_tensors(*numels, frozen=draw(indices))
    world_size = draw(st.sampled_from([1, 1, 2, 3, 5, 9]))
    on_host = draw(indices) & frozenset(range(len(numels))) if world_size == 1 else frozenset()
    return tensors, on_host, pack(tensors, draw(st.integers(1, 4000)), on_host, world_size)


@fast
@given(packings())
def test_every_tensor_lies_aligned_as_a_whole_in_the_part_of_one_rank_of_one_chunk_of_its_kind(packing):
    tensors, on_host, layout = packing
    listed = [index for chunk in layout.chunks for index in chunk.tensor_indices]
    assert sorted(listed) == list(range(len(tensors)))
    assert [place.tensor_index for place in layout.placements] == list(range(len(tensors)))
    for chunk in layout.chunks:
        assert {tensors[index].trainable for index in chunk.tensor_indices} == {chunk.trainable}
        assert {layout.placements[index].chunk_index for index in chunk.tensor_indices} == {chunk.index}
        assert chunk.on_host == bool(on_host & set(chunk.tensor_indices))
        assert chunk.used_numel == sum(tensors[index].numel for index in chunk.tensor_indices)
        assert chunk.chunk_numel % ALIGNMENT_NUMEL == 0
        assert chunk.capacity_numel == chunk.chunk_numel * chunk.world_size
        largest = max(room(tensors[index]) for index in chunk.tensor_indices)
        assert largest <= chunk.chunk_numel <= max(layout.chunk_numel, largest)
        end = 0
        for index in chunk.tensor_indices:
            offset, numel = layout.placements[index].offset_numel, tensors[index].numel
            assert offset % ALIGNMENT_NUMEL == 0
            assert offset >= end
            end = offset + numel
            assert not numel or offset // chunk.chunk_numel == (end - 1) // chunk.chunk_numel
        assert end <= chunk.capacity_numel
    firsts = [min(chunk.tensor_indices) for chunk in layout.chunks]
    assert firsts == sorted(firsts)
    assert [chunk.index for chunk in layout.chunks] == list(range(len(firsts)))
    assert 0 <= layout.utilisation <= 1
    own = [chunk.capacity_numel for chunk in layout.chunks if chunk.trainable]
    waiting = 2 * max(map(sum, itertools.combinations([*own, 0, 0], 2)))
    assert gradients_nbytes(layout.chunks) == (waiting if layout.chunks and layout.chunks[0].world_size > 1 else 0)


@fast
@given(st.lists(st.integers(0, 2000), min_size=1, max_size=40), st.integers(2, 9))
def test_a_cut_group_is_as_small_as_its_tensors_allow_or_nearly(sizes, world_size):
    """Largest first is never worse than 4/3 of the best; and no larger than what was asked for."""
    tensors = make_tensors(*sizes)
    total = sum(map(room, tensors))
    (chunk,) = pack(tensors, total, world_size=world_size).chunks
    largest = max(map(room, tensors))
    least = max(align(-(-total // world_size)), largest)
    assert least <= chunk.chunk_numel <= total
    step = align(-(-least // filling.CUT_STEPS))
    assert chunk.chunk_numel < -(-total // world_size) + largest + step + ALIGNMENT_NUMEL


@st.composite
def searches(draw):
    """Tensors, the modules that own them in runs, a set of tensors on the host, processes, and a budget."""
    numels = draw(st.lists(st.integers(1, 1500), min_size=1, max_size=14))
    bounds = sorted({0, len(numels), *draw(st.lists(st.integers(0, len(numels)), max_size=4))})
    world_size = draw(st.sampled_from([1, 1, 2, 4]))
    some = st.frozensets(st.integers(0, len(numels) - 1), max_size=min(2, len(numels) - 1))
    on_host = draw(some) if world_size == 1 else frozenset()
    modules = make_modules(*(range(*pair) for pair in itertools.pairwise(bounds)))
    staged = draw(st.sampled_from([0, 1, 3]))
    settings = {"on_host": on_host, "world_size": world_size, "staging_nbytes": lambda numel, dtype: staged * numel}
    return make_tensors(*numels), modules, draw(st.none() | st.integers(0, 60_000)), settings


def advised(error):
    return int(re.search(r"at least (\d+) bytes", str(error))[1])


@fast
@given(searches(), st.integers(64, 3000))
def test_a_search_keeps_to_the_budget_or_names_one_that_is_enough(case, chunk_numel):
    tensors, modules, budget, settings = case
    for search in (search_layout, fixed_layout):
        given_ = (tensors, modules) if search is search_layout else (tensors, modules, chunk_numel)
        try:
            choice = search(*given_, budget, **settings)
        except BudgetError as error:
            least = advised(error)
            assert least > budget
            choice = search(*given_, least, **settings)
            assert choice.working_set_nbytes == least
        else:
            assert budget is None or choice.working_set_nbytes <= budget
        layout = choice.layout
        scratch = settings["staging_nbytes"](max(chunk.chunk_numel for chunk in layout.chunks), "")
        beside = gradients_nbytes(layout.chunks) + scratch
        assert choice.working_set_nbytes == layout.working_set_nbytes(modules)[0] + beside
