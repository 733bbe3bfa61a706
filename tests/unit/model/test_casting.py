"""Types where a forward of the model begins and ends."""

import collections

import pytest
import torch

from hf_patrickstar.model.casting import Casting

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
Pair = collections.namedtuple("Pair", ["left", "right"])


def casting(autocast=None, inputs=None):
    return Casting(torch.device("cpu"), autocast, inputs)


def test_autocast_computes_in_its_type_and_remembers_no_casts():
    weight = torch.ones(2, 2)
    with casting(BF16).autocast(is_recomputed=False):
        assert (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()) == (True, False)
        assert (weight @ weight).dtype is BF16
    assert (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()) == (False, True)
    assert casting().autocast(is_recomputed=False) is None


@pytest.mark.parametrize(
    ("make", "look"),
    [
        (lambda value: value, lambda found: found),
        (lambda value: [value, 1], lambda found: found[0]),
        (lambda value: (1, value), lambda found: found[1]),
        (lambda value: Pair(value, 1), lambda found: found.left),
        (lambda value: collections.OrderedDict(logits=(value, "text")), lambda found: found["logits"][0]),
    ],
)
def test_narrow_outputs_are_given_in_fp32_and_containers_keep_their_kind(make, look):
    for dtype in (BF16, FP16):
        output = make(torch.tensor([1.5], dtype=dtype))
        found = casting().widen(output)
        assert type(found) is type(output)
        assert (look(found).dtype, look(found).tolist()) == (FP32, [1.5])
        assert look(output).dtype is dtype, "what the model returned is not changed"
    for dtype in (FP32, FP64, torch.int64):
        output = make(torch.ones(1, dtype=dtype))
        assert casting().widen(output) is output


@pytest.mark.parametrize(
    ("is_recomputed", "is_ours", "is_wanted"),
    [(False, True, True), (False, False, True), (True, True, False), (True, False, True), (True, None, True)],
)
def test_recomputation_inside_of_our_own_autocast_needs_no_other(is_recomputed, is_ours, is_wanted):
    """Checkpointing has restored what there was: ours, somebody's (which keeps its casts), or none."""
    with torch.autocast("cpu", dtype=BF16, enabled=is_ours is not None, cache_enabled=not is_ours):
        assert (casting(BF16).autocast(is_recomputed=is_recomputed) is not None) == is_wanted
