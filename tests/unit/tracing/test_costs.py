"""What operators cost: compared with numbers worked out by hand."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_patrickstar.tracing.answers import grouped_result
from hf_patrickstar.tracing.costs import cost_of

aten = torch.ops.aten


def cost(operator, *args, **kwargs):
    return cost_of(operator, args, kwargs, operator(*args, **kwargs))


class Costs(TorchDispatchMode):
    """What operators cost, in order."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        found = cost_of(func, args, kwargs or {}, result)
        self.found += [] if found is None else [found]
        return result


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
@pytest.mark.parametrize(
    ("kwargs", "num_pairs"), [({}, 16 * 24), ({"is_causal": True}, sum(range(1, 17)))], ids=["all", "causal"]
)
def test_attention_counts_the_pairs_that_attend_in_both_directions(key_heads, kwargs, num_pairs):
    query, key = zeros(2, 4, 16, 8, requires_grad=True), zeros(2, key_heads, 24, 8)
    with Costs() as costs:
        made = torch.nn.functional.scaled_dot_product_attention(query, key, key, enable_gqa=key_heads != 4, **kwargs)
        made.sum().backward()
    found = [one.flops for one in costs.found if one.kind == "attention"]
    assert found == [2 * (2 * 2 * 4 * num_pairs * 8), 5 * (2 * 2 * 4 * num_pairs * 8)], "two and five products"


@pytest.mark.parametrize("name", ["flash", "cudnn"])
def test_causal_attention_of_devices_counts_alike(name):
    """Nobody calls the operator here: it is given to the count as a device would call it."""
    operator = getattr(aten, f"_scaled_dot_product_{name}_attention").default
    query, masks = zeros(2, 4, 16, 8), {"flash": (), "cudnn": (None, True)}[name]
    for is_causal, num_pairs in ((False, 16 * 16), (True, 16 * 17 // 2)):
        found = cost_of(operator, (query, query, query, *masks, 0.0, is_causal), {}, query)
        assert (found.flops, found.kind) == (2 * (2 * 2 * 4 * num_pairs * 8), "attention")


def test_products_of_a_linear_layer_tell_which_operands_are_transposed():
    layer, inputs = torch.nn.Linear(3, 5), zeros(7, 3, requires_grad=True)
    with Costs() as costs:
        layer(inputs).square().sum().backward()
    found = [(one.flops, one.kind) for one in costs.found if one.flops]
    assert found == [(2 * 7 * 3 * 5, kind) for kind in ("NT", "", "TN")], "forward; gradients of inputs and of weights"
    batch = zeros(2, 3, 5)
    assert cost(aten.baddbmm.default, zeros(2, 3, 3), batch, batch.transpose(1, 2)).kind == "NT"
    assert cost(aten.mm.default, zeros(1, 5), zeros(5, 1)).kind == "", "a row, and a column"


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
