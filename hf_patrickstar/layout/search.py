"""Chunk-size search: the size that wastes least, within what the device can hold (PatrickStar section 6.1)."""

import dataclasses
from collections.abc import Callable, Sequence

from hf_patrickstar.errors import BudgetError, ConfigError
from hf_patrickstar.layout.packing import Layout, align, pack
from hf_patrickstar.layout.specs import ModuleSpec, TensorSpec
from hf_patrickstar.shortage import Limit, Shortage
from hf_patrickstar.units import ALIGNMENT_NUMEL, format_need

MAX_CANDIDATES = 512
_MAX_CHUNK_NUMEL = 2**26
_MAX_PLACED_TENSORS = 300_000
_BUDGET_SHARE = 8
_MODEL_SHARE = 16
_TOLERANCE = 0.005
_SPREAD_TOLERANCE = 0.03
"""The same where large tensors are spread: groups of one tensor each waste least, but fewer groups are better."""
_ENOUGH_USED = 0.95


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkSizeChoice:
    """The result of a search: the layout, and what was compared to find it.

    Attributes:
        layout: The layout.
        num_candidates: How many sizes were compared.
        working_set_nbytes: Bytes of the largest working set and of the gradients beside it.
        exposed_ns: What copies and updates add to a step, if that decided.
    """

    layout: Layout
    num_candidates: int
    working_set_nbytes: int
    exposed_ns: int | None = None

    def describe(self) -> str:
        """One line for the log."""
        layout = self.layout
        world_size = layout.chunks[0].world_size if layout.chunks else 1
        count = f"{len(layout.chunks)} chunks" if world_size == 1 else f"{len(layout.chunks)} groups of {world_size}"
        time = "" if self.exposed_ns is None else f", {self.exposed_ns / 1e6:.2f} ms not beside computation"
        return (
            f"chunk_numel={layout.chunk_numel} ({count}, {layout.utilisation:.1%} used{time}, "
            f"best of {self.num_candidates} sizes)"
        )


def check_fits(
    layout: Layout,
    modules: Sequence[ModuleSpec],
    device_nbytes: int | None,
    limits: Sequence[Limit] = (),
    world_size: int = 1,
    staging_nbytes: Callable[[int, str], int] = lambda chunk_numel, dtype: 0,
) -> int:
    """Checks that the device can hold the largest working set of a layout.

    Args:
        layout: The layout to check.
        modules: The modules that own parameters.
        device_nbytes: Bytes that chunks may take on the device, or ``None`` if there is no limit.
        limits: The settings that ``device_nbytes`` comes from, for the error; ``device_budget`` alone by default.
        world_size: Processes that share the chunks of the layout, for the error.
        staging_nbytes: Bytes of scratch space to reduce groups, from the elements of a chunk and their type.

    Returns:
        The bytes of the largest working set and of the gradients beside it, together.

    Raises:
        BudgetError: If it does not fit; the message names the module, the bytes, and what to change.
    """
    chunks, module = layout.working_set_nbytes(modules)
    gradients = _gradient_nbytes(layout, staging_nbytes)
    need = chunks + gradients
    if device_nbytes is not None and need > device_nbytes and module is not None:
        what = "chunks" if world_size == 1 else f"groups of {world_size} chunks"
        beside = f" beside {format_need(gradients)} of gradients" if gradients else ""
        own = sum(layout.tensors[index].nbytes for index in module.tensor_indices)
        short = Shortage.of((limit, need) for limit in limits or (Limit("device_budget", device_nbytes),))
        raise BudgetError(
            f"{short.subject} for module '{module.name}' ({module.class_name}): its {what} need "
            f"{format_need(need - gradients)} on the compute device at once{beside}, {format_need(device_nbytes)} are "
            f"available for chunks. Its parameters alone are {format_need(own)}. "
            + short.advise(f"lower chunk_numel (now {layout.chunk_numel}; 'auto' searches for one that fits)")
        )
    return need


def fixed_layout(
    tensors: Sequence[TensorSpec],
    modules: Sequence[ModuleSpec],
    chunk_numel: int,
    device_nbytes: int | None,
    on_host: frozenset[int] = frozenset(),
    limits: Sequence[Limit] = (),
    world_size: int = 1,
    staging_nbytes: Callable[[int, str], int] = lambda chunk_numel, dtype: 0,
    splits: bool = False,
) -> ChunkSizeChoice:
    """The layout for a chunk size that the user chose.

    Raises:
        ConfigError: If the chunk size is below the alignment.
        BudgetError: If the largest working set does not fit the device.
    """
    if chunk_numel < ALIGNMENT_NUMEL:
        raise ConfigError(
            f"chunk_numel={chunk_numel} is smaller than the alignment of {ALIGNMENT_NUMEL} elements; "
            "use 'auto' or a larger number"
        )
    layout = pack(tensors, chunk_numel, on_host, world_size, splits)
    need = check_fits(layout, modules, device_nbytes, limits, world_size, staging_nbytes)
    return ChunkSizeChoice(layout, 1, need)


def find_candidates(
    tensors: Sequence[TensorSpec],
    modules: Sequence[ModuleSpec],
    on_host: frozenset[int] = frozenset(),
    world_size: int = 1,
    staging_nbytes: Callable[[int, str], int] = lambda chunk_numel, dtype: 0,
    splits: bool = False,
) -> list[tuple[Layout, int]]:
    """The layouts that a search compares, smallest chunks first, and the bytes on the device that each needs at least.

    Candidates are the model's size divided by 1, 2, 3, ... and by the number of processes, and the sizes of single
    tensors. The arguments are those of ``search_layout``.
    """
    total = _total_numel(tensors, on_host)
    # Packing costs time in proportion to tensors x candidates: fewer candidates for models of very many tensors.
    num_candidates = min(MAX_CANDIDATES, max(32, _MAX_PLACED_TENSORS // max(len(tensors) * world_size, 1)))
    sizes = {align(max(1, -(-total // (parts * world_size)))) for parts in range(1, num_candidates + 1)}
    sizes |= {align(spec.numel) for spec in tensors if spec.numel}
    layouts = []
    for size in sorted(size for size in sizes if size <= max(_MAX_CHUNK_NUMEL, min(sizes))):
        layout = pack(tensors, size, on_host, world_size, splits)
        chunks, _ = layout.working_set_nbytes(modules)
        layouts.append((layout, chunks + _gradient_nbytes(layout, staging_nbytes)))
    return layouts


def search_layout(
    tensors: Sequence[TensorSpec],
    modules: Sequence[ModuleSpec],
    device_nbytes: int | None,
    on_host: frozenset[int] = frozenset(),
    limits: Sequence[Limit] = (),
    world_size: int = 1,
    staging_nbytes: Callable[[int, str], int] = lambda chunk_numel, dtype: 0,
    splits: bool = False,
    exposed_ns: Callable[[Layout], int] | None = None,
) -> ChunkSizeChoice:
    """Finds a chunk size.

    The search compares the candidates whose largest working set fits the device. It prefers chunks of at most an eighth
    of the budget and a sixteenth of the model, so that there are several to choose from whatever activations leave of
    the budget.
    With several processes the size of the whole group counts; if no group so small is used to 95 %, the smallest group
    that is becomes the limit. Of the sizes with a utilisation within 0.5 % of the best one (3 % where large tensors are
    spread), the search takes the one that exposes the least time of copies and updates; or, where nobody knows these
    times, the largest, since larger copies use the bus better.

    Args:
        tensors: The specs in model order.
        modules: The modules that own parameters.
        device_nbytes: Bytes that chunks may take on the device, or ``None`` if there is no limit.
        on_host: Indices of tensors that are computed on the host.
        limits: As for ``check_fits``.
        world_size: Processes that share the model data; sizes are of one chunk of a group.
        staging_nbytes: As for ``check_fits``.
        splits: As for ``pack``.
        exposed_ns: What copies and updates of a layout add to a step; ``None`` if nothing runs beside computation.

    Raises:
        BudgetError: If no size fits the device.
    """
    layouts = find_candidates(tensors, modules, on_host, world_size, staging_nbytes, splits)
    fitting = [item for item in layouts if device_nbytes is None or item[1] <= device_nbytes]
    if not fitting:
        smallest = min(layouts, key=lambda item: item[1])[0]
        check_fits(smallest, modules, device_nbytes, limits, world_size, staging_nbytes)
    if device_nbytes is not None:
        itemsize = _mean_itemsize(tensors)
        most_numel = max(_total_numel(tensors, on_host) // _MODEL_SHARE, ALIGNMENT_NUMEL)
        share = min(device_nbytes // _BUDGET_SHARE, most_numel * itemsize)
        if world_size > 1:
            share = max(share, _least_group_nbytes([layout for layout, _ in fitting], itemsize, world_size))
        several = [item for item in fitting if item[0].chunk_numel * world_size * itemsize <= share]
        fitting = several or [min(fitting, key=lambda item: (item[1], item[0].chunk_numel))]
    best = max(item[0].utilisation for item in fitting)
    enough = best - (_SPREAD_TOLERANCE if splits else _TOLERANCE)
    well_used = [item for item in fitting if item[0].utilisation >= enough]
    if exposed_ns is None:
        layout, need = max(well_used, key=lambda item: item[0].chunk_numel)
        return ChunkSizeChoice(layout, len(layouts), need)
    times = [exposed_ns(layout) for layout, _ in well_used]
    place = min(range(len(times)), key=lambda number: (times[number], -well_used[number][0].chunk_numel))
    layout, need = well_used[place]
    return ChunkSizeChoice(layout, len(layouts), need, times[place])


def _gradient_nbytes(layout: Layout, staging_nbytes: Callable[[int, str], int]) -> int:
    """Bytes of gradients that are on the device until their group is reduced, and of the space to reduce them in."""
    largest: dict[str, int] = {}
    for chunk in layout.chunks:
        if chunk.trainable:
            largest[chunk.types.param] = max(chunk.chunk_numel, largest.get(chunk.types.param, 0))
    return layout.gradients_nbytes + sum(staging_nbytes(numel, dtype) for dtype, numel in largest.items())


def _total_numel(tensors: Sequence[TensorSpec], on_host: frozenset[int]) -> int:
    """Elements of all tensors that chunks are searched for, with padding."""
    return sum(align(spec.numel) for spec in tensors if spec.index not in on_host)


def _mean_itemsize(tensors: Sequence[TensorSpec]) -> float:
    """Bytes per element, over all tensors."""
    return sum(spec.nbytes for spec in tensors) / max(sum(spec.numel for spec in tensors), 1)


def _least_group_nbytes(layouts: Sequence[Layout], itemsize: float, world_size: int) -> float:
    """Bytes of the smallest groups that are used well enough; small bins waste more than small chunks do."""
    enough = min(_ENOUGH_USED, max(layout.utilisation for layout in layouts) - _TOLERANCE)
    well_used = [layout.chunk_numel for layout in layouts if layout.utilisation >= enough]
    return min(well_used) * world_size * itemsize
