"""After a collective has failed: which of the other processes are gone, and which do not answer."""

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import psutil

ANSWER_S = 3.0
_PAUSE_S = 0.05
_CLOCK_SLACK_S = 2.0


class Store(Protocol):
    """The keys and values that all ranks share."""

    def set(self, key: str, value: str) -> None:
        """Sets a key."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""
        ...

    def get(self, key: str) -> bytes:
        """The value of a key that is set."""
        ...


def own_client(store: Any) -> Any:
    """A client of a store that nothing else uses, if the store can give one.

    While one thread waits for a key, as in ``dist.new_group``, a client of a ``TCPStore`` lets all other threads wait.

    Args:
        store: A store of torch.
    """
    try:
        return store.clone()
    except (AttributeError, RuntimeError):  # an older torch, or a store that cannot do it
        return store


class Member(NamedTuple):
    """One process of the group.

    Attributes:
        host: The name of its host.
        pid: Its process number there.
        started: When it started, in seconds of its host's clock.
    """

    host: str
    pid: int
    started: float


def describe_self() -> Member:
    """This process, as the others need to know it."""
    return Member(socket.gethostname(), os.getpid(), psutil.Process().create_time())


def describe_system() -> str:
    """Names the system in which a process number is unique; empty if that is not known.

    A host name does not: hosts can share one, and containers of one host do not see each other's processes.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def has_ended(member: Member) -> bool:
    """Whether a process of this system is gone; see ``describe_system``."""
    try:
        process = psutil.Process(member.pid)
        return abs(process.create_time() - member.started) >= _CLOCK_SLACK_S or not _is_running(process)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


class Liveness:
    """Asks every rank, once, whether it is still there.

    A rank whose collective has failed writes so into the store, and looks whether the other ranks did. A process of the
    same host that has ended is found at once, without the store.

    Args:
        rank: This rank.
        members: All processes by rank.
        store: Where ranks answer; nothing else may use these keys.
        patience_s: How long to wait for answers.

    Attributes:
        others: The other ranks.
    """

    def __init__(self, rank: int, members: Sequence[Member], store: Store, patience_s: float = ANSWER_S) -> None:
        self._rank = rank
        self._members = members
        self._store = store
        self._patience_s = patience_s
        self._neighbours = _find_neighbours(rank, members)
        self.others = [other for other in range(len(members)) if other != rank]
        self._unheard = set(self.others)
        self._ended: list[int] = []
        self._is_store_gone = False
        self._finding = ""

    def find_ended(self) -> dict[int, str]:
        """Other ranks of this host whose processes have ended, each with a clause that says so; uses no store."""
        return {other: self._describe_end(other) for other in self._find_ended()}

    def hold(self) -> str:
        """Asks the other ranks, and waits some seconds at most.

        Returns:
            What is known, in sentences; later calls return the same text.
        """
        if not self._finding:
            # A store whose host has lost its power answers nothing, not even with an error.
            thread = threading.Thread(target=self._ask, name="hf_patrickstar-liveness", daemon=True)
            thread.start()
            thread.join(self._patience_s + 1)
            if thread.is_alive():
                self._is_store_gone = True
                self._ended = self._find_ended()
            self._finding = self._describe()
        return self._finding

    def _ask(self) -> None:
        """Answers, and waits until a rank is known to be gone, all have answered, or time is over."""
        deadline = time.monotonic() + self._patience_s
        self._try_store(lambda: self._store.set(str(self._rank), "here"))
        while True:
            # Processes are looked at before answers: a rank that has answered and then ended is not missing.
            ended = self._find_ended()
            self._try_store(self._listen)
            self._ended = [other for other in ended if other in self._unheard]
            if self._ended or not self._unheard or time.monotonic() > deadline:
                return
            if self._is_store_gone:
                deadline = min(deadline, time.monotonic() + 1)
            time.sleep(_PAUSE_S)

    def _try_store(self, action: Callable[[], None]) -> None:
        if not self._is_store_gone:
            try:
                action()
            except (RuntimeError, OSError):
                self._is_store_gone = True

    def _listen(self) -> None:
        self._unheard -= {other for other in sorted(self._unheard) if self._store.check([str(other)])}

    def _find_ended(self) -> list[int]:
        return [other for other, process in self._neighbours.items() if not _is_running(process)]

    def _describe_end(self, other: int) -> str:
        member = self._members[other]
        return f"rank {other} has ended (process {member.pid} on {member.host})"

    def _describe(self) -> str:
        """Puts what was found into words."""
        parts = []
        for other in self._ended:
            parts.append(f"R{self._describe_end(other)[1:]}.")
        silent = sorted(self._unheard)
        if self._is_store_gone:
            parts.append(
                "The store where the ranks met is gone, and so is the process that hosts it (rank 0 or the launcher)."
            )
        elif silent and not self._ended:
            names = ", ".join(map(str, silent))
            parts.append(
                f"No answer within {self._patience_s:g} s from rank{'s' * (len(silent) > 1)} {names}: stuck, busy "
                "elsewhere, or gone with the host."
            )
        elif not self._ended:
            parts.append("All other ranks are still there, and a collective failed on them too.")
        return " ".join(parts)


def _find_neighbours(rank: int, members: Sequence[Member]) -> dict[int, psutil.Process]:
    """The other processes of this host that can be seen from here.

    Hosts can share a name, and containers of one host do not see each other's processes. So a process is only watched
    if it runs under its number here, and started at the time that it told.
    """
    neighbours = {}
    for other, member in enumerate(members):
        if other == rank or member.host != members[rank].host:
            continue
        try:
            process = psutil.Process(member.pid)
            if abs(process.create_time() - member.started) < _CLOCK_SLACK_S:
                neighbours[other] = process
        except psutil.Error:
            continue
    return neighbours


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True
