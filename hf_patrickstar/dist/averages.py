"""Averages of slices, added in the order of the ranks, so that their bits are those of one process."""

from collections.abc import Sequence

import torch


def average(terms: Sequence[torch.Tensor], rank: int, wide: torch.Tensor) -> None:
    """Adds terms in order and writes the average over the term of one rank; other terms may change too.

    Args:
        terms: The terms by rank.
        rank: Whose term becomes the average.
        wide: Scratch space of fp32 for two tiles; empty where terms are added in their own type.
    """
    own, world_size = terms[rank], len(terms)
    if not wide.numel():
        total = terms[0]
        for other in range(1, world_size):
            total = torch.add(total, terms[other], out=own if other >= rank else total)
        own.div_(world_size)
        return
    tile_numel = wide.numel() // 2
    for start in range(0, own.numel(), tile_numel):
        tiles = [term[start : start + tile_numel] for term in terms]
        total, widened = (half[: tiles[0].numel()] for half in wide.split(tile_numel))
        total.copy_(tiles[0])
        for tile in tiles[1:]:
            total.add_(widened.copy_(tile))
        tiles[rank].copy_(total.div_(world_size))


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """The distinct elements of an expanded tensor, which cannot be written to as a whole."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
