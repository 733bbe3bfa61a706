"""Operands that autograd keeps as numbers: a chunk of two tensors, and a stand-in for what brings it to the device."""

import types

import pytest
import torch
from unit.runtime.parts import Fake, Parts, narrow

from hf_patrickstar.errors import EngineError
from hf_patrickstar.runtime.chunk import Epoch
from hf_patrickstar.runtime.live_parameter import set_raw_data
from hf_patrickstar.runtime.operands import Operands, SavedView


class Parameters:
    """Brings chunks to the device, and notes who asked."""

    def __init__(self, parts):
        self.parts, self.asked = parts, []

    def find(self, parameter):
        return next((tensor for tensor in self.parts.tensors if tensor.parameter is parameter), None)

    def find_at_rest(self, tensor):
        return None

    def ensure_on_device(self, tensor, who):
        self.asked.append(who)
        if tensor.chunk.compute is None:
            self.parts.copies.load(tensor.chunk, ahead=False)
        return tensor.chunk.compute


def make(is_loaded=True):
    """Operands of a matrix of (0 to 5) and a vector of (16 to 19), and these two tensors."""
    parts = Parts(watch=Fake([], "collect"))
    matrix, vector = parts.add_chunk((2, 3), 4)
    parts.parameters = Parameters(parts)
    parts.steps = types.SimpleNamespace(num_updates=3)
    operands = Operands(parts.parameters, parts.copies, parts.steps)
    if is_loaded:
        parts.copies.load(parts.chunks[0], ahead=False)
    return parts, operands, matrix, vector


def bind(tensor):
    """Makes a parameter answer, as those of an engine do."""
    tensor.bind(types.SimpleNamespace(value_for=lambda parameter: None))
    return tensor.parameter


def whole(tensor):
    return tensor.view_copy(tensor.chunk.compute)


# What is kept


def test_what_is_not_in_a_chunk_is_kept_as_it_is():
    _, operands, *_ = make()
    activation = torch.ones(3)
    assert operands.pack(activation) is activation
    assert operands.unpack(activation) is activation


def test_an_output_is_not_kept_by_what_made_it():
    _, operands, *_ = make()
    output = torch.ones(3, requires_grad=True) * 2
    kept = operands.pack(output)
    assert (kept.grad_fn, kept.data_ptr()) == (None, output.data_ptr())


@pytest.mark.parametrize(
    ("take", "which", "numbers"),
    [
        (lambda matrix, vector: matrix, 0, [[0, 1, 2], [3, 4, 5]]),
        (lambda matrix, vector: matrix.t(), 0, [[0, 3], [1, 4], [2, 5]]),
        (lambda matrix, vector: matrix[1, 1:], 0, [4, 5]),
        (lambda matrix, vector: matrix[:, ::2], 0, [[0, 2], [3, 5]]),
        (lambda matrix, vector: vector, 1, [16, 17, 18, 19]),
        (lambda matrix, vector: vector[1::2], 1, [17, 19]),
        (lambda matrix, vector: vector.expand(2, 4), 1, [[16, 17, 18, 19]] * 2),
    ],
)
def test_any_view_of_a_parameter_comes_back_as_it_was(take, which, numbers):
    parts, operands, matrix, vector = make()
    saved = operands.pack(take(whole(matrix), whole(vector)))
    assert isinstance(saved, SavedView)
    assert saved.tensor is (matrix, vector)[which]
    assert not parts.chunks[0].is_aliased
    parts.copies.evict(parts.chunks[0])
    with torch.no_grad():
        view = operands.unpack(saved)
    assert view.tolist() == numbers
    assert parts.parameters.asked == [f"the backward of a use of 't{which}'"]
    assert parts.chunks[0].is_aliased, "it stays while somebody looks into it"


def test_a_view_in_another_type_is_kept_as_it_is():
    _, operands, matrix, _ = make()
    view = whole(matrix).view(torch.int16)
    assert operands.pack(view) is view


def test_a_parameter_knows_how_many_graphs_need_it():
    _, operands, matrix, vector = make()
    kept = [operands.pack(whole(matrix)), operands.pack(whole(matrix)[0])]
    assert (matrix.num_saved, vector.num_saved) == (2, 0)
    kept.pop()
    assert matrix.num_saved == 1


def test_what_is_kept_by_a_backward_that_is_recorded_is_a_copy():
    parts, operands, matrix, _ = make()
    saved = operands.pack(whole(matrix))
    with torch.enable_grad():
        view = operands.unpack(saved)
    assert view.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert not parts.chunks[0].is_aliased


def test_autograd_computes_with_what_comes_back():
    parts, operands, matrix, _ = make()
    x = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(operands.pack, operands.unpack):
        loss = (whole(matrix) @ x).sum()
    parts.copies.evict(parts.chunks[0])
    loss.backward()
    assert x.grad.tolist() == [3, 5, 7]
    assert matrix.num_saved == 0


# Parameters themselves


@pytest.mark.parametrize("is_materialized", [False, True])
def test_a_parameter_is_kept_as_a_whole(is_materialized):
    parts, operands, _, vector = make()
    parameter = bind(vector)
    if is_materialized:
        vector.materialize(parts.chunks[0].compute)
    saved = operands.pack(parameter)
    assert (saved.tensor, tuple(saved.size), saved.offset) == (vector, (4,), 6)
    vector.dematerialize()
    with torch.no_grad():
        assert operands.unpack(saved).tolist() == [16, 17, 18, 19]


def test_a_released_parameter_is_kept_although_its_chunk_is_not_there():
    parts, operands, matrix, _ = make(is_loaded=False)
    saved = operands.pack(bind(matrix))
    assert isinstance(saved, SavedView)
    with torch.no_grad():
        assert operands.unpack(saved).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert parts.moved() == [("load", 0)]


def test_a_parameter_that_was_given_other_data_is_kept_as_that():
    parts, operands, _, vector = make()
    parameter = bind(vector)
    vector.materialize(parts.chunks[0].compute)
    other = narrow(1, 2, 3, 4)
    set_raw_data(parameter, other)
    kept = operands.pack(parameter)
    assert (kept.data_ptr(), kept.requires_grad, vector.num_saved) == (other.data_ptr(), False, 0)


def test_a_parameter_that_is_not_managed_any_more_is_kept_as_what_it_has():
    parts, operands, _, vector = make()
    parameter = bind(vector)
    parts.tensors.remove(vector)
    kept = operands.pack(parameter)
    assert kept.isnan().all()
    assert type(kept) is torch.Tensor


# Changes


@pytest.mark.parametrize(("num_updates", "by_whom"), [(3, "in place"), (4, "by the optimizer")])
def test_what_was_changed_since_is_refused(num_updates, by_whom):
    parts, operands, matrix, vector = make()
    kept, other = operands.pack(whole(matrix)), operands.pack(whole(vector))
    matrix.num_writes += 1
    parts.steps.num_updates = num_updates
    with pytest.raises(EngineError) as caught:
        operands.unpack(kept)
    assert str(caught.value) == (
        f"parameter 't0' was changed {by_whom} between this forward and its backward; call backward before the change"
    )
    assert parts.parameters.asked == []
    with torch.no_grad():
        assert operands.unpack(other).tolist() == [16, 17, 18, 19]


def test_a_view_of_before_other_data_was_assigned_has_the_old_memory():
    """Whatever was written since; only of the tensor itself, which begins at its offset."""
    parts, operands, _, vector = make()
    saved = operands.pack(whole(vector)[1:3])
    vector.epoch.value = narrow(5, 6, 7, 8)
    vector.epoch = Epoch()
    vector.num_writes += 1
    with torch.no_grad():
        assert operands.unpack(saved).tolist() == [6, 7]
        assert operands.unpack(operands.pack(whole(vector)[1:3])).tolist() == [17, 18]
    assert len(parts.parameters.asked) == 1


def test_the_parameter_itself_of_before_has_the_new_one():
    _, operands, _, vector = make()
    saved = operands.pack(bind(vector))
    vector.epoch.value = narrow(5, 6, 7, 8)
    vector.epoch = Epoch()
    whole(vector).fill_(9)
    with torch.no_grad():
        assert operands.unpack(saved).tolist() == [9] * 4
