"""Messages of any length and on any subject meet, with threads for processes."""

import concurrent.futures

import pytest
import torch
from support.threads import Exchange

from hf_patrickstar.dist.messages import ROW_NBYTES, swap_messages
from hf_patrickstar.errors import CollectiveError


def talk(*messages):
    """Sends a message of each rank: a value, its subject, and what the rank is about to do."""
    exchange = Exchange(len(messages))

    def send(rank):
        lengths = []

        def gather(rows, own):
            lengths.append(own.numel())
            sent = exchange.swap(rank, own)
            assert len({row.numel() for row in sent}) == 1, "gloo ends a process that gets more than it expects"
            for row, found in zip(rows, sent, strict=True):
                row.copy_(found)

        try:
            return swap_messages(*messages[rank], len(messages), gather), lengths
        except CollectiveError as error:
            return error, lengths

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
