"""Collectives that are under way: what to wait for before their buffers are used."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_patrickstar.errors import CollectiveError
from hf_patrickstar.memory.streams import synchronize

_LINGER_S = 1.0
"""Seconds that gloo may keep a reference to a buffer after a collective; much longer than it ever does."""


class GlooTicket:
    """Waits for collectives of gloo that may still be under way; there may be none."""

    __slots__ = ("_users", "_wait", "_what", "_works")

    def __init__(
        self, works: Sequence[Any], what: str, wait: Callable[[Any, str], None], users: "Users | None" = None
    ) -> None:
        self._works = works
        self._what = what
        self._wait = wait
        self._users = users

    @property
    def is_done(self) -> bool:
        """Whether the host may use the buffer."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Blocks until the host may use the buffer and gloo has no reference to it any more.

        Raises:
            CollectiveError: If the collective failed.
        """
        for work in self._works:
            self._wait(work, self._what)
            del work  # it has a reference to the buffer, too
        self._works = ()
        if self._users is not None:
            self._users.wait()
            self._users = None

    join = wait


class Users:
    """Counts the references to a buffer before gloo gets it.

    Threads of gloo release a buffer a moment after their collective is complete. In between, the engine would count the
    reference as an alias of the chunk, on one rank and not on another.
    """

    __slots__ = ("_num", "_storage")

    def __init__(self, buffer: torch.Tensor) -> None:
        self._storage = buffer.untyped_storage()
        self._num = torch._C._storage_Use_Count(self._storage._cdata)

    def wait(self) -> None:
        """Blocks until there are no more references than before, for a second at most."""
        deadline = time.monotonic() + _LINGER_S
        while torch._C._storage_Use_Count(self._storage._cdata) > self._num and time.monotonic() < deadline:
            time.sleep(0)


class DeviceTicket:
    """A collective on a stream of the device.

    Args:
        work: What torch.distributed gave.
        device: The device.
        what: What the data is, for errors.
        fail: Makes the error of a collective that failed.
        finish: What is left to do with the result. The stream that joins the ticket does it, once, and no other stream
            may join.
    """

    __slots__ = ("_device", "_fail", "_finish", "_is_finished", "_what", "_work")

    def __init__(
        self,
        work: Any,
        device: torch.device,
        what: str,
        fail: Callable[[str, Exception], CollectiveError],
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._finish = finish
        self._is_finished = False
        self._work = work
        self._device = device
        self._what = what
        self._fail = fail

    @property
    def is_done(self) -> bool:
        """Whether it is complete, as far as the host can tell."""
        return bool(self._work.is_completed())

    def wait(self) -> None:
        """Blocks until the host may use the buffer."""
        self.join()
        synchronize(self._device)

    def join(self) -> None:
        """Lets all later work of the device wait for the collective.

        Raises:
            CollectiveError: If the collective failed.
        """
        if self._is_finished:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._fail(self._what, error) from error
        if self._finish is not None:
            self._is_finished = True
            self._finish()
