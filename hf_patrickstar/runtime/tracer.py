"""Records traces, and follows them once they are there (PatrickStar section 8.1)."""

from collections.abc import Callable, Iterable

from hf_patrickstar.schedule.trace import Cursor, Trace, Visit

_MOST_LOST_IN_A_ROW = 2


class Tracer:
    """The traces of a model, one for each kind of step.

    The first step of a kind is recorded, later ones are followed. A step that does not do what its trace says is lost:
    it goes on without foresight, and is counted. After two in a row the trace is recorded anew: the first step may have
    failed half way, or the model have changed.

    Args:
        chunk_nbytes: Bytes of every chunk's ``param`` payload, by chunk index; 0 for a chunk that never moves.
    """

    def __init__(self, chunk_nbytes: Iterable[int]) -> None:
        self.traces: dict[str, Trace] = {}
        self.num_lost = 0
        self.cursor: Cursor | None = None
        self.is_lost = False
        self._chunk_nbytes = tuple(chunk_nbytes)
        self._key: str | None = None
        self._visits: list[Visit] = []
        self._lost_in_a_row: dict[str, int] = {}
        self._interrupted: list[tuple[str | None, list[Visit], Cursor | None, bool]] = []

    @property
    def is_running(self) -> bool:
        """Whether a step is being recorded or followed."""
        return self._key is not None

    def begin(self, key: str) -> None:
        """Begins a step of a kind; one that was not finished is forgotten."""
        self._key = key
        self._visits = []
        self.is_lost = False
        trace = self.traces.get(key)
        self.cursor = Cursor(trace) if trace is not None else None

    def visit(self, chunk_index: int, pinned: Callable[[], Iterable[int]]) -> None:
        """Notes an access.

        Args:
            chunk_index: The chunk.
            pinned: Tells which other chunks cannot leave now; asked only while recording.
        """
        if self._key is None or self.is_lost:
            return
        if self._key not in self.traces:
            self._visits.append(Visit(chunk_index, tuple(pinned())))
        elif self.cursor is not None and not self.cursor.advance(chunk_index):
            self.cursor = None
            self.is_lost = True
            self.num_lost += 1

    def begin_interlude(self, key: str) -> None:
        """Begins a step of another kind inside a step: an evaluation between forward and backward, say."""
        self._interrupted.append((self._key, self._visits, self.cursor, self.is_lost))
        self.begin(key)

    def end_interlude(self) -> None:
        """Ends it and goes on where it began."""
        self.finish()
        if self._interrupted:
            self._key, self._visits, self.cursor, self.is_lost = self._interrupted.pop()

    def forget(self) -> None:
        """Drops a step that came to nothing: a forward without backward."""
        self._key = None
        self._interrupted.clear()
        self.finish()

    def finish(self) -> None:
        """Ends the step; what was recorded becomes its trace."""
        if self._key is not None and self._key not in self.traces and self._visits:
            self.traces[self._key] = Trace(self._key, self._chunk_nbytes, tuple(self._visits))
        elif self._key is not None:
            in_a_row = self._lost_in_a_row.get(self._key, 0) + 1 if self.is_lost else 0
            if in_a_row == _MOST_LOST_IN_A_ROW:
                del self.traces[self._key]
                in_a_row = 0
            self._lost_in_a_row[self._key] = in_a_row
        self._key = None
        self.cursor = None
        self.is_lost = False
        self._visits = []
