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

A rank that waits for others which may be slow gives up after ``process_wait_s`` only if it knows that waiting is in
vain: every other rank waits too, for as long, and not all of them for the same message or the same data. All write
again and again for how long they have waited, so that a wait which has ended does not count.

One may also wait in a collective that the user's code called there but not on this rank, such as ``dist.all_gather`` in
a branch that only some ranks take. A rank that is inside of such a call cannot say so itself. So each rank has a thread
that looks where the rank is (``Vigil.look``). If the rank is inside of the same collective at two looks, the thread
writes into the store which one it is and for how long, again at each look.
A rank that computes writes nothing, and is waited for. So is one that waits for a collective with ``async_op`` in
``work.wait()``, or for a store: that leaves no trace in Python. The thread also reads whether another rank gave up:
then it logs the reason, and closes the connections of the rank, which ends a collective of the default group.

The thread gives up too, for waits of the rank that torch cannot interrupt (``Vigil.watched``).
"""

import contextlib
import json
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias, TypeVar

from hf_patrickstar.errors import CollectiveError
from hf_patrickstar.callers import find_caller, find_collective, frames_of_threads, is_idle
from hf_patrickstar.dist.liveness import ANSWER_S, Liveness, Store

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_WARN_S = 10.0
_LIMIT_S = 60.0
STORE_PATIENCE_S = 3.0
_END_S = 1.0
"""Seconds that the thread that looks may take to end; it may be inside of a call to a store that is gone."""
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
        number: The number of the message, the same on all ranks; 0 for data, -1 in a collective that the user called.
        what: What the rank is about to do, as a verb phrase.
        caller: The line of the user's code.
        waited_ms: For how long the rank has waited.
    """

    number: int
    what: str
    caller: str
    waited_ms: int = 0

    @property
    def is_data(self) -> bool:
        return not self.number

    @property
    def is_of_user(self) -> bool:
        return self.number < 0

    @property
    def subject(self) -> int | str:
        """What is the same on ranks that wait for the same."""
        return self.number if self.number > 0 else self.what

    def __str__(self) -> str:
        return f"{self.what} (called at {self.caller})" if self.caller else self.what


_Waits: TypeAlias = dict[int, _Wait | None]
"""What each of the others waits for."""


class _Stay:
    """A wait that has become long.

    Args:
        wait: What the rank waits for.
        limit_s: Seconds until the rank gives up in any case.
        warn_s: Seconds until it warns.

    Attributes:
        is_in_vain: Whether all other ranks wait too, and not all for the same.
        is_of_user: Whether one of them is inside of a collective that the user called.
    """

    def __init__(self, wait: _Wait, limit_s: float, warn_s: float) -> None:
        self.wait = wait
        self.limit_s = limit_s
        self.warn_s = warn_s
        self.is_in_vain = self.is_of_user = False
        self._before: _Waits = {}

    def note(self, waits: _Waits | None, least_s: float) -> None:
        """Notes what the others wait for, and finds out whether this rank waits in vain.

        Args:
            waits: What the others wait for, if that is known.
            least_s: Seconds that each must have waited. It must also have said so again since the last call: what it
                wrote before may be old.
        """
        before, self._before = self._before, waits or {}
        known = [wait for wait in self._before.values() if wait is not None]
        self.is_of_user = any(wait.is_of_user for wait in known)
        self.is_in_vain = len({wait.subject for wait in (self.wait, *known)}) > 1
        for rank, wait in self._before.items():
            self.is_in_vain &= wait is not None and _goes_on(before.get(rank), wait, 1000 * least_s)


def _goes_on(before: _Wait | None, wait: _Wait, least_ms: float) -> bool:
    """Whether a wait is the one that was known before, and has gone on since."""
    return before is not None and before[:3] == wait[:3] and before.waited_ms < wait.waited_ms >= least_ms


class _Watched:
    """A wait that torch cannot interrupt, from its begin on."""

    def __init__(self, what: str, thread: int, due_s: float) -> None:
        self.what = what
        self.thread = thread
        self.begin = time.monotonic()
        self.due_s = due_s
        self.stay: _Stay | None = None


class Vigil:
    """Waits for messages and data of other ranks; see [Note: who gives up].

    Args:
        rank: This rank.
        liveness: Finds processes that have ended.
        store: Where ranks write what they wait for.
        patience: How long to wait.
        hang_up: Closes this rank's connections for messages; called with true, those for data too.
        looks: Whether to start the thread that looks where this rank is.

    Attributes:
        verdict: Why these ranks cannot go on together; empty until a rank gave up.
    """

    def __init__(
        self,
        rank: int,
        liveness: Liveness,
        store: Store,
        patience: Patience,
        hang_up: Callable[[bool], None],
        *,
        looks: bool = False,
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
        self._unsaid: dict[str, str] = {}  # what the store does not have yet
        self._stuck: threading.Thread | None = None  # waits for the store
        self._thread = threading.get_ident()  # the thread that has talked to the others last
        self._pause_s = patience.warn_s / 4
        self._watched: _Watched | None = None
        self._place: tuple[str, str] | None = None  # the user's collective that this rank is in, and the user's line
        self._place_begin = 0.0
        self._is_told = False
        self.close = _look_from_time_to_time(self, self._pause_s) if looks else lambda: None

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
        self._thread = threading.get_ident()
        self._watched = None  # this thread watches itself
        if not _is_over(work, self._notice):
            begin = time.monotonic() - self._notice_s
            wait = _Wait(self._num_messages if is_message else 0, what, find_caller())
            self._stay(work, self._begin_stay(wait, math.inf if is_patient else self._patience.limit_s), begin)

    @contextlib.contextmanager
    def watched(self, what: str) -> Iterator[None]:
        """Lets the thread that looks where this rank is end waits inside of the block, which are for data.

        Args:
            what: What this rank is about to do, as a verb phrase.
        """
        self._thread = threading.get_ident()
        self._watched = watched = _Watched(what, self._thread, self._patience.warn_s)
        try:
            yield
        finally:
            self._watched = None
            if watched.stay is not None:
                self._put(self._key(self._rank), "")

    def look(self) -> None:
        """Looks where this rank is, tells the others, and may give up for it; for another thread, from time to time."""
        watched, now = self._watched, time.monotonic()
        place, caller = self._find_places(watched)
        if watched is not None:
            self._look_at(watched, now, caller)
        if place != self._place:
            if self._place is not None:
                self._put(self._place_key(self._rank), "")
            self._place, self._place_begin = place, now
        elif place is not None:
            inside_ms = math.ceil(1000 * (now - self._place_begin))
            self._put(self._place_key(self._rank), json.dumps(_Wait(-1, *place, inside_ms)))
            if not self._is_told and self.ask():
                self._is_told = True
                logger.error("patrickstar: rank %d %s meanwhile: %s", self._rank, _Wait(-1, *place), self.verdict)

    def ask(self) -> str:
        """Looks into the store whether a rank gave up.

        Returns:
            The reason that the rank wrote; empty if no rank gave up.
        """
        if not self.verdict:
            self.verdict = self._try(lambda: self._read(_GAVE_UP), "")
        return self.verdict

    # Inside

    def _find_places(self, watched: _Watched | None) -> tuple[tuple[str, str] | None, str]:
        """The collective of the user's that this rank is in, if any, with its line; and the line of a watched wait.

        Frames keep all local variables of their functions alive, so this keeps none of them.
        """
        with frames_of_threads() as frames:
            # The main thread only if the thread that talked to the others is not at work: what the main thread waits
            # for then is no concern of the other ranks.
            main = threading.main_thread().ident or 0
            frame = frames.get(main if is_idle(frames.get(self._thread)) else self._thread)
            collective = find_collective(frame)
            place = (f"is inside {collective}", find_caller(frame)) if collective else None
            frame = None
            return place, find_caller(frames.get(watched.thread)) if watched is not None else ""

    def _begin_stay(self, wait: _Wait, limit_s: float) -> _Stay:
        self._put(self._key(self._rank), json.dumps(wait))
        return _Stay(wait, limit_s, self._patience.warn_s if limit_s < math.inf else self._patient_warn_s)

    def _stay(self, work: Any, stay: _Stay, begin: float) -> None:
        """Goes on with a wait that has become long."""
        due_s, is_over = self._patience.warn_s, False
        try:
            while not (is_over := _is_over(work, _timeout(begin + due_s - time.monotonic()))):
                self._check(stay, due_s)
                due_s = min(due_s + self._patience.warn_s, stay.limit_s)
        finally:
            if not is_over:  # also after an interrupt
                self._hang_up(stay.wait.is_data)
            self._put(self._key(self._rank), "")

    def _look_at(self, watched: _Watched, now: float, caller: str) -> None:
        """Does the same, in the thread that looks, for a wait that torch cannot interrupt."""
        waited_s = now - watched.begin
        if watched.stay is None and waited_s >= self._notice_s:
            wait = _Wait(0, watched.what, caller)
            watched.stay = self._begin_stay(wait, math.inf)
        elif watched.stay is not None and waited_s >= watched.due_s:
            watched.due_s += self._patience.warn_s
            try:
                self._check(watched.stay, waited_s)
            except CollectiveError:  # the wait fails as soon as the connections are closed, and finds the verdict
                self._hang_up(True)
        if self._watched is not watched:  # it has ended meanwhile
            self._put(self._key(self._rank), "")

    def _check(self, stay: _Stay, waited_s: float) -> None:
        """Raises an error if a rank gave up, or this one gives up now; warns if it is time to."""
        if self.ask():
            raise CollectiveError(f"{stay.wait.what}: {self.verdict}")
        self._put(self._key(self._rank), json.dumps(stay.wait._replace(waited_ms=math.ceil(1000 * waited_s))))
        waits = self._try(self._read_waits, None)
        if stay.limit_s == math.inf:
            stay.note(waits, self._patience.limit_s / 2)
        # Later than a rank that gives up in any case: that one leaves the connections for data open.
        limit_s = self._patience.limit_s + self._patience.warn_s if stay.is_in_vain else stay.limit_s
        if waited_s >= limit_s:
            raise CollectiveError(self._give_up(stay, waits, waited_s))
        if waited_s >= stay.warn_s:
            self._warn(stay, waited_s, waits)
            stay.warn_s = math.inf

    def _warn(self, stay: _Stay, waited_s: float, waits: _Waits | None) -> None:
        if stay.limit_s < math.inf:
            ending = (
                "All processes must call it together; where they do not, this one gives up after "
                f"{stay.limit_s:g} s (process_wait_s)"
            )
        else:
            ending = "It goes on waiting, until the timeout of the process group (ddp_timeout)"
            self._patient_warn_s = 2 * waited_s  # some programs wait as long in every step
        logger.warning(
            "patrickstar: rank %d %s and has waited for %.2g s: %s. %s",
            self._rank,
            stay.wait,
            waited_s,
            self._describe_others(stay.wait, waits),
            ending,
        )

    def _give_up(self, stay: _Stay, waits: _Waits | None, waited_s: float) -> str:
        """Writes the reason into the store, before other ranks see that the connections are closed."""
        if stay.is_in_vain:
            reason = (
                "A collective in a step, such as dist.all_gather, must be called by all processes: move it out of the "
                "branch that only some of them take"
                if stay.is_of_user
                else "Forward, backward and the optimizer's step must be called by all processes, in the same order "
                "and equally often; debug_collectives=true finds the first call that is not"
            )
            remedy = f"Each waits for the other. {reason}; where the others were only busy, raise process_wait_s. "
        else:
            remedy = (
                "This must be called by all processes together (Trainer.save_model and engine.full_parameters too); "
                "where the others were only busy, raise process_wait_s. "
            )
        self.verdict = (
            f"rank {self._rank} gave up after {waited_s:.3g} s: it {stay.wait}, and "
            f"{self._describe_others(stay.wait, waits)}. {remedy}The processes are not in the same place any more: "
            "restart from the last checkpoint"
        )
        self._put(_GAVE_UP, self.verdict)
        if stay.is_in_vain:
            time.sleep(3 * self._pause_s)  # the others log it; what torch says of closed connections has no reason
            self._hang_up(True)
        return self.verdict

    def _describe_others(self, own: _Wait, waits: _Waits | None) -> str:
        """Which ranks have not come, and what ranks do that wait for something else."""
        ended = self._liveness.find_ended()
        if waits is None:
            texts = [*ended.values(), "the store where the ranks met is gone, so that nothing is known of the others"]
            return "; ".join(texts)
        absent = [rank for rank, wait in waits.items() if (wait is None or wait.is_of_user) and rank not in ended]
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

    def _place_key(self, rank: int) -> str:
        return f"{rank} is inside"

    def _put(self, key: str, value: str) -> None:
        self._unsaid[key] = value
        self._try(self._say, None)

    def _say(self) -> None:
        while self._unsaid:
            self._store.set(*self._unsaid.popitem())

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _read_waits(self) -> _Waits:
        texts = {
            rank: self._read(self._key(rank)) or self._read(self._place_key(rank)) for rank in self._liveness.others
        }
        return {rank: _Wait(*json.loads(text)) if text else None for rank, text in texts.items()}

    def _try(self, action: Callable[[], _T], otherwise: _T) -> _T:
        """Runs an action on the store with a time limit: a store whose host lost its power does not even fail.

        As long as an action waits for the store, others are not begun.
        """
        results: list[_T] = []

        def act() -> None:
            with contextlib.suppress(RuntimeError, OSError):
                results.append(action())
                self._say()  # what was put while the action had to wait

        stuck = self._stuck
        if stuck is None or not stuck.is_alive():
            thread = threading.Thread(target=act, name="hf_patrickstar-vigil", daemon=True)
            thread.start()
            thread.join(STORE_PATIENCE_S)
            self._stuck = thread if thread.is_alive() else None
        return results[0] if results else otherwise


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


def _look_from_time_to_time(vigil: Vigil, pause_s: float) -> Callable[[], object]:
    """Starts the thread that looks where a rank is; returns what ends it, which also happens when Python ends."""
    found, is_closed = weakref.ref(vigil), threading.Event()

    def run() -> None:
        while not is_closed.wait(pause_s) and (own := found()) is not None:
            own.look()
            del own

    thread = threading.Thread(target=run, name="hf_patrickstar-lookout", daemon=True)
    thread.start()

    def end() -> None:
        is_closed.set()
        if thread is not threading.current_thread():
            thread.join(_END_S)

    return weakref.finalize(vigil, end)
