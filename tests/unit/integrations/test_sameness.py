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


def without_a():
    other = record()
    del other.digests[2]["a"]
    return other


def nan():
    return record(losses=((math.nan,), (0.5,)))


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        (record(), record(), None),
        (nan(), nan(), None),
        (record(), record("xx", "yY", "ZZ"), (1, ("b",))),
        (record(), record("Xx", "YY", "ZZ"), (0, ("a",))),
        (record(), without_a(), (2, ("a",))),
    ],
    ids=[
        "the same",
        "the same NaN",
        "the first step and all names of it",
        "before training",
        "a name that only one has",
    ],
)
def test_where_two_trainings_differ_first(one, other, found):
    divergence = find_divergence(one, other)
    assert (divergence and (divergence.step, divergence.names)) == found


def test_numbers_that_differ_are_said():
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


PLAIN, CHUNKED = torch.arange(8.0), torch.tensor([0.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 5.0])
ONE, ZERO = torch.tensor([1.0, 1.0]), torch.tensor([0.0, math.nan])


@pytest.mark.parametrize(
    ("plain", "chunked", "num_different", "largest", "problem"),
    [
        (PLAIN, CHUNKED, 2, 2.0, ""),
        (ZERO, torch.tensor([-0.0, math.nan]), 1, 0.0, ""),
        (ONE, torch.tensor([math.nan, 2.0]), 2, math.nan, ""),
        (ONE, ONE.bfloat16(), 0, 0.0, "it is float32 [2] in plain training and bfloat16 [2] with --patrickstar"),
        (ONE, None, 0, 0.0, "only plain training has it"),
    ],
)
def test_elements_and_the_largest_difference(tmp_path, monkeypatch, plain, chunked, num_different, largest, problem):
    monkeypatch.setattr(sameness, "_PIECE_NUMEL", 3)
    comparison = compare(tmp_path, {"a": plain}, {"b" if chunked is None else "a": ONE if chunked is None else chunked})
    found = comparison.difference_of("a")
    assert (found.num_different, found.problem, found.is_close) == (num_different, problem, False)
    assert found.largest == pytest.approx(largest, nan_ok=True)
    assert comparison.numel == plain.numel()


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
