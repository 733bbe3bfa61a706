"""Specs made by hand, for tests of everything that decides on numbers."""

import dataclasses
import functools

from hf_patrickstar.common.shortage import Limit
from hf_patrickstar.layout import chunk_size
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


def _found(search, tensors, modules, *sizes, staging_nbytes=lambda chunk_numel, dtype: 0, exposed_ns=None, **packing):
    limits = [Limit("chunk_budget", sizes[-1])] if sizes[-1] is not None else []
    others = {} if exposed_ns is None else {"exposed_ns": exposed_ns}
    return search(Packer(tensors, **packing), modules, *sizes, limits, staging_nbytes, **others)


search_layout = functools.partial(_found, chunk_size.search_layout)
fixed_layout = functools.partial(_found, chunk_size.fixed_layout)
"""As the functions of these names, from tensors instead of a packer; ``chunk_budget`` is the only limit."""
