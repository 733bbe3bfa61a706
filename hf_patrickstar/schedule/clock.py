"""A virtual clock: lanes that work beside each other, on whole nanoseconds. Pure numbers.

[Note: virtual time]
The host runs ahead: it pays for putting work into a lane, and goes on. A lane runs its work in order. A piece of work
begins when the lane is free, when the host has put it there, and when what the lane has to wait for is done. The
host stops only where it waits. What a piece of work began after is kept, so that the chain of causes that leads to the
end of a step, its critical path, can be read backwards.
"""

import collections
import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_new = tuple.__new__


class Lane(enum.StrEnum):
    """What works beside the others."""

    HOST = "host"
    HOST_WORK = "host thread"
    COMPUTE = "compute"
    TO_DEVICE = "host -> device"
    TO_HOST = "device -> host"
    GATHERS = "gathers"
    REDUCTIONS = "reductions"
    DISK = "disk"


class Span(NamedTuple):
    """A piece of work.

    Attributes:
        lane: Where it ran.
        begin_ns: When it began.
        end_ns: When it ended.
        what: What it was.
        after: The number of the span that it began after, the last of those that it had to wait for; -1 for none.
    """

    lane: Lane
    begin_ns: int
    end_ns: int
    what: str
    after: int = -1

    @property
    def duration_ns(self) -> int:
        """How long it took."""
        return self.end_ns - self.begin_ns


class Mark(NamedTuple):
    """A point in a lane: when it comes, and the span that ends there (-1 for the beginning)."""

    time_ns: int = 0
    span: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """The host stood still, or in a step that was measured, another lane.

    Attributes:
        begin_ns: Since when.
        duration_ns: For how long.
        place: Where in the program, or for what.
        lane: Who stood still.
    """

    begin_ns: int
    duration_ns: int
    place: str
    lane: Lane = Lane.HOST


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
    """What happened between two moments.

    Attributes:
        begin_ns: The first moment.
        end_ns: The last moment, when every lane had ended its work.
        spans: All work that the clock knows, in the order in which it was put into lanes; ``after`` counts in it.
        first: The number of the first span that belongs to the timeline.
        waits: Where the host stood still.
        has_causes: Whether spans know what they began after.
    """

    begin_ns: int
    end_ns: int
    spans: Sequence[Span]
    first: int
    waits: tuple[Wait, ...]
    has_causes: bool = True

    @property
    def duration_ns(self) -> int:
        """How long it took."""
        return self.end_ns - self.begin_ns

    @property
    def own_spans(self) -> Sequence[Span]:
        """The spans that belong to it."""
        return self.spans[self.first :]

    def busy_ns(self) -> dict[Lane, int]:
        """How long each lane worked."""
        return _by_lane(self.own_spans)

    def waits_by_place(self, lane: Lane = Lane.HOST) -> dict[str, int]:
        """How long the host, or another lane, stood still at each place, the longest first."""
        total: collections.Counter[str] = collections.Counter()
        for wait in self.waits_of(lane):
            total[wait.place] += wait.duration_ns
        return {place: nanoseconds for place, nanoseconds in total.most_common() if nanoseconds}

    def waits_of(self, lane: Lane) -> list[Wait]:
        """Where a lane stood still."""
        return [wait for wait in self.waits if wait.lane is lane]

    def critical_path(self) -> list[Span]:
        """The chain of spans that the end had to wait for, the first one first; empty where no causes are known."""
        chain: list[Span] = []
        if not self.has_causes:
            return chain
        last_ns = max((span.end_ns for span in self.own_spans), default=0)
        number = next((n for n in reversed(range(len(self.spans))) if self.spans[n].end_ns == last_ns), -1)
        while number >= self.first:
            chain.append(self.spans[number])
            number = self.spans[number].after
        return chain[::-1]

    def critical_ns(self) -> dict[Lane, int]:
        """How long the critical path is in each lane; what was begun before the timeline is left out."""
        return _by_lane(self.critical_path())


class Clock:
    """The time of all lanes; see [Note: virtual time].

    Attributes:
        spans: All work so far.
        waits: Where the host stood still so far.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.waits: list[Wait] = []
        self._free = dict.fromkeys(Lane, Mark())

    def end_of(self, lane: Lane) -> Mark:
        """The point at which a lane has done all that it was given."""
        return self._free[lane]

    def host(self, duration_ns: int, what: str) -> None:
        """The host works."""
        self._append(Lane.HOST, self._free[Lane.HOST], duration_ns, what)

    def put(self, lane: Lane, duration_ns: int, what: str) -> Mark:
        """Puts work into a lane; the host goes on.

        Args:
            lane: The lane.
            duration_ns: How long it takes.
            what: What it is.

        Returns:
            When it ends.
        """
        begin, host = self._free[lane], self._free[Lane.HOST]
        return self._append(lane, host if host[0] > begin[0] else begin, duration_ns, what)

    def follow(self, lane: Lane, mark: Mark) -> None:
        """Makes the next work of a lane begin after a mark; the host is no lane here, see ``wait``."""
        if mark.time_ns > self._free[lane].time_ns:
            self._free[lane] = mark

    def wait(self, mark: Mark, place: str) -> None:
        """Stops the host until a mark.

        Args:
            mark: What it waits for.
            place: Where in the program.
        """
        now = self._free[Lane.HOST]
        if mark.time_ns > now.time_ns:
            self.waits.append(Wait(now.time_ns, mark.time_ns - now.time_ns, place))
            self._free[Lane.HOST] = mark

    def timeline(self, begin_ns: int = 0, first: int = 0) -> Timeline:
        """What happened since a moment.

        Args:
            begin_ns: The moment.
            first: How many spans there were then.
        """
        end_ns = max(mark.time_ns for mark in self._free.values())
        waits = tuple(wait for wait in self.waits if wait.begin_ns >= begin_ns)
        return Timeline(begin_ns, end_ns, tuple(self.spans), first, waits)

    def _append(self, lane: Lane, begin: Mark, duration_ns: int, what: str) -> Mark:
        begin_ns, after = begin
        end_ns = begin_ns + duration_ns
        end = self._free[lane] = _new(Mark, (end_ns, len(self.spans)))  # without the call that names its fields
        self.spans.append(_new(Span, (lane, begin_ns, end_ns, what, after)))
        return end


def _by_lane(spans: Iterable[Span]) -> dict[Lane, int]:
    """How long spans are in each lane."""
    total = dict.fromkeys(Lane, 0)
    for span in spans:
        total[span.lane] += span.duration_ns
    return total
