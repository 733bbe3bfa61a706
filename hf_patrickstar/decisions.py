"""All that is decided about a model before anything is allocated: types, layout, homes. Numbers only."""

import contextlib
import dataclasses
import functools
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.nn.parameter import is_lazy

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.errors import BudgetError, ConfigError, EngineError
from hf_patrickstar.layout.embedding import EmbeddingChoice, choose_embeddings
from hf_patrickstar.layout.packing import ChunkSpec, Layout, branches_nbytes
from hf_patrickstar.layout.search import ChunkSizeChoice, fixed_layout, search_layout
from hf_patrickstar.layout.specs import ModuleSpec, TensorSpec, collect_specs
from hf_patrickstar.memory.accelerator import is_accelerator
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.optim.kernel import Kernel
from hf_patrickstar.precision import Precision, choose_precision
from hf_patrickstar.resources import Resources
from hf_patrickstar.runtime.admission import check_model, check_values, is_left_out, is_recomputed
from hf_patrickstar.runtime.chunk import GRADIENT, MASTER, torch_dtype
from hf_patrickstar.runtime.live_parameter import LiveMixin
from hf_patrickstar.runtime.together import roots_of
from hf_patrickstar.schedule.known import KnownTraces
from hf_patrickstar.schedule.margin import StepCost
from hf_patrickstar.schedule.pace import choose_depth, exposed_ns
from hf_patrickstar.schedule.placement import ChunkBytes, HomePlan, Limits, Tiers, plan_homes
from hf_patrickstar.schedule.prospect import PlacementRules, Prospect
from hf_patrickstar.schedule.sketch import ChunkWork
from hf_patrickstar.shortage import Limit
from hf_patrickstar.units import align, format_nbytes, format_seconds

logger = logging.getLogger(__name__)

UNMEASURED_SHARE = 0.5
"""Part of a device budget that all model data may fill while non-model data has not been measured."""
UNMEASURED_RESERVE = 0.02
"""Part of a device budget that is kept for non-model data of unknown size where the host cannot hold all chunks.

It is small, since a training that has more must not be refused for it: where activations need more, the error of the
first step says how much.
"""
_COPIES_SHARE = 4
"""Where the host cannot hold all chunks, copies take at most this part of what the others leave of the device."""

_WHOLE_SHARE = 0.25
"""Largest part of a device budget that the groups in use may need; if they need more, tensors are spread over ranks."""
_WELL_USED = 0.9

_FROZEN = -2
"""Index that stands for the optimizer of frozen parameters."""


@dataclasses.dataclass(frozen=True, slots=True)
class Circumstances:
    """What decisions depend on beside the model.

    Attributes:
        config: The settings.
        resources: What the engine runs on; nothing is allocated yet.
        kernels: The kernels that update chunks, one for each optimizer.
        optimizer_of: Which optimizer holds a parameter, by the parameter's identity.
        num_micro_batches: Micro-batches per step.
    """

    config: PatrickStarConfig
    resources: Resources
    kernels: Sequence[Kernel]
    optimizer_of: Mapping[int, int]
    num_micro_batches: int


@dataclasses.dataclass(frozen=True, slots=True)
class Decisions:
    """The decisions for a model.

    Attributes:
        tensors: One spec per parameter, in model order.
        parameters: The parameters, in the same order.
        precision: The types of parameters, and the type that forward computes in.
        choice: The layout.
        embeddings: Which embeddings are looked up on the CPU.
        chunk_nbytes: Bytes of this rank's chunks over all lists.
        homes: The tier where each chunk has its home.
        workspace_nbytes: Bytes of scratch space that the optimizer needs on the host, where it updates chunks there.
        device_workspace_nbytes: Bytes of it that it needs on the device: none for gradients that are wide.
        need_at: Returns the bytes that chunks would need at once with another device budget and chunk budget.
        lists: The lists that chunks have beside ``param``, by the index of their optimizer; see ``lists_of``.
        widens_gradients: Whether optimizers have to widen gradients to fp32; those of an accumulation list are wide.
        prefetch_depth: How many chunks are loaded ahead.
        depth_reason: Why.
    """

    tensors: list[TensorSpec]
    parameters: list[torch.nn.Parameter]
    precision: Precision
    choice: ChunkSizeChoice
    embeddings: EmbeddingChoice
    chunk_nbytes: list[ChunkBytes]
    homes: HomePlan
    workspace_nbytes: int
    device_workspace_nbytes: int
    need_at: Callable[[int, int | None], int]
    lists: dict[int, tuple[str, ...]]
    widens_gradients: bool
    prefetch_depth: int
    depth_reason: str

    @property
    def reasons(self) -> tuple[str, ...]:
        """What was decided about the model, a sentence each."""
        return (
            self.precision.describe(self.tensors),
            self.choice.describe(),
            self.homes.reason,
            self.embeddings.reason,
            self.depth_reason,
        )

    def foresee(
        self, situation: Circumstances, known: KnownTraces, rules: PlacementRules, *, fills_margin: bool
    ) -> StepCost | None:
        """What a step will cost when chunks have moved to the device margin; ``None`` if that is not known.

        Without traces nothing is known of the inputs, and without lanes no machine's rates tell what a step takes.

        Args:
            situation: What the decisions depended on.
            known: Traces of a plan.
            rules: What a placement takes into account.
            fills_margin: Whether chunks may move to the margin.
        """
        if not rules.has_lanes or not any(trace.kind.is_training for trace in known.traces.values()):
            return None
        prospect, homed = self.prospect(situation, known, rules), self.homes.device_homed
        if fills_margin:
            kept = homed - self.homes.spilled
            with contextlib.suppress(BudgetError):  # the inputs may be smaller than those that were planned
                margin = prospect.margin(kept)
                homed = kept if margin is None else kept.union(margin.chunk_indices)
        return prospect.cost(homed)

    def with_tide(self, situation: Circumstances, known: KnownTraces, rules: PlacementRules) -> "Decisions":
        """These decisions, with the homes that fit what a step needs at each moment, if the host has no room for all.

        Args:
            situation: What the decisions depended on.
            known: Traces of a plan; without those of a training nothing changes.
            rules: What a placement takes into account.
        """
        if not self.homes.spilled or not any(trace.kind.is_training for trace in known.traces.values()):
            return self
        kept = self.homes.device_homed - self.homes.spilled
        try:
            spilled = self.prospect(situation, known, rules).spilled(kept)
        except BudgetError as error:  # no refusal: nobody knows whether inputs will be as large
            logger.info("patrickstar: a step with inputs as large as those that were planned has no room: %s", error)
            return self
        situation.resources.ledger.spilled_nbytes = sum(self.chunk_nbytes[index].host_nbytes for index in spilled)
        return dataclasses.replace(self, homes=HomePlan(kept | spilled, self.homes.reason, spilled))

    def prospect(self, situation: Circumstances, known: KnownTraces, rules: PlacementRules) -> Prospect:
        """What is known of a step before chunks are allocated; see ``foresee``."""
        resources, chunks, looked_up = situation.resources, self.choice.layout.chunks, self._looked_up(known)
        return Prospect(
            [*known.traces.values()],
            situation.num_micro_batches,
            self.chunk_nbytes,
            [ChunkWork.of(spec, self._own(spec, resources.collectives.rank), looked_up) for spec in chunks],
            frozenset(spec.index for spec in chunks if spec.is_updated),
            resources.collectives.world_size > 1,
            resources.ledger.limit(Tier.HOST),
            resources.ledger.limit(Tier.DEVICE, cautious=False),
            resources.ledger.chunk_budget,
            rules,
        )

    def _looked_up(self, known: KnownTraces) -> frozenset[int]:
        """Tensors that are looked up on the host, where their chunk is at home."""
        asked, homed = self.embeddings.tensor_indices, self.homes.device_homed
        of_plan = {} if self.embeddings.is_final else known.lookups
        placements = self.choice.layout.placements
        return frozenset(i for i in asked if of_plan.get(i) != "device" and placements[i].chunk_index not in homed)

    def _own(self, spec: ChunkSpec, rank: int) -> Iterator[tuple[TensorSpec, int]]:
        """The tensors of a chunk, and how many elements of each a process has at home."""
        for index in spec.tensor_indices:
            tensor, placement = self.tensors[index], self.choice.layout.placements[index]
            begin, end = spec.parts_of(tensor.numel, placement.offset_numel)[rank]
            yield tensor, end - begin

    def expected(self, situation: Circumstances, known: KnownTraces, foreseen: StepCost | None) -> str:
        """What this process will need for model data, and for a step, in one line.

        Args:
            situation: What the decisions depended on.
            known: Traces of a plan, which know activations.
            foreseen: What a step will cost, if that is known.
        """
        ledger, homed = situation.resources.ledger, self.homes.device_homed
        num, num_trained = (
            sum(spec.numel for spec in self.tensors if spec.trainable or everything) for everything in (True, False)
        )
        on_host = sum(chunk.host_nbytes for chunk in self.chunk_nbytes if chunk.chunk_index not in homed)
        on_device = sum(chunk.device_nbytes for chunk in self.chunk_nbytes if chunk.chunk_index in homed)
        if on_host:
            on_host += self.workspace_nbytes
            on_device += self.choice.working_set_nbytes
        training = [trace for trace in known.traces.values() if trace.kind.is_training]
        in_step = max((trace.least_nbytes(homed) for trace in training), default=0)
        if in_step:
            on_device = sum(chunk.device_nbytes for chunk in self.chunk_nbytes if chunk.chunk_index in homed) + in_step
        beside = "with" if in_step else "beside"
        limits = [limit.nbytes for limit in ledger.limits(Tier.DEVICE)]
        room = limits[0] if in_step else min(limits)  # the second limit is that of chunks alone
        time = short = ""
        if foreseen is not None:
            name = situation.resources.machine.name
            time = f", and about {format_seconds(foreseen.seconds)} per step by the rates of '{name}'"
        if in_step and on_device > room:  # no refusal: nobody knows whether inputs will be as large
            short = (
                ". A step with inputs as large as those that were planned has no room: use smaller or shorter batches, "
                "activation checkpointing (--gradient_checkpointing), or a larger device_budget"
            )
        return (
            f"{_in_words(num)} parameters ({_in_words(num_trained)} trained): model data takes "
            f"{format_nbytes(on_host)} of {format_nbytes(ledger.limit(Tier.HOST))} on the host, and on the device, "
            f"{beside} activations, at least {format_nbytes(on_device)} of {format_nbytes(room)}{time}{short}"
        )

    def explain(self, situation: Circumstances) -> None:
        """Logs one line per decision that ``auto`` made."""
        config, ledger = situation.config, situation.resources.ledger
        logger.info("patrickstar: %s", self.precision.describe(self.tensors))
        chosen = "chunk_numel=auto" if config.chunk_numel == "auto" else "as asked"
        logger.info("patrickstar: %s: %s", chosen, self.choice.describe())
        logger.info("patrickstar: %s", self.homes.reason)
        logger.info("patrickstar: %s", self.embeddings.reason)
        logger.info("patrickstar: %s", self.depth_reason)
        if config.debug_evict_all and len(self.chunk_nbytes) - len(self.homes.device_homed) < 2:
            logger.warning("patrickstar: debug_evict_all has nothing to evict: %s", self.homes.reason)
        pinned = "are pinned" if situation.resources.pool.pins_memory else "are not pinned"
        logger.info("patrickstar: pin_memory=%s: host chunks %s", config.pin_memory, pinned)
        for tier, setting in ((Tier.DEVICE, config.device_budget), (Tier.HOST, config.host_budget)):
            logger.info(
                "patrickstar: %s_budget %s (%s), %s of it usable",
                tier.value,
                format_nbytes(ledger.budget(tier)),
                "auto: what is available" if setting == "auto" else "as asked",
                format_nbytes(ledger.limit(tier)),
            )
        if situation.resources.collectives.world_size > 1:
            machine, world_size = situation.resources.machine, situation.resources.collectives.world_size
            sent = ((world_size - 1) * spec.chunk_numel * spec.types.itemsize for spec in self.choice.layout.chunks)
            logger.info(
                "patrickstar: %d processes, each with its part of every list; reshard_after_forward=%s: groups %s; by "
                "the rates of '%s' it takes %.2f ms to gather all of them once more",
                world_size,
                config.reshard_after_forward,
                "leave after forward" if config.reshard_after_forward else "stay while there is room",
                machine.name,
                sum(map(machine.collective_ns, sent)) / 1e6,
            )


def _in_words(num: int) -> str:
    return f"{num / 1e9:.2f} B" if num >= 10**9 else f"{num / 1e6:.2f} M"


def decide(model: torch.nn.Module, precision: str, situation: Circumstances) -> Decisions:
    """Decides types, layout and homes for a model.

    Args:
        model: The model; it stays as it is.
        precision: ``"no"``, ``"bf16"`` or ``"fp16"``: what ``dtype="auto"`` follows.
        situation: What decisions depend on.

    Raises:
        ConfigError: If a setting cannot work for this model, or processes were given different ones.
        BudgetError: If a budget is too small.
        EngineError: If the model cannot be managed.
    """
    config, ledger, collectives = situation.config, situation.resources.ledger, situation.resources.collectives
    tensors, modules, parameters = collect(model, situation.optimizer_of)
    _check(model, tensors, parameters, is_training=bool(situation.kernels))
    chosen = choose_precision(model, config, precision, parameters)
    tensors = chosen.assign(model, tensors, parameters)
    lists = _choose_lists(situation, tensors, parameters)
    others = _taken_by_others(situation, parameters)
    total = sum(align(spec.numel) * (spec.types.itemsize + _state_itemsize(spec, lists)) for spec in tensors)
    total = -(-total // collectives.world_size)
    room = _room(situation, ledger.limit(Tier.DEVICE), others, ledger.chunk_budget)
    excess = max(total - ledger.limit(Tier.HOST), 0) if total > room.share else 0
    limit, left, least = _agree(model, situation, tensors, [room.limit, max(room.for_homes - excess, 0), -excess])
    # If everything lived on the device, nothing would be evicted: debug_evict_all needs chunks that move.
    fits = total <= room.share and not config.debug_evict_all
    embeddings = _choose_embeddings(model, tensors, situation, config.cpu_embedding, everything_fits=fits)
    choose = functools.partial(_choose_layout, situation, tensors, modules)
    widens = situation.num_micro_batches == 1
    sizes = [left // _COPIES_SHARE, limit] if least < 0 else [limit, left // _COPIES_SHARE]
    options = [(embeddings, size) for size in sizes]
    if embeddings.tensor_indices and not embeddings.is_final:  # if their weights have no room on the host
        moving = _choose_embeddings(model, tensors, situation, False, everything_fits=fits)
        options += [(moving, size) for size in sizes]
    refused: dict[int, BudgetError] = {}  # by what copies may take; -1 if there is a layout, but no homes
    for embeddings, most in options:
        try:
            choice = choose(embeddings.apart, most, fits, others)
        except BudgetError as error:
            refused.setdefault(most, error)
            continue
        nbytes = chunk_bytes(choice.layout.chunks, lists, situation.resources.pool, embeddings)
        workspace = _workspace_nbytes(situation, choice, widens)
        workspaces = workspace, workspace if widens else 0
        try:
            homes = _place(situation, choice, modules, nbytes, room, others, workspaces)
            break
        except BudgetError as error:
            refused.setdefault(-1, error)
            if collectives.world_size > 1:  # each places its own part, and all need the same layout
                raise
    else:
        raise refused.get(-1) or refused[limit]
    device_workspace, usable = workspace if widens else 0, ledger.usable(Tier.DEVICE)

    def need_at(device_nbytes: int, chunk_nbytes: int | None) -> int:
        room = _room(situation, int(device_nbytes * usable), others, chunk_nbytes)
        fits = total <= room.share and not config.debug_evict_all
        if fits and not _can_move_homes(situation):
            return total + device_workspace
        choice = choose(embeddings.apart, room.limit, fits, others)
        return choice.working_set_nbytes + branches_nbytes(choice.layout.chunks)

    ledger.spilled_nbytes = sum(nbytes[index].host_nbytes for index in homes.spilled)
    if not situation.resources.is_metered:
        # Both tiers are the same memory: the compute tier cannot have the bytes that are at home on the host.
        on_host = sum(chunk.host_nbytes for chunk in nbytes if chunk.chunk_index not in homes.device_homed)
        ledger.lower_limit(Tier.DEVICE, max(ledger.limit(Tier.DEVICE) - on_host, choice.working_set_nbytes))
    found = (tensors, parameters, chosen, choice, embeddings, nbytes, homes, workspace, device_workspace)
    return Decisions(*found, need_at, lists, widens, *_choose_depth(situation, choice.layout))


def _place(
    situation: Circumstances,
    choice: ChunkSizeChoice,
    modules: list[ModuleSpec],
    nbytes: list[ChunkBytes],
    room: "_Room",
    others: int,
    workspaces: tuple[int, int],
) -> HomePlan:
    """The homes of the chunks of a layout; ``workspaces`` are the optimizer's, on the host and on the device."""
    ledger, is_alone = situation.resources.ledger, situation.resources.collectives.world_size == 1
    host, for_homes = ledger.limit(Tier.HOST), room.for_homes
    if not situation.resources.is_metered:
        for_homes = min(for_homes, max(room.whole - host, 0))  # both tiers are the same memory
    device, *chunks = ledger.limits(Tier.DEVICE)
    usable = 1 - (UNMEASURED_RESERVE if room.reserve else 0)
    device = dataclasses.replace(device, nbytes=room.whole - room.reserve, usable=usable, taken_nbytes=others)
    return plan_homes(
        nbytes,
        Tiers(host, for_homes, _needs(choice, modules, nbytes, is_alone), *workspaces),
        share_nbytes=room.share,
        gathered_nbytes=0 if is_alone else choice.working_set_nbytes,
        keeps_off=situation.config.debug_evict_all,
        limits=Limits(ledger.limits(Tier.HOST)[0], [device, *chunks], room.reserve),
    )


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


def _choose_depth(situation: Circumstances, layout: Layout) -> tuple[int, str]:
    """How many chunks are loaded ahead, and why."""
    depth = situation.config.prefetch_depth
    if isinstance(depth, int):
        return depth, f"prefetch_depth={depth}: as asked"
    nbytes = [spec.chunk_numel * spec.types.itemsize for spec in layout.chunks]
    return choose_depth(sorted(nbytes)[len(nbytes) // 2] if nbytes else 0, situation.resources.machine)


def _choose_lists(
    situation: Circumstances, tensors: list[TensorSpec], parameters: list[torch.nn.Parameter]
) -> dict[int, tuple[str, ...]]:
    """The lists beside ``param``, by the index of the optimizer."""
    # Without an optimizer masters are kept only where the model could not be restored without them.
    is_restorable = all(
        parameter.dtype is torch_dtype(spec.types.param) for spec, parameter in zip(tensors, parameters, strict=True)
    )
    lists: dict[int, tuple[str, ...]] = {-1: () if is_restorable else (MASTER,)}
    lists[_FROZEN] = (MASTER,) if situation.config.frozen_master else ()
    for number, kernel in enumerate(situation.kernels):
        lists[number] = list_names(kernel, situation.num_micro_batches)
    return lists


def _workspace_nbytes(situation: Circumstances, choice: ChunkSizeChoice, widens: bool) -> int:
    """Bytes of scratch space in which optimizers widen and scale gradients, on each tier where they update chunks."""
    workspace = 0
    for number, kernel in enumerate(situation.kernels):
        own = [spec.chunk_numel for spec in choice.layout.chunks if widened_by(spec, number)]
        workspace += kernel.workspace_numel(max(own, default=0), widens=widens) * torch.float32.itemsize
    return workspace


def collect(
    model: torch.nn.Module,
    optimizer_of: Mapping[int, int],
    find: Callable[[torch.Tensor], Any] = lambda parameter: None,
) -> tuple[list[TensorSpec], list[ModuleSpec], list[torch.nn.Parameter]]:
    """The parameters of a model that can be managed now, with the index of their optimizer; see ``collect_specs``.

    Args:
        model: The model.
        optimizer_of: Which optimizer holds a parameter, by the parameter's identity.
        find: Finds a parameter in this engine, or returns ``None``; parameters of other engines are left out.
    """

    def leave_out(parameter: torch.Tensor) -> bool:
        return is_left_out(parameter) or (isinstance(parameter, LiveMixin) and find(parameter) is None)

    tensors, modules, parameters = collect_specs(model, is_recomputed, leave_out)
    tensors = [
        dataclasses.replace(spec, optimizer_index=optimizer_of.get(id(parameter), -1))
        for spec, parameter in zip(tensors, parameters, strict=True)
    ]
    return tensors, modules, parameters


def _check(
    model: torch.nn.Module, tensors: list[TensorSpec], parameters: list[torch.nn.Parameter], *, is_training: bool
) -> None:
    if any("patrickstar_engine" in root.__dict__ for root in roots_of(model)):
        raise EngineError("an engine is attached to this model already; call its detach() first")
    if is_training and not tensors and any(map(is_left_out, model.parameters())):
        raise EngineError(
            "every parameter of the model is lazy and has no shape yet; run one forward (under torch.no_grad()) before "
            "the model is prepared"
        )
    if is_training and not any(spec.trainable for spec in tensors):
        raise EngineError(
            "the model has no trainable parameter: every requires_grad is False; unfreeze what should be trained"
        )
    check_model(model)
    check_values([spec.name for spec in tensors], parameters)


def list_names(kernel: Kernel, num_micro_batches: int) -> tuple[str, ...]:
    """The lists beside ``param`` of the chunks that a kernel updates.

    Args:
        kernel: The kernel.
        num_micro_batches: Micro-batches per step; more than one are added up in a list of their own.
    """
    return (*kernel.list_names, GRADIENT) if num_micro_batches > 1 else kernel.list_names


def widened_by(spec: ChunkSpec, optimizer_index: int) -> bool:
    """Whether an optimizer updates a chunk and has to widen its gradients."""
    return spec.is_updated and spec.optimizer_index == optimizer_index and spec.types.is_mixed


def lists_of(spec: TensorSpec | ChunkSpec, lists: Mapping[int, tuple[str, ...]]) -> tuple[str, ...]:
    """The lists beside ``param`` that a parameter or chunk has.

    Args:
        spec: The parameter or chunk.
        lists: The lists of chunks by the index of their optimizer; -1 means no optimizer, -2 frozen parameters.
    """
    is_updated = spec.trainable and spec.optimizer_index >= 0
    if not is_updated and not spec.types.is_mixed:
        return ()  # a value is its own master
    return lists[spec.optimizer_index if spec.trainable else _FROZEN]


def _state_itemsize(spec: TensorSpec | ChunkSpec, lists: Mapping[int, tuple[str, ...]]) -> int:
    """Bytes per element of all lists beside ``param``."""
    return spec.types.state_itemsize * len(lists_of(spec, lists))


def _agree(
    model: torch.nn.Module, situation: Circumstances, tensors: list[TensorSpec], limits: list[int]
) -> list[int]:
    """The smallest of each limit of all processes; raises if their models or settings differ."""
    collectives = situation.resources.collectives
    settings = {key: value for key, value in situation.config.to_dict().items() if not key.endswith("_budget")}
    settings["micro_batches"] = situation.num_micro_batches
    parts = {
        "models": [(spec.name, spec.shape, spec.trainable, spec.optimizer_index) for spec in tensors],
        "types of parameters": [(spec.types.param, spec.types.state) for spec in tensors],
        "types before training": [(name, parameter.dtype) for name, parameter in model.named_parameters()],
        "buffers": [(name, _outline(buffer)) for name, buffer in model.named_buffers()],
        "settings": sorted(settings.items()),
        "optimizers": [type(kernel).__name__ for kernel in situation.kernels],
    }
    checksums = [zlib.crc32(repr(part).encode()) for part in parts.values()]
    rows = collectives.exchange([*limits, *checksums], "compares models and settings")
    for place, name in enumerate(parts, len(limits)):
        if len({row[place] for row in rows}) > 1:
            ranks = [rank for rank, row in enumerate(rows) if row[place] != rows[0][place]]
            raise ConfigError(
                f"the processes have different {name}: rank {', '.join(map(str, ranks))} and rank 0; every process "
                "must make the same model, with the same parameters frozen, and be given the same settings"
            )
    return [min(row[place] for row in rows) for place in range(len(limits))]


def _outline(buffer: torch.Tensor) -> tuple[Any, ...]:
    return (buffer.dtype,) if is_lazy(buffer) else (buffer.dtype, buffer.shape)


def _taken_by_others(situation: Circumstances, parameters: list[torch.nn.Parameter]) -> int:
    """Bytes of the device that are in use by others (another model, for example)."""
    if not is_accelerator(situation.resources.device):
        return 0
    taken = situation.resources.ledger.limit(Tier.DEVICE) - situation.resources.ledger.available(Tier.DEVICE)
    own = sum(p.numel() * p.dtype.itemsize for p in parameters if p.device == situation.resources.device)
    return max(taken - own, 0)


def _can_move_homes(situation: Circumstances) -> bool:
    """Whether chunks that live on the device can leave it later."""
    config = situation.config
    return config.placement != "host" and all(kernel.follows_homes for kernel in situation.kernels)


@dataclasses.dataclass(frozen=True, slots=True)
class _Room:
    """Bytes of the device before non-model data is measured.

    Attributes:
        share: For all model data, if all of it is to live there.
        limit: For copies of chunks, at most.
        whole: What others do not hold.
        reserve: What is kept of that for non-model data.
        for_homes: For copies, and chunks at home there because the host has no room for them.
    """

    share: int
    limit: int
    whole: int
    reserve: int
    for_homes: int


def _room(situation: Circumstances, device_nbytes: int, others_nbytes: int, chunk_nbytes: int | None) -> _Room:
    """What the device has room for.

    Args:
        situation: What decisions depend on.
        device_nbytes: Bytes that may be used until non-model data is measured.
        others_nbytes: Bytes that others hold.
        chunk_nbytes: Bytes that chunks may take, or ``None`` for all.
    """
    limit = max(device_nbytes - others_nbytes, 0)
    whole = max(situation.resources.ledger.limit(Tier.DEVICE, cautious=False) - others_nbytes, 0)
    is_metered = situation.resources.is_metered
    share, reserve = (int(limit * UNMEASURED_SHARE), int(whole * UNMEASURED_RESERVE)) if is_metered else (limit, 0)
    chunks = whole if chunk_nbytes is None else chunk_nbytes
    return _Room(min(share, chunks), min(limit, chunks), whole, reserve, min(whole - reserve, chunks))


def _choose_embeddings(
    model: torch.nn.Module,
    tensors: list[TensorSpec],
    situation: Circumstances,
    setting: bool | Literal["auto"],
    everything_fits: bool,
) -> EmbeddingChoice:
    world_size = situation.resources.collectives.world_size
    if world_size > 1:
        if setting is True:
            raise ConfigError(
                f"cpu_embedding=true: with {world_size} processes each has a part of the parameters at home, not all "
                "rows of an embedding; use 'auto' or false"
            )
        reason = f"cpu_embedding={setting}: off, embeddings are gathered with the other parameters"
        return EmbeddingChoice(frozenset(), frozenset(), True, reason)
    owners = frozenset(
        index
        for index, module in enumerate(model.modules())
        if isinstance(module, torch.nn.Embedding) and not any(True for _ in module.buffers())
    )
    return choose_embeddings(tensors, owners, setting, everything_fits)


def _choose_layout(
    situation: Circumstances,
    tensors: list[TensorSpec],
    modules: list[ModuleSpec],
    apart: frozenset[int],
    limit: int,
    everything_fits: bool,
    others: int,
) -> ChunkSizeChoice:
    """The layout for the chunk size of the settings; with ``auto``, the best layout within the limits."""
    config, collectives = situation.config, situation.resources.collectives
    limits, world_size = _limits(situation, others), collectives.world_size

    def staging(chunk_numel: int, name: str) -> int:
        dtype = torch_dtype(name)
        narrow, wide = collectives.staging_numel(chunk_numel, dtype)
        return narrow * dtype.itemsize + wide * torch.float32.itemsize

    itemsize = max((spec.types.itemsize for spec in tensors), default=0)

    def exposed_of(num_chunks: int, chunk_numel: int) -> int:
        return exposed_ns(num_chunks, chunk_numel, itemsize, situation.resources.machine)

    exposed = exposed_of if situation.resources.has_lanes and not everything_fits else None
    splits = world_size > 1 and all(kernel.splits_tensors for kernel in situation.kernels)
    if config.chunk_numel != "auto":
        numel = int(config.chunk_numel)
        return fixed_layout(tensors, modules, numel, limit, apart, limits, world_size, staging, splits)
    if world_size > 1:
        # Whole tensors make the fewest groups. If they waste much, or leave little room, large ones are spread.
        with contextlib.suppress(BudgetError):
            room = int(limit * _WHOLE_SHARE)
            choice = search_layout(tensors, modules, room, apart, limits, world_size, staging, exposed_ns=exposed)
            if not splits or choice.layout.utilisation >= _WELL_USED:
                return choice
    most = None if everything_fits and world_size == 1 else limit
    return search_layout(tensors, modules, most, apart, limits, world_size, staging, splits, exposed)


def _limits(situation: Circumstances, others_nbytes: int) -> list[Limit]:
    """The settings that limit what chunks may take on the device, for errors."""
    ledger, resources = situation.resources.ledger, situation.resources
    device, *chunks = ledger.limits(Tier.DEVICE, cautious=ledger.is_cautious)
    device = dataclasses.replace(
        device,
        nbytes=max(device.nbytes - others_nbytes, 0),
        taken_nbytes=others_nbytes,
        has_others=resources.is_metered,
    )
    return [device, *chunks]


def chunk_bytes(
    specs: Iterable[ChunkSpec],
    lists: Mapping[int, tuple[str, ...]],
    pool: PayloadPool,
    embeddings: EmbeddingChoice,
) -> list[ChunkBytes]:
    """The bytes of chunks over all their lists.

    Args:
        specs: The chunks.
        lists: The lists beside ``param`` of trainable ones, by the index of the optimizer.
        pool: Knows how many bytes a host chunk that moves takes, which may be page-locked.
        embeddings: Which embeddings are looked up on the CPU.
    """
    chunks = []
    for spec in specs:
        nbytes = spec.chunk_numel * spec.types.itemsize
        host = pool.host_nbytes(nbytes, pinned=not spec.on_host)
        stays = bool(embeddings.tensor_indices & set(spec.tensor_indices))
        chunks.append(ChunkBytes(spec.index, nbytes, host, spec.chunk_numel * _state_itemsize(spec, lists), stays))
    return chunks
