"""Which chunk leaves a full device. Pure decisions: a policy sees numbers and answers with a chunk index."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A chunk that may leave the device.

    Attributes:
        chunk_index: Its place in the chunk list.
        last_access: The tick at which it was last accessed; larger is later.
    """

    chunk_index: int
    last_access: int


class EvictionPolicy(Protocol):
    """Chooses victims. Policies that look into the future take a trace when they are made."""

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


def make_policy(name: str) -> EvictionPolicy:
    """The policy of a configuration's ``eviction``: ``"lru"`` or ``"list_order"``."""
    policies: dict[str, EvictionPolicy] = {"lru": LRUPolicy(), "list_order": ListOrderPolicy()}
    return policies[name]
