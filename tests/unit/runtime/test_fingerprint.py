"""Whether a tensor was written to without a trace."""

import pytest
import torch
from unit.runtime.data_parts import Process

from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import MASTER
from hf_patrickstar.runtime.fingerprint import Fingerprint, checksum_of
from hf_patrickstar.runtime.gradient_place import GradientPlace


class OneOfTwo:
    rank, world_size = 0, 2


class Origin:
    """A file that has other bits than the chunk, which rounds them."""

    def read_again(self, start, stop):
        return torch.tensor([2**-10, 1 + 2**-10])[start:stop]


def make(collectives=None, **chunk):
    """A process, and a tensor of two elements (0, 1)."""
    process = Process(collectives)
    (tensor,) = process.add_chunk(2, **chunk)
    return process, tensor


def narrow(*numbers):
    return torch.tensor(numbers, dtype=torch.bfloat16)


@pytest.mark.parametrize("collectives", [None, OneOfTwo()], ids=["bits", "checksum"])
def test_only_what_was_written_to_has_changed(collectives):
    process, tensor = make(collectives)
    value = narrow(0, 1)
    fingerprint = Fingerprint(process.values, tensor, value)
    assert not fingerprint.has_changed(value)
    value[0] = -0.0
    assert fingerprint.has_changed(value)


def test_one_process_compares_with_what_is_at_home_now():
    process, tensor = make()
    value = narrow(7, 8)
    fingerprint = Fingerprint(process.values, tensor, value)
    assert fingerprint.has_changed(value)
    process.values.write(tensor, value)
    assert not fingerprint.has_changed(value)


def test_several_processes_compare_with_what_was_there_before():
    process, tensor = make(OneOfTwo())
    value = narrow(7, 8)
    fingerprint = Fingerprint(process.values, tensor, value)
    assert not fingerprint.has_changed(value)
    value[0] = 1
    assert [fingerprint.has_changed(value) for _ in range(2)] == [True, False]
    value[0] = 2
    fingerprint.renew(value)
    assert not fingerprint.has_changed(value)


def test_a_value_that_is_in_a_file_is_not_read_again():
    process, tensor = make(trainable=False)
    tensor.original_dtype, tensor.origin = torch.float32, Origin()
    value = process.values.own_part(tensor, torch.float32).clone()
    fingerprint = Fingerprint(process.values, tensor, value)
    tensor.origin = None
    assert not fingerprint.has_changed(value)
    value[1] = 3
    assert fingerprint.has_changed(value)


def test_what_is_computed_with_at_home_is_compared_with_its_master():
    process, tensor = make(home=Tier.DEVICE)
    copy = tensor.view(tensor.chunk.param)
    fingerprint = Fingerprint(process.values, tensor, copy)
    assert not fingerprint.has_changed(copy)
    copy[0] = 5
    assert fingerprint.has_changed(copy)
    tensor.view(tensor.chunk.lists[MASTER])[0] = 5
    assert not fingerprint.has_changed(copy)


def test_a_gradient_in_the_place_of_the_value_is_not_compared_with():
    process, tensor = make()
    value = narrow(0, 1)
    fingerprint = Fingerprint(process.values, tensor, value)
    tensor.view(tensor.chunk.param).fill_(9)
    tensor.gradient = GradientPlace.PARAM
    assert not fingerprint.has_changed(value)


# Checksums


@pytest.mark.parametrize(
    "value", [torch.tensor(2.0), torch.zeros(0), torch.arange(6.0).view(2, 3).t(), torch.ones(2, requires_grad=True)]
)
def test_checksums_are_of_elements(value):
    assert checksum_of(value) == checksum_of(value.detach().clone().contiguous())


def test_checksums_differ():
    assert len({checksum_of(torch.tensor(numbers)) for numbers in ([0.0, 1.0], [1.0, 0.0], [-0.0, 1.0])}) == 3
