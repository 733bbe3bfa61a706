import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from unit.spec_builders import make_modules, make_tensors

from hf_patrickstar.layout.packing import pack
from hf_patrickstar.units import ALIGNMENT_NUMEL, align

fast = settings(deadline=None, max_examples=100, database=None, derandomize=True)


@st.composite
def packings(draw):
    numels = draw(st.lists(st.integers(0, 2000), max_size=25))
    indices = st.frozensets(st.integers(0, max(len(numels) - 1, 0)))
    tensors = make_tensors(*numels, frozen=draw(indices))
    on_host = draw(indices) & frozenset(range(len(numels)))
    return tensors, pack(tensors, draw(st.integers(1, 4000)), on_host), on_host


@fast
@given(packings())
def test_every_tensor_is_in_exactly_one_chunk(packing):
    tensors, layout, _ = packing
    listed = [index for chunk in layout.chunks for index in chunk.tensor_indices]
    assert sorted(listed) == list(range(len(tensors)))
    assert [place.tensor_index for place in layout.placements] == list(range(len(tensors)))
    for place in layout.placements:
        assert place.tensor_index in layout.chunks[place.chunk_index].tensor_indices


@fast
@given(packings())
def test_tensors_are_aligned_in_order_and_do_not_overlap(packing):
    tensors, layout, _ = packing
    for chunk in layout.chunks:
        end = 0
        for index in chunk.tensor_indices:
            offset = layout.placements[index].offset_numel
            assert offset % ALIGNMENT_NUMEL == 0
            assert offset >= end
            end = offset + tensors[index].numel
        assert end <= chunk.capacity_numel
        assert list(chunk.tensor_indices) == sorted(chunk.tensor_indices)
    firsts = [chunk.tensor_indices[0] for chunk in layout.chunks]
    assert firsts == sorted(firsts)
    assert [chunk.index for chunk in layout.chunks] == list(range(len(firsts)))


@fast
@given(packings())
def test_capacities(packing):
    tensors, layout, on_host = packing
    for chunk in layout.chunks:
        assert chunk.capacity_numel % ALIGNMENT_NUMEL == 0
        assert chunk.used_numel == sum(tensors[index].numel for index in chunk.tensor_indices)
        if chunk.capacity_numel > layout.chunk_numel or chunk.on_host:
            (index,) = chunk.tensor_indices
            assert chunk.capacity_numel == max(align(tensors[index].numel), ALIGNMENT_NUMEL)
        assert chunk.on_host == bool(on_host & set(chunk.tensor_indices))
    assert 0 <= layout.utilisation <= 1


@fast
@given(packings())
def test_a_chunk_never_mixes_frozen_and_trainable(packing):
    tensors, layout, _ = packing
    for chunk in layout.chunks:
        assert {tensors[index].trainable for index in chunk.tensor_indices} == {chunk.trainable}


@fast
@given(packings())
def test_no_chunk_is_closed_while_the_next_tensor_of_its_kind_would_fit(packing):
    tensors, layout, _on_host = packing
    for kind in (True, False):
        shared = [
            chunk
            for chunk in layout.chunks
            if chunk.trainable == kind and not chunk.on_host and chunk.capacity_numel <= layout.chunk_numel
        ]
        for left, right in itertools.pairwise(shared):
            used = sum(align(tensors[index].numel) for index in left.tensor_indices)
            if len(left.tensor_indices) == 1 and used > layout.chunk_numel:
                continue
            assert used + align(tensors[right.tensor_indices[0]].numel) > layout.chunk_numel


@fast
@given(packings(), st.data())
def test_working_set(packing, data):
    tensors, layout, _ = packing
    indices = st.integers(0, max(len(tensors) - 1, 0))
    groups = data.draw(st.lists(st.lists(indices, max_size=5), max_size=5)) if tensors else []
    modules = make_modules(*groups)
    most = 0
    for module in modules:
        chunks = {
            chunk.index
            for chunk in layout.chunks
            if not chunk.on_host and set(chunk.tensor_indices) & set(module.tensor_indices)
        }
        most = max(most, sum(2 * layout.chunks[index].capacity_numel for index in chunks))
    nbytes, module = layout.working_set_nbytes(modules)
    assert nbytes == most
    assert (module is None) == (most == 0)
    assert module is None or layout.working_set_nbytes([module])[0] == nbytes
