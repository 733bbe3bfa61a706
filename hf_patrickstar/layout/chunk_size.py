"""Chunk-size search: the size that wastes least, within what the device can hold (PatrickStar section 6.1)."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence

from hf_patrickstar.common.shortage import Limit, Shortage
from hf_patrickstar.errors import BudgetError, ConfigError
from hf_patrickstar.layout.filling import Group, Kind
from hf_patrickstar.layout.packing import ChunkSpec, Layout, Outline, Packer, branches_nbytes, gradients_nbytes
from hf_patrickstar.layout.specs import ModuleSpec
from hf_patrickstar.units import ALIGNMENT_NUMEL, align, format_need

StagingNbytes = Callable[[int, str], int]
"""Tells the bytes of scratch space to reduce groups, from the elements of a chunk and their type."""

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
        reason = ""
        if self.num_candidates > 1:
            quality = "largest" if self.exposed_ns is None else "fastest"
            reason = f"; the {quality} size that fits and leaves least memory unused, of {self.num_candidates} compared"
        if self.exposed_ns is not None:
            reason += f"; a step waits {self.exposed_ns / 1e6:.2f} ms for copies and updates"
        layout = self.layout
        return f"chunk_numel={layout.chunk_numel} ({layout.describe()}; {layout.utilisation:.1%} used{reason})"


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """A size that a search compares. What it looks at is computed when it is looked at.

    Attributes:
        chunk_numel: The size.
        packer: Packs tensors.
        together: The sets of tensors that modules need on the device at once, and what finds their groups.
        staging_nbytes: See ``StagingNbytes``.
    """

    chunk_numel: int
    packer: Packer
    together: Mapping[tuple[int, ...], Callable[[Mapping[int, int]], tuple[int, ...]]]
    staging_nbytes: StagingNbytes

    @functools.cached_property
    def outline(self) -> Outline:
        """What its chunks or groups come to."""
        return self.packer.outline(self.chunk_numel)

    @functools.cached_property
    def utilisation(self) -> float:
        """As ``Layout.utilisation``."""
        capacity = self.outline.capacity_numel
        return self.packer.used_numel / capacity if capacity else 1.0

    @functools.cached_property
    def need_nbytes(self) -> int:
        """Bytes of the largest working set and of the gradients beside it, as ``check_fits`` returns."""
        groups = self.packer.fill(self.chunk_numel)
        group_of = {
            piece.tensor_index: place for place, group in enumerate(groups) for own in group.bins for piece in own
        }
        nbytes = [0 if group.on_host else group.nbytes for group in groups]
        # Most modules of a large model are in the same chunks as another one.
        held = {find(group_of) for find in self.together.values()}
        working_set = max((sum([nbytes[place] for place in {*places}]) for places in held), default=0)
        return working_set + _gradient_nbytes(groups, self.staging_nbytes)

    def fits(self, device_nbytes: int | None) -> bool:
        """Whether the device can hold what is needed."""
        return device_nbytes is None or self._most_nbytes <= device_nbytes or self.need_nbytes <= device_nbytes

    @property
    def _most_nbytes(self) -> int:
        """At least ``need_nbytes``, and soon known: as if each tensor of a module were in a chunk as large as any."""
        world_size, largest = self.packer.world_size, self.outline.largest
        nbytes = max((numel * world_size * types.itemsize for (_, _, types), numel in largest.items()), default=0)
        num_chunks = max(map(len, self.together), default=0) + 2 * (world_size > 1)
        return num_chunks * nbytes + staged_nbytes(largest, self.staging_nbytes)


@dataclasses.dataclass(frozen=True)
class ChunkSizeSearch:
    """Finds the chunk size of a model.

    Attributes:
        packer: Packs the tensors; sizes are of one chunk of a group.
        modules: The modules that own parameters.
        device_nbytes: Bytes that chunks may take on the device, or ``None`` if there is no limit.
        limits: The settings that ``device_nbytes`` comes from, for errors.
        staging_nbytes: See ``StagingNbytes``.
    """

    packer: Packer
    modules: Sequence[ModuleSpec]
    device_nbytes: int | None
    limits: Sequence[Limit]
    staging_nbytes: StagingNbytes

    def check_fits(self, layout: Layout, *, is_smallest: bool = False) -> int:
        """Checks that the device can hold the largest working set of a layout.

        Args:
            layout: The layout to check.
            is_smallest: Whether no other chunks need less.

        Returns:
            The bytes of the largest working set and of the gradients beside it, together.

        Raises:
            BudgetError: If it does not fit; the message names the module, the bytes, and what to change.
        """
        chunks, module = layout.working_set_nbytes(self.modules)
        gradients = _gradient_nbytes(layout.chunks, self.staging_nbytes)
        need, most = chunks + gradients, self.device_nbytes
        if most is not None and need > most and module is not None:
            world_size = layout.chunks[0].world_size
            what = "chunks" if world_size == 1 else f"groups of {world_size} chunks"
            beside = f" beside {format_need(gradients)} of gradients" if gradients else ""
            own = sum(layout.tensors[index].nbytes for index in module.tensor_indices)
            short = Shortage((limit, need) for limit in self.limits)
            raise BudgetError(
                f"{short.subject} for module '{module.name}' ({module.class_name}): its {what} need "
                f"{format_need(need - gradients)} on the compute device at once{beside}, {format_need(most)} are "
                f"available for chunks. Its parameters alone are {format_need(own)}. "
                + short.advise(
                    "use 16-bit parameters (--bf16) if they are not, since no smaller chunks help"
                    if is_smallest
                    else f"lower chunk_numel (now {layout.chunk_numel}; 'auto' searches for one that fits)"
                )
                + (
                    " Where data leads the processes down different branches of the model they need up to "
                    f"{format_need(branches_nbytes(layout.chunks))} more, since all take part in what one of them "
                    "gathers."
                    if world_size > 1
                    else ""
                )
            )
        return need

    def fixed(self, chunk_numel: int) -> ChunkSizeChoice:
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
        layout = self.packer.layout(chunk_numel)
        return ChunkSizeChoice(layout, 1, self.check_fits(layout))

    def candidates(self) -> list[Candidate]:
        """The sizes that are compared, smallest chunks first.

        They are the model's size divided by 1, 2, 3, ... and by the number of processes, and the sizes of single
        tensors.
        """
        packer, tensors, world_size = self.packer, self.packer.tensors, self.packer.world_size
        # Packing costs time in proportion to tensors x candidates: fewer candidates for models of very many tensors.
        num = min(MAX_CANDIDATES, max(32, _MAX_PLACED_TENSORS // max(len(tensors) * world_size, 1)))
        sizes = {align(max(1, -(-packer.padded_numel // (parts * world_size)))) for parts in range(1, num + 1)}
        sizes |= {align(spec.numel) for spec in tensors if spec.numel}
        most = max(_MAX_CHUNK_NUMEL, min(sizes))
        indices = [module.tensor_indices for module in self.modules]
        # One index is written twice, since of a single one ``itemgetter`` would return no tuple.
        together = {own: operator.itemgetter(*own, own[0]) for own in indices if own}
        return [Candidate(size, packer, together, self.staging_nbytes) for size in sorted(sizes) if size <= most]

    def best(self, exposed_ns: Callable[[int, int], int] | None = None) -> ChunkSizeChoice:
        """Finds a chunk size.

        The search compares the candidates whose largest working set fits the device. It prefers chunks of at most an
        eighth of the budget and a sixteenth of the model, so that there are several to choose from whatever activations
        leave of the budget. With several processes the size of the whole group counts; if no group so small is used to
        95 %, the smallest group that is becomes the limit. Of the sizes with a utilisation within 0.5 % of the best one
        (3 % where large tensors are spread), the search takes the one that exposes the least time of copies and
        updates; or, where nobody knows these times, the largest, since larger copies use the bus better.

        Args:
            exposed_ns: What copies and updates add to a step, from the number of chunks and their size; ``None`` if
                nothing runs beside computation.

        Raises:
            BudgetError: If no size fits the device.
        """
        packer, most, found = self.packer, self.device_nbytes, self.candidates()
        fitting = [item for item in found if item.fits(most)]
        if not fitting:
            self.check_fits(packer.layout(min(found, key=lambda item: item.need_nbytes).chunk_numel), is_smallest=True)
        if most is not None:
            itemsize = sum(spec.nbytes for spec in packer.tensors) / max(packer.used_numel, 1)  # the mean
            world_size, most_numel = packer.world_size, max(packer.padded_numel // _MODEL_SHARE, ALIGNMENT_NUMEL)
            share = min(most // _BUDGET_SHARE, most_numel * itemsize)
            if world_size > 1:  # small bins waste more than small chunks do
                enough = min(_ENOUGH_USED, max(item.utilisation for item in fitting) - _TOLERANCE)
                least = min(item.chunk_numel for item in fitting if item.utilisation >= enough)
                share = max(share, least * world_size * itemsize)
            several = [item for item in fitting if item.chunk_numel * world_size * itemsize <= share]
            fitting = several or [min(fitting, key=lambda item: (item.need_nbytes, item.chunk_numel))]
        enough = max(item.utilisation for item in fitting) - (_SPREAD_TOLERANCE if packer.splits else _TOLERANCE)
        well_used = [item for item in fitting if item.utilisation >= enough]
        times: dict[int, int] = {}
        if exposed_ns is not None:
            times = {item.chunk_numel: exposed_ns(item.outline.num_chunks, item.chunk_numel) for item in well_used}
        chosen = min(well_used, key=lambda item: (times.get(item.chunk_numel, 0), -item.chunk_numel))
        layout = packer.layout(chosen.chunk_numel)
        return ChunkSizeChoice(layout, len(found), chosen.need_nbytes, times.get(chosen.chunk_numel))


def _gradient_nbytes(chunks: Sequence[ChunkSpec | Group], staging_nbytes: StagingNbytes) -> int:
    """Bytes of gradients that are on the device until their group is reduced, and of the space to reduce them in."""
    return gradients_nbytes(chunks) + staged_nbytes(Outline.of(chunks).largest, staging_nbytes)


def staged_nbytes(largest: Mapping[Kind, int], staging_nbytes: StagingNbytes) -> int:
    """Bytes of the space to reduce gradients of each type in.

    Args:
        largest: The most elements that one rank owns of a chunk, by kind; see ``Outline``.
        staging_nbytes: Bytes of the space for so many elements of a type.
    """
    by_type: dict[str, int] = {}
    for (trainable, _, types), numel in largest.items():
        if trainable:
            by_type[types.param] = max(numel, by_type.get(types.param, 0))
    return sum(staging_nbytes(numel, dtype) for dtype, numel in by_type.items())
