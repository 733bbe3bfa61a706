"""Collectives that are under way: what to wait for before their buffers are used."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_patrickstar.errors import CollectiveError
from hf_patrickstar.memory.streams import synchronize

_LINGER_S = 1.0
"""Seconds that gloo may keep a reference to a buffer after a collective; much longer than it ever does."""


class GlooTicket:
    """Collectives of gloo that may still be under way; there may be none.

    Args:
        what: What the data is, for errors.
        wait: Waits for one of them.
        buffer: What they fill. Threads of gloo release it a moment after their collective is complete. In between, the
            engine would count the reference as an alias of the chunk, on one rank and not on another.

    Attributes:
        works: What torch.distributed gave, after this ticket was made.
    """

    __slots__ = ("_num_users", "_storage", "_wait", "_what", "works")

    def __init__(self, what: str, wait: Callable[[Any, str], None], buffer: torch.Tensor | None = None) -> None:
        self.works: Sequence[Any] = ()
        self._what = what
        self._wait = wait
        self._storage = None if buffer is None else buffer.untyped_storage()
        self._num_users = self._count_users()

    @property
    def is_done(self) -> bool:
        """Whether the host may use the buffer."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        """Blocks until the host may use the buffer and gloo has no reference to it any more.

        Raises:
            CollectiveError: If the collective failed.
        """
        for work in self.works:
            self._wait(work, self._what)
            del work  # it has a reference to the buffer, too
        self.works = ()
        deadline = time.monotonic() + _LINGER_S
        while self._count_users() > self._num_users and time.monotonic() < deadline:
            time.sleep(0)
        self._storage = None

    join = wait

    def _count_users(self) -> int:
        return 0 if self._storage is None else torch._C._storage_Use_Count(self._storage._cdata)


@dataclasses.dataclass(slots=True, eq=False)
class DeviceTicket:
    """A collective on a stream of the device.

    Attributes:
        work: What torch.distributed gave.
        device: The device.
        what: What the data is, for errors.
        fail: Makes the error of a collective that failed.
        finish: What is left to do with the result. The stream that joins the ticket does it, once, and no other stream
            may join.
        is_finished: Whether that was done.
    """

    work: Any
    device: torch.device
    what: str
    fail: Callable[[str, Exception], CollectiveError]
    finish: Callable[[], None] | None = None
    is_finished: bool = False

    @property
    def is_done(self) -> bool:
        """Whether it is complete, as far as the host can tell."""
        return bool(self.work.is_completed())

    def wait(self) -> None:
        """Blocks until the host may use the buffer."""
        self.join()
        synchronize(self.device)

    def join(self) -> None:
        """Lets all later work of the device wait for the collective.

        Raises:
            CollectiveError: If the collective failed.
        """
        if self.is_finished:
            return
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.fail(self.what, error) from error
        if self.finish is not None:
            self.is_finished = True
            self.finish()
