"""The watchdog over waits for other ranks: it warns, ends waits that are too long, and names the missing ranks.

[Note: how long a rank waits]
A rank waits for a message, which all ranks send at a call that they make together, or for data that follow a message.

- For a message it waits ``process_wait_s`` seconds. For data, and for messages of ranks that have said before that they
  come (a step has begun, say, and one rank computes longer), it waits until the timeout of the process group.
- A rank that has waited for a second writes into the store what it waits for: the number of messages so far, what it is
  about to do, and the line of the user's code. After ten seconds it logs one warning, with what the others wrote.
- A thread of each rank looks into the store every second. While another rank waits, it writes the line where this one
  is. If all others are in collectives for ``process_wait_s``, some of them in one of the user, each waits for the other:
  that ends any wait.
- A rank that ends a wait, or whose collective fails, writes the reason into the store, as the verdict, and closes its
  connections. So a rank that waits for this one fails at once. A rank that waits for a third one looks for a verdict
  every second. Both raise the verdict.

Processes of this system that have ended are found by their process numbers; others are ranks that have not come.
"""

import contextlib
import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import psutil
import torch.distributed as dist

from hf_patrickstar.common.callers import find_caller, find_place
from hf_patrickstar.common.cores import usable_cores
from hf_patrickstar.errors import CollectiveError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_WARN_S, _POLL_S, _ANSWER_S, _STORE_S = 10.0, 1.0, 3.0, 3.0
_CLOCK_SLACK_S, _PAUSE_S = 2.0, 0.05
_MOST_COMPUTING = 0.1
"""The largest share of its time that a process computes that waits in a collective."""


class Process(NamedTuple):
    """A process, as the others need to know it.

    Attributes:
        system: Names the system in which the process number is unique; each container of a host has its own numbers.
        host: The name of its host.
        pid: Its process number.
        started: When it started, in seconds since its host started; setting the clock does not change it.
        cores: The cores on which it may run.
    """

    system: str
    host: str
    pid: int
    started: float
    cores: list[int]

    @classmethod
    def own(cls) -> "Process":
        """This process."""
        return cls(_find_system(), socket.gethostname(), os.getpid(), started_s(os.getpid()), sorted(usable_cores()))

    @property
    def is_running(self) -> bool | None:
        """Whether it runs; ``None`` if that cannot be seen from here."""
        if self.system != _find_system():
            return None
        try:
            is_same = abs(started_s(self.pid) - self.started) < _CLOCK_SLACK_S  # numbers are used again
            return is_same and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False
        except psutil.Error:
            return None


def started_s(pid: int) -> float:
    """When a process of this host started, in seconds since the host did."""
    booted = psutil.boot_time()  # first: versions of psutil before 7.1 add what this has returned last
    return psutil.Process(pid).create_time() - booted


class _Wait(NamedTuple):
    """What a rank waits for: the number of messages so far, what it is about to do, and the line of the user's code."""

    number: int
    what: str
    caller: str

    def __str__(self) -> str:
        return f"{self.what} (called at {self.caller})" if self.caller else self.what


def announce() -> None:
    """Lets other processes notice if this one ends before it makes an engine, if there is a process group."""
    if dist.is_available() and dist.is_initialized():
        _find_store().set(f"process {dist.get_rank()}", json.dumps(Process.own()))


class Watchdog:
    """Watches the waits of one rank; see [Note: how long a rank waits].

    Args:
        rank: This rank.
        ranks: The ranks of all processes in the default group.
        wait_s: Seconds to wait for a message (``process_wait_s``); with 0 or ``None`` there is no limit.
        timeout_s: The timeout of the process group, in seconds.

    Attributes:
        verdict: Why these ranks cannot go on together; empty as long as they can.
        processes: The processes by rank; all of them as soon as they have met.
        poll_s: Seconds between two looks into the store.
    """

    def __init__(self, rank: int, ranks: Sequence[int], wait_s: float | None, timeout_s: float) -> None:
        self.verdict = ""
        self.processes: dict[int, Process] = {}
        self._rank = rank
        self._ranks = ranks
        self._others = [other for other in range(len(ranks)) if other != rank]
        self._wait_s, self._timeout_s = wait_s or math.inf, timeout_s
        self._warn_s = min(_WARN_S, self._wait_s / 3)
        self.poll_s = min(_POLL_S, self._warn_s / 5)
        self._num_messages, self._is_warned, self._is_store_gone = 0, False, False
        self._answered, self._place, self._since, self._computed_s = "", ("", False), 0.0, 0.0  # see ``look``
        self._blocked_at, self._lock = 0.0, threading.Lock()
        self._blocking: _Wait | None = None  # what ``look`` watches
        self._all_store = self._store = _find_store()

    def meet(self) -> None:
        """Waits until all ranks have come to make a group; torch itself would wait for half an hour without a word.

        Processes that announced themselves and are seen to run are only slow: for these the group's timeout counts.

        Raises:
            CollectiveError: If a rank does not come.
        """
        announce()
        wait, begin, pause_s = _Wait(0, "makes an engine", find_caller()), time.monotonic(), 0.002
        key, others = ",".join(map(str, self._ranks)), self._others
        key = f"{key} {self._all_store.add(f'{key} {self._rank}', 1)}"  # all make their n-th engine together
        self._store = dist.PrefixStore(key, self._all_store)
        self._write(wait)
        while missing := self._ask(lambda: [rank for rank in others if not self._store.check([str(rank)])], others):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.25)
            self.processes = self._ask(self._read_processes, self.processes)
            running = [rank in self.processes and self.processes[rank].is_running for rank in missing]
            limit_s = self._timeout_s if all(running) else min(self._wait_s, self._timeout_s)
            limit_s = 0.0 if self._find_ended() or self._is_store_gone else limit_s
            self._check(wait, time.monotonic() - begin, limit_s)
        self._check(wait, 0.0, math.inf)  # a rank that came may have ended its wait since
        self.processes = self._read_processes()
        self._write(None)

    def wait(self, work: Any, what: str, *, is_message: bool = False, is_prompt: bool = False) -> None:
        """Waits until a collective of gloo is complete.

        Args:
            work: The ``Work`` that torch returned for it.
            what: What this rank is about to do, as a verb phrase.
            is_message: Whether it is a message; all ranks send messages in one order.
            is_prompt: Whether all ranks should send it at once, so that the wait ends after ``process_wait_s``.

        Raises:
            CollectiveError: If this rank or another one ended a wait.
            RuntimeError: If the collective failed, or the timeout of the process group has passed.
        """
        self._num_messages += is_message
        if _is_over(work, self.poll_s):
            return
        wait, begin = _Wait(self._num_messages, what, find_caller()), time.monotonic() - self.poll_s
        self._write(wait)
        while not _is_over(work, self.poll_s):
            self._check(wait, time.monotonic() - begin, self._wait_s if is_prompt else math.inf)
        self._write(None)

    @contextlib.contextmanager
    def watched(self, what: str) -> Iterator[None]:
        """Lets ``look`` watch the block: gloo receives from one rank without a time limit.

        Args:
            what: What this rank is about to do, as a verb phrase.
        """
        self._blocked_at = begin = time.monotonic()  # first, for the thread that looks
        self._blocking = _Wait(self._num_messages, what, find_caller())
        try:
            yield
        finally:
            with self._lock:
                self._blocking = None
        if time.monotonic() - begin >= self.poll_s:
            self._write(None)

    def look(self) -> None:
        """Tells ranks that wait where this one is, and watches what blocks it; another thread calls it all the time.

        Raises:
            CollectiveError: If these ranks cannot go on together.
        """
        now = time.monotonic()
        with self._lock:
            if self._blocking is not None and now - self._blocked_at >= self.poll_s:
                if not self._read(str(self._rank)):
                    self._write(self._blocking)
                self._check(self._blocking, now - self._blocked_at, math.inf)
        if (question := self._read("question")) == self._answered:
            return
        place, computed_s = find_place(), time.process_time()
        if place != self._place or computed_s - self._computed_s > _MOST_COMPUTING * (now - self._since):
            self._place, self._since, self._computed_s = place, now, computed_s
        self._answered = question
        self._store.set(f"at {self._rank}", json.dumps((place[0], place[1] * (now - self._since))))
        if verdict := self._read("verdict"):
            self.verdict = verdict
            if place[1] and not self._read(str(self._rank)):  # it fails, and does not say why
                logger.error("patrickstar: rank %d: %s", self._rank, verdict)
            raise CollectiveError(verdict)

    def judge(self, verdict: str) -> str:
        """Lets all ranks know why they cannot go on together.

        Args:
            verdict: The reason, in sentences.

        Returns:
            The verdict that counts: the first that a rank wrote.
        """
        if not self.verdict:
            self.verdict = self._ask(lambda: self._store.compare_set("verdict", "", verdict).decode(), verdict)
            self._ask(lambda: self._store.set("question", verdict), None)  # so that all look for it
        return self.verdict

    def explain(self, what: str, error: Exception) -> CollectiveError:
        """Makes the error of a collective that failed; waits some seconds until the other ranks say where they are.

        Args:
            what: What the collective was for.
            error: What torch said.
        """
        wait, deadline = _Wait(self._num_messages, what, find_caller()), time.monotonic() + min(_ANSWER_S, self._wait_s)
        self._write(wait)
        while not (self._find_verdict() or self._find_ended() or time.monotonic() > deadline):
            if (others := self._read_others().values()) and all(wait for wait, *_ in others):
                break  # all others are there
            time.sleep(_PAUSE_S)
        text = (
            f"a collective failed on rank {self._rank} of {len(self._ranks)}: {self._describe_others(wait)}. Look "
            "first at the error of a rank that is missing; if it was only slow, raise the timeout of the process group "
            "(ddp_timeout in the training arguments). Then restart from the last checkpoint. torch.distributed says: "
            f"{error}"
        )
        return CollectiveError(f"{what}: {self.judge(text)}")

    # Inside

    def _check(self, wait: _Wait, waited_s: float, limit_s: float) -> None:
        """Raises an error if another rank ended a wait, or this one takes too long; warns if it takes long."""
        if self._find_verdict():
            raise CollectiveError(f"{wait.what}: {self.verdict}")
        others = self._read_others().values() if waited_s >= self._wait_s else ()
        is_stuck = all(there_s >= self._wait_s for *_, there_s in others) and not all(wait for wait, *_ in others)
        if is_stuck or waited_s >= limit_s:
            advice = "This must be called by all processes together (Trainer.save_model and engine.full_parameters too)"
            if is_stuck:
                advice = "Each waits for the other: in a forward or backward, all ranks must use the same modules "
                advice += "before a collective (without data, with an empty batch)"
            text = (
                f"rank {self._rank} gave up after {waited_s:.0f} s: it {wait}, and {self._describe_others(wait)}. "
                f"{advice}. Look first at the error of a rank that is missing; where it was only busy, raise "
                "process_wait_s. The processes are not in the same place any more: restart from the last checkpoint"
            )
            raise CollectiveError(self.judge(text))
        if waited_s >= self._warn_s and not self._is_warned:
            self._is_warned, end = True, "It goes on waiting, until the timeout of the process group (ddp_timeout)"
            if limit_s == self._wait_s < math.inf:
                end = f"All processes must call it together; this one gives up after {limit_s:g} s (process_wait_s)"
            what = f"{wait} and has waited for {waited_s:.2g} s: {self._describe_others(wait)}"
            logger.warning("patrickstar: rank %d %s. %s", self._rank, what, end)

    def _describe_others(self, own: _Wait) -> str:
        """Which ranks have ended or have not come, and what ranks do that wait for something else."""
        ended, others = self._find_ended(), self._read_others()
        texts = [f"rank {rank} has ended (process {gone.pid} on {gone.host})" for rank, gone in ended.items()]
        alive = {rank: other for rank, other in others.items() if rank not in ended}
        if absent := [str(rank) for rank, (wait, *_) in alive.items() if wait is None]:
            names = ", ".join(absent)
            texts.append(f"ranks {names} have not come" if len(absent) > 1 else f"rank {names} has not come")
        for rank, (wait, caller, waited_s) in alive.items():
            if wait and wait[:2] != own[:2]:
                texts.append(f"rank {rank} {wait} meanwhile")
            elif caller and not wait:
                texts.append(f"rank {rank} is {'in a collective ' if waited_s else ''}at {caller}")
        if self._is_store_gone:
            texts.append("the store where the ranks met is gone, and so is its host (rank 0 or the launcher)")
        return "; ".join(texts) or "all other ranks are there"

    def _find_ended(self) -> dict[int, Process]:
        return {rank: process for rank, process in self.processes.items() if process.is_running is False}

    # The store

    def _find_verdict(self) -> str:
        if not self.verdict:
            ask = f"{self._rank} {time.monotonic()}"
            self.verdict = self._ask(lambda: self._store.set("question", ask) or self._read("verdict"), "")
        return self.verdict

    def _read_processes(self) -> dict[int, Process]:
        """The processes that have announced themselves."""
        keys, store = [f"process {rank}" for rank in self._ranks], self._all_store
        return {rank: Process(*json.loads(store.get(key))) for rank, key in enumerate(keys) if store.check([key])}

    def _read_others(self) -> dict[int, tuple[_Wait | None, str, float]]:
        """What the others wait for, the lines where they are, and for how long each has been in a collective there."""
        ranks, nothing = self._others, list[tuple[int, str, str]]()
        found = self._ask(lambda: [(rank, self._read(f"{rank}"), self._read(f"at {rank}")) for rank in ranks], nothing)
        return {rank: (_Wait(*json.loads(w)) if w else None, *json.loads(at or '["", 0]')) for rank, w, at in found}

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _write(self, wait: _Wait | None) -> None:
        """Writes what this rank waits for."""
        self._is_warned = False
        self._ask(lambda: self._store.set(str(self._rank), json.dumps(wait) if wait else ""), None)

    def _ask(self, action: Callable[[], _T], otherwise: _T) -> _T:
        """Asks the store, for some seconds at most: one whose host lost its power does not even fail.

        A store that has failed once is not asked again.
        """
        results: list[_T] = []

        def act() -> None:
            with contextlib.suppress(RuntimeError, OSError):
                results.append(action())

        if not self._is_store_gone:
            thread = threading.Thread(target=act, name="hf_patrickstar-store", daemon=True)
            thread.start()
            thread.join(_STORE_S)
            self._is_store_gone = not results
        return results[0] if results else otherwise


def _is_over(work: Any, seconds: float) -> bool:
    """Waits for some seconds at most, and returns whether the work is complete; raises its error if it failed."""
    try:
        work.wait(timedelta(seconds=max(seconds, 0.001)))  # torch takes 0 as no time limit
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises if it failed; it may also have completed just now
    return True


def _find_store() -> Any:
    return dist.PrefixStore("hf_patrickstar", dist.distributed_c10d._get_default_store())


def _find_system() -> str:
    """Names the system of this process; hosts can share a name, and containers do not see each other's processes."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
