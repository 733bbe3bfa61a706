"""Types where a forward of the model begins and ends."""

import collections

import pytest
import torch

from hf_patrickstar.runtime.casting import Casting

CPU = torch.device("cpu")
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
Pair = collections.namedtuple("Pair", ["left", "right"])


def casting(autocast=None, inputs=None):
    return Casting(CPU, autocast, inputs)


# Autocast


def test_there_is_no_autocast_where_none_is_wanted():
    assert casting().autocast(is_recomputed=False) is None


def test_autocast_computes_in_its_type_and_remembers_no_casts():
    weight = torch.ones(2, 2)
    with casting(BF16).autocast(is_recomputed=False):
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_cache_enabled()
        assert (weight @ weight).dtype is BF16
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize(
    ("is_recomputed", "is_ours", "is_wanted"),
    [(False, True, True), (False, False, True), (True, True, False), (True, False, True), (True, None, True)],
)
def test_recomputation_inside_of_our_own_autocast_needs_no_other(is_recomputed, is_ours, is_wanted):
    """Checkpointing has restored what there was: ours, somebody's (which keeps its casts), or none."""
    with torch.autocast("cpu", dtype=BF16, enabled=is_ours is not None, cache_enabled=not is_ours):
        found = casting(BF16).autocast(is_recomputed=is_recomputed)
    assert (found is not None) == is_wanted


# Outputs


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_narrow_outputs_are_given_in_fp32(dtype):
    value = torch.tensor([1.5], dtype=dtype)
    widened = casting().widen(value)
    assert widened.dtype is FP32
    assert widened.tolist() == [1.5]


@pytest.mark.parametrize(
    "output",
    [
        torch.ones(1),
        torch.ones(1, dtype=FP64),
        torch.ones(1, dtype=torch.int64),
        None,
        "text",
        [torch.ones(1), (torch.ones(1), None)],
        {"loss": torch.ones(1), "names": ["a"]},
        Pair(torch.ones(1), 2),
    ],
)
def test_outputs_without_narrow_tensors_stay_the_same_object(output):
    assert casting().widen(output) is output


@pytest.mark.parametrize(
    ("make", "look"),
    [
        (lambda value: [value, 1], lambda found: found[0]),
        (lambda value: (1, value), lambda found: found[1]),
        (lambda value: Pair(value, 1), lambda found: found.left),
        (lambda value: {"logits": value}, lambda found: found["logits"]),
        (lambda value: collections.OrderedDict(logits=(value,)), lambda found: found["logits"][0]),
    ],
)
def test_containers_keep_their_kind(make, look):
    output = make(torch.ones(1, dtype=BF16))
    found = casting().widen(output)
    assert type(found) is type(output)
    assert look(found).dtype is FP32
    assert look(output).dtype is BF16  # what the model returned is not changed


def test_only_what_has_something_narrow_is_made_anew():
    cache, hidden = [torch.ones(1)], [torch.ones(1, dtype=BF16)]
    found = casting().widen({"cache": cache, "hidden": hidden})
    assert found["cache"] is cache
    assert found["hidden"][0].dtype is FP32


def test_gradients_flow_back_through_a_widened_output():
    value = torch.ones(2, dtype=BF16, requires_grad=True)
    casting().widen((value * 2,))[0].sum().backward()
    assert value.grad.tolist() == [2.0, 2.0]


# Inputs


def test_floating_inputs_follow_the_parameters_and_labels_do_not():
    pixels, ids, labels = torch.ones(1), torch.ones(1, dtype=torch.int64), torch.ones(1)
    halves, doubles = torch.ones(1, dtype=FP16), torch.ones(1, dtype=FP64)
    args, kwargs = casting(inputs=BF16).narrow(
        (pixels, ids, halves, doubles, "text"), {"pixel_values": pixels, "labels": labels, "start_labels": labels}
    )
    assert [getattr(value, "dtype", value) for value in args] == [BF16, torch.int64, FP16, BF16, "text"]
    assert args[1] is ids
    assert {name: value.dtype for name, value in kwargs.items()} == {
        "pixel_values": BF16,
        "labels": FP32,
        "start_labels": FP32,
    }


def test_no_inputs():
    assert casting(inputs=BF16).narrow((), {}) == ((), {})
