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
        tensor_indices: The tensors of these embeddings.
        apart: Those that no operator on the device needs; they have chunks of their own.
        is_final: Whether this choice is final; else byte counts of the first step decide.
        reason: Why, in one line.
    """

    tensor_indices: frozenset[int]
    apart: frozenset[int]
    is_final: bool
    reason: str


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
    none: frozenset[int] = frozenset()
    weights = [spec for spec in tensors if embedding_owners & set(spec.owners) and len(spec.shape) == 2]
    untied = [spec for spec in weights if set(spec.owners) <= embedding_owners]
    if setting is False:
        return EmbeddingChoice(none, none, True, "cpu_embedding=false: embeddings move in chunks")
    if setting is True:
        names = ", ".join(spec.name for spec in weights if spec not in untied)
        tied = f"; {names} also moves, for the modules that it is tied to" if names else ""
        return EmbeddingChoice(
            frozenset(spec.index for spec in weights),
            frozenset(spec.index for spec in untied),
            True,
            f"cpu_embedding=true: lookups on the CPU{tied}",
        )
    if everything_fits:
        return EmbeddingChoice(none, none, True, "cpu_embedding=auto: off, all model data fits on the device")
    large = frozenset(spec.index for spec in untied if spec.shape[0] >= MIN_ROWS)
    if not large:
        return EmbeddingChoice(
            none, none, True, f"cpu_embedding=auto: off, no untied embedding has {MIN_ROWS} rows or more"
        )
    listing = ", ".join(spec.name for spec in untied if spec.index in large)
    return EmbeddingChoice(
        large,
        large,
        False,
        f"cpu_embedding=auto: on for {listing}, until the first step has shown how many rows it needs",
    )
