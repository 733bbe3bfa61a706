"""Frozen parameters with bits that their chunks do not hold."""

import types

import pytest
import torch
from support.spec_builders import BF16, pack

from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.layout.specs import MASTER, TensorSpec
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import Chunk
from hf_patrickstar.runtime.parameter import ManagedParameter

NARROW, WIDE = torch.bfloat16, torch.float32
FINE = 1 + 2**-10
FIRST = [FINE, 2.0, 3 * FINE, 4.0]


class File:
    """An origin, until it is gone."""

    def __init__(self, values=FIRST):
        self.values, self.error, self.asked = torch.tensor(values), None, []

    def read_again(self, start, stop):
        self.asked.append((start, stop))
        if self.error is not None:
            raise self.error
        return self.values[start:stop]


class Host:
    """A host with parameters whose chunks hold 1, 2, 3, ... in 16 bits."""

    def __init__(self, nbytes=2**24):
        self.ledger = Ledger({Tier.DEVICE: 0, Tier.HOST: nbytes})
        pool = PayloadPool(self.ledger, torch.device("cpu"), None)
        self.device = types.SimpleNamespace(pool=pool, warned=set())

    def add(self, name="t0", numel=4, kinds=BF16, original=WIDE, rank=0, world_size=1, **settings):
        spec = TensorSpec(0, name, (numel,), settings.pop("trainable", False), types=kinds)
        layout = pack([spec], 2 if world_size > 1 else numel, world_size=world_size, splits=world_size > 1)
        chunk = Chunk(layout.chunks[0], Tier.HOST, rank)
        chunk.device = self.device
        chunk.param = torch.zeros(chunk.spec.chunk_numel, dtype=getattr(torch, kinds.param))
        if settings.pop("has_master", spec.trainable):
            chunk.lists[MASTER] = torch.zeros(chunk.spec.chunk_numel)
        parameter = torch.nn.Parameter(torch.zeros(numel, dtype=original), requires_grad=spec.trainable)
        tensor = ManagedParameter(spec, parameter, 0, parameter.detach())
        chunk.add(tensor)
        tensor.view(chunk.param).copy_(tensor.own(torch.arange(1.0, numel + 1)))
        tensor.origin = File()
        return tensor

    def write(self, tensor, *numbers, dtype=WIDE):
        """What ``ManagedParameter.write`` does."""
        own = torch.tensor(numbers, dtype=dtype)
        tensor.keep_original(own)
        tensor.view(tensor.chunk.param).copy_(own)
        own.zero_()

    def kept(self, tensor):
        """Whether there is an origin, and bytes that are kept on the host."""
        return tensor.origin is not None, self.ledger.owners(Tier.HOST).get("original", 0)


@pytest.fixture
def host():
    return Host()


def test_a_value_or_a_part_is_read_from_its_origin_in_the_type_that_was_loaded(host):
    tensor = host.add()
    value = tensor.read_original()
    assert (value.tolist(), value.dtype) == (FIRST, WIDE)
    value.fill_(0)
    for start, stop in ((0, None), (0, 2), (1, 3), (2, 2)):
        tensor.origin.asked.clear()
        assert tensor.read_original(start, stop).tolist() == FIRST[start:stop]
        assert tensor.origin.asked == [(start, stop or 4)] * (start != stop)
    has = {dtype: tensor.has_original(dtype) for dtype in (WIDE, torch.float64, NARROW)}
    assert has == {WIDE: True, torch.float64: True, NARROW: False}
    tensor.origin = None
    assert not tensor.has_original(WIDE)
    assert tensor.read_original(1, 3).dtype is NARROW, "who began to read gets what there is"


def test_elements_that_were_written_since_are_read_from_the_chunk(host):
    tensor = host.add(numel=2**18 + 3)
    held = tensor.view(tensor.chunk.param).fill_(1)
    held[-1] = 5
    tensor.origin = File([FINE] * (2**18 + 3))
    value = tensor.read_original()
    assert value[[0, 2**18 - 1, 2**18, -2, -1]].tolist() == [FINE, FINE, FINE, FINE, 5.0]
    assert len(tensor.origin.asked) == 2, "a piece at a time"


def test_a_file_that_is_gone_is_said_once(host, caplog):
    for name in ("t0", "t1"):
        tensor = host.add(name)
        tensor.origin.error = CheckpointError("model.safetensors has changed")
        assert tensor.read_original().dtype is NARROW
        assert tensor.origin is None
    (record,) = caplog.records
    for text in ("model.safetensors has changed", "'t0' is the first", "rounded to bfloat16", "frozen_master=true"):
        assert text in record.getMessage()


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_reads_and_keeps_what_it_has(host, rank):
    tensor = host.add(numel=128, rank=rank, world_size=2)
    tensor.origin = File([FINE * number for number in range(1, 129)])
    tensor.view(tensor.chunk.param).copy_(tensor.own(tensor.origin.values))
    assert tensor.read_original().tolist() == tensor.origin.values[64 * rank : 64 * rank + 64].tolist()
    assert tensor.origin.asked == [(64 * rank, 64 * rank + 64)]
    host.write(tensor, *[FINE] * 64)
    assert tensor.read_original(62).tolist() == [FINE] * 2
