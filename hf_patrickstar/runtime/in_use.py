"""Which chunks are in use at the visits of a step that is recorded.

[Note: chunks in use]
A chunk cannot leave while a module computes with it or a tensor looks into it, and only the chunk itself can tell
(``Chunk.is_in_use``). To ask all of them at each visit would take a time that grows as the square of their number: most
of the first step, where there are thousands. But modules get hold of a chunk by a visit alone, and other processes by a
gather. So at a visit only those chunks are asked that were in use at the last one, or were visited or gathered since.
All are asked at the first visit of a step, and where code of the user has looked into one where it is, by
``Values.look``: an update of a parameter inside of a forward does so.
"""

from hf_patrickstar.runtime.chunk import Chunk
from hf_patrickstar.runtime.copies import Copies
from hf_patrickstar.runtime.tracer import Tracer
from hf_patrickstar.runtime.values import Values


class ChunksInUse:
    """See [Note: chunks in use].

    Args:
        copies: Knows which chunks can be computed with.
        tracer: Records the step.
        values: Counts looks into chunks.
    """

    def __init__(self, copies: Copies, tracer: Tracer, values: Values) -> None:
        self._copies = copies
        self._tracer = tracer
        self._values = values
        self._asked: dict[int, Chunk] = {}  # at the next visit, by index
        self._next = (-1, 0, 0)  # the step, the visit and the number of looks for which these are all

    def add(self, chunk: Chunk) -> None:
        """Adds a chunk that may be in use from now on, although nobody visits it."""
        self._asked[chunk.spec.index] = chunk

    def at_visit(self, visited: Chunk) -> list[int]:
        """The indices of all other chunks that are in use, in order.

        Args:
            visited: The chunk that is visited.
        """
        (number, moment), num_looks = self._tracer.place, self._values.num_looks
        are_known = self._next == (number, moment, num_looks)
        chunks = self._asked.values() if are_known else self._copies.computable
        others = [chunk for chunk in chunks if chunk is not visited]
        found = [chunk for chunk in others if chunk.is_in_use]
        pending = [chunk for chunk in others if chunk.arrival is not None]  # whose gather may begin to look into it
        self._asked = {chunk.spec.index: chunk for chunk in (visited, *found, *pending)}
        self._next = number, moment + 1, num_looks
        return sorted(chunk.spec.index for chunk in found)
