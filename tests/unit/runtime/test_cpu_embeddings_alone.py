"""CpuEmbeddings at home: of the others only what they are asked for is there, and writes that down."""

import contextlib

import pytest
import torch
from unit.runtime.data_parts import Ticket
from unit.runtime.parts import Fake, Parts

from hf_patrickstar.errors import EngineError
from hf_patrickstar.runtime.cpu_embeddings import CpuEmbeddings
from hf_patrickstar.runtime.gradient_place import GradientPlace


def make(*, trainable=True, check=None):
    """A chunk whose second tensor is a matrix of three rows, 16 to 21; and what is told."""
    parts, told = Parts(), []
    _, tensor = parts.add_chunk(4, (3, 2), trainable=trainable)
    gradients, parameters = Fake(told, "move_to_list"), Fake(told, check_usable=check)
    gradients.lock = contextlib.nullcontext()
    return CpuEmbeddings(parameters, gradients, Fake(told, "take_over", "apply")), tensor, told


def test_a_leaf_stands_in_for_the_parameter_where_it_is_at_home():
    lookups, tensor, told = make()
    tensor.num_writes = 3
    lookup = lookups.begin(tensor)
    assert lookup.tensor is tensor
    assert lookup.leaf.tolist() == [[16, 17], [18, 19], [20, 21]]
    assert lookup.leaf.data_ptr() == tensor.view(tensor.chunk.param).data_ptr()
    assert (lookup.leaf.is_leaf, lookup.leaf.requires_grad, lookup.leaf.dtype) == (True, True, torch.bfloat16)
    assert told == [("check_usable", tensor), ("take_over", tensor)]
    assert (tensor.is_looked_up, tensor.read_at, tensor.users) == (True, 3, 0)


@pytest.mark.parametrize(("trainable", "is_graph", "has_gradient"), [(1, 1, True), (1, 0, False), (0, 1, False)])
def test_the_leaf_has_a_gradient_where_the_parameter_would_have_one(trainable, is_graph, has_gradient):
    lookups, tensor, _ = make(trainable=bool(trainable))
    with torch.set_grad_enabled(bool(is_graph)):
        assert lookups.begin(tensor).leaf.requires_grad is has_gradient


def test_only_rows_get_a_gradient():
    lookups, tensor, _ = make()
    leaf = lookups.begin(tensor).leaf
    torch.nn.functional.embedding(torch.tensor([2, 2]), leaf).sum().backward()
    assert leaf.grad.tolist() == [[0, 0], [0, 0], [2, 2]]


def test_a_parameter_that_is_computed_with_elsewhere_is_as_it_is():
    lookups, tensor, told = make()
    tensor.users = 1
    lookups.begin(tensor)
    assert told == []


def test_an_open_parameter_is_not_looked_up():
    def refuse(tensor):
        raise EngineError("open")

    lookups, tensor, told = make(check=refuse)
    with pytest.raises(EngineError, match="open"):
        lookups.begin(tensor)
    assert (told, tensor.is_looked_up) == ([("check_usable", tensor)], False)


@pytest.mark.parametrize(
    ("place", "moves"), [(GradientPlace.PARAM, True), (GradientPlace.LIST, False), (GradientPlace.NONE, False)]
)
def test_a_gradient_in_the_place_of_the_value_makes_way(place, moves):
    lookups, tensor, told = make()
    tensor.gradient = place
    lookups.begin(tensor)
    assert told[2:] == [("move_to_list", tensor)] * moves


def test_what_is_on_its_way_home_is_waited_for():
    lookups, tensor, _ = make()
    ticket = Ticket(lambda: tensor.chunk.param.fill_(7))
    tensor.chunk.note(ticket)
    assert lookups.begin(tensor).leaf.tolist() == [[7, 7]] * 3
    assert (ticket.num_waits, tensor.chunk.under_way) == (1, ())


def test_bytes_of_rows_add_up():
    lookups, tensor, told = make()
    for nbytes in (8, 4):
        lookup = lookups.begin(tensor)
        told.clear()
        lookups.end(lookup, nbytes)
    assert (tensor.lookup_nbytes, told) == (12, [])


def test_an_embedding_that_writes_to_its_rows_has_changed_the_value():
    """``max_norm`` renormalises the rows that it reads, in place and without voiding graphs."""
    lookups, tensor, told = make()
    lookup = lookups.begin(tensor)
    with torch.no_grad():
        torch.nn.functional.embedding(torch.tensor([1]), lookup.leaf, max_norm=1.0)
    told.clear()
    lookups.end(lookup, 4)
    ((name, which, value, voids_graphs),) = told
    assert (name, which, voids_graphs) == ("apply", tensor, False)
    assert value.data_ptr() == lookup.leaf.data_ptr()
    assert not value.requires_grad
    assert value[1].norm() < 1.01
    assert value[0].tolist() == [16, 17]
