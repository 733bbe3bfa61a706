"""What to change about a plan: each change is planned, and named with what it would bring."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from hf_patrickstar.planner.plan import Plan
from hf_patrickstar.planner.planning import Circumstances, plan_subject
from hf_patrickstar.planner.subject import Subject, with_batch

MOST = 3
_WORTH = 1.02
"""A change that makes a step less than 2 % faster is not named."""


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
    if plan.fits:
        yield Change(
            f"twice the batch (--batch-size {2 * batch})", with_batch(subject, 2 * batch, subject.length), given
        )
        more = dataclasses.replace(given, num_micro_batches=4 * num)
        yield Change(f"four times as many micro-batches for each update (--accumulation {4 * num})", subject, more)
    elif batch > 1:
        text = f"the same tokens in smaller micro-batches (--batch-size 1 --accumulation {batch * num})"
        small = with_batch(dataclasses.replace(subject, checkpointing=True), 1, subject.length)
        yield Change(
            f"{text}, computed again in backward", small, dataclasses.replace(given, num_micro_batches=batch * num)
        )
