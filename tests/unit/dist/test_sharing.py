"""What one rank has at home and all want, with threads in place of processes."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from unit.dist import ranks
from unit.dist.ranks import ThreadCollectives
from unit.spec_builders import BF16

from hf_patrickstar.dist.order import Order
from hf_patrickstar.dist.sharing import Held, SharedState, Sharing
from hf_patrickstar.errors import CheckpointError, CollectiveError
from hf_patrickstar.layout.specs import TensorSpec

WIDE = torch.float32


class Rank:
    """One process, and what it has of tensors in a group of chunks; the value of tensor i counts up from 16 * i."""

    def __init__(self, collectives=None):
        self.collectives = collectives or ThreadCollectives()
        self.rank = self.collectives.rank
        self.sharing = Sharing(self.collectives, Order(self.collectives))


def run_together(world_size, function):
    return ranks.run_together(world_size, lambda collectives: function(Rank(collectives)))


def spec_of(index, *shape):
    return TensorSpec(index, f"t{index}", shape, True, types=BF16)


def hold(*shape, source, **settings):
    """What one process has of its only tensor."""
    spec = spec_of(0, *shape)
    return Held(spec, [(0, spec.numel)], source, settings.get("dtype", WIDE))


def make(process, *numels, chunk_numel):
    """A function that tells what a rank has of tensors that are one after the other in chunks of a group."""
    held = []
    for index, numel in enumerate(numels):
        begin = sum(numels[:index])
        cuts = [min(max(rank * chunk_numel - begin, 0), numel) for rank in range(process.collectives.world_size + 1)]
        parts = list(itertools.pairwise(cuts))
        value = torch.arange(numel) + 16.0 * index
        held.append(Held(spec_of(index, numel), parts, value[slice(*parts[process.rank])], WIDE))
    return held.__getitem__


def numbers(pieces):
    return [piece.tolist() for piece in pieces]


# One process


def test_one_process_gets_a_copy():
    process = Rank()
    source = torch.arange(4.0)
    value = process.sharing.tensor(hold(2, 2, source=source), "the value")
    assert (value.tolist(), value.untyped_storage().nbytes()) == ([[0.0, 1.0], [2.0, 3.0]], 16)
    value.zero_()
    assert source.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert process.sharing.is_alone
    assert process.sharing.rank == 0


def test_one_process_reads_pieces_in_place():
    process = Rank()
    source = torch.arange(5.0)
    pieces = list(process.sharing.parts(hold(5, source=source), (1, 5), 3, "the value"))
    assert numbers(pieces) == [[1.0, 2.0, 3.0], [4.0]]
    assert pieces[0].data_ptr() == source[1:].data_ptr()
    other = process.sharing.parts(hold(5, source=source, dtype=torch.float64), (0, 1), 3, "the value")
    assert next(other).dtype is torch.float64


def test_a_source_that_reads_is_asked_for_each_piece():
    process, asked = Rank(), []

    def source(start, stop):
        asked.append((start, stop))
        return torch.arange(start, stop, dtype=torch.float64)

    pieces = process.sharing.parts(hold(5, source=source), (0, 5), 2, "the value")
    assert numbers(pieces) == [[0.0, 1.0], [2.0, 3.0], [4.0]]
    assert asked == [(0, 2), (2, 4), (4, 5)]


def test_of_nothing_there_is_one_empty_piece():
    process = Rank()
    held = hold(0, 2, source=torch.zeros(0, 2))
    assert numbers(process.sharing.parts(held, (0, 0), 4, "the value")) == [[]]
    assert process.sharing.tensor(held, "the value").shape == (0, 2)


def test_one_process_does_not_wait_for_others():
    process = Rank()
    process.sharing.enter("saves")
    process.sharing.meet("saves")
    with process.sharing.led(lambda index: None, is_reader=True):
        pass
    own = {1: {"step": torch.tensor(3.0)}}
    states = process.sharing.states(own, None)
    assert states == own
    states[1]["other"] = 5
    assert own[1].keys() == {"step"}


# Reading together


@pytest.mark.parametrize("piece_numel", [1, 2, 3, 4, 6, 100])
def test_pieces_of_a_tensor_that_is_spread_come_to_all_in_order(piece_numel):
    def work(process):
        held_of = make(process, 6, chunk_numel=2)
        return numbers(process.sharing.parts(held_of(0), (0, 6), piece_numel, "the value"))

    whole = [float(number) for number in range(6)]
    assert run_together(3, work) == [[whole[place : place + piece_numel] for place in range(0, 6, piece_numel)]] * 3


def test_a_part_of_a_tensor():
    def work(process):
        held_of = make(process, 4, 2, chunk_numel=4)
        sharing = process.sharing
        return numbers(sharing.parts(held_of(0), (1, 3), 10, "the value")), process.collectives.sent_numels

    assert run_together(2, work) == [([[1.0, 2.0]], [2])] * 2


def test_what_is_read_is_told():
    def work(process):
        held_of = make(process, 2, chunk_numel=2)
        process.sharing.tensor(held_of(0), "the gradient")
        return process.collectives.whats

    assert run_together(2, work) == [[f"reads the gradient of parameter 't0' as {WIDE}"]] * 2


def test_who_does_not_want_the_rest_lets_the_others_have_it():
    def work(process):
        held_of = make(process, 6, chunk_numel=3)
        pieces = process.sharing.parts(held_of(0), (0, 6), 1, "the value")
        found = [next(pieces).tolist()]
        if process.rank == 0:
            pieces.close()
        found += numbers(pieces)
        return found, process.sharing.tensor(held_of(0), "the value").tolist()

    whole = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert run_together(2, work) == [([[0.0]], whole), ([[number] for number in whole], whole)]


def test_a_reader_may_have_parts_and_a_number_of_its_own():
    def work(process):
        state = torch.tensor([7.0, 8.0, 9.0]) if process.rank == 1 else None
        held = Held(spec_of(0, 2), [(0, 0), (0, 3)], state, WIDE, number=5)
        return numbers(process.sharing.parts(held, (0, 3), 3, "a state"))

    assert run_together(2, work) == [[[7.0, 8.0, 9.0]]] * 2


@pytest.mark.parametrize(
    "works",
    list(
        itertools.combinations(
            [
                lambda sharing, held_of: sharing.tensor(held_of(0), "the value"),
                lambda sharing, held_of: sharing.tensor(held_of(1), "the value"),
                lambda sharing, held_of: sharing.tensor(held_of(0)._replace(dtype=torch.bfloat16), "the value"),
                lambda sharing, held_of: list(sharing.parts(held_of(0), (0, 1), 2, "the value")),
                lambda sharing, held_of: sharing.enter("saves the model"),
                lambda sharing, held_of: sharing.enter("loads the model"),
                lambda sharing, held_of: sharing.scalars({}, 2),
                lambda sharing, held_of: sharing.meet("has saved"),
            ],
            2,
        )
    ),
)
def test_those_who_do_not_do_the_same_find_out(works):
    def work(process):
        held_of = make(process, 2, 2, chunk_numel=2)
        with pytest.raises(CollectiveError, match=r"the processes do not do the same: rank 0 .*; rank 1 "):
            works[process.rank](process.sharing, held_of)

    run_together(2, work)


def test_those_who_do_the_same_go_on():
    def work(process):
        process.sharing.enter("saves the model")
        process.sharing.meet("saves the model")
        return process.collectives.whats

    assert run_together(2, work) == [["saves the model"] * 2] * 2


# Some read, the others follow


def test_those_who_follow_serve_readers_until_they_leave():
    def work(process):
        held_of = make(process, 2, 2, chunk_numel=2)
        with process.sharing.led(held_of, is_reader=process.rank == 0):
            if process.rank:
                return process.collectives.sent_numels
            found = [process.sharing.tensor(held_of(index), "the value").tolist() for index in (1, 0)]
        return found, process.collectives.sent_numels

    assert run_together(2, work) == [([[16.0, 17.0], [0.0, 1.0]], [2]), [2]], "what only its owner reads stays there"


def test_of_a_tensor_that_is_spread_only_what_others_have_is_sent():
    def work(process):
        held_of = make(process, 5, chunk_numel=3)
        with process.sharing.led(held_of, is_reader=process.rank == 0):
            return process.collectives.sent_numels if process.rank else process.sharing.tensor(held_of(0), "x").tolist()

    assert run_together(2, work) == [[0.0, 1.0, 2.0, 3.0, 4.0], [2]]


def test_readers_go_first():
    log = []

    def work(process):
        held_of = make(process, 2, 2, chunk_numel=2)
        with process.sharing.led(held_of, is_reader=process.rank == 0):
            if process.rank == 0:
                log.append(process.sharing.tensor(held_of(1), "the value").tolist())
            log.append(process.rank)

    run_together(2, work)
    assert log == [[16.0, 17.0], 0, 1]


def test_a_reader_that_fails_says_so_to_the_others():
    def work(process):
        held_of = make(process, 2, chunk_numel=2)
        expected = "disk full" if process.rank == 0 else "the process that saves the model failed; its own error says why"
        with pytest.raises((ValueError, CheckpointError), match=expected), process.sharing.led(held_of, is_reader=process.rank == 0):
            raise ValueError("disk full")
        return process.sharing.tensor(held_of(0), "the value").tolist()

    assert run_together(2, work) == [[0.0, 1.0]] * 2


def test_one_that_follows_fails_alone():
    def work(process):
        held_of = make(process, 2, chunk_numel=2)
        if process.rank == 0:
            with process.sharing.led(held_of, is_reader=True):
                return True
        with pytest.raises(ValueError, match="disk full"), process.sharing.led(held_of, is_reader=False):
            raise ValueError("disk full")
        return True

    assert run_together(2, work) == [True, True]


# Scalars and states


def test_scalars_that_are_spread_come_together():
    def work(process):
        found = [{0: torch.tensor(1.5), 3: torch.tensor(2.0)}, {2: torch.tensor(4.0, dtype=torch.float64)}]
        vector = process.sharing.scalars(found[process.rank], 4)
        return vector.tolist(), vector.dtype

    assert run_together(2, work) == [([1.5, 0.0, 4.0, 2.0], WIDE)] * 2


class Copies(TorchDispatchMode):
    """Counts the operators that copy to another place."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._local_scalar_dense)
        return func(*args, **(kwargs or {}))


def test_scalars_are_put_together_before_they_are_copied():
    """On a device each copy of its own would wait for all kernels before it."""

    def work(process):
        found = {place: torch.tensor(float(place)) for place in range(process.rank, 100, 2)}
        with Copies() as copies:
            vector = process.sharing.scalars(found, 100)
        return torch.equal(vector, torch.arange(100.0)), copies.num < 5

    assert run_together(2, work) == [(True, True)] * 2


def own_states(rank):
    """Tensor 0 is spread over both; tensor 1 is at home on the second rank."""
    if rank == 0:
        return {0: {"step": torch.tensor(3.0), "exp_avg": torch.tensor([0.0, 1.0]), "factor": torch.tensor([[5.0]])}}
    return {
        0: {"step": torch.tensor(3.0), "exp_avg": torch.tensor([2.0, 3.0])},
        1: {"name": "sgd", "momentum": torch.tensor([[6.0, 7.0]], dtype=torch.bfloat16)},
    }


def place_of(index):
    return (spec_of(0, 4), ((0, 2), (2, 4))) if index == 0 else (spec_of(1, 1, 2), ((0, 0), (0, 2)))


def test_states_of_all_ranks_together():
    def work(process):
        own = own_states(process.rank)
        states = process.sharing.states(own, place_of)
        assert list(states) == [0, 1]
        assert states[1]["momentum"].dtype is torch.bfloat16
        return {
            (index, key): value.tolist() if isinstance(value, torch.Tensor) else value
            for index, state in states.items()
            for key, value in state.items()
        }

    expected = {
        (0, "step"): 3.0,
        (0, "exp_avg"): [0.0, 1.0, 2.0, 3.0],
        (0, "factor"): [[5.0]],
        (1, "name"): "sgd",
        (1, "momentum"): [[6.0, 7.0]],
    }
    assert run_together(2, work) == [expected] * 2


def test_who_does_not_want_states_takes_part():
    def work(process):
        own = own_states(process.rank)
        states = process.sharing.states(own, place_of, keep=process.rank == 1)
        return sorted(states), process.collectives.sent_numels

    assert run_together(2, work) == [([], [2, 2, 1, 2]), ([0, 1], [2, 2, 1, 2])]


def test_the_outline_of_states_is_the_same_everywhere():
    def work(process):
        own = own_states(process.rank)
        states = process.sharing.outline_states(own, place_of)
        assert process.collectives.sent_numels == []
        spread = SharedState(place_of(0)[0], "exp_avg", (4,), WIDE, ((0, 2), (2, 4)))
        assert states[0]["exp_avg"] == spread
        assert states[0]["factor"] == SharedState(place_of(0)[0], "factor", (1, 1), WIDE, [(0, 1), (0, 0)])
        assert states[1]["momentum"] == SharedState(place_of(1)[0], "momentum", (1, 2), torch.bfloat16, [(0, 0), (0, 2)])
        assert states[0]["step"].item() == 3.0
        return {index: list(state) for index, state in states.items()}

    assert run_together(2, work) == [{0: ["step", "exp_avg", "factor"], 1: ["name", "momentum"]}] * 2
