"""Writes to copies on the device that leave no trace."""

import pytest
import torch
from unit.runtime.data_parts import Process, values_at

from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.gradient_place import GradientPlace

FINE = 1 + 2**-10


class OneOfTwo:
    """The second of two processes; it has none of the tensors here at home."""

    rank, world_size = 1, 2


def make(collectives=None, **chunk):
    """A process with two tensors of two elements (0, 1 and 16, 17) in a chunk with a copy, and the first of them."""
    process = Process(collectives)
    tensor, _ = process.add_chunk(2, 2, **chunk)
    process.load(tensor.chunk)
    return process, tensor


def write(tensor, *numbers):
    """What somebody writes to the copy."""
    tensor.view_copy(tensor.chunk.compute).copy_(torch.tensor(numbers))


COLLECTING = {
    "compare": lambda process, tensor: process.watch.compare(tensor),
    "collect": lambda process, tensor: process.watch.collect(),
    "collect one chunk": lambda process, tensor: process.watch.collect(tensor.chunk),
}


@pytest.mark.parametrize("collect", COLLECTING.values(), ids=COLLECTING)
@pytest.mark.parametrize("has_master", [True, False])
def test_what_was_written_to_a_watched_copy_is_taken_over(collect, has_master):
    process, tensor = make(has_master=has_master)
    mirror = process.mirrors.hand_out(tensor)
    process.watch.add(tensor)
    write(tensor, 7, 8)
    collect(process, tensor)
    assert values_at(tensor) == [[7.0, 8.0]] * (1 + has_master)
    assert mirror.tolist() == [7.0, 8.0]
    assert (tensor.num_writes, process.values.version) == (0, 1)


@pytest.mark.parametrize("collect", COLLECTING.values(), ids=COLLECTING)
def test_what_was_not_written_to_keeps_all_bits_of_its_master(collect):
    process, tensor = make()
    tensor.view(tensor.chunk.lists["master"]).copy_(torch.tensor([FINE, 2 * FINE]))
    process.values.restore(tensor)
    process.watch.add(tensor)
    collect(process, tensor)
    assert values_at(tensor) == [[1.0, 2.0], [FINE, 2 * FINE]]
    assert process.values.version == 0


@pytest.mark.parametrize("collect", COLLECTING.values(), ids=COLLECTING)
def test_others_are_not_looked_at(collect):
    process, tensor = make()
    process.watch.add(process.tensors[1])
    write(tensor, 7, 8)
    collect(process, tensor)
    assert values_at(tensor) == [[0.0, 1.0]] * 2


def test_a_static_chunk_is_compared_with_its_masters():
    process = Process()
    (tensor,) = process.add_chunk(2, home=Tier.DEVICE)
    tensor.chunk.set_compute(tensor.chunk.param)
    process.watch.add(tensor)
    write(tensor, 7, 8)
    process.watch.collect()
    assert values_at(tensor) == [[7.0, 8.0]] * 2


def test_after_the_comparison_nobody_watches():
    process, tensor = make()
    process.watch.add(tensor)
    process.watch.compare(tensor)
    write(tensor, 7, 8)
    process.watch.collect()
    assert values_at(tensor) == [[0.0, 1.0]] * 2


def test_a_copy_that_somebody_still_looks_into_is_watched_further():
    process, tensor = make()
    alias = tensor.chunk.compute[:1]
    process.watch.add(tensor)
    process.watch.collect()
    alias.fill_(7)
    process.watch.collect()
    assert values_at(tensor) == [[7.0, 1.0]] * 2


def test_when_nobody_looks_into_the_copy_any_more_watching_ends():
    process, tensor = make()
    alias = tensor.chunk.compute[:1]
    process.watch.add(tensor)
    process.watch.collect()
    del alias
    process.watch.collect()
    write(tensor, 9, 9)
    process.watch.collect()
    assert values_at(tensor) == [[0.0, 1.0]] * 2


def test_a_copy_that_is_dropped_is_not_watched_any_more():
    process, tensor = make()
    alias = tensor.chunk.compute[:1]
    process.watch.add(tensor)
    process.watch.collect(tensor.chunk)
    alias.fill_(7)
    process.watch.collect()
    assert values_at(tensor) == [[0.0, 1.0]] * 2


def test_only_the_chunk_that_is_dropped_is_looked_at():
    process, tensor = make()
    (other,) = process.add_chunk(2)
    process.load(other.chunk)
    for one in (tensor, other):
        process.watch.add(one)
        write(one, 7, 8)
    process.watch.collect(tensor.chunk)
    assert [values_at(one)[0] for one in (tensor, other)] == [[7.0, 8.0], [32.0, 33.0]]
    process.watch.collect()
    assert values_at(other) == [[7.0, 8.0]] * 2


def test_who_is_forgotten_is_not_looked_at():
    process, tensor = make()
    process.watch.add(tensor)
    process.watch.forget(tensor)
    process.watch.forget(tensor)
    write(tensor, 7, 8)
    process.watch.collect()
    assert values_at(tensor) == [[0.0, 1.0]] * 2


def test_a_parameter_without_a_copy_is_not_watched_for_long():
    process = Process()
    (tensor,) = process.add_chunk(2)
    process.watch.add(tensor)
    process.watch.collect()
    process.load(tensor.chunk)
    write(tensor, 7, 8)
    process.watch.collect()
    assert values_at(tensor) == [[0.0, 1.0]] * 2


def test_a_gradient_in_the_place_of_the_value_is_no_write():
    process, tensor = make(home=Tier.DEVICE)
    process.watch.add(tensor)
    tensor.gradient = GradientPlace.PARAM
    write(tensor, 7, 8)
    process.watch.collect()
    assert values_at(tensor)[1] == [0.0, 1.0]


# Several processes


def test_a_checksum_tells_what_was_written_where_nothing_is_at_home():
    process, tensor = make(OneOfTwo(), chunk_numel=4)
    assert not tensor.is_owned
    process.watch.add(tensor)
    process.watch.compare(tensor)
    assert process.values.version == 0
    process.watch.add(tensor)
    write(tensor, 7, 8)
    process.watch.add(tensor)  # watched already: what it was at first counts
    process.watch.compare(tensor)
    assert process.values.version == 1


def test_there_a_write_is_taken_over_once():
    process, tensor = make(OneOfTwo(), chunk_numel=4)
    alias = tensor.chunk.compute[:1]
    process.watch.add(tensor)
    alias.fill_(7)
    process.watch.collect()
    process.watch.collect()
    assert process.values.version == 1
    alias.fill_(8)
    process.watch.collect()
    assert process.values.version == 2


def test_there_gradients_at_home_are_beside_copies():
    process, tensor = make(OneOfTwo(), chunk_numel=4)
    process.watch.add(tensor)
    tensor.gradient = GradientPlace.PARAM
    write(tensor, 7, 8)
    process.watch.collect()
    assert process.values.version == 1
