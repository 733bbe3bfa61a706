"""Waits until all processes have come to make a process group, and names those that do not come.

To make a group, torch waits for every process, half an hour by default, and does not say for which. So each process
writes into the store that all share

- who it is, as early as possible, for example when an accelerator is made;
- that it has come, before the group is made. Then the process waits until all have come.

While a process waits it checks the others. A process that wrote who it is, and has ended since, is named at once if it
ran on this system. A process that has not come is named in a warning after ten seconds. After a minute
(``process_wait_s``) the waiting process gives up, and writes so for processes that come later, unless all missing
processes are seen to run: then they are only slow.
"""

import json
import logging
import time
from collections.abc import Sequence
from typing import Protocol

from hf_patrickstar.errors import CollectiveError
from hf_patrickstar.callers import find_caller
from hf_patrickstar.dist.liveness import Member, Store, describe_self, describe_system, has_ended
from hf_patrickstar.dist.vigil import Patience

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.002, 0.25


class CountingStore(Store, Protocol):
    """Keys and values that all ranks share, and numbers that they count up."""

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, 0 at first, and returns it."""
        ...


def announce(rank: int, store: CountingStore) -> None:
    """Tells the others who this process is.

    Args:
        rank: The rank of this process in the default group.
        store: Where the others look; nothing else may use these keys.
    """
    store.set(f"member {rank}", json.dumps([describe_system(), *describe_self()]))


class Arrival:
    """Waits for the ranks that make a group together.

    Args:
        rank: The rank of this process in the default group.
        ranks: The ranks that make the group.
        store: Where the ranks write; nothing else may use these keys.
        patience: How long to wait.
        timeout_s: How long to wait for processes that are seen to run.
    """

    def __init__(
        self, rank: int, ranks: Sequence[int], store: CountingStore, patience: Patience, timeout_s: float
    ) -> None:
        self._rank = rank
        self._ranks = ranks
        self._store = store
        self._patience = patience
        self._timeout_s = timeout_s
        self._key = ",".join(map(str, ranks))

    def wait(self) -> None:
        """Waits until all ranks have come as often as this one.

        Raises:
            CollectiveError: If a rank is gone, or does not come.
            RuntimeError: If the store is gone.
        """
        announce(self._rank, self._store)
        number = self._store.add(f"{self._key} came {self._rank}", 1)
        self._store.add(f"{self._key} came", 1)
        begin, pause_s, warn_s = time.monotonic(), _FIRST_PAUSE_S, self._patience.warn_s
        while self._store.add(f"{self._key} came", 0) < number * len(self._ranks):
            waited_s = time.monotonic() - begin
            if pause_s >= _LAST_PAUSE_S:  # else the others are only a little later
                self._look(number, waited_s)
            if waited_s >= warn_s:
                warn_s *= 2
                self._warn(number, waited_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        if self._store.check([f"{self._key} gave up"]):
            raise CollectiveError(self._store.get(f"{self._key} gave up").decode())

    def _look(self, number: int, waited_s: float) -> None:
        """Gives up if a process has ended, or has not come in time."""
        members = self._read_members()
        ended = [(rank, member) for rank, member in members.items() if has_ended(member)]
        if ended:
            texts = (f"rank {rank} has ended (process {member.pid} on {member.host})" for rank, member in ended)
            self._give_up(f"{'; '.join(texts)}. Look first at its own error")
        missing = self._find_missing(number)
        is_running = all(rank in members for rank in missing)
        if waited_s >= (self._timeout_s if is_running else min(self._patience.limit_s, self._timeout_s)):
            self._give_up(
                f"{_name(missing)} within {waited_s:.2g} s. All processes must make the engine (prepare, or train and "
                "evaluate of a Trainer) together; look first for the error of one that is missing, and where it was "
                "only slow, raise process_wait_s"
            )

    def _give_up(self, why: str) -> None:
        message = f"rank {self._rank} waited for the others to make the engine, and {why}. Then start all of them again"
        self._store.set(f"{self._key} gave up", message)
        raise CollectiveError(message)

    def _warn(self, number: int, waited_s: float) -> None:
        missing = self._find_missing(number)
        if missing:
            caller = find_caller()
            logger.warning(
                "patrickstar: rank %d makes an engine%s and has waited for %.2g s: %s. All processes must make it "
                "together",
                self._rank,
                f" (called at {caller})" if caller else "",
                waited_s,
                _name(missing),
            )

    def _find_missing(self, number: int) -> list[int]:
        return [rank for rank in self._ranks if self._store.add(f"{self._key} came {rank}", 0) < number]

    def _read_members(self) -> dict[int, Member]:
        """The other processes on this system, as far as they have written who they are."""
        members = {}
        own = describe_system()
        for rank in self._ranks:
            if rank != self._rank and own and self._store.check([f"member {rank}"]):
                system, *member = json.loads(self._store.get(f"member {rank}"))
                if system == own:
                    members[rank] = Member(*member)
        return members


def _name(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names} has not come" if len(ranks) == 1 else f"ranks {names} have not come"
