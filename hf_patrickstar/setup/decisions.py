"""All that is decided about a model before anything is allocated: types, layout, homes. Numbers only."""

import dataclasses
import functools
import logging
import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.dist.order import Order
from hf_patrickstar.errors import BudgetError, ConfigError, EngineError
from hf_patrickstar.layout.chunk_size import staged_nbytes
from hf_patrickstar.layout.packing import Layout, Outline
from hf_patrickstar.layout.specs import GRADIENT, MASTER, ModuleSpec, TensorSpec, collect_specs
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.model.admission import check_model, check_values, is_left_out, is_recomputed
from hf_patrickstar.model.live_parameter import LiveMixin
from hf_patrickstar.model.quantized import parameters_of
from hf_patrickstar.optim.kernel import Kernel
from hf_patrickstar.runtime.chunk import torch_dtype
from hf_patrickstar.schedule.estimate import Estimate
from hf_patrickstar.schedule.margin import StepCost
from hf_patrickstar.schedule.offload import describe_offload
from hf_patrickstar.schedule.pace import choose_depth
from hf_patrickstar.schedule.step import Places
from hf_patrickstar.schedule.step_estimate import ChunkWork
from hf_patrickstar.schedule.trace import KnownTraces
from hf_patrickstar.setup.homes import FROZEN, Arrangement, Arranger, ModelNumbers, Situation, staging_nbytes
from hf_patrickstar.setup.precision import Precision, choose_precision
from hf_patrickstar.units import describe_wear, format_count, format_nbytes, format_seconds

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Decisions(Arrangement):
    """The decisions for a model; see ``Arrangement``.

    Attributes:
        tensors: One spec per parameter, in model order.
        precision: The types of parameters, and the type that forward computes in.
        lists: The lists that chunks have beside ``param``, by the index of their optimizer; see ``lists_of``.
        prefetch_depth: How many chunks are loaded ahead.
        depth_reason: Why.
        numbers: The model.
        situation: What the decisions depended on.
        parameters: The parameters, in the order of ``tensors``; none where a model is numbers alone.
        offload_reason: How many activations leave the device between forward and backward, and why; empty if nothing is
            known of a step.
    """

    tensors: list[TensorSpec]
    precision: Precision
    lists: dict[int, tuple[str, ...]]
    prefetch_depth: int
    depth_reason: str
    numbers: ModelNumbers
    situation: Situation
    parameters: list[torch.nn.Parameter] = dataclasses.field(default_factory=list)
    offload_reason: str = ""

    @property
    def reasons(self) -> dict[str, str]:
        """What was decided about the model, a sentence each, by what it is about."""
        reasons = {
            "types": self.precision.describe(self.tensors),
            "chunks": self.choice.describe(),
            **self.homes.reasons,
            "embeddings": self.embeddings.reason,
            "depth": self.depth_reason,
            "activations": self.offload_reason,
        }
        return {name: reason for name, reason in reasons.items() if reason}

    def staging_nbytes(self, collectives: Collectives) -> int:
        """Bytes of the device in which slices of gradients of other processes arrive, for each type.

        Args:
            collectives: Reduce gradients.
        """
        largest = Outline.of(self.choice.layout.chunks).largest
        return staged_nbytes(largest, functools.partial(staging_nbytes, collectives))

    def with_tide(self, known: KnownTraces) -> tuple["Decisions", KnownTraces]:
        """These decisions, with the homes and the activations that fit what a step needs at each moment.

        Args:
            known: Traces of a plan; without those of a training nothing changes.

        Returns:
            The decisions, and the traces with the activations that leave.
        """
        num, most, why, estimate = 0, 2**31, "", self.estimate(known)
        if estimate.has_training:
            num, most, why = estimate.choose_offload(self.homes, are_made=False)
        num = Order(self.situation.resources.collectives).agree_on_offload(num, most)
        known = known.offloading(num)
        reason = describe_offload(estimate.traces, num, estimate.offload, why) if why else ""
        homes = self.homes
        try:
            homes = estimate.offloading(num).with_disk(homes, are_made=False).first(homes)
        except BudgetError as error:  # no refusal: nobody knows whether inputs will be as large
            logger.info("patrickstar: a step with inputs as large as those that were planned has no room: %s", error)
        if homes.margin != self.homes.margin:
            nbytes = sum(self.chunk_nbytes[index].host_nbytes for index in homes.margin)
            self.situation.resources.ledger.spilled_nbytes = nbytes
        chunks = [dataclasses.replace(chunk, is_on_disk=chunk.chunk_index in homes.disk) for chunk in self.chunk_nbytes]
        return dataclasses.replace(self, homes=homes, chunk_nbytes=chunks, offload_reason=reason), known

    def estimate(self, known: KnownTraces) -> Estimate:
        """What is known of a step before chunks are allocated.

        Args:
            known: Traces of it.
        """
        situation = self.situation
        config, resources, kernels = situation.config, situation.resources, situation.kernels
        chunks, has_lanes = self.choice.layout.chunks, resources.has_lanes
        looked_up = self.looked_up(known.lookups, self.homes.device)
        own_numel = Places.of(self.choice.layout, resources.collectives.rank).own_numel
        own = [[(self.tensors[index], own_numel[index]) for index in spec.tensor_indices] for spec in chunks]
        return Estimate(
            traces=[*known.traces.values()],
            num_micro_batches=situation.num_micro_batches,
            nbytes=self.chunk_nbytes,
            works=[ChunkWork.of(spec, tensors, looked_up) for spec, tensors in zip(chunks, own, strict=True)],
            updated=frozenset(spec.index for spec in chunks if spec.is_updated),
            has_groups=resources.collectives.world_size > 1,
            host_nbytes=resources.ledger.limit(Tier.HOST),
            device_nbytes=resources.ledger.limit(Tier.DEVICE, cautious=False),
            chunk_nbytes=resources.ledger.chunk_budget,
            workspace_nbytes=self.device_workspace_nbytes
            + self.staging_nbytes(resources.collectives)
            + self.slots_nbytes[1] * (config.updates == "device"),
            host_workspace_nbytes=self.workspace_nbytes,
            prefetch_depth=self.prefetch_depth,
            policy=config.eviction,
            machine=resources.machine,
            has_lanes=has_lanes,
            overlaps_update=has_lanes and config.overlap_optimizer and all(kernel.runs_beside for kernel in kernels),
            offload=config.activation_offload,
            moves_homes=situation.can_move_homes,
            updates=config.updates,
            streaming=frozenset(number for number, kernel in enumerate(kernels) if kernel.can_stream),
            slots_nbytes=self.slots_nbytes,
            disk_nbytes=resources.ledger.limit(Tier.DISK),
        )

    def looked_up(self, lookups: Mapping[int, str], homed: Container[int]) -> list[int]:
        """Embeddings that are looked up on the host, where their chunks are at home, by tensor index.

        Args:
            lookups: Where they are looked up for which that was to be decided; see ``KnownTraces``.
            homed: Chunks that are at home on the device.
        """
        chosen = {} if self.embeddings.is_final else lookups
        asked = [index for index in self.embeddings.tensor_indices if chosen.get(index) != "device"]
        return [index for index in asked if self.choice.layout.placements[index].chunk_index not in homed]

    def expected(self, estimate: Estimate, estimated: StepCost | None) -> str:
        """What this process will need for model data, and for a step, in one line.

        Args:
            estimate: What is known of a step: with traces, of activations.
            estimated: What a step will cost, if that is known.
        """
        ledger = self.situation.resources.ledger
        num = sum(spec.num_parameters for spec in self.tensors)
        num_trained = sum(spec.num_parameters for spec in self.tensors if spec.trainable)
        on_host, on_device = map(self.at_home_nbytes, (Tier.HOST, Tier.DEVICE))
        limits = [limit.nbytes for limit in ledger.limits(Tier.DEVICE)]
        words, room, parts, time, short, disk = "beside activations", min(limits), "", "", "", ""
        homed = self.homes.device
        if estimate.has_training:
            if estimate.room_beside(homed) < 0 and estimate.moves_homes:
                homed = frozenset(self.homes.margin)
            activations, chunks = estimate.fullest(homed)
            on_host += sum(self.chunk_nbytes[index].host_nbytes for index in self.homes.device - homed)
            words, room, on_device = "with activations", limits[0], activations + chunks
            parts = f" ({format_nbytes(activations)} of activations and {format_nbytes(chunks)} of chunks)"
            if on_device > room:  # no refusal: nobody knows whether inputs will be as large
                short = ", too little for inputs of the planned size"
        elif on_host:
            on_device += self.choice.working_set_nbytes
        on_host += self.workspace_nbytes if on_host else 0
        if on_disk := sum(chunk.disk_nbytes for chunk in self.chunk_nbytes):
            wear = "" if estimated is None else f" ({describe_wear(on_disk, estimated.seconds)})"
            disk = f"{format_nbytes(on_disk)} of {format_nbytes(ledger.limit(Tier.DISK))} on the disk{wear}, "
        if estimated is not None:
            name = self.situation.resources.machine.name
            time = f", and about {format_seconds(estimated.seconds)} per step by the rates of '{name}'"
        return (
            f"{format_count(num)} parameters ({format_count(num_trained)} trained): model data takes "
            f"{format_nbytes(on_host)} of {format_nbytes(ledger.limit(Tier.HOST))} on the host, {disk}and on the "
            f"device, {words}, {format_nbytes(on_device)} of {format_nbytes(room)}{parts}{short}{time}"
        )

    def explain(self) -> None:
        """Logs one line per decision that ``auto`` made."""
        config, resources, ledger = self.situation.config, self.situation.resources, self.situation.resources.ledger
        for reason in self.reasons.values():
            logger.info("patrickstar: %s", reason)
        if config.debug_evict_all and len(self.chunk_nbytes) - len(self.homes.device) < 2:
            logger.warning("patrickstar: debug_evict_all has nothing to evict: %s", *self.homes.reasons.values())
        pinned = "are pinned" if resources.pool.pins_memory else "are not pinned"
        logger.info("patrickstar: pin_memory=%s: host chunks %s", config.pin_memory, pinned)
        for tier, setting in ((Tier.DEVICE, config.device_budget), (Tier.HOST, config.host_budget)):
            budget, usable = format_nbytes(ledger.budget(tier)), format_nbytes(ledger.limit(tier))
            whose = "auto: what is available" if setting == "auto" else "as asked"
            logger.info("patrickstar: %s_budget %s (%s), %s of it usable", tier.value, budget, whose, usable)
        if resources.collectives.world_size > 1:
            machine, world_size = resources.machine, resources.collectives.world_size
            sent = ((world_size - 1) * spec.chunk_numel * spec.types.itemsize for spec in self.choice.layout.chunks)
            groups = "leave after forward" if config.reshard_after_forward else "stay while there is room"
            text = (
                f"{world_size} processes, each with its part of every list; reshard_after_forward="
                f"{config.reshard_after_forward}: groups {groups}; by the rates of '{machine.name}' it takes "
                f"{sum(map(machine.collective_ns, sent)) / 1e6:.2f} ms to gather all of them once more"
            )
            logger.info("patrickstar: %s", text)


def inspect(
    model: torch.nn.Module, precision: str, situation: Situation
) -> tuple[ModelNumbers, list[torch.nn.Parameter]]:
    """What decisions depend on of a model, and its parameters; see ``needs.decide``.

    Of the situation, only the settings of types, the optimizers, whether there is one at all, and what is in use on an
    accelerator matter.
    """
    tensors, modules, parameters = collect(model, situation.optimizer_of)
    _check(model, tensors, parameters, is_training=bool(situation.kernels))
    chosen = choose_precision(model, situation.config, precision, parameters)
    tensors = with_state_types(chosen.assign(model, tensors, parameters), parameters, situation.kernels)
    embeddings = frozenset(
        index
        for index, module in enumerate(model.modules())
        if isinstance(module, torch.nn.Embedding) and not any(True for _ in module.buffers())
    )
    is_restorable = all(
        parameter.dtype is torch_dtype(spec.types.param) for spec, parameter in zip(tensors, parameters, strict=True)
    )
    outlines = {
        "types before training": [(name, parameter.dtype) for name, parameter in model.named_parameters()],
        "buffers": [(name, _outline(buffer)) for name, buffer in model.named_buffers()],
    }
    in_use_nbytes = situation.nbytes_in_use(parameters)
    return ModelNumbers(tensors, modules, chosen, is_restorable, embeddings, outlines, in_use_nbytes), parameters


def with_state_types(
    specs: Sequence[TensorSpec], parameters: Sequence[torch.nn.Parameter], kernels: Sequence[Kernel]
) -> list[TensorSpec]:
    """Gives parameters the types in which their optimizers keep states.

    Args:
        specs: The specs of the parameters, which have all other types.
        parameters: The parameters, in the same order.
        kernels: The kernels of the optimizers.
    """
    found = []
    for spec, parameter in zip(specs, parameters, strict=True):
        is_updated = spec.trainable and spec.optimizer_index >= 0
        states = kernels[spec.optimizer_index].state_type(parameter, spec.numel) if is_updated else ""
        found.append(dataclasses.replace(spec, types=dataclasses.replace(spec.types, states=states)))
    return found


def decide_for(
    numbers: ModelNumbers, situation: Situation, agree: Callable[[list[int]], list[int]] | None = None
) -> Decisions:
    """Decides layout and homes, from numbers alone; see ``needs.decide``.

    Args:
        numbers: The model.
        situation: What decisions depend on.
        agree: Returns the smallest of each limit of all processes; by default it asks them.
    """
    ledger, tensors = situation.resources.ledger, numbers.tensors
    lists = _choose_lists(situation, is_restorable=numbers.is_restorable)
    found = Arranger(numbers, lists, situation).arrange(agree or functools.partial(_agree, numbers, situation))
    ledger.spilled_nbytes = sum(found.chunk_nbytes[index].host_nbytes for index in found.homes.margin)
    if not situation.resources.is_metered:
        # Both tiers are the same memory: the compute tier cannot have the bytes that are at home on the host.
        on_host = found.at_home_nbytes(Tier.HOST)
        ledger.lower_limit(Tier.DEVICE, max(ledger.limit(Tier.DEVICE) - on_host, found.choice.working_set_nbytes))
    depth, depth_reason = _choose_depth(situation, found.choice.layout)
    return Decisions(
        **{field.name: getattr(found, field.name) for field in dataclasses.fields(found)},
        tensors=tensors,
        precision=numbers.precision,
        lists=lists,
        prefetch_depth=depth,
        depth_reason=depth_reason,
        numbers=numbers,
        situation=situation,
    )


def _choose_depth(situation: Situation, layout: Layout) -> tuple[int, str]:
    """How many chunks are loaded ahead, and why."""
    depth = situation.config.prefetch_depth
    if isinstance(depth, int):
        return depth, f"prefetch_depth={depth}: as asked"
    nbytes = [spec.chunk_numel * spec.types.itemsize for spec in layout.chunks]
    return choose_depth(sorted(nbytes)[len(nbytes) // 2] if nbytes else 0, situation.resources.machine)


def _choose_lists(situation: Situation, *, is_restorable: bool) -> dict[int, tuple[str, ...]]:
    """The lists beside ``param``, by the index of the optimizer."""
    # Without an optimizer masters are kept only where the model could not be restored without them.
    lists: dict[int, tuple[str, ...]] = {-1: () if is_restorable else (MASTER,)}
    lists[FROZEN] = (MASTER,) if situation.config.frozen_master else ()
    for number, kernel in enumerate(situation.kernels):
        lists[number] = list_names(kernel, situation.num_micro_batches)
    return lists


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

    tensors, modules, parameters = collect_specs(model, is_recomputed, leave_out, parameters_of)
    tensors = [
        dataclasses.replace(spec, optimizer_index=optimizer_of.get(id(parameter), -1))
        for spec, parameter in zip(tensors, parameters, strict=True)
    ]
    return tensors, modules, parameters


def _check(
    model: torch.nn.Module, tensors: list[TensorSpec], parameters: list[torch.nn.Parameter], *, is_training: bool
) -> None:
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


def _agree(numbers: ModelNumbers, situation: Situation, limits: list[int]) -> list[int]:
    """The smallest of each limit of all processes; raises if their models or settings differ."""
    collectives, tensors = situation.resources.collectives, numbers.tensors
    settings = {key: value for key, value in situation.config.to_dict().items() if not key.endswith("_budget")}
    settings["micro_batches"] = situation.num_micro_batches
    parts = {
        "models": [(spec.name, spec.shape, spec.trainable, spec.optimizer_index) for spec in tensors],
        "types of parameters": [dataclasses.astuple(spec.types) for spec in tensors],
        **numbers.outlines,
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
