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


def test_only_what_has_something_narrow_is_made_anew_and_gradients_flow_back():
    cache, value = [torch.ones(1)], torch.ones(2, dtype=BF16, requires_grad=True)
    found = casting().widen({"cache": cache, "hidden": [value * 2]})
    assert found["cache"] is cache
    found["hidden"][0].sum().backward()
    assert value.grad.tolist() == [2.0, 2.0]


def test_floating_inputs_follow_the_parameters_and_labels_do_not():
    pixels, ids, labels = torch.ones(1), torch.ones(1, dtype=torch.int64), torch.ones(1)
    args, kwargs = casting(inputs=BF16).narrow(
        (pixels, ids, torch.ones(1, dtype=FP16), torch.ones(1, dtype=FP64), "text"),
        {"pixel_values": pixels, "labels": labels, "start_labels": labels},
    )
    assert [getattr(value, "dtype", value) for value in args] == [BF16, torch.int64, FP16, BF16, "text"]
    assert args[1] is ids
    assert {name: value.dtype for name, value in kwargs.items()} == {
        **{"pixel_values": BF16, "labels": FP32, "start_labels": FP32}
    }
    assert casting(inputs=BF16).narrow((), {}) == ((), {})


@pytest.mark.parametrize(
    ("is_recomputed", "is_ours", "is_wanted"),
    [(False, True, True), (False, False, True), (True, True, False), (True, False, True), (True, None, True)],
)
def test_recomputation_inside_of_our_own_autocast_needs_no_other(is_recomputed, is_ours, is_wanted):
    """Checkpointing has restored what there was: ours, somebody's (which keeps its casts), or none."""
    with torch.autocast("cpu", dtype=BF16, enabled=is_ours is not None, cache_enabled=not is_ours):
        assert (casting(BF16).autocast(is_recomputed=is_recomputed) is not None) == is_wanted
