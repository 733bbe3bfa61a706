"""What two recorded trainings have in common."""

import math

import pytest
import torch
from safetensors.torch import save_file

from hf_patrickstar.cli import comparison
from hf_patrickstar.cli.comparison import WEIGHTS, Record, compare

WEIGHT = torch.tensor([0.0, 4.0])


@pytest.fixture
def run(tmp_path):
    """Writes what two trainings of two steps did, and compares; the second one has other weights or numbers."""

    def run(weights=WEIGHT, norm=1.0, losses=((1.0,), (0.5,)), precision="no", rates=(0.0, 0.0), digests=None):
        ours = weights if isinstance(weights, dict) else {"a": weights}
        trained = (
            ("plain", {"a": WEIGHT}, 1.0, ((1.0,), (0.5,)), ["x", "y", "z"]),
            ("ours", ours, norm, losses, digests or ["x", "y", "z"]),
        )
        for name, tensors, last, values, hashes in trained:
            (tmp_path / name).mkdir()
            save_file(tensors, tmp_path / name / WEIGHTS)
            by_step = [dict.fromkeys(tensors, text) for text in hashes]
            Record([list(step) for step in values], [2.0, last], list(rates), by_step, precision).write(tmp_path / name)
        verdict, details = compare(tmp_path / "plain", tmp_path / "ours")
        return verdict, "\n".join(details)

    return run


def test_the_same(run):
    assert run() == ("same bits", "2 steps, 2 losses, 2 gradient norms, 1 parameters and buffers with 2 elements")


@pytest.mark.parametrize(
    ("digests", "when"),
    [(["x", "Y", "Z"], "after step 1"), (["X", "Y", "Z"], "before the first step"), (["x", "y"], "after step 2")],
)
def test_the_first_step_that_differs(run, digests, when):
    verdict, details = run(digests=digests)
    assert verdict == "different"
    assert f"{when}: 'a' (1 in all)" in details


def test_numbers_that_differ_are_told(run):
    assert run(losses=((1.0,), (0.25, 0.25)), norm=math.nan) == (
        "different",
        "the loss of step 2 is 0.5 without --patrickstar and 0.25 + 0.25 with it\n"
        "the gradient norm of step 2 is 1.0 without --patrickstar and nan with it",
    )


@pytest.mark.parametrize(
    ("precision", "norm", "verdict"),
    [
        ("no", 1.0 + 2**-9, "different"),
        ("bf16", 1.0 + 2**-8, "close"),
        ("bf16", 1.02, "different"),
        ("fp16", 1.0 + 2**-9, "different"),
    ],
)
def test_numbers_are_close_within_a_rounding_step(run, precision, norm, verdict):
    assert run(norm=norm, precision=precision)[0] == verdict


@pytest.mark.parametrize(
    ("value", "precision", "rates", "verdict", "words"),
    [
        (4.0 + 2 * 2**-5, "bf16", (0.0, 0.0), "close", "1 of 2 elements, by 0.0625"),  # two steps, 2**-5 each
        (4.0 + 2 * 2**-5, "no", (0.0, 0.0), "different", "1 of 2 elements, by 0.0625"),
        (4.0 + 3 * 2**-5, "bf16", (0.0, 0.0), "different", "by 0.09375"),
        (4.0 + 3 * 2**-5, "bf16", (0.01, 0.01), "close", "by 0.09375"),
        (math.nan, "bf16", (0.01, 0.01), "different", "by nan"),
    ],
)
def test_weights_are_close_within_rounding_and_learning_rates(
    run, monkeypatch, value, precision, rates, verdict, words
):
    monkeypatch.setattr(comparison, "_PIECE_NUMEL", 1)
    found, details = run(torch.tensor([0.0, value]), precision=precision, rates=rates, digests=["x", "y", "Z"])
    assert found == verdict
    assert words in details


def test_bits_differ_where_values_do_not(run):
    found, details = run(torch.tensor([-0.0, 4.0]), digests=["x", "y", "Z"])
    assert (found, "1 of 2 elements, by 0 at most" in details) == ("different", True)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (WEIGHT.bfloat16(), "float32 [2] without --patrickstar and torch.bfloat16 [2] with it"),
        ({"b": WEIGHT}, "'a' is torch.float32 [2] without --patrickstar and missing with it"),
    ],
)
def test_what_cannot_be_compared_is_said(run, weights, words):
    found, details = run(weights, precision="bf16", digests=["x", "y", "Z"])
    assert found == "different"
    assert words in details
