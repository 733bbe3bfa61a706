"""The scripted update beside torch's Adam: the same bits, whatever its settings, types and tiles are.

tests/engine and tests/parity compare whole runs; here are ranges that end inside of a tile, types that no run has, and
scripts with other bits.
"""

import pytest
import torch

from hf_patrickstar.optim import adam_script as module
from hf_patrickstar.optim.adam_script import Range, adam_script, rule_of

NUMELS = (1000, 64, 333)
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def make_lists(value_dtype, state_dtype):
    """Masters, averages, averages of squares, gradients and values of some ranges."""
    torch.manual_seed(0)
    masters, firsts, seconds, gradients = ([torch.randn(n).to(state_dtype) for n in NUMELS] for _ in range(4))
    seconds = [second.square() for second in seconds]
    return masters, firsts, seconds, [g.to(value_dtype) for g in gradients], [m.to(value_dtype) for m in masters]


def ranges_of(lists, rule, stays):
    """The whole of each list, in two ranges that meet at a multiple of 64."""
    return [
        Range(*buffers, start, start, min(stop, buffers[0].numel()) - start, rule, stays)
        for buffers in zip(*lists, strict=True)
        for start, stop in ((0, 64), (64, 2**20))
        if start < buffers[0].numel()
    ]


# Each pair of values of two columns is in one row: an orthogonal array.
CASES = [
    # Implementation, types, tile, factor, decoupled, maximize, decay.
    ("fused", BF16, FP32, 64, None, False, False, 0.0),
    ("fused", FP16, FP32, 192, 0.3, True, False, 0.1),
    ("fused", FP32, FP32, 2**15, None, True, True, 0.1),
    ("fused", FP64, FP64, 64, 0.3, False, True, 0.0),
    ("single", BF16, FP32, 192, 0.3, True, True, 0.0),
    ("single", FP16, FP32, 2**15, None, False, True, 0.1),
    ("single", FP32, FP32, 64, 0.3, False, False, 0.1),
    ("single", FP64, FP64, 192, None, True, False, 0.0),
    ("foreach", BF16, FP32, 2**15, 0.3, False, True, 0.1),
    ("foreach", FP16, FP32, 64, None, True, True, 0.0),
    ("foreach", FP32, FP32, 192, 0.3, True, False, 0.0),
    ("foreach", FP64, FP64, 2**15, None, False, False, 0.1),
]


@pytest.mark.parametrize(
    ("kind", "value_dtype", "state_dtype", "tile_numel", "factor", "decoupled", "maximize", "decay"), CASES
)
def test_every_bit_is_that_of_torch(
    kind, value_dtype, state_dtype, tile_numel, factor, decoupled, maximize, decay, monkeypatch
):
    monkeypatch.setattr(module, "TILE_NUMEL", tile_numel)
    factor = None if factor is None else torch.tensor(factor)
    settings = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": decay, "maximize": maximize}
    masters, firsts, seconds, gradients, values = make_lists(value_dtype, state_dtype)
    parameters = [torch.nn.Parameter(master.clone()) for master in masters]
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    twin = cls(parameters, **settings, fused=kind == "fused" or None, foreach=kind == "foreach" or None)
    for p, first, second, gradient in zip(parameters, firsts, seconds, gradients, strict=True):
        twin.state[p] = {"step": torch.tensor(2.0), "exp_avg": first.clone(), "exp_avg_sq": second.clone()}
        p.grad = gradient.to(state_dtype) if factor is None else gradient.to(state_dtype) * factor
    twin.step()
    lists = masters, firsts, seconds, gradients, values
    adam_script()(ranges_of(lists, rule_of(settings, 2, decoupled), stays=False), fused=kind == "fused", factor=factor)
    for number, p in enumerate(parameters):
        assert torch.equal(masters[number], p)
        assert torch.equal(values[number], p.to(value_dtype))
        assert torch.equal(firsts[number], twin.state[p]["exp_avg"])
        assert torch.equal(seconds[number], twin.state[p]["exp_avg_sq"])


@pytest.mark.parametrize("keeps", [True, False])
def test_a_gradient_of_its_type_is_multiplied_in_its_place_if_it_stays(keeps):
    lists = make_lists(FP32, FP32)
    before = [gradient.clone() for gradient in lists[3]]
    rule = rule_of({"lr": 1, "betas": (0.9, 0.9), "eps": 1, "weight_decay": 0, "maximize": False}, 0, True)
    adam_script()(ranges_of(lists, rule, stays=keeps), fused=False, factor=torch.tensor(0.5))
    for gradient, old in zip(lists[3], before, strict=True):
        assert torch.equal(gradient, old * 0.5 if keeps else old)


@pytest.mark.parametrize("name", ["lr", "betas", "weight_decay", "eps"])
def test_settings_that_are_tensors_are_for_torch(name):
    settings = {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0, "eps": 1e-8, "maximize": False}
    settings[name] = (0.9, torch.tensor(0.99)) if name == "betas" else torch.tensor(0.1)
    assert rule_of(settings, 3, True) is None


CHANGES = {
    "value=weight2": "value=weight2 * 1.000001",
    "div_(scale)": "mul_(1.0 / scale)",
    "weight_decay=weight_decay": "weight_decay=0.0",
    "gradient.mul_(factor)": "gradient.div_(1.0 / factor)",
    "def update(": "def update(:",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_script_with_other_bits_than_torch_or_that_does_not_compile_is_not_used(change, monkeypatch):
    assert change in module._SOURCE
    monkeypatch.setattr(module, "_SOURCE", module._SOURCE.replace(change, CHANGES[change]))
    assert adam_script.__wrapped__() is None
