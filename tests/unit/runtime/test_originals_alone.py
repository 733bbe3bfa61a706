"""Frozen parameters with bits that their chunks do not hold."""

import pytest
import torch
from unit.runtime.data_parts import Process
from unit.spec_builders import FP32

from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.memory.tiers import Tier

NARROW, WIDE = torch.bfloat16, torch.float32
FINE = 1 + 2**-10
FIRST = [FINE, 2.0, 3 * FINE, 4.0]


class File:
    """An origin, until it is gone."""

    def __init__(self, values=FIRST, dtype=WIDE):
        self.values, self.error, self.asked = torch.tensor(values, dtype=dtype), None, []

    def read_again(self, start, stop):
        self.asked.append((start, stop))
        if self.error is not None:
            raise self.error
        return self.values[start:stop]


def make(host_nbytes=4096, collectives=None, chunk_numel=None, **chunk):
    """A process with a frozen parameter (1, 2, 3, 4) that was read from a file with more bits of the odd ones."""
    process = Process(collectives, host_nbytes=host_nbytes)
    (tensor,) = process.add_chunk(4, chunk_numel=chunk_numel, **{"trainable": False, **chunk})
    if tensor.is_owned:
        tensor.view(tensor.chunk.param).copy_(tensor.own(torch.tensor([1.0, 2.0, 3.0, 4.0])))
    tensor.origin = File()
    return process, process.originals, tensor


def kept_nbytes(process):
    return process.ledger.owners(Tier.HOST).get("original", 0)


def write(originals, tensor, *numbers, dtype=WIDE):
    """What ``Values.write`` does."""
    own = torch.tensor(numbers, dtype=dtype)
    originals.note_write(tensor, own)
    tensor.view(tensor.chunk.param).copy_(own)


@pytest.mark.parametrize(("dtype", "has"), [(WIDE, True), (torch.float64, True), (NARROW, False)])
def test_an_origin_is_for_types_that_the_chunk_does_not_have(dtype, has):
    _, originals, tensor = make()
    assert originals.has(tensor, dtype) == has
    tensor.origin = None
    assert not originals.has(tensor, dtype)


def test_a_value_is_read_from_its_origin():
    _, originals, tensor = make()
    value = originals.read(tensor)
    assert (value.tolist(), value.dtype) == (FIRST, WIDE)
    value.fill_(0)
    assert originals.read(tensor).tolist() == FIRST


@pytest.mark.parametrize(("start", "stop"), [(0, 2), (1, 3), (3, 4), (2, 2), (1, None)])
def test_a_part_is_read_alone(start, stop):
    _, originals, tensor = make()
    assert originals.read(tensor, start, stop).tolist() == FIRST[start:stop]
    assert tensor.origin.asked == [(start, stop or 4)] * (start != stop)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_reads_what_it_has(rank):
    class OneOfTwo:
        world_size = 2

    OneOfTwo.rank = rank
    _, originals, tensor = make(collectives=OneOfTwo(), chunk_numel=2)
    assert originals.read(tensor).tolist() == FIRST[2 * rank : 2 * rank + 2]
    assert tensor.origin.asked == [(2 * rank, 2 * rank + 2)]
    write(originals, tensor, FINE, FINE)
    assert originals.read(tensor, 1).tolist() == [FINE]


def test_elements_that_were_written_since_are_read_from_the_chunk():
    _, originals, tensor = make()
    tensor.view(tensor.chunk.param)[2] = 9
    assert originals.read(tensor).tolist() == [FINE, 2.0, 9.0, 4.0]


def test_who_began_to_read_when_there_was_an_origin_gets_what_there_is():
    _, originals, tensor = make()
    tensor.origin = None
    value = originals.read(tensor, 1, 3)
    assert (value.tolist(), value.dtype) == ([2.0, 3.0], NARROW)


def test_a_file_that_is_gone_is_told_once(caplog):
    process, originals, tensor = make()
    process.add_chunk(4, trainable=False)
    other = process.tensors[1]
    for one in (tensor, other):
        one.origin = File()
        one.origin.error = CheckpointError("model.safetensors has changed")
        value = originals.read(one)
        assert value.dtype is NARROW
        assert one.origin is None
    assert [record.getMessage() for record in caplog.records] == [
        "patrickstar: model.safetensors has changed. So frozen parameters ('t0' is the first) are read and saved as "
        "they are computed with, rounded to bfloat16; with frozen_master=true the host keeps all of their bits from "
        "the start"
    ]


# Writing


def test_all_bits_of_what_is_written_are_kept():
    process, originals, tensor = make()
    write(originals, tensor, 5 * FINE, 6.0, 7.0, 8.0)
    assert originals.read(tensor).tolist() == [5 * FINE, 6.0, 7.0, 8.0]
    assert originals.read(tensor, 1, 3).tolist() == [6.0, 7.0]
    assert kept_nbytes(process) == 16
    write(originals, tensor, FINE, 6.0, 7.0, 8.0)
    assert originals.read(tensor).tolist() == [FINE, 6.0, 7.0, 8.0]
    assert kept_nbytes(process) == 16
    originals.drop(tensor)
    assert (tensor.origin, kept_nbytes(process)) == (None, 0)
    originals.drop(tensor)


def test_what_is_written_is_somebodys():
    _, originals, tensor = make()
    own = torch.tensor([FINE] * 4)
    originals.note_write(tensor, own)
    tensor.view(tensor.chunk.param).copy_(own)
    own.fill_(9)
    assert originals.read(tensor).tolist() == [FINE] * 4


def test_what_the_chunk_holds_without_loss_needs_no_origin():
    process, originals, tensor = make()
    write(originals, tensor, 5.0, 6.0, 7.0, 8.0)
    assert (tensor.origin, kept_nbytes(process)) == (None, 0)


def test_what_is_there_already_changes_nothing():
    process, originals, tensor = make()
    origin = tensor.origin
    write(originals, tensor, *FIRST)
    assert tensor.origin is origin
    assert kept_nbytes(process) == 0


def test_wider_values_are_kept_in_the_type_that_was_loaded():
    process, originals, tensor = make()
    write(originals, tensor, FINE, 1 + 2**-40, 7.0, 8.0, dtype=torch.float64)
    value = originals.read(tensor)
    assert (value.tolist(), value.dtype) == ([FINE, 1.0, 7.0, 8.0], WIDE)
    assert kept_nbytes(process) == 16


def test_a_narrow_write_keeps_the_origin_of_what_it_agrees_with():
    _, originals, tensor = make()
    write(originals, tensor, 1.0, 2.0, 9.0, 4.0, dtype=NARROW)
    assert originals.read(tensor).tolist() == [FINE, 2.0, 9.0, 4.0]


@pytest.mark.parametrize(
    "chunk", [{"trainable": True}, {"has_master": True}, {"types": FP32}, {"original": NARROW}], ids=str
)
def test_nothing_is_kept_of_parameters_that_lose_no_bits(chunk):
    process, originals, tensor = make(**chunk)
    tensor.origin = None
    write(originals, tensor, FINE, 6.0, 7.0, 8.0)
    assert (tensor.origin, kept_nbytes(process)) == (None, 0)


def test_without_room_for_all_bits_the_value_is_rounded(caplog):
    process, originals, tensor = make(host_nbytes=8 + 15)
    for _ in range(2):
        write(originals, tensor, FINE, 6.0, 7.0, 8.0)
        assert (tensor.origin, kept_nbytes(process)) == (None, 0)
    assert [record.getMessage() for record in caplog.records] == [
        "patrickstar: host_budget has 15 B left, too little for all bits of what is written to frozen parameters. So "
        "frozen parameters ('t0' is the first) are read and saved as they are computed with, rounded to bfloat16; "
        "'t0' needs 16 B (16 bytes)"
    ]


def test_a_value_is_compared_piece_by_piece():
    process = Process(host_nbytes=2**24)
    numel = 2**18 + 3
    (tensor,) = process.add_chunk(numel, trainable=False)
    tensor.chunk.param.fill_(1)
    tensor.chunk.param[-1] = 5
    tensor.origin = File([FINE] * numel)
    value = process.originals.read(tensor)
    assert tensor.origin.asked == [(0, 2**18), (2**18, numel)]
    assert value[[0, 2**18 - 1, 2**18, -2, -1]].tolist() == [FINE, FINE, FINE, FINE, 5.0]
