"""Plans a training: simulates a step of it, and says what that takes."""

import contextlib
import dataclasses
import functools
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from hf_patrickstar.checkpoint.progress import no_bars
from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.errors import BudgetError, ConfigError, EngineError, PatrickStarError, TraceError
from hf_patrickstar.machine import Machine, find_machine
from hf_patrickstar.memory.operators import without_modes
from hf_patrickstar.memory.tiers import DEVICE_SHARE, HOST_SHARE, Tier
from hf_patrickstar.planner.local_machine import measure_launched, seconds_of_a_visit, threads_of_each
from hf_patrickstar.planner.optimizers import find_optimizer, optimizer_name
from hf_patrickstar.planner.simulation import OpsOf, Simulation, Trained, model_data, simulate
from hf_patrickstar.planner.subject import Subject, find_subject
from hf_patrickstar.planner.training_plan import Chunks, Plan, Speed, TierUse
from hf_patrickstar.report.measure import measure_machine
from hf_patrickstar.schedule.bounds import ADAM, bounds_of
from hf_patrickstar.schedule.clock import Lane
from hf_patrickstar.schedule.op_trace import OpTrace
from hf_patrickstar.schedule.trace import KnownTraces
from hf_patrickstar.setup.needs import PLENTY_NBYTES, least_budgets
from hf_patrickstar.tracing.attention import fused_attention, masks_of_batches
from hf_patrickstar.tracing.fake import FakeTensors
from hf_patrickstar.tracing.kept_traces import keep_traces
from hf_patrickstar.tracing.micro_batch import MicroBatch, trace
from hf_patrickstar.tracing.recorder import Setting
from hf_patrickstar.tracing.timing import OperatorTimes
from hf_patrickstar.units import format_budget, format_nbytes, name_budget, parse_budget

BESIDE = "other modules"
"""The kind of bytes on the device that modules beside the model take."""
THIS = "this"
"""The machine at hand, which is measured."""
_CHUNKS = "chunk_budget"
_OF_CHUNKS = {
    *("chunk_numel", "device_budget", "host_budget", "chunk_budget", "placement", "cpu_embedding", "eviction"),
    *("prefetch_depth", "overlap_optimizer", "reshard_after_forward", "host_threads", "machine"),
    *("activation_offload",),
}
"""Settings that do not change what torch tells an engine."""
_LOGGERS = {
    **dict.fromkeys(("hf_patrickstar", "bitsandbytes"), logging.ERROR),
    "torch._subclasses.fake_tensor": logging.CRITICAL,
}
"""Who says less while a step is recorded; torch would log the traceback of an error that is told in a sentence."""


@dataclasses.dataclass(frozen=True)
class TrainingSetup:
    """How a model is trained.

    Attributes:
        machine: Where; its memory is what training may take.
        num_micro_batches: Micro-batches of a step.
        world_size: Processes, each on a device of the machine.
        optimizer: See ``find_optimizer``.
        max_norm: Gradients are clipped to this norm; ``None`` for no clipping.
        settings: Settings of the engine.
        times: What operators take, if the machine is the one at hand; else its rates say it.
        beside_nbytes: Bytes of the device that other modules than the model take, a teacher's say.
    """

    machine: Machine
    num_micro_batches: int = 1
    world_size: int = 1
    optimizer: str = "adamw"
    max_norm: float | None = 1.0
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    times: OperatorTimes | None = dataclasses.field(default=None, repr=False)
    beside_nbytes: int = 0

    def computes_in_type(self, machine: Machine) -> bool:
        """Whether a device has a rate for the 16-bit type that is asked for.

        Args:
            machine: Has the device.
        """
        return self.settings.get("dtype") != "bf16" or "bfloat16" in machine.flops


_NOT_COMPUTED = (
    "'{}' has no rate for bfloat16, as devices that do not compute in it; times are by the rate of another type. "
    "Use fp16 there"
)


def plan_for_runs(subject: Subject, training: TrainingSetup) -> tuple[Plan, Simulation | None]:
    """Plans as ``plan_and_simulate`` does, and keeps the traces, which runs of the same training follow."""
    plan, simulation = plan_and_simulate(subject, training)
    if simulation is not None:
        keep_traces(_also_without_mask(simulation.known, subject))
    return plan, simulation


def _also_without_mask(known: KnownTraces, subject: Subject) -> KnownTraces:
    """Traces for runs, too, whose data collator makes no mask of attention where nothing is masked.

    A model needs no more memory then. It may where ``position_ids`` say where sequences begin: without a mask it looks.
    """
    known = dataclasses.replace(known, has_padding=subject.has_padding)
    inputs = subject.make_inputs()
    names = [name for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.dim()]
    if subject.has_padding or "attention_mask" not in names or "position_ids" in names:
        return known
    place = names.index("attention_mask")
    without = {key: made.without_input(place) for key, made in known.traces.items() if made.kind.is_training}
    return dataclasses.replace(known, traces={**known.traces, **without})


def arrange(
    model: str | PretrainedConfig,
    machine: str | Machine,
    *,
    num_micro_batches: int = 1,
    world_size: int = 1,
    dtype: str = "bf16",
    optimizer: str = "adamw",
    max_norm: float | None = 1.0,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    host_cores: int | None = None,
    disk_memory: int | str | None = None,
    settings: Mapping[str, Any] | None = None,
    **of_model: Any,
) -> tuple[Subject, TrainingSetup]:
    """Finds the model and the machine of what ``plan`` is asked; ``of_model`` is for ``find_subject``.

    Raises:
        ConfigError: If an argument makes no sense.
    """
    if num_micro_batches < 1 or world_size < 1:
        raise ConfigError(f"micro-batches ({num_micro_batches}) and processes ({world_size}) must be at least 1")
    if max_norm is not None and not max_norm > 0:
        raise ConfigError(
            f"norm of gradients {max_norm}: it must be a positive number; use --max-grad-norm 0 (None in Python) for "
            "no clipping"
        )
    found = arrange_machine(machine, world_size, device_memory, host_memory, host_cores, disk_memory)
    settings = {"dtype": dtype, **(settings or {})}
    for name in ("device_budget", "host_budget", "disk_budget", "disk_path"):
        if name in settings:
            tier = name.partition("_")[0]
            raise ConfigError(
                f"setting {name}: a plan takes the memory of the machine, so it cannot be given here; use "
                f"--{tier}-memory ({tier}_memory in Python) to say how much of it training may take"
            )
    PatrickStarConfig.from_any(settings)  # checks keys and values before anything takes time
    with _quiet():
        find_optimizer(optimizer)
        subject = find_subject(model, **of_model)
    times = time_operators(world_size) if machine == THIS else None
    return subject, TrainingSetup(found, num_micro_batches, world_size, optimizer, max_norm, settings, times)


def arrange_machine(
    machine: str | Machine,
    world_size: int,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    host_cores: int | None = None,
    disk_memory: int | str | None = None,
) -> Machine:
    """Finds a machine, and makes its memory what training may take; see ``plan``.

    Raises:
        ConfigError: If an argument makes no sense.
    """
    if machine == THIS:
        measured = measure_launched(world_size) if world_size > 1 else measure_machine(visit=seconds_of_a_visit)
        machine = dataclasses.replace(measured, name="this machine")
    found = find_machine(machine) if isinstance(machine, str) else machine
    found.check_processes(world_size)
    if host_cores is not None:
        if host_cores < 1:
            raise ConfigError(f"cores of the host: must be at least 1, got {host_cores}")
        found = found.with_cores(host_cores)
    device_nbytes = _share(device_memory, found.device_nbytes, DEVICE_SHARE, "device memory")
    host_nbytes = _share(host_memory, found.host_nbytes, HOST_SHARE, "host memory")
    disk_nbytes = found.disk_nbytes if disk_memory is None else parse_budget(disk_memory, "disk memory")
    return dataclasses.replace(found, device_nbytes=device_nbytes, host_nbytes=host_nbytes, disk_nbytes=disk_nbytes)


def time_operators(world_size: int) -> OperatorTimes:
    """Times operators of this machine as one of so many processes calls them."""
    if world_size == 1:
        return OperatorTimes()
    return OperatorTimes(num_threads=threads_of_each(world_size), num_competing=world_size - 1)


def _share(given: int | str | None, nbytes: int, share: float, name: str) -> int:
    return int(share * nbytes) if given is None else parse_budget(given, name)


def plan_and_simulate(subject: Subject, training: TrainingSetup) -> tuple[Plan, Simulation | None]:
    """Plans the training of a model that was found already; returns the step of the plan, too, if it fits."""
    return _planned(subject, training) or (_refusal(subject, training), None)


def plan_if_fits(subject: Subject, training: TrainingSetup) -> Plan | None:
    """Plans as ``plan_and_simulate`` does; ``None`` if it does not fit, without finding out by how much."""
    found = _planned(subject, training)
    return None if found is None else found[0]


def _planned(subject: Subject, training: TrainingSetup) -> tuple[Plan, Simulation] | None:
    left = training.machine.device_nbytes - training.beside_nbytes
    if left <= 0:
        return None
    machine = dataclasses.replace(training.machine, device_nbytes=left)
    try:
        with _explained(subject, training):
            simulation = simulate(_trained(subject, training), machine, _ops_of(subject, training))
    except BudgetError:
        return None
    plan = _plan_of(subject, training, simulation)
    return (plan, simulation) if plan.fits else None


def _plan_of(subject: Subject, given: TrainingSetup, simulation: Simulation) -> Plan:
    machine, owners = given.machine, simulation.device_owners
    if given.beside_nbytes:
        owners[BESIDE] = given.beside_nbytes
    on_device = TierUse(machine.device_nbytes, sum(owners.values()), owners, simulation.fullest_moment)
    on_host = TierUse(machine.host_nbytes, simulation.host_nbytes, simulation.host_owners)
    disk = simulation.disk_owners
    on_disk = {Tier.DISK.value: TierUse(machine.disk_nbytes, sum(disk.values()), disk)} if machine.disk_nbytes else {}
    is_short = on_device.missing_nbytes > 0 or on_host.missing_nbytes > 0
    return Plan(
        model=subject.name,
        task=subject.task,
        unit=subject.unit,
        machine=given.machine.name,
        num_parameters=simulation.num_all_parameters,
        num_trainable=simulation.num_parameters,
        batch_size=subject.batch_size,
        length=subject.length,
        num_micro_batches=given.num_micro_batches,
        world_size=given.world_size,
        settings=dict(given.settings),
        checkpointing=subject.checkpointing,
        tiers={Tier.DEVICE.value: on_device, Tier.HOST.value: on_host, **on_disk},
        chunks=None if is_short else _chunks(simulation),
        speed=None if is_short else _speed(subject, given, simulation),
        remarks=() if given.computes_in_type(given.machine) else (_NOT_COMPUTED.format(given.machine.name),),
        precision=simulation.precision,
    )


def _chunks(simulation: Simulation) -> Chunks:
    layout, loads, num = simulation.layout, simulation.loads, simulation.world_size
    sizes = num * len(layout.chunks), layout.chunk_numel, layout.utilisation
    nbytes, num_on_device = [load.nbytes for load in loads], num * sum(load.is_here for load in loads)
    return Chunks(*sizes, num_on_device, sum(nbytes), max(nbytes, default=0), simulation.survey.reasons)


def _speed(subject: Subject, given: TrainingSetup, simulation: Simulation) -> Speed:
    timeline = simulation.timeline
    updates_by = optimizer_name(given.optimizer)
    updated, loads = simulation.updated_nbytes, simulation.loads
    bounds = bounds_of(simulation.script, timeline, given.machine, updated, updates_by, loads)
    seconds = timeline.duration_ns / 1e9
    words = _WORDS if given.world_size == 1 else _WORDS | _WORDS_OF_SEVERAL
    return Speed(
        seconds,
        subject.num_tokens * given.num_micro_batches * given.world_size / seconds,
        bounds.binding,
        bounds.lower_ns / 1e9,
        None if given.max_norm is None else bounds.clipped_ns / 1e9,
        {words[lane]: busy / timeline.duration_ns for lane, busy in timeline.busy_ns().items() if lane in words},
        {words[lane]: chain / 1e9 for lane, chain in timeline.critical_ns().items() if lane in words},
        *simulation.moved_nbytes,
        simulation.sent_nbytes,
        simulation.least_activation_nbytes,
        simulation.start,
        simulation.disk_written_nbytes,
    )


_WORDS = {
    Lane.COMPUTE: "device",
    Lane.TO_DEVICE: "copies to the device",
    Lane.TO_HOST: "copies to the host",
    Lane.HOST: "host",
    Lane.HOST_WORK: "optimizer on the host",
    Lane.DISK: "disk",
}
_WORDS_OF_SEVERAL = {Lane.GATHERS: "gathers", Lane.REDUCTIONS: "reductions"}
"""What is called as in ``Bounds.binding``, and works where there are several processes alone."""


def _refusal(subject: Subject, given: TrainingSetup) -> Plan:
    """The plan of a training that does not fit: the least memory that is enough, to a percent; see ``least_budgets``.

    Raises:
        ConfigError: If no memory is enough.
    """
    machine, limit = given.machine, given.settings.get(_CHUNKS, "auto")
    limit = PLENTY_NBYTES if limit == "auto" else parse_budget(limit, _CHUNKS)
    there = {"device": machine.device_nbytes, _CHUNKS: limit, "host": machine.host_nbytes}

    def fits(budgets: Mapping[str, int]) -> Plan | None:
        """The plan, if need be with all chunks on the host."""
        larger = dataclasses.replace(machine, device_nbytes=budgets["device"], host_nbytes=budgets["host"])
        settings = {**given.settings, _CHUNKS: format_budget(budgets[_CHUNKS])}
        for more in ({}, {"placement": "host"}):
            other = dataclasses.replace(given, machine=larger, settings={**settings, **more})
            with contextlib.suppress(EngineError):  # steps do without plans where copies hardly have room
                found = plan_if_fits(subject, other)
                if found is not None:
                    return found
        return None

    found = least_budgets(there, fits)
    if found is None:
        raise ConfigError(
            f"batch of {subject.batch_size} x {subject.length}: a step takes more than "
            f"{format_nbytes(PLENTY_NBYTES)}, which cannot be planned; give a smaller batch size or length"
        )
    least, plan = found
    needs = {name: nbytes for name, nbytes in least.items() if nbytes > there[name]}
    there[Tier.DISK.value] = machine.disk_nbytes
    tiers = {
        name: dataclasses.replace(use, budget_nbytes=there[name], need_nbytes=needs.get(name, use.need_nbytes))
        for name, use in plan.tiers.items()
    }
    why = f"{_CHUNKS} is too small: it must be at least {name_budget(needs[_CHUNKS])}" if _CHUNKS in needs else None
    return dataclasses.replace(plan, settings=dict(given.settings), tiers=tiers, chunks=None, speed=None, shortage=why)


@contextlib.contextmanager
def _explained(subject: Subject, given: TrainingSetup) -> Iterator[None]:
    """Runs a model's code on tensors without values; an error in it becomes a ``ConfigError``."""
    attention = fused_attention() if given.machine.has_accelerator else contextlib.nullcontext()
    try:
        with _quiet(), attention, masks_of_batches(has_padding=subject.has_padding, is_packed=subject.is_packed):
            yield
    except Exception as error:  # what a model's code raises may be anything
        if isinstance(error, PatrickStarError) and not isinstance(error, TraceError):
            raise
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        is_adam = optimizer_name(given.optimizer) == ADAM
        whose = "its code fails" if is_adam else f"its code, or that of the optimizer '{given.optimizer}', fails"
        others = "--dtype" if is_adam else "--optimizer, --dtype"
        raise ConfigError(
            f"model '{subject.name}': it cannot be planned, because {whose} on tensors without values "
            f"({type(error).__name__}: {said}). Try another {others}, --task or length"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences what the model and the engine say of the training, which does not take place."""
    with contextlib.ExitStack() as stack, no_bars(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the model's code, about nothing that a plan could change
        stack.callback(transformers.logging.set_verbosity, transformers.logging.get_verbosity())
        transformers.logging.set_verbosity_error()
        for name, level in _LOGGERS.items():
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(level)
        yield


def model_data_nbytes(subject: Subject, given: TrainingSetup) -> tuple[int, int]:
    """Parameters of the model, and bytes of model data of one process; no step is simulated.

    Args:
        subject: What is trained.
        given: How.
    """
    machine = dataclasses.replace(given.machine, device_nbytes=PLENTY_NBYTES, host_nbytes=PLENTY_NBYTES)
    given = dataclasses.replace(given, settings={**given.settings, _CHUNKS: "auto"})
    with _explained(subject, given):
        return model_data(_trained(subject, given), machine)


def _settings_of_model(given: TrainingSetup) -> dict[str, Any]:
    """Settings that change what the model does, or its parameters; not what becomes of chunks."""
    return {name: value for name, value in given.settings.items() if name not in _OF_CHUNKS}


def _trained(subject: Subject, given: TrainingSetup) -> Trained:
    num, has_accelerator = given.num_micro_batches, given.machine.has_accelerator
    known_by = "numbers", _settings_of_model(given), num > 1, has_accelerator, given.optimizer
    make_optimizer = subject.find_optimizer(given.optimizer) or make_adamw
    trained = Trained(subject.make_model, make_optimizer, given.settings, num, given.max_norm, given.world_size)
    if type(subject) is not Subject:  # a script's optimizer is made over all parameters of the model, each time anew
        return trained
    return dataclasses.replace(trained, keep=functools.partial(subject.once, known_by))


def make_adamw(parameters: Any) -> torch.optim.Optimizer:
    """Makes the optimizer that is trained with if nothing else is said."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def _ops_of(subject: Subject, given: TrainingSetup) -> OpsOf:
    """What the model does in a micro-batch; kept for plans of other budgets and machines."""
    settings, num, has_accelerator = _settings_of_model(given), given.num_micro_batches, given.machine.has_accelerator
    micro_batch = MicroBatch(subject.make_model, subject.make_inputs, subject.compute_loss, settings, num)
    before: list[OpTrace] = []

    def find(looked_up: frozenset[str]) -> OpTrace:
        def make() -> OpTrace | None:
            setting = Setting(looked_up, has_accelerator, given.times)
            with without_modes(), FakeTensors():  # embeddings are elsewhere, and all else is as it was before
                return trace(micro_batch, setting, is_checked=not before, is_regular=bool(before))

        found = subject.once(("ops", settings, num > 1, has_accelerator, given.times, sorted(looked_up)), make)
        if found is None:
            raise EngineError(
                "what this model does depends on its data, or is something else each time; train a few steps instead "
                "and read engine.survey()"
            )
        before.append(found)
        return found

    return find
