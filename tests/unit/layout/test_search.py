import functools

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel
from unit.spec_builders import make_modules, make_tensors, placed, typed

from hf_patrickstar.errors import BudgetError, ConfigError
from hf_patrickstar.layout import search
from hf_patrickstar.layout.packing import pack
from hf_patrickstar.layout.search import check_fits, fixed_layout, search_layout
from hf_patrickstar.layout.specs import collect_specs
from hf_patrickstar.units import align

ITEMSIZE = 2
SHAPES = {
    "gpt2": (768, 12, 12),
    "gpt2-medium": (1024, 24, 16),
    "gpt2-large": (1280, 36, 20),
    "gpt2-xl": (1600, 48, 25),
    "bert-base": (768, 12, 12),
    "bert-large": (1024, 24, 16),
}
SHARES = (1.0, 0.5, 0.25, 0.1)


@functools.cache
def specs_of(name):
    """Specs of the published shape; on the meta device, so nothing is allocated."""
    hidden, layers, heads = SHAPES[name]
    with torch.device("meta"):
        if name.startswith("gpt2"):
            model = GPT2LMHeadModel(GPT2Config(n_embd=hidden, n_layer=layers, n_head=heads))
        else:
            model = BertForMaskedLM(
                BertConfig(
                    hidden_size=hidden,
                    num_hidden_layers=layers,
                    num_attention_heads=heads,
                    intermediate_size=4 * hidden,
                )
            )
    tensors, modules, _ = collect_specs(model)
    return typed(tensors), modules


def budget_of(tensors, share):
    return None if share == 1.0 else int(sum(spec.numel for spec in tensors) * ITEMSIZE * share)


def smallest_working_set(tensors, modules):
    """Bytes that no layout can do without, and that one with every tensor by itself needs."""
    return max(sum(align(tensors[index].numel) for index in module.tensor_indices) for module in modules) * ITEMSIZE


def working_set(layout, modules):
    """Bytes of the most demanding module's chunks, counted without the layout's own help."""
    most = 0
    for module in modules:
        chunks = {layout.placements[index].chunk_index for index in module.tensor_indices}
        most = max(most, sum(layout.chunks[index].capacity_numel for index in chunks) * ITEMSIZE)
    return most


@pytest.fixture
def quick_pack(monkeypatch):
    """Several searches over one model pack the same sizes; each size is packed once."""
    packed = {}

    def pack_once(tensors, chunk_numel, on_host=frozenset(), world_size=1, splits=False):
        key = (id(tensors), chunk_numel, on_host, world_size, splits)
        if key not in packed:
            packed[key] = pack(tensors, chunk_numel, on_host, world_size, splits)
        return packed[key]

    monkeypatch.setattr(search, "pack", pack_once)


@pytest.mark.usefixtures("quick_pack")
@pytest.mark.parametrize("name", SHAPES)
def test_published_shapes(name):
    tensors, modules = specs_of(name)
    least = smallest_working_set(tensors, modules)
    for share in SHARES:
        budget = budget_of(tensors, share)
        if budget is not None and least > budget:
            with pytest.raises(BudgetError, match=f"for module '.*'.*need .*{least} bytes.*{budget} bytes"):
                search_layout(tensors, modules, budget)
            continue
        choice = search_layout(tensors, modules, budget)
        assert choice.layout.utilisation >= 0.95, share
        assert choice.working_set_nbytes == working_set(choice.layout, modules), share
        assert budget is None or choice.working_set_nbytes <= budget, share
        assert choice.num_candidates > 100


def test_the_shapes_are_the_published_ones():
    millions = {name: sum(spec.numel for spec in specs_of(name)[0]) // 10**6 for name in SHAPES}
    assert millions == {
        "gpt2": 124,
        "gpt2-medium": 354,
        "gpt2-large": 774,
        "gpt2-xl": 1557,
        "bert-base": 109,
        "bert-large": 335,
    }


def test_most_budgets_are_searched_and_some_are_refused():
    fits = {
        (name, share): smallest_working_set(*specs_of(name)) <= (budget_of(specs_of(name)[0], share) or 2**60)
        for name in SHAPES
        for share in SHARES
    }
    assert sorted(case for case, fit in fits.items() if not fit) == [
        ("bert-base", 0.1),
        ("gpt2", 0.1),
        ("gpt2", 0.25),
        ("gpt2-medium", 0.1),
    ]


def test_too_small_a_budget_names_the_module_and_the_bytes():
    tensors, modules = specs_of("gpt2")
    least = 50257 * 768 * 2
    with pytest.raises(BudgetError) as caught:
        search_layout(tensors, modules, least - 1)
    message = str(caught.value)
    assert "module 'transformer.wte' (Embedding)" in message
    assert f"need 73.62 MiB ({least} bytes)" in message
    assert f"({least - 1} bytes) are available" in message
    assert f"Raise device_budget to at least {least} bytes" in message


def test_the_advice_of_the_error_is_enough():
    tensors, modules = make_tensors(100, 1000, 30), make_modules((0, 1), (2,))
    with pytest.raises(BudgetError, match=f"at least {(128 + 1024) * 2} bytes"):
        search_layout(tensors, modules, 2048)
    assert search_layout(tensors, modules, (128 + 1024) * 2).working_set_nbytes == (128 + 1024) * 2


def test_without_a_budget_everything_equal_goes_in_one_chunk():
    choice = search_layout(make_tensors(64, 64, 64, 64), make_modules((0, 1), (2, 3)), None)
    assert placed(choice.layout) == ([(0, 0), (0, 64), (0, 128), (0, 192)], [256])
    assert choice.working_set_nbytes == 512


def test_with_a_budget_chunks_are_at_most_an_eighth_of_it():
    choice = search_layout(make_tensors(*[64] * 32), make_modules(*[(i,) for i in range(32)]), 2048)
    assert choice.layout.chunk_numel == 128
    assert len(choice.layout.chunks) == 16


def test_with_a_large_budget_chunks_are_at_most_a_sixteenth_of_the_model():
    """Activations may leave little of it, and then there should still be chunks to choose from."""
    tensors, modules = make_tensors(*[64] * 32), make_modules(*[(i,) for i in range(32)])
    choice = search_layout(tensors, modules, 10**6)
    assert choice.layout.chunk_numel == 128
    assert search_layout(tensors[:2], modules[:2], 10**6).layout.chunk_numel == 64


def test_where_no_chunk_is_that_small_the_smallest_working_set_wins():
    tensors, modules = make_tensors(640, 640, 64), make_modules((0,), (1,), (2,))
    choice = search_layout(tensors, modules, 1280)
    assert choice.working_set_nbytes == 1280
    assert max(chunk.capacity_numel for chunk in choice.layout.chunks) == 640


def test_waste_counts_more_than_size():
    """One chunk of 320 wastes nothing, chunks of 192 would waste 64."""
    choice = search_layout(make_tensors(128, 128, 64), make_modules((0,), (1,), (2,)), None)
    assert choice.layout.chunk_numel == 320
    assert choice.layout.utilisation == 1.0


def test_tensors_on_the_host_take_no_part_in_the_budget():
    tensors, modules = make_tensors(64000, 64), make_modules((0,), (1,))
    with pytest.raises(BudgetError, match="module 'm0'"):
        search_layout(tensors, modules, 128)
    choice = search_layout(tensors, modules, 128, on_host=frozenset({0}))
    assert choice.working_set_nbytes == 128
    assert choice.layout.chunks[0].on_host


def test_a_parameter_without_elements():
    choice = search_layout(make_tensors(64, 0, 64), make_modules((0, 1), (2,)), None)
    assert choice.working_set_nbytes <= 2 * 64 * ITEMSIZE
    assert [place.tensor_index for place in choice.layout.placements] == [0, 1, 2]


def test_a_model_without_parameters():
    assert search_layout([], [], 1000).layout.chunks == ()


def test_describe():
    choice = search_layout(make_tensors(64, 64), make_modules((0, 1)), None)
    assert choice.describe() == (
        "chunk_numel=128 (1 chunks: 1 of up to 128 elements; 100.0% used; "
        "of 2 sizes the largest of those that fit and waste least)"
    )


def test_describe_counts_chunks_of_larger_tensors_apart():
    """A number of elements that most chunks do not have says nothing of them."""
    choice = fixed_layout(make_tensors(64, 6400, 64, 12800, 64, 0), make_modules(), 128, None)
    assert choice.describe() == (
        "chunk_numel=128 (4 chunks: 2 with a tensor that is larger, the largest of 12.8 K elements, and 2 of "
        "up to 128 elements; 100.0% used)"
    )


def test_describe_of_larger_tensors_alone():
    choice = fixed_layout(make_tensors(640, 1280), make_modules(), 64, None)
    sizes = "2 chunks: 2 with a tensor that is larger, the largest of 1.3 K elements"
    assert choice.describe() == f"chunk_numel=64 ({sizes}; 100.0% used)"


def test_describe_without_chunks():
    assert fixed_layout([], [], 64, None).describe() == "chunk_numel=64 (0 chunks; 100.0% used)"


def test_describe_says_that_time_has_decided():
    choice = search_layout(make_tensors(64, 64), make_modules((0, 1)), None, exposed_ns=lambda num, numel: 10**6 * num)
    assert choice.describe() == (
        "chunk_numel=128 (1 chunks: 1 of up to 128 elements; 100.0% used; "
        "of 2 sizes the fastest of those that fit and waste least: 1.00 ms not beside computation)"
    )


@pytest.mark.parametrize("chunk_numel", [1, 63])
def test_a_fixed_size_below_the_alignment(chunk_numel):
    with pytest.raises(ConfigError, match=f"chunk_numel={chunk_numel} is smaller than the alignment of 64 elements"):
        fixed_layout(make_tensors(64), make_modules((0,)), chunk_numel, None)


def test_a_fixed_size():
    choice = fixed_layout(make_tensors(64, 64, 64), make_modules((0,), (1, 2)), 128, 384)
    assert placed(choice.layout) == ([(0, 0), (0, 64), (1, 0)], [128, 64])
    assert (choice.num_candidates, choice.working_set_nbytes) == (1, 384)


def test_a_fixed_size_that_does_not_fit_says_what_to_change():
    with pytest.raises(
        BudgetError,
        match=r"module 'm1' \(Block\): its chunks need .*\(384 bytes\).*\(383 bytes\) are available.*"
        r"parameters alone are .*\(256 bytes\).*at least 384 bytes, or lower chunk_numel \(now 128",
    ):
        fixed_layout(make_tensors(64, 64, 64), make_modules((0,), (1, 2)), 128, 383)


def test_check_fits_returns_the_largest_working_set():
    layout = pack(make_tensors(64, 128), 128)
    modules = make_modules((0,), (1,), (0, 1))
    assert check_fits(layout, modules, None) == check_fits(layout, modules, 10**6) == (128 + 128) * 2
