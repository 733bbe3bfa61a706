"""Specs made by hand, for tests of everything that decides on numbers."""

import dataclasses

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
