"""What one rank has at home and all want, with threads in place of processes."""

import itertools

import pytest
import torch
from support import threads
from support.threads import ThreadCollectives
from support.spec_builders import BF16

from hf_patrickstar.dist.sharing import Held, Sharing
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.layout.specs import TensorSpec

WIDE = torch.float32


class Rank:
    """One process, and what it has of tensors in a group of chunks; the value of tensor i counts up from 16 * i."""

    def __init__(self, collectives=None):
        self.collectives = collectives or ThreadCollectives()
        self.rank = self.collectives.rank
        self.sharing = Sharing(self.collectives)

    def hold(self, *numels, chunk_numel):
        """A function that returns what the rank has of tensors that are one after the other in chunks of a group."""
        held = []
        for index, numel in enumerate(numels):
            begin = sum(numels[:index])
            ends = [rank * chunk_numel - begin for rank in range(self.collectives.world_size + 1)]
            parts = list(itertools.pairwise(min(max(end, 0), numel) for end in ends))
            value = torch.arange(numel) + 16.0 * index
            held.append(Held(spec_of(index, numel), parts, value[slice(*parts[self.rank])], WIDE))
        return held.__getitem__


def run_together(world_size, function):
    return threads.run_together(world_size, lambda collectives: function(Rank(collectives)))


def spec_of(index, *shape):
    return TensorSpec(index, f"t{index}", shape, True, types=BF16)


def hold(*shape, source, dtype=WIDE):
    """What one process has of its only tensor."""
    spec = spec_of(0, *shape)
    return Held(spec, [(0, spec.numel)], source, dtype)


def numbers(pieces):
    return [piece.tolist() for piece in pieces]


# One process


def test_one_process_gets_a_copy_and_reads_pieces_in_place():
    sharing, source = Rank().sharing, torch.arange(5.0)
    value = sharing.tensor(hold(5, source=source), "the value")
    value.zero_()
    assert (value.untyped_storage().nbytes(), source.tolist()) == (20, [0.0, 1.0, 2.0, 3.0, 4.0])
    pieces = list(sharing.parts(hold(5, source=source), "the value", 1, 5, 3))
    assert numbers(pieces) == [[1.0, 2.0, 3.0], [4.0]]
    assert pieces[0].data_ptr() == source[1:].data_ptr()
    assert next(sharing.parts(hold(5, source=source, dtype=torch.float64), "", 0, 1, 3)).dtype is torch.float64
    empty = hold(0, 2, source=torch.zeros(0, 2))
    assert numbers(sharing.parts(empty, "the value", 0, 0, 4)) == [[]]
    assert sharing.tensor(empty, "the value").shape == (0, 2)


# Reading together


@pytest.mark.parametrize("piece_numel", [3, 100])
def test_pieces_of_a_tensor_that_is_spread_come_to_all_in_order(piece_numel):
    def work(process):
        held = process.hold(6, chunk_numel=2)(0)
        pieces = numbers(process.sharing.parts(held, "the gradient", 0, 6, piece_numel))
        return pieces, numbers(process.sharing.parts(held, "", 1, 3, 10)), process.collectives.whats[0]

    whole = [float(number) for number in range(6)]
    pieces = [whole[place : place + piece_numel] for place in range(0, 6, piece_numel)]
    says = f"reads the gradient of parameter 't0' as {WIDE}"
    assert [(found, what) for found, _, what in run_together(3, work)] == [(pieces, says)] * 3
    assert [list(itertools.chain(*part)) for _, part, _ in run_together(3, work)] == [[1.0, 2.0]] * 3


def test_who_does_not_want_the_rest_lets_the_others_have_it():
    def work(process):
        held = process.hold(6, chunk_numel=3)(0)
        pieces = process.sharing.parts(held, "the value", 0, 6, 1)
        found = [next(pieces).tolist()]
        if process.rank == 0:
            pieces.close()
        found += numbers(pieces)
        return found, process.sharing.tensor(held, "the value").tolist()

    whole = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert run_together(2, work) == [([[0.0]], whole), ([[number] for number in whole], whole)]


# Some read, the others follow


def test_those_who_follow_serve_readers_which_go_first_until_they_leave():
    log = []

    def work(process):
        held_of = process.hold(2, 2, 5, chunk_numel=5)
        with process.sharing.led(held_of, is_reader=process.rank == 0):
            if process.rank == 0:
                log.extend(process.sharing.tensor(held_of(index), "the value").tolist() for index in (0, 2))
            log.append(process.rank)
        return process.collectives.sent_numels

    assert run_together(2, work) == [[4], [4]], "only what another one has is sent"
    assert log == [[0.0, 1.0], [32.0, 33.0, 34.0, 35.0, 36.0], 0, 1]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_reader_that_fails_says_so_to_the_others_and_one_that_follows_fails_alone(failing):
    def work(process):
        held_of = process.hold(2, chunk_numel=2)
        try:
            with process.sharing.led(held_of, is_reader=process.rank == 0):
                if process.rank == failing:
                    raise ValueError("disk full")
        except (ValueError, CheckpointError) as error:
            return str(error), process.sharing.tensor(held_of(0), "the value").tolist()
        return "", process.sharing.tensor(held_of(0), "the value").tolist()

    texts = {0: ["disk full", "the process that saves the model failed; its own error says why"], 1: ["", "disk full"]}
    assert run_together(2, work) == [(text, [0.0, 1.0]) for text in texts[failing]]
