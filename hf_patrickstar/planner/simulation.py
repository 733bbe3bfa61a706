"""Simulates a training on a machine that need not be here: decisions, plans, bytes and seconds, from numbers alone.

[Note: one model of a step]
What the user's model does is traced once (``tracing/``). All else follows from numbers, by the functions with which
an engine decides: chunks and homes (``setup/decisions.py``), what each micro-batch visits (``schedule/step.py``), what
moves when (``schedule/move_plan.py``), and how long it takes by the rates of the machine (``schedule/replay.py``). No
engine runs. That an engine does the same, in bytes, loads and order, is a test.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.dist.order import Room
from hf_patrickstar.layout.packing import ChunkSpec, Layout
from hf_patrickstar.layout.specs import GRADIENT, MASTER, SCALES_SUFFIX
from hf_patrickstar.machine import Machine
from hf_patrickstar.membership import holders
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.optim.elementwise import ElementwiseKernel
from hf_patrickstar.optim.kernel import WORKSPACE, Kernel, Means
from hf_patrickstar.optim.torch_kernel import OWN_STATE, make_kernel
from hf_patrickstar.planner.optimizers import keep_embeddings_wide
from hf_patrickstar.planner.simulated_machine import resources_of, settings_for
from hf_patrickstar.report.survey import NON_MODEL, Survey, SurveyedChunk
from hf_patrickstar.runtime import gradient_ring
from hf_patrickstar.runtime.activations import ACTIVATIONS
from hf_patrickstar.runtime.chunk import GRADIENTS, STAGING
from hf_patrickstar.schedule.bounds import ADAM_NBYTES, OTHERS_NBYTES, update_nbytes
from hf_patrickstar.schedule.clock import Timeline
from hf_patrickstar.schedule.estimate import Estimate
from hf_patrickstar.schedule.move_plan import MovePlan, chunkable_nbytes, repeated_plans
from hf_patrickstar.schedule.op_trace import OpTrace
from hf_patrickstar.schedule.pace import seconds_to_first_step
from hf_patrickstar.schedule.placement import Homes, Lookups, plan_lookups
from hf_patrickstar.schedule.replay import replay
from hf_patrickstar.schedule.script import TILE_NUMEL, Entry, HostWork, Load, Reduce, Send, ThreadWork
from hf_patrickstar.schedule.step import Places, StepRules, traces_of, whole_step
from hf_patrickstar.schedule.step_estimate import steps_of
from hf_patrickstar.schedule.trace import KnownTraces, StepKind, Trace, Visit, trace_key
from hf_patrickstar.setup.decisions import Decisions, decide_for, inspect
from hf_patrickstar.setup.homes import ModelNumbers, Situation, lists_of
from hf_patrickstar.tracing.answers import AnsweringMode
from hf_patrickstar.tracing.costs import UpdateCost, cost_of_update
from hf_patrickstar.tracing.fake import FakeTensors
from hf_patrickstar.tracing.garbage_collection import garbage_collection_off
from hf_patrickstar.tracing.kept_traces import computation_of, key_of
from hf_patrickstar.units import align

OpsOf = Callable[[frozenset[str]], OpTrace]
"""Finds what a micro-batch does in which these embeddings are looked up at home, by the name of the weight."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trained:
    """What is trained.

    Attributes:
        make_model: Makes the model; called under fake tensors.
        make_optimizer: Makes an optimizer over parameters, likewise.
        config: Settings of the engine.
        num_micro_batches: Micro-batches of a step.
        max_norm: For clipping; ``None`` for none.
        world_size: How many processes train together, each on a device of the machine.
        keep: Returns what is known of the model, made once for plans of other budgets and machines.
    """

    make_model: Callable[[], torch.nn.Module]
    make_optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
    config: Mapping[str, Any]
    num_micro_batches: int = 1
    max_norm: float | None = 1.0
    world_size: int = 1
    keep: Callable[[Callable[[], "Known"]], "Known"] = lambda make: make()


Known = tuple[ModelNumbers, UpdateCost, list[object]]
"""A model as numbers, what its optimizer costs, and what the model computes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """What a run has chosen by other rates, or in the course of time, in place of what would be chosen.

    Attributes:
        homed: Chunks that are at home on the device.
        lookups: See ``KnownTraces``.
        num_offloaded: How many activations of a micro-batch leave the device.
        streamed: Chunks on the host that are updated on the device.
        disk: Those whose masters and optimizer states are on the disk.
    """

    homed: frozenset[int]
    lookups: Mapping[int, str]
    num_offloaded: int
    streamed: frozenset[int] = frozenset()
    disk: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class Simulation:
    """A step of training by plans, one for each micro-batch: the update of the last one, then forward and backward.

    Attributes:
        script: What the step does beside what its plans move.
        traces: What each micro-batch visits, with the gradients that stay on the device at rest.
        plans: The plan of each.
        loads: What it takes to load each chunk.
        timeline: How it goes on the machine.
        world_size: The number of processes.
        num_parameters: Trainable parameters, of all processes.
        num_all_parameters: Trainable and frozen ones.
        num_on_host: Parameters that this process updates on the host.
        updated_nbytes: Bytes that it reads and writes for that, at least; see ``update_nbytes``.
        layout: Where parameters are.
        survey: Which parameter lives where, what is on the device at each moment, and what was decided.
        host_owners: Bytes of each kind on the host.
        disk_owners: Bytes of each kind on the disk.
        known: The traces, of updates too, for a run of the same training.
        precision: The type of most parameters on the device, without ``torch.``.
        fixed: Bytes of the device that are no copies of chunks, by kind.
        static: Chunks that never move, nor their gradients.
        least_activation_nbytes: See ``Speed``.
        start: See ``Speed``.
    """

    script: tuple[Entry, ...]
    traces: tuple[Trace, ...]
    plans: tuple[MovePlan, ...]
    loads: tuple[Load, ...]
    timeline: Timeline
    world_size: int
    num_parameters: int
    num_all_parameters: int
    num_on_host: int
    updated_nbytes: int
    layout: Layout
    survey: Survey
    host_owners: Mapping[str, int]
    disk_owners: Mapping[str, int]
    known: KnownTraces
    precision: str
    fixed: Mapping[str, int]
    static: frozenset[int]
    least_activation_nbytes: int
    start: Mapping[str, float]

    def _fullest(self) -> tuple[Trace, int, int]:
        """The moment with the most bytes on the device: its trace, its place there, and the bytes of copies then."""
        steps = zip(self.traces, self.plans, strict=True)
        moments = ((made, place, copies) for made, plan in steps for place, copies in enumerate(plan.chunk_nbytes))

        def nbytes(moment: tuple[Trace, int, int]) -> int:
            visit = moment[0].visits[moment[1]]
            return moment[2] + visit.gradient_nbytes + visit.non_model_nbytes

        return max(moments, key=nbytes)

    @property
    def device_owners(self) -> dict[str, int]:
        """Bytes of each kind on the device at the moment with the most bytes."""
        made, place, copies = self._fullest()
        visit = made.visits[place]
        param = self.fixed.get("param", 0) + copies
        return {**self.fixed, "param": param, GRADIENTS: visit.gradient_nbytes, NON_MODEL: visit.non_model_nbytes}

    @property
    def fullest_moment(self) -> str:
        """The moment with the most bytes on the device, as in ``"backward of lm_head"``."""
        made, place, _ = self._fullest()
        part = "forward" if made.forward_ends and place < made.forward_ends[-1] else "backward"
        # A chunk of many small tensors is visited all over the model: the last large one before it says where.
        visited = (self.survey.chunks[visit.chunk_index].parameters for visit in reversed(made.visits[: place + 1]))
        names = [parameters[0][0] for parameters in visited if len(parameters) == 1]
        return f"{part} of {names[0].removesuffix(SCALES_SUFFIX).rpartition('.')[0] or names[0]}" if names else part

    @property
    def host_nbytes(self) -> int:
        """The bytes on the host, scratch space included."""
        return sum(self.host_owners.values())

    def _loaded(self) -> Iterator[Load]:
        """The copies to the device."""
        moments = (actions for plan in self.plans for actions in plan.moments)
        return (self.loads[index] for actions in moments for index in actions.load)

    @property
    def moved_nbytes(self) -> tuple[int, int]:
        """Bytes that cross in a step, to the device and to the host."""
        to_device = sum(load.nbytes for load in self._loaded() if not load.is_here)
        to_host = sum(entry.nbytes for entry in self.script if isinstance(entry, Send))
        for load in self.loads:
            if load.states_nbytes:
                to_device += load.states_nbytes[0] - load.nbytes * (not load.sent_nbytes)
                to_host += load.states_nbytes[1]
        return to_device + self.offloaded_nbytes, to_host + self.offloaded_nbytes

    @property
    def disk_written_nbytes(self) -> int:
        """Bytes of masters and optimizer states that a step writes to the disk, and reads."""
        works = (entry.operators if isinstance(entry, ThreadWork) else (entry,) for entry in self.script)
        return sum(each.disk_nbytes for work in works for each in work if isinstance(each, HostWork)) // 2

    @property
    def offloaded_nbytes(self) -> int:
        """Bytes of activations that leave the device in a step, and come back."""
        return sum(sum(plan.offloaded) for plan in self.plans)

    @property
    def sent_nbytes(self) -> int:
        """Bytes of parameters and gradients that this process sends to others in a step."""
        gathered = sum(load.sent_nbytes for load in self._loaded())
        return gathered + sum(entry.nbytes for entry in self.script if isinstance(entry, Reduce))


def simulate(trained: Trained, machine: Machine, ops_of: OpsOf, ran: Ran | None = None) -> Simulation:
    """Simulates a step of training; see [Note: one model of a step].

    Args:
        trained: What is trained.
        machine: Where; its memory is the budget unless the settings say otherwise.
        ops_of: Finds what a micro-batch does.
        ran: What a run of this training has chosen, whose step is put on the clock of the machine; the settings have
            its ``chunk_numel`` and ``prefetch_depth``.

    Raises:
        ConfigError: If a setting cannot work, or the machine has fewer devices than there are processes.
        BudgetError: If a budget is too small.
    """
    machine.check_processes(trained.world_size)
    return _Simulator(trained, machine).run(ops_of, ran)


def model_data(trained: Trained, machine: Machine) -> tuple[int, int]:
    """Parameters of a model, and bytes of its model data with one process.

    Args:
        trained: What is trained.
        machine: Where; it has room for everything.
    """
    decisions = _Simulator(trained, machine).decisions
    num = sum(spec.num_parameters for spec in decisions.tensors)
    return num, sum(chunk.device_nbytes for chunk in decisions.chunk_nbytes)


class _Simulator:
    """Decides and plans one training, and tells what it comes to."""

    def __init__(self, trained: Trained, machine: Machine) -> None:
        self._trained = trained
        self._machine = machine
        self._config = PatrickStarConfig.from_any({**settings_for(machine), **trained.config, "reuse_plan": False})
        self._resources = resources_of(machine, self._config, trained.world_size)
        numbers, self._cost, self._kernel = self._known()
        situation = Situation(self._config, self._resources, [self._kernel], {}, trained.num_micro_batches)
        self.decisions: Decisions = decide_for(numbers, situation)
        self._layout = self.decisions.choice.layout
        self._places = Places.of(self._layout)

    def _known(self) -> tuple[ModelNumbers, UpdateCost, Kernel]:
        """The model as numbers, what its optimizer costs, and what kernel updates chunks."""
        trained, made = self._trained, list[Kernel]()

        def look() -> Known:
            with FakeTensors(), AnsweringMode():
                model = trained.make_model()
                optimizer = trained.make_optimizer(model.parameters())
                keep_embeddings_wide(optimizer, model)
                kernel = self._kernel_of(optimizer)
                of = holders([optimizer])
                situation = Situation(self._config, self._resources, [kernel], of, trained.num_micro_batches)
                made.append(kernel)
                computation = computation_of(model)
                tile_by_tile = UpdateCost(ADAM_NBYTES, 0.0, 0.0, 1)
                cost = tile_by_tile if isinstance(kernel, ElementwiseKernel) else cost_of_update(optimizer)
                return inspect(model, "no", situation)[0], cost, computation

        numbers, cost, self._computation = trained.keep(look)
        if not made:
            alone = torch.nn.Parameter(torch.tensor([0.0], device="cpu"))
            made.append(self._kernel_of(trained.make_optimizer([alone])))
        return numbers, cost, made[0]

    def _kernel_of(self, optimizer: torch.optim.Optimizer) -> Kernel:
        resources, is_alone = self._resources, self._trained.world_size == 1
        return make_kernel(optimizer, Means(resources.pool, resources.has_lanes, is_alone, self._config.state_dtype))

    def run(self, ops_of: OpsOf, ran: Ran | None) -> Simulation:
        if ran is not None:
            ops, traces, _ = self._looked_up_by(ops_of, ran.lookups, ran.homed)
            known = self._known_traces(traces, ran.lookups).offloading(ran.num_offloaded)
            estimate = self.decisions.estimate(known)
            with garbage_collection_off():  # a plan is some hundred thousand small objects, none of which is garbage
                return self._planned(ops, known, estimate, Homes(ran.homed, streamed=ran.streamed, disk=ran.disk), [])
        ops, traces, lookups, reasons = self._looked_up(ops_of, self.decisions.homes.device)
        with garbage_collection_off():  # a plan is some hundred thousand small objects, none of which is garbage
            known = self._known_traces(traces, lookups)
            decisions, offloading = self.decisions.with_tide(known)
            estimate = decisions.estimate(offloading)
            homes = estimate.settled(decisions.homes)
            reasons = [*decisions.reasons.values(), *reasons, *homes.reasons.values()]
            simulation = self._planned(ops, offloading, estimate, homes, reasons)
        return dataclasses.replace(simulation, known=known)  # of which an engine decides anew

    def _known_traces(self, traces: Sequence[Trace], lookups: Mapping[int, str]) -> KnownTraces:
        key = key_of(self._computation, self.decisions)
        return KnownTraces(key, {made.key: made for made in (*traces, self._update_trace(traces[0], lookups))}, lookups)

    # Decisions

    def _looked_up(
        self, ops_of: OpsOf, homed: frozenset[int]
    ) -> tuple[OpTrace, Sequence[Trace], dict[int, str], list[str]]:
        """What micro-batches do and visit, and where embeddings are looked up for which that was to be decided."""
        decisions, chunk_of = self.decisions, self._places.chunk_of
        ops, traces, asked = self._looked_up_by(ops_of, {}, homed)
        if decisions.embeddings.is_final or not asked:
            return ops, traces, {}, []
        known = self._known_traces(traces, {})
        room = decisions.estimate(known).room_beside(homed)
        of_tensors = {}
        for index, nbytes in ops.looked_up_nbytes().items():
            size = decisions.chunk_nbytes[chunk_of[index]].param_nbytes
            of_tensors[index] = Lookups(size, nbytes, decisions.tensors[index].trainable)
        lookups, reason = plan_lookups(of_tensors, self._resources.machine, room)
        if any(place == "device" for place in lookups.values()):
            ops, traces, _ = self._looked_up_by(ops_of, lookups, homed)
        return ops, traces, lookups, [reason]

    def _looked_up_by(
        self, ops_of: OpsOf, lookups: Mapping[int, str], homed: frozenset[int]
    ) -> tuple[OpTrace, Sequence[Trace], list[int]]:
        """What micro-batches do and visit with these lookups, and which embeddings are looked up on the host."""
        asked = self.decisions.looked_up(lookups, homed)
        ops = ops_of(frozenset(self.decisions.tensors[index].name for index in asked))
        return ops, traces_of(ops, self._places, self._rules(Homes(frozenset()))), asked

    def _rules(self, homes: Homes) -> StepRules:
        resources, chunks = self._resources, self._layout.chunks
        updated = [spec for spec in chunks if spec.is_updated and spec.index not in homes.streamed - homes.disk]
        return StepRules(
            num_micro_batches=self._trained.num_micro_batches,
            in_flight_nbytes=resources.streams.most_in_flight_nbytes,
            overlaps_reduction=resources.collectives.is_asynchronous,
            widens_sums=self._config.reduce_dtype == "fp32" and self._machine.has_accelerator,
            has_norms=self._trained.max_norm is not None,
            device_homed=homes.device,
            updates={spec.index: self._update_work(spec, homes) for spec in updated},
            overlaps_update=self._config.overlap_optimizer and resources.has_lanes and self._kernel.runs_beside,
        )

    def _update_work(self, spec: ChunkSpec, homes: Homes) -> HostWork:
        calls, each, disk_nbytes = 1, self._cost.nbytes, 0
        if isinstance(self._kernel, ElementwiseKernel):
            if spec.index in homes.disk:  # whole tiles, up to the last parameter
                last = spec.tensor_indices[-1]
                end = self._layout.placements[last].offset_numel + self.decisions.tensors[last].numel
                numel = min(align(end, TILE_NUMEL), spec.chunk_numel)
                disk_nbytes = 2 * sum(spec.types.list_nbytes(name, numel) for name in self._lists_on_disk(spec))
            if spec.index in homes.streamed:
                return HostWork("update", 0, 0, calls, disk_nbytes)
            each = ADAM_NBYTES if spec.index in homes.device else update_nbytes(spec.types, self._kernel.num_states)
        else:  # each gradient is widened and clipped by itself, too
            calls = self._cost.num_calls + (self._trained.max_norm is not None) + (spec.types.param != spec.types.state)
            calls *= sum(1 for index in spec.tensor_indices if self._places.own_numel[index])
        return HostWork("update", 0, round(each * self._own_numel(spec.index)), calls, disk_nbytes)

    def _lists_on_disk(self, spec: ChunkSpec) -> list[str]:
        """The lists of a chunk that may be on the disk."""
        return [name for name in lists_of(spec, self.decisions.lists) if name != GRADIENT]

    def _own_numel(self, chunk_index: int) -> int:
        """Elements of the parameters of a chunk that this process has at home."""
        return sum(self._places.own_numel[index] for index in self._layout.chunks[chunk_index].tensor_indices)

    def _update_trace(self, made: Trace, lookups: Mapping[int, str]) -> Trace:
        """What an update takes on the device beside chunks, in the order in which forward comes to them."""
        chunks, looked_up = self._layout.chunks, self.decisions.looked_up(lookups, self.decisions.homes.device)
        first = [self._places.chunk_of[index] for index in sorted(looked_up)]
        order = dict.fromkeys([*first, *made.visited, *(spec.index for spec in chunks)])
        updated = [chunks[index] for index in order if chunks[index].is_updated]
        taken = self._cost.temporary_nbytes
        visits = tuple(Visit(spec.index, non_model_nbytes=round(taken * spec.chunk_numel)) for spec in updated)
        return Trace(trace_key(StepKind.UPDATE, ()), made.chunk_nbytes, visits)

    # Plans

    def _planned(
        self, ops: OpTrace, known: KnownTraces, estimate: Estimate, homes: Homes, reasons: list[str]
    ) -> Simulation:
        trained, tensors, layout = self._trained, self.decisions.tensors, self._layout
        homed, streamed = homes.device, homes.streamed
        (traces,) = steps_of(known.traces.values(), trained.num_micro_batches)
        offloaded = max(trace.offloaded_nbytes for trace in traces)
        slots_nbytes = self.decisions.slots_nbytes[homes.tile_part] * bool(streamed)
        fixed, static = self._fixed(homes, Tier.DEVICE, slots_nbytes), homed if trained.world_size == 1 else frozenset()
        free, most = estimate.device_nbytes - sum(fixed.values()), self._resources.ledger.chunk_budget
        most = None if most is None else most - sum(fixed.values())
        plans = repeated_plans(
            traces,
            [chunkable_nbytes(made, free, most) for made in traces],
            self._config.eviction,
            dropped_after=estimate.updated,
            static=static,
            prefetch_depth=0 if self._config.debug_evict_all else self.decisions.prefetch_depth,
            reshard_after_forward=self._config.reshard_after_forward and trained.world_size > 1,
        )
        script = whole_step(ops, self._places, self._rules(homes), [made.kind for made in traces])
        loads = tuple(estimate.loads(homed, streamed, homes.tile_part))
        on_host = [spec for spec in layout.chunks if spec.is_updated and spec.index not in homed | streamed]
        num_on_host = sum(self._own_numel(spec.index) for spec in on_host)
        updated = sum(self._update_work(spec, homes).nbytes for spec in on_host)
        may_offload = self._config.activation_offload is not False
        fewest = [made.offloading(len(made.activations)) if may_offload else made for made in traces]
        timeline = replay(script, plans, loads, self._machine)
        if len(static) == len(layout.chunks) and not (offloaded or self._config.debug_evict_all):
            gradients = [self._own_numel(s.index) * s.types.itemsize * s.trainable for s in layout.chunks]
            resting = [made.at_rest(gradients) for made in traces]
            if max(made.peak_nbytes for made in resting) <= free:
                traces = resting
                reasons = [*reasons, "nothing has to move: gradients stay in place, and modules have no hooks"]
        first, step_s = self.decisions.homes.device, timeline.duration_ns / 1e9
        sizes, lists = self.decisions.chunk_nbytes, self.decisions.lists
        masters = [s.types.list_nbytes(MASTER, s.chunk_numel * (MASTER in lists_of(s, lists))) for s in layout.chunks]
        return Simulation(
            script=script,
            traces=tuple(traces),
            plans=tuple(plans),
            loads=loads,
            timeline=timeline,
            world_size=trained.world_size,
            num_parameters=sum(spec.numel for spec in tensors if spec.trainable),
            num_all_parameters=sum(spec.num_parameters for spec in tensors),
            num_on_host=num_on_host,
            updated_nbytes=updated if isinstance(self._kernel, ElementwiseKernel) else OTHERS_NBYTES * num_on_host,
            layout=layout,
            survey=self._survey(traces, plans, homes, free, reasons),
            host_owners=self._fixed(homes, Tier.HOST) | ({ACTIVATIONS: offloaded} if offloaded else {}),
            disk_owners=self._on_disk(homes.disk),
            known=known,
            precision=str(self.decisions.precision.dtype).removeprefix("torch."),
            fixed=fixed,
            static=static,
            least_activation_nbytes=max(made.non_model_peak_nbytes for made in fewest),
            start=seconds_to_first_step(sizes, masters, first, homed, self._machine, step_s),
        )

    # Bytes

    def _on_disk(self, disk: frozenset[int]) -> dict[str, int]:
        """Bytes on the disk, by owner."""
        nbytes = collections.Counter[str]()
        for spec in (spec for spec in self._layout.chunks if spec.index in disk):
            nbytes.update({name: spec.types.list_nbytes(name, spec.chunk_numel) for name in self._lists_on_disk(spec)})
        return dict(nbytes)

    def _fixed(self, homes: Homes, tier: Tier, slots_nbytes: int = 0) -> dict[str, int]:
        """Bytes on the device or the host that do not change in a step, by owner."""
        decisions = self.decisions
        nbytes: dict[str, int] = {}
        at_home = [spec for spec in self._layout.chunks if (spec.index in homes.device) is (tier is Tier.DEVICE)]
        for spec in at_home:
            size = decisions.chunk_nbytes[spec.index]
            param = size.param_nbytes if tier is Tier.DEVICE else size.host_param_nbytes
            nbytes["param"] = nbytes.get("param", 0) + param
            gone = self._lists_on_disk(spec) if spec.index in homes.disk else ()
            for name in [name for name in lists_of(spec, decisions.lists) if name not in gone]:
                nbytes[name] = nbytes.get(name, 0) + spec.types.list_nbytes(name, spec.chunk_numel)
        updates = any(spec.is_updated for spec in at_home)
        workspace = decisions.workspace_nbytes if tier is Tier.HOST else decisions.device_workspace_nbytes
        if workspace := workspace * updates + slots_nbytes:
            nbytes[WORKSPACE] = workspace
        own = self._cost.state_nbytes * sum(self._own_numel(spec.index) for spec in at_home if spec.is_updated)
        if own:
            nbytes[OWN_STATE] = round(own)
        if tier is Tier.DEVICE:
            staging = decisions.staging_nbytes(self._resources.collectives)
            nbytes.update({STAGING: staging} if staging else {})
        elif updates and self._trained.num_micro_batches > 1 and self._machine.has_accelerator:
            # What gradients leave through on their way to lists.
            trainable = [spec for spec in self._layout.chunks if spec.trainable]
            lists = sum(spec.types.list_nbytes(GRADIENT, spec.chunk_numel) for spec in trainable)
            free = self._resources.ledger.limit(Tier.HOST) - sum(nbytes.values())
            nbytes[gradient_ring.OWNER] = gradient_ring.planned_nbytes(lists, free)
        return nbytes

    def _survey(
        self, traces: list[Trace], plans: list[MovePlan], homes: Homes, free: int, reasons: list[str]
    ) -> Survey:
        ledger, decisions = self._resources.ledger, self.decisions
        by_kind = {made.kind: (made, plan, Room(free, None, 0, ())) for made, plan in zip(traces, plans, strict=True)}
        chunks = []
        for spec in self._layout.chunks:
            home, size = Tier.DEVICE if spec.index in homes.device else Tier.HOST, decisions.chunk_nbytes[spec.index]
            tensors = [decisions.tensors[index] for index in spec.tensor_indices]
            nbytes = size.param_nbytes, size.state_nbytes, size.list_nbytes * (spec.index in homes.disk)
            chunks.append(SurveyedChunk.of(spec, home, nbytes, tensors))
        return Survey.of(chunks, ledger, by_kind.values(), reasons)
