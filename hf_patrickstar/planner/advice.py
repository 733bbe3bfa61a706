"""What to change about a plan: each change is planned, and named with what it would bring."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.planner.adapters import parse_lora
from hf_patrickstar.planner.plan import Plan
from hf_patrickstar.planner.planning import Circumstances, plan_subject
from hf_patrickstar.planner.subject import Subject, with_batch

MOST = 3
_WORTH = 1.02
"""A change that makes a step less than 2 % faster is not named."""


_MOST_PARTS = 8
"""A micro-batch that does not fit is cut into as many: each of them takes time to plan."""


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One change of how a model is trained.

    Attributes:
        text: What to do.
        subject: The model and its batches then.
        circumstances: How it is trained then.
    """

    text: str
    subject: Subject
    circumstances: Circumstances


@dataclasses.dataclass(frozen=True, slots=True)
class Advice:
    """A change that was planned.

    Attributes:
        text: What to do.
        plan: The plan then.
        gain: Tokens per second then, as a multiple of what they are; infinite if it did not fit before.
    """

    text: str
    plan: Plan
    gain: float


def advise(
    subject: Subject,
    circumstances: Circumstances,
    plan: Plan,
    progress: Callable[[list[Change]], Iterable[Change]] = lambda changes: changes,
) -> list[Advice]:
    """Plans changes and returns those that are worth most, the best first.

    Args:
        subject: The model and its batches.
        circumstances: How it is trained.
        plan: Its plan.
        progress: Shows that the changes are being planned.
    """
    found = []
    for change in progress(list(changes(subject, circumstances, plan))):
        other = plan_subject(change.subject, change.circumstances)
        if other.speed is None:
            continue
        before = 0.0 if plan.speed is None else plan.speed.tokens_per_s
        gain = other.speed.tokens_per_s / before if before else float("inf")
        if gain > _WORTH:
            found.append(Advice(change.text, other, gain))
    return sorted(found, key=lambda advice: (-advice.gain, -_tokens_per_s(advice.plan)))[:MOST]


def _tokens_per_s(plan: Plan) -> float:
    return plan.speed.tokens_per_s if plan.speed is not None else 0.0


def changes(subject: Subject, given: Circumstances, plan: Plan) -> Iterator[Change]:
    """The changes to try.

    Args:
        subject: The model and its batches.
        given: How it is trained.
        plan: Its plan.
    """
    batch, num = subject.batch_size, given.num_micro_batches
    if not subject.checkpointing:
        again = dataclasses.replace(subject, checkpointing=True)
        yield Change("compute activations again in backward (--gradient-checkpointing)", again, given)
        if plan.fits:
            text = f"the same with a batch of {2 * batch} (--gradient-checkpointing --batch-size {2 * batch})"
            yield Change(text, with_batch(again, 2 * batch, subject.length), given)
    elif plan.fits:
        yield Change(
            "keep activations (without --gradient-checkpointing)",
            dataclasses.replace(subject, checkpointing=False),
            given,
        )
    if subject.adapter is None and type(subject) is Subject:  # a script says itself what is trained
        with contextlib.suppress(ConfigError):  # without PEFT nobody can
            adapter = parse_lora("")
            yield Change(
                "train adapters in place of the model (--lora r=16)",
                dataclasses.replace(subject, adapter=adapter),
                given,
            )
    if given.world_size < given.machine.num_devices:
        num_devices = given.machine.num_devices
        yield Change(
            f"a process on every device (--processes {num_devices})",
            subject,
            dataclasses.replace(given, world_size=num_devices),
        )
    if plan.fits:
        yield Change(
            f"twice the batch (--batch-size {2 * batch})", with_batch(subject, 2 * batch, subject.length), given
        )
        more = dataclasses.replace(given, num_micro_batches=4 * num)
        yield Change(f"four times as many micro-batches for each update (--accumulation {4 * num})", subject, more)
    elif batch > 1:
        parts = min(batch, _MOST_PARTS)
        size, num_micro_batches = -(-batch // parts), parts * num
        text = f"the same tokens in smaller micro-batches (--batch-size {size} --accumulation {num_micro_batches})"
        small = with_batch(dataclasses.replace(subject, checkpointing=True), size, subject.length)
        yield Change(
            f"{text}, computed again in backward",
            small,
            dataclasses.replace(given, num_micro_batches=num_micro_batches),
        )
