"""What to change about a plan: each change is planned, and named with what it would bring."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from hf_patrickstar.errors import ConfigError, EngineError
from hf_patrickstar.machine import find_machine
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.planner.adapters import has_peft
from hf_patrickstar.planner.plan import Plan, TriedChange
from hf_patrickstar.planner.planning import TrainingSetup, arrange_machine, plan_if_fits
from hf_patrickstar.planner.search import Goal, Progress, search_below
from hf_patrickstar.planner.subject import Subject, with_batch
from hf_patrickstar.units import format_nbytes

MOST = 3
_MOST_PARTS = 16
"""Micro-batches that a batch which does not fit is divided into, at most."""
_RANK = 16
_WORTH = 1.02
"""A change that makes a step less than 2 % faster is not named."""


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One change of how a model is trained.

    Attributes:
        text: What to do.
        subject: The model and its batches then.
        training: How it is trained then.
    """

    text: str
    subject: Subject
    training: TrainingSetup


def advise(
    subject: Subject,
    training: TrainingSetup,
    plan: Plan,
    progress: Callable[[list[Change]], Iterable[Change]] = lambda changes: changes,
) -> tuple[TriedChange, ...]:
    """Plans changes and returns those that are worth most, the best first.

    Args:
        subject: The model and its batches.
        training: How it is trained.
        plan: Its plan.
        progress: Shows that the changes are being planned.
    """
    found = []
    for change in progress(list(changes(subject, training, plan))):
        try:
            other = plan_if_fits(change.subject, change.training)
        except (ConfigError, EngineError):  # it is not for this model, or no step follows its plan
            continue
        if other is None or other.speed is None:
            continue
        gain = None if plan.speed is None else other.speed.tokens_per_s / plan.speed.tokens_per_s
        if gain is None or gain > _WORTH:
            found.append(TriedChange(change.text, other.speed.tokens_per_s, gain))
    return tuple(sorted(found, key=lambda tried: -tried.tokens_per_s)[:MOST])


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
    found = {}
    if plan.batch_size > 1:
        found["batch_size"] = _number(search_below(Goal.MAX_BATCH, subject, given, progress).answer)
    if plan.length > 1 and subject.task != "image-classification":
        found["length"] = _number(search_below(Goal.MAX_LENGTH, subject, given, progress).answer)
    return found or None


def _number(answer: int | str | None) -> int | None:
    assert not isinstance(answer, str)
    return answer


def changes(subject: Subject, given: TrainingSetup, plan: Plan) -> Iterator[Change]:
    """The changes to try.

    Args:
        subject: The model and its batches.
        given: How it is trained.
        plan: Its plan.
    """
    yield from _of_activations(subject, given, plan)
    yield from _of_batches(subject, given, plan)
    yield from _of_budgets(subject, given)
    num = given.machine.num_devices
    if given.world_size < num:
        more = dataclasses.replace(given, world_size=num)
        yield Change(f"a process on every device (--processes {num}), of the same batch each", subject, more)
    if subject.can_have_adapters and has_peft():
        text = f"train adapters over a frozen model, which trains other weights (--lora r={_RANK},targets=all-linear)"
        adapters = {"peft_type": "LORA", "r": _RANK, "target_modules": "all-linear"}
        yield Change(text, dataclasses.replace(subject, adapters=adapters), given)


def _of_activations(subject: Subject, given: TrainingSetup, plan: Plan) -> Iterator[Change]:
    if not subject.checkpointing:
        again, double = dataclasses.replace(subject, checkpointing=True), 2 * subject.batch_size
        yield Change("compute activations again in backward (--gradient-checkpointing)", again, given)
        if plan.fits:
            text = f"the same with a batch of {double} (--gradient-checkpointing --batch-size {double})"
            yield Change(text, with_batch(again, double, subject.length), given)
    elif plan.fits:
        kept = dataclasses.replace(subject, checkpointing=False)
        yield Change("keep activations (without --gradient-checkpointing)", kept, given)


def _of_batches(subject: Subject, given: TrainingSetup, plan: Plan) -> Iterator[Change]:
    batch, num = subject.batch_size, given.num_micro_batches
    if plan.fits:
        twice = with_batch(subject, 2 * batch, subject.length)
        yield Change(f"twice the batch (--batch-size {2 * batch})", twice, given)
        more = dataclasses.replace(given, num_micro_batches=4 * num)
        yield Change(f"four times as many micro-batches for each update (--accumulation {4 * num})", subject, more)
    elif batch > 1:
        size, parts = _divided(batch)
        words = f"--gradient-checkpointing --batch-size {size} --accumulation {parts * num}"
        tokens = "the same tokens"
        if size * parts != batch:
            tokens = f"about {tokens} ({size * parts} sequences for {batch})"
        text = f"{tokens} in smaller micro-batches ({words}), computed again in backward"
        small = with_batch(dataclasses.replace(subject, checkpointing=True), size, subject.length)
        yield Change(text, small, dataclasses.replace(given, num_micro_batches=parts * num))


def _divided(batch: int) -> tuple[int, int]:
    """The size of equal parts of a batch, and how many; with a little more in all where no other parts are small."""
    most = min(batch, _MOST_PARTS)
    parts = max(number for number in range(1, most + 1) if batch % number == 0)
    if 2 * parts >= most:
        return batch // parts, parts
    size = -(-batch // most)
    return size, -(-batch // size)


def _of_budgets(subject: Subject, given: TrainingSetup) -> Iterator[Change]:
    """All that a known machine has, where less was given."""
    machine = given.machine
    try:
        whole = arrange_machine(find_machine(machine.name), given.world_size, None, None)
    except ConfigError:
        return
    for field, option in (("device_nbytes", "--device-memory"), ("host_nbytes", "--host-memory")):
        there = getattr(whole, field)
        if getattr(machine, field) < there:
            larger = dataclasses.replace(given, machine=dataclasses.replace(machine, **{field: there}))
            yield Change(f"take all that the machine has (without {option}: {format_nbytes(there)})", subject, larger)
