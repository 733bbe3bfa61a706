"""Which chunk leaves a full device. Pure decisions: a policy sees numbers and answers with a chunk index."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol

from hf_patrickstar.schedule.trace import Cursor


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A chunk that may leave the device.

    Attributes:
        chunk_index: Its place in the chunk list.
        last_access: The tick at which it was last accessed; larger is later.
        next_access: The moment at which it is needed next, or ``None`` if never. Only meaningful with foresight.
    """

    chunk_index: int
    last_access: int
    next_access: int | None = None


class EvictionPolicy(Protocol):
    """Chooses victims."""

    def choose(self, candidates: Sequence[Candidate]) -> int:
        """Returns the index of the chunk to evict; ``candidates`` is not empty."""
        ...


class ListOrderPolicy:
    """The first chunk of the chunk list: the rule of the warm-up iteration (PatrickStar section 8.1)."""

    def choose(self, candidates: Sequence[Candidate]) -> int:
        """Returns the smallest chunk index."""
        return min(candidate.chunk_index for candidate in candidates)


class LRUPolicy:
    """The chunk that was unused longest."""

    def choose(self, candidates: Sequence[Candidate]) -> int:
        """Returns the chunk with the earliest last access, the first of the list among equals."""
        return min(candidates, key=lambda candidate: (candidate.last_access, candidate.chunk_index)).chunk_index


class BeladyPolicy:
    """The chunk that is the latest to be needed next (PatrickStar section 8.3)."""

    def choose(self, candidates: Sequence[Candidate]) -> int:
        """Returns the chunk with the latest next access, the first of the list among equals."""

        def distance(candidate: Candidate) -> tuple[float, int]:
            moment = candidate.next_access
            return (float("inf") if moment is None else moment, -candidate.chunk_index)

        return max(candidates, key=distance).chunk_index


class Chooser:
    """Applies the policy of a configuration: with foresight where there is a trace to follow, without where not.

    The runtime and the simulator both decide here.

    Args:
        name: ``"belady"``, ``"lru"`` or ``"list_order"``. Belady needs a trace: the warm-up step evicts in list order,
            a step that leaves its trace by least recent use.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        policies: dict[str, EvictionPolicy] = {"lru": LRUPolicy(), "list_order": ListOrderPolicy()}
        self._policy = policies.get(name)
        self._belady, self._warmup, self._diverged = BeladyPolicy(), policies["list_order"], policies["lru"]

    def choose(self, chunks: Iterable[tuple[int, int]], cursor: Cursor | None, is_diverged: bool = False) -> int:
        """Chooses the chunk to evict.

        Args:
            chunks: Index and last access of every chunk that may leave; not empty.
            cursor: The place in the trace of the step, if it has one and keeps to it.
            is_diverged: Whether the step has left its trace.

        Returns:
            The index of the victim.
        """
        if self._policy is not None:
            return self._policy.choose([Candidate(index, last) for index, last in chunks])
        if cursor is not None:
            return self._belady.choose([Candidate(index, last, cursor.next_visit(index)) for index, last in chunks])
        policy = self._diverged if is_diverged else self._warmup
        return policy.choose([Candidate(index, last) for index, last in chunks])
