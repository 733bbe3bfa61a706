"""The search for a chunk size: its numbers, what it says, and models of published shapes."""

import functools
import re

import pytest
import torch
from support.spec_builders import fixed_layout, make_modules, make_tensors, pack, search_layout, searching, typed
from transformers import GPT2Config, GPT2LMHeadModel

from hf_patrickstar.errors import BudgetError, ConfigError
from hf_patrickstar.layout.specs import TensorSpec, collect_specs
from hf_patrickstar.units import MIB, parse_nbytes

ITEMSIZE = 2


def alone(count, numel=64):
    """Tensors of one size, each a module."""
    return make_tensors(*[numel] * count), make_modules(*[(index,) for index in range(count)])


@functools.cache
def gpt2(hidden=768, layers=12):
    """Specs of a GPT-2 with tied embeddings; on the meta device, so nothing is allocated."""
    with torch.device("meta"):
        tensors, modules, _ = collect_specs(GPT2LMHeadModel(GPT2Config(n_embd=hidden, n_layer=layers, n_head=12)))
    return typed(tensors), modules


@functools.cache
def llama(layers=16, hidden=2048, inner=8192, keys=512, rows=32000):
    """Specs of a Llama with untied embeddings, each tensor a module."""
    layer = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden)]
    layer += [(inner, hidden), (inner, hidden), (hidden, inner), (hidden,), (hidden,)]
    shapes = [(rows, hidden), *layer * layers, (hidden,), (rows, hidden)]
    tensors = typed(TensorSpec(index, f"t{index}", shape, True) for index, shape in enumerate(shapes))
    return tensors, make_modules(*[(index,) for index in range(len(shapes))])


# Budgets in parts of all parameters, and what is used at least. The least of each budget is a little more than what the
# group of the largest tensor, its gradients and those of one more group need with any chunk size.
PUBLISHED = {
    "gpt2-1": (gpt2, 1, (1.0, 0.5), 0.95),
    "gpt2-2": (gpt2, 2, (1.5, 1.3), 0.99),
    "llama-2": (llama, 2, (1.0, 0.375), 0.98),
    "llama-8": (llama, 8, (2.0, 1.5), 0.93),
}


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_shapes_waste_little(case):
    make, world_size, shares, used = PUBLISHED[case]
    tensors, modules = make()
    total = sum(spec.numel for spec in tensors) * ITEMSIZE
    for share in (*shares, None):
        budget = share and int(total * share)
        choice = search_layout(tensors, modules, budget, world_size=world_size)
        assert choice.layout.utilisation >= used, share
        assert budget is None or choice.working_set_nbytes <= budget, share
        assert choice.num_candidates > 100


@pytest.mark.parametrize("case", ["gpt2-1", "gpt2-2", "llama-8"])
def test_what_the_error_advises_is_enough_and_no_less_is(case):
    make, world_size, _, _ = PUBLISHED[case]
    tensors, modules = make()
    with pytest.raises(BudgetError) as caught:
        search_layout(tensors, modules, 1, world_size=world_size)
    said = re.search(r"Raise chunk_budget to at least (\S+MiB), or", str(caught.value))[1]
    least = search_layout(tensors, modules, parse_nbytes(said), world_size=world_size).working_set_nbytes
    assert parse_nbytes(said) - 0.01 * MIB <= least <= parse_nbytes(said)
    with pytest.raises(BudgetError, match=f"at least {said}, or"):
        search_layout(tensors, modules, least - 1, world_size=world_size)


def test_too_small_a_budget_names_the_module_and_the_bytes():
    least = 50257 * 768 * ITEMSIZE
    message = (
        rf"module 'transformer\.wte' \(Embedding\).*73\.62 MiB \({least} bytes\).*\({least - 1} bytes\) are available"
    )
    with pytest.raises(BudgetError, match=message):
        search_layout(*gpt2(), least - 1)


@pytest.mark.parametrize(
    ("budget", "count", "world_size", "chunk_numel"),
    [(None, 4, 1, 256), (2048, 32, 1, 128), (10**6, 32, 1, 128), (4096, 64, 1, 256), (4096, 64, 2, 128)],
    ids=["no budget", "an eighth of the budget", "a sixteenth of the model", "one process", "groups count as a whole"],
)
def test_chunks_are_a_share_of_the_budget_and_of_the_model(budget, count, world_size, chunk_numel):
    assert search_layout(*alone(count), budget, world_size=world_size).layout.chunk_numel == chunk_numel


def test_spreading_needs_room_for_the_tensor_not_for_p_of_it():
    tensors, modules = make_tensors(64 * 1024, *[64] * 64), make_modules(*[(index,) for index in range(65)])
    spread = search_layout(tensors, modules, 64 * 1024 * ITEMSIZE * 3, world_size=8, splits=True)
    assert search_layout(tensors, modules, None, world_size=8).working_set_nbytes >= 8 * 64 * 1024 * ITEMSIZE
    assert spread.working_set_nbytes < 64 * 1024 * ITEMSIZE * 3
    assert spread.layout.utilisation > 0.95


def test_an_error_for_groups_counts_them_whole_and_gradients_beside_them():
    tensors, modules = make_tensors(*[64] * 6), make_modules((0,), (1, 2))
    layout = pack(tensors, 64, world_size=2)
    assert searching(tensors, modules, 1024, world_size=2).check_fits(layout) == 1024
    message = (
        r"module 'm1' \(Block\): its groups of 2 chunks need 512 B \(512 bytes\) .* beside 512 B \(512 bytes\) of "
        r"gradients, 1023 B \(1023 bytes\) are available.*Raise chunk_budget to at least 1024 bytes"
    )
    with pytest.raises(BudgetError, match=message):
        searching(tensors, modules, 1023, world_size=2).check_fits(layout)


def test_a_fixed_size_is_kept_or_refused_with_what_is_enough():
    tensors, modules = make_tensors(64, 64, 64), make_modules((0,), (1, 2))
    choice = fixed_layout(tensors, modules, 128, 384)
    assert (choice.layout.chunk_numel, choice.num_candidates, choice.working_set_nbytes) == (128, 1, 384)
    message = (
        r"module 'm1' \(Block\): its chunks need .*\(384 bytes\).*\(383 bytes\) are available for chunks\. "
        r"Its parameters alone are .*\(256 bytes\).*at least 384 bytes, or lower chunk_numel \(now 128"
    )
    with pytest.raises(BudgetError, match=message):
        fixed_layout(tensors, modules, 128, 383)
    with pytest.raises(ConfigError, match="chunk_numel=63 is smaller than the alignment of 64 elements"):
        fixed_layout(tensors, modules, 63, None)


DESCRIBED = {
    "1 chunks: 1 of up to 128 elements; 100.0% used": ((64, 64), 128, {}),
    "4 chunks: 2 with a tensor that is larger, the largest of 12.8 K elements, and 2 of up to 128 elements; "
    "100.0% used": ((64, 6400, 64, 12800, 64, 0), 128, {}),
    "3 groups of 2 chunks: 3 of up to 64 elements; 100.0% used": ((64,) * 6, 64, {"world_size": 2}),
    "2 groups of 2 chunks: 1 with a tensor that is larger, the largest of 96 elements, and 1 of up to 64 elements; "
    "87.5% used": ((64, 64, 96), 64, {"world_size": 2, "splits": True}),
    "0 chunks; 100.0% used": ((), 64, {}),
}


@pytest.mark.parametrize("text", DESCRIBED)
def test_a_layout_is_described_by_its_chunks(text):
    numels, chunk_numel, settings = DESCRIBED[text]
    choice = fixed_layout(make_tensors(*numels), make_modules(), chunk_numel, None, **settings)
    assert choice.describe() == f"chunk_numel={chunk_numel} ({text})"


@pytest.mark.parametrize(
    ("exposed_ns", "why"),
    [
        (None, "the largest size that fits and leaves least memory unused, of 2 compared"),
        (lambda num, numel: 10**6 * num, "waits 1.00 ms for copies and updates"),
    ],
)
def test_a_search_says_what_has_decided(exposed_ns, why):
    choice = search_layout(*alone(2), None, exposed_ns=exposed_ns)
    assert ", of 2 compared" in choice.describe()
    assert choice.describe().endswith(f"{why})")
    assert choice.layout.chunk_numel == 128


def test_the_fastest_size_is_taken_if_times_are_known():
    """Neither the smallest chunks, of which there are many, nor the largest."""
    choice = search_layout(*alone(64), None, exposed_ns=lambda num, numel: 1000 * num + numel)
    assert (choice.layout.chunk_numel, len(choice.layout.chunks), choice.exposed_ns) == (2048, 2, 4048)


def test_a_model_without_parameters():
    assert search_layout([], [], 1000).layout.chunks == ()
    assert search_layout(make_tensors(64, 0, 64), make_modules((0, 1), (2,)), None).working_set_nbytes <= 256


def test_a_search_keeps_room_to_reduce_gradients_in():
    """It is as large as a chunk here: a working set of a group, gradients of two, and a chunk."""
    staged = {"world_size": 2, "staging_nbytes": lambda chunk_numel, dtype: chunk_numel * ITEMSIZE}
    least = (2 + 4 + 1) * 64 * ITEMSIZE
    assert search_layout(*alone(64), least, **staged).working_set_nbytes == least
    with pytest.raises(BudgetError, match=rf"beside 640 B \(640 bytes\) of gradients.*at least {least} bytes"):
        search_layout(*alone(64), least - 1, **staged)
    frozen = make_tensors(256, 256, 64, 64, frozen={0, 1})
    choice = fixed_layout(frozen, make_modules((2,), (3,)), 64, None, **staged)
    assert choice.working_set_nbytes == (128 + 128 + 64) * ITEMSIZE, "what is frozen has no gradients"
