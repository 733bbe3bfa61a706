"""Which embeddings are looked up on the CPU, and which need no place on the device at all (PatrickStar section 8.2)."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from hf_patrickstar.layout.specs import TensorSpec

MIN_ROWS = 4096
"""Rows below which ``auto`` does not consider an embedding: a micro-batch has about as many tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class EmbeddingChoice:
    """Which embeddings are looked up on the host.

    Attributes:
        reason: Why, in one line.
        tensor_indices: The tensors of these embeddings.
        apart: Those that no operator on the device needs; they have chunks of their own.
        is_final: Whether this choice is final; else byte counts of the first step decide.
    """

    reason: str
    tensor_indices: frozenset[int] = frozenset()
    apart: frozenset[int] = frozenset()
    is_final: bool = True


def choose_embeddings(
    tensors: Sequence[TensorSpec],
    embedding_owners: frozenset[int],
    setting: bool | Literal["auto"],
    everything_fits: bool,
) -> EmbeddingChoice:
    """Decides where input embeddings are looked up.

    Args:
        tensors: The specs in model order.
        embedding_owners: Indices, in ``modules()`` order, of the embedding modules.
        setting: ``cpu_embedding`` of the configuration.
        everything_fits: Whether all model data fits on the device: then nothing has to move.
    """
    weights = [spec for spec in tensors if embedding_owners & set(spec.owners) and len(spec.shape) == 2]
    untied = [spec for spec in weights if set(spec.owners) <= embedding_owners]
    if setting is False:
        return EmbeddingChoice("cpu_embedding=false: embeddings move in chunks")
    if setting is True:
        names = ", ".join(spec.name for spec in weights if spec not in untied)
        tied = f"; {names} also moves, for the modules that it is tied to" if names else ""
        alone = frozenset(spec.index for spec in untied)
        return EmbeddingChoice(
            f"cpu_embedding=true: lookups on the CPU{tied}", frozenset(spec.index for spec in weights), alone
        )
    if everything_fits:
        return EmbeddingChoice("cpu_embedding=auto: off, all model data fits on the device")
    large = [spec for spec in untied if spec.shape[0] >= MIN_ROWS]
    if not large:
        return EmbeddingChoice(f"cpu_embedding=auto: off, no untied embedding has {MIN_ROWS} rows or more")
    listing, indices = ", ".join(spec.name for spec in large), frozenset(spec.index for spec in large)
    reason = f"cpu_embedding=auto: on for {listing}, until the first step has shown how many rows it needs"
    return EmbeddingChoice(reason, indices, indices, is_final=False)
