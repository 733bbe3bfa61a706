"""Waiting for other ranks: a rank that waits long says for which ranks, and at last gives up and tells the others.

[Note: who gives up]
A call that all processes must make together never ends if only some of them make it. So a rank that waits for a message

- writes into the store what it waits for, after a fifth of the time to the warning. Other ranks that wait then know
  that this rank is not missing;
- warns after ten seconds: what it is about to do, from which line of the user's code, and which ranks have not come;
- gives up after a minute (``process_wait_s``) if all ranks should have come at once: the rank writes the reason into
  the store, hangs up, and raises.

To hang up is to close the rank's connections for messages. Otherwise the message that the rank has sent would later
count as an answer, and the thread that works on it would keep the process from ending. A rank that waits for this rank,
or comes later, then fails at once, finds the reason in the store, and raises it. A rank that waits for a third rank
looks into the store from time to time. A rank that ends a wait for data like this closes its connections for data too,
which may be those of the default group: collectives under way there would never end either.

``Order`` decides which waits may end like this. A short wait does none of it.
"""

import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from hf_patrickstar.errors import CollectiveError
from hf_patrickstar.runtime.callers import find_caller
from hf_patrickstar.runtime.liveness import ANSWER_S, Liveness, Store

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_WARN_S = 10.0
_LIMIT_S = 60.0
STORE_PATIENCE_S = 3.0
_GAVE_UP = "gave up"


class Patience(NamedTuple):
    """How long a rank waits for others.

    Attributes:
        warn_s: Seconds until the rank warns, and between looks whether another rank gave up. For waits that the rank
            does not give up, each warning doubles the time until later waits warn.
        limit_s: Seconds until the rank gives up, if all ranks should have come at once.
        answer_s: Seconds that a rank whose collective has failed waits for the others to say that they are there.
    """

    warn_s: float = _WARN_S
    limit_s: float = _LIMIT_S
    answer_s: float = ANSWER_S

    @classmethod
    def of(cls, limit_s: float | None) -> "Patience":
        """Makes the patience for a value of ``process_wait_s``.

        Args:
            limit_s: Seconds; with 0 or ``None`` only the timeout of the process group ends a wait.
        """
        limit_s = limit_s or math.inf
        return cls(min(_WARN_S, limit_s / 3), limit_s)


class _Wait(NamedTuple):
    """What a rank waits for.

    Attributes:
        number: The number of the message, the same on all ranks; 0 for data.
        what: What the rank is about to do, as a verb phrase.
        caller: The line of the user's code.
    """

    number: int
    what: str
    caller: str

    @property
    def is_data(self) -> bool:
        return not self.number

    def __str__(self) -> str:
        return f"{self.what} (called at {self.caller})" if self.caller else self.what


class Vigil:
    """Waits for messages and data of other ranks; see [Note: who gives up].

    Args:
        rank: This rank.
        liveness: Finds processes that have ended.
        store: Where ranks write what they wait for.
        patience: How long to wait.
        hang_up: Closes this rank's connections for messages; called with true, those for data too.

    Attributes:
        verdict: Why these ranks cannot go on together; empty until a rank gave up.
    """

    def __init__(
        self, rank: int, liveness: Liveness, store: Store, patience: Patience, hang_up: Callable[[bool], None]
    ) -> None:
        self.verdict = ""
        self._rank = rank
        self._liveness = liveness
        self._store = store
        self._patience = patience
        self._hang_up = hang_up
        self._notice_s = patience.warn_s / 5
        self._notice = _timeout(self._notice_s)
        self._patient_warn_s = patience.warn_s
        self._num_messages = 0
        self._is_store_gone = False

    def wait(self, work: Any, what: str, *, is_message: bool = False, is_patient: bool = True) -> None:
        """Waits until a collective of gloo is complete.

        Args:
            work: The ``Work`` that torch returned for it.
            what: What this rank is about to do, as a verb phrase.
            is_message: Whether it is a message; all ranks send messages in one order.
            is_patient: Whether to wait until the timeout of the process group.

        Raises:
            CollectiveError: If this rank or another one gave up.
            RuntimeError: If the collective failed.
        """
        self._num_messages += is_message
        if not _is_over(work, self._notice):
            begin = time.monotonic() - self._notice_s
            wait = _Wait(self._num_messages if is_message else 0, what, find_caller())
            self._stay(work, wait, begin, math.inf if is_patient else self._patience.limit_s)

    def ask(self) -> str:
        """Looks into the store whether a rank gave up.

        Returns:
            The reason that the rank wrote; empty if no rank gave up.
        """
        if not self.verdict:
            self.verdict = self._try(lambda: self._read(_GAVE_UP), "")
        return self.verdict

    # Inside

    def _stay(self, work: Any, wait: _Wait, begin: float, limit_s: float) -> None:
        """Goes on with a wait that has become long."""
        self._put(self._key(self._rank), json.dumps(wait))
        pause_s = self._patience.warn_s
        warn_s, due_s = (pause_s if limit_s < math.inf else self._patient_warn_s), pause_s
        is_over = False
        try:
            while not (is_over := _is_over(work, _timeout(begin + due_s - time.monotonic()))):
                if self.ask():
                    raise CollectiveError(f"{wait.what}: {self.verdict}")
                if due_s >= limit_s:
                    raise CollectiveError(self._give_up(wait))
                if due_s >= warn_s:
                    self._warn(wait, due_s, limit_s)
                    warn_s = math.inf
                due_s = min(due_s + pause_s, limit_s)
        finally:
            if not is_over:  # also after an interrupt
                self._hang_up(wait.is_data)
            self._put(self._key(self._rank), "")

    def _warn(self, wait: _Wait, waited_s: float, limit_s: float) -> None:
        if limit_s < math.inf:
            ending = (
                "All processes must call it together; where they do not, this one gives up after "
                f"{limit_s:g} s (process_wait_s)"
            )
        else:
            ending = "It goes on waiting, until the timeout of the process group (ddp_timeout)"
            self._patient_warn_s = 2 * waited_s  # some programs wait as long in every step
        logger.warning(
            "patrickstar: rank %d %s and has waited for %.2g s: %s. %s",
            self._rank,
            wait,
            waited_s,
            self._describe_others(wait),
            ending,
        )

    def _give_up(self, wait: _Wait) -> str:
        """Writes the reason into the store, before other ranks see that the connections are closed."""
        self.verdict = (
            f"rank {self._rank} gave up after {self._patience.limit_s:g} s: it {wait}, and "
            f"{self._describe_others(wait)}. This must be called by all processes together "
            "(Trainer.save_model and engine.full_parameters too); where the others were only busy, raise "
            "process_wait_s. The processes are not in the same place any more: restart from the last checkpoint"
        )
        self._put(_GAVE_UP, self.verdict)
        return self.verdict

    def _describe_others(self, own: _Wait) -> str:
        """Which ranks have not come, and what ranks do that wait for something else."""
        ended = self._liveness.find_ended()
        waits = self._try(self._read_waits, None)
        if waits is None:
            texts = [*ended.values(), "the store where the ranks met is gone, so that nothing is known of the others"]
            return "; ".join(texts)
        absent = [rank for rank, wait in waits.items() if wait is None and rank not in ended]
        texts = list(ended.values())
        if absent:
            is_one = len(absent) == 1
            names = ", ".join(map(str, absent))
            texts.append(f"rank {names} has not come" if is_one else f"ranks {names} have not come")
        for rank, wait in waits.items():
            if wait is not None and wait[:2] != own[:2] and rank not in ended:
                texts.append(f"rank {rank} {wait} meanwhile")
        return "; ".join(texts) or "all others have come"

    # The store

    def _key(self, rank: int) -> str:
        return f"{rank} waits"

    def _put(self, key: str, value: str) -> None:
        self._try(lambda: self._store.set(key, value), None)

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _read_waits(self) -> dict[int, _Wait | None]:
        """What each of the others waits for."""
        texts = {rank: self._read(self._key(rank)) for rank in self._liveness.others}
        return {rank: _Wait(*json.loads(text)) if text else None for rank, text in texts.items()}

    def _try(self, action: Callable[[], _T], otherwise: _T) -> _T:
        """Runs an action on the store with a time limit: a store whose host lost its power does not even fail."""
        results: list[_T] = []

        def act() -> None:
            with contextlib.suppress(RuntimeError, OSError):
                results.append(action())

        if not self._is_store_gone:
            thread = threading.Thread(target=act, name="hf_patrickstar-vigil", daemon=True)
            thread.start()
            thread.join(STORE_PATIENCE_S)
        if not results:
            self._is_store_gone = True
            return otherwise
        return results[0]


def _timeout(seconds: float) -> timedelta:
    # At least a millisecond: torch takes 0 as no timeout.
    return timedelta(seconds=max(seconds, 0.001))


def _is_over(work: Any, timeout: timedelta) -> bool:
    """Waits until a timeout at most, and returns whether the work is complete.

    Raises:
        RuntimeError: If the work failed.
    """
    try:
        work.wait(timeout)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises if it failed; it may also have completed just now
    return True
