import pytest
from unit.spec_builders import make_modules, make_tensors, placed

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.layout.packing import pack
from hf_patrickstar.units import ALIGNMENT_NUMEL, align


@pytest.mark.parametrize(("numel", "aligned"), [(0, 0), (1, 64), (63, 64), (64, 64), (65, 128), (1000, 1024)])
def test_align(numel, aligned):
    assert align(numel) == aligned


def test_alignment_is_at_least_128_bytes_in_16_bit():
    assert ALIGNMENT_NUMEL * 2 >= 128


def test_tensors_fill_chunks_in_model_order():
    layout = pack(make_tensors(64, 64, 128, 64), 128)
    assert placed(layout) == ([(0, 0), (0, 64), (1, 0), (2, 0)], [128, 128, 64])
    assert [chunk.tensor_indices for chunk in layout.chunks] == [(0, 1), (2,), (3,)]
    assert layout.chunk_numel == 128


def test_offsets_are_aligned_and_padding_is_not_counted_as_used():
    layout = pack(make_tensors(1, 65, 10), 256)
    assert placed(layout) == ([(0, 0), (0, 64), (0, 192)], [256])
    assert layout.chunks[0].used_numel == 76
    assert layout.utilisation == pytest.approx(76 / 256)


def test_a_full_chunk_stays_at_its_capacity_and_the_last_is_cut():
    layout = pack(make_tensors(128, 128, 64), 192)
    assert placed(layout) == ([(0, 0), (1, 0), (1, 128)], [192, 192])
    layout = pack(make_tensors(128, 128), 192)
    assert placed(layout) == ([(0, 0), (1, 0)], [192, 128])


def test_an_oversized_tensor_gets_its_own_chunk_and_the_open_one_goes_on():
    layout = pack(make_tensors(64, 300, 64), 128)
    assert placed(layout) == ([(0, 0), (1, 0), (0, 64)], [128, 320])
    assert [chunk.tensor_indices for chunk in layout.chunks] == [(0, 2), (1,)]


def test_a_tensor_of_exactly_the_chunk_size_is_not_oversized():
    assert placed(pack(make_tensors(128, 64), 128)) == ([(0, 0), (1, 0)], [128, 64])


def test_frozen_and_trainable_tensors_never_share_a_chunk():
    layout = pack(make_tensors(64, 64, 64, 64, frozen={1, 3}), 128)
    assert placed(layout) == ([(0, 0), (1, 0), (0, 64), (1, 64)], [128, 128])
    assert [chunk.trainable for chunk in layout.chunks] == [True, False]


def test_an_oversized_frozen_tensor():
    layout = pack(make_tensors(64, 256, frozen={1}), 128)
    assert [(chunk.trainable, chunk.capacity_numel) for chunk in layout.chunks] == [(True, 64), (False, 256)]


def test_tensors_on_the_host_have_chunks_of_their_own():
    layout = pack(make_tensors(100, 64, 64), 256, on_host=frozenset({0, 2}))
    assert placed(layout) == ([(0, 0), (1, 0), (2, 0)], [128, 64, 64])
    assert [chunk.on_host for chunk in layout.chunks] == [True, False, True]


def test_a_frozen_tensor_on_the_host():
    (chunk,) = pack(make_tensors(64, frozen={0}), 64, on_host=frozenset({0})).chunks
    assert (chunk.on_host, chunk.trainable) == (True, False)


def test_chunks_are_ordered_by_their_first_tensor_and_know_their_index():
    layout = pack(make_tensors(64, 999, 64, 999, 64, frozen={2}), 128)
    assert [chunk.tensor_indices[0] for chunk in layout.chunks] == [0, 1, 2, 3]
    assert [chunk.index for chunk in layout.chunks] == [0, 1, 2, 3]
    assert [place.tensor_index for place in layout.placements] == [0, 1, 2, 3, 4]


def test_chunk_size_is_rounded_up_to_the_alignment():
    assert pack(make_tensors(64, 64), 100).chunk_numel == 128
    assert pack(make_tensors(64), 1).chunk_numel == 64


def test_an_empty_tensor_has_a_place():
    layout = pack(make_tensors(64, 0, 64), 128)
    assert placed(layout) == ([(0, 0), (0, 64), (0, 64)], [128])
    assert placed(pack(make_tensors(0), 64)) == ([(0, 0)], [64])


def test_nothing_to_place():
    layout = pack([], 64)
    assert placed(layout) == ([], [])
    assert layout.utilisation == 1.0


@pytest.mark.parametrize("chunk_numel", [0, -64])
def test_a_chunk_size_that_is_not_positive(chunk_numel):
    with pytest.raises(ConfigError, match=f"chunk_numel: expected a positive number of elements, got {chunk_numel}"):
        pack(make_tensors(1), chunk_numel)


def test_working_set_counts_each_chunk_of_a_module_once():
    layout = pack(make_tensors(64, 64, 128), 128)
    modules = make_modules((0, 1), (1, 2), (2,))
    assert layout.working_set_nbytes(modules) == (512, modules[1])
    assert layout.working_set_nbytes(modules[:1]) == (256, modules[0])


def test_working_set_leaves_out_what_never_moves():
    layout = pack(make_tensors(640, 64), 64, on_host=frozenset({0}))
    modules = make_modules((0,), (1,))
    assert layout.working_set_nbytes(modules) == (128, modules[1])


def test_working_set_of_nothing():
    assert pack([], 64).working_set_nbytes([]) == (0, None)
