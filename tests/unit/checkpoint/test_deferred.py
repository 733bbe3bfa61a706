"""Tensors whose values come later: every function of them gives what it gives of the values."""

import copy
import pickle
import threading

import numpy
import pytest
import safetensors.torch
import torch
from support.checkpoint_files import make_deferred

from hf_patrickstar.checkpoint.deferred import Reader, in_reading_order
from hf_patrickstar.errors import EngineError

VALUES = torch.arange(24.0).view(4, 6)

FUNCTIONS = [
    lambda t: t.chunk(2, dim=1)[1],
    lambda t: torch.cat([t, torch.ones(1, 6)]),
    lambda t: t.T,
    lambda t: t[torch.tensor([3, 0])],
    lambda t: t.max(dim=0).values,
    lambda t: 1 + t * 2,
    torch.zeros_like,
    lambda t: t.to(torch.bfloat16),
    lambda t: t.to(device=torch.device("cpu"), dtype=torch.bfloat16, copy=True),
    lambda t: t.to("cuda", torch.float16) if t.is_meta else t.half(),  # the device is ignored
    lambda t: t.to(torch.ones(1, dtype=torch.float64)),
    lambda t: t.bfloat16().half().float(),
    lambda t: t.type(torch.float16),
    lambda t: t.clone().detach().data,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=map(str, range(len(FUNCTIONS))))
def test_functions(function):
    values = VALUES + 1 / 3
    tensor, source = make_deferred(values)
    result, expected = function(tensor), function(values)
    assert source.reads == []
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    found, flat = torch.empty_like(expected, memory_format=torch.contiguous_format), expected.reshape(-1)
    assert torch.equal(Reader().read(result), flat)
    assert torch.equal(Reader().read(result, 3, 5), flat[3:5])
    assert torch.equal(torch.cat(list(Reader().pieces(result, 5))), flat)
    Reader().fill(found.view(-1)[2:], result, 2, piece_numel=3)
    assert torch.equal(found.view(-1)[2:], flat[2:])


@pytest.mark.parametrize("cast", [lambda t: t, lambda t: t.bfloat16(), lambda t: t.half().float().clone()])
def test_parts_of_a_cast_are_read_alone(cast):
    tensor, source = make_deferred(VALUES)
    Reader().read(cast(tensor), 3, 8)
    list(Reader().pieces(cast(tensor), 10))
    Reader().fill(torch.empty(5, dtype=torch.float64), cast(tensor), 2, piece_numel=3)
    assert source.reads == [(3, 8), (0, 10), (10, 20), (20, 24), (2, 5), (5, 7)]


def test_a_tensor_is_read_once_for_all_that_is_made_of_it():
    (tensor, source), (other, _) = make_deferred(VALUES), make_deferred(VALUES)
    reader = Reader()
    for part, expected in zip(
        (*tensor.chunk(2), *tensor.unbind(1)), (*VALUES.chunk(2), *VALUES.unbind(1)), strict=True
    ):
        assert torch.equal(reader.read(part), expected.reshape(-1))
    assert source.reads == [(0, 24)]
    joined = torch.stack([tensor, tensor + 1]).transpose(1, 2)
    assert len(list(Reader().pieces(joined, 5))) == 10
    assert source.reads == [(0, 24)] * 2
    tensors = {"a": tensor[0], "b": other[0], "c": tensor, "d": tensor[1], "e": VALUES, "f": tensor[2].half()}
    assert in_reading_order(tensors) == ["a", "d", "b", "c", "e", "f"]


def assign(tensor):
    tensor[0] = 1


READING = [
    *(lambda t: t.numpy(), numpy.asarray, lambda t: t.cpu(), lambda t: t[0, 0].item(), lambda t: t.tolist()),
    *(lambda t: bool((t == 0).all()), lambda t: float(t.sum()), lambda t: int(t.sum())),
    *(
        lambda t: torch.allclose(VALUES, t),
        lambda t: torch.zeros(4, 6).copy_(t),
        lambda t: torch.zeros(2, 4, 6).copy_(t),
    ),
    lambda t: torch.zeros(6, 4).t().copy_(t),
]
CHANGING = [*(lambda t: t.zero_(), assign, torch.nn.init.normal_), lambda t: torch.add(t, 1, out=torch.zeros(4, 6))]


@pytest.mark.parametrize("function", READING)
def test_what_looks_at_values_reads_them_or_raises_before_they_are_loaded(function):
    """A Trainer of the user's may save parameters in its own way while the model is saved piece by piece."""
    tensor, source = make_deferred(VALUES, is_loadable=True)
    for look in (function, pickle.dumps, lambda t: t.pin_memory(), lambda t: torch.zeros(6).__setitem__(0, t[0, 0])):
        with pytest.raises(EngineError, match="deferred_weights, which is not read yet; give the model to"):
            look(tensor)
    assert source.reads == []
    found, expected = function(make_deferred(VALUES)[0]), function(VALUES)
    assert found.tolist() == expected.tolist() if hasattr(expected, "tolist") else found == expected


@pytest.mark.parametrize("function", CHANGING)
def test_what_changes_values_raises(function):
    with pytest.raises(EngineError, match="would change a tensor that is not read yet; change it after"):
        function(make_deferred(VALUES)[0])


def test_assigned_data():
    parameter = torch.nn.Parameter(make_deferred(VALUES, is_loadable=True)[0])
    parameter.data = parameter.data.bfloat16()
    assert parameter.dtype is torch.bfloat16
    parameter.data = parameter.data * 2
    assert torch.equal(Reader().read(parameter), (VALUES.bfloat16() * 2).view(-1))
    with pytest.raises(EngineError, match=r"values were assigned .*full_parameters"):
        parameter.data = VALUES


def test_tensors_that_are_to_be_loaded_can_be_compared():
    """transformers compares tied weights that a checkpoint has under both names."""
    (left, source), (right, _) = (make_deferred(VALUES, is_loadable=True) for _ in range(2))
    assert torch.equal(left, right)
    assert torch.equal(left.t(), VALUES.t())
    assert not any(torch.equal(left, other) for other in (right + 1, right.t(), right.bfloat16()))
    source.reads.clear()
    assert torch.equal(left, left.detach())
    assert source.reads == []


def test_libraries_do_not_save_one_by_mistake(tmp_path):
    for is_loadable in (True, False):
        tensor, _ = make_deferred(VALUES, is_loadable=is_loadable)
        with pytest.raises((NotImplementedError, safetensors.SafetensorError)):
            safetensors.torch.save_file({"a": tensor}, tmp_path / "model.safetensors")
    torch.save({"a": tensor}, tmp_path / "model.bin")
    assert torch.equal(torch.load(tmp_path / "model.bin")["a"], VALUES)
    with pytest.raises(NotImplementedError):
        tensor.nonzero()  # a shape that depends on values


def test_what_libraries_look_at():
    loadable, (other, _) = make_deferred(VALUES, is_loadable=True)[0], make_deferred(VALUES)
    for function in (lambda t: t, lambda t: t.t(), lambda t: t.bfloat16(), lambda t: t.data, lambda t: t.to("meta")):
        assert (function(loadable).device.type, function(other).device.type) == ("cpu", "meta")
    assert [t.untyped_storage().nbytes() for t in (other, other[:2])] == [96, 48], "as many bytes as a result has"
    assert other.type().endswith("FloatTensor")
    assert "4, 6" in repr(other)
    with torch.device("meta"):
        assert torch.equal(Reader().read(torch.zeros_like(other) + other).cpu(), VALUES.view(-1))


def test_parameters_and_copies_of_modules():
    tensor, source = make_deferred(VALUES, is_loadable=True)
    module = torch.nn.Linear(6, 4, bias=False)
    module.weight = module.tied = torch.nn.Parameter(tensor)
    module.register_buffer("c", tensor)
    module.requires_grad_(False)
    copied = copy.deepcopy(module)
    assert copied.weight is copied.tied is not module.weight
    memo = {}
    assert module.weight.__deepcopy__(memo) is module.tied.__deepcopy__(memo) is not module.weight
    assert isinstance(copied.weight, torch.nn.Parameter)
    assert not isinstance(copied.c, torch.nn.Parameter)
    assert not any(weight.requires_grad for weight in (module.weight, copied.weight, module.weight.data))
    assert source.reads == []
    for value in (copied.weight, module.state_dict()["weight"]):
        assert torch.equal(Reader().read(value), VALUES.view(-1))


def test_threads_share_a_reader():
    sources = [make_deferred(VALUES + 100 * number)[0] for number in range(4)]
    reader, wrong, barrier = Reader(), [], threading.Barrier(4)

    def read(number):
        barrier.wait()
        pair = number, (number + 1) % 4
        for _ in range(50):
            found = reader.read(torch.cat([sources[n] for n in pair]))
            if not torch.equal(found, torch.cat([VALUES + 100 * n for n in pair]).view(-1)):
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
