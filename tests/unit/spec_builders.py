"""Specs made by hand, for tests of everything that decides on numbers."""

from hf_patrickstar.layout.specs import ModuleSpec, TensorSpec


def make_tensors(*numels, frozen=()):
    """One-dimensional tensors ``t0``, ``t1``, ...; those at the places ``frozen`` are not trainable."""
    return [TensorSpec(index, f"t{index}", (numel,), index not in frozen) for index, numel in enumerate(numels)]


def make_modules(*groups):
    """Modules ``m0``, ``m1``, ... that own the tensors of each group."""
    return [ModuleSpec(f"m{index}", "Block", tuple(group)) for index, group in enumerate(groups)]


def placed(layout):
    """Every tensor's chunk and offset, and every chunk's capacity: a layout in two literals."""
    places = [(place.chunk_index, place.offset_numel) for place in layout.placements]
    return places, [chunk.capacity_numel for chunk in layout.chunks]
