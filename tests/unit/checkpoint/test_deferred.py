"""Tensors whose values come later: every function of them gives what it gives of the values."""

import copy
import pickle
import threading

import numpy
import pytest
import safetensors.torch
import torch
from sources import make_deferred

from hf_patrickstar.checkpoint.deferred import Reader, in_reading_order
from hf_patrickstar.errors import EngineError

VALUES = torch.arange(24.0).view(4, 6)

FUNCTIONS = {
    "chunk": lambda t: t.chunk(2, dim=1)[1],
    "torch.chunk": lambda t: torch.chunk(t, 2)[0],
    "split": lambda t: torch.split(t, [1, 5], dim=1)[1],
    "cat": lambda t: torch.cat([t, t], dim=1),
    "cat with an ordinary one": lambda t: torch.cat([t, torch.ones(1, 6)]),
    "stack": lambda t: torch.stack([t, t]),
    "chunks joined in another order": lambda t: torch.cat(t.chunk(2)[::-1]),
    "transpose": lambda t: t.transpose(0, 1),
    "t": lambda t: t.t(),
    "T": lambda t: t.T,
    "mT": lambda t: t.mT,
    "slice": lambda t: t[1:3, ::2],
    "index": lambda t: t[2],
    "ellipsis": lambda t: t[..., 1],
    "rows": lambda t: t[torch.tensor([3, 0])],
    "permute": lambda t: t.permute(1, 0),
    "reshape": lambda t: t.reshape(3, 8),
    "view": lambda t: t.view(-1),
    "unbind": lambda t: t.unbind(0)[3],
    "named result": lambda t: t.max(dim=0).values,
    "arithmetic": lambda t: 1 + t * 2,
    "zeros_like": torch.zeros_like,
    "to(dtype)": lambda t: t.to(torch.bfloat16),
    "to(dtype=)": lambda t: t.to(dtype=torch.float16),
    "to(device)": lambda t: t.to("cpu"),
    "to(device, dtype)": lambda t: t.to("cpu", torch.bfloat16),
    "to(device=, dtype=, copy=)": lambda t: t.to(device=torch.device("cpu"), dtype=torch.bfloat16, copy=True),
    "to(another)": lambda t: t.to(torch.ones(1, dtype=torch.float64)),
    "to of a function": lambda t: t.t().to(torch.bfloat16),
    "rounding twice": lambda t: (t / 3).to(torch.bfloat16).float(),
    "half": lambda t: t.half(),
    "double": lambda t: t.double(),
    "type": lambda t: t.type(torch.float16),
    "type_as": lambda t: t.type_as(torch.ones(1, dtype=torch.bfloat16)),
    "view of bits": lambda t: t.view(torch.int32),
    "contiguous": lambda t: t.t().contiguous(),
    "clone": lambda t: t.clone(),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "full slice": lambda t: t[...],
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions(function):
    tensor, source = make_deferred(VALUES)
    result, expected = function(tensor), function(VALUES)
    assert source.reads == []
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    read = Reader().read(result)
    assert read.dtype == expected.dtype
    assert torch.equal(read, expected.reshape(-1))


@pytest.mark.parametrize(("start", "stop"), [(0, 24), (5, 17), (23, 24), (7, 7)])
@pytest.mark.parametrize("function", [lambda t: t, lambda t: t.bfloat16(), lambda t: t.t()])
def test_parts(function, start, stop):
    tensor, _ = make_deferred(VALUES)
    assert torch.equal(Reader().read(function(tensor), start, stop), function(VALUES).reshape(-1)[start:stop])


@pytest.mark.parametrize("cast", [lambda t: t, lambda t: t.bfloat16(), lambda t: t.half().float().clone()])
def test_parts_of_a_cast_are_read_alone(cast):
    tensor, source = make_deferred(VALUES)
    Reader().read(cast(tensor), 3, 8)
    list(Reader().pieces(cast(tensor), 10))
    Reader().fill(torch.empty(5), cast(tensor), 2, piece_numel=3)
    assert source.reads == [(3, 8), (0, 10), (10, 20), (20, 24), (2, 5), (5, 7)]


def test_a_tensor_cut_into_many_is_read_once():
    tensor, source = make_deferred(VALUES)
    reader = Reader()
    found = [reader.read(part) for part in (*tensor.chunk(2), *tensor.unbind(1))]
    assert source.reads == [(0, 24)]
    for part, expected in zip(found, (*VALUES.chunk(2), *VALUES.unbind(1)), strict=True):
        assert torch.equal(part, expected.reshape(-1))
    del reader
    Reader().read(tensor[0])
    assert source.reads == [(0, 24)] * 2


@pytest.mark.parametrize("in_pieces", [True, False])
def test_tensors_joined_are_read_once_however_small_the_pieces(in_pieces):
    (first, source), (second, other) = make_deferred(VALUES), make_deferred(VALUES + 100)
    joined, expected = torch.stack([first, second]).transpose(1, 2), torch.stack([VALUES, VALUES + 100]).transpose(1, 2)
    if in_pieces:
        found = torch.cat(list(Reader().pieces(joined, 5)))
    else:
        Reader().fill(found := torch.empty(48), joined, piece_numel=5)
    assert torch.equal(found, expected.reshape(-1))
    assert source.reads == other.reads == [(0, 24)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("is_deferred", [True, False])
@pytest.mark.parametrize("function", [lambda t: t, lambda t: t.t(), lambda t: t.bfloat16()])
def test_fill(function, is_deferred, dtype):
    values = torch.full((3, 3), -1.0, dtype=dtype)
    Reader().fill(values, function(make_deferred(VALUES)[0] if is_deferred else VALUES), 4, piece_numel=4)
    assert torch.equal(values.view(-1), function(VALUES).reshape(-1)[4:13].to(dtype))


def test_fill_reads_to_where_values_are_wanted():
    tensor, source = make_deferred(VALUES)
    seen = []
    source.read_into = lambda start, values: seen.append((start, values.data_ptr()))
    values, other = torch.empty(4), torch.empty(4, dtype=torch.bfloat16)
    Reader().fill(values, tensor, 3)
    assert seen == [(3, values.data_ptr())]
    Reader().fill(other, tensor, 3)
    assert torch.equal(other, VALUES.view(-1)[3:7].bfloat16())


def assign(tensor):
    tensor[0] = 1


def add_in_place(tensor):
    tensor += 1


READING = {
    "numpy": lambda t: t.numpy(),
    "asarray": numpy.asarray,
    "cpu": lambda t: t.cpu(),
    "cuda": lambda t: t.cuda(),
    "item": lambda t: t[0, 0].item(),
    "tolist": lambda t: t.tolist(),
    "bool": lambda t: bool((t == 0).all()),
    "float": lambda t: float(t.sum()),
    "int": lambda t: int(t.sum()),
    "allclose": lambda t: torch.allclose(VALUES, t),
    "pickle": pickle.dumps,
    "pin_memory": lambda t: t.pin_memory(),
}
CHANGING = {
    "zero_": lambda t: t.zero_(),
    "+=": add_in_place,
    "init": torch.nn.init.normal_,
    "copied to an ordinary one": lambda t: torch.zeros(4, 6).copy_(t),
    "out of an ordinary one": lambda t: torch.add(t, 1, out=torch.zeros(4, 6)),
}


@pytest.mark.parametrize("function", READING.values(), ids=READING)
def test_what_looks_at_values_raises(function):
    tensor, source = make_deferred(VALUES, is_loadable=True)
    with pytest.raises(EngineError, match="needs the values of a parameter of deferred_weights"):
        function(tensor)
    assert source.reads == []


@pytest.mark.parametrize("function", CHANGING.values(), ids=CHANGING)
def test_what_changes_values_raises(function):
    tensor, _ = make_deferred(VALUES)
    with pytest.raises(EngineError, match="would change a tensor that is not read yet"):
        function(tensor)


def test_assignment_to_a_part_raises():
    tensor, _ = make_deferred(VALUES)
    with pytest.raises(EngineError, match="__setitem__"):
        assign(tensor)
    loadable, _ = make_deferred(VALUES, is_loadable=True)
    with pytest.raises(EngineError, match="__setitem__"):
        torch.zeros(4, 6)[0] = loadable[0]
    ordinary = torch.zeros(4, 6)
    ordinary[0] = tensor[0]
    assert torch.equal(ordinary[0], VALUES[0])


READ_NOW = ("numpy", "asarray", "cpu", "item", "tolist", "bool", "float", "int", "allclose")


@pytest.mark.parametrize("name", READ_NOW)
def test_values_in_memory_are_read_when_they_are_looked_at(name):
    """A Trainer of the user's may save parameters in its own way while the model is saved piece by piece."""
    tensor, source = make_deferred(VALUES)
    found = READING[name](tensor)
    expected = READING[name](VALUES)
    assert found.tolist() == expected.tolist() if hasattr(expected, "tolist") else found == expected
    assert source.reads != []


def test_assigned_data():
    tensor, _ = make_deferred(VALUES, is_loadable=True)
    parameter = torch.nn.Parameter(tensor)
    parameter.data = parameter.data.bfloat16()
    assert parameter.dtype is torch.bfloat16
    assert torch.equal(Reader().read(parameter), VALUES.bfloat16().view(-1))
    place = torch.zeros(24)
    Reader().fill(place, parameter)
    assert torch.equal(place, VALUES.bfloat16().float().view(-1))
    parameter.data = parameter.data * 2
    assert torch.equal(Reader().read(parameter), (VALUES.bfloat16() * 2).view(-1))
    with pytest.raises(EngineError, match="values were assigned to a parameter of deferred_weights"):
        parameter.data = VALUES


def test_what_is_made_of_one_tensor_comes_together():
    (left, _), (right, _) = make_deferred(VALUES), make_deferred(VALUES)
    tensors = {
        "a": left[0],
        "b": right[0],
        "c": left,
        "d": left[1],
        "e": VALUES,
        "f": right[1].t(),
        "g": left[2].half(),
    }
    assert in_reading_order(sorted(tensors), tensors) == ["a", "d", "b", "f", "c", "e", "g"]


def test_tensors_that_are_to_be_loaded_can_be_compared():
    """transformers compares tied weights that a checkpoint has under both names."""
    (left, source), (right, _) = (make_deferred(VALUES, is_loadable=True) for _ in range(2))
    assert torch.equal(left, right)
    assert torch.equal(left.t(), VALUES.t())
    assert not torch.equal(left, right + 1)
    assert not torch.equal(left, right.t())
    assert not torch.equal(left, right.bfloat16())
    source.reads.clear()
    assert torch.equal(left, left.detach())
    assert source.reads == []
    live, _ = make_deferred(VALUES)
    assert torch.equal(live, VALUES)


def test_a_shape_that_depends_on_values_is_not_guessed():
    tensor, _ = make_deferred(VALUES)
    with pytest.raises(NotImplementedError):
        tensor.nonzero()


@pytest.mark.parametrize("is_loadable", [True, False])
def test_the_library_does_not_save_one_by_mistake(is_loadable, tmp_path):
    tensor, _ = make_deferred(VALUES, is_loadable=is_loadable)
    with pytest.raises((NotImplementedError, safetensors.SafetensorError)):
        safetensors.torch.save_file({"a": tensor}, tmp_path / "model.safetensors")
    if is_loadable:
        with pytest.raises(EngineError):
            torch.save(tensor, tmp_path / "model.bin")
    else:
        torch.save({"a": tensor}, tmp_path / "model.bin")
        assert torch.equal(torch.load(tmp_path / "model.bin")["a"], VALUES)


def test_one_that_is_to_be_loaded_says_that_it_is_on_the_host():
    loadable, _ = make_deferred(VALUES, is_loadable=True)
    other, _ = make_deferred(VALUES)
    assert (loadable.device, other.device) == (torch.device("cpu"), torch.device("meta"))
    for function in (lambda t: t.t(), lambda t: t.bfloat16(), lambda t: t.data, lambda t: t.to("meta")):
        assert function(loadable).device == torch.device("cpu")
        assert function(other).device == torch.device("meta")


def test_the_bytes_of_a_result_are_its_own():
    tensor, _ = make_deferred(VALUES)
    assert tensor.untyped_storage().nbytes() == 96
    assert tensor[:2].untyped_storage().nbytes() == 48


def test_a_parameter_of_one():
    tensor, _ = make_deferred(VALUES, is_loadable=True)
    module = torch.nn.Linear(6, 4, bias=False)
    module.weight = torch.nn.Parameter(tensor)
    assert isinstance(module.weight, torch.nn.Parameter)
    assert module.weight.requires_grad
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    assert not module.weight.data.requires_grad
    assert torch.equal(Reader().read(module.weight.data), VALUES.view(-1))
    assert torch.equal(Reader().read(module.state_dict()["weight"]), VALUES.view(-1))
    module.requires_grad_(False)
    assert not module.weight.requires_grad


def test_a_copy_of_a_module_is_read_from_the_same_place():
    tensor, source = make_deferred(VALUES, is_loadable=True)
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(tensor, requires_grad=False)
    module.b = module.a
    module.register_buffer("c", tensor)
    copied = copy.deepcopy(module)
    assert copied.a is copied.b is not module.a
    assert isinstance(copied.a, torch.nn.Parameter)
    assert not copied.a.requires_grad
    assert not isinstance(copied.c, torch.nn.Parameter)
    assert source.reads == []
    assert torch.equal(Reader().read(copied.a), VALUES.view(-1))


def test_its_type_has_a_name():
    tensor, _ = make_deferred(VALUES)
    assert tensor.type().endswith("FloatTensor")
    assert "4, 6" in repr(tensor)


def test_an_ordinary_tensor_is_read_as_it_is():
    parameter = torch.nn.Parameter(VALUES.clone())
    assert torch.equal(Reader().read(parameter, 2, 5), VALUES.view(-1)[2:5])
    assert [piece.tolist() for piece in Reader().pieces(torch.arange(5), 2)] == [[0, 1], [2, 3], [4]]
    assert list(Reader().pieces(torch.empty(0), 2)) == []


def test_the_default_device_does_not_matter():
    tensor, _ = make_deferred(VALUES)
    with torch.device("meta"):
        assert torch.equal(Reader().read(torch.zeros_like(tensor) + tensor).cpu(), VALUES.view(-1))


def test_threads_share_a_reader():
    sources = [make_deferred(VALUES + 100 * number)[0] for number in range(4)]
    reader, wrong, barrier = Reader(), [], threading.Barrier(4)

    def read(number):
        barrier.wait()
        for _ in range(50):
            found = reader.read(torch.cat([sources[number], sources[(number + 1) % 4]]))
            expected = torch.cat([VALUES + 100 * number, VALUES + 100 * ((number + 1) % 4)])
            if not torch.equal(found, expected.view(-1)):
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
