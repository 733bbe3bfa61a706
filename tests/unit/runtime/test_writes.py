"""What is written to parameters, and takes its way to every place."""

import pytest
import torch
from unit.runtime.data_parts import Process, values_at

from hf_patrickstar.runtime.gradient_place import GradientPlace
from hf_patrickstar.runtime.live_parameter import raw_data, set_raw_data

NARROW, WIDE = torch.bfloat16, torch.float32
FINE = 1 + 2**-10


class Live:
    """Answers for a parameter; here only what it was exchanged for is asked about."""

    kept = None


def make(*, is_bound=False, **chunk):
    """A process, what takes writes everywhere, and a parameter (0, 1) whose chunk has a copy."""
    process = Process()
    tensor, _ = process.add_chunk(2, 2, **chunk)
    if is_bound:
        tensor.bind(Live())
    process.load(tensor.chunk)
    process.gradients = process.make_gradients()
    writes, process.gradient_mirrors = process.make_writes(process.gradients)
    return process, writes, tensor


def copy_of(tensor):
    return tensor.view_copy(tensor.chunk.compute).tolist()


# Known writes


@pytest.mark.parametrize("voids_graphs", [True, False])
def test_a_write_reaches_every_place_and_the_mirrors(voids_graphs):
    process, writes, tensor = make()
    mirror = process.mirrors.hand_out(tensor)
    writes.apply(tensor, torch.tensor([FINE, 8.0]), voids_graphs=voids_graphs)
    assert values_at(tensor) == [[1.0, 8.0], [FINE, 8.0]]
    assert (copy_of(tensor), mirror.tolist()) == ([1.0, 8.0], [1.0, 8.0])
    assert tensor.num_writes == voids_graphs


def test_the_value_follows_its_master():
    process, writes, tensor = make()
    mirror = process.mirrors.hand_out(tensor)
    tensor.view(tensor.chunk.lists["master"]).copy_(torch.tensor([FINE, 8.0]))
    writes.follow_master(tensor)
    assert values_at(tensor) == [[1.0, 8.0], [FINE, 8.0]]
    assert (copy_of(tensor), mirror.tolist()) == ([1.0, 8.0], [1.0, 8.0])


@pytest.mark.parametrize("dtype", [NARROW, WIDE])
def test_what_is_assigned_is_the_memory_of_the_parameter_if_it_can_be(dtype):
    process, writes, tensor = make()
    before = process.mirrors.hand_out(tensor)
    value = torch.tensor([7.0, 8.0], dtype=dtype)
    writes.assign(tensor, value)
    assert values_at(tensor) == [[7.0, 8.0]] * 2
    assert (copy_of(tensor), before.tolist()) == ([7.0, 8.0], [0.0, 1.0])
    before.fill_(3)
    value.fill_(9)
    writes.sync()
    assert values_at(tensor) == [[9.0, 9.0] if dtype is NARROW else [7.0, 8.0]] * 2
    assert tensor.num_writes == 0, "graphs of before have their own values"


@pytest.mark.parametrize("num_saved", [0, 1])
def test_a_graph_of_before_an_assignment_has_the_old_value(num_saved):
    _, writes, tensor = make()
    tensor.num_saved = num_saved
    before = tensor.epoch
    writes.assign(tensor, torch.tensor([7.0, 8.0]))
    assert (tensor.epoch is not before) == bool(num_saved)
    assert tensor.epoch.value is None
    if num_saved:
        assert before.value.tolist() == [0.0, 1.0]


def test_a_parameter_of_another_shape_is_let_go():
    process, writes, tensor = make(is_bound=True)
    process.gradients.place(tensor, torch.tensor([5.0, 6.0], dtype=NARROW))
    mirror, gradient = process.mirrors.hand_out(tensor), process.gradient_mirrors.hand_out(tensor)
    value = torch.ones(3, dtype=NARROW)
    writes.assign(tensor, value)
    assert tensor.is_given_up
    assert not tensor.is_bound
    assert type(tensor.parameter) is torch.nn.Parameter
    assert tensor.parameter.data_ptr() == value.data_ptr()
    assert not process.mirrors.has(tensor)
    assert (tensor.gradient, len(process.gradient_mirrors)) == (GradientPlace.NONE, 0)
    assert (mirror.tolist(), gradient.tolist()) == ([0.0, 1.0], [5.0, 6.0])


# While a module computes


def compute(tensor):
    tensor.materialize(tensor.chunk.compute)


@pytest.mark.parametrize("is_bound", [False, True])
def test_a_parameter_that_nobody_wrote_to_is_taken_back(is_bound):
    process, writes, tensor = make(is_bound=is_bound)
    compute(tensor)
    writes.take_back(tensor)
    assert not tensor.is_materialized
    assert tensor.is_as_left
    assert raw_data(tensor.parameter).isnan().all()
    assert process.values.version == 0


def test_what_was_written_in_place_is_taken_over():
    _, writes, tensor = make()
    tensor.num_saved = 1
    compute(tensor)
    before = tensor.epoch
    with torch.no_grad():
        tensor.parameter.add_(7)
    writes.take_back(tensor)
    assert values_at(tensor) == [[7.0, 8.0]] * 2
    assert tensor.is_as_left
    assert tensor.epoch is before, "it is the same memory"


def test_what_was_written_to_data_is_taken_over_if_it_is_watched():
    process, writes, tensor = make()
    compute(tensor)
    process.watch.add(tensor)
    raw_data(tensor.parameter).add_(7)
    writes.take_back(tensor)
    assert values_at(tensor) == [[7.0, 8.0]] * 2


@pytest.mark.parametrize("num_saved", [0, 1])
def test_other_data_is_taken_over(num_saved):
    _, writes, tensor = make()
    tensor.num_saved = num_saved
    compute(tensor)
    before = tensor.epoch
    set_raw_data(tensor.parameter, torch.tensor([7.0, 8.0], dtype=NARROW))
    writes.take_back(tensor)
    assert values_at(tensor) == [[7.0, 8.0]] * 2
    assert copy_of(tensor) == [7.0, 8.0]
    assert raw_data(tensor.parameter).isnan().all()
    assert (tensor.epoch is not before) == bool(num_saved)
    if num_saved:
        assert before.value.tolist() == [0.0, 1.0]


def test_data_of_another_shape_is_kept_by_the_parameter():
    _, writes, tensor = make(is_bound=True)
    compute(tensor)
    set_raw_data(tensor.parameter, torch.ones(3, dtype=NARROW))
    writes.take_back(tensor)
    assert tensor.is_given_up
    assert tensor.parameter.tolist() == [1.0, 1.0, 1.0]
    assert values_at(tensor) == [[0.0, 1.0]] * 2


# Writes without a trace


def test_before_values_are_used_all_that_was_written_is_taken_over():
    process, writes, tensor = make()
    second = process.tensors[1]
    process.gradients.place(tensor, torch.tensor([5.0, 6.0], dtype=NARROW))
    value, gradient = process.mirrors.hand_out(tensor), process.gradient_mirrors.hand_out(tensor)
    process.watch.add(second)
    value.fill_(7)
    gradient.fill_(8)
    second.view_copy(second.chunk.compute).fill_(9)
    writes.sync()
    assert values_at(tensor) == [[8.0, 8.0], [7.0, 7.0]]
    assert values_at(second) == [[9.0, 9.0]] * 2


@pytest.mark.parametrize("keeps_unused", [True, False])
def test_what_was_written_to_one_parameter_is_taken_over(keeps_unused):
    process, writes, tensor = make()
    process.mirrors.hand_out(tensor).fill_(7)
    writes.take_over(tensor, keeps_unused=keeps_unused)
    assert values_at(tensor) == [[7.0, 7.0]] * 2
    assert process.mirrors.has(tensor) == keeps_unused


@pytest.mark.parametrize("is_bound", [False, True])
def test_data_that_was_given_around_torchs_functions_is_taken_over(is_bound):
    process, writes, tensor = make(is_bound=is_bound)
    value = torch.tensor([7.0, 8.0], dtype=NARROW)
    set_raw_data(tensor.parameter, value)
    assert not tensor.is_as_left
    writes.take_over(tensor)
    assert values_at(tensor) == [[7.0, 8.0]] * 2
    assert tensor.is_as_left
    value.fill_(9)
    process.mirrors.sync()
    assert values_at(tensor) == [[9.0, 9.0]] * 2


def test_an_open_parameter_is_left_alone():
    _, writes, tensor = make()
    set_raw_data(tensor.parameter, torch.tensor([7.0, 8.0], dtype=NARROW))
    tensor.is_open = True
    writes.take_over(tensor)
    assert values_at(tensor) == [[0.0, 1.0]] * 2


# Parameters that go


def test_what_a_parameter_was_exchanged_for_gets_the_value():
    process, writes, tensor = make(is_bound=True)
    live, parameter = tensor.live, tensor.parameter
    tensor.view(tensor.chunk.lists["master"]).copy_(torch.tensor([FINE, 8.0]))
    torch.utils.swap_tensors(parameter, torch.nn.Parameter(torch.tensor([3.0, 4.0])))
    assert not tensor.is_ours
    writes.take_over(tensor)
    assert (live.kept.tolist(), live.kept.dtype) == ([FINE, 8.0], WIDE)
    assert tensor.is_given_up
    assert parameter.tolist() == [3.0, 4.0]
    live.kept = None
    writes.give_up_swapped(tensor)
    assert live.kept is None, "once"
    assert process.values.version == 0


def test_nothing_is_left_of_a_parameter_that_is_removed():
    process, writes, tensor = make()
    process.gradients.place(tensor, torch.tensor([5.0, 6.0], dtype=NARROW))
    mirror, gradient = process.mirrors.hand_out(tensor), process.gradient_mirrors.hand_out(tensor)
    process.watch.add(tensor)
    mirror[0] = 7
    writes.forget(tensor)
    assert values_at(tensor) == [[7.0, 1.0]] * 2, "what was written before counts, and the gradient is gone"
    assert not process.gradients.has(tensor)
    mirror.fill_(9)
    gradient.fill_(9)
    tensor.view_copy(tensor.chunk.compute).fill_(9)
    writes.sync()
    assert values_at(tensor) == [[7.0, 1.0]] * 2
