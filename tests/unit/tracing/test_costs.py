"""What operators cost: compared with numbers worked out by hand."""

import pytest
import torch

from hf_patrickstar.tracing.costs import Cost, cost_of
from hf_patrickstar.tracing.grouped import grouped_result

aten = torch.ops.aten


def cost(operator, *args, **kwargs):
    return cost_of(operator, args, kwargs, operator(*args, **kwargs))


def test_a_product_reads_both_and_writes_one():
    a, b = torch.zeros(3, 5), torch.zeros(5, 7)
    assert cost(aten.mm.default, a, b) == Cost(2 * 3 * 5 * 7, 4 * (15 + 35 + 21), "float32")


def test_the_type_is_that_of_the_operands():
    a = torch.zeros(4, 4, dtype=torch.bfloat16)
    assert cost(aten.mm.default, a, a).dtype == "bfloat16"
    assert cost(aten.ne.Scalar, torch.zeros(4, dtype=torch.long), 0) == Cost(0, 4 * 8 + 4, "float32")


def test_what_is_written_in_place_is_read_and_written():
    a, b = torch.zeros(10), torch.zeros(10)
    assert cost(aten.add_.Tensor, a, b).nbytes == 40 + 2 * 40
    assert cost(aten.copy_.default, a, b).nbytes == 40 + 40
    assert cost(aten.zero_.default, a).nbytes == 40


def test_lists_count_as_a_whole():
    lists = [[torch.ones(8), torch.ones(2)] for _ in range(4)]
    steps = [torch.ones(()), torch.ones(())]
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
    found = cost(aten._fused_adamw_.default, *lists, [], steps, **options, amsgrad=False, maximize=False)
    assert found.nbytes == 28 * 10 + 2 * 4, "28 bytes per parameter, and the steps"


def test_an_embedding_reads_its_rows_alone():
    weight, rows = torch.zeros(1000, 4), torch.zeros(3, dtype=torch.long)
    assert cost(aten.embedding.default, weight, rows).nbytes == 2 * 3 * 4 * 4 + 3 * 8


@pytest.mark.parametrize(
    ("operator", "args"),
    [(aten.zeros_like.default, ()), (aten.full_like.default, (1.0,)), (aten.new_zeros.default, ([10],))],
)
def test_an_operand_that_is_asked_for_its_shape_is_not_read(operator, args):
    assert cost(operator, torch.zeros(10), *args).nbytes == 40


def test_what_is_expanded_is_read_once():
    assert cost(aten.neg.default, torch.zeros(1, 4).expand(100, 4)).nbytes == 4 * 4 + 100 * 4 * 4


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        (aten.t.default, (torch.zeros(2, 3),)),
        (aten.slice.Tensor, (torch.zeros(6), 0, 1, 3)),
        (aten._unsafe_view.default, (torch.zeros(6), [2, 3])),
        (aten.empty_like.default, (torch.zeros(6),)),
    ],
)
def test_views_and_empty_memory_cost_nothing(operator, args):
    assert cost(operator, *args) is None


@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention_of_the_cpu_counts_as_that_of_devices(key_heads):
    query, key = torch.zeros(2, 4, 16, 8), torch.zeros(2, key_heads, 16, 8)
    found = cost(aten._scaled_dot_product_flash_attention_for_cpu.default, query, key, key)
    assert found.flops == 2 * 2 * (2 * 4 * 16 * 16 * 8)


ENDS = torch.tensor([4, 8], dtype=torch.int32)
GROUPED = {
    "rows by an expert": (torch.zeros(8, 16), torch.zeros(2, 16, 24), ENDS),
    "columns by an expert": (torch.zeros(2, 16, 24), torch.zeros(24, 8), ENDS),
    "gradients of experts": (torch.zeros(16, 8), torch.zeros(8, 24), ENDS),
    "experts of as many rows": (torch.zeros(2, 8, 16), torch.zeros(2, 16, 24), None),
}
OPERATIONS = [2 * 8 * 16 * 24, 2 * 16 * 24 * 8, 2 * 16 * 8 * 24, 2 * 2 * 8 * 16 * 24]


@pytest.mark.parametrize(("name", "flops"), zip(GROUPED, OPERATIONS, strict=True))
def test_products_of_groups_are_counted(name, flops):
    assert cost(aten._grouped_mm.default, *GROUPED[name]).flops == flops


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", GROUPED)
def test_the_result_of_groups_is_estimated(name, dtype):
    first, second, ends = GROUPED[name]
    operands = first.to(dtype), second.to(dtype), ends
    real, ours = aten._grouped_mm.default(*operands), grouped_result(*operands)
    assert (ours.shape, ours.stride(), ours.dtype) == (real.shape, real.stride(), real.dtype)
