"""What was handed out of values, and who notices what was written to it."""

import pytest
import torch
from unit.runtime.data_parts import Process, run_together, values_at

from hf_patrickstar.runtime.gradient_place import GradientPlace
from hf_patrickstar.runtime.mirrors import SCAN_AT, Mirror, MirrorUsers

NARROW, WIDE = torch.bfloat16, torch.float32
FINE = 1 + 2**-10


def make(*shapes, **chunk):
    """A process, and the first of its tensors."""
    process = Process()
    tensor, *_ = process.add_chunk(*(shapes or (2, 2)), **chunk)
    return process, tensor


# Users


def mirror_of(value, is_held=False):
    return Mirror(None, value, is_held=is_held)


def test_a_mirror_alone_has_no_users():
    users, mirror = MirrorUsers(), mirror_of(torch.zeros(2))
    users.enter(mirror)
    assert not users.has(mirror)
    mirror.is_held = True
    assert users.has(mirror)


@pytest.mark.parametrize("use", [lambda value: value, lambda value: value[:1], lambda value: value.numpy()])
def test_who_refers_to_a_mirror_or_looks_into_it_is_a_user(use):
    users, mirror = MirrorUsers(), mirror_of(torch.zeros(2))
    users.enter(mirror)
    used = use(mirror.value)
    assert users.has(mirror)
    del used
    assert not users.has(mirror)


def test_mirrors_over_one_memory_are_not_users_of_each_other():
    users, memory = MirrorUsers(), torch.zeros(4)
    mirrors = [mirror_of(memory[:2].data), mirror_of(memory[2:].data)]  # views would keep their base
    for mirror in mirrors:
        users.enter(mirror)
    assert [users.has(mirror) for mirror in mirrors] == [True, True]
    del memory
    assert [users.has(mirror) for mirror in mirrors] == [False, False]
    users.leave(mirrors.pop())
    mirror = mirrors[0]
    assert not users.has(mirror)
    value = mirror.value
    assert users.has(mirror)
    assert value.numel() == 2


# Handing out


@pytest.mark.parametrize("dtype", [None, NARROW, WIDE])
def test_what_is_handed_out_is_the_same_one_and_not_the_chunk(dtype):
    process, tensor = make()
    value = process.mirrors.hand_out(tensor, dtype)
    assert (value.tolist(), value.dtype) == ([0.0, 1.0], dtype or NARROW)
    assert process.mirrors.hand_out(tensor, dtype) is value
    assert process.mirrors.has(tensor)
    assert not process.mirrors.has(process.tensors[1])
    assert process.mirrors.nbytes == value.nbytes
    places = {payload.data_ptr() for payload in (tensor.chunk.param, *tensor.chunk.lists.values())}
    assert value.data_ptr() not in places


def test_each_type_is_a_mirror_of_its_own():
    process, tensor = make()
    narrow, wide = process.mirrors.hand_out(tensor), process.mirrors.hand_out(tensor, WIDE)
    assert process.mirrors.nbytes == 4 + 8
    wide[0] = FINE
    process.mirrors.sync()
    assert values_at(tensor) == [[1.0, 1.0], [FINE, 1.0]]
    assert narrow.tolist() == [1.0, 1.0], "the other one follows"
    narrow[1] = 5
    process.mirrors.sync()
    assert values_at(tensor) == [[1.0, 5.0], [FINE, 5.0]]
    assert wide.tolist() == [FINE, 5.0]


def test_nothing_is_written_where_nobody_has_written():
    process, tensor = make()
    value = process.mirrors.hand_out(tensor)
    process.mirrors.sync()
    assert (value.tolist(), process.values.version) == ([0.0, 1.0], 0)


def test_graphs_do_not_notice_what_is_written_to_a_mirror():
    process, tensor = make()
    value = process.mirrors.hand_out(tensor)
    value.add_(1)
    process.mirrors.sync()
    assert values_at(tensor) == [[1.0, 2.0]] * 2
    assert (tensor.num_writes, process.values.version) == (0, 1)


@pytest.mark.parametrize("number", [-0.0, float("nan")])
def test_bits_are_compared(number):
    process, tensor = make()
    value = process.mirrors.hand_out(tensor)
    value[0] = number
    process.mirrors.sync()
    assert str(values_at(tensor)[1][0]) == str(number)
    process.mirrors.sync()
    assert process.values.version == 1, "what was taken over is not taken over again"


def test_a_mirror_follows_the_value_while_a_gradient_is_in_its_place():
    process, tensor = make()
    value = process.mirrors.hand_out(tensor)
    tensor.view(tensor.chunk.param).fill_(9)
    tensor.gradient = GradientPlace.PARAM
    process.mirrors.sync()
    assert process.values.version == 0
    assert process.mirrors.hand_out(tensor) is value
    assert value.tolist() == [0.0, 1.0]


def test_mirrors_follow_changes():
    process, tensor = make()
    value = process.mirrors.hand_out(tensor)
    view = value[1:]
    process.values.write(tensor, torch.tensor([7.0, 8.0]))
    process.mirrors.refresh(tensor)
    assert (value.tolist(), view.tolist()) == ([7.0, 8.0], [8.0])


def test_a_tensor_that_is_added_is_a_mirror_from_then_on():
    process, tensor = make()
    value = torch.tensor([0.0, 1.0], dtype=NARROW)
    assert process.mirrors.add(tensor, value) is value
    value[0] = 7
    process.mirrors.sync()
    assert values_at(tensor) == [[7.0, 1.0]] * 2


def test_a_mirror_whose_memory_is_no_longer_contiguous_is_not_handed_out_again():
    process, tensor = make((2, 2))
    value = process.mirrors.hand_out(tensor)
    value.t_()
    assert process.mirrors.hand_out(tensor) is not value


# Letting go


def test_what_nobody_has_is_compared_once_more_and_freed():
    process, tensor = make()
    process.mirrors.hand_out(tensor).fill_(7)
    process.mirrors.sync_one(tensor)
    assert values_at(tensor) == [[7.0, 7.0]] * 2
    assert (process.mirrors.has(tensor), process.mirrors.nbytes) == (False, 0)


def test_what_only_the_next_call_has_stays():
    process, tensor = make()
    process.mirrors.hand_out(tensor)
    process.mirrors.sync_one(tensor, keeps_unused=True)
    assert process.mirrors.has(tensor)


def test_what_was_asked_for_its_address_is_held_until_the_next_sync_of_all():
    process, tensor = make()
    process.mirrors.hand_out(tensor, is_held=True)
    process.mirrors.sync_one(tensor)
    assert process.mirrors.has(tensor)
    process.mirrors.sync()
    assert not process.mirrors.has(tensor)


def test_asking_for_the_address_holds_what_there_is_already():
    process, tensor = make()
    value = process.mirrors.hand_out(tensor)
    assert process.mirrors.hand_out(tensor, is_held=True) is value
    del value
    process.mirrors.sync_one(tensor)
    assert process.mirrors.has(tensor)


def test_a_mirror_that_is_dropped_is_a_tensor_of_its_own():
    process, tensor = make()
    value = process.mirrors.hand_out(tensor)
    value[0] = 7
    process.mirrors.drop(tensor)
    assert values_at(tensor) == [[7.0, 1.0]] * 2
    value[1] = 9
    process.mirrors.sync()
    assert values_at(tensor) == [[7.0, 1.0]] * 2
    assert not process.mirrors.has(tensor)


def test_closing_takes_nothing_over():
    process, tensor = make()
    value = process.mirrors.hand_out(tensor)
    value[0] = 7
    process.mirrors.close()
    process.mirrors.sync()
    assert (values_at(tensor), process.mirrors.nbytes) == ([[0.0, 1.0]] * 2, 0)


def test_with_few_mirrors_the_last_one_is_looked_at():
    process, first = make(1, 1, 1)
    second, third = process.tensors[1:]
    for tensor in process.tensors:
        process.mirrors.hand_out(tensor)
    process.mirrors.sync_unused(second)
    process.mirrors.sync_unused(third)
    assert [process.mirrors.has(tensor) for tensor in process.tensors] == [True, False, True]
    process.mirrors.sync_unused(third)
    assert process.mirrors.has(third), "the one that is asked for now stays"
    process.mirrors.sync_unused(first)
    assert not process.mirrors.has(third)


def test_with_many_mirrors_all_are_looked_at_and_then_fewer_times():
    process, first = make(*[1] * 2 * SCAN_AT)
    kept = process.mirrors.hand_out(process.tensors[1])
    for tensor in process.tensors[: SCAN_AT - 1]:
        process.mirrors.hand_out(tensor)
    process.mirrors.sync_unused(first)
    assert sum(map(process.mirrors.has, process.tensors)) == SCAN_AT - 1
    process.mirrors.hand_out(process.tensors[SCAN_AT - 1])
    process.mirrors.sync_unused(first)
    assert [tensor.spec.index for tensor in process.tensors if process.mirrors.has(tensor)] == [0, 1]
    assert kept.tolist() == [16.0]


def test_a_loop_that_has_the_one_before_when_it_asks_for_the_next_holds_two():
    """So does ``for name, value in generator``: the name is bound to another value when the next one was made."""
    process, *_ = make(*[1] * (SCAN_AT - 2))
    held = []
    before = None
    for tensor in process.tensors:
        process.mirrors.sync_unused(tensor)
        before = process.mirrors.hand_out(tensor)
        held.append(sum(map(process.mirrors.has, process.tensors)))
    assert before is not None
    assert held == [1, *[2] * (SCAN_AT - 3)]


def test_what_is_used_is_not_freed():
    process, first = make(1, 1)
    value = process.mirrors.hand_out(first)
    process.mirrors.sync_unused(first)
    process.mirrors.sync_unused(process.tensors[1])
    assert process.mirrors.has(first)
    assert value.tolist() == [0.0]


# Origins


class Origin:
    """A file, which is read at most so often."""

    def __init__(self, num_reads):
        self.num_reads = num_reads

    def read_again(self, start, stop):
        self.num_reads -= 1
        assert self.num_reads >= 0, "not read again to compare"
        return torch.tensor([FINE, 2.0])[start:stop]


def test_what_was_read_from_a_file_is_compared_by_a_checksum():
    process, tensor = make(2, trainable=False)
    tensor.view(tensor.chunk.param)[:] = torch.tensor([1.0, 2.0])
    tensor.origin = Origin(num_reads=1)
    value = process.mirrors.hand_out(tensor, WIDE)
    assert value.tolist() == [FINE, 2.0]
    process.mirrors.sync()
    process.mirrors.sync()
    assert process.values.version == 0
    tensor.origin = None
    value[1] = 4
    process.mirrors.sync()
    assert values_at(tensor) == [[1.0, 4.0]]


# Several processes


def test_what_all_write_counts_wherever_it_is_at_home():
    def work(process):
        first, second = process.add_chunk(2, 2, chunk_numel=2)
        values = [process.mirrors.hand_out(tensor) for tensor in (first, second)]
        for value in values:
            value.add_(1)
        process.mirrors.sync()
        return [values_at(tensor)[1] for tensor in (first, second) if tensor.is_owned]

    assert run_together(2, work) == [[[1.0, 2.0]], [[17.0, 18.0]]]


def test_there_mirrors_do_not_follow_and_each_call_gives_a_new_one():
    def work(process):
        tensor, _ = process.add_chunk(2, 2, chunk_numel=2)
        value = process.mirrors.hand_out(tensor)
        other = process.mirrors.hand_out(tensor)
        process.values.write(tensor, torch.tensor([7.0, 8.0]))
        process.mirrors.refresh(tensor)
        assert not process.mirrors.has(tensor)
        value.fill_(9)
        process.mirrors.sync()
        return value is other, other.tolist(), process.values.read(tensor, WIDE).tolist()

    assert run_together(2, work) == [(False, [0.0, 1.0], [7.0, 8.0])] * 2


def test_there_the_first_mirror_that_was_written_to_ends_the_others():
    def work(process):
        tensor, _ = process.add_chunk(2, 2, chunk_numel=2)
        left, right = (process.mirrors.hand_out(tensor) for _ in range(2))
        left[0], right[1] = 5, 6
        process.mirrors.sync()
        return process.values.read(tensor, WIDE).tolist(), process.mirrors.nbytes

    assert run_together(2, work) == [([5.0, 1.0], 4)] * 2


def test_who_is_handed_a_mirror_finds_what_was_written_to_another():
    process, tensor = make()
    narrow = process.mirrors.hand_out(tensor)
    narrow[0] = 7
    assert process.mirrors.hand_out(tensor, WIDE).tolist() == [7.0, 1.0]
    assert values_at(tensor) == [[7.0, 1.0]] * 2
