"""Searches for the largest training that fits a machine, or for the cheapest machine that it fits."""

import dataclasses
import enum
import json
from collections.abc import Callable, Iterator
from typing import Any

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.machine import BY_PRICE, MACHINES
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.planner.plan import Plan
from hf_patrickstar.planner.planning import ACTIVATIONS, Circumstances, arrange_machine, plan_if_fits
from hf_patrickstar.planner.subject import Subject, most_tokens, with_batch, with_layers

_MOST_BATCH = 100_000
_MOST_LAYERS = 4_000
LENGTH_STEP = 64
"""Sequence lengths are searched in steps of so many tokens."""
_MOST_LENGTH = 1_000_000


class Goal(enum.StrEnum):
    """What is searched for: the value of ``--search``."""

    MAX_BATCH = "max-batch"
    MAX_LENGTH = "max-seq-len"
    MAX_MODEL = "max-model"
    CHEAPEST = "cheapest-machine"


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The result of a search.

    Attributes:
        goal: What was searched for.
        answer: Sequences of a micro-batch, tokens of a sequence, layers of the model, or the name of a machine;
            ``None`` if nothing fits.
        plan: Its plan, which fits; ``None`` if nothing does.
        refused: The next one, for which there was no plan: one more sequence, 64 tokens more, one more layer, or a
            cheaper machine; ``None`` if nothing was refused.
        num_plans: How many plans were tried.
        subject: The model and its batches then.
        circumstances: How it is trained then.
    """

    goal: Goal
    answer: int | str | None
    plan: Plan | None
    refused: int | str | None
    num_plans: int
    subject: Subject | None = None
    circumstances: Circumstances | None = None

    def to_json(self) -> str:
        """The result as JSON text, without subject and circumstances."""
        values = {"goal": self.goal.value, "answer": self.answer, "refused": self.refused, "num_plans": self.num_plans}
        return json.dumps({**values, "plan": None if self.plan is None else json.loads(self.plan.to_json())}, indent=2)


Progress = Callable[[str], None]


def search(goal: Goal | str, subject: Subject, given: Circumstances, progress: Progress = lambda text: None) -> Found:
    """Searches for the largest batch, sequence or model that fits, or for the cheapest machine.

    Every answer has a plan of its own, and the next larger one was refused. A larger model has more layers and is
    otherwise the same.

    Args:
        goal: What to search for.
        subject: The model and its batches.
        given: How it is trained.
        progress: Told of every plan before it is made.

    Raises:
        ConfigError: If the goal is unknown, or the model has no number of layers.
    """
    try:
        goal = Goal(goal)
    except ValueError:
        known = ", ".join(known.value for known in Goal)
        raise ConfigError(f"search '{goal}': it is not known; known are {known}") from None
    if goal is Goal.CHEAPEST:
        return _cheapest(subject, given, progress)
    changed, first, step, most = _scale(goal, subject)

    def try_out(value: int) -> Plan | None:
        progress(f"{_NAMES[goal]} {value * step}")
        return plan_if_fits(changed(value * step), given)

    value, plan, num = _largest(try_out, first, most, limiting=_LIMITING[goal])
    refused = None if value >= most else (value + 1) * step
    if plan is None:
        return Found(goal, None, None, refused, num)
    return Found(goal, value * step, plan, refused, num, changed(value * step), given)


_NAMES = {Goal.MAX_BATCH: "batch of", Goal.MAX_LENGTH: "length", Goal.MAX_MODEL: "layers:"}
_LIMITING = {Goal.MAX_BATCH: Tier.DEVICE, Goal.MAX_LENGTH: Tier.DEVICE, Goal.MAX_MODEL: Tier.HOST}
"""The tier whose bytes grow with what is searched for: those of activations, or those of model data."""


def _scale(goal: Goal, subject: Subject) -> tuple[Callable[[int], Subject], int, int, int]:
    """How a subject is made larger; the first size to try, in steps; the size of a step; the most steps."""
    if goal is Goal.MAX_BATCH:
        return lambda size: with_batch(subject, size, subject.length), subject.batch_size, 1, _MOST_BATCH
    if goal is Goal.MAX_LENGTH:
        most = max(min(most_tokens(subject.config) or _MOST_LENGTH, _MOST_LENGTH) // LENGTH_STEP, 1)
        first = min(max(subject.length // LENGTH_STEP, 1), most)
        return lambda length: with_batch(subject, subject.batch_size, length), first, LENGTH_STEP, most
    layers = getattr(subject.config, "num_hidden_layers", None)
    if not isinstance(layers, int) or layers < 1:
        raise ConfigError(f"search 'max-model': the configuration of '{subject.name}' has no num_hidden_layers")
    return lambda num: with_layers(subject, num), layers, 1, _MOST_LAYERS


def _largest(
    try_out: Callable[[int], Plan | None], first: int, most: int, *, limiting: Tier
) -> tuple[int, Plan | None, int]:
    """The largest number that has a plan, that plan, and how many were tried; 0 if none has.

    Args:
        try_out: Makes the plan of a number, or returns ``None``.
        first: What to try first.
        most: The largest number.
        limiting: The tier whose bytes grow about as the number does: they tell what to try next.
    """
    low, high, best, num = 0, most + 1, None, 0
    probe = min(first, most)
    while high - low > 1:
        plan = try_out(probe)
        num += 1
        if plan is None:
            high, probe = probe, (low + probe) // 2
        else:
            low, best = probe, plan
            probe = (low + high) // 2 if high <= most else min(_guess(plan, limiting, low), most)
    return low, best, num


def _guess(plan: Plan, tier: Tier, number: int) -> int:
    """A number that is likely to be too large by a little, at least a half more and at most eight times as many."""
    use = plan.tier(tier)
    growing = use.owners.get(ACTIVATIONS, 0) if tier is Tier.DEVICE else use.need_nbytes
    guess = number * use.budget_nbytes // max(growing, 1)
    return max(min(guess, 8 * number), number + number // 2 + 1)


def _cheapest(subject: Subject, given: Circumstances, progress: Progress) -> Found:
    refused: str | None = None
    for num, name in enumerate(BY_PRICE, 1):
        progress(f"machine {name}")
        machine = MACHINES[name]
        world_size = max(given.world_size, machine.num_devices)
        if world_size > machine.num_devices:
            continue
        there = dataclasses.replace(
            given, machine=arrange_machine(machine, world_size, None, None), world_size=world_size
        )
        plan = plan_if_fits(subject, there)
        if plan is not None:
            return Found(Goal.CHEAPEST, name, plan, refused, num, subject, there)
        refused = name
    return Found(Goal.CHEAPEST, None, None, refused, len(BY_PRICE))


def what_fits(subject: Subject, given: Circumstances, progress: Progress = lambda text: None) -> Iterator[Found]:
    """The largest batch and the largest sequence that fit where the ones that were asked for do not.

    Args:
        subject: The model and its batches, which do not fit.
        given: How it is trained.
        progress: See ``search``.
    """
    for goal, small in ((Goal.MAX_BATCH, _smaller_batch), (Goal.MAX_LENGTH, _shorter)):
        smaller: Any = small(subject)
        if smaller is not None:
            found = search(goal, smaller, given, progress)
            if found.plan is not None:
                yield found


def _smaller_batch(subject: Subject) -> Subject | None:
    return with_batch(subject, subject.batch_size // 2, subject.length) if subject.batch_size > 1 else None


def _shorter(subject: Subject) -> Subject | None:
    return with_batch(subject, subject.batch_size, subject.length // 2) if subject.length > LENGTH_STEP else None
