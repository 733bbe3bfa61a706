"""Specs made by hand, for tests of everything that decides on numbers."""

import dataclasses

from hf_patrickstar.common.shortage import Limit
from hf_patrickstar.layout.chunk_size import ChunkSizeSearch
from hf_patrickstar.layout.packing import Packer
from hf_patrickstar.layout.specs import ModuleSpec, TensorSpec, Types

BF16 = Types("bfloat16", "float32")
FP32 = Types()


def make_tensors(*numels, frozen=(), types=BF16):
    """One-dimensional tensors ``t0``, ``t1``, ...; those at the places ``frozen`` are not trainable."""
    return [
        TensorSpec(index, f"t{index}", (numel,), index not in frozen, types=types) for index, numel in enumerate(numels)
    ]


def typed(tensors, types=BF16):
    """The same tensors with other types."""
    return [dataclasses.replace(spec, types=types) for spec in tensors]


def make_modules(*groups):
    """Modules ``m0``, ``m1``, ... that own the tensors of each group."""
    return [ModuleSpec(f"m{index}", "Block", tuple(group)) for index, group in enumerate(groups)]


def placed(layout):
    """Every tensor's chunk and offset, and every chunk's capacity: a layout in two literals."""
    places = [(place.chunk_index, place.offset_numel) for place in layout.placements]
    return places, [chunk.capacity_numel for chunk in layout.chunks]


def pack(tensors, chunk_numel, on_host=frozenset(), world_size=1, splits=False):
    """The layout of tensors for a chunk size."""
    return Packer(tensors, on_host, world_size, splits).layout(chunk_numel)


def searching(tensors, modules, device_nbytes, staging_nbytes=lambda chunk_numel, dtype: 0, **packing):
    """A search over tensors; ``chunk_budget`` is the only limit."""
    limits = [Limit("chunk_budget", device_nbytes)] if device_nbytes is not None else []
    return ChunkSizeSearch(Packer(tensors, **packing), modules, device_nbytes, limits, staging_nbytes)


def search_layout(tensors, modules, device_nbytes, exposed_ns=None, **settings):
    """The best size of a search."""
    return searching(tensors, modules, device_nbytes, **settings).best(exposed_ns)


def fixed_layout(tensors, modules, chunk_numel, device_nbytes, **settings):
    """The choice for one size."""
    return searching(tensors, modules, device_nbytes, **settings).fixed(chunk_numel)
