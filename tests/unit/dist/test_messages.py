"""Messages of any length and on any subject meet, with threads for processes."""

import concurrent.futures
import contextlib

import pytest
import torch
from support.threads import Exchange

from hf_patrickstar.dist.collectives import ROW_NBYTES, Collectives
from hf_patrickstar.errors import CollectiveError


class ThreadMessages(Collectives):
    """Rows go to other threads; nobody is missing."""

    def __init__(self, rank, exchange):
        super().__init__(rank, exchange.world_size, torch.device("cpu"))
        self.place, self.lengths = exchange, []

    def _gather_rows(self, row, what, is_prompt):
        self.lengths.append(len(row))
        rows = self.place.swap(self.rank, row)
        assert len(set(map(len, rows))) == 1, "gloo ends a process that gets more than it expects"
        return rows

    def _guarded(self, what, *, is_blocking=False):
        return contextlib.nullcontext()


def talk(*messages):
    """Sends a message of each rank: a value, its subject, and what the rank is about to do."""
    exchange = Exchange(len(messages))

    def send(rank):
        collectives, (value, subject, what) = ThreadMessages(rank, exchange), messages[rank]
        try:
            return collectives.exchange(value, what, subject=subject), collectives.lengths
        except CollectiveError as error:
            return error, collectives.lengths

    with concurrent.futures.ThreadPoolExecutor(len(messages)) as pool:
        return list(pool.map(send, range(len(messages))))


@pytest.mark.parametrize("long", [0, ROW_NBYTES, 10 * ROW_NBYTES])
def test_messages_of_different_lengths_take_one_row_or_no_more_than_the_longest(long):
    values = [[], "x" * long, {"a": torch.float32, "b": [-(2**63), 2**62]}]
    for found, lengths in talk(*((value, "trace", f"is {rank}") for rank, value in enumerate(values))):
        assert found == values
        assert (lengths[0], len(lengths)) == (ROW_NBYTES, 2 if long else 1)
        assert not long or long <= sum(lengths) < long + 100


@pytest.mark.parametrize("value", [7, "x" * 10 * ROW_NBYTES], ids=["short", "long"])
def test_different_subjects_are_an_error_that_says_what_each_rank_does(value):
    found = talk((value, "trace", "agrees on a trace"), ([1], "order", "reads"), (None, "order", "x" * ROW_NBYTES))
    (text,) = {str(error) for error, _ in found}
    doings = f"rank 0 agrees on a trace; rank 1 reads; rank 2 {'x' * ROW_NBYTES}"
    assert text.startswith(f"the processes do not do the same: {doings}. Forward, backward")
    assert len({tuple(lengths) for _, lengths in found}) == 1
