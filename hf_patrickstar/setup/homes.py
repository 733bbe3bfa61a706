"""Where a model's chunks can be: the layouts and homes that the budgets leave room for. Numbers only."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from hf_patrickstar.common.shortage import Limit
from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.errors import BudgetError, ConfigError
from hf_patrickstar.layout.chunk_size import ChunkSizeChoice, ChunkSizeSearch
from hf_patrickstar.layout.embedding import EmbeddingChoice, choose_embeddings
from hf_patrickstar.layout.packing import ChunkSpec, Packer
from hf_patrickstar.layout.specs import GRADIENT, ModuleSpec, TensorSpec
from hf_patrickstar.memory.compute_device import is_accelerator
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.optim.kernel import Kernel
from hf_patrickstar.runtime.chunk import torch_dtype
from hf_patrickstar.schedule.pace import exposed_ns
from hf_patrickstar.schedule.placement import ChunkBytes, Homes, Tiers, plan_homes
from hf_patrickstar.schedule.script import TILE_PARTS
from hf_patrickstar.setup.precision import Precision
from hf_patrickstar.setup.resources import Resources
from hf_patrickstar.units import align

UNMEASURED_SHARE = 0.5
"""Part of a device budget that all model data may fill while non-model data has not been measured."""
UNMEASURED_RESERVE = 0.02
"""Part of a device budget that is kept for non-model data of unknown size where the host cannot hold all chunks.

It is small, since a training that has more must not be refused for it: where activations need more, the error of the
first step says how much.
"""
_COPIES_SHARE = 4
"""Where the host cannot hold all chunks, copies take at most this part of the device that is not in use already."""

_WHOLE_SHARE = 0.25
"""Largest part of a device budget that the groups in use may need; if they need more, tensors are spread over ranks."""
_WELL_USED = 0.9

FROZEN = -2
"""Index that stands for the optimizer of frozen parameters."""


@dataclasses.dataclass(frozen=True, slots=True)
class Situation:
    """What decisions depend on beside the model.

    Attributes:
        config: The settings.
        resources: What the engine runs on; nothing is allocated yet.
        kernels: The kernels that update chunks, one for each optimizer; the list may grow.
        optimizer_of: Which optimizer holds a parameter, by the parameter's identity.
        num_micro_batches: Micro-batches per step.
    """

    config: PatrickStarConfig
    resources: Resources
    kernels: Sequence[Kernel]
    optimizer_of: Mapping[int, int]
    num_micro_batches: int

    @property
    def widens_gradients(self) -> bool:
        """Whether optimizers have to widen gradients to fp32; those of an accumulation list are wide."""
        return self.num_micro_batches == 1

    @property
    def can_move_homes(self) -> bool:
        """Whether chunks find other homes once a step is known."""
        is_fixed = self.config.placement == "host" or self.config.debug_evict_all or not self.kernels
        return not is_fixed and all(kernel.runs_beside for kernel in self.kernels)

    def nbytes_in_use(self, parameters: list[torch.nn.Parameter]) -> int:
        """Bytes of the device that are in use already (by another model, for example).

        Args:
            parameters: The parameters of the model.
        """
        device, ledger = self.resources.device, self.resources.ledger
        if not is_accelerator(device):
            return 0
        own = sum(p.numel() * p.dtype.itemsize for p in parameters if p.device == device)
        return max(ledger.limit(Tier.DEVICE) - ledger.available(Tier.DEVICE) - own, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelNumbers:
    """What decisions depend on of a model: numbers, and no parameter.

    Attributes:
        tensors: One spec per parameter, in model order.
        modules: The modules that own parameters.
        precision: The types of parameters, and the type that forward computes in.
        is_restorable: Whether values in chunks have the types that the model was loaded in.
        embeddings: The places of embeddings in ``model.modules()``.
        outlines: What all processes must have alike beside these: types before training, and buffers.
        in_use_nbytes: Bytes of the device that are in use beside the model (by another one, for example).
    """

    tensors: list[TensorSpec]
    modules: list[ModuleSpec]
    precision: Precision
    is_restorable: bool
    embeddings: frozenset[int]
    outlines: Mapping[str, Any]
    in_use_nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Arrangement:
    """A layout, and a home for each of its chunks.

    Attributes:
        choice: The layout.
        embeddings: Which embeddings are looked up on the CPU.
        chunk_nbytes: Bytes of this rank's chunks over all lists.
        homes: The tier where each chunk has its home.
        workspace_nbytes: Bytes of scratch space that the optimizer needs on the host, where it updates chunks there.
        device_workspace_nbytes: Bytes of it that it needs on the device: none for gradients that are wide.
        slots_nbytes: Bytes of the device that it needs for updates over the bus, by the part of a tile.
    """

    choice: ChunkSizeChoice
    embeddings: EmbeddingChoice
    chunk_nbytes: list[ChunkBytes]
    homes: Homes
    workspace_nbytes: int
    device_workspace_nbytes: int
    slots_nbytes: Mapping[int, int]

    def at_home_nbytes(self, tier: Tier) -> int:
        """Bytes of the chunks that have their home on a tier."""
        on_device = tier is Tier.DEVICE
        at_home = [chunk for chunk in self.chunk_nbytes if (chunk.chunk_index in self.homes.device) is on_device]
        return sum(chunk.device_nbytes if on_device else chunk.host_nbytes for chunk in at_home)


@dataclasses.dataclass(frozen=True, slots=True)
class _Room:
    """Bytes of the device before non-model data is measured.

    Attributes:
        share: For all model data, if all of it is to live there.
        limit: For copies of chunks, at most.
        whole: What is not in use already.
        for_homes: For copies, and chunks at home there because the host has no room for them.
    """

    share: int
    limit: int
    whole: int
    for_homes: int


@dataclasses.dataclass(frozen=True)
class Arranger:
    """Finds a layout and homes with which the budgets have room for a model.

    Attributes:
        numbers: The model.
        lists: The lists beside ``param``, by the index of the optimizer.
        situation: What decisions depend on.
    """

    numbers: ModelNumbers
    lists: Mapping[int, tuple[str, ...]]
    situation: Situation

    @functools.cached_property
    def _total_nbytes(self) -> int:
        """Bytes of all lists of this process."""
        sizes = ((spec, align(spec.numel, spec.types.alignment_numel)) for spec in self.numbers.tensors)
        total = sum(numel * spec.types.itemsize + states_nbytes(spec, self.lists, numel) for spec, numel in sizes)
        return -(-total // self.situation.resources.collectives.world_size)

    def arrange(self, agree: Callable[[list[int]], list[int]]) -> Arrangement:
        """Finds them.

        Args:
            agree: Returns the smallest of each number of all processes.

        Raises:
            BudgetError: If a budget is too small.
        """
        config, room, resources = self.situation.config, self._room, self.situation.resources
        host_nbytes, is_alone = resources.ledger.limit(Tier.HOST), resources.collectives.world_size == 1
        excess = max(self._total_nbytes - host_nbytes, 0) if self._total_nbytes > room.share else 0
        limit, left, least = agree([room.limit, max(room.for_homes - excess, 0), -excess])
        # Where the host of some process cannot hold all chunks, small ones leave less of either tier unused.
        limits = [left // _COPIES_SHARE, limit] if least < 0 else [limit, left // _COPIES_SHARE]
        # If everything lived on the device, nothing would be evicted: debug_evict_all needs chunks that move.
        fits = self._total_nbytes <= room.share and not config.debug_evict_all
        embeddings = self._choose_embeddings(config.cpu_embedding, everything_fits=fits)
        options = [(embeddings, most) for most in limits]
        if embeddings.tensor_indices and not embeddings.is_final:  # their weights may have no room on the host
            moving = self._choose_embeddings(False, everything_fits=fits)
            options += [(moving, most) for most in limits]
        refused: dict[int, BudgetError] = {}  # by what copies may take; -1 if there is a layout, but no homes
        for found, most in options:
            try:
                choice = self._choose_layout(found.apart, most, fits)
            except BudgetError as error:
                refused.setdefault(most, error)
                continue
            try:
                return self._place(choice, found)
            except BudgetError as error:
                refused.setdefault(-1, error)
                if not is_alone:  # each places its own part, and all need the same layout
                    break
        raise refused.get(-1) or refused[limit]

    @functools.cached_property
    def _room(self) -> _Room:
        """What the device has room for."""
        ledger = self.situation.resources.ledger
        whole = max(ledger.limit(Tier.DEVICE) - self.numbers.in_use_nbytes, 0)
        share, reserve = whole, 0
        if self.situation.resources.is_metered:
            share, reserve = int(whole * UNMEASURED_SHARE), int(whole * UNMEASURED_RESERVE)
        chunks = whole if ledger.chunk_budget is None else ledger.chunk_budget
        return _Room(min(share, chunks), min(whole, chunks), whole, min(whole - reserve, chunks))

    def _place(self, choice: ChunkSizeChoice, embeddings: EmbeddingChoice) -> Arrangement:
        """Gives each chunk of a layout a home."""
        config, resources, room = self.situation.config, self.situation.resources, self._room
        ledger, is_alone = resources.ledger, resources.collectives.world_size == 1
        nbytes = chunk_bytes(choice.layout.chunks, self.lists, self.situation, embeddings)
        workspace = _workspace_nbytes(self.situation, choice, Tier.HOST)
        device_workspace = _workspace_nbytes(self.situation, choice, Tier.DEVICE)
        slots = dict.fromkeys(TILE_PARTS, 0)
        ring, disk = 0, ledger.limit(Tier.DISK)
        for number, kernel in enumerate(self.situation.kernels):
            own = [spec for spec in choice.layout.chunks if spec.is_updated and spec.optimizer_index == number]
            ring = max(ring, kernel.ring_nbytes(own) if disk else 0)
            for part in slots:
                slots[part] += kernel.slots_nbytes(own, part)
        on_device = device_workspace + slots[1] * (config.updates == "device")
        host, for_homes = ledger.limit(Tier.HOST), room.for_homes
        if not resources.is_metered:
            for_homes = min(for_homes, max(room.whole - host, 0))  # both tiers are the same memory
        needs, gathered = _needs(choice, self.numbers.modules, nbytes, is_alone), choice.working_set_nbytes
        workspace, keeps_off = workspace + resources.pool.host_nbytes(ring, pinned=True), config.debug_evict_all
        tiers = Tiers(host, for_homes, needs, workspace, on_device, disk)
        homes = plan_homes(nbytes, tiers, room.share, 0 if is_alone else gathered, keeps_off=keeps_off)
        nbytes = [dataclasses.replace(found, is_on_disk=found.chunk_index in homes.disk) for found in nbytes]
        return Arrangement(choice, embeddings, nbytes, homes, workspace, device_workspace, slots)

    def _choose_embeddings(self, setting: bool | Literal["auto"], *, everything_fits: bool) -> EmbeddingChoice:
        world_size = self.situation.resources.collectives.world_size
        if world_size > 1:
            if setting is True:
                raise ConfigError(
                    f"cpu_embedding=true: with {world_size} processes each has a part of the parameters at home, not "
                    "all rows of an embedding; use 'auto' or false"
                )
            return EmbeddingChoice(f"cpu_embedding={setting}: off, embeddings are gathered with the other parameters")
        return choose_embeddings(self.numbers.tensors, self.numbers.embeddings, setting, everything_fits)

    def _choose_layout(self, apart: frozenset[int], limit: int, everything_fits: bool) -> ChunkSizeChoice:
        """The layout for the chunk size of the settings; with ``auto``, the best layout within the limits."""
        config, collectives = self.situation.config, self.situation.resources.collectives
        limits, world_size = self._limits(), collectives.world_size
        tensors, modules = self.numbers.tensors, self.numbers.modules
        itemsize = max((spec.types.itemsize for spec in tensors), default=0)
        exposed = None
        if self.situation.resources.has_lanes and not everything_fits:
            exposed = functools.partial(exposed_ns, itemsize=itemsize, machine=self.situation.resources.machine)

        def search(most: int | None, *, splits: bool) -> ChunkSizeSearch:
            packer, staging = Packer(tensors, apart, world_size, splits), functools.partial(staging_nbytes, collectives)
            return ChunkSizeSearch(packer, modules, most, limits, staging)

        splits = world_size > 1 and all(kernel.splits_tensors for kernel in self.situation.kernels)
        if config.chunk_numel != "auto":
            return search(limit, splits=splits).fixed(int(config.chunk_numel))
        if world_size > 1:
            # Whole tensors make the fewest groups. If they waste much, or leave little room, large ones are spread.
            with contextlib.suppress(BudgetError):
                choice = search(int(limit * _WHOLE_SHARE), splits=False).best(exposed)
                if not splits or choice.layout.utilisation >= _WELL_USED:
                    return choice
        most = None if everything_fits and world_size == 1 else limit
        return search(most, splits=splits).best(exposed)

    def _limits(self) -> list[Limit]:
        """The settings that limit what chunks may take on the device, for errors."""
        device, *chunks = self.situation.resources.ledger.limits(Tier.DEVICE)
        return [device._replace(nbytes=max(device.nbytes - self.numbers.in_use_nbytes, 0)), *chunks]


def _needs(
    choice: ChunkSizeChoice, modules: list[ModuleSpec], nbytes: list[ChunkBytes], is_alone: bool
) -> list[tuple[int, frozenset[int]]]:
    """What modules need on the device at once; a chunk at home there is needed once, unless it is gathered."""
    if not is_alone:
        return [(choice.working_set_nbytes, frozenset())]
    placements, chunks = choice.layout.placements, choice.layout.chunks
    used = ({placements[index].chunk_index for index in module.tensor_indices} for module in modules)
    together = {frozenset(index for index in indices if not chunks[index].on_host) for indices in used}
    return [(sum(nbytes[index].param_nbytes for index in indices), indices) for indices in sorted(together, key=sorted)]


def _workspace_nbytes(situation: Situation, choice: ChunkSizeChoice, tier: Tier) -> int:
    """Bytes of scratch space in which optimizers widen gradients on a tier where they update chunks."""
    workspace, widens = 0, situation.widens_gradients
    for number, kernel in enumerate(situation.kernels):
        own = [spec.chunk_numel for spec in choice.layout.chunks if widened_by(spec, number)]
        workspace += kernel.workspace_numel(tier, max(own, default=0), widens=widens) * torch.float32.itemsize
    return workspace


def widened_by(spec: ChunkSpec, optimizer_index: int) -> bool:
    """Whether an optimizer updates a chunk and has to widen its gradients, or states."""
    return spec.is_updated and spec.optimizer_index == optimizer_index and spec.types.widens


def lists_of(spec: TensorSpec | ChunkSpec, lists: Mapping[int, tuple[str, ...]]) -> tuple[str, ...]:
    """The lists beside ``param`` that a parameter or chunk has.

    Args:
        spec: The parameter or chunk.
        lists: The lists of chunks by the index of their optimizer; -1 means no optimizer, -2 frozen parameters.
    """
    if not (spec.trainable and spec.optimizer_index >= 0) and not spec.types.is_mixed:
        return ()  # a value is its own master
    return tuple(filter(spec.types.has_list, lists[spec.optimizer_index if spec.trainable else FROZEN]))


def states_nbytes(spec: TensorSpec | ChunkSpec, lists: Mapping[int, tuple[str, ...]], numel: int) -> int:
    """Bytes of all lists beside ``param`` for some elements of a parameter or chunk; see ``lists_of``."""
    return sum(spec.types.list_nbytes(name, numel) for name in lists_of(spec, lists))


def staging_nbytes(collectives: Collectives, chunk_numel: int, name: str) -> int:
    """Bytes of scratch space in which slices of other processes arrive.

    Args:
        collectives: The processes.
        chunk_numel: Elements of a slice.
        name: Their type.
    """
    dtype = torch_dtype(name)
    narrow, wide = collectives.staging_numel(chunk_numel, dtype)
    return narrow * dtype.itemsize + wide * torch.float32.itemsize


def chunk_bytes(
    specs: Iterable[ChunkSpec], lists: Mapping[int, tuple[str, ...]], situation: Situation, embeddings: EmbeddingChoice
) -> list[ChunkBytes]:
    """The bytes of chunks over all their lists.

    Args:
        specs: The chunks.
        lists: The lists beside ``param`` of trainable ones, by the index of the optimizer.
        situation: Knows how many bytes a host chunk that moves takes, which may be page-locked, and the kernels.
        embeddings: Which embeddings are looked up on the CPU.
    """
    chunks = []
    for spec in specs:
        nbytes = spec.chunk_numel * spec.types.itemsize
        host = situation.resources.pool.host_nbytes(nbytes, pinned=not spec.on_host)
        stays = bool(embeddings.tensor_indices & set(spec.tensor_indices))
        states = states_nbytes(spec, lists, spec.chunk_numel)
        may_leave = spec.is_updated and situation.kernels[spec.optimizer_index].can_stream
        summed = spec.types.list_nbytes(GRADIENT, spec.chunk_numel) * (GRADIENT in lists_of(spec, lists))
        chunks.append(ChunkBytes(spec.index, nbytes, host, states, stays, (states - summed) * may_leave))
    return chunks
