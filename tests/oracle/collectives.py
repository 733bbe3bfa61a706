"""Processes that are not here: what they send costs this one time, and what they say is what this one says.

[Note: virtual processes]
One process of several runs in virtual time. Its engine, plans, groups of chunks and buckets of gradients are those of a
real run. The others are imagined: they do the same at the same time. So nobody waits for a straggler, and every answer
to a message is the message. ``VirtualCollectives`` takes the place of the backend of a device below ``Collectives``: a
gather and a reduction are work in two lanes, as on two communicators, and each has the links for itself.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from oracle.driver import VirtualDriver, VirtualEvent

from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.events import Listener, MessageExchanged
from hf_patrickstar.schedule.clock import Lane, Mark


class VirtualPeers:
    """Makes the collectives of processes that are not here; see ``Resources.find``."""

    def __init__(self, driver: VirtualDriver, world_size: int) -> None:
        self._driver = driver
        self._world_size = world_size

    def __call__(self, device: torch.device, emit: Listener, reduce_dtype: str) -> Collectives:
        """Makes them."""
        return VirtualCollectives(self._driver, self._world_size, device, emit, reduce_dtype)


class VirtualWork:
    """A collective in a lane; see ``torch.distributed.Work``."""

    def __init__(self, driver: VirtualDriver, event: VirtualEvent) -> None:
        self._driver = driver
        self._event = event

    def is_completed(self) -> bool:
        """Whether the host's time is past its end."""
        return self._event.query()

    def wait(self) -> None:
        """Makes the compute lane go on after it."""
        self._driver.clock.follow(Lane.COMPUTE, self._event.mark)


class VirtualCollectives(Collectives):
    """The collectives of one process among others that are not here; see [Note: virtual processes]."""

    def __init__(
        self, driver: VirtualDriver, world_size: int, device: torch.device, emit: Listener, reduce_dtype: str
    ) -> None:
        super().__init__(0, world_size, device, emit=emit, reduce_dtype=reduce_dtype)
        self._driver = driver
        self._is_gloo = not driver.machine.has_accelerator

    def exchange(self, value: Any, what: str, *, subject: str | None = None, is_prompt: bool = False) -> list[Any]:
        self._exchange()
        return [value] * self.world_size

    def all_reduce(self, tensor: torch.Tensor, what: str) -> None:
        """See ``Collectives``; the host waits for what the device has computed of it, and sends it."""
        if self.world_size > 1 and tensor.numel():
            self._driver.bring_home(tensor)
            self._driver.message()

    def begin_broadcast(self, tensor: torch.Tensor, source: int, what: str) -> Callable[[], None]:
        """See ``Collectives``; the values that all get are those that this process has."""
        return self._exchange

    def _exchange(self) -> None:
        if self.world_size > 1:
            self._emit(MessageExchanged())
            self._driver.message()

    def _broadcast(self, slices: Sequence[torch.Tensor]) -> list[VirtualWork]:
        return [self._gather(slices[0], slices[self.rank])]

    def _receive(self, piece: torch.Tensor, source: int) -> VirtualWork:
        return VirtualWork(self._driver, self._driver.reduce(piece.nbytes))

    def _send(self, piece: torch.Tensor, target: int) -> VirtualWork:
        """It ends with what is received, which has the link."""
        return VirtualWork(self._driver, VirtualEvent(self._driver, Mark()))

    def _gather(self, buffer: torch.Tensor, own: torch.Tensor) -> VirtualWork:
        return VirtualWork(self._driver, self._driver.gather((self.world_size - 1) * own.nbytes))

    def _scatter(self, total: torch.Tensor, terms: torch.Tensor) -> VirtualWork:
        return VirtualWork(self._driver, self._driver.reduce((self.world_size - 1) * total.nbytes))

    def _wait(self, work: VirtualWork, what: str) -> None:
        work.wait()

    @contextlib.contextmanager
    def _guarded(self, what: str, *, is_blocking: bool = False) -> Iterator[Any]:
        """Nothing fails, and nobody is missing."""
        yield None
