"""Messages between processes: every one begins with a row of one length, so that any two of them may meet.

gloo ends a process that gets more bytes than it expects. Processes that do different things send different messages,
and how long a message is may depend on what only one process knows. So the first row of every message has the same
length. It says what the message is about, and how long it is. The row has room for most messages; what does not fit
follows in a second row, which is as long as the longest message of all processes needs. Processes whose messages are
about different things then say what they do, and raise an error.
"""

import pickle
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_patrickstar.errors import CollectiveError

ROW_NBYTES = 2048
"""Messages about a model of 10,000 parameters fit."""
DOES = "says what it does"
"""The subject of the messages of processes that have found out that they do not do the same."""
_HEADER = struct.Struct("=Qq")


def swap_messages(
    value: Any,
    subject: str,
    what: str,
    world_size: int,
    gather: Callable[[list[torch.Tensor], torch.Tensor], None],
) -> list[Any]:
    """Sends a value to all ranks, and waits for theirs.

    Args:
        value: The value; pickle must accept it.
        subject: What the message is about, the same on all ranks.
        what: What this rank is about to do, as a verb phrase, for errors.
        world_size: The number of ranks.
        gather: Fills the given rows with those of all ranks; called with the own row too.

    Returns:
        The values by rank.

    Raises:
        CollectiveError: If the messages of other ranks are about something else.
    """

    def swap(part: bytes, nbytes: int) -> list[bytes]:
        own = torch.frombuffer(bytearray(part.ljust(nbytes, b"\0")), dtype=torch.uint8)
        rows = [own.clone() for _ in range(world_size)]
        gather(rows, own)
        return [row.numpy().tobytes() for row in rows]

    text = pickle.dumps(value)
    text = _HEADER.pack(zlib.crc32(subject.encode()), len(text)) + text
    rows = swap(text[:ROW_NBYTES], ROW_NBYTES)
    subjects, sizes = zip(*(_HEADER.unpack_from(row) for row in rows), strict=True)
    if len(set(subjects)) > 1:
        raise disagreement(swap_messages(what, DOES, what, world_size, gather))
    rest_nbytes = _HEADER.size + max(sizes) - ROW_NBYTES
    if rest_nbytes > 0:
        rest = swap(text[ROW_NBYTES:], rest_nbytes)
        rows = [first + second for first, second in zip(rows, rest, strict=True)]
    return [pickle.loads(row[_HEADER.size :]) for row in rows]  # pickle knows where it ends


def disagreement(doings: Sequence[str]) -> CollectiveError:
    """The error of processes that do not do the same.

    Args:
        doings: What each rank is about to do, as a verb phrase.
    """
    listing = "; ".join(f"rank {rank} {doing}" for rank, doing in enumerate(doings))
    return CollectiveError(
        f"the processes do not do the same: {listing}. Forward, backward, the optimizer's step, evaluation, saving "
        "and reading of parameters must be called by all of them, in the same order and equally often"
    )
