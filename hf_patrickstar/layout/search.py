"""Chunk-size search: the size that wastes least, within what the device can hold (PatrickStar section 6.1)."""

import dataclasses
import math
from collections.abc import Sequence

from hf_patrickstar.errors import BudgetError, ConfigError
from hf_patrickstar.layout.packing import ALIGNMENT_NUMEL, Layout, align, pack
from hf_patrickstar.layout.specs import ModuleSpec, TensorSpec
from hf_patrickstar.units import format_need

_MAX_CANDIDATES = 512
_MAX_CHUNK_NUMEL = 2**26
_MAX_PLACED_TENSORS = 300_000
_BUDGET_SHARE = 8
_MODEL_SHARE = 16
_TOLERANCE = 0.005


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkSizeChoice:
    """The result of a search: the layout, and what was compared to find it."""

    layout: Layout
    num_candidates: int
    working_set_nbytes: int

    def describe(self) -> str:
        """One line for the log."""
        layout = self.layout
        return (
            f"chunk_numel={layout.chunk_numel} ({len(layout.chunks)} chunks, {layout.utilisation:.1%} used, "
            f"best of {self.num_candidates} sizes)"
        )


def check_fits(
    layout: Layout, modules: Sequence[ModuleSpec], itemsize: int, device_nbytes: int | None, usable: float = 1.0
) -> int:
    """Checks that the device can hold the largest working set of a layout.

    Args:
        layout: The layout to check.
        modules: The modules that own parameters.
        itemsize: Bytes per element of the ``param`` list.
        device_nbytes: Bytes that chunks may take on the device, or ``None`` if there is no limit.
        usable: Part of the device's budget that these bytes are; what the error advises is the whole budget.

    Returns:
        The bytes of the largest working set.

    Raises:
        BudgetError: If it does not fit: which module, how many bytes, what to change.
    """
    numel, module = layout.working_set_numel(modules)
    need = numel * itemsize
    if device_nbytes is not None and need > device_nbytes and module is not None:
        own = sum(layout.tensors[index].numel for index in module.tensor_indices) * itemsize
        raise BudgetError(
            f"device_budget is too small for module '{module.name}' ({module.class_name}): its chunks need "
            f"{format_need(need)} on the compute device at once, {format_need(device_nbytes)} are available for "
            f"chunks. Its parameters alone are {format_need(own)}. Raise device_budget to at least "
            f"{math.ceil(need / usable)} bytes, or "
            f"lower chunk_numel (now {layout.chunk_numel}; 'auto' searches for one that fits)."
        )
    return need


def fixed_layout(
    tensors: Sequence[TensorSpec],
    modules: Sequence[ModuleSpec],
    chunk_numel: int,
    itemsize: int,
    device_nbytes: int | None,
    on_host: frozenset[int] = frozenset(),
    usable: float = 1.0,
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
    layout = pack(tensors, chunk_numel, on_host)
    return ChunkSizeChoice(layout, 1, check_fits(layout, modules, itemsize, device_nbytes, usable))


def search_layout(
    tensors: Sequence[TensorSpec],
    modules: Sequence[ModuleSpec],
    itemsize: int,
    device_nbytes: int | None,
    on_host: frozenset[int] = frozenset(),
    usable: float = 1.0,
) -> ChunkSizeChoice:
    """Finds a chunk size.

    Candidates are the whole model divided by 1, 2, 3, ... Only sizes whose largest working set fits the device are
    considered. Among them, chunks of at most an eighth of the budget and a sixteenth of the model are preferred, so
    that there are several to choose from whatever activations leave of the budget; then the best utilisation; then,
    within half a percent of it, the largest, since larger copies use the bus better.

    Args:
        tensors: The specs in model order.
        modules: The modules that own parameters.
        itemsize: Bytes per element of the ``param`` list.
        device_nbytes: Bytes that chunks may take on the device, or ``None`` if there is no limit.
        on_host: Indices of tensors that are computed on the host.
        usable: Part of the device's budget that ``device_nbytes`` is, for the error.

    Raises:
        BudgetError: If no size fits the device.
    """
    total = sum(align(spec.numel) for spec in tensors if spec.index not in on_host)
    # Packing costs time in proportion to tensors x candidates: fewer candidates for models of very many tensors.
    num_candidates = min(_MAX_CANDIDATES, max(32, _MAX_PLACED_TENSORS // max(len(tensors), 1)))
    sizes = {align(max(1, -(-total // parts))) for parts in range(1, num_candidates + 1)}
    sizes |= {align(spec.numel) for spec in tensors if spec.numel}
    layouts = []
    for size in sorted(size for size in sizes if size <= max(_MAX_CHUNK_NUMEL, min(sizes))):
        layout = pack(tensors, size, on_host)
        numel, _ = layout.working_set_numel(modules)
        layouts.append((layout, numel * itemsize))
    fitting = [item for item in layouts if device_nbytes is None or item[1] <= device_nbytes]
    if not fitting:
        smallest = min(layouts, key=lambda item: item[1])[0]
        check_fits(smallest, modules, itemsize, device_nbytes, usable)
    if device_nbytes is not None:
        share = min(device_nbytes // _BUDGET_SHARE, max(total // _MODEL_SHARE, ALIGNMENT_NUMEL) * itemsize)
        several = [item for item in fitting if item[0].chunk_numel * itemsize <= share]
        fitting = several or [min(fitting, key=lambda item: (item[1], item[0].chunk_numel))]
    best = max(item[0].utilisation for item in fitting)
    layout, need = max(
        (item for item in fitting if item[0].utilisation >= best - _TOLERANCE), key=lambda item: item[0].chunk_numel
    )
    return ChunkSizeChoice(layout, len(layouts), need)
