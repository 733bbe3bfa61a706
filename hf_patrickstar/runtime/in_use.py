"""Which chunks are in use at the visits of a step that is recorded.

[Note: chunks in use]
A chunk cannot leave while a module computes with it or a tensor looks into it, and only the chunk itself can tell
(``Chunk.is_in_use``). To ask all of them at each visit would take a time that grows as the square of their number: most
of the first step, where there are thousands. But nobody gets hold of a chunk other than by a visit, or by a gather
that others ask for. So at a visit only those are asked that were in use at the last one, and those that were visited or
gathered since. The first visit of a step asks all.
"""

from hf_patrickstar.runtime.chunk import Chunk
from hf_patrickstar.runtime.copies import Copies
from hf_patrickstar.runtime.tracer import Tracer


class ChunksInUse:
    """See [Note: chunks in use].

    Args:
        copies: Knows which chunks can be computed with.
        tracer: Records the step.
    """

    def __init__(self, copies: Copies, tracer: Tracer) -> None:
        self._copies = copies
        self._tracer = tracer
        self._asked: dict[int, Chunk] = {}  # at the next visit, by index
        self._next = (-1, 0)  # the step and the visit for which they are known

    def note(self, chunk: Chunk) -> None:
        """Notes a chunk that may be in use from now on, although nobody visits it."""
        self._asked[chunk.spec.index] = chunk

    def at_visit(self, visited: Chunk) -> list[int]:
        """The indices of all other chunks that are in use, in order.

        Args:
            visited: The chunk that is visited.
        """
        number, moment = self._tracer.place
        chunks = self._asked.values() if (number, moment) == self._next else self._copies.computable
        found = {chunk.spec.index: chunk for chunk in chunks if chunk is not visited and chunk.is_in_use}
        self._asked, self._next = found | {visited.spec.index: visited}, (number, moment + 1)
        return sorted(found)
