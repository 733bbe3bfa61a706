"""Laws of packing for several processes."""

import itertools
import re

from hypothesis import given, settings
from hypothesis import strategies as st
from unit.spec_builders import make_modules, make_tensors

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.layout import groups
from hf_patrickstar.layout.packing import pack
from hf_patrickstar.layout.search import search_layout
from hf_patrickstar.layout.specs import Types
from hf_patrickstar.units import ALIGNMENT_NUMEL, align

fast = settings(deadline=None, max_examples=100, database=None, derandomize=True)
KIND = (True, 0, Types("bfloat16", "float32"))
numels = st.lists(st.integers(0, 2000) | st.sampled_from([0, 64, 128, 5000]), max_size=30)


def owner(layout, tensor_index):
    """The rank in whose chunk a tensor lies; with one process an empty one may stand at the very end of its chunk."""
    place = layout.placements[tensor_index]
    chunk = layout.chunks[place.chunk_index]
    return min(place.offset_numel // chunk.chunk_numel, chunk.world_size - 1)


@st.composite
def packings(draw):
    sizes = draw(numels)
    tensors = make_tensors(*sizes, frozen=draw(st.frozensets(st.integers(0, max(len(sizes) - 1, 0)))))
    return tensors, pack(tensors, draw(st.integers(1, 4000)), world_size=draw(st.integers(2, 9)))


def room(spec):
    return max(align(spec.numel), ALIGNMENT_NUMEL)


def pieces_of(tensors):
    return [groups.Piece(spec.index, room(spec)) for spec in tensors]


def bins_of(layout, chunk):
    """Per rank the tensors in its part of a group, as (offset in the part, elements)."""
    bins = [[] for _ in range(chunk.world_size)]
    for index in chunk.tensor_indices:
        rank, offset = divmod(layout.placements[index].offset_numel, chunk.chunk_numel)
        bins[rank].append((offset, layout.tensors[index].numel))
    return bins


@fast
@given(packings())
def test_every_tensor_is_in_exactly_one_group(case):
    tensors, layout = case
    listed = [index for chunk in layout.chunks for index in chunk.tensor_indices]
    assert sorted(listed) == list(range(len(tensors)))
    assert [place.tensor_index for place in layout.placements] == list(range(len(tensors)))
    for chunk in layout.chunks:
        assert {tensors[index].trainable for index in chunk.tensor_indices} == {chunk.trainable}
        assert {layout.placements[index].chunk_index for index in chunk.tensor_indices} == {chunk.index}
        assert chunk.used_numel == sum(tensors[index].numel for index in chunk.tensor_indices)
    firsts = [min(chunk.tensor_indices) for chunk in layout.chunks]
    assert firsts == sorted(firsts)
    assert [chunk.index for chunk in layout.chunks] == list(range(len(firsts)))
    assert 0 <= layout.utilisation <= 1


@fast
@given(packings())
def test_tensors_lie_aligned_as_a_whole_in_the_part_of_their_owner(case):
    _tensors, layout = case
    for chunk in layout.chunks:
        assert chunk.capacity_numel == chunk.chunk_numel * chunk.world_size
        assert chunk.chunk_numel % ALIGNMENT_NUMEL == 0
        for rank, own in enumerate(bins_of(layout, chunk)):
            assert own == sorted(own)
            for offset, numel in own:
                assert offset % ALIGNMENT_NUMEL == 0
                assert offset + numel <= chunk.chunk_numel
            for (left, numel), (right, _) in itertools.pairwise(own):
                assert left + numel <= right
                assert left < right
            first = rank * chunk.chunk_numel
            for index in chunk.tensor_indices:
                inside = first <= layout.placements[index].offset_numel < first + chunk.chunk_numel
                assert inside == (owner(layout, index) == rank)
        offsets = [layout.placements[index].offset_numel for index in chunk.tensor_indices]
        assert offsets == sorted(offsets)


@fast
@given(packings())
def test_bins_are_no_larger_than_asked_for_or_than_their_largest_tensor(case):
    tensors, layout = case
    for chunk in layout.chunks:
        largest = max(room(tensors[index]) for index in chunk.tensor_indices)
        assert largest <= chunk.chunk_numel <= max(layout.chunk_numel, largest)


@fast
@given(packings())
def test_a_group_is_a_run_of_neighbours_of_its_kind(case):
    tensors, layout = case
    for kind in (True, False):
        runs = [sorted(chunk.tensor_indices) for chunk in layout.chunks if chunk.trainable == kind]
        assert [index for run in runs for index in run] == [s.index for s in tensors if s.trainable == kind]


@fast
@given(packings())
def test_a_group_of_the_asked_for_size_that_others_follow_had_no_room_for_the_next(case):
    """Groups that were cut, or made larger, have other sizes; a group filled backwards can only take more."""
    tensors, layout = case
    for kind in (True, False):
        own = [chunk for chunk in layout.chunks if chunk.trainable == kind]
        for left, right in itertools.pairwise(own[:-1]):
            if left.chunk_numel == layout.chunk_numel:
                following = room(tensors[min(right.tensor_indices)])
                ends = [sum(max(align(n), ALIGNMENT_NUMEL) for _, n in part) for part in bins_of(layout, left)]
                assert all(end + following > left.chunk_numel for end in ends)


@fast
@given(st.lists(st.integers(0, 2000), min_size=1, max_size=40), st.integers(2, 9))
def test_a_cut_group_is_as_small_as_its_tensors_allow_or_nearly(sizes, world_size):
    """Largest first is never worse than 4/3 of the best; and no larger than what was asked for."""
    tensors = make_tensors(*sizes)
    total = sum(map(room, tensors))
    layout = pack(tensors, total, world_size=world_size)
    (chunk,) = layout.chunks
    largest = max(map(room, tensors))
    least = max(align(-(-total // world_size)), largest)
    assert least <= chunk.chunk_numel <= total
    step = align(-(-least // groups.CUT_STEPS))
    assert chunk.chunk_numel < -(-total // world_size) + largest + step + ALIGNMENT_NUMEL
    if chunk.chunk_numel > least:
        ordered = sorted(pieces_of(tensors), key=lambda piece: piece.room, reverse=True)
        smaller = groups.Group.of(KIND, world_size, chunk.chunk_numel - step)
        assert not all(smaller.add(piece) for piece in ordered)


@fast
@given(packings())
def test_cutting_never_wastes_more(case):
    tensors, layout = case
    for kind in (True, False):
        own = [spec for spec in tensors if spec.trainable == kind]
        if own:
            filled = groups.fill_groups(KIND, pieces_of(own), layout.chunk_numel, layout.chunks[0].world_size)
            uncut = sum(group.capacity_numel for group in filled)
            cut = sum(chunk.capacity_numel for chunk in layout.chunks if chunk.trainable == kind)
            assert cut <= uncut


@fast
@given(numels, st.integers(1, 4000), st.frozensets(st.integers(0, 29)))
def test_one_process_packs_as_ever(sizes, chunk_numel, frozen):
    tensors = make_tensors(*sizes, frozen=frozen)
    layout = pack(tensors, chunk_numel, world_size=1)
    assert layout == pack(tensors, chunk_numel)
    assert all(chunk.world_size == 1 and chunk.chunk_numel == chunk.capacity_numel for chunk in layout.chunks)
    assert all(owner(layout, index) == 0 for index in range(len(tensors)))


@fast
@given(packings())
def test_gradients_that_wait_are_those_of_two_groups_at_most(case):
    _tensors, layout = case
    own = [chunk.capacity_numel for chunk in layout.chunks if chunk.trainable]
    pairs = itertools.combinations([*own, 0, 0], 2)
    assert layout.gradients_nbytes == 2 * max(map(sum, pairs))


@settings(fast, max_examples=40)
@given(
    st.lists(st.integers(1, 1500), min_size=1, max_size=14),
    st.integers(2, 5),
    st.integers(0, 60_000),
    st.sampled_from([0, 1, 3]),
)
def test_a_search_keeps_to_the_budget_and_decides_the_same_again(sizes, world_size, budget, staged):
    tensors = make_tensors(*sizes)
    modules = make_modules(*[(spec.index,) for spec in tensors])

    def search(nbytes):
        return search_layout(
            tensors, modules, nbytes, world_size=world_size, staging_nbytes=lambda numel, dtype: staged * numel
        )

    try:
        choice = search(budget)
    except BudgetError as error:
        least = int(re.search(r"at least (\d+) bytes", str(error))[1])
        assert least > budget
        assert search(least).working_set_nbytes == least
        return
    layout = choice.layout
    scratch = staged * max(chunk.chunk_numel for chunk in layout.chunks)
    beside = layout.gradients_nbytes + scratch
    assert choice.working_set_nbytes == layout.working_set_nbytes(modules)[0] + beside <= budget
    assert choice == search(budget)
