"""Packing and chunk-size search for several processes."""

import re

import pytest
from unit.spec_builders import make_modules, make_tensors, placed, typed

from hf_patrickstar.errors import BudgetError, ConfigError
from hf_patrickstar.layout.packing import pack
from hf_patrickstar.layout.search import check_fits, fixed_layout, search_layout
from hf_patrickstar.layout.specs import TensorSpec
from hf_patrickstar.shortage import Limit

ITEMSIZE = 2


def owner(layout, tensor_index):
    """The rank in whose chunk a tensor lies; with one process an empty one may stand at the very end of its chunk."""
    place = layout.placements[tensor_index]
    chunk = layout.chunks[place.chunk_index]
    return min(place.offset_numel // chunk.chunk_numel, chunk.world_size - 1)


def owners(layout):
    return [owner(layout, spec.index) for spec in layout.tensors]


def gpt2(hidden, layers):
    """Shapes of GPT-2 with tied embeddings, and its modules."""
    shapes, groups = [(50257, hidden), (1024, hidden)], [(0,), (1,)]
    norm, linears = ((hidden,), (hidden,)), [(3, 1), (1, 1), (4, 1), (1, 4)]
    for _ in range(layers):
        pairs = [((a * hidden, b * hidden), (a * hidden,)) for a, b in linears]
        for pair in (norm, *pairs[:2], norm, *pairs[2:]):
            groups.append((len(shapes), len(shapes) + 1))
            shapes += pair
    groups.append((len(shapes), len(shapes) + 1))
    return specs([*shapes, *norm]), make_modules(*groups)


def llama(layers=16, hidden=2048, inner=8192, keys=512, rows=32000):
    """Shapes of a Llama with untied embeddings, each tensor a module."""
    layer = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden)]
    layer += [(inner, hidden), (inner, hidden), (hidden, inner), (hidden,), (hidden,)]
    shapes = [(rows, hidden), *layer * layers, (hidden,), (rows, hidden)]
    return specs(shapes), make_modules(*[(index,) for index in range(len(shapes))])


def specs(shapes):
    return typed(TensorSpec(index, f"t{index}", shape, True) for index, shape in enumerate(shapes))


def test_a_tensor_goes_to_the_first_bin_with_room():
    """The third has none in the first bin, the fourth still has."""
    layout = pack(make_tensors(64, 64, 128, 64, 64), 192, world_size=2)
    assert placed(layout) == ([(0, 0), (0, 64), (0, 192), (0, 128), (0, 320)], [384])
    assert layout.chunks[0].tensor_indices == (0, 1, 3, 2, 4)
    assert owners(layout) == [0, 0, 1, 0, 1]
    assert (layout.chunks[0].chunk_numel, layout.chunks[0].used_numel, layout.utilisation) == (192, 384, 1.0)


def test_a_full_group_is_followed_by_another_and_the_last_is_cut():
    layout = pack(make_tensors(192, 128, 128, 64), 192, world_size=2)
    assert placed(layout) == ([(0, 0), (0, 192), (1, 0), (1, 128)], [384, 256])
    assert [chunk.chunk_numel for chunk in layout.chunks] == [192, 128]


def test_cutting_spreads_tensors_anew():
    """Filled in order, both would be in the first bin; 128 is the smallest size that holds a half."""
    layout = pack(make_tensors(64, 64, 64, 64), 1024, world_size=2)
    assert placed(layout) == ([(0, 0), (0, 64), (0, 128), (0, 192)], [256])
    layout = pack(make_tensors(64, 192, 64), 1024, world_size=2)
    assert placed(layout) == ([(0, 192), (0, 0), (0, 256)], [384])
    assert owners(layout) == [1, 0, 1]


def test_a_large_tensor_makes_the_bins_of_the_current_group_larger():
    layout = pack(make_tensors(64, 320, 256), 128, world_size=2)
    assert placed(layout) == ([(0, 0), (0, 320), (0, 64)], [640])


def test_what_follows_a_large_tensor_fills_the_other_bins():
    layout = pack(make_tensors(320, 64, 64, 128, 64, 128, 128, 128), 128, world_size=2)
    assert [chunk.tensor_indices for chunk in layout.chunks] == [(0, 1, 2, 3, 4), (5, 6), (7,)]
    assert [chunk.chunk_numel for chunk in layout.chunks] == [320, 128, 128]
    assert owners(layout) == [0, 1, 1, 1, 1, 0, 1, 0]


def test_a_group_too_full_for_a_large_tensor_is_closed_and_cut():
    layout = pack(make_tensors(192, 64, 64, 256, 64, 64), 192, world_size=2)
    assert [(chunk.tensor_indices, chunk.chunk_numel) for chunk in layout.chunks] == [
        ((0, 1, 2), 192),
        ((3, 4, 5), 256),
    ]


def test_a_large_tensor_at_the_end_is_filled_from_before():
    layout = pack(make_tensors(*[64] * 10, 256), 64, world_size=2)
    assert [chunk.tensor_indices for chunk in layout.chunks] == [(0, 1), (2, 3), (4, 5), (6, 7, 8, 9, 10)]
    assert [chunk.chunk_numel for chunk in layout.chunks] == [64, 64, 64, 256]
    assert layout.utilisation == 1.0


def test_the_group_before_one_that_was_filled_backwards_is_cut():
    layout = pack(make_tensors(*[64] * 8, 512), 192, world_size=2)
    assert [(len(chunk.tensor_indices), chunk.chunk_numel) for chunk in layout.chunks] == [(9, 512)]
    layout = pack(make_tensors(*[64] * 10, 512), 192, world_size=2)
    assert [(len(chunk.tensor_indices), chunk.chunk_numel) for chunk in layout.chunks] == [(2, 64), (9, 512)]


def test_a_model_of_one_tensor_leaves_the_other_ranks_nothing():
    layout = pack(make_tensors(100), 64, world_size=4)
    assert (placed(layout), owners(layout), layout.utilisation) == (([(0, 0)], [512]), [0], 100 / 512)


def test_frozen_and_trainable_tensors_never_share_a_group():
    layout = pack(make_tensors(64, 64, 64, 64, frozen={0, 2}), 64, world_size=2)
    assert [(chunk.trainable, chunk.tensor_indices) for chunk in layout.chunks] == [(False, (0, 2)), (True, (1, 3))]


def test_an_empty_tensor_has_an_owner():
    layout = pack(make_tensors(64, 64, 0, 0), 64, world_size=2)
    assert placed(layout) == ([(0, 0), (0, 64), (1, 0), (1, 64)], [128, 128])
    assert owners(layout) == [0, 1, 0, 1]
    assert owners(pack(make_tensors(64, 0), 64)) == [0, 0]


def test_one_process_owns_everything():
    layout = pack(make_tensors(64, 64, 128), 128, world_size=1)
    assert layout == pack(make_tensors(64, 64, 128), 128)
    assert owners(layout) == [0, 0, 0]
    assert [chunk.chunk_numel for chunk in layout.chunks] == [chunk.capacity_numel for chunk in layout.chunks]


def test_nothing_to_place():
    assert placed(pack([], 64, world_size=2)) == ([], [])


def test_tensors_on_the_host_are_refused():
    with pytest.raises(ConfigError, match="cpu_embedding: not supported with 2 processes"):
        pack(make_tensors(64), 64, frozenset({0}), world_size=2)


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_number_of_processes_that_is_not_positive(world_size):
    with pytest.raises(ConfigError, match=f"world_size: expected a positive number of processes, got {world_size}"):
        pack(make_tensors(64), 64, world_size=world_size)


def test_the_working_set_counts_whole_groups():
    layout = pack(make_tensors(64, 64, 64, 64, 64, 64), 64, world_size=2)
    modules = make_modules((0,), (1, 2))
    assert layout.working_set_nbytes(modules) == (512, modules[1])
    assert check_fits(layout, modules, 1024, world_size=2) == 1024
    message = (
        r"module 'm1' \(Block\): its groups of 2 chunks need 512 B \(512 bytes\) on the compute device at once "
        r"beside 512 B \(512 bytes\) of gradients, 1023 B \(1023 bytes\) are available for chunks.*"
        r"Raise device_budget to at least 1280 bytes"
    )
    with pytest.raises(BudgetError, match=message):
        check_fits(layout, modules, 1023, [Limit("device_budget", 1023, usable=0.8)], world_size=2)


def test_gradients_of_the_two_largest_groups_wait_on_the_device():
    def waiting(*numels, world_size=2, frozen=()):
        return pack(make_tensors(*numels, frozen=frozen), 128, world_size=world_size).gradients_nbytes // ITEMSIZE

    numels = (320, 64, 64, 128, 64, 128, 128, 128)
    assert [chunk.capacity_numel for chunk in pack(make_tensors(*numels), 128, world_size=2).chunks] == [640, 256, 256]
    assert waiting(*numels) == 640 + 256
    assert waiting(128, 128) == 256, "there is only one"
    assert waiting(*[128] * 6, frozen={0, 1, 2, 3}) == 256, "frozen ones have none"
    assert waiting(128, 128, frozen={0, 1}) == 0
    assert waiting() == 0
    assert waiting(*numels, world_size=1) == 0, "with one process each goes home at once"


def test_one_process_keeps_no_room_for_gradients():
    layout, modules = pack(make_tensors(64, 64), 64), make_modules((0,), (1,))
    assert check_fits(layout, modules, 128) == 128
    with pytest.raises(BudgetError) as caught:
        check_fits(layout, modules, 127)
    assert "gradients" not in str(caught.value)


def test_scratch_space_for_the_largest_group_with_gradients_counts_too():
    """The frozen group has larger chunks, and no gradients."""
    asked = []

    def staging(chunk_numel, dtype):
        asked.append((chunk_numel, dtype))
        return 100

    tensors, modules = make_tensors(256, 256, 64, 64, frozen={0, 1}), make_modules((2,), (3,))
    choice = fixed_layout(tensors, modules, 64, 612, world_size=2, staging_nbytes=staging)
    assert [chunk.chunk_numel for chunk in choice.layout.chunks] == [256, 64]
    assert (choice.working_set_nbytes, asked) == ((128 + 128) * ITEMSIZE + 100, [(64, "bfloat16")])
    with pytest.raises(BudgetError, match=r"beside 356 B \(356 bytes\) of gradients.*at least 612 bytes"):
        fixed_layout(tensors, modules, 64, 611, world_size=2, staging_nbytes=staging)


def test_a_search_keeps_room_for_scratch_space():
    """It is as large as a chunk here, so that the budget has room for smaller ones only."""
    tensors, modules = make_tensors(*[64] * 64), make_modules(*[(index,) for index in range(64)])

    def found(budget, staging_nbytes=lambda chunk_numel, dtype: chunk_numel * ITEMSIZE):
        choice = search_layout(tensors, modules, budget, world_size=2, staging_nbytes=staging_nbytes)
        return choice.layout.chunk_numel, choice.working_set_nbytes

    assert found(7 * 64 * ITEMSIZE) == (64, 7 * 64 * ITEMSIZE)
    with pytest.raises(BudgetError, match=r"beside 640 B \(640 bytes\) of gradients.*at least 896 bytes"):
        found(7 * 64 * ITEMSIZE - 1)
    assert found(6 * 64 * ITEMSIZE, lambda chunk_numel, dtype: 0) == (64, 6 * 64 * ITEMSIZE)


def test_a_fixed_size_is_of_one_chunk():
    choice = fixed_layout(make_tensors(*[64] * 6), make_modules((0,), (1,)), 64, None, world_size=2)
    assert [chunk.capacity_numel for chunk in choice.layout.chunks] == [128, 128, 128]
    assert choice.describe() == "chunk_numel=64 (3 groups of 2 chunks: 3 of up to 64 elements; 100.0% used)"
    assert choice.working_set_nbytes == (128 + 2 * 128) * ITEMSIZE


@pytest.mark.parametrize(("splits", "sizes"), [(False, ""), (True, ", and 1 of up to 64 elements")])
def test_groups_of_larger_tensors_are_counted_apart(splits, sizes):
    """A tensor that is spread is larger than the standard size, but its parts need not be."""
    choice = fixed_layout(make_tensors(64, 64, 96), make_modules(), 64, None, world_size=2, splits=splits)
    larger = "1 with a tensor that is larger, the largest of 96 elements"
    assert f" groups of 2 chunks: {larger}{sizes}; " in choice.describe()


def test_a_refused_fixed_size_names_the_groups():
    with pytest.raises(BudgetError, match="its groups of 2 chunks need"):
        fixed_layout(make_tensors(64, 64), make_modules((0,)), 64, 511, world_size=2)
    fixed_layout(make_tensors(64, 64), make_modules((0,)), 64, 512, world_size=2)


def test_a_search_counts_whole_groups_against_the_budget():
    """An eighth of 4096 bytes is a group of 256 elements, so two chunks of 128."""
    tensors, modules = make_tensors(*[64] * 64), make_modules(*[(index,) for index in range(64)])
    assert search_layout(tensors, modules, 4096).layout.chunk_numel == 256
    choice = search_layout(tensors, modules, 4096, world_size=2)
    assert (choice.layout.chunk_numel, len(choice.layout.chunks)) == (128, 16)
    assert search_layout(tensors, modules, 4096, world_size=4).layout.chunk_numel == 64
    with pytest.raises(BudgetError, match="its groups of 4 chunks need"):
        search_layout(tensors, modules, 1535, world_size=4)
    assert search_layout(tensors, modules, 1536, world_size=4).working_set_nbytes == 1536


def test_where_no_group_is_that_small_the_smallest_that_wastes_little_wins():
    """Groups of at most a sixteenth of the model would have bins with one tensor of 640 or of 384 each."""
    tensors = make_tensors(*[640, 384] * 16)
    modules = make_modules(*[(index,) for index in range(32)])
    choice = search_layout(tensors, modules, 10**6, world_size=2)
    assert choice.layout.utilisation == 1.0
    assert choice.layout.chunk_numel == 1024


# Budgets in parts of all parameters. The least of each is a little more than what the group of the largest tensor, its
# gradients and those of one more group need with any chunk size.
CASES = {
    "gpt2-2": (gpt2(768, 12), 2, (1.5, 1.3), 0.99),
    "gpt2-medium-2": (gpt2(1024, 24), 2, (1.0, 0.65), 0.99),
    "gpt2-medium-4": (gpt2(1024, 24), 4, (1.5, 1.25), 0.99),
    "llama-2": (llama(), 2, (1.0, 0.375), 0.98),
    "llama-4": (llama(), 4, (1.0, 0.75), 0.96),
    # Two groups that hold an embedding each are nearly all there is.
    "llama-8": (llama(), 8, (2.0, 1.5), 0.93),
}


@pytest.mark.parametrize("case", CASES)
def test_published_shapes_waste_little(case):
    (tensors, modules), world_size, shares, used = CASES[case]
    total = sum(spec.numel for spec in tensors) * ITEMSIZE
    for share in shares:
        budget = int(total * share)
        choice = search_layout(tensors, modules, budget, world_size=world_size)
        assert choice.layout.utilisation >= used, share
        assert choice.working_set_nbytes <= budget, share
    assert search_layout(tensors, modules, None, world_size=world_size).layout.utilisation >= used


@pytest.mark.parametrize("case", ["gpt2-2", "llama-8"])
def test_what_the_error_advises_is_enough_and_no_less_is(case):
    (tensors, modules), world_size, _, _ = CASES[case]
    with pytest.raises(BudgetError) as caught:
        search_layout(tensors, modules, 1, world_size=world_size)
    least = int(re.search(r"at least (\d+) bytes", str(caught.value))[1])
    assert search_layout(tensors, modules, least, world_size=world_size).working_set_nbytes == least
    with pytest.raises(BudgetError, match=f"at least {least} bytes"):
        search_layout(tensors, modules, least - 1, world_size=world_size)


@pytest.mark.parametrize(("hidden", "layers", "world_size"), [(768, 12, 4), (768, 12, 8), (1024, 24, 8)])
def test_a_model_smaller_than_its_largest_tensor_for_each_rank_is_one_group(hidden, layers, world_size):
    tensors, modules = gpt2(hidden, layers)
    layout = search_layout(tensors, modules, None, world_size=world_size).layout
    assert [chunk.capacity_numel for chunk in layout.chunks] == [50257 * hidden * world_size]


# Large tensors, spread


def test_a_large_tensor_is_alone_and_spread():
    tensors = make_tensors(64, 1000, 128, 64)
    layout = pack(tensors, 256, world_size=4, splits=True)
    spread = layout.chunks[layout.placements[1].chunk_index]
    assert (spread.tensor_indices, spread.capacity_numel, spread.chunk_numel) == ((1,), 1024, 256)
    assert {layout.placements[index].chunk_index for index in (0, 2, 3)} == {0}
    assert pack(tensors, 1000, world_size=4, splits=True) == pack(tensors, 1000, world_size=4)
    assert pack(tensors, 256, splits=True) == pack(tensors, 256), "one process has no groups"


def test_spreading_needs_room_for_the_tensor_not_for_p_of_it():
    tensors = make_tensors(64 * 1024, *[64] * 64)
    modules = make_modules(*[(index,) for index in range(65)])
    whole = search_layout(tensors, modules, None, world_size=8)
    spread = search_layout(tensors, modules, 64 * 1024 * ITEMSIZE * 3, world_size=8, splits=True)
    assert whole.working_set_nbytes >= 8 * 64 * 1024 * ITEMSIZE
    assert spread.working_set_nbytes < 64 * 1024 * ITEMSIZE * 3
    assert spread.layout.utilisation > 0.95
