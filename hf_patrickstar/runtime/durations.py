"""When the caller's thread was in each part of a step, and for how long in all."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from hf_patrickstar.schedule.script import Part

_MOST_PIECES = 10_000
"""Of a step of more pieces the first ones are kept."""


class Piece(NamedTuple):
    """A part of a step, from its begin to its end, in nanoseconds of ``time.perf_counter_ns``.

    Attributes:
        part: Which one.
        begin_ns: When the host began it.
        end_ns: When the host left it.
        moments: What ``Durations.mark`` gave then.
    """

    part: Part
    begin_ns: int
    end_ns: int
    moments: tuple[Any, Any] = (None, None)


class _Now(NamedTuple):
    """The host's time, and what ``Durations.mark`` gives."""

    ns: int
    moment: Any


class Durations:
    """Adds up seconds by the host's clock, from the begin of a part to its end; a part that was given up is left out.

    An accelerator works beside the host, so a part of a step there may go on when the host has left it.

    Attributes:
        last: The pieces of the last step, from its first forward to the end of the update, in their order.
        mark: Is called where a part begins or ends, and what it gives is kept with the piece: a moment of the compute
            stream, in a step whose lanes are measured.
    """

    def __init__(self) -> None:
        self.last: tuple[Piece, ...] = ()
        self.mark: Callable[[], Any] | None = None
        self._pieces: list[Piece] = []
        self._sums = {"computing": 0, "settling": 0, "updating": 0}
        self._begin: _Now | None = None
        self._forward_end: _Now | None = None
        self._end: _Now | None = None

    @property
    def computing_s(self) -> float:
        """Seconds from the begin of an outermost forward of training to the end of its backward."""
        return self._sums["computing"] / 1e9

    @property
    def settling_s(self) -> float:
        """Seconds from the end of the last backward of a step to the begin of the optimizer's step."""
        return self._sums["settling"] / 1e9

    @property
    def updating_s(self) -> float:
        """Seconds of steps of optimizers."""
        return self._sums["updating"] / 1e9

    def begin_computing(self) -> None:
        """A micro-batch begins."""
        self._begin, self._forward_end, self._end = self._now(), None, None

    def end_forward(self) -> None:
        """An outermost forward has ended; of several the last one counts."""
        self._forward_end = self._now()

    def end_computing(self) -> None:
        """The backward of a micro-batch has ended."""
        if self._begin is None:
            return
        self._end = self._now()
        middle = self._begin if self._forward_end is None else self._forward_end
        self._add(Part.FORWARD, self._begin, middle)
        self._add(Part.BACKWARD, middle, self._end)
        self._sums["computing"] += self._end.ns - self._begin.ns
        self._begin = None

    def begin_update(self) -> None:
        """The optimizer's step begins."""
        now = self._now()
        if self._end is not None:
            self._sums["settling"] += now.ns - self._end.ns
        self._begin, self._end = now, None

    def end_update(self) -> None:
        """The optimizer's step has ended."""
        if self._begin is not None:
            now = self._now()
            self._add(Part.UPDATE, self._begin, now)
            self._sums["updating"] += now.ns - self._begin.ns
        self._begin = None
        self.last, self._pieces = tuple(self._pieces), []

    def _now(self) -> _Now:
        mark = self.mark  # another thread may end the measuring meanwhile
        return _Now(time.perf_counter_ns(), None if mark is None else mark())

    def _add(self, part: Part, begin: _Now, end: _Now) -> None:
        if len(self._pieces) < _MOST_PIECES:
            self._pieces.append(Piece(part, begin.ns, end.ns, (begin.moment, end.moment)))
