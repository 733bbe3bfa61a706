"""What to change about a plan: each change is planned, and named with what it would bring."""

import dataclasses
import functools
import importlib.util
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

from hf_patrickstar.errors import ConfigError, EngineError
from hf_patrickstar.machine import find_machine
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.model.chunked_loss import LOGIT_NBYTES
from hf_patrickstar.planner.adapters import has_peft
from hf_patrickstar.planner.optimizers import optimizer_name
from hf_patrickstar.planner.planning import TrainingSetup, arrange_machine, plan_if_fits
from hf_patrickstar.planner.search import Goal, Progress, search_below
from hf_patrickstar.planner.subject import Subject
from hf_patrickstar.planner.training_plan import Plan, TriedChange
from hf_patrickstar.schedule.bounds import ADAM
from hf_patrickstar.setup.needs import PLENTY_NBYTES
from hf_patrickstar.units import GIB, MIB, describe_disk, format_nbytes

MOST = 3
_MOST_PARTS = 16
"""Micro-batches that a batch which does not fit is divided into, at most."""
_RANK = 16
_WORTH = 1.02
"""A change that makes a step less than 2 % faster is not named."""


Setup = tuple[Subject, TrainingSetup]
"""What is trained, and how."""


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One change of how a model is trained.

    Attributes:
        text: What to do.
        option: The option of the command that does it.
        apply: What is trained, and how, after it.
    """

    text: str
    option: str
    apply: Callable[[Setup], Setup]

    def __add__(self, other: "Change") -> "Change":
        """Both changes, one after the other."""
        text, option = f"{self.text}, and {other.text}", f"{self.option} {other.option}"
        return Change(text, option, lambda setup: other.apply(self.apply(setup)))


def advise(subject: Subject, training: TrainingSetup, plan: Plan, progress: Progress = lambda text: None) -> Plan:
    """Plans changes, and returns the plan with those that are worth most, the best first.

    Where a training does not fit, pairs of changes are tried if no single one makes it fit, and more memory is tried.

    Args:
        subject: The model and its batches.
        training: How it is trained.
        plan: Its plan.
        progress: Called with every change before it is planned.
    """
    setup = subject, training
    found: list[TriedChange] = []
    failed: list[str] = []

    def tried(options: list[Change]) -> bool:
        for change in options:
            progress(change.option)
            try:
                other = plan_if_fits(*change.apply(setup))
            except (ConfigError, EngineError):  # it is not for this model, or no step follows its plan
                continue
            if other is None or other.speed is None:
                failed.append(change.option)
                continue
            gain = None if plan.speed is None else other.speed.tokens_per_s / plan.speed.tokens_per_s
            if gain is None or gain > _WORTH:
                found.append(TriedChange(f"{change.text} ({change.option})", other.speed.tokens_per_s, gain))
        return bool(found)

    single = list(changes(subject, training, plan))
    if not tried(single) and not plan.fits:
        tried([one + other for one, other in itertools.combinations(single, 2)])
    if not plan.fits:
        tried([*_on_disk(setup, plan), *_more_memory(plan)])
    best = sorted(found, key=lambda change: -change.tokens_per_s)[:MOST]
    return dataclasses.replace(plan, changes=tuple(best), failed=() if plan.fits else tuple(failed))


def largest_that_fit(
    plan: Plan, subject: Subject, given: TrainingSetup, progress: Progress = lambda text: None
) -> dict[str, int | None] | None:
    """The largest batch and the longest sequence that fit, where a plan does not; see ``Plan.largest``.

    Args:
        plan: The plan.
        subject: The model and its batches.
        given: How it is trained.
        progress: Called with every plan before it is made.
    """
    if plan.fits or plan.tier(Tier.HOST).missing_nbytes or plan.shortage is not None:
        return None  # smaller batches need as much of the host, and chunks as much of the device
    found: dict[str, Any] = {}
    if plan.batch_size > 1:
        found["batch_size"] = search_below(Goal.MAX_BATCH, subject, given, progress).answer
    if plan.length > 1 and subject.task != "image-classification":
        found["length"] = search_below(Goal.MAX_LENGTH, subject, given, progress).answer
    return found or None


def changes(subject: Subject, given: TrainingSetup, plan: Plan) -> Iterator[Change]:
    """The changes to try.

    Args:
        subject: The model and its batches.
        given: How it is trained.
        plan: Its plan.
    """
    batch, num = subject.batch_size, given.num_micro_batches
    recomputes = Change("recompute activations", "--gradient-checkpointing", _subject(checkpointing=True))
    if not subject.checkpointing:
        yield recomputes
        if plan.fits:
            yield recomputes + _with_batch(2 * batch)
    elif plan.fits:
        yield Change("keep all activations", "without --gradient-checkpointing", _subject(checkpointing=False))
    if given.settings.get("activation_offload") is False:
        on = _training(settings={**given.settings, "activation_offload": "auto"})
        yield Change("let activations leave the device for the host", "--set activation_offload=auto", on)
    if _has_large_logits(subject, given):
        in_chunks = _training(settings={**given.settings, "chunked_loss": True})
        chunks = Change("compute the loss in chunks of tokens", "--set chunked_loss=true", in_chunks)
        yield chunks
        if plan.fits:
            yield chunks + _with_batch(2 * batch)
    if plan.fits:
        yield _with_batch(2 * batch)
        yield _accumulating(4 * num)
    elif batch > 1:
        size, parts = _divided(batch)
        yield _with_batch(size) + _accumulating(parts * num)
    yield from _of_budgets(given)
    if not plan.fits and subject.can_have_adapters:
        yield from _of_states(given)
    num_devices = given.machine.num_devices
    if given.world_size < num_devices:
        text = f"train on all {num_devices} devices, with the same batch on each"
        yield Change(text, f"--processes {num_devices}", _training(world_size=num_devices))
    if subject.can_have_adapters and has_peft():
        adapters = {"peft_type": "LORA", "r": _RANK, "target_modules": "all-linear"}
        text = "train LoRA adapters over the frozen model instead of its own weights"
        yield Change(text, f"--lora r={_RANK},targets=all-linear", _subject(adapters=adapters))


def _of_states(given: TrainingSetup) -> Iterator[Change]:
    """Fewer bytes of optimizer states."""
    if optimizer_name(given.optimizer) != ADAM or given.settings.get("state_dtype", "auto") != "auto":
        return
    narrow = _training(settings={**given.settings, "state_dtype": "bf16"})
    yield Change("keep the states of Adam in bf16", "--set state_dtype=bf16", narrow)
    if importlib.util.find_spec("bitsandbytes") is not None:
        yield Change("keep the states of Adam in 8 bits", "--optimizer adamw_8bit", _training(optimizer="adamw_8bit"))


def _has_large_logits(subject: Subject, given: TrainingSetup) -> bool:
    """Whether logits are whole, and take a good part of the device."""
    config: Any = subject.config
    words = 0 if config is None else getattr(config.get_text_config(), "vocab_size", None) or 0
    nbytes = LOGIT_NBYTES * words * subject.num_tokens
    return given.settings.get("chunked_loss") is not True and nbytes > given.machine.device_nbytes / 16


def _subject(**fields: Any) -> Callable[[Setup], Setup]:
    return lambda setup: (dataclasses.replace(setup[0], **fields), setup[1])


def _training(**fields: Any) -> Callable[[Setup], Setup]:
    return lambda setup: (setup[0], dataclasses.replace(setup[1], **fields))


def _with_batch(size: int) -> Change:
    return Change(f"use micro-batches of {size}", f"--batch-size {size}", _subject(batch_size=size))


def _accumulating(num: int) -> Change:
    return Change(f"accumulate {num} micro-batches per step", f"--accumulation {num}", _training(num_micro_batches=num))


def _with_memory(field: str, option: str, nbytes: int, text: str) -> Change:
    def apply(setup: Setup) -> Setup:
        changed: dict[str, Any] = {field: nbytes}
        machine = dataclasses.replace(setup[1].machine, **changed)
        return setup[0], dataclasses.replace(setup[1], machine=machine)

    return Change(text, option, apply)


_MEMORY = (("device", "device_nbytes", "--device-memory"), ("host", "host_nbytes", "--host-memory"))


def _more_memory(plan: Plan) -> Iterator[Change]:
    """The memory that the plan says is enough, rounded up."""
    short = []
    for tier, field, option in _MEMORY:
        use = plan.tiers[tier]
        if use.missing_nbytes:
            unit = GIB if use.need_nbytes >= 4 * GIB else MIB
            size = -(-use.need_nbytes // unit)
            words = f"{option} {size}{'GiB' if unit == GIB else 'MiB'}"
            short.append(_with_memory(field, words, size * unit, f"more memory on the {tier}"))
    if short and plan.shortage is None:
        yield functools.reduce(operator.add, short)


def _on_disk(setup: Setup, plan: Plan) -> Iterator[Change]:
    """Masters and states on a drive, as many as the host has no room for."""
    subject, training = setup
    if not plan.tier(Tier.HOST).missing_nbytes or training.machine.disk_nbytes:
        return

    one = dataclasses.replace(training, machine=dataclasses.replace(training.machine, disk_nbytes=PLENTY_NBYTES))
    more = dataclasses.replace(one, num_micro_batches=_MOST_PARTS * one.num_micro_batches)
    found, longer = plan_if_fits(subject, one), plan_if_fits(subject, more)
    if found is not None and found.speed is not None:
        nbytes = found.tier(Tier.DISK).need_nbytes
        size, text = -(-nbytes // GIB), describe_disk(nbytes, one.machine.disk_bandwidth, found.speed.seconds)
        if longer is not None and longer.speed is not None:
            share = 100 * longer.speed.busy["disk"]
            text += f"; accumulate {more.num_micro_batches} micro-batches and it is busy {share:.0f} % of the time"
        yield _with_memory("disk_nbytes", f"--disk-memory {size}GiB", size * GIB, text)


def _divided(batch: int) -> tuple[int, int]:
    """The size of equal parts of a batch, and how many; with a little more in all where no other parts are small."""
    most = min(batch, _MOST_PARTS)
    parts = max(number for number in range(1, most + 1) if batch % number == 0)
    if 2 * parts >= most:
        return batch // parts, parts
    size = -(-batch // most)
    return size, -(-batch // size)


def _of_budgets(given: TrainingSetup) -> Iterator[Change]:
    """All that a known machine has, where less was given."""
    machine = given.machine
    try:
        whole = arrange_machine(find_machine(machine.name), given.world_size)
    except ConfigError:
        return
    for tier, field, option in _MEMORY:
        there = getattr(whole, field)
        if getattr(machine, field) < there:
            yield _with_memory(field, f"without {option}", there, f"all memory of the {tier}, {format_nbytes(there)}")
