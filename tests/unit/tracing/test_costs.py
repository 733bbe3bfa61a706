"""What operators cost: compared with numbers worked out by hand."""

import pytest
import torch

from hf_patrickstar.tracing.costs import cost_of
from hf_patrickstar.tracing.grouped import grouped_result

aten = torch.ops.aten


def cost(operator, *args, **kwargs):
    return cost_of(operator, args, kwargs, operator(*args, **kwargs))


def zeros(*shape, **kwargs):
    return torch.zeros(*shape, **kwargs)


LISTS = [[torch.ones(8), torch.ones(2)] for _ in range(4)]
STEPS = [torch.ones(()), torch.ones(())]
BYTES = {
    "both are read and one is written": (aten.mm.default, (zeros(3, 5), zeros(5, 7)), 4 * (15 + 35 + 21)),
    "in place: read and written": (aten.add_.Tensor, (zeros(10), zeros(10)), 40 + 2 * 40),
    "in place: written": (aten.copy_.default, (zeros(10), zeros(10)), 40 + 40),
    "zeroed": (aten.zero_.default, (zeros(10),), 40),
    "an embedding reads its rows alone": (
        *(aten.embedding.default, (zeros(1000, 4), zeros(3, dtype=torch.long)), 2 * 3 * 4 * 4 + 3 * 8),
    ),
    "asked for its shape": (aten.zeros_like.default, (zeros(10),), 40),
    "what is expanded is read once": (aten.neg.default, (zeros(1, 4).expand(100, 4),), 4 * 4 + 100 * 4 * 4),
}


@pytest.mark.parametrize(("operator", "args", "nbytes"), BYTES.values(), ids=BYTES)
def test_bytes_that_an_operator_reads_and_writes(operator, args, nbytes):
    assert cost(operator, *args).nbytes == nbytes


def test_a_fused_update_of_lists_takes_28_bytes_per_parameter():
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
    found = cost(aten._fused_adamw_.default, *LISTS, [], STEPS, **options, amsgrad=False, maximize=False)
    assert found.nbytes == 28 * 10 + 2 * 4


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        (aten.t.default, (zeros(2, 3),)),
        (aten.slice.Tensor, (zeros(6), 0, 1, 3)),
        (aten._unsafe_view.default, (zeros(6), [2, 3])),
        (aten.empty_like.default, (zeros(6),)),
    ],
)
def test_views_and_empty_memory_cost_nothing(operator, args):
    assert cost(operator, *args) is None


@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention_of_the_cpu_counts_as_that_of_devices(key_heads):
    query, key = zeros(2, 4, 16, 8), zeros(2, key_heads, 16, 8)
    found = cost(aten._scaled_dot_product_flash_attention_for_cpu.default, query, key, key)
    assert found.flops == 2 * 2 * (2 * 4 * 16 * 16 * 8)


ENDS = torch.tensor([4, 8], dtype=torch.int32)
GROUPED = {
    "rows by an expert": (zeros(8, 16), zeros(2, 16, 24), ENDS, 2 * 8 * 16 * 24),
    "columns by an expert": (zeros(2, 16, 24), zeros(24, 8), ENDS, 2 * 16 * 24 * 8),
    "gradients of experts": (zeros(16, 8), zeros(8, 24), ENDS, 2 * 16 * 8 * 24),
    "experts of as many rows": (zeros(2, 8, 16), zeros(2, 16, 24), None, 2 * 2 * 8 * 16 * 24),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", GROUPED)
def test_products_of_groups_are_counted_and_their_results_known(name, dtype):
    first, second, ends, flops = GROUPED[name]
    operands = first.to(dtype), second.to(dtype), ends
    real, ours = aten._grouped_mm.default(*operands), grouped_result(*operands)
    assert (ours.shape, ours.stride(), ours.dtype) == (real.shape, real.stride(), real.dtype)
    assert cost(aten._grouped_mm.default, *operands).flops == flops


def test_a_product_with_a_packed_weight():
    """Six rows, and a packed weight of 128 rows and 64 columns, with scales for each 64 elements."""
    functional = pytest.importorskip("bitsandbytes").functional
    packed, state = functional.quantize_4bit(torch.ones(128, 64), quant_type="nf4")
    args = zeros(2, 3, 64), packed, state.shape, state.absmax, state.blocksize, state.quant_type
    found = cost(torch.ops.bitsandbytes.gemm_4bit.default, *args)
    assert found.flops == 2 * 6 * 64 * 128
    assert found.nbytes == 4 * 6 * 64 + 128 * 64 // 2 + 4 * 128 + 4 * 6 * 128
    assert found.dtype == "float32"
