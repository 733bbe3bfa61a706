"""What a step did: which chunk was visited when, and what could not leave then. Pure data (PatrickStar section 8.1)."""

import bisect
import dataclasses
import json
from typing import Any

from hf_patrickstar.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Visit:
    """One access to a chunk on the compute device; its place in the trace is its moment.

    Attributes:
        chunk_index: The chunk.
        pinned: Other chunks that were in use at that moment and could not have left.
    """

    chunk_index: int
    pinned: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """The visits of one step of one kind.

    Attributes:
        key: What the step was, for example ``"train"``.
        chunk_nbytes: Bytes of every chunk's ``param`` payload, by chunk index; 0 for a chunk that never moves.
        visits: The visits, in order.
    """

    key: str
    chunk_nbytes: tuple[int, ...]
    visits: tuple[Visit, ...]

    def to_json(self) -> str:
        """The trace as JSON text that ``from_json`` takes back."""
        visits = [[visit.chunk_index, *visit.pinned] for visit in self.visits]
        return json.dumps({"key": self.key, "chunk_nbytes": list(self.chunk_nbytes), "visits": visits})

    @classmethod
    def from_json(cls, text: str) -> "Trace":
        """Reads a trace.

        Raises:
            ConfigError: If the text is not a trace.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            visits = tuple(Visit(int(row[0]), tuple(int(index) for index in row[1:])) for row in values["visits"])
            trace = cls(str(values["key"]), tuple(int(nbytes) for nbytes in values["chunk_nbytes"]), visits)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise ConfigError(f"this is not a trace: {type(error).__name__}: {error}") from error
        num_chunks = len(trace.chunk_nbytes)
        for moment, visit in enumerate(trace.visits):
            for index in (visit.chunk_index, *visit.pinned):
                if not 0 <= index < num_chunks:
                    raise ConfigError(f"trace '{trace.key}', moment {moment}: chunk {index} of {num_chunks}")
        return trace


class Cursor:
    """Follows a trace while its step is repeated, and tells when each chunk is needed next.

    Args:
        trace: The trace.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._moment = 0
        self._moments: dict[int, list[int]] = {}
        for moment, visit in enumerate(trace.visits):
            self._moments.setdefault(visit.chunk_index, []).append(moment)

    def advance(self, chunk_index: int) -> bool:
        """Notes a visit.

        Returns:
            Whether the trace expected it.
        """
        visits = self._trace.visits
        expected = self._moment < len(visits) and visits[self._moment].chunk_index == chunk_index
        self._moment += 1
        return expected

    def next_visit(self, chunk_index: int) -> int | None:
        """The moment at which a chunk is visited next; in the next repetition if no more in this one.

        Returns:
            The moment, or ``None`` if the trace never visits the chunk.
        """
        moments = self._moments.get(chunk_index)
        if moments is None:
            return None
        place = bisect.bisect_left(moments, self._moment)
        return moments[place] if place < len(moments) else moments[0] + len(self._trace.visits)
