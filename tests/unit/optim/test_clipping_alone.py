"""Norms of gradients and clipping, over small chunks and parameters in none; numbers are exact, or nearly."""

import math

import pytest
import torch
from unit.optim.updates import firsts, give, make_parts, values
from unit.spec_builders import BF16, FP32

from hf_patrickstar.errors import EngineError
from hf_patrickstar.optim.clipping import clip_by_norm, clip_by_value, total_norm
from hf_patrickstar.runtime.gradient_place import GradientPlace


def make(*chunks, types=BF16, outside=None, **gradients):
    """Parts with gradients, the manager, and what there is to clip: all in chunks, and one parameter that is in none.

    Args:
        *chunks: Numbers of elements of the tensors of each chunk.
        types: Of the chunks.
        outside: The gradient of the parameter outside of chunks, if there is one.
        **gradients: As for ``give``.
    """
    parts = make_parts(*(chunks or [(1, 1)]), types=types)
    give(parts, **gradients)
    items = list(parts.tensors)
    if outside is not None:
        items.append(torch.nn.Parameter(torch.zeros(1)))
        items[-1].grad = torch.tensor([float(outside)])
    return parts, parts.manager, items


def gradients_of(parts):
    return [None if (found := parts.gradients.of(tensor)) is None else found.tolist() for tensor in parts.tensors]


# The norm


@pytest.mark.parametrize(("norm_type", "expected"), [(2.0, 13.0), (1.0, 19.0), (math.inf, 12.0)])
def test_the_norm_is_that_of_all_gradients_together(norm_type, expected):
    _, manager, items = make(t0=3, t1=4, outside=-12)
    norm = total_norm(manager, items, norm_type)
    assert norm.item() == pytest.approx(expected)
    assert (norm.dtype, norm.shape) == (torch.float32, ())


@pytest.mark.parametrize("types", [BF16, FP32])
def test_it_has_the_bits_that_torch_computes(types):
    parts, manager, items = make((70, 33), (100,), types=types)
    found = []
    for tensor in parts.tensors:
        found.append(torch.randn(tensor.spec.shape).to(tensor.chunk.param.dtype))
        parts.gradients.add(tensor, found[-1])
    expected = torch.nn.utils.get_total_norm([gradient.float() for gradient in found])
    assert torch.equal(total_norm(manager, items, 2.0), expected)


def test_what_has_no_gradient_counts_nothing():
    _, manager, items = make((1, 1), (1,), t1=4)
    assert total_norm(manager, [*items, torch.nn.Parameter(torch.zeros(1))], 2.0).item() == 4.0


def test_without_any_gradient_the_norm_is_zero():
    _, manager, items = make()
    assert total_norm(manager, items, 2.0).item() == total_norm(manager, [], 2.0).item() == 0.0


def test_gradients_in_every_place_count():
    parts, manager, items = make((1, 1, 1), t0=3, t1=4, t2=12)
    parts.gradients.move_to_list(parts.tensors[0])
    parts.gradients.drop(parts.tensors[2])
    parts.tensors[2].deferred_gradient = torch.full((1,), 12.0, dtype=torch.bfloat16)
    assert total_norm(manager, items, 2.0).item() == 13.0


def test_it_is_computed_anew_after_a_gradient_has_changed():
    parts, manager, items = make(t0=3, t1=4)
    assert total_norm(manager, items, 2.0).item() == 5.0
    give(parts, t0=9)
    assert total_norm(manager, items, 2.0).item() == pytest.approx(160**0.5)
    parts.gradients.drop(parts.tensors[0])
    assert total_norm(manager, items, 2.0).item() == 4.0


def test_from_then_on_norms_are_recorded_when_gradients_come():
    parts, manager, items = make()
    total_norm(manager, items, math.inf)
    assert not parts.gradients.records_norms
    total_norm(manager, items, 2.0)
    give(parts, t0=3)
    assert parts.tensors[0].gradient_norm.item() == 3.0


def test_a_recorded_norm_is_not_one_of_another_order():
    _, manager, items = make((2,), t0=3)
    total_norm(manager, items, 2.0)
    assert total_norm(manager, items, 1.0).item() == 6.0
    assert total_norm(manager, items, 2.0).item() == pytest.approx(18**0.5)


def test_the_norm_is_that_of_unscaled_gradients():
    parts, manager, items = make(t0=6, t1=8, outside=12)  # of which those outside are unscaled already
    parts.gradients.inverse_scale = torch.tensor(0.5)
    assert total_norm(manager, items, 2.0).item() == 13.0
    assert firsts(values(parts)) == [6.0, 8.0]
    assert parts.gradients.inverse_scale.item() == 0.5, "the step removes it"


def test_what_was_clipped_has_the_norm_that_it_has_now():
    parts, manager, items = make(t0=6, t1=8)
    parts.gradients.coefficient = torch.tensor(0.5)
    assert total_norm(manager, items, 2.0).item() == 5.0
    assert gradients_of(parts) == [[3.0], [4.0]]
    assert not parts.gradients.has_factor


def test_a_gradient_that_is_not_whole_has_no_norm():
    parts, manager, items = make(t0=3)
    parts.tensors[1].gradient = GradientPlace.INCOMPLETE
    with pytest.raises(EngineError, match="'t1' was consumed"):
        total_norm(manager, items, 2.0)


def test_writes_to_a_gradient_that_was_handed_out_count():
    parts, manager, items = make(t0=3)
    mirror = parts.gradient_mirrors.hand_out(parts.tensors[0])
    mirror.fill_(7)
    assert total_norm(manager, items, 2.0).item() == 7.0


# Clipping by it


def test_clipping_all_waits_for_the_step():
    parts, manager, items = make(t0=3, t1=4, outside=12)
    assert clip_by_norm(manager, items, 6.5, 2.0).item() == 13.0
    assert parts.gradients.coefficient.item() == pytest.approx(0.5)
    assert gradients_of(parts) == [[3.0], [4.0]]
    assert items[-1].grad.item() == pytest.approx(6.0), "outside of chunks it does not wait"


def test_the_coefficient_is_the_one_of_torch():
    parts, manager, items = make((70,), types=FP32)
    gradient = torch.randn(70)
    parts.gradients.add(parts.tensors[0], gradient)
    twin = torch.nn.Parameter(torch.zeros(70))
    twin.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_([twin], 0.3)
    clip_by_norm(manager, items, 0.3, 2.0)
    assert torch.equal(gradient * parts.gradients.coefficient, twin.grad)


def test_what_is_not_too_large_is_not_made_larger():
    parts, manager, items = make(t0=3, outside=4)
    assert clip_by_norm(manager, items, 100.0, 2.0).item() == 5.0
    assert (parts.gradients.coefficient.item(), items[-1].grad.item()) == (1.0, 4.0)


def test_without_a_limit_nothing_is_left_to_do():
    parts, manager, items = make(t0=3, t1=4)
    assert clip_by_norm(manager, items, math.inf, 2.0).item() == 5.0
    assert not parts.gradients.has_factor


def test_clipping_twice_is_clipping_by_what_is_left():
    parts, manager, items = make(types=FP32, t0=6, t1=8)
    assert clip_by_norm(manager, items, 5.0, 2.0).item() == 10.0
    assert clip_by_norm(manager, items, 2.5, 2.0).item() == pytest.approx(5.0)
    first, second = gradients_of(parts)
    factor = parts.gradients.coefficient.item()
    assert [first[0] * factor, second[0] * factor] == pytest.approx([1.5, 2.0])


def test_if_some_are_not_to_be_clipped_the_others_are_at_once():
    parts, manager, items = make(t0=6, t1=8)
    assert clip_by_norm(manager, items[:1], 3.0, 2.0).item() == 6.0
    assert gradients_of(parts) == [[pytest.approx(3.0)], [8.0]]
    assert not parts.gradients.has_factor


def test_those_without_a_gradient_need_not_be_named():
    parts, manager, items = make(t0=6)
    clip_by_norm(manager, items[:1], 3.0, 2.0)
    assert parts.gradients.coefficient.item() == pytest.approx(0.5)


def test_if_somebody_looks_at_a_gradient_it_is_clipped_at_once():
    parts, manager, items = make(t0=6, t1=8)
    mirror = parts.gradient_mirrors.hand_out(parts.tensors[0])
    clip_by_norm(manager, items, 5.0, 2.0)
    assert mirror.item() == pytest.approx(3.0, rel=0.01)
    assert gradients_of(parts) == [[pytest.approx(3.0, rel=0.01)], [pytest.approx(4.0)]]
    assert not parts.gradients.has_factor


def test_a_scale_that_is_still_to_be_removed_is_not_lost():
    parts, manager, items = make(t0=6, t1=8)
    parts.gradients.inverse_scale = torch.tensor(0.5)
    assert clip_by_norm(manager, items, 2.5, 2.0).item() == 5.0
    assert parts.gradients.take_factor().item() == pytest.approx(0.25)


# Clipping each element


def test_elements_are_clipped_to_the_limit():
    parts, manager, items = make((1, 1, 1), t0=3, t1=-3, t2=1, outside=7)
    clip_by_value(manager, items, 2.0)
    assert gradients_of(parts) == [[2.0], [-2.0], [1.0]]
    assert items[-1].grad.item() == 2.0


def test_elements_that_are_not_named_stay():
    parts, manager, items = make(t0=3, t1=3)
    clip_by_value(manager, [items[1], torch.nn.Parameter(torch.zeros(1))], 2.0)
    assert gradients_of(parts) == [[3.0], [2.0]]


def test_the_limit_is_for_unscaled_gradients():
    parts, manager, items = make(t0=6, t1=3, outside=7)
    parts.gradients.inverse_scale = torch.tensor(0.5)
    clip_by_value(manager, items, 2.0)
    assert gradients_of(parts) == [[4.0], [3.0]]
    assert items[-1].grad.item() == 2.0


def test_what_was_clipped_by_norm_is_clipped_as_it_is_then():
    parts, manager, items = make(t0=6, t1=2)
    parts.gradients.coefficient = torch.tensor(0.5)
    clip_by_value(manager, items, 2.0)
    assert gradients_of(parts) == [[2.0], [1.0]]


def test_a_norm_from_before_does_not_count_any_more():
    _, manager, items = make(t0=3)
    total_norm(manager, items, 2.0)
    clip_by_value(manager, items, 2.0)
    assert total_norm(manager, items, 2.0).item() == 2.0


def test_what_was_handed_out_follows():
    parts, manager, items = make(t0=3)
    mirror = parts.gradient_mirrors.hand_out(parts.tensors[0])
    clip_by_value(manager, items, 2.0)
    assert mirror.item() == 2.0
