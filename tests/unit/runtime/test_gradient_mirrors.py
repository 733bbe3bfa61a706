"""What was handed out of gradients."""

import pytest
import torch
from unit.runtime.data_parts import Process, run_together, values_at

from hf_patrickstar.layout.specs import Types
from hf_patrickstar.runtime.gradient_mirrors import GradientMirrors
from hf_patrickstar.runtime.gradient_place import GradientPlace
from hf_patrickstar.runtime.mirrors import SCAN_AT

FP16 = Types("float16", "float32")
NARROW, WIDE = torch.bfloat16, torch.float32


class OneOfTwo:
    rank, world_size = 0, 2


def make(*shapes, accumulate=False, collectives=None, gradient=(5.0, 6.0), **chunk):
    """A process, its gradients, their mirrors, and the first tensor, which has a gradient."""
    process = Process(collectives)
    tensor, *_ = process.add_chunk(*(shapes or (2, 2)), **chunk)
    gradients = process.make_gradients(accumulate)
    mirrors = GradientMirrors(process.values, gradients, process.users)
    if gradient is not None:
        gradients.place(tensor, torch.tensor(gradient, dtype=tensor.chunk.param.dtype))
    return process, gradients, mirrors, tensor


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [({}, NARROW), ({"accumulate": True}, WIDE), ({"types": FP16}, WIDE), ({"types": Types()}, WIDE)],
)
def test_a_gradient_is_handed_out_as_the_same_copy(settings, dtype):
    _, gradients, mirrors, tensor = make(**settings)
    gradient = mirrors.hand_out(tensor)
    assert (gradient.tolist(), gradient.dtype) == ([5.0, 6.0], dtype)
    assert gradient.data_ptr() != gradients.of(tensor).data_ptr()
    assert mirrors.hand_out(tensor) is gradient
    assert mirrors.kept(tensor) is gradient
    assert (len(mirrors), mirrors.nbytes) == (1, gradient.nbytes)


def test_what_is_written_to_it_counts():
    _, gradients, mirrors, tensor = make()
    gradient = mirrors.hand_out(tensor)
    gradient.mul_(2)
    mirrors.sync()
    assert gradients.of(tensor).tolist() == [10.0, 12.0]
    assert tensor.gradient is GradientPlace.PARAM


def test_small_numbers_that_are_written_to_an_unscaled_gradient_count():
    """In fp16 they would be zero."""
    _, gradients, mirrors, tensor = make(types=FP16)
    gradient = mirrors.hand_out(tensor)
    gradient.mul_(2**-30)
    mirrors.sync()
    assert gradients.of(tensor).tolist() == [5 * 2**-30, 6 * 2**-30]
    assert values_at(tensor) == [[0.0, 1.0]] * 2


def test_where_nobody_has_written_the_gradient_stays_where_it_is():
    _, gradients, mirrors, tensor = make(types=FP16)
    gradient = mirrors.hand_out(tensor)
    mirrors.sync()
    assert tensor.gradient is GradientPlace.PARAM
    assert gradient.tolist() == [5.0, 6.0]
    assert gradients.of(tensor).dtype is torch.float16


def test_what_nobody_has_is_compared_once_more_and_forgotten():
    _, gradients, mirrors, tensor = make()
    mirrors.hand_out(tensor).fill_(9)
    assert mirrors.kept(tensor) is None
    mirrors.sync_one(tensor)
    assert gradients.of(tensor).tolist() == [9.0, 9.0]
    assert len(mirrors) == 0
    mirrors.sync_one(tensor)


def test_other_memory_in_a_gradient_counts():
    """``parameter.grad.data = value``."""
    _, gradients, mirrors, tensor = make()
    gradient = mirrors.hand_out(tensor)
    gradient.data = torch.tensor([1.0, 2.0], dtype=NARROW)
    mirrors.sync()
    assert gradients.of(tensor).tolist() == [1.0, 2.0]
    gradient[0] = 7
    mirrors.sync()
    assert gradients.of(tensor).tolist() == [7.0, 2.0]
    del gradient
    mirrors.sync()
    assert len(mirrors) == 0


def test_it_follows_what_another_backward_adds():
    _, gradients, mirrors, tensor = make()
    gradient = mirrors.hand_out(tensor)
    gradients.place(tensor, torch.tensor([1.0, 1.0], dtype=NARROW))
    mirrors.refresh(tensor)
    assert gradient.tolist() == [6.0, 7.0]
    assert mirrors.hand_out(tensor) is gradient


@pytest.mark.parametrize("why", ["consumed", "expanded"])
def test_what_cannot_follow_is_forgotten(why):
    _, gradients, mirrors, tensor = make()
    if why == "expanded":
        gradient = torch.ones((), dtype=NARROW).expand(2)
        mirrors.assign(tensor, gradient)
    else:
        gradient = mirrors.hand_out(tensor)
        gradients.drop(tensor)
    before = gradient.tolist()
    mirrors.refresh(tensor)
    assert len(mirrors) == 0
    assert gradient.tolist() == before
    mirrors.refresh(tensor)


# Given ones


@pytest.mark.parametrize("dtype", [NARROW, WIDE])
def test_a_tensor_that_is_assigned_is_the_gradient(dtype):
    _, gradients, mirrors, tensor = make()
    before = mirrors.hand_out(tensor)
    given = torch.tensor([1.0, 2.0], dtype=dtype)
    mirrors.assign(tensor, given)
    assert gradients.of(tensor).tolist() == [1.0, 2.0]
    assert mirrors.hand_out(tensor) is given
    given[0] = 257 if dtype is WIDE else 256
    before.fill_(9)
    mirrors.sync()
    assert gradients.of(tensor).tolist() == given.tolist()
    assert before.tolist() == [9.0, 9.0]


def test_a_gradient_can_be_assigned_where_there_is_none():
    _, gradients, mirrors, tensor = make(gradient=None)
    mirrors.assign(tensor, torch.tensor([1.0, 2.0], dtype=NARROW))
    assert gradients.of(tensor).tolist() == [1.0, 2.0]


def test_a_gradient_with_a_graph_is_kept_though_nobody_has_it():
    _, gradients, mirrors, tensor = make()
    leaf = torch.tensor([5.0, 6.0], dtype=NARROW, requires_grad=True)
    mirrors.follow_recorded(tensor, leaf * 1)
    mirrors.sync()
    (grad,) = torch.autograd.grad(mirrors.hand_out(tensor).sum(), leaf)
    assert grad.tolist() == [1.0, 1.0]
    assert gradients.of(tensor).tolist() == [5.0, 6.0]


def test_a_gradient_that_got_a_graph_later_is_kept():
    _, gradients, mirrors, tensor = make(types=Types())
    factor = torch.tensor(2.0, requires_grad=True)
    mirrors.hand_out(tensor).mul_(factor)
    mirrors.sync()
    assert gradients.of(tensor).tolist() == [10.0, 12.0]
    gradient = mirrors.hand_out(tensor)
    gradient.sum().backward()
    assert factor.grad.item() == 11.0


# Zeros


def test_zeros_are_written_to_what_somebody_has():
    _, gradients, mirrors, tensor = make()
    gradient = mirrors.hand_out(tensor)
    assert mirrors.zero(tensor)
    gradients.drop(tensor, to_zero=True)
    assert gradient.tolist() == [0.0, 0.0]
    mirrors.sync()
    assert tensor.gradient is GradientPlace.ZERO, "nothing is written yet"
    gradient[0] = 3
    mirrors.sync()
    assert gradients.of(tensor).tolist() == [3.0, 0.0]


def test_zeros_have_no_graph():
    _, _, mirrors, tensor = make(types=Types())
    leaf = torch.tensor([5.0, 6.0], requires_grad=True)
    gradient = leaf * 1
    mirrors.follow_recorded(tensor, gradient)
    assert mirrors.zero(tensor)
    assert (gradient.tolist(), gradient.requires_grad) == ([0.0, 0.0], False)
    del gradient
    mirrors.sync_one(tensor)
    assert len(mirrors) == 0


def test_no_zeros_are_written_to_what_nobody_has():
    _, _, mirrors, tensor = make()
    assert not mirrors.zero(tensor)
    mirrors.hand_out(tensor)
    assert not mirrors.zero(tensor)


def test_with_other_processes_zeros_are_not_written():
    _, _, mirrors, tensor = make(collectives=OneOfTwo())
    given = torch.tensor([1.0, 2.0], dtype=NARROW)
    mirrors.assign(tensor, given)
    assert not mirrors.zero(tensor)
    assert given.tolist() == [1.0, 2.0]
    assert mirrors.kept(tensor) is None, "a step of the optimizer leaves nothing of it"
    mirrors.refresh(tensor)
    assert len(mirrors) == 0, "nor does it follow"


# Letting go


@pytest.mark.parametrize("end", ["drop", "close"])
def test_whoever_has_a_gradient_that_is_forgotten_keeps_it(end):
    _, gradients, mirrors, tensor = make()
    gradient = mirrors.hand_out(tensor)
    mirrors.drop(tensor) if end == "drop" else mirrors.close()
    gradient.fill_(9)
    mirrors.sync()
    assert gradients.of(tensor).tolist() == [5.0, 6.0]
    assert (len(mirrors), mirrors.nbytes, mirrors.kept(tensor)) == (0, 0, None)
    mirrors.drop(tensor)


def handed_out(count):
    """Mirrors of so many gradients that nobody has."""
    process, gradients, mirrors, _ = make(*[1] * count, gradient=None)
    for tensor in process.tensors:
        gradients.place(tensor, torch.ones(1, dtype=NARROW))
        mirrors.hand_out(tensor)
    return process.tensors, mirrors


def test_with_few_mirrors_the_last_one_is_looked_at():
    (first, second, _), mirrors = handed_out(3)
    mirrors.sync_unused(first)
    assert len(mirrors) == 3
    mirrors.sync_unused(first)
    assert len(mirrors) == 3, "the one that is asked for now stays"
    mirrors.sync_unused(second)
    assert (len(mirrors), mirrors.nbytes) == (2, 4)


def test_a_loop_that_has_the_one_before_when_it_asks_for_the_next_holds_two():
    process, gradients, mirrors, _ = make(*[1] * (SCAN_AT - 2), gradient=None)
    before, held = None, []
    for tensor in process.tensors:
        gradients.place(tensor, torch.ones(1, dtype=NARROW))
        mirrors.sync_unused(tensor)
        before = mirrors.hand_out(tensor)
        held.append(len(mirrors))
    assert before is not None
    assert held == [1, *[2] * (SCAN_AT - 3)]


def test_with_many_mirrors_all_are_looked_at():
    tensors, mirrors = handed_out(SCAN_AT)
    mirrors.sync_unused(tensors[0])
    assert len(mirrors) == 0


def test_what_is_used_is_not_forgotten():
    tensors, mirrors = handed_out(SCAN_AT)
    gradient = mirrors.hand_out(tensors[3])
    mirrors.sync_unused(tensors[0])
    assert len(mirrors) == 1
    assert mirrors.kept(tensors[3]) is gradient


# Several processes


def test_every_process_is_handed_what_one_has():
    def work(process):
        first, second = process.add_chunk(2, (1, 2), chunk_numel=2)
        gradients = process.make_gradients()
        mirrors = GradientMirrors(process.values, gradients, process.users)
        for tensor, numbers in ((first, [5.0, 6.0]), (second, [[7.0, 8.0]])):
            gradients.put(tensor, torch.tensor(numbers, dtype=NARROW))
        found = mirrors.hand_out(first), mirrors.hand_out(second)
        assert mirrors.hand_out(first) is found[0], "the same, with what is at home now"
        return [gradient.tolist() for gradient in found]

    assert run_together(2, work) == [[[5.0, 6.0], [[7.0, 8.0]]]] * 2
