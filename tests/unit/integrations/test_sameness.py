"""What two recorded trainings have in common."""

import math

import pytest
import torch
from safetensors.torch import save_file

from hf_patrickstar.integrations import sameness
from hf_patrickstar.integrations.sameness import Comparison, find_divergence
from hf_patrickstar.integrations.short_training import Record

NAMES = ("a", "b")


def record(*steps, losses=((1.0,), (0.5,)), norms=(2.0, 1.0), precision="no", rates=(0.0, 0.0)):
    """``steps`` are what stands for the bits of a and b, one letter each."""
    steps = steps or ("xx", "yy", "zz")
    digests = [dict(zip(NAMES, step, strict=True)) for step in steps]
    return Record([list(step) for step in losses], list(norms), list(rates), digests, precision)


def test_the_same():
    assert find_divergence(record(), record()) is None
    nan = record(losses=((math.nan,), (0.5,)))
    assert find_divergence(nan, record(losses=((math.nan,), (0.5,)))) is None


def test_the_first_step_and_all_names_of_it():
    found = find_divergence(record(), record("xx", "yY", "ZZ"))
    assert (found.step, found.names, found.numbers) == (1, ("b",), ())
    assert find_divergence(record(), record("Xx", "YY", "ZZ")).step == 0


def test_a_name_that_only_one_has_differs():
    other = record()
    del other.digests[2]["a"]
    found = find_divergence(record(), other)
    assert (found.step, found.names) == (2, ("a",))


def test_numbers_that_differ_are_told():
    found = find_divergence(record(), record(losses=((1.0,), (0.25, 0.25)), norms=(2.0,)))
    assert found.step is None
    assert found.numbers == (
        "the loss of step 2 is 0.5 in plain training and 0.25 + 0.25 with --patrickstar",
        "the gradient norm of step 2 is 1.0 in plain training and missing with --patrickstar",
    )


@pytest.mark.parametrize(
    ("precision", "norm", "is_close"),
    [("no", 1.0 + 2**-9, False), ("bf16", 1.0 + 2**-8, True), ("bf16", 1.02, False), ("fp16", 1.0 + 2**-9, False)],
)
def test_numbers_are_close_within_a_rounding_step(precision, norm, is_close):
    other = record(norms=(2.0, norm), precision=precision)
    assert find_divergence(record(), other).are_numbers_close is is_close


def compare(tmp_path, plain, chunked, **kwargs):
    paths = [str(tmp_path / name) for name in ("plain", "chunked")]
    for path, tensors in zip(paths, (plain, chunked), strict=True):
        save_file(tensors, path)
    one, other = record(**kwargs), record("xx", "yY", "ZZ", **kwargs)
    return Comparison(one, other, *paths)


def test_elements_and_the_largest_difference(tmp_path, monkeypatch):
    monkeypatch.setattr(sameness, "_PIECE_NUMEL", 3)
    plain = torch.arange(8.0)
    chunked = plain.clone()
    chunked[[1, 7]] = torch.tensor([1.5, 5.0])
    comparison = compare(tmp_path, {"a": plain}, {"a": chunked})
    found = comparison.difference_of("a")
    assert (found.numel, found.num_different, found.largest, found.is_close) == (8, 2, 2.0, False)
    assert comparison.numel == 8


def test_bits_differ_where_values_do_not(tmp_path):
    found = compare(tmp_path, {"a": torch.tensor([0.0, math.nan])}, {"a": torch.tensor([-0.0, math.nan])})
    assert (found.difference_of("a").num_different, found.difference_of("a").largest) == (1, 0.0)
    found = compare(tmp_path, {"a": torch.tensor([1.0, 1.0])}, {"a": torch.tensor([math.nan, 2.0])})
    assert math.isnan(found.difference_of("a").largest)


def test_what_cannot_be_compared_is_said(tmp_path):
    plain = {"a": torch.zeros(2), "b": torch.zeros(3)}
    found = compare(tmp_path, plain, {"a": torch.zeros(2, dtype=torch.bfloat16)})
    assert found.difference_of("a").problem == "it is float32 [2] in plain training and bfloat16 [2] with --patrickstar"
    assert found.difference_of("b").problem == "only plain training has it"


@pytest.mark.parametrize(
    ("value", "rates", "is_close"),
    [
        (4.0 + 2 * 2**-5, (0.0, 0.0), True),  # a rounding step of bf16 at 4 is 2**-5, twice for two steps
        (4.0 + 3 * 2**-5, (0.0, 0.0), False),
        (4.0 + 3 * 2**-5, (0.01, 0.01), True),
        (math.nan, (0.01, 0.01), False),
    ],
)
def test_weights_are_close_within_rounding_and_learning_rates(value, rates, is_close, tmp_path):
    tensors = [{name: torch.tensor([4.0, x]) for name in NAMES} for x in (4.0, value)]
    found = compare(tmp_path, *tensors, precision="bf16", rates=rates).differences()
    assert set(found) == {"a", "b"}
    assert {item.is_close for item in found.values()} == {is_close}
