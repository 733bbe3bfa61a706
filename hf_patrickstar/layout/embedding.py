"""Which embeddings are computed on the CPU and so kept out of the moving chunks (PatrickStar section 8.2)."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.layout.specs import TensorSpec

ASSUMED_TOKENS = 16384
"""Tokens per micro-batch assumed by ``auto``: a row that is not looked up need not cross the bus."""


@dataclasses.dataclass(frozen=True, slots=True)
class EmbeddingChoice:
    """Which tensors are computed on the host, and the reason in one line."""

    tensor_indices: frozenset[int]
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

    Raises:
        ConfigError: If the setting is true and an embedding is tied to another module.
    """
    weights = [spec for spec in tensors if embedding_owners & set(spec.owners) and len(spec.shape) == 2]
    tied = [spec for spec in weights if not set(spec.owners) <= embedding_owners]
    untied = [spec for spec in weights if set(spec.owners) <= embedding_owners]
    if setting is False:
        return EmbeddingChoice(frozenset(), "cpu_embedding=false: embeddings move in chunks")
    if setting is True:
        if tied:
            names = list(zip((tied[0].name, *tied[0].aliases), tied[0].owners, strict=True))
            lookup = next(name for name, owner in names if owner in embedding_owners)
            other = next(name for name, owner in names if owner not in embedding_owners)
            raise ConfigError(
                f"cpu_embedding=true: '{lookup}' is tied to '{other}', which is computed on the device; use "
                "cpu_embedding='auto' or false, or untie the weights"
            )
        return EmbeddingChoice(frozenset(spec.index for spec in untied), "cpu_embedding=true: lookups on the CPU")
    if everything_fits:
        return EmbeddingChoice(frozenset(), "cpu_embedding=auto: off, all model data fits on the device")
    large = [spec for spec in untied if spec.shape[0] > ASSUMED_TOKENS]
    if not large:
        return EmbeddingChoice(
            frozenset(), f"cpu_embedding=auto: off, no untied embedding has more than {ASSUMED_TOKENS} rows"
        )
    listing = ", ".join(spec.name for spec in large)
    return EmbeddingChoice(
        frozenset(spec.index for spec in large),
        f"cpu_embedding=auto: on for {listing}, more rows than the {ASSUMED_TOKENS} tokens assumed per micro-batch",
    )
