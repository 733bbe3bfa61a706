"""Values in every place where they are."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from unit.runtime.data_parts import Process, Ticket, run_together, values_at
from unit.spec_builders import BF16, FP32

from hf_patrickstar.events import ValueRestored
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import MASTER
from hf_patrickstar.runtime.gradient_place import GradientPlace
from hf_patrickstar.runtime.values import as_it_is

NARROW, WIDE = torch.bfloat16, torch.float32
FINE = 1 + 2**-10
"""A number that bfloat16 rounds to 1."""


def make(**chunk):
    """A process with a chunk of two tensors of two elements (0, 1 and 16, 17), and the first of them."""
    process = Process()
    tensor, _ = process.add_chunk(2, 2, **chunk)
    return process, tensor


def put_gradient(tensor, *numbers):
    """A gradient over the value, as ``Gradients`` leaves it."""
    tensor.view(tensor.chunk.param).copy_(torch.tensor(numbers))
    tensor.gradient = GradientPlace.PARAM


class Origin:
    """A file that has other bits than the chunk."""

    def __init__(self, value):
        self.value = value

    def read_again(self, start, stop):
        return self.value[start:stop]


def make_fine():
    """A frozen 16-bit parameter (1, 2) whose origin has more bits of both."""
    process, tensor = make(trainable=False)
    tensor.view(tensor.chunk.param).copy_(torch.tensor([1.0, 2.0]))
    tensor.origin = Origin(torch.tensor([FINE, 2 * FINE]))
    return process, tensor


class Listening(TorchDispatchMode):
    """Somebody who looks on."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


# Reading


@pytest.mark.parametrize("dtype", [NARROW, WIDE, torch.float64])
def test_a_value_is_read_with_all_bits_that_there_are(dtype):
    process, tensor = make()
    tensor.view(tensor.chunk.lists[MASTER])[1] = FINE
    value = process.values.read(tensor, dtype)
    assert value.dtype is dtype
    assert value.tolist() == [0.0, 1.0 if dtype is NARROW else FINE]


@pytest.mark.parametrize("settings", [{}, {"types": FP32}, {"trainable": False}, {"trainable": False, "types": FP32}])
def test_what_is_read_is_a_copy(settings):
    process, tensor = make(**settings)
    for dtype in (NARROW, WIDE):
        value = process.values.read(tensor, dtype)
        value.fill_(9)
        assert values_at(tensor)[0] == [0.0, 1.0]
        assert value.untyped_storage().nbytes() == 2 * dtype.itemsize


def test_a_value_that_has_made_way_is_read_from_the_master():
    process, tensor = make()
    put_gradient(tensor, 5, 6)
    assert process.values.read(tensor, NARROW).tolist() == [0.0, 1.0]
    assert process.values.own_part(tensor, NARROW).tolist() == [0.0, 1.0]
    assert process.values.look(tensor).tolist() == [0.0, 1.0]
    assert process.values.host_alias(tensor, NARROW).tolist() == [0.0, 1.0]


def test_the_bits_of_an_origin_are_read_in_wider_types_alone():
    process, tensor = make_fine()
    values = process.values
    assert values.read(tensor, WIDE).tolist() == [FINE, 2 * FINE]
    assert values.own_part(tensor, WIDE).tolist() == [FINE, 2 * FINE]
    assert values.host_alias(tensor, WIDE).tolist() == [FINE, 2 * FINE]
    assert values.read(tensor, NARROW).tolist() == [1.0, 2.0]
    assert values.own_part(tensor, NARROW).data_ptr() == tensor.chunk.param.data_ptr()


def test_what_a_rank_has_is_in_place():
    process, tensor = make()
    assert process.values.own_part(tensor, NARROW).data_ptr() == tensor.chunk.param.data_ptr()
    assert process.values.own_part(tensor, WIDE).data_ptr() == tensor.chunk.lists[MASTER].data_ptr()
    held = process.values.held(tensor, NARROW)
    assert held.source.data_ptr() == tensor.chunk.lists[MASTER].data_ptr()
    assert held[0] is tensor
    assert held.dtype is NARROW


def test_who_looks_on_counts_nothing_of_it():
    process, tensor = make()
    with Listening() as listening:
        process.values.read(tensor, WIDE)
        process.values.look(tensor)
        process.values.write(tensor, torch.tensor([1.0, 2.0]))
    assert not any("copy_" in seen for seen in listening.seen)


# Looking


def test_where_the_chunk_has_a_copy_that_is_looked_at():
    process, tensor = make(home=Tier.HOST)
    assert process.values.look(tensor).data_ptr() == tensor.chunk.param.data_ptr(), "the device of this tier is the CPU"
    process.load(tensor.chunk)
    process.values.device = torch.device("meta")  # where nothing is at home
    assert process.values.look(tensor).data_ptr() == tensor.chunk.compute.data_ptr()


def test_a_copy_that_has_not_arrived_is_not_looked_at():
    process, tensor = make()
    process.load(tensor.chunk)
    tensor.chunk.arrival = Ticket()
    process.values.device = process.streams.device = torch.device("meta")
    assert process.values.look(tensor).device.type == "meta"


def test_what_a_checkpoint_reads_is_not_handed_to_a_writer():
    process, tensor = make()
    tensor.chunk.reader = object()
    assert process.values.look(tensor).data_ptr() != tensor.chunk.param.data_ptr()


@pytest.mark.parametrize("dtype", [NARROW, WIDE])
def test_an_alias_on_the_host_has_its_place_and_a_storage_of_its_own(dtype):
    process, _ = make()
    second = process.tensors[1]
    alias = process.values.host_alias(second, dtype)
    assert alias.tolist() == [16.0, 17.0]
    assert alias.untyped_storage().nbytes() == 2 * dtype.itemsize
    place = second.chunk.param if dtype is NARROW else second.chunk.lists[MASTER]
    second.view(place).fill_(3)
    assert alias.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("shape", [(0,), (2, 0), ()])
def test_values_of_unusual_shapes(shape):
    process = Process()
    (tensor,) = process.add_chunk(shape)
    for value in (
        process.values.read(tensor, WIDE),
        process.values.host_alias(tensor, NARROW),
        process.values.look(tensor),
    ):
        assert tuple(value.shape) == shape
        assert value.flatten().tolist() == [0.0] * tensor.spec.numel
    process.values.write(tensor, torch.full(shape, 3.0))
    assert process.values.read(tensor, WIDE).flatten().tolist() == [3.0] * tensor.spec.numel


# Writing


@pytest.mark.parametrize("home", list(Tier))
def test_a_write_reaches_every_place(home):
    process, tensor = make(home=home)
    if home is Tier.HOST:
        process.load(tensor.chunk)
    process.values.write(tensor, torch.tensor([FINE, 5.0]))
    assert values_at(tensor) == [[1.0, 5.0], [FINE, 5.0]]
    assert values_at(process.tensors[1]) == [[16.0, 17.0]] * 2
    if home is Tier.HOST:
        assert tensor.chunk.compute.tolist() == [1.0, 5.0, 16.0, 17.0]
        assert process.events == [ValueRestored(0, 0, 4)]


def test_bits_of_the_master_that_a_narrow_value_agrees_with_stay():
    process, tensor = make()
    tensor.view(tensor.chunk.lists[MASTER])[:] = torch.tensor([FINE, FINE])
    process.values.write(tensor, torch.tensor([1.0, 2.0], dtype=NARROW))
    assert values_at(tensor) == [[1.0, 2.0], [FINE, 2.0]]


def test_bits_of_the_master_give_way_to_a_wide_value():
    process, tensor = make()
    tensor.view(tensor.chunk.lists[MASTER])[:] = torch.tensor([FINE, FINE])
    process.values.write(tensor, torch.tensor([1.0, 2.0]))
    assert values_at(tensor) == [[1.0, 2.0], [1.0, 2.0]]


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_gradient_in_the_place_of_the_value_is_kept(is_loaded):
    process, tensor = make()
    if is_loaded:
        process.load(tensor.chunk)
    put_gradient(tensor, 5, 6)
    process.values.write(tensor, torch.tensor([7.0, 8.0]))
    assert values_at(tensor) == [[5.0, 6.0], [7.0, 8.0]]
    assert process.events == []
    if is_loaded:
        assert tensor.chunk.compute.tolist() == [7.0, 8.0, 16.0, 17.0]


def test_what_is_written_may_be_one_of_the_places():
    process, tensor = make()
    process.load(tensor.chunk)
    for place in (tensor.chunk.param, tensor.chunk.lists[MASTER], tensor.chunk.compute):
        value = tensor.view(place)
        value.add_(1)
        process.values.write(tensor, value)
        assert values_at(tensor) == [value.tolist()] * 2
        assert tensor.view_copy(tensor.chunk.compute).tolist() == value.tolist()


@pytest.mark.parametrize("voids_graphs", [True, False])
def test_changes_are_counted(voids_graphs):
    process, tensor = make()
    process.values.write(tensor, torch.tensor([7.0, 8.0]), voids_graphs=voids_graphs)
    assert (tensor.num_writes, process.values.version) == (int(voids_graphs), 1)


def test_a_write_waits_for_those_who_read():
    process, tensor = make()
    log = []

    class Reader:
        def wait(self):
            log.append(("reader", values_at(tensor)[1]))

    tensor.chunk.note(Ticket(lambda: log.append(("copy", values_at(tensor)[0]))))
    tensor.chunk.reader = Reader()
    process.values.write(tensor, torch.tensor([7.0, 8.0]))
    assert log == [("copy", [0.0, 1.0]), ("reader", [0.0, 1.0])]
    assert (tensor.chunk.under_way, tensor.chunk.reader) == ((), None)


def test_writing_is_recorded_by_nobody():
    process, tensor = make(types=FP32)
    value = torch.tensor([7.0, 8.0], requires_grad=True)
    process.values.write(tensor, value)
    assert not tensor.chunk.param.requires_grad
    assert values_at(tensor) == [[7.0, 8.0]] * 2


def test_a_value_comes_back_from_the_master():
    process, tensor = make()
    process.load(tensor.chunk)
    put_gradient(tensor, 5, 6)
    tensor.chunk.compute.zero_()
    process.values.restore(tensor)
    assert values_at(tensor) == [[0.0, 1.0]] * 2
    assert tensor.chunk.compute.tolist() == [0.0, 1.0, 0.0, 0.0]
    assert process.events == [ValueRestored(0, 0, 4)]


@pytest.mark.parametrize("home", list(Tier))
def test_without_a_copy_nothing_follows(home):
    process, tensor = make(home=home)
    if home is Tier.DEVICE:
        tensor.chunk.set_compute(tensor.chunk.param)
    process.values.refresh_copy(tensor)
    assert process.events == []


@pytest.mark.parametrize("has_master", [True, False])
def test_loading_fills_what_has_all_bits(has_master):
    process, tensor = make(has_master=has_master)
    tensor.origin = origin = Origin(None)
    filled = []

    def fill(flat):
        filled.append((tuple(flat.shape), flat.dtype))
        flat.copy_(torch.tensor([FINE, 5.0]))

    process.values.load(tensor, fill)
    assert filled == [((2,), WIDE if has_master else NARROW)]
    assert values_at(tensor) == [[1.0, 5.0], [FINE, 5.0]][: 1 + has_master]
    assert tensor.origin is None
    assert origin.value is None


# Several processes


def test_every_process_reads_what_one_has():
    def read(process):
        first, second = process.add_chunk(2, (1, 2), chunk_numel=2)
        assert [first.is_owned, second.is_owned] == [process.rank == 0, process.rank == 1]
        values = process.values
        assert values.held(second, WIDE).source is None or process.rank == 1
        return [
            values.read(first, WIDE).tolist(),
            values.read(second, NARROW).tolist(),
            values.look(second).tolist(),
            values.host_alias(first, WIDE).tolist(),
        ]

    assert run_together(2, read) == [[[0.0, 1.0], [[16.0, 17.0]], [[16.0, 17.0]], [0.0, 1.0]]] * 2


def test_a_tensor_that_is_spread_is_read_from_all():
    def read(process):
        (tensor,) = process.add_chunk((2, 3), chunk_numel=2)
        return process.values.read(tensor, WIDE).tolist(), values_at(tensor)

    whole = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert run_together(3, read) == [(whole, [part] * 2) for part in ([0.0, 1.0], [2.0, 3.0], [4.0, 5.0])]


@pytest.mark.parametrize("rank", [0, 1])
def test_each_process_writes_what_it_has_and_its_copy(rank):
    class OneOfTwo:
        world_size = 2

    OneOfTwo.rank = rank
    process = Process(OneOfTwo())
    (tensor,) = process.add_chunk(4, chunk_numel=2)
    process.load(tensor.chunk)
    put_gradient(tensor, 5, 6)
    process.values.write(tensor, torch.tensor([FINE, 7.0, 8.0, FINE]))
    own = [[FINE, 7.0], [8.0, FINE]][rank]
    assert values_at(tensor) == [[5.0, 6.0], own]
    assert tensor.chunk.compute.tolist() == [1.0, 7.0, 8.0, 1.0]
    process.values.restore(tensor)
    assert values_at(tensor)[0] == [round(number) for number in own]
    assert process.events == [], "what another has would be missing in a copy that followed"


def test_who_has_nothing_of_it_writes_to_the_copy_alone():
    class First:
        rank, world_size = 0, 2

    process = Process(First())
    _, other = process.add_chunk(2, 2, chunk_numel=2)
    process.load(other.chunk)
    process.values.write(other, torch.tensor([7.0, 8.0]))
    assert other.chunk.param.tolist() == [0.0, 1.0]
    assert other.chunk.compute.tolist() == [0.0, 1.0, 7.0, 8.0]
    assert (other.num_writes, process.values.version) == (1, 1)


# As it is


def test_modes_are_left_for_the_length_of_a_block():
    with torch.inference_mode():
        with as_it_is():
            assert not torch.is_inference_mode_enabled()
            made = torch.ones(1)
        assert torch.is_inference_mode_enabled()
    assert not made.is_inference()


def test_transforms_are_left_for_the_length_of_a_block():
    seen = []

    def function(value):
        with as_it_is():
            seen.append(torch.ones(2).sum().item())  # ``item`` is refused inside of ``vmap``
        return value

    torch.func.vmap(function)(torch.ones(3))
    assert seen == [2.0]


def test_dispatch_modes_are_left_for_the_length_of_a_block():
    with Listening() as listening:
        with as_it_is():
            torch.ones(1)
        assert listening.seen == []
        torch.ones(1)
        assert listening.seen == ["aten.ones.default"]


def test_types_of_all_kinds():
    process, tensor = make(types=BF16)
    process.values.write(tensor, torch.tensor([7.0, 8.0], dtype=torch.float64))
    assert values_at(tensor) == [[7.0, 8.0]] * 2


def test_loading_waits_for_copies():
    """``begin_loading`` has waited for checkpoints."""
    process, tensor = make()
    copy = Ticket()
    tensor.chunk.note(copy)
    process.values.load(tensor, lambda flat: flat.fill_(copy.num_waits))
    assert values_at(tensor) == [[1.0, 1.0]] * 2
